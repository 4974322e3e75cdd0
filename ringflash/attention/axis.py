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


def alike(x: Any, *others: Any) -> Any:
    """The arrays of `x`, typed as varying where any of `others` does: as a loop must start in a shard_map
    with check_vma."""
    axes = varying(others)

    def cast(a: Array) -> Array:
        missing = tuple(axes - varying(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(cast, x)


def summed_as(x: Array, like: Array) -> Array:
    """The gradient `x` of `like`, summed over the axes where `like` is the same on every device."""
    missing = tuple(varying(x) - varying(like))
    return lax.psum(x, missing) if missing else x


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which some array of `x` is typed as varying: none outside such a shard_map."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(x)))
