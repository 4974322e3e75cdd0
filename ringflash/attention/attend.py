"""`attend`: attention on global arrays, inside anyone's jit, with or without a mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ringflash.attention.dispatch import Strategy, make_kernel, make_strategy
from ringflash.attention.kernel import Kernel, Request, Spec, check_shapes, differentiable
from ringflash.attention.mask import PADDING, Causal, Mask, Segments, Tokens
from ringflash.attention.strategies.sharded import sharded

Array = jax.Array


def attend(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    *,
    at: Tokens | None = None,
    k_at: Tokens | None = None,
    mask: Mask = Causal(),
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
    strategy: str | Strategy = "ring",
    mesh: Any = None,
    axis: str = "context",
    batch_axes: tuple[str, ...] = ("data", "fsdp"),
    heads_axis: str = "tensor",
) -> Array:
    """softmax(scale * q.k + mask) . v, as [B, T, N, value width] in q's dtype.

    q_BTNH, k_BSKH, v_BSKH: as `jax.nn.dot_product_attention` has them; N a multiple of K. Where a mesh is
    given, or set by `jax.set_mesh`, time is sharded over `axis`, batch over `batch_axes`, heads over
    `heads_axis`; axes that the mesh lacks are left out. T and S are any lengths: padding is added here.

    at, k_at: positions and segment ids of the rows as they lie in the arrays (whatever the layout).
    None counts 0, 1, 2, ... and is one segment; `k_at` = None is `at`. With `at`, the mask is taken
    together with `Segments()`: a negative segment id is padding, and its rows give zero.

    Raises ValueError for shapes that do not fit, and for a kernel that cannot serve, with its reason.
    """
    check_shapes(q_BTNH, k_BSKH, v_BSKH)
    q_at = counted(q_BTNH) if at is None else at
    kv_at = k_at if k_at is not None else (q_at if at is not None else counted(k_BSKH))
    check_tokens("at", q_at, q_BTNH)
    check_tokens("k_at", kv_at, k_BSKH)
    if at is not None or k_at is not None:
        mask = mask & Segments()
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    shards = 1 if mesh.empty else mesh.shape.get(axis, 1)
    spec = Spec(mask, scale, softcap)
    local = make_kernel(kernel, request(q_BTNH, k_BSKH, v_BSKH, spec, shards))
    if not mesh.empty:
        local = spread(local, strategy, mesh, axis, batch_axes, heads_axis)
    T = q_BTNH.shape[1]
    q, q_at = padded(q_BTNH, q_at, shards)
    k, kv_at_padded = padded(k_BSKH, kv_at, shards)
    v, _ = padded(v_BSKH, kv_at, shards)
    return differentiable(local)(q, k, v, q_at, kv_at_padded)[0][:, :T]


def spread(
    local: Kernel,
    strategy: str | Strategy,
    mesh: Any,
    axis: str,
    batch_axes: tuple[str, ...],
    heads_axis: str,
) -> Kernel:
    """The local kernel on global arrays: the strategy over `axis`, then the shard_map."""
    names = mesh.axis_names
    if mesh.shape.get(axis, 1) > 1:
        local = (make_strategy(strategy) if isinstance(strategy, str) else strategy)(local, axis)
    batch = tuple(a for a in batch_axes if a in names) or None
    time, heads = (a if a in names else None for a in (axis, heads_axis))
    return sharded(local, mesh, batch=batch, time=time, heads=heads)


def request(q: Array, k: Array, v: Array, spec: Spec, shards: int) -> Request:
    """What one device is asked to serve."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    platform = jax.default_backend()
    return Request(
        B, -(-T // shards), -(-S // shards), N, K, H, v.shape[3], str(q.dtype), platform, spec
    )


def counted(x_BTNH: Array) -> Tokens:
    """Positions 0, 1, 2, ... in one segment."""
    B, T = x_BTNH.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return Tokens(positions, jnp.zeros((B, T), jnp.int32))


def check_tokens(name: str, at: Tokens, x: Array) -> None:
    """Raise ValueError unless `at` describes the rows of x."""
    for field, found in at._asdict().items():
        if found.shape != x.shape[:2]:
            raise ValueError(f"{name}.{field} must be {x.shape[:2]}, found {found.shape}")


def padded(x: Array, at: Tokens, shards: int) -> tuple[Array, Tokens]:
    """Time made a multiple of the shards; what is added is padding."""
    more = -x.shape[1] % shards
    if not more:
        return x, at
    rows = ((0, 0), (0, more))
    at = Tokens(
        jnp.pad(at.positions_BT, rows),
        jnp.pad(at.segment_ids_BT, rows, constant_values=PADDING),
    )
    return jnp.pad(x, (*rows, (0, 0), (0, 0))), at
