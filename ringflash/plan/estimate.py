"""How long attention takes on a slice, from what its compiled program holds: all times here are estimates.

kernel     cycles a tile, from the schedules of `bench kernel`, times the tiles that the mask leaves to a
           device, over the clock: no fill and drain, no waiting for HBM.
transfer   bytes over the rate of the links (`links`): no start-up.
a hop      as long as the slowest device's kernel, or as its transfers where these take longer: neighbours
           wait for each other. Transfers in the two directions of the ring go at the same time, others
           one after the other. Transfers without a kernel inside are added whole.
others     what XLA computes and copies between the kernels: the bytes that it reads and writes, at most, at
           the full rate of HBM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringflash.attention.dispatch import sizes
from ringflash.attention.kernels.mosaic import tiles
from ringflash.plan import rivals
from ringflash.plan.case import OURS, Case
from ringflash.plan.generations import GENERATIONS
from ringflash.plan.program import Transfer
from ringflash.plan.reading import Reading, goes_up

PASSES = ("forward", "backward")
LEAST = (
    2**16
)  # bytes: a smaller exchange, of spans or bounds, takes next to nothing; a permute always counts


@dataclass(frozen=True)
class Estimate:
    """One pass; seconds, and bytes that one device sends or holds.

    hops: how often kernels take keys that came round a ring; without a ring, collectives.
    hop_bytes, hop_seconds: what one device transfers at each, in all directions, and for how long.
    hop_kernel_seconds: of the kernels at one hop, of the slowest device, in the mean.
    kernel_seconds: of all kernels.  hidden, transfers: executions with a kernel between start and done,
    and all.  exposed_seconds: of transfers, not under a kernel or longer than it.
    """

    name: str
    hops: int
    hop_bytes: int
    hop_seconds: float
    hop_kernel_seconds: float
    kernel_seconds: float
    transfer_seconds: float
    hidden: int
    transfers: int
    exposed_seconds: float
    other_seconds: float

    @property
    def total_seconds(self) -> float:
        """Of the pass."""
        return self.kernel_seconds + self.exposed_seconds + self.other_seconds


def estimate(reading: Reading, name: str) -> Estimate:
    """Of the pass "forward" or "backward"; what needs cycles a tile is NaN where these are not known."""
    each = cycles(reading.case, name)
    found = [x for x in reading.facts.program.transfers if x.place.backward == (name == "backward")]
    found = [x for x in found if reading.runs(x.place) and (x.pairs or x.bytes >= LEAST)]
    kernels = kernel_seconds(reading, name, each, found)
    moments = moments_of(reading, found)
    hidden = sum(reading.runs(x.place) for x in found if x.overlapped)
    hops = hops_of(reading, found)
    calls = max(1, calls_of(reading, name) // len(kernels))  # the block at home may have one more
    taken = sum(m.runs * m.seconds for m in moments)
    return Estimate(
        name=name,
        hops=hops,
        hop_bytes=sum(m.runs * m.bytes for m in moments) // max(1, hops),
        hop_seconds=taken / max(1, hops),
        hop_kernel_seconds=float(np.mean(kernels)),
        kernel_seconds=float(np.sum(kernels)),
        transfer_seconds=taken,
        hidden=hidden,
        transfers=sum(reading.runs(x.place) for x in found),
        exposed_seconds=sum(exposed(m, kernels, calls) for m in moments),
        other_seconds=other_seconds(reading, name),
    )


def hops_of(reading: Reading, found: list[Transfer]) -> int:
    """See `Estimate`."""
    if not any(x.pairs for x in found):
        return sum(reading.runs(x.place) for x in found)
    if reading.only is not None:
        return sum(reading.only)
    return sizes(reading.case.strategy, reading.shards)["ring"] - 1


def calls_of(reading: Reading, name: str) -> int:
    """How often a kernel runs in the pass."""
    found = (x for x in reading.facts.program.kernels if x.place.backward == (name == "backward"))
    return sum(reading.runs(x.place) for x in found)


@dataclass(frozen=True)
class Moment:
    """Collectives of one computation that are under the same kernels, or under none."""

    runs: int
    bytes: int
    seconds: float
    kernels: int


def moments_of(reading: Reading, found: list[Transfer]) -> list[Moment]:
    """Those that run at the same time, together."""
    groups: dict[tuple[str, tuple[str, ...]], list[Transfer]] = {}
    for one in found:
        groups.setdefault((one.place.computation, one.kernels), []).append(one)
    told = []
    for (_, kernels), each in groups.items():
        ways: dict[Any, float] = {}
        for one in each:
            ways[one.pairs] = ways.get(one.pairs, 0.0) + reading.seconds(one)
        rings = [seconds for pairs, seconds in ways.items() if pairs]
        seconds = max(rings, default=0.0) + ways.get((), 0.0)
        runs = reading.runs(each[0].place)
        told.append(Moment(runs, sum(x.bytes for x in each), seconds, len(kernels)))
    return told


def exposed(moment: Moment, kernels: np.ndarray, calls: int) -> float:
    """What of a moment's transfers, over all its runs, is not under a kernel, by time as well as by place.

    calls: of kernels at a hop, of whose time each has its share.
    """
    if not moment.kernels:
        return moment.runs * moment.seconds
    over = np.maximum(0.0, moment.seconds - kernels * min(1.0, moment.kernels / calls))
    return float(over.mean() * moment.runs)


def kernel_seconds(
    reading: Reading, name: str, each: tuple[float, float], found: list[Transfer]
) -> np.ndarray:
    """At each hop, of the slowest device; one number where all keys are there at once."""
    case, generation = reading.case, GENERATIONS[reading.case.generation]
    over = sizes(case.strategy, reading.shards)
    inner, rows = over["ulysses"], reading.shards // over["ulysses"]
    whole = reading.load.folded(inner)
    ways = {
        goes_up(x.pairs, reading.shards) for x in found if x.pairs and x.place.trips is not None
    }
    hops = whole.hops(each, both_ways=len(ways) == 2, reach=reading.only)
    if reading.only is None:
        hops = hops.reshape(over["ring"], -1, rows).sum(1)
    heads = case.heads / inner
    return np.asarray(hops.max(1) * heads / (generation.cores * generation.clock_ghz * 1e9))


def other_seconds(reading: Reading, name: str) -> float:
    """Of what XLA does itself."""
    found = (x for x in reading.facts.program.others if x.place.backward == (name == "backward"))
    moved = sum(x.traffic * reading.runs(x.place) for x in found)
    generation = GENERATIONS[reading.case.generation]
    return moved / (generation.hbm_tb_per_s * 1e12 * generation.cores)


def cycles(case: Case, name: str) -> tuple[float, float]:
    """Of a FULL and of a PARTIAL tile, 1024 x 1024."""
    if case.who != OURS:
        known = rivals.CYCLES.get(case.generation) if case.head_dim == rivals.WIDTH else None
        one = known[PASSES.index(name)] if known else math.nan
        return one, one
    return tiles.cycles(case.generation, name, case.head_dim)
