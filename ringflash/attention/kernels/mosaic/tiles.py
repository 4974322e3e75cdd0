"""Tile sizes of the TPU kernel: a measured table per generation, pass and head width, and a rule.

`tiles.json` is made by `ringflash bench kernel --tune`, which minimises the cycles that the TPU compiler's
schedules show. The rule, for what is not in it: a width takes the row of the next wider one; an unknown
generation takes that of the least VMEM; short sequences take even tiles; and what does not fit into VMEM is
made smaller, first what a step holds, then the tiles.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

LANES = 128
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "7x": 64}  # of one TensorCore
DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
    "TPU 7x": "7x",
}
SHARE = 0.85  # of VMEM, for what we count; the rest is the compiler's


@dataclass(frozen=True)
class Tiles:
    """Sizes of one pass, in rows.

    block_q, block_k: a unit of work.  chunk: how many columns of a score tile a stage takes at a time.
    held: how many tiles a step keeps (forward: of queries, counted over the heads; backward: of keys).
    keys_down, turned: see `backward.Form`; the forward has no choice.
    """

    block_q: int
    block_k: int
    chunk: int
    held: int
    keys_down: bool = True
    turned: bool = True


@functools.cache
def table() -> dict[str, Any]:
    """The file: per generation and pass, per head width the tiles and the cycles they take."""
    text = resources.files(__package__).joinpath("tiles.json").read_text(encoding="ascii")
    read: dict[str, Any] = json.loads(text)
    return read


def generation_of(device_kind: str) -> str:
    """The generation of a `Device.device_kind`; of an unknown one, that with the least VMEM."""
    return DEVICE_KINDS.get(device_kind, min(VMEM_MIB, key=lambda name: VMEM_MIB[name]))


def vmem_bytes(generation: str) -> int:
    """What the kernels may use: less than all, since the compiler needs some."""
    return VMEM_MIB[generation] * 15 // 16 << 20


def row(generation: str, direction: str, width: int) -> dict[str, Any]:
    """The row of the table for a head width, "forward" or "backward"."""
    rows = table()["tiles"][generation][direction]
    widths = sorted(map(int, rows))
    found: dict[str, Any] = rows[str(next((w for w in widths if w >= width), widths[-1]))]
    return found


def best(generation: str, direction: str, width: int) -> Tiles:
    """The tiles of that row."""
    return Tiles(**row(generation, direction, width)["tiles"])


def cycles(generation: str, direction: str, width: int) -> tuple[float, float]:
    """Of a FULL and of a PARTIAL tile of 1024 x 1024 scores, in the loop's body."""
    found = row(generation, direction, width)
    return found["full"], found["partial"]


def tests_cost(generation: str, direction: str, width: int) -> bool:
    """Whether tests make a tile take longer. Elsewhere the matrix units bind, and all can be made at once."""
    full, partial = cycles(generation, direction, width)
    return partial > 1.05 * full


def even(length: int, block: int) -> int:
    """The size of the fewest equal tiles of at most `block` that hold `length`: a multiple of LANES."""
    count = -(-length // block)
    return -(-length // (count * LANES)) * LANES


def fitted(tiles: Tiles, T: int, S: int, room: int, need: Callable[[Tiles], int]) -> Tiles:
    """`tiles` for T queries and S keys, made smaller until need(tiles) bytes are at most `room`."""
    tiles = replace(tiles, block_q=even(T, tiles.block_q), block_k=even(S, tiles.block_k))
    while need(tiles) > room * SHARE:
        largest = max(tiles.block_q, tiles.block_k)
        if tiles.held > 1:
            tiles = replace(tiles, held=tiles.held - 1)
        elif largest == LANES:
            break  # the compiler will say what is too much
        elif tiles.block_q == largest:
            tiles = replace(tiles, block_q=even(largest, largest // 2))
        else:
            tiles = replace(tiles, block_k=even(largest, largest // 2))
    return tiles
