"""The order of dims in which K and V lie: what a kernel reads best, arranged once instead of at each call."""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class Orders(NamedTuple):
    """The order of dims (batch, time, heads, width: B, S, K, H) in which a kernel reads K and V best, and
    makes dk and dv: who keeps or moves them in that order spares a transposition at each call."""

    forward_k: str = "BSKH"
    forward_v: str = "BSKH"
    backward_k: str = "BSKH"
    backward_v: str = "BSKH"
    dk: str = "BSKH"
    dv: str = "BSKH"


def ordered(x_BSKH: Array, order: str) -> Array:
    """x with its dims in that order."""
    return x_BSKH.transpose(*("BSKH".index(dim) for dim in order))


def restored(x: Array, order: str) -> Array:
    """The inverse of `ordered`."""
    return x.transpose(*(order.index(dim) for dim in "BSKH"))
