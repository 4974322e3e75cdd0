"""How a call is cut: the tiles that the table has for it and that fit, and what a step of the grid holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ringflash.attention.kernels.mosaic import backward_call, forward_call
from ringflash.attention.kernels.mosaic.tiles import Tiles, best, fitted, vmem_bytes
from ringflash.attention.kernels.mosaic.tiling import held_of


class Sizes(NamedTuple):
    """Of one call: queries, keys, query heads a key/value head, widths, bytes of an input's number."""

    T: int
    S: int
    group: int
    H: int
    V: int
    itemsize: int


@dataclass(frozen=True)
class Steps:
    """tiles: after `fitted`.  heads: query heads of a step.  held: its tiles of each head, or of keys."""

    tiles: Tiles
    heads: int
    held: int


def forward_steps(
    generation: str, sizes: Sizes, wanted: Tiles | None = None, *, carried: bool = False
) -> Steps:
    """Of the forward. wanted: None is the table's row.  carried: whether it goes on from a Partial."""
    T, S, group, H, V, itemsize = sizes
    wanted = wanted or best(generation, "forward", max(H, V))

    def need(tiles: Tiles) -> int:
        return forward_call.vmem(tiles, H, V, itemsize, carried)

    tiles = fitted(wanted, T, S, vmem_bytes(generation), need)
    heads = max(n for n in range(1, group + 1) if group % n == 0 and n <= tiles.held)
    return Steps(tiles, heads, held_of(-(-T // tiles.block_q), tiles.held // heads))


def backward_steps(
    generation: str, sizes: Sizes, wanted: Tiles | None = None, *, given: bool = False
) -> Steps:
    """Of the backward, which takes all heads of a group. wanted: None is the table's row.

    given: whether there is a dk and dv to add to.
    """
    T, S, group, H, V, itemsize = sizes
    wanted = wanted or best(generation, "backward", max(H, V))

    def need(tiles: Tiles) -> int:
        return backward_call.vmem(tiles, H, V, itemsize, given)

    tiles = fitted(wanted, T, S, vmem_bytes(generation), need)
    return Steps(tiles, group, held_of(-(-S // tiles.block_k), tiles.held))
