"""`ringflash bench kernel`: the kernels of a generation, ours and others', by their schedules.

Nothing is timed and nothing is run: the same compiler gives the same figures. Yields one table for each
generation, as each is done.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any

from ringflash.bench.candidates import DIRECTIONS, Job
from ringflash.bench.compiled import CANDIDATES, Compiled, measure, weigh
from ringflash.bench.kernel_options import OURS, KernelOptions
from ringflash.bench.peers import EXTRA, require_compared
from ringflash.bench.report import Table
from ringflash.bench.tile_check import checked
from ringflash.bench.tune import tuned
from ringflash.plan.generations import Topology

HEADER = [
    "",
    "FULL",
    "PARTIAL",
    "of peak",
    "bound",
    "busy",
    "spills",
    "VMEM MiB",
    "whole",
    "beside",
    "x whole",
]
HELP = (
    "cycles of a 1024 x 1024 tile; busy: the bound unit's share of a FULL one; "
    "whole: kilocycles of the kernel for one query head; beside: what is not in the bodies, over what is; "
    "x whole: over that of ours"
)


def prepare(options: KernelOptions) -> None:
    """Raises ConfigFault, all at once, unless the compiler and the peers asked for are installed."""
    require_compared([CANDIDATES[name].needs for name in options.compare or ()])


def measured(options: KernelOptions) -> Iterator[Table]:
    """A table of what the figures depend on, then one for each topology and width."""
    if options.tune or options.check:
        yield from tuned(options) if options.tune else checked(options)
        return
    names = candidates(options)
    yield about(options, names)
    for topology in options.topology:
        for width in options.widths:
            shape = replace(options.shape, head_dim=width)
            yield of_topology(replace(options, shape=shape), names, topology)


def candidates(options: KernelOptions) -> list[str]:
    """Ours, and the peers that were asked for or else are installed."""
    peers = options.compare
    if peers is None:
        peers = tuple(name for name in CANDIDATES if name != OURS and installed(name))
    return [OURS, *peers]


def installed(name: str) -> bool:
    """Whether what a candidate needs is there."""
    return importlib.util.find_spec(CANDIDATES[name].needs) is not None


def about(options: KernelOptions, names: list[str]) -> Table:
    """Versions and the shape."""
    packages = dict.fromkeys(["libtpu", "jax", *(CANDIDATES[name].needs for name in names)])
    found: dict[str, Any] = {name: metadata.version(name) for name in packages}
    absent = [name for name in CANDIDATES if not installed(name)] if options.compare is None else []
    if absent:
        found["not installed"] = f"{', '.join(absent)} ({EXTRA})"
    said = "; ".join(f"{name} {value}" for name, value in found.items())
    return Table(f"{said}\n{HELP}", records=[found])


def of_topology(options: KernelOptions, names: list[str], topology: Topology) -> Table:
    """The rows of one generation: forward of each candidate, then backward."""
    generation, shape = topology.generation, options.shape
    rows = [
        (name, direction)
        for direction in DIRECTIONS
        for name in names
        if direction in CANDIDATES[name].directions
    ]
    jobs = [
        Job(name, direction, shape, generation.name, tiles)
        for name, direction in rows
        for tiles in CANDIDATES[name].sweep
    ]
    found = measure(jobs, topology)
    table = Table(title(options, topology), HEADER)
    records = {
        row: record_of(
            [one for one in found if (one.job.candidate, one.job.direction) == row], topology
        )
        for row in rows
    }
    for (_, direction), record in records.items():
        record["x_whole"] = ratio(record, records[OURS, direction])
        table.records.append({"generation": generation.name, "topology": topology.name, **record})
        table.rows.append(cells(record))
    return table


def title(options: KernelOptions, topology: Topology) -> str:
    """What was compiled, and for what."""
    s, generation = options.shape, topology.generation
    heads = f"{s.heads} heads over {s.kv_heads}"
    shape = f"causal, {s.seq_len} tokens, {heads}, width {s.head_dim}, {s.dtype}"
    return f"{generation.name} ({topology.name}), {shape}"


def record_of(sweep: list[Compiled], topology: Topology) -> dict[str, Any]:
    """A row as plain values: of the tiles best for a FULL tile, but for the whole kernel's own best."""
    job = sweep[0].job
    record: dict[str, Any] = {"who": job.candidate, "pass": job.direction}
    known = [(one.job.tiles, weigh(one, topology)) for one in sweep if not one.error]
    if not known:
        return {**record, "error": sweep[0].error}
    tiles, best = min(known, key=lambda pair: pair[1].full)
    whole_tiles, whole = min(known, key=lambda pair: pair[1].whole)
    return {
        **record,
        "tiles": tiles,
        "full_cycles": best.full,
        "partial_cycles": best.partial,
        "efficiency": best.efficiency,
        "bound": best.bound,
        "busy_cycles": best.busy,
        "spills": best.spills,
        "vmem_bytes": best.vmem_bytes,
        "whole_tiles": whole_tiles,
        "whole_cycles_per_head": whole.whole,
        "beside": whole.beside,
    }


def ratio(record: dict[str, Any], ours: dict[str, Any]) -> float | None:
    """Whole kernel over ours; None where one of them is not known."""
    if "error" in record or "error" in ours:
        return None
    return float(record["whole_cycles_per_head"] / ours["whole_cycles_per_head"])


def cells(record: dict[str, Any]) -> list[str]:
    """The record as text; a job without figures shows dashes, and its error in the first cell."""
    who = f"{record['who']}, {record['pass']}"
    if "error" in record:
        line = " ".join(record["error"].split())[:60]
        return [f"{who}: {line}", *["-"] * (len(HEADER) - 1)]
    vmem, x = record["vmem_bytes"], record["x_whole"]
    return [
        who,
        f"{record['full_cycles']:.0f}",
        f"{record['partial_cycles']:.0f}",
        f"{record['efficiency']:.1%}",
        record["bound"],
        f"{record['busy_cycles'][record['bound']] / record['full_cycles']:.0%}",
        str(record["spills"]),
        "-" if vmem is None else f"{vmem / 2**20:.1f}",
        f"{record['whole_cycles_per_head'] / 1e3:.1f}",
        f"{record['beside']:.1%}",
        "-" if x is None else f"{x:.2f}",
    ]
