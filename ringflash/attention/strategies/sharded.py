"""From a kernel on what one device holds to a kernel on global arrays: the shard_map, and nothing else."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention.kernel import Grads, Kernel, Partial
from ringflash.attention.mask import Tokens

Array = jax.Array
Axes = tuple[str, ...] | str | None


def sharded(kernel: Kernel, mesh: Any, *, batch: Axes, time: Axes, heads: Axes) -> Kernel:
    """`kernel` under a shard_map over `mesh`: batch, time and heads lie on the mesh axes named."""
    wide, rows = P(batch, time, heads, None), P(batch, heads, time)
    part, grads = Partial(wide, rows), Grads(wide, wide, wide)

    def placed(at: Tokens) -> Tokens:
        where = Tokens(P(batch, time), P(batch, time), P(heads), P(batch))
        return Tokens(*(None if x is None else p for x, p in zip(at, where, strict=True)))

    def mapped(f: Any, in_specs: tuple, out_specs: Any) -> Any:
        # Every output is computed by whoever holds it, so replication need not be proved.
        g = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return lambda *args: g(*jax.tree.map(lambda x, p: laid(x, mesh, p), args, in_specs))

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        args: tuple = (q, k, v, q_at, k_at)
        specs: tuple = (wide, wide, wide, placed(q_at), placed(k_at))
        if carry is not None:
            args, specs = (*args, carry), (*specs, part)
        return mapped(kernel.forward, specs, part)(*args)

    def backward(
        q: Array,
        k: Array,
        v: Array,
        q_at: Tokens,
        k_at: Tokens,
        dout: Array,
        lse_BNT: Array,
        delta_BNT: Array,
        into: Grads | None = None,
    ) -> Grads:
        args: tuple = (q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT)
        specs: tuple = (*(wide,) * 3, placed(q_at), placed(k_at), wide, rows, rows)
        if into is not None:
            args, specs = (*args, into), (*specs, grads)
        return mapped(kernel.backward, specs, grads)(*args)

    return Kernel(kernel.name, kernel.spec, forward, backward, (), kernel.unsupported)


def laid(x: Array, mesh: Any, spec: P) -> Array:
    """`x` over those axes of `spec` that are Explicit: a shard_map moves none of these by itself."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit not in kinds.values():
        return x

    def explicit(names: Axes) -> tuple[str, ...] | None:
        every = (names,) if isinstance(names, str) else names or ()
        return tuple(name for name in every if kinds[name] == AxisType.Explicit) or None

    return jax.reshard(x, NamedSharding(mesh, P(*map(explicit, spec))))
