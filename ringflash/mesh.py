"""The device mesh: its axes, and which of them each kind of array is sharded over.

    data     batch                    fsdp     batch and parameters
    context  sequence and parameters  tensor   heads, MLP width, vocabulary

Nothing here depends on the model: a parameter is known by the last name on its path.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.config import MeshConfig
from ringflash.ring_order import arrange, has_coordinates

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
BATCH = P(BATCH_AXES, "context")

SPLIT = ("fsdp", "context")  # what parameters are split over, beside heads, MLP width, vocabulary
RULES: dict[str, P] = {
    "embedding_VD": P("tensor", SPLIT),
    "unembedding_DV": P(SPLIT, "tensor"),
    "q_DNH": P(SPLIT, "tensor", None),
    "k_DKH": P(SPLIT, "tensor", None),
    "v_DKH": P(SPLIT, "tensor", None),
    "out_NHD": P("tensor", None, SPLIT),
    "gate_DF": P(SPLIT, "tensor"),
    "up_DF": P(SPLIT, "tensor"),
    "down_FD": P("tensor", SPLIT),
    "scale_D": P(None),
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over these devices (None: all there are).

    On TPU the order is that of `ring_order`: neighbours along `context` are one link apart wherever the
    slice allows it.  Raises ValueError where the product does not match the number of devices, or
    slices do not divide `data`.
    """
    sizes = list(dataclasses.astuple(config))
    devices = jax.devices() if devices is None else devices
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = max(1, len(devices) // known)
    if math.prod(sizes) != len(devices):
        shape = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        raise ValueError(f"the mesh {shape} takes {math.prod(sizes)} devices, found {len(devices)}")
    auto = (AxisType.Auto,) * len(AXES)
    if has_coordinates(devices):
        placed = arrange(devices, dict(zip(AXES, sizes, strict=True)))
        return Mesh(placed, AXES, axis_types=auto)
    return jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A NamedSharding per leaf, by `RULES`; scalars and what has no rule are replicated.

    A dim that does not divide by its mesh axes is left whole (a vocabulary of 258, say). Leading dims
    that the rule does not name, such as stacked layers, are left whole too.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec(path, leaf.shape, mesh)), tree
    )


def spec(path: tuple[Any, ...], shape: tuple[int, ...], mesh: Mesh) -> P:
    """The PartitionSpec of one leaf; optimizer moments have the parameter's name on their path."""
    names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    rule = next((RULES[name] for name in reversed(names) if name in RULES), P())
    if len(rule) > len(shape):
        return P()
    axes = [None] * (len(shape) - len(rule)) + list(rule)
    fits = [
        axis if axis is not None and size % extent(axis, mesh) == 0 else None
        for axis, size in zip(axes, shape, strict=True)
    ]
    return P(*fits)


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The PartitionSpec of the parameter of this name."""
    return spec((jax.tree_util.DictKey(name),), shape, mesh)


def extent(axis: str | tuple[str, ...], mesh: Mesh) -> int:
    """The number of devices along one mesh axis, or along several together."""
    return math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis))


def move(tree: Any, like: Any, *, donate: bool = False) -> Any:
    """Arrays as `like`, a tree of jax.ShapeDtypeStruct, has them, on the same devices in any order.

    Nothing goes through the host. Where only the split between fsdp and context is another and the order of
    devices is not, each part lies where it should already, and nothing is copied. donate: each array is given
    up when it is moved, so that there is never more than one of them twice.
    """
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding, donate=donate), tree, like)


def put(tree: Any, mesh: Mesh) -> Any:
    """A batch of host arrays [B, T] as global arrays, batch and sequence sharded."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree
    )
