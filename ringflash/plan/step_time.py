"""How long a compiled step would take, as a sum of parts: all times here are estimates.

attention  the kernels of all layers, by `forecast`: cycles a tile from the compiler's schedules, times tiles
           that the mask leaves to the slowest device; with what of the ring's transfers is longer than they.
others     what XLA computes: the cycles that the compiler itself puts on each of its instructions, which
           hold the time for HBM, times how often it runs; where it names none, bytes over HBM's full rate.
collective bytes over the rate of links (`links`); hidden as far as the compiler put other work, by the same
           cycles, between its start and its done. A synchronous one is never hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ringflash.config import Config
from ringflash.flops import causal_pairs, step_flops
from ringflash.plan import links
from ringflash.plan.case import Case, Facts
from ringflash.plan.estimate import PASSES, estimate
from ringflash.plan.forecast import Forecast, Job, forecast
from ringflash.plan.generations import Generation
from ringflash.plan.program import Program, Transfer
from ringflash.plan.reading import Reading, collective_seconds, reading_of
from ringflash.plan.step import StepFacts
from ringflash.plan.step_guess import job_of
from ringflash.plan.where import Where

ATTENTION = "attention/"  # of the scope of all that belongs to it


@dataclass(frozen=True)
class Collective:
    """All executions of one kind in a step; bytes and seconds of one device."""

    kind: str
    over_dcn: bool
    runs: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class Hop:
    """The mean hop of one layer's ring. bytes, seconds: of what one device sends in all directions; kernel:
    of the slowest device meanwhile. hidden, transfers: of a whole step, with a kernel between start and done,
    and all."""

    name: str
    hops: int
    bytes: int
    seconds: float
    kernel_seconds: float
    hidden: int
    transfers: int


@dataclass(frozen=True)
class StepTime:
    """One step. Seconds; flops of the whole batch, without what is computed again."""

    attention_seconds: float
    attention_exposed_seconds: float
    other_seconds: float
    collectives: tuple[Collective, ...]
    ring: Forecast
    hops: tuple[Hop, ...]
    flops: int
    tokens: int
    devices: int
    chips: int
    peak_flops: float  # of one device

    @property
    def exposed_seconds(self) -> float:
        """Of collectives that are not attention's."""
        return sum(one.exposed_seconds for one in self.collectives)

    @property
    def total_seconds(self) -> float:
        """Of a step."""
        attention = self.attention_seconds + self.attention_exposed_seconds
        return attention + self.other_seconds + self.exposed_seconds

    @property
    def mfu(self) -> float:
        """Of the matrix units' peak, by what the mask needs."""
        return self.flops / (self.total_seconds * self.peak_flops * self.devices)

    @property
    def tokens_per_second(self) -> float:
        """Of the whole slice."""
        return self.tokens / self.total_seconds


@dataclass(frozen=True)
class Step:
    """A compiled step beside its configuration."""

    config: Config
    where: Where
    generation: Generation
    facts: StepFacts

    @property
    def devices(self) -> int:
        """Of all slices."""
        mesh = self.facts.mesh
        return mesh["data"] * mesh["fsdp"] * mesh["context"] * mesh["tensor"]

    @cached_property
    def job(self) -> Job:
        """A layer's attention, as `forecast` takes it."""
        return job_of(self.config, self.facts.mesh, self.generation, self.facts.hop_links or 1)

    @cached_property
    def reading(self) -> Reading:
        """What runs how often: only the ring's own transfers decide, in the order of its shards."""
        assert self.facts.program is not None
        mesh, job, program = self.facts.mesh, self.job, self.facts.program
        found = [
            replace(x, pairs=along_context(x, mesh)) for x in program.transfers if is_attention(x)
        ]
        case = Case(
            job.generation,
            self.where.topology,
            strategy=self.facts.strategy,
            layout=job.layout,
            seq_len=job.seq_len,
            heads=job.heads,
            kv_heads=job.kv_heads,
            head_dim=job.head_dim,
        )
        ring = Program(program.partitions, found, program.kernels, program.others)
        facts = Facts(ring, job.shards, 0.0, 0, 0, 0, 0, self.facts.hop_links)
        return reading_of(case, facts)

    def seconds(self, cycles: float) -> float:
        """Of a TensorCore."""
        return cycles / (self.generation.clock_ghz * 1e9)


def is_attention(one: Transfer) -> bool:
    """Whether a collective is one of attention's own."""
    return ATTENTION in one.scope or ATTENTION in one.place.scope


def along_context(one: Transfer, mesh: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """The pairs of a permute as places on the `context` axis, those of the first ring."""
    inner, around = mesh["tensor"], mesh["context"]
    first = [(a, b) for a, b in one.pairs if a % inner == 0 and a // inner < around]
    return tuple((a // inner, b // inner) for a, b in first)


def step_time(step: Step) -> StepTime:
    """Of a step that was compiled. Raises ValueError for a strategy that cannot share the heads out."""
    config, generation = step.config, step.generation
    ring = forecast(step.job, step.facts.strategy)
    times = config.model.layers * config.accumulation
    forwards = 2 if config.model.remat == "full" else 1
    passes = [ring.forward] * forwards + [ring.backward]
    pairs = config.global_batch_size * causal_pairs(config.seq_len)
    tokens = config.global_batch_size * config.seq_len
    return StepTime(
        attention_seconds=times * sum(one.kernel_seconds for one in passes),
        attention_exposed_seconds=times * sum(one.exposed_seconds for one in passes),
        other_seconds=other_seconds(step),
        collectives=tuple(collectives(step)),
        ring=ring,
        hops=tuple(hops(step)),
        flops=step_flops(config.model, tokens, pairs),
        tokens=tokens,
        devices=step.devices,
        chips=step.devices // links.LINKS[generation.name].devices,
        peak_flops=generation.peak_flops,
    )


def hops(step: Step) -> Iterator[Hop]:
    """Of both passes; none where no keys travel. Under remat `full` what is run again is of the backward."""
    for name in PASSES:
        found = estimate(step.reading, name)
        if found.hops:
            layers = step.config.model.layers * step.config.accumulation
            yield Hop(
                name,
                found.hops,
                found.hop_bytes // layers,
                found.hop_seconds / layers,
                found.hop_kernel_seconds * step.job.rows,
                found.hidden,
                found.transfers,
            )


def other_seconds(step: Step) -> float:
    """Of what XLA computes and copies itself."""
    assert step.facts.program is not None
    generation, taken = step.generation, 0.0
    rate = generation.hbm_tb_per_s * 1e12 * generation.cores
    for one in step.facts.program.others:
        each = step.seconds(one.cycles) if one.cycles else one.traffic / rate
        taken += each * step.reading.runs(one.place)
    return taken


def collectives(step: Step) -> Iterator[Collective]:
    """Of all that is not attention's, by kind, the longest first."""
    assert step.facts.program is not None
    runs: Counter[tuple[str, bool]] = Counter()
    sizes: Counter[tuple[str, bool]] = Counter()
    seconds: dict[tuple[str, bool], float] = {}
    exposed: dict[tuple[str, bool], float] = {}
    for one in step.facts.program.transfers:
        if is_attention(one):
            continue
        key, times = (one.kind, over_dcn(one, step)), step.reading.runs(one.place)
        each = transfer_seconds(one, step)
        left = 0.0 if one.overlapped else max(0.0, each - step.seconds(one.cycles))
        runs[key] += times
        sizes[key] += times * one.bytes
        seconds[key] = seconds.get(key, 0.0) + times * each
        exposed[key] = exposed.get(key, 0.0) + times * (each if one.synchronous else left)
    for key, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        kind, dcn = key
        yield Collective(kind, dcn, runs[key], sizes[key], taken, exposed[key])


def over_dcn(one: Transfer, step: Step) -> bool:
    """Whether it reaches beyond a slice: slices lie on the outermost axis of the mesh."""
    slice_devices = step.devices // step.where.slices
    if one.dcn:
        return True
    if one.pairs:
        return any(a // slice_devices != b // slice_devices for a, b in one.pairs)
    return one.span >= slice_devices


def transfer_seconds(one: Transfer, step: Step) -> float:
    """One execution."""
    if not over_dcn(one, step):
        return collective_seconds(one, step.generation.name, step.where.topology)
    return links.dcn_seconds(dcn_bytes(one, step.where.slices))


def dcn_bytes(one: Transfer, slices: int) -> float:
    """What each device sends to other slices: its part of what the slice has, but of an exchange all."""
    if one.pairs:
        return one.bytes
    others = (slices - 1) / slices
    if one.dcn:  # the device's own part already
        return {"all-reduce": 2, "all-gather": slices}.get(one.kind, 1) * others * one.bytes
    if "all-to-all" in one.kind:
        return others * one.bytes
    times = {"all-reduce": 2, "reduce-scatter": one.group}
    return times.get(one.kind, 1) * others * one.bytes / max(1, one.group // slices)
