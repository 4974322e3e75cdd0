"""A compiled step as rows of tables, in words for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringflash.plan.links import DCN_GB_PER_S
from ringflash.plan.rows import ms
from ringflash.plan.step import StepFacts
from ringflash.plan.step_options import StepOptions
from ringflash.plan.step_search import Found
from ringflash.plan.step_time import StepTime, is_attention

GIB = 2**30
LANES = 128
SPARE = 0.1  # of HBM: less is worth a warning
WORTH = 0.02  # of a step: an exposed transfer that takes more is worth a warning
BUFFERS = ["", "GiB", "shape", "operation", "line"]
PARTS = ["part", "ms", "share", "exposed ms", "GiB", "times", "how it is known"]
PARTS_TITLE = "where a step's time goes: all times are estimates"
HOPS = ["", "hops", "MiB a hop", "transfer ms", "kernel ms", "hidden in a step"]
HOPS_TITLE = "attention of a layer round the ring: the mean hop; times are estimates"
KERNELS = "cycles a tile of the compiler's schedule x tiles of the mask, slowest device"
XLA = "the compiler's cycles of each of its instructions"
BYTES = "bytes over the links' full rate"
OVER_DCN = f"bytes over {DCN_GB_PER_S:g} GB/s a chip, assumed"


def title(options: StepOptions) -> str:
    """What was compiled, and for what."""
    return f"{options.path} on {options.where} ({options.where.devices} devices)"


def overview(options: StepOptions, facts: StepFacts, time: StepTime | None) -> list[list[str]]:
    """The answer, a line each."""
    config = options.config
    mesh = " x ".join(f"{axis}={size}" for axis, size in facts.mesh.items())
    taken, asked = facts.strategy, config.attention.strategy
    return [
        ["fits", verdict(options, facts)],
        ["memory of a device", memory(facts)],
        ["mesh", mesh],
        ["strategy", taken if taken == asked else f"{asked}: {taken}"],
        ["tokens per step", f"{config.seq_len * config.global_batch_size:,}"],
        *(speed(options, time) if time is not None else []),
        ["compiled in", f"{facts.compile_seconds:.0f} s of CPU"],
    ]


def verdict(options: StepOptions, facts: StepFacts) -> str:
    """Whether it fits, and how closely."""
    need = facts.needed_bytes
    if options.generation is None:
        return f"{gib(need)} GiB a device; simulated devices have no limit"
    has = options.generation.hbm_gib
    used = need / GIB / has
    if not facts.fits or used > 1:
        return f"no: {gib(need)} of {has} GiB"
    return f"yes: {gib(need)} of {has} GiB, {1 - used:.0%} to spare"


def memory(facts: StepFacts) -> str:
    """Its parts in GiB."""
    host = f", on the host {gib(facts.host_bytes)}" if facts.host_bytes else ""
    return (
        f"parameters {gib(facts.parameter_bytes)}, optimizer {gib(facts.optimizer_bytes)},"
        f" temporaries (gradients, activations, ...) {gib(facts.temporary_bytes)},"
        f" code {gib(facts.code_bytes)} GiB{host}"
    )


def speed(options: StepOptions, time: StepTime) -> list[list[str]]:
    """Of a step: estimates."""
    a_chip = time.tokens_per_second / time.chips
    price = cost(options, time)
    return [
        ["step (estimate)", f"{time.total_seconds:.3g} s"],
        ["MFU (estimate)", f"{time.mfu:.1%}, FLOPs by the mask"],
        ["tokens/s (estimate)", f"{time.tokens_per_second:,.0f}, {a_chip:,.0f} a chip"],
        *([["cost (estimate)", f"{price:,.0f} per billion tokens"]] if price else []),
    ]


def cost(options: StepOptions, time: StepTime) -> float | None:
    """Of a billion tokens, in the currency of the price."""
    if options.price is None:
        return None
    return options.price * time.chips / 3600 * 1e9 / time.tokens_per_second


def gib(size: float) -> str:
    """Two digits behind the point."""
    return f"{size / GIB:.2f}"


def buffers(facts: StepFacts) -> list[list[str]]:
    """The largest first; their operations without what all have in common."""
    return [
        [
            str(at),
            f"{one.bytes / GIB:.3f}",
            one.shape,
            one.op.removeprefix("jit(step)/")[-60:],
            one.line,
        ]
        for at, one in enumerate(facts.buffers, 1)
    ]


def parts(time: StepTime) -> list[list[str]]:
    """The parts of a step; those of attention hold the ring."""
    whole = time.total_seconds

    def row(
        name: str, taken: float, shown: float, exposed: str, size: str, runs: str, how: str
    ) -> list[str]:
        return [name, ms(shown), f"{taken / whole:.1%}", exposed, size, runs, how]

    attention = time.attention_seconds + time.attention_exposed_seconds
    rows = [
        row(
            "attention kernels",
            attention,
            time.attention_seconds,
            ms(time.attention_exposed_seconds),
            "",
            "",
            KERNELS,
        ),
        row("all else that is computed", time.other_seconds, time.other_seconds, "", "", "", XLA),
    ]
    for one in time.collectives:
        name = f"{one.kind} over {'DCN' if one.over_dcn else 'ICI'}"
        rows.append(
            row(
                name,
                one.exposed_seconds,
                one.seconds,
                ms(one.exposed_seconds),
                gib(one.bytes),
                str(one.runs),
                OVER_DCN if one.over_dcn else BYTES,
            )
        )
    return [*rows, row("step", whole, whole, "", "", "", "attention + all else + what is exposed")]


def hops(time: StepTime) -> list[list[str]]:
    """A row for each pass."""
    return [
        [
            one.name,
            str(one.hops),
            f"{one.bytes / 2**20:.1f}",
            ms(one.seconds),
            ms(one.kernel_seconds),
            f"{one.hidden}/{one.transfers}",
        ]
        for one in time.hops
    ]


def warnings(options: StepOptions, facts: StepFacts, time: StepTime | None) -> Iterator[str]:
    """What a user would rather know before the slice is rented."""
    need = facts.needed_bytes
    if options.generation is not None and facts.fits:
        spare = 1 - need / GIB / options.generation.hbm_gib
        if 0 <= spare < SPARE:
            yield f"only {spare:.0%} of a device's memory is to spare"
    model = options.config.model
    if options.generation is not None and model.head_dim % LANES:
        padded = -(-model.head_dim // LANES) * LANES
        yield f"heads of {model.head_dim} lie in memory as {padded} wide: padding"
    if time is None or facts.program is None:
        return
    for one in time.collectives:
        if one.exposed_seconds > WORTH * time.total_seconds:
            where = "DCN" if one.over_dcn else "ICI"
            yield (
                f"{one.kind} over {where} is not hidden: {ms(one.exposed_seconds)} of"
                f" {ms(one.seconds)} ms a step stand under no work"
            )
    ring = [x for x in facts.program.transfers if is_attention(x) and x.pairs]
    open_to_see = sum(not x.overlapped for x in ring if x.place.trips is not None)
    if open_to_see:
        yield f"{open_to_see} of the ring's {len(ring)} transfers stand under no kernel"


def found(one: Found) -> dict[str, Any]:
    """What a search found, as JSON has it."""
    return {
        "leaves": one.leaves,
        "where": str(one.where),
        "total_bytes": one.facts.needed_bytes,
        "seconds": one.time and one.time.total_seconds,
        "mfu": one.time and one.time.mfu,
    }


def shortage(options: StepOptions, facts: StepFacts) -> str:
    """How much is missing."""
    assert options.generation is not None
    need = facts.needed_bytes / GIB
    return (
        f"{options.path} does not fit {options.where}: a device needs {need:.2f} GiB"
        f" and has {options.generation.hbm_gib}"
    )
