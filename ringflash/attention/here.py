"""The devices that a function is traced for, which may be absent ones that are compiled for."""

from __future__ import annotations

from typing import Any

import jax

OPTIONS = {
    "tpu": {
        # Six to ten transfers of a ring stand beside one kernel; XLA's default is five under way.
        "xla_max_concurrent_async_collective_permutes": "16",
        # Of more devices a partner is looked up in a table, not in a tree of comparisons in the code of
        # each transfer: the program does not grow with the ring.
        "xla_tpu_max_collective_permute_tree_core_location_devices": "8",
    }
}


def platform_of(mesh: Any) -> str:
    """Of the mesh's devices; else of the default device."""
    device = getattr(mesh, "abstract_mesh", mesh).abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def platform_here() -> str:
    """Of the mesh that is being traced under, else of the default device."""
    return platform_of(jax.sharding.get_abstract_mesh())


def kind_here() -> str:
    """The device kind of the mesh that is being traced under, else of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str(device.device_kind if device is not None else jax.devices()[0].device_kind)


def compiler_options(mesh: Any) -> dict[str, str]:
    """For the outermost `jax.jit`: transfers of a ring stand under kernels, partners in a table."""
    return dict(OPTIONS.get(platform_of(mesh), {}))
