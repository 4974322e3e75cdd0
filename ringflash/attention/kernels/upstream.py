"""Kernels that others wrote, behind our contract; and why some of them cannot serve.

`splash` is JAX's TPU kernel. Its masks go by the index of a key, ours by positions that travel with the
data. The two meet where keys are sorted by segment and position: then causal, prefix and packed masks all
say that a query sees its segment's keys up to some index, whatever the positions, and splash compares
the index of each key with one number for each query. So it serves any layout, any hop of a ring and
packed documents, and EMPTY tiles are skipped.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.kernel import FLOOR, Grads, Kernel, Partial, add_grads, merge
from ringflash.attention.mask import Causal, Full, Mask, Prefix, Segments, Tokens, parts, spans
from ringflash.attention.spec import Request, Spec

Array = jax.Array

# As read in JAX 0.10.2 and tokamax 0.0.12.
REFUSED = {
    "cudnn": "the cuDNN kernel of jax.nn masks by row index, not by position; its backward wants out where "
    "a hop has delta only, and gives dk and dv in 16 bits, which a ring would sum over its hops",
    "tokamax": "its kernels mask by row index, not by position, and their backward wants out where a hop "
    "has delta only",
}
SERVED = (Causal, Full, Prefix, Segments)
UNIT = 128  # lengths are padded to a multiple of the lanes of a TPU
LAST = jnp.iinfo(jnp.int32).max


class Side(NamedTuple):
    """One batch row as splash wants it: heads first, lengths padded, keys in order, all fp32."""

    q_NTH: Array
    k_KSH: Array
    v_KSH: Array
    q_at: Tokens  # fields [1, T]: the position is the index of the last key to be seen
    k_at: Tokens  # fields [1, S]: the position is the index
    order_S: Array


def splash(spec: Spec, *, block: int = 512, interpret: bool = False) -> Kernel:
    """JAX's splash attention, tiles of at most block x block.

    Inputs are widened to fp32, since splash gives out, dk and dv in the dtype of what it is given.
    interpret: run in Pallas' interpreter, slowly, on any platform.
    """

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        row = partial(forward_row, spec, block, interpret)
        part = Partial(*lax.map(lambda x: row(*x), (q, k, v, pair(q_at), pair(k_at))))
        return part if carry is None else merge(carry, part)

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
        row = partial(backward_row, spec, block, interpret)
        xs = (q, k, v, pair(q_at), pair(k_at), dout, lse_BNT, delta_BNT)
        return add_grads(into, Grads(*lax.map(lambda x: row(*x), xs)))

    return Kernel("splash", spec, forward, backward, (), partial(unsupported, interpret=interpret))


def unsupported(request: Request, *, interpret: bool = False) -> str | None:
    """Why splash cannot serve, or None."""
    spec = request.spec
    if request.platform != "tpu" and not interpret:
        return f"splash is for tpu, found {request.platform}"
    if request.dtype not in ("float32", "bfloat16", "float16"):
        return f"splash computes in float32, found {request.dtype}"
    others = [mask for mask in parts(spec.mask) if not isinstance(mask, SERVED)]
    if others:
        return f"splash serves Causal, Full, Prefix and Segments, found {others[0]}"
    if spec.bias is not None:
        return "splash has no bias"
    if spec.dropout:
        return "splash has no dropout"
    try:
        upstream()
    except (ImportError, AttributeError) as error:
        return f"this jax ({jax.__version__}) has another splash than the one known here: {error}"
    return None


def upstream() -> tuple[Any, ...]:
    """The module, its three kernels and its MaskInfo. Raises ImportError or AttributeError."""
    # Pallas for TPU is slow to import, and its inner functions may be elsewhere in another JAX.
    from jax.experimental.pallas.ops.tpu import splash_attention

    splash, info = (
        splash_attention.splash_attention_kernel,
        splash_attention.splash_attention_mask_info,
    )
    inner = splash._splash_attention_forward, splash._splash_attention_bwd_dq
    return splash, *inner, splash._splash_attention_bwd_dkv, info.MaskInfo


def forward_row(
    spec: Spec, block: int, interpret: bool, q: Array, k: Array, v: Array, q_at: Any, k_at: Any
) -> tuple[Array, Array]:
    """One batch row: q [T, N, H], k and v [S, K, H] -> out [T, N, H], lse [N, T]."""
    module, forward, _, _, _ = upstream()
    side = side_of(spec, q, k, v, q_at, k_at)
    bq, bk = tile(side.q_NTH, block), tile(side.k_KSH, block)
    out, (lse,) = forward(
        mask_info(side, bq, bk, by_query=False),
        *side[:3],
        segment_ids(side),
        None,
        block_sizes=module.BlockSizes(block_q=bq, block_kv=bk),
        residual_checkpoint_name=None,
        save_residuals=True,
        **options(spec, interpret),
    )
    out, lse = out[:, : q.shape[0]], lse[:, : q.shape[0]]
    seen = (
        lse > FLOOR / 2
    )  # a row without a key has 0 / 0 there, or the mean of what it must not see
    return jnp.where(seen[..., None], out, 0.0).swapaxes(0, 1), jnp.where(seen, lse, FLOOR)


def backward_row(
    spec: Spec,
    block: int,
    interpret: bool,
    q: Array,
    k: Array,
    v: Array,
    q_at: Any,
    k_at: Any,
    dout: Array,
    lse: Array,
    delta: Array,
) -> tuple[Array, Array, Array]:
    """One batch row, with dout [T, N, H], lse and delta [N, T] -> dq, dk, dv."""
    module, _, bwd_dq, bwd_dkv, _ = upstream()
    side = side_of(spec, q, k, v, q_at, k_at)
    bq, bk = tile(side.q_NTH, block), tile(side.k_KSH, block)
    # exp(FLOOR - lse) must be 0 where a row sees nothing and its lse is FLOOR too.
    stats = [whole(jnp.where(lse > FLOOR / 2, lse, 0.0), axis=1), whole(delta, axis=1)]
    args = (*side[:3], segment_ids(side), None, stats[0], heads_first(dout), stats[1])
    minor = module.QKVLayout.HEAD_DIM_MINOR
    more: dict[str, Any] = {"q_layout": minor, "k_layout": minor, "v_layout": minor}
    more |= {"bq": bq, "bkv": bk, **options(spec, interpret)}
    dq = bwd_dq(*args, mask_info=mask_info(side, bq, bk, by_query=False), **more)
    _, dk, dv = bwd_dkv(
        *args,
        mask_info=mask_info(side, bq, bk, by_query=True),
        bkv_compute=bk,
        use_fused_bwd_kernel=False,
        **more,
    )
    home = [
        jnp.zeros(x.shape, jnp.float32).at[side.order_S].set(g[:, : x.shape[0]].swapaxes(0, 1))
        for x, g in ((k, dk), (v, dv))
    ]
    return dq[:, : q.shape[0]].swapaxes(0, 1) * spec.scale_for(q.shape[2]), *home


def options(spec: Spec, interpret: bool) -> dict[str, Any]:
    """What all three kernels are told. A key is seen up to the query's last one; segments go beside."""
    return {
        "is_mqa": False,
        "mask_value": FLOOR,
        "mask_function": lambda last, index: last >= index,
        "attn_logits_soft_cap": spec.softcap,
        "interpret": interpret,
    }


def side_of(spec: Spec, q: Array, k: Array, v: Array, q_at: Any, k_at: Any) -> Side:
    """Sorted, padded, widened and scaled."""
    order, q_tokens, k_tokens = ranked(spec.mask, Tokens(*q_at), Tokens(*k_at))
    scaled = q.astype(jnp.float32) * spec.scale_for(q.shape[2])
    rows = heads_first(scaled), heads_first(k[order]), heads_first(v[order])
    return Side(*rows, q_tokens, k_tokens, order)


def ranked(mask: Mask, q_at: Tokens, k_at: Tokens) -> tuple[Array, Tokens, Tokens]:
    """The order of the keys, and tokens with which `Causal() & Segments()` is `mask` on them so ordered.

    What is padded, or is added here, has a segment of its own that nothing else has.
    """
    masks = parts(mask)
    T, S = q_at.positions_BT.size, k_at.positions_BT.size
    q_segment, k_segment = q_at.segment_ids_BT, k_at.segment_ids_BT
    if not any(isinstance(m, Segments) for m in masks):
        q_segment, k_segment = jnp.zeros_like(q_segment), jnp.zeros_like(k_segment)
    k_segment = jnp.where(k_at.segment_ids_BT < 0, LAST, k_segment)
    limit = jnp.full(T, LAST)
    for m in masks:
        if isinstance(m, Causal):
            limit = jnp.minimum(limit, q_at.positions_BT)
        elif isinstance(m, Prefix):
            limit = jnp.minimum(limit, jnp.maximum(q_at.positions_BT, m.length - 1))
    order = jnp.lexsort((k_at.positions_BT, k_segment))
    # One sort of keys and queries together: the keys before a query are those it sees, and others.
    is_query = (jnp.arange(S + T) >= S).astype(jnp.int32)
    both = jnp.concatenate([k_segment, q_segment]), jnp.concatenate([k_at.positions_BT, limit])
    place = jnp.lexsort((is_query, both[1], both[0]))
    before = jnp.zeros(S + T, jnp.int32).at[place].set(jnp.cumsum(1 - is_query[place]))
    last, k_ordered = before[S:] - 1, k_segment[order]
    q_tokens = Tokens(whole(last, 0, -1)[None], whole(q_segment, 0, -1)[None])
    index = jnp.arange(S + -S % UNIT)
    return order, q_tokens, Tokens(index[None], whole(k_ordered, 0, LAST)[None])


def mask_info(side: Side, bq: int, bk: int, *, by_query: bool) -> Any:
    """Which tiles to visit, and the block of keys (or, by_query, of queries) to fetch for each."""
    *_, MaskInfo = upstream()
    blocks = side.q_at.positions_BT.size // bq, side.k_at.positions_BT.size // bk
    q_span, k_span = spans(side.q_at, blocks[0]), spans(side.k_at, blocks[1])
    q_span = type(q_span)(*(x[:, :, None] for x in q_span))
    k_span = type(k_span)(*(x[:, None, :] for x in k_span))
    tiles = (Causal() & Segments()).relation(q_span, k_span)
    block = lax.broadcasted_iota(jnp.int32, tiles.shape, 1 if by_query else 2)
    fetch = jnp.where(tiles > 0, block, 0)
    return MaskInfo(fetch, None, tiles, None, side.q_at.positions_BT[0])


def segment_ids(side: Side) -> Any:
    """Of queries and keys."""
    module, *_ = upstream()
    return module.SegmentIds(side.q_at.segment_ids_BT[0], side.k_at.segment_ids_BT[0])


def tile(x_NTH: Array, block: int) -> int:
    """The largest tile that divides the length."""
    size = block
    while x_NTH.shape[1] % size:
        size //= 2
    return size


def heads_first(x: Array) -> Array:
    """[T, N, H] -> fp32 [N, T, H], padded."""
    return whole(x.astype(jnp.float32).swapaxes(0, 1), axis=1)


def whole(x: Array, axis: int, fill: Any = 0) -> Array:
    """Padded to a multiple of UNIT along `axis`."""
    widths = [(0, -n % UNIT if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=fill)


def pair(at: Tokens) -> tuple[Array, Array]:
    """The fields that a row needs, as arrays that `lax.map` can take."""
    return jnp.asarray(at.positions_BT), jnp.asarray(at.segment_ids_BT)
