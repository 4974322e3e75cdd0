"""`ringflash bench kernel --check`: the rows of the table of tile sizes, compiled again.

The same compiler gives the same cycles. Where they differ by more than `TOLERANCE`, the kernel was changed
and the table was not; where the compiler is another one, all that can be told is whether it compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench.candidates import DIRECTIONS, Job
from ringflash.bench.compiled import Compiled, measure, weigh
from ringflash.bench.kernel_options import OURS, KernelOptions
from ringflash.bench.ours_tpu import of_tiles
from ringflash.bench.report import Table
from ringflash.bench.tile_table import Table as TileTable
from ringflash.bench.tile_table import entry
from ringflash.exits import UNEQUAL, Stop
from ringflash.plan.generations import Topology

TOLERANCE = 0.02
HEADER = ["", "FULL before", "after", "PARTIAL before", "after", ""]


class TilesChanged(Stop):
    """Rows of the table do not hold: a line for each."""

    code = UNEQUAL


@dataclass(frozen=True)
class Row:
    """One of the table, and what compiling it again gave. `after`: cycles by name; or `error`."""

    generation: str
    direction: str
    width: int
    before: dict[str, Any]
    after: dict[str, Any]
    error: str = ""

    @property
    def name(self) -> str:
        """Which kernel, for what."""
        return f"ringflash_{self.direction}, {self.generation}, width {self.width}"

    def faults(self, *, comparable: bool) -> list[str]:
        """What is wrong, a line each."""
        if self.error:
            return [f"{self.name}: does not compile: {self.error}"]
        return [
            f"{self.name}: {part.upper()} tile {self.before[part]} cycles before,"
            f" {self.after[part]} after ({self.change(part):+.1%}):"
            f" wanted within {TOLERANCE:.0%} of the table; --tune makes it anew"
            for part in ("full", "partial")
            if comparable and abs(self.change(part)) > TOLERANCE
        ]

    def change(self, part: str) -> float:
        """How much more it is, as a share."""
        return float(self.after[part] / self.before[part] - 1)


def checked(options: KernelOptions) -> Iterator[Table]:
    """A table for each generation. Raises TilesChanged at the end, with all that does not hold."""
    ours, theirs = metadata.version("libtpu"), TileTable.installed().libtpu
    comparable = ours == theirs
    said = f"libtpu {ours}; the table was made with libtpu {theirs}"
    if not comparable:
        said += ": cycles cannot be compared, only whether all compiles"
    yield Table(said, records=[{"libtpu": ours, "table": theirs, "comparable": comparable}])
    faults: list[str] = []
    for topology in options.topology:
        rows = again(topology, DIRECTIONS, options)
        faults += [line for row in rows for line in row.faults(comparable=comparable)]
        yield told(topology, rows)
    if faults:
        raise TilesChanged(*faults)


def again(topology: Topology, directions: Sequence[str], options: KernelOptions) -> list[Row]:
    """Rows of one generation, of the widths asked for. Raises what `measure` does."""
    name, table = topology.generation.name, TileTable.installed().rows
    wanted = [
        (direction, width, table[name][direction][str(width)])
        for direction in directions
        for width in options.widths
        if str(width) in table[name][direction]
    ]
    jobs = [
        Job(OURS, direction, replace(options.shape, head_dim=width), name, sizes(row))
        for direction, width, row in wanted
    ]
    found = measure(jobs, topology)
    return [
        Row(name, direction, width, row, after(one, topology), one.error)
        for (direction, width, row), one in zip(wanted, found, strict=True)
    ]


def sizes(row: dict[str, Any]) -> tuple[Any, ...]:
    """`Job.tiles` of a row."""
    return of_tiles(Tiles(**row["tiles"]))


def after(one: Compiled, topology: Topology) -> dict[str, Any]:
    """The row as it would be written now; empty where it does not compile."""
    if one.error:
        return {}
    return entry(Tiles(*one.job.tiles or ()), weigh(one, topology))


def told(topology: Topology, rows: list[Row]) -> Table:
    """A table of one generation."""
    table = Table(f"{topology.generation.name} ({topology.name})", HEADER)
    for row in rows:
        table.records.append(vars(row))
        figures = ["-"] * 5
        if not row.error:
            worst = max(("full", "partial"), key=lambda part: abs(row.change(part)))
            pairs = [str(x[part]) for part in ("full", "partial") for x in (row.before, row.after)]
            figures = [*pairs, f"{row.change(worst):+.1%}"]
        table.rows.append([f"{row.direction}, width {row.width}", *figures])
    return table
