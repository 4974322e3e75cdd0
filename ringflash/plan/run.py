"""The verb `plan`: compiles for slices that are not there, and shows a table for each when it is done."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringflash.bench.peers import require_compared
from ringflash.bench.report import Table, tell
from ringflash.plan import load, rivals, step_run
from ringflash.plan.attention import compiled
from ringflash.plan.case import OURS, Case, Facts
from ringflash.plan.compiler import CompilerFailed
from ringflash.plan.estimate import PASSES, Estimate, estimate
from ringflash.plan.forecast import choose, in_words
from ringflash.plan.generations import Topology
from ringflash.plan.links import LINKS
from ringflash.plan.options import PlanOptions, devices, parse
from ringflash.plan.reading import Reading, reading_of
from ringflash.plan.rows import HEADER, HELP, best_of, rows, verdict


def run(arguments: Sequence[str], show: Callable[..., Any]) -> None:
    """Compile what the arguments ask for; `show(title, rows, header=...)` prints a table for a person.

    Raises ConfigFault for arguments that are wrong, before anything is compiled.
    """
    if any(argument.startswith("--config") for argument in arguments):
        step_run.run(arguments, show)
        return
    options = parse(arguments)
    prepare(options)
    tell(planned(options), show, as_json=options.json)


def prepare(options: PlanOptions) -> None:
    """Raises ConfigFault, all at once, unless the compiler and what is compared are installed."""
    require_compared([rivals.NEEDS] if "tokamax" in options.compare else [])


def planned(options: PlanOptions) -> Iterator[Table]:
    """What the columns mean, then a table for each topology and its best strategy.

    Raises CompilerFailed, after all tables, where a topology has none.
    """
    yield Table(HELP)
    missing: list[str] = []
    for where in options.topology:
        yield forecasts(options, where)
        cases = options.cases(where)
        told = [record(case, facts) for case, facts in zip(cases, compiled(cases), strict=True)]
        best = best_of(told)
        shown = [one for one in told if options.strategy != "auto" or one["case"]["who"] != OURS]
        if options.strategy == "auto":
            shown = [one for one in told if best and one["name"] == best["name"]] + shown
        yield Table(
            title(options, where), HEADER, [row for one in shown for row in rows(one)], told
        )
        yield Table(verdict(told, best), records=[{"best": best and best["name"]}])
        missing += [where.name] if best is None else []
    if missing:
        raise CompilerFailed(f"no strategy could be compiled for {', '.join(missing)}")


def forecasts(options: PlanOptions, where: Topology) -> Table:
    """What is known before anything is compiled: what `attention.strategy=auto` goes by."""
    served, refused = choose(options.job(where))
    record = {"forecast": {one.strategy: one.total_seconds for one in served}, "refused": refused}
    return Table(
        f"{where.name}, forecast without the compiler, as auto does: {in_words(served, refused)}",
        [],
        [],
        [record],
    )


def title(options: PlanOptions, where: Topology) -> str:
    """What was compiled, and for what."""
    count = f"{options.slices} slices of " if options.slices > 1 else ""
    assumed = ", its links assumed" if LINKS[where.generation.name].assumed else ""
    layout = options.cases(where)[0].layout
    return (
        f"{count}{where.name} ({devices(where)} devices{assumed}): {options.mask}, {layout},"
        f" {options.seq_len} tokens, {options.heads} heads over {options.kv_heads},"
        f" width {options.head_dim}, bfloat16"
    )


def record(case: Case, facts: Facts | str) -> dict[str, Any]:
    """A case as plain values; one that was refused has an error and nothing else."""
    found: dict[str, Any] = {"name": case.name, "case": dataclasses.asdict(case)}
    if isinstance(facts, str):
        return {**found, "error": facts}
    reading = reading_of(case, facts)
    passes = [estimate(reading, name) for name in PASSES]
    program = facts.program
    return {
        **found,
        **{
            f.name: getattr(facts, f.name) for f in dataclasses.fields(facts) if f.name != "program"
        },
        "passes": {one.name: plain(one) for one in passes},
        "busiest": reading.load.busiest,
        "executed_tiles": reading.load.executed,
        "needed_tiles": needed(case, reading),
        "total_seconds": finite(sum(one.total_seconds for one in passes)),
        "kernels": sorted({one.name for one in program.kernels}),
        "transfers": [dataclasses.asdict(one) for one in program.transfers],
        "moved_bytes": sum(
            one.bytes * reading.runs(one.place) for one in program.others if one.moves
        ),
    }


def needed(case: Case, reading: Reading) -> int:
    """Tiles of the same size that hold a visible pair, the tokens in their order."""
    return load.least_tiles(load.mask_of(case.mask), case.seq_len, reading.load.block)


def plain(one: Estimate) -> dict[str, Any]:
    """An estimate as JSON has it: None for what is not known."""
    values = {**dataclasses.asdict(one), "total_seconds": one.total_seconds}
    return {key: finite(x) if isinstance(x, float) else x for key, x in values.items()}


def finite(x: float) -> float | None:
    """None for NaN."""
    return None if math.isnan(x) else x
