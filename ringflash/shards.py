"""What one device holds of an array: the shard_map, and exchanges that do nothing over no mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh

Array = jax.Array
Names = tuple[str, ...]  # mesh axes, the one that varies slowest first


def mapped(f: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`f` on what each device holds; replicated results are sums over all, so that is not proved again.

    For functions that nobody differentiates: without that proof the transpose of a sum is one sum too many.
    """
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def names_of(part: str | Names | None, mesh: Mesh) -> Names:
    """The mesh axes in one part of a PartitionSpec, without those of a single device."""
    every = (part,) if isinstance(part, str) else part or ()
    return tuple(name for name in every if mesh.shape[name] > 1)


def add(x: Any, names: Names) -> Any:
    """The sum over devices, of each leaf."""
    return lax.psum(x, names) if names else x


def greatest(x: Array, names: Names) -> Array:
    """The maximum over devices."""
    return lax.pmax(x, names) if names else x


def gather(x: Array, names: Names) -> Array:
    """The devices' parts of dim 0, one after another."""
    return lax.all_gather(x, names, tiled=True) if names else x


def add_and_scatter(x: Array, names: Names) -> Array:
    """The sum over devices, of which each keeps its part of dim 0: the transpose of `gather`."""
    return lax.psum_scatter(x, names, tiled=True) if names else x


def swap(x: Array, names: Names, *, cut: int, join: int) -> Array:
    """Part n of dim `cut` goes to device n; what comes is joined along dim `join`."""
    if not names:
        return x
    return lax.all_to_all(x, names, split_axis=cut, concat_axis=join, tiled=True)


def place(names: Names) -> Array | int:
    """The number of this device along these mesh axes."""
    return lax.axis_index(names) if names else 0
