"""`ringflash bench kernel`: the kernels of a generation, ours and others', by their schedules.

Nothing is timed and nothing is run: the same compiler gives the same figures. Yields one table for each
generation, as each is done.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from ringflash.bench.attention import Table
from ringflash.bench.candidates import DIRECTIONS, Job
from ringflash.bench.compiled import CANDIDATES, Compiled, measure
from ringflash.bench.cycles import Cycles, cycles
from ringflash.bench.kernel_options import OURS, KernelOptions
from ringflash.bench.peers import EXTRA
from ringflash.exits import ConfigFault
from ringflash.plan.compiler import require
from ringflash.plan.generations import Topology

HEADER = ["", "FULL", "PARTIAL", "of peak", "bound", "busy", "spills", "VMEM MiB", "whole", "x whole"]
HELP = (
    "cycles of a 1024 x 1024 tile; busy: the bound unit's share of a FULL one; "
    "whole: kilocycles of the kernel for one query head; x: over that of ours"
)


def prepare(options: KernelOptions) -> None:
    """Raises ConfigFault, all at once, unless the compiler and the peers asked for are installed."""
    faults = []
    try:
        require()
    except ConfigFault as fault:
        faults += fault.lines()
    for name in options.compare or ():
        if importlib.util.find_spec(CANDIDATES[name].needs) is None:
            faults.append(f"--compare: {CANDIDATES[name].needs} is not installed: {EXTRA}")
    if faults:
        raise ConfigFault(*faults)


def measured(options: KernelOptions) -> Iterator[Table]:
    """A table of what the figures depend on, then one for each topology."""
    names = candidates(options)
    yield about(options, names)
    for topology in options.topology:
        yield of_topology(options, names, topology)


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
    jobs = [
        Job(name, direction, shape, generation.name)
        for direction in DIRECTIONS
        for name in names
        if direction in CANDIDATES[name].directions
    ]
    found = measure(jobs, topology)
    known = {one.job: weigh(one, topology) for one in found if not one.error}
    table = Table(title(options, topology), HEADER)
    for one in found:
        ours = known.get(Job(OURS, one.job.direction, shape, generation.name))
        record = record_of(one, known.get(one.job), ours)
        table.records.append({"generation": generation.name, "topology": topology.name, **record})
        table.rows.append(cells(record))
    return table


def title(options: KernelOptions, topology: Topology) -> str:
    """What was compiled, and for what."""
    s, generation = options.shape, topology.generation
    heads = f"{s.heads} heads over {s.kv_heads}"
    shape = f"causal, {s.seq_len} tokens, {heads}, width {s.head_dim}, {s.dtype}"
    return f"{generation.name} ({topology.name}), {shape}"


def weigh(one: Compiled, topology: Topology) -> Cycles:
    """The cycles of a job that compiled."""
    parts = CANDIDATES[one.job.candidate].parts(one.job)
    return cycles(one.job, parts, one.schedules, topology.generation)


def record_of(one: Compiled, known: Cycles | None, ours: Cycles | None) -> dict[str, Any]:
    """A row as plain values; what is not known is None."""
    record: dict[str, Any] = {"who": one.job.candidate, "pass": one.job.direction}
    if known is None:
        return {**record, "error": one.error}
    return {
        **record,
        "full_cycles": known.full,
        "partial_cycles": known.partial,
        "efficiency": known.efficiency,
        "bound": known.bound,
        "busy_cycles": known.busy,
        "spills": known.spills,
        "vmem_bytes": known.vmem_bytes,
        "whole_cycles_per_head": known.whole,
        "x_whole": None if ours is None else known.whole / ours.whole,
    }


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
        "-" if x is None else f"{x:.2f}",
    ]
