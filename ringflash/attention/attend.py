"""`attend`: attention on global arrays, inside anyone's jit, with or without a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ringflash.attention.dispatch import Strategy, check_strategy, make_kernel, make_strategy, parse
from ringflash.attention.here import platform_of
from ringflash.attention.kernel import Kernel, differentiable
from ringflash.attention.mask import Causal, Mask, Segments, Tokens, lengthened
from ringflash.attention.spec import Bias, Request, Spec
from ringflash.attention.strategies.sharded import laid, sharded
from ringflash.attention.validate import check_arrays, check_options, int32_tokens

Array = jax.Array


class Axes(NamedTuple):
    """The mesh axes over which an array's dims lie; those that a mesh lacks are left out."""

    batch: tuple[str, ...] = ("data", "fsdp")
    time: tuple[str, ...] = ("context",)
    heads: tuple[str, ...] = ("tensor",)


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
    bias: Bias | None = None,
    sinks_N: Array | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
    kernel: str = "auto",
    strategy: str | Strategy = "ring",
    mesh: Any = None,
    axes: Axes = Axes(),
    return_lse: bool = False,
) -> Any:
    """softmax(scale * q.k + bias, where the mask allows) . v: [B, T, N, value width] in q's dtype.

    q_BTNH, k_BSKH, v_BSKH: as `jax.nn.dot_product_attention` has them; N a multiple of K, the value
    width free. T and S are any lengths and may differ: padding is added here.

    at, k_at: positions and segment ids of the rows as they lie in the arrays, in any order. None counts
    0, 1, 2, ... in one segment; `k_at` = None is `at`. With either, `Segments()` is added to the mask:
    a negative segment id is padding, and its rows give zero.

    scale, softcap, bias, dropout: see `Spec`. dropout_key: a jax.random key; without it nothing is
    dropped. sinks_N: a learned logit per query head in the softmax's denominator.

    mesh: or the one set by `jax.set_mesh`; time lies over `axes.time`, batch over `axes.batch`, heads over
    `axes.heads`. strategy: a name or spelling such as "ulysses:2*ring:4", or a function (kernel, axis) ->
    kernel, where axis is the time axis, or the tuple of them if there are several.

    With return_lse the result is (out, lse_BNT in fp32), both differentiable.
    Raises ValueError for shapes that do not fit, and for a kernel that cannot serve, with its reason.
    """
    check_arrays(q_BTNH, k_BSKH, v_BSKH)
    check_options(mask, bias, sinks_N, q_BTNH)
    if at is not None and k_at is None and q_BTNH.shape[1] != k_BSKH.shape[1]:
        raise ValueError("queries and keys differ in length: give k_at beside at")
    q_at = counted(q_BTNH) if at is None else int32_tokens("at", at, q_BTNH)
    kv_at = counted(k_BSKH) if k_at is None else int32_tokens("k_at", k_at, k_BSKH)
    kv_at = q_at if k_at is None and at is not None else kv_at
    if at is not None or k_at is not None:
        mask = mask & Segments()
        q_BTNH = without_padding(q_BTNH, q_at)
        k_BSKH, v_BSKH = (without_padding(x, kv_at) for x in (k_BSKH, v_BSKH))
    spec = Spec(mask, scale, softcap, bias, dropout)
    if dropout_key is None:
        spec = replace(spec, dropout=0.0)
    q_at = asking(q_at, q_BTNH, spec, dropout_key)

    given, mesh = mesh is not None, jax.sharding.get_abstract_mesh() if mesh is None else mesh
    axes = present(axes, mesh, must=given or axes != Axes())
    if isinstance(strategy, str):
        parse(strategy)
    shards = extent(mesh, axes.time)
    local = make_kernel(kernel, request(q_BTNH, k_BSKH, v_BSKH, spec, mesh, axes))
    if not mesh.empty:
        local = spread(local, strategy, mesh, axes)

    T = q_BTNH.shape[1]
    q, q_at = padded(q_BTNH, q_at, shards)
    k, k_tokens = padded(k_BSKH, kv_at, shards)
    v, _ = padded(v_BSKH, kv_at, shards)
    q, k, v = (laid(x, mesh, P(*axes)) for x in (q, k, v))
    out, lse = differentiable(local)(q, k, v, q_at, k_tokens, sinks_N)
    if q.shape[1] > T:  # what is left need not divide over the time axes
        batch, _, heads = axes
        out, lse = laid(out, mesh, P(batch, None, heads)), laid(lse, mesh, P(batch, heads))
        out, lse = out[:, :T], lse[..., :T]
    return (out, lse) if return_lse else out


def spread(local: Kernel, strategy: str | Strategy, mesh: Any, axes: Axes) -> Kernel:
    """The local kernel on global arrays: the strategy over the time axes, then the shard_map."""
    if extent(mesh, axes.time) > 1:
        if isinstance(strategy, str):
            check_strategy(strategy, extent(mesh, axes.time))
            strategy = make_strategy(strategy)
        local = strategy(local, axes.time[0] if len(axes.time) == 1 else axes.time)
    batch, time, heads = (names or None for names in axes)
    return sharded(local, mesh, batch=batch, time=time, heads=heads)


def present(axes: Axes, mesh: Any, *, must: bool) -> Axes:
    """The axes that the mesh has; a bare name is one axis.

    Raises ValueError where one is named for two dims, or where a mesh that was given has none of them:
    all would be computed on every device.
    """
    wanted = Axes(*((names,) if isinstance(names, str) else tuple(names) for names in axes))
    found = Axes(*(tuple(a for a in names if a in mesh.axis_names) for names in wanted))
    every = [a for names in found for a in names]
    if len(set(every)) < len(every):
        raise ValueError(f"a mesh axis may hold one dim only, found {wanted}")
    if must and not every and mesh.size > 1:
        raise ValueError(
            f"mesh axes {mesh.axis_names} are none of {wanted}: name them in axes=Axes(...)"
        )
    return found


def extent(mesh: Any, names: Sequence[str]) -> int:
    """The number of devices along these mesh axes together."""
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size


def request(q: Any, k: Any, v: Any, spec: Spec, mesh: Any, axes: Axes) -> Request:
    """What one device is asked to serve, from global arrays or their ShapeDtypeStructs."""
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    batch, shards, tensor = (extent(mesh, names) for names in axes)
    for what, found, size, names in (
        ("batch", B, batch, axes.batch),
        ("key/value heads", K, tensor, axes.heads),
    ):
        if found % size:
            raise ValueError(f"{what} {found} must divide over mesh axes {names} of {size} devices")
    return Request(
        B // batch,
        -(-T // shards),
        -(-S // shards),
        N // tensor,
        K // tensor,
        H,
        v.shape[3],
        str(q.dtype),
        platform_of(mesh),
        spec,
    )


def counted(x_BTNH: Array) -> Tokens:
    """Positions 0, 1, 2, ... in one segment."""
    B, T = x_BTNH.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    return Tokens(positions, jnp.zeros((B, T), jnp.int32))


def asking(at: Tokens, q: Array, spec: Spec, dropout_key: Array | None) -> Tokens:
    """With the ids of heads and the seeds of rows that bias and dropout go by, where they are used."""
    if spec.bias is not None or spec.dropout:
        at = at._replace(heads_N=jnp.arange(q.shape[2], dtype=jnp.int32))
    if dropout_key is not None and spec.dropout:
        at = at._replace(seeds_B=jax.random.bits(dropout_key, (q.shape[0],), jnp.uint32))
    return at


def without_padding(x: Array, at: Tokens) -> Array:
    """Zeros where a row is padding, so that whatever lies there, NaN even, reaches nothing."""
    return jnp.where((at.segment_ids_BT >= 0)[:, :, None, None], x, jnp.zeros((), x.dtype))


def padded(x: Array, at: Tokens, shards: int) -> tuple[Array, Tokens]:
    """Time made a multiple of the shards; what is added is padding."""
    more = -x.shape[1] % shards
    if not more:
        return x, at
    return jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0))), lengthened(at, more)
