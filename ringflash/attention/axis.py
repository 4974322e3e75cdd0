"""The collectives that strategies use, over a mesh axis or over a factor of one.

An axis is a name, a tuple of names (taken together, the first outermost), or a `Factor`: the devices of
an axis of a * b are a rows of b neighbours, Factor(name, b, 1) is a row and Factor(name, a, b) a column.
So a strategy composes over parts of one axis without anyone making another mesh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax

Array = jax.Array


class Factor(NamedTuple):
    """`size` devices of mesh axis `name`, `stride` apart."""

    name: str | tuple[str, ...]
    size: int
    stride: int


Axis = str | tuple[str, ...] | Factor


def size_of(axis: Axis) -> int:
    """The number of devices along it."""
    return axis.size if isinstance(axis, Factor) else lax.axis_size(axis)


def groups(axis: Axis) -> tuple[Any, list[list[int]] | None]:
    """The name to give a collective, and the groups of devices that communicate (None: all)."""
    if not isinstance(axis, Factor):
        return axis, None
    total, reach = lax.axis_size(axis.name), axis.size * axis.stride
    firsts = [n for n in range(total) if n % reach < axis.stride]
    return axis.name, [[first + i * axis.stride for i in range(axis.size)] for first in firsts]


def shifted(x: Array, axis: Axis, shift: int) -> Array:
    """x of the device `shift` places before, round the ring."""
    name, sets = groups(axis)
    size = size_of(axis)
    rings = [list(range(size))] if sets is None else sets
    pairs = [(ring[i], ring[(i + shift) % size]) for ring in rings for i in range(size)]
    return lax.ppermute(x, name, pairs)


def gathered(x: Array, axis: Axis, *, dim: int, tiled: bool) -> Array:
    """x of all devices: joined along `dim`, or (not tiled) stacked there."""
    name, sets = groups(axis)
    return lax.all_gather(x, name, axis=dim, tiled=tiled, axis_index_groups=sets)


def exchanged(x: Array, axis: Axis, *, split: int, join: int) -> Array:
    """`split` cut over the devices, and what comes from them joined along `join`."""
    name, sets = groups(axis)
    return lax.all_to_all(
        x, name, split_axis=split, concat_axis=join, tiled=True, axis_index_groups=sets
    )


def sum_scattered(x: Array, axis: Axis, *, dim: int) -> Array:
    """The sum over the devices, each keeping its part of `dim`."""
    name, sets = groups(axis)
    return lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True, axis_index_groups=sets)
