"""Flash attention for TPU in Pallas: the kernels of `mosaic`, forward and backward, behind the contract.

Here: arrays into tiles and back, tile sizes for what is asked, and what it cannot serve. In tiles heads go
before time; V, out, dk and dv may have width before time. XLA does that in the pass that makes or casts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ringflash.attention.axis import alike
from ringflash.attention.cost import Cost, costs_needed
from ringflash.attention.kernel import Grads, Kernel, Partial
from ringflash.attention.kernels.mosaic import backward_call as down
from ringflash.attention.kernels.mosaic import forward_call as up
from ringflash.attention.kernels.mosaic.agenda import Tests, agenda, tests_of_tiles
from ringflash.attention.kernels.mosaic.backward import Form
from ringflash.attention.kernels.mosaic.steps import Sizes, backward_steps, forward_steps
from ringflash.attention.kernels.mosaic.tiles import Tiles, generation_of, vmem_bytes
from ringflash.attention.kernels.mosaic.tiling import (
    beside_queries,
    heads_first,
    marked,
    scaled,
    tested,
    time_first,
    whole,
)
from ringflash.attention.mask import Mask, Tokens, parts
from ringflash.attention.spec import Request, Spec
from ringflash.attention.tile import query_factor

Array = jax.Array
WIDEST = 512  # no head width above this has been compiled
COMPUTED = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float16": jnp.float32}


@dataclass(frozen=True)
class Device:
    """Where a kernel runs: the generation sets tile sizes; interpret, whether Pallas' interpreter runs it."""

    generation: str
    interpret: Any = False

    def options(self, name: str, grid_dims: int, cost: pl.CostEstimate) -> dict[str, Any]:
        """Of `pallas_call`. The last dim of the grid carries state; over the others, cores may share."""
        params = pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL] * (grid_dims - 1) + [pltpu.ARBITRARY],
            vmem_limit_bytes=vmem_bytes(self.generation),
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
    device.  interpret: True, or `pltpu.InterpretParams()`: in an interpreter, slowly, on any platform.
    """

    def device() -> Device:
        return Device(generation_of(device_kind or kind_here()), interpret)

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        wanted = None if tiles is None else tiles[0]
        q, k, v, q_at, k_at, carry = alike((q, k, v, q_at, k_at, carry), q, k, v, q_at, k_at, carry)
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
    (_, T, N, H), (_, S, K, V) = q.shape, v.shape
    dtype = COMPUTED[str(q.dtype)]
    sizes = Sizes(T, S, N // K, H, V, jnp.dtype(dtype).itemsize)
    steps = forward_steps(device.generation, sizes, wanted, carried=carry is not None)
    bq, bk, sub = steps.tiles.block_q, steps.tiles.block_k, steps.held
    q_at, k_at = whole(q_at, bq * sub), whole(k_at, bk)
    nq, nk = (at.positions_BT.shape[1] // n for at, n in ((q_at, bq), (k_at, bk)))
    tests = Tests.of(spec)
    lists = agenda(tests_of_tiles(spec, tests, q_at, k_at, nq, nk), sub, look=nq // sub)
    x = up.Inputs(
        heads_first(scaled(q, spec, dtype), bq, nq),
        heads_first(k.astype(dtype), bk, nk),
        heads_first(v.astype(dtype), bk, nk).swapaxes(3, 4),
        tested(spec, q_at, nq),
        marked(k_at, nk),
    )
    state: list[Array] = []
    if carry is not None:
        state = [carry.out_BTNH.transpose(0, 2, 3, 1), carry.lse_BNT[:, :, None]]
    more = ((0, 0), (0, 0), (0, 0), (0, bq * nq - T))
    cost = estimate(costs_needed(asked(spec, q, v)).forward)
    out, lse = up.forward(
        x,
        tuple(jnp.pad(y, more) for y in state),
        lists=lists,
        tests=tests,
        softcap=spec.softcap,
        heads=steps.heads,
        sub=sub,
        chunk=steps.tiles.chunk,
        options=device.options("ringflash_forward", 4, cost),
    )
    return Partial(out[..., :T].transpose(0, 3, 1, 2), lse[:, :, 0, :T])


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
    (_, T, N, H), (_, S, K, V) = q.shape, v.shape
    dtype = COMPUTED[str(q.dtype)]
    sizes = Sizes(T, S, N // K, H, V, jnp.dtype(dtype).itemsize)
    steps = backward_steps(device.generation, sizes, wanted)
    tiles, held = steps.tiles, steps.held
    bq, bk = tiles.block_q, tiles.block_k
    q_at, k_at = whole(q_at, bq), whole(k_at, bk * held)
    nq, nk = (at.positions_BT.shape[1] // n for at, n in ((q_at, bq), (k_at, bk)))
    tests = Tests.of(spec)
    lists = agenda(tests_of_tiles(spec, tests, q_at, k_at, nq, nk).swapaxes(1, 2), held)
    x = down.Inputs(
        heads_first(scaled(q, spec, dtype), bq, nq),
        heads_first(dout.astype(dtype), bq, nq),
        beside_queries(lse_BNT, delta_BNT, tested(spec, q_at, nq)),
        heads_first(k.astype(dtype), bk, nk),
        heads_first(v.astype(dtype), bk, nk),
        marked(k_at, nk),
    )
    into = Grads(None, None, None) if into is None else into
    dq = jnp.zeros(q.shape, jnp.float32) if into.dq_BTNH is None else into.dq_BTNH
    given: list[Array] = []
    if into.dk_BSKH is not None or into.dv_BSKH is not None:
        pairs = zip(into[1:], (k, v), strict=True)
        whole_ones = [jnp.zeros(x.shape, jnp.float32) if g is None else g for g, x in pairs]
        given = [alike(heads_first(g, bk, nk), x.q) for g in whole_ones]
    if tiles.turned:
        given = [x.swapaxes(3, 4) for x in given]
    scale = spec.scale_for(H)
    form = Form(
        keys_down=tiles.keys_down,
        turned=tiles.turned,
        chunk=tiles.chunk,
        scale=scale,
        unscale=scale / query_factor(spec, H),
        softcap=spec.softcap,
    )
    cost = estimate(costs_needed(asked(spec, q, v)).backward)
    dq, *dkv = down.backward(
        x,
        alike(heads_first(dq, bq, nq), x.q),
        tuple(given),
        lists=lists,
        tests=tests,
        form=form,
        held=held,
        options=device.options("ringflash_backward", 3, cost),
    )
    dk, dv = (y.swapaxes(3, 4) if tiles.turned else y for y in dkv)
    return Grads(time_first(dq, T), time_first(dk, S), time_first(dv, S))


def estimate(cost: Cost) -> pl.CostEstimate:
    """In Pallas' words."""
    return pl.CostEstimate(
        flops=cost.flops, transcendentals=cost.exponentials, bytes_accessed=cost.bytes
    )


def asked(spec: Spec, q: Array, v: Array) -> Request:
    """What these arrays ask for."""
    (B, T, N, H), (_, S, K, V) = q.shape, v.shape
    return Request(B, T, S, N, K, H, V, str(q.dtype), "tpu", spec)
