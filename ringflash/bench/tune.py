"""`ringflash bench kernel --tune`: tile sizes of the TPU kernel by the cycles that the schedules show.

Few are tried, since a compile takes 5 to 30 seconds: first the forms of the backward, then sizes of a
unit, then of a chunk, each with the best so far. Best is the least for the whole causal kernel
at --seq_len: a large unit is quicker where tiles are FULL, and wastes more at the diagonal. At 32,768 tokens
units of 2048 x 1024 come out ahead of 1024 x 1024 on v6e.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench.candidates import DIRECTIONS, Job, Shape
from ringflash.bench.compiled import measure, weigh
from ringflash.bench.cycles import Cycles
from ringflash.bench.kernel_options import OURS, KernelOptions
from ringflash.bench.ours_runs import plan_of
from ringflash.bench.ours_tpu import of_tiles
from ringflash.bench.report import Table
from ringflash.bench.tile_table import Table as TileTable
from ringflash.bench.tile_table import entry
from ringflash.plan.compiler import CompilerFailed
from ringflash.plan.generations import Topology

MOST = 1.3  # a PARTIAL tile over a FULL one
SIZES = ((1024, 1024), (512, 1024), (1024, 512), (1024, 2048), (2048, 1024))
SMALL_SIZES = ((512, 512), (512, 1024), (1024, 512))  # where VMEM is small
LONGEST = (
    8  # a unit is at most this part of the sequence: a longer one wastes too much at the diagonal
)
SMALL_VMEM_MIB = 32
CHUNKS = {"forward": (256, 512, 1024), "backward": (128, 256, 512)}
HELD = {"forward": 16, "backward": 4}
HEADER = ["", "q x k", "chunk", "form", "FULL", "PARTIAL", "whole", ""]

Found = dict[Tiles, Cycles | str]


def tuned(options: KernelOptions) -> Iterator[Table]:
    """A table of what was tried for each generation, pass and width; each best is written at once."""
    table = TileTable.installed()
    table.same_compiler(options)
    for topology in options.topology:
        for direction in DIRECTIONS:
            for width in options.widths:
                found = sweep(topology, direction, replace(options.shape, head_dim=width))
                tiles = best(found)
                table.put(topology.generation.name, direction, width, entry(tiles, found[tiles]))
                yield told(topology, direction, width, found, tiles)


def sweep(topology: Topology, direction: str, shape: Shape) -> Found:
    """The cycles of all tiles tried, or why there are none. Raises what `measure` does."""
    small = topology.generation.vmem_mib <= SMALL_VMEM_MIB
    known = SMALL_SIZES if small else SIZES
    sizes = [known[0], *(size for size in known[1:] if max(size) * LONGEST <= shape.seq_len)]
    held = HELD[direction] // (2 if small else 1)
    start = Tiles(*sizes[0], chunk=CHUNKS[direction][1], held=held)
    found: Found = {}

    def attempt(tries: Sequence[Tiles]) -> Found:
        new = [tiles for tiles in dict.fromkeys(tries) if tiles not in found]
        jobs = [
            Job(OURS, direction, shape, topology.generation.name, of_tiles(tiles)) for tiles in new
        ]
        jobs = [job for job in jobs if fits(job)]
        for one in measure(jobs, topology) if jobs else ():
            found[Tiles(*one.job.tiles or ())] = one.error or weigh(one, topology)
        return {tiles: found[tiles] for tiles in tries if tiles in found}

    if direction == "backward":
        forms = [(down, turned) for down in (True, False) for turned in (True, False)]
        start = best(attempt([replace(start, keys_down=d, turned=t) for d, t in forms]))
    size = best(attempt([replace(start, block_q=q, block_k=k) for q, k in sizes]))
    attempt([replace(size, chunk=chunk) for chunk in CHUNKS[direction]])
    return found


def fits(job: Job) -> bool:
    """Whether the kernel would take these tiles, not smaller ones."""
    tiles, asked = plan_of(job).tiles, Tiles(*job.tiles or ())
    return (tiles.block_q, tiles.block_k) == (asked.block_q, asked.block_k)


def best(found: Found) -> Tiles:
    """As this file says; those whose PARTIAL is too slow only where all are."""
    known = {tiles: one for tiles, one in found.items() if isinstance(one, Cycles)}
    if not known:
        raise CompilerFailed(f"no tile size compiles: {next(iter(found.values()), 'none fits')}")
    fair = {tiles: one for tiles, one in known.items() if one.partial <= MOST * one.full}
    known = fair or known
    return min(known, key=lambda tiles: known[tiles].whole)


def told(topology: Topology, direction: str, width: int, found: Found, chosen: Tiles) -> Table:
    """All that was tried."""
    name = topology.generation.name
    table = Table(f"{name} ({topology.name}), {direction}, width {width}", HEADER)
    for tiles, one in found.items():
        table.rows.append(cells(tiles, one, "<" if tiles == chosen else ""))
        known: dict[str, Any] = {"error": one} if isinstance(one, str) else entry(tiles, one)
        if isinstance(one, Cycles):
            known["whole_cycles_per_head"] = one.whole
        table.records.append(
            {"generation": name, "pass": direction, "width": width, "tiles": vars(tiles), **known}
        )
    return table


def cells(tiles: Tiles, one: Cycles | str, mark: str) -> list[str]:
    """A row."""
    form = ("keys down" if tiles.keys_down else "queries down") + ", turned" * tiles.turned
    size = f"{tiles.block_q} x {tiles.block_k}"
    if isinstance(one, str):
        return [" ".join(one.split())[:40], size, str(tiles.chunk), form, "-", "-", "-", mark]
    figures = f"{one.full:.0f}", f"{one.partial:.0f}", f"{one.whole / 1e3:.1f}"
    return ["", size, str(tiles.chunk), form, *figures, mark]
