"""Which way the parcels of a ring go, and how far.

- `split`: two parcels, one up the ring and one down, each len(axis) - 1 hops.
- `near`: all keys up, then down, only as far as some query can see. For windows and short documents; taken,
  by a condition that is the same on all devices, where it costs fewer transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.axis import Axis, gathered, size_of
from ringflash.attention.kernel import Kernel
from ringflash.attention.mask import EMPTY, Span, Tokens, spans

Array = jax.Array
SPAN_BLOCKS = (
    8  # a shard is described by the spans of so many runs; a zigzag shard needs at least 2
)


class Route(NamedTuple):
    """Parcels, how far they go, and whether they serve the block at home."""

    shifts: tuple[int, int]  # of the parcels: +1 goes up the ring, -1 down
    hops: int | Array
    home: bool
    onward: bool  # dk and dv come home by going on round the ring; else by going back

    def if_any(self, go: Callable[[Any], Any], state: Any) -> Any:
        """go(state), or `state` where there is nothing to do."""
        if self.home:
            return go(state)
        return lax.cond(jnp.asarray(self.hops) > 0, go, lambda state: state, state)


def routed(
    kernel: Kernel,
    axis: Axis,
    q_at: Tokens,
    k_at: Tokens,
    along: Callable[[Any], Any],
) -> Any:
    """`along` the routes that cost least: half of K and V over len(axis) - 1 hops, or all over a few."""
    size = size_of(axis)
    split = [Route((1, -1), size - 1, home=True, onward=True)]
    # A kernel that communicates shortens its own way; two routes at each level would multiply.
    if kernel.axes or not kernel.spec.mask.local:
        return along(split)
    up, down = reach(kernel, axis, q_at, k_at)
    near = [
        Route((1, 1), up, home=True, onward=False),
        Route((-1, -1), down, home=False, onward=False),
    ]
    if size == 2:
        return along(near)
    return lax.cond(2 * (up + down) < size, lambda: along(near), lambda: along(split))


def reach(kernel: Kernel, axis: Axis, q_at: Tokens, k_at: Tokens) -> tuple[Array, Array]:
    """How many hops up and down some query somewhere needs, taking for each pair the shorter way.

    Exchanges a few spans per shard. The same on every device of the mesh, as a loop bound must be.
    """
    size = size_of(axis)

    def everywhere(at: Tokens) -> Span:  # fields [ring, batch, runs]
        blocks = SPAN_BLOCKS if at.positions_BT.shape[1] % SPAN_BLOCKS == 0 else 1
        return Span(*(gathered(x, axis, dim=0, tiled=False) for x in spans(at, blocks)))

    q_span = Span(*(x[:, None, :, :, None] for x in everywhere(q_at)))
    k_span = Span(*(x[None, :, :, None, :] for x in everywhere(k_at)))
    meet_RR = (kernel.spec.relation(q_span, k_span) > EMPTY).any((2, 3, 4))
    rank = jnp.arange(size)
    up_RR = (rank[:, None] - rank[None]) % size  # hops up the ring from the owner of k to q
    up = jnp.where(meet_RR & (2 * up_RR <= size), up_RR, 0).max()
    down = jnp.where(meet_RR & (2 * up_RR > size), size - up_RR, 0).max()
    everyone = jax.sharding.get_abstract_mesh().manual_axes
    return lax.pmax(up, everyone), lax.pmax(down, everyone)
