"""Flash attention for TPU in Pallas: the kernels of `mosaic`, forward and backward, behind the contract.

Here: the contract, and what it cannot serve. `mosaic.calls` has arrays into tiles and back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax

from ringflash.attention.axis import alike
from ringflash.attention.here import kind_here
from ringflash.attention.kernel import BackwardOf, ForwardOf, Grads, Kernel, Keys, Partial, Prepared
from ringflash.attention.kernels.mosaic.calls import COMPUTED, Call, Device, adds
from ringflash.attention.kernels.mosaic.put import put
from ringflash.attention.kernels.mosaic.tiles import Tiles, best, generation_of
from ringflash.attention.mask import Mask, Tokens, parts
from ringflash.attention.orders import Orders
from ringflash.attention.spec import Request, Spec

Array = jax.Array
WIDEST = 512  # no head width above this has been compiled


def tpu(
    spec: Spec,
    *,
    tiles: tuple[Tiles, Tiles] | None = None,
    device_kind: str | None = None,
    interpret: Any = False,
) -> Kernel:
    """The kernel. tiles: forward's and backward's; None takes the table's.

    device_kind: as `jax.Device.device_kind`; None is that of the mesh it is traced under, or of the default
    device.  interpret: True, or `pltpu.InterpretParams()`: in an interpreter, slowly, on any platform. With
    the latter devices of a mesh wait for each other: see `test_in_a_ring`.
    """

    def device() -> Device:
        return Device(generation_of(device_kind or kind_here()), interpret)

    up, down = tiles or (None, None)

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        q, k, v, q_at, k_at, carry = alike((q, k, v, q_at, k_at, carry), q, k, v, q_at, k_at, carry)
        call = Call.up(spec, device(), up, q, v, carried=carry is not None)
        return call.forward(call.queries(q, q_at), q_at, [k], [v], k_at, carry)

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
        args = (q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into or Grads(None, None, None))
        q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into = alike(args, *args)
        call = Call.down(spec, device(), down, q, v, given=adds(into))
        ready = call.queries(q, q_at, dout, lse_BNT, delta_BNT)
        return call.backward(ready, q_at, [k], [v], k_at, into)

    def forward_of(q: Array, q_at: Tokens, like: tuple[Array, Array]) -> ForwardOf:
        call = Call.up(spec, device(), up, q, like[1], carried=True)
        ready = lax.optimization_barrier(call.queries(q, q_at))

        def run(k: Keys, v: Keys, k_at: Tokens, carry: Partial) -> Partial:
            return call.forward(*alike((ready, q_at, k, v, k_at, carry), ready, k, k_at, carry))

        return run

    def backward_of(
        q: Array, q_at: Tokens, rows: tuple[Array, ...], like: tuple[Array, Array]
    ) -> BackwardOf:
        call = Call.down(spec, device(), down, q, like[1], given=False)
        ready = lax.optimization_barrier(call.queries(q, q_at, *rows))

        def run(k: Keys, v: Keys, k_at: Tokens, dq: Array) -> Grads:
            into = Grads(dq, None, None)
            return call.backward(*alike((ready, q_at, k, v, k_at, into), ready, k, k_at, dq))

        return run

    def why_not(request: Request) -> str | None:
        return unsupported(request, interpret=bool(interpret))

    def orders(width: int, value_width: int) -> Orders:
        widest = max(width, value_width)
        made = "BKHS" if (down or best(device().generation, "backward", widest)).turned else "BKSH"
        return Orders("BKSH", "BKHS", "BKSH", "BKSH", made, made)

    prepared = Prepared(forward_of, backward_of, orders, partial(put, interpret=interpret))
    return Kernel("tpu", spec, forward, backward, (), why_not, prepared=prepared)


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
