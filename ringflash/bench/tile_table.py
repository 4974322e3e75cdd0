"""The file of tile sizes, `tiles.json`: how a row is made and written, and whether it still holds.

Per generation, pass and head width: the tiles, and the cycles that a FULL and a PARTIAL tile take with them.
Those depend on the compiler, so the file says with which libtpu it was made.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ringflash.attention.kernels.mosaic import tiles as mosaic
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench.cycles import Cycles
from ringflash.bench.kernel_options import KernelOptions
from ringflash.exits import ConfigFault
from ringflash.plan.generations import GENERATIONS

UNIT = "cycles of a 1024 x 1024 tile"
FILE = Path(mosaic.__file__).with_name("tiles.json")


@dataclass
class Table:
    """The rows, and the libtpu that they were made with."""

    libtpu: str
    rows: dict[str, dict[str, dict[str, Any]]]

    @staticmethod
    def installed() -> Table:
        """That of this installation."""
        values = mosaic.table()
        return Table(values["libtpu"], values["tiles"])

    def same_compiler(self, options: KernelOptions) -> None:
        """Raises ConfigFault where rows of two compilers would stand in one file."""
        ours = metadata.version("libtpu")
        everything = {t.generation.name for t in options.topology} >= {*GENERATIONS}
        if ours != self.libtpu and not (everything and {*options.widths} >= self.widths()):
            raise ConfigFault(
                f"--tune: the table was made with libtpu {self.libtpu}, here is {ours}:"
                " wanted all generations and all widths"
            )
        self.libtpu = ours

    def widths(self) -> set[int]:
        """All head widths that some row is for."""
        return {int(w) for passes in self.rows.values() for rows in passes.values() for w in rows}

    def put(self, generation: str, direction: str, width: int, row: dict[str, Any]) -> None:
        """Set a row, and write the file."""
        rows = self.rows[generation][direction]
        rows[str(width)] = row
        self.rows[generation][direction] = {w: rows[w] for w in sorted(rows, key=int)}
        text = json.dumps({"libtpu": self.libtpu, "unit": UNIT, "tiles": self.rows}, indent=1)
        FILE.write_text(text + "\n", encoding="ascii")


def entry(tiles: Tiles, found: Cycles | str) -> dict[str, Any]:
    """A row of the table. These must have compiled."""
    assert isinstance(found, Cycles), found
    usual = {f.name: f.default for f in fields(Tiles)}
    sizes = {name: value for name, value in vars(tiles).items() if value != usual[name]}
    return {"tiles": sizes, "full": round(found.full), "partial": round(found.partial)}
