"""Flash attention for TPU in Pallas: the kernels of `mosaic`, forward and backward, behind the contract.

Here: arrays into tiles and back, tile sizes for what is asked, and what it cannot serve. In tiles heads go before
time; V, out, dk and dv may have width before time. XLA does that in the pass that makes or casts them anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.axis import alike
from ringflash.attention.kernel import Grads, Kernel, Partial, Request, Spec
from ringflash.attention.kernels.mosaic import backward as down
from ringflash.attention.kernels.mosaic import forward as up
from ringflash.attention.kernels.mosaic.agenda import (
    Tests,
    agenda,
    key_rows,
    query_rows,
    tests_of_tiles,
)
from ringflash.attention.kernels.mosaic.tiles import (
    Tiles,
    best,
    fitted,
    generation_of,
    vmem_bytes,
)
from ringflash.attention.mask import Mask, Tokens, lengthened, parts
from ringflash.attention.tile import LOG2E, query_factor

Array = jax.Array
WIDEST = 512  # no head width above this has been compiled
COMPUTED = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float32}


@dataclass(frozen=True)
class Device:
    """Where a kernel runs: its generation sets tile sizes. interpret: Pallas' interpreter instead, on any platform."""

    generation: str
    interpret: Any = False

    def options(self, name: str, grid_dims: int, cost: pl.CostEstimate) -> dict[str, Any]:
        """Of `pallas_call`. The last dim of the grid carries state; over the others, cores may share."""
        semantics = ("parallel",) * (grid_dims - 1) + ("arbitrary",)
        params = pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=vmem_bytes(self.generation)
        )
        return {
            "name": name,
            "cost_estimate": cost,
            "interpret": self.interpret,
            "compiler_params": params,
        }


def tpu(
    spec: Spec,
    *,
    tiles: tuple[Tiles, Tiles] | None = None,
    device_kind: str | None = None,
    interpret: Any = False,
) -> Kernel:
    """The kernel. tiles: forward's and backward's; None takes the table's.

    device_kind: as `jax.Device.device_kind`; None is that of the mesh it is traced under, or of the default
    device.  interpret: True, or `pltpu.InterpretParams()`, runs it in an interpreter, slowly, on any platform.
    """

    def device() -> Device:
        return Device(generation_of(device_kind or kind_here()), interpret)

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        wanted = None if tiles is None else tiles[0]
        q, k, v, q_at, k_at, carry = alike(
            (q, k, v, q_at, k_at, carry), q, k, v, q_at, k_at, carry
        )
        return forward_tiled(spec, device(), wanted, q, k, v, q_at, k_at, carry)

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
        wanted = None if tiles is None else tiles[1]
        args = (q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into)
        return backward_tiled(spec, device(), wanted, *alike(args, *args))

    def why_not(request: Request) -> str | None:
        return unsupported(request, interpret=bool(interpret))

    return Kernel("tpu", spec, forward, backward, (), why_not)


def unsupported(request: Request, *, interpret: bool = False) -> str | None:
    """Why this kernel cannot serve, or None."""
    spec = request.spec
    if request.platform != "tpu" and not interpret:
        return f"tpu is for tpu, found {request.platform}"
    if request.dtype not in COMPUTED:
        return f"tpu computes {', '.join(COMPUTED)}, found {request.dtype}"
    if max(request.H, request.value_width) > WIDEST:
        return f"tpu has head widths up to {WIDEST}, found {request.H} and {request.value_width}"
    others = [mask for mask in parts(spec.mask) if type(mask).bounds is Mask.bounds]
    if others:
        return f"tpu serves masks that have `bounds`, found {others[0]}"
    if spec.bias is not None:
        return "tpu has no bias"
    if spec.dropout:
        return "tpu has no dropout"
    return None


def kind_here() -> str:
    """The device kind of the mesh that is being traced under, else of the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(abstract.device_kind if abstract is not None else jax.devices()[0].device_kind)


def forward_tiled(
    spec: Spec,
    device: Device,
    wanted: Tiles | None,
    q: Array,
    k: Array,
    v: Array,
    q_at: Tokens,
    k_at: Tokens,
    carry: Partial | None,
) -> Partial:
    """`Kernel.forward`."""
    (B, T, N, H), (_, S, K, V) = q.shape, v.shape
    dtype = COMPUTED[str(q.dtype)]
    wanted = wanted or best(device.generation, "forward", max(H, V))
    room = vmem_bytes(device.generation)
    tiles = fitted(
        wanted, T, S, room, lambda t: up.vmem(t, H, V, jnp.dtype(dtype).itemsize, carry is not None)
    )
    bq, bk = tiles.block_q, tiles.block_k
    heads = max(n for n in range(1, N // K + 1) if N // K % n == 0 and n <= tiles.held)
    sub = held_of(-(-T // bq), tiles.held // heads)
    q_at, k_at = whole(q_at, bq * sub), whole(k_at, bk)
    nq, nk = (at.positions_BT.shape[1] // n for at, n in ((q_at, bq), (k_at, bk)))
    tests = Tests.of(spec)
    lists = agenda(tests_of_tiles(spec, tests, q_at, k_at, nq, nk), sub, look=nq // sub)
    x = up.Inputs(
        heads_first(scaled(q, spec, dtype), bq, nq),
        heads_first(k.astype(dtype), bk, nk),
        heads_first(v.astype(dtype), bk, nk).swapaxes(3, 4),
        jnp.stack([row.reshape(B, nq, bq) for row in query_rows(spec, q_at)], 2),
        jnp.stack([row.reshape(B, nk, bk) for row in key_rows(k_at)[1:]], 2),
    )
    given = None
    if carry is not None:
        out = heads_first(carry.out_BTNH, bq, nq).swapaxes(3, 4)
        given = (out, rows_first(carry.lse_BNT, bq, nq)[..., None, :])
    cost = estimate(spec, q, k, v, products=(1, 1), passes=2)
    out, lse = up.forward(
        x,
        given,
        lists=lists,
        tests=tests,
        softcap=spec.softcap,
        heads=heads,
        sub=sub,
        chunk=tiles.chunk,
        options=device.options("ringflash_forward", 4, cost),
    )
    return Partial(time_first(out.swapaxes(3, 4), T), lse.reshape(B, N, -1)[..., :T])


def backward_tiled(
    spec: Spec,
    device: Device,
    wanted: Tiles | None,
    q: Array,
    k: Array,
    v: Array,
    q_at: Tokens,
    k_at: Tokens,
    dout: Array,
    lse_BNT: Array,
    delta_BNT: Array,
    into: Grads | None,
) -> Grads:
    """`Kernel.backward`."""
    (B, T, N, H), (_, S, _, V) = q.shape, v.shape
    dtype = COMPUTED[str(q.dtype)]
    wanted = wanted or best(device.generation, "backward", max(H, V))
    room = vmem_bytes(device.generation)
    tiles = fitted(wanted, T, S, room, lambda t: down.vmem(t, H, V, jnp.dtype(dtype).itemsize))
    bq, bk = tiles.block_q, tiles.block_k
    held = held_of(-(-S // bk), tiles.held)
    q_at, k_at = whole(q_at, bq), whole(k_at, bk * held)
    nq, nk = (at.positions_BT.shape[1] // n for at, n in ((q_at, bq), (k_at, bk)))
    tests = Tests.of(spec)
    lists = agenda(tests_of_tiles(spec, tests, q_at, k_at, nq, nk).swapaxes(1, 2), held)
    x = down.Inputs(
        heads_first(scaled(q, spec, dtype), bq, nq),
        heads_first(dout.astype(dtype), bq, nq),
        beside_queries(spec, lse_BNT, delta_BNT, q_at, bq, nq),
        heads_first(k.astype(dtype), bk, nk),
        heads_first(v.astype(dtype), bk, nk),
        jnp.stack([row.reshape(B, nk, bk) for row in key_rows(k_at)[1:]], 2),
    )
    into = Grads(None, None, None) if into is None else into
    dq = jnp.zeros(q.shape, jnp.float32) if into.dq_BTNH is None else into.dq_BTNH
    given = None
    if into.dk_BSKH is not None:
        given = heads_first(into.dk_BSKH, bk, nk), heads_first(into.dv_BSKH, bk, nk)
        given = tuple(x.swapaxes(3, 4) for x in given) if tiles.turned else given
    scale = spec.scale_for(H)
    form = down.Form(
        keys_down=tiles.keys_down,
        turned=tiles.turned,
        chunk=tiles.chunk,
        scale=scale,
        unscale=scale / query_factor(spec, H),
        softcap=spec.softcap,
    )
    cost = estimate(spec, q, k, v, products=(3, 2), passes=5)
    dq, *dkv = down.backward(
        x,
        alike(heads_first(dq, bq, nq), x.q),
        given,
        lists=lists,
        tests=tests,
        form=form,
        held=held,
        options=device.options("ringflash_backward", 3, cost),
    )
    dk, dv = (y.swapaxes(3, 4) if tiles.turned else y for y in dkv)
    return Grads(time_first(dq, T), time_first(dk, S), time_first(dv, S))


def beside_queries(
    spec: Spec, lse_BNT: Array, delta_BNT: Array, q_at: Tokens, block: int, count: int
) -> Array:
    """[B, N, tiles, ROWS, block] int32: what the backward needs to know of each query."""

    def bits(x_BNT: Array) -> Array:
        x = rows_first(x_BNT.astype(jnp.float32), block, count)
        return jax.lax.bitcast_convert_type(x, jnp.int32)

    first = [bits(lse_BNT * LOG2E), bits(delta_BNT)]
    for row in query_rows(spec, q_at):
        row = row.reshape(row.shape[0], 1, count, block)
        first.append(jnp.broadcast_to(row, first[0].shape))
    none = jnp.zeros_like(first[0])
    return jnp.stack([*first, *[none] * (down.ROWS - len(first))], 3)


def held_of(tiles: int, most: int) -> int:
    """How many of `tiles` a step holds, at most `most`, so that the fewest steps are even."""
    most = max(1, min(most, tiles, 1 << 4))
    steps = -(-tiles // most)
    return -(-tiles // steps)


def whole(at: Tokens, unit: int) -> Tokens:
    """The tokens, made a multiple of `unit` by padding."""
    return lengthened(Tokens(*at[:2]), -at.positions_BT.shape[1] % unit)


def scaled(q: Array, spec: Spec, dtype: Any) -> Array:
    """q times what the kernel expects to be in it."""
    return (q.astype(jnp.float32) * query_factor(spec, q.shape[3])).astype(dtype)


def heads_first(x_BTNH: Array, block: int, count: int) -> Array:
    """[B, T, heads, width] -> [B, heads, tiles, block, width], padded with zeros."""
    B, T, heads, width = x_BTNH.shape
    x = jnp.pad(x_BTNH, ((0, 0), (0, block * count - T), (0, 0), (0, 0)))
    return x.swapaxes(1, 2).reshape(B, heads, count, block, width)


def rows_first(x_BNT: Array, block: int, count: int) -> Array:
    """[B, N, T] -> [B, N, tiles, block], padded with zeros."""
    B, N, T = x_BNT.shape
    x = jnp.pad(x_BNT, ((0, 0), (0, 0), (0, block * count - T)))
    return x.reshape(B, N, count, block)


def time_first(x: Array, length: int) -> Array:
    """The inverse of `heads_first`, cut to `length`."""
    B, heads, _, _, width = x.shape
    return x.reshape(B, heads, -1, width)[:, :, :length].swapaxes(1, 2)


def estimate(
    spec: Spec, q: Array, k: Array, v: Array, *, products: tuple[int, int], passes: int
) -> pl.CostEstimate:
    """What one call costs, for XLA's scheduler and profilers. products: of width H, and of V's width."""
    (B, T, N, H), (_, S, _, V) = q.shape, v.shape
    share = 1.0
    pairs = B * N * T * S * share
    moved = (q.size + k.size + v.size) * q.dtype.itemsize + passes * B * T * N * V * 4
    return pl.CostEstimate(
        flops=int(2 * pairs * (products[0] * H + products[1] * V)),
        transcendentals=int(pairs),
        bytes_accessed=int(moved),
    )
