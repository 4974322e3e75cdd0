"""`ringflash plan --config=FILE.py`: a step compiled for a slice, told as tables or as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringflash.bench.report import Table, tell
from ringflash.exits import UNEQUAL, ConfigFault, Stop
from ringflash.plan import step_rows, step_search
from ringflash.plan.compiler import CompilerFailed
from ringflash.plan.step import StepFacts, compiled
from ringflash.plan.step_options import StepOptions, parse
from ringflash.plan.step_time import Step, StepTime, step_time


class DoesNotFit(Stop):
    """The step needs more memory than a device has."""

    code = UNEQUAL


def run(arguments: Sequence[str], show: Callable[..., Any]) -> None:
    """Compile what the arguments ask for; `show(title, rows, header=...)` prints a table for a person.

    Raises ConfigFault for arguments or a configuration that are wrong, before anything is compiled;
    DoesNotFit after all tables.
    """
    options = parse(arguments)
    tell(planned(options), show, as_json=options.json)


def planned(options: StepOptions) -> Iterator[Table]:
    """What was found, table by table."""
    facts = facts_of(options)
    time = time_of(options, facts)
    record = as_record(options, facts, time)
    yield Table(step_rows.title(options), [], step_rows.overview(options, facts, time), [record])
    yield Table("largest buffers of a device", step_rows.BUFFERS, step_rows.buffers(facts))
    if time is not None:
        yield Table(step_rows.PARTS_TITLE, step_rows.PARTS, step_rows.parts(time))
        if time.hops:
            yield Table(step_rows.HOPS_TITLE, step_rows.HOPS, step_rows.hops(time))
    for line in step_rows.warnings(options, facts, time):
        yield Table(f"warning: {line}", records=[{"warning": line}])
    if options.search and options.generation is not None:
        yield from searched(options)
    if not fits(options, facts):
        yield from advised(options, facts)
        raise DoesNotFit(step_rows.shortage(options, facts))


def facts_of(options: StepOptions) -> StepFacts:
    """Raises ConfigFault where the step cannot be put together, CompilerFailed for all else."""
    (found,) = compiled([(options.config, options.where)])
    if isinstance(found, str):
        kind, _, why = found.partition(": ")
        raise ConfigFault(why) if kind == "ValueError" else CompilerFailed(found)
    return found


def time_of(options: StepOptions, facts: StepFacts) -> StepTime | None:
    """None where nothing ran to be timed: it does not fit, or devices are simulated."""
    if facts.program is None or options.generation is None:
        return None
    return step_time(Step(options.config, options.where, options.generation, facts))


def fits(options: StepOptions, facts: StepFacts) -> bool:
    """Simulated devices have no limit."""
    return options.generation is None or step_search.fits(facts, options.generation)


def searched(options: StepOptions) -> Iterator[Table]:
    """The quickest that fit, and the longest sequence under the first of them."""
    found = step_search.search(options.config, options.where)
    for one in found:
        yield Table(f"fits: {one}", records=[step_rows.found(one)])
    if not found:
        yield Table("of what was compiled nothing fits")
        return
    longest = step_search.longest(options.config, found[0])
    if longest:
        yield Table(f"longest sequence: {longest}", records=[{"longest": step_rows.found(longest)}])


def advised(options: StepOptions, facts: StepFacts) -> Iterator[Table]:
    """What would fit."""
    found = step_search.nearest(options.config, options.where, facts.mesh)
    if found is None:
        yield Table(
            "nothing near to it fits: less kept, fewer sequences at a time, twice the slice"
        )
    else:
        yield Table(f"this would fit: {found}", records=[{"would_fit": step_rows.found(found)}])


def as_record(options: StepOptions, facts: StepFacts, time: StepTime | None) -> dict[str, Any]:
    """All that is known, as JSON has it."""
    plain = {
        field.name: getattr(facts, field.name)
        for field in dataclasses.fields(facts)
        if field.name not in ("program", "buffers")
    }
    found: dict[str, Any] = {
        "config": options.path,
        "where": dataclasses.asdict(options.where),
        "fits": fits(options, facts),
        "memory": plain | {"temporary_bytes": facts.temporary_bytes},
        "buffers": [dataclasses.asdict(one) for one in facts.buffers],
    }
    if options.generation is not None:
        found["hbm_bytes"] = int(options.generation.hbm_gib * 2**30)
    if time is not None:
        names = ("total_seconds", "exposed_seconds", "mfu", "tokens_per_second")
        found["time"] = dataclasses.asdict(time) | {name: getattr(time, name) for name in names}
        found["cost_per_billion_tokens"] = step_rows.cost(options, time)
    return found
