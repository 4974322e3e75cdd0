"""`ringflash bench attention`: ours beside others, the ring beside one device, and what is counted.

Yields one table after the other, as each is done; whoever called prints them.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ringflash.bench import errors, ours, peers, tiles
from ringflash.bench.options import Options
from ringflash.bench.report import Table
from ringflash.bench.timing import Program, Times, interleaved, ratio
from ringflash.startup import simulate

PASSES = ("forward", "forward+backward")


def prepare(options: Options) -> None:
    """Simulate the devices; before the first device is touched. Raises ConfigFault for absent peers."""
    peers.chosen(options.peers)
    if os.environ.get("JAX_PLATFORMS", "") in ("", "cpu"):
        simulate(options.devices)


def measured(options: Options) -> Iterator[Table]:
    """The tables asked for, in the order of `TABLES`."""
    yield machine(options)
    makers: dict[str, Callable[[Options], Table]] = {
        "one_device": one_device,
        "ring": over_devices,
        "tiles": count_tiles,
        "errors": error_by_ring,
        "blocks": block_sizes,
    }
    for name, make in makers.items():
        if name in options.tables:
            yield make(options)


def machine(options: Options) -> Table:
    """What the figures depend on."""
    names = ["jax", "jaxlib", *peers.chosen(options.peers)[0]]
    versions = {name: metadata.version(name) for name in dict.fromkeys(names)}
    found = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "devices": f"{len(jax.devices())} {jax.default_backend()}",
        "python": platform.python_version(),
        **versions,
    }
    absent = peers.chosen(options.peers)[1]
    if absent:
        found["not installed"] = f"{', '.join(absent)} ({peers.EXTRA})"
    said = "; ".join(f"{name} {value}" for name, value in found.items())
    return Table(said, records=[found])


def cpu_model() -> str:
    """As the kernel calls it, or what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def one_device(options: Options) -> Table:
    """`chunked` beside the peers: `x` is ours over theirs, so below 1 is faster."""
    x = problem_of(options)
    programs = {"chunked": ours.whole(x)}
    programs |= {name: peers.MAKERS[name](x) for name in peers.chosen(options.peers)[0]}
    return timed(f"one device, {shape_of(options)}", programs, "chunked", options.repeats, True)


def over_devices(options: Options) -> Table:
    """Strategies and layouts beside the same attention on one device."""
    x = problem_of(options)
    programs = {"one device": ours.whole(x)}
    kinds = [("ring", "contiguous"), ("ring", "zigzag"), ("all_gather", "contiguous")]
    if options.heads % math.lcm(options.kv_heads, options.devices) == 0:
        kinds.append(("ulysses", "contiguous"))
    for strategy, layout in kinds:
        programs[f"{strategy} {layout}"] = ours.sharded(x, strategy, layout, options.devices)
    if "ringattention" in peers.chosen(options.peers)[0]:
        programs["ringattention"] = peers.of_ringattention(x, options.devices)
    title = f"{options.devices} devices, {shape_of(options)}"
    return timed(title, programs, "one device", options.repeats, False)


def block_sizes(options: Options) -> Table:
    """Tiles of fixed sizes beside those that `chunked` chooses."""
    x = problem_of(options)
    programs = {"own choice": ours.whole(x)}
    for queries, keys in options.blocks:
        programs[f"{queries} x {keys}"] = ours.whole(x, block_q=queries, block_k=keys)
    title = f"tiles of chunked, {shape_of(options)}"
    return timed(title, programs, "own choice", options.repeats, False)


def timed(
    title: str, programs: Mapping[str, list[Program]], base: str, repeats: int, over: bool
) -> Table:
    """Rows for each program and pass. Ratios are to `base`, or with `over` of `base` to each."""
    table = Table(title, ["", "wall ms", "cpu ms", "x wall", "x cpu", "temp MB", "compile s"])
    if over:
        table.title += f" (x: {base} over this one)"
    else:
        table.title += f" (x: this one over {base})"
    for n, name in enumerate(PASSES):
        some = {who: both[n] for who, both in programs.items()}
        times = interleaved(some, repeats)
        for who, each in some.items():
            record = compared(times[who], times[base], over)
            record |= {"temp_bytes": each.temp_bytes, "compile_seconds": each.compile_seconds}
            table.rows.append([f"{who}, {name}", *cells(record)])
            table.records.append({"who": who, "pass": name, **record})
    return table


def compared(mine: Times, base: Times, over: bool) -> dict[str, Any]:
    """Medians, and medians of the ratios of each round."""
    ratios = [ratio(b, a) if over else ratio(a, b) for a, b in zip(mine, base, strict=True)]
    wall, cpu = (statistics.median(x) for x in mine)
    return {"wall_seconds": wall, "cpu_seconds": cpu, "x_wall": ratios[0], "x_cpu": ratios[1]}


def cells(record: dict[str, Any]) -> list[str]:
    """The record as text; what cannot be known is a dash."""
    temp, seconds = record["temp_bytes"], record["compile_seconds"]
    return [
        f"{record['wall_seconds'] * 1e3:.0f}",
        f"{record['cpu_seconds'] * 1e3:.0f}",
        f"{record['x_wall']:.2f}",
        f"{record['x_cpu']:.2f}",
        "-" if temp is None else f"{temp / 1e6:.1f}",
        "-" if seconds is None else f"{seconds:.1f}",
    ]


def problem_of(options: Options) -> peers.Problem:
    """The random numbers."""
    heads = options.heads, options.kv_heads
    return peers.problem(options.seq_len, *heads, options.head_dim, options.dtype)


def shape_of(options: Options) -> str:
    """For the titles."""
    heads = f"{options.heads} heads over {options.kv_heads}"
    return f"causal, {options.seq_len} tokens, {heads}, width {options.head_dim}, {options.dtype}"


def count_tiles(options: Options) -> Table:
    """See `tiles`; counted for the tiles that `chunked` takes on such a shard."""
    records = tiles.by_layout(options.devices)
    ratios = ("visited_to_needed", "area_to_pairs", "busiest_to_mean", "busiest_to_mean_pairs")
    header = ["documents", "layout", "visited", "needed", "visited/needed", "area/pairs"]
    header += ["busiest/mean tiles", "busiest/mean pairs"]
    rows = [
        [*(str(r[name]) for name in ("documents", "layout", "visited", "needed"))]
        + [f"{r[name]:.3f}" for name in ratios]
        for r in records
    ]
    title = f"tiles, causal, {tiles.LENGTH} tokens over {options.devices} devices"
    return Table(title, header, rows, records)


def error_by_ring(options: Options) -> Table:
    """See `errors`."""
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= options.devices]
    short = replace(options, seq_len=min(options.seq_len, errors.LENGTH), dtype="bfloat16")
    x = problem_of(short)
    found = errors.by_ring(x, sizes)
    header = ["", *(f"{name}{what}" for name in errors.NAMES for what in ("", " x"))]
    base = found["ring of 1"]
    rows, records = [], []
    for who, error in found.items():
        row = [who]
        for name in errors.NAMES:
            row += [f"{error[name] * 1e3:.3f}", f"{error[name] / base[name]:.3f}"]
        rows.append(row)
        records.append({"who": who, **error})
    title = f"error against fp32 in thousandths (x: over a ring of 1), {shape_of(short)}"
    return Table(title, header, rows, records)
