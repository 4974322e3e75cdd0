"""A compiled case beside the work of its mask: what really runs, how often, and how long a transfer takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ringflash.plan import links, load
from ringflash.plan.case import Case, Facts
from ringflash.plan.load import Load
from ringflash.plan.program import Place, Transfer


@dataclass(frozen=True)
class Reading:
    """A case, its facts, and the work of its mask; what follows from the three."""

    case: Case
    facts: Facts
    load: Load

    @property
    def shards(self) -> int:
        """Devices over which a sequence lies."""
        return self.facts.shards

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Hops up and down that the mask needs."""
        case = self.case
        return load.reach(load.mask_of(case.mask), case.layout, case.seq_len, self.shards)

    @cached_property
    def near(self) -> bool:
        """Whether the ring goes only as far as some query sees, where its program leaves that open."""
        return 2 * sum(self.reach) < self.shards

    @cached_property
    def ways(self) -> dict[str, int]:
        """Of each loop with transfers whose turns the program leaves open: 0 for up the ring, 1 for down.

        It is that of the trip: a loop that only brings dk and dv home, and no tokens, goes the other way.
        """
        tokens = min((x.bytes for x in self.facts.program.transfers if x.pairs), default=0)
        up: dict[str, bool] = {}
        outward: set[str] = set()
        for one in self.facts.program.transfers:
            if one.place.trips is None and one.pairs:
                loop = one.place.loops[-1]
                up[loop] = goes_up(one.pairs, self.shards)
                outward |= {loop} if one.bytes == tokens else set()
        return {loop: int((loop in outward) != up[loop]) for loop in up}

    @cached_property
    def taken(self) -> dict[str, int]:
        """Of each conditional that holds transfers, the branch that is taken; -1 for one without any.

        Of two branches, loops whose turns are not known before they run belong to the way that goes only as
        far as needed. A single one is a way that is gone if any query needs it.
        """
        inside: dict[str, dict[int, set[str]]] = {}
        for one in self.facts.program.transfers:
            for name, branch in one.place.branches:
                loops = inside.setdefault(name, {}).setdefault(branch, set())
                if one.place.trips is None:
                    loops.add(one.place.loops[-1])
        found = {}
        for name, branches in inside.items():
            if len(branches) > 1:
                fit = [branch for branch, loops in branches.items() if bool(loops) == self.near]
                found[name] = min(fit or branches)
            else:
                ((branch, loops),) = branches.items()
                idle = loops and not any(self.turns.get(loop, 1) for loop in loops)
                found[name] = -1 if idle else branch
        return found

    @cached_property
    def turns(self) -> dict[str, int]:
        """Of each loop with transfers whose turns the program leaves open: those that the mask needs."""
        return {loop: self.reach[way] for loop, way in self.ways.items()}

    @cached_property
    def only(self) -> tuple[int, int] | None:
        """Hops up and down of a ring that goes only as far as needed, perhaps none; None: it goes all the
        way, or there is no ring."""
        transfers = self.facts.program.transfers
        found = [x for x in transfers if x.pairs and x.place.trips is None]
        # Of two devices there is no other way, whatever `near` says.
        taken = found and (self.near or any(self.runs(x.place) for x in found))
        return self.reach if taken else None

    def runs(self, place: Place) -> int:
        """How often an instruction runs."""
        if any(self.taken.get(name, branch) != branch for name, branch in place.branches):
            return 0
        if place.trips is not None:
            return place.trips
        return self.turns.get(place.loops[-1], max(self.reach))

    def seconds(self, one: Transfer) -> float:
        """One execution of a collective."""
        generation = self.case.generation
        if one.pairs:
            if any(a // self.shards != b // self.shards for a, b in one.pairs):
                return links.dcn_seconds(one.bytes)
            taken = max(1, self.facts.hop_links or 1) * stride(one.pairs, self.shards)
            return links.hop_seconds(generation, one.bytes, taken)
        return collective_seconds(one, generation, self.case.topology)


def collective_seconds(one: Transfer, generation: str, topology: str) -> float:
    """One execution of a collective within a slice; a group smaller than it is taken to lie in a line."""
    shape, n = links.shape_of(topology), one.group
    if one.pairs:
        return links.hop_seconds(generation, one.bytes)
    if n < links.chips(topology) * links.LINKS[generation].devices:
        shape = (n,)
    if "all-to-all" in one.kind:
        return links.exchange_seconds(generation, one.bytes, shape)
    times = {"all-gather": (n - 1) / n, "all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
    return links.gather_seconds(generation, times.get(one.kind, 1) * one.bytes, shape)


def stride(pairs: Iterable[tuple[int, int]], shards: int) -> int:
    """How many devices on a permute sends, the shorter way round: a ring beside Ulysses passes some over.

    It is taken to go through those, though on a torus there may be a shorter way.
    """
    ahead = [(b - a) % shards for a, b in pairs]
    return max(min(n, shards - n) for n in ahead)


def goes_up(pairs: Iterable[tuple[int, int]], shards: int) -> bool:
    """Whether a permute sends to the next device of the ring, not to the one before."""
    ahead = [(b - a) % shards for a, b in pairs]
    return 2 * sum(ahead) <= shards * len(ahead)


def reading_of(case: Case, facts: Facts) -> Reading:
    """With the work of the case's mask over its shards."""
    mask = load.mask_of(case.mask)
    return Reading(case, facts, load.load(mask, case.layout, case.seq_len, facts.shards))
