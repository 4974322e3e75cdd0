"""All-gather K and V, as Llama 3 does (arXiv:2407.21783, section 3.3.2): one exchange, more memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ringflash.attention.axis import Axis, gathered, sum_scattered
from ringflash.attention.kernel import Grads, Kernel, Partial, add_grads
from ringflash.attention.mask import Tokens
from ringflash.attention.parcel import pack, unpack

Array = jax.Array


def all_gather(kernel: Kernel, axis: Axis) -> Kernel:
    """`kernel` on local queries and the keys of the whole axis; dk and dv are reduce-scattered in fp32."""

    def everything(k: Array, v: Array, at: Tokens) -> tuple[Array, Array, Tokens]:
        parcels = gathered(pack(k, v, at), axis, dim=0, tiled=False)
        ks, vs, ats = jax.vmap(lambda parcel: unpack(parcel, k, v))(parcels)
        return flat(ks), flat(vs), Tokens(flat(ats.positions_BT), flat(ats.segment_ids_BT))

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        k_all, v_all, at_all = everything(k, v, k_at)
        return kernel.forward(q, k_all, v_all, q_at, at_all, carry)

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
        k_all, v_all, at_all = everything(k, v, k_at)
        dq, dk, dv = kernel.backward(q, k_all, v_all, q_at, at_all, dout, lse_BNT, delta_BNT)
        dkv = jnp.concatenate([dk, dv], axis=-1)
        dkv = sum_scattered(dkv, axis, dim=1)
        width = k.shape[3]
        return add_grads(into, Grads(dq, dkv[..., :width], dkv[..., width:]))

    name, axes = f"all_gather({kernel.name})", (axis, *kernel.axes)
    return Kernel(name, kernel.spec, forward, backward, axes, kernel.unsupported)


def flat(x_RBS: Array) -> Array:
    """[ring, B, S, ...] -> [B, ring * S, ...]."""
    x_BRS = jnp.moveaxis(x_RBS, 0, 1)
    return x_BRS.reshape(x_BRS.shape[0], -1, *x_BRS.shape[3:])
