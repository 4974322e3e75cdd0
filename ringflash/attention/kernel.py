"""The contract of a kernel: a pair of pure functions on the arrays that one device holds.

    forward(q_BTNH, k_BSKH, v_BSKH, q_at, k_at, carry=None)              -> Partial
    backward(q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into=None)   -> Grads (dq, dk, dv in fp32)

`Partial` is a softmax that is not finished: more keys may be merged into it. The backward is given the
*final* lse and delta, so the same pair serves on one tile, one hop, one shard or the whole sequence, and
a strategy is a function from kernel to kernel. `differentiable` is the one place where the two become a
function with a gradient. The mathematics is FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ringflash.attention.axis import Axis, summed_as
from ringflash.attention.cost import Costs, costs_needed
from ringflash.attention.mask import Tokens
from ringflash.attention.orders import Orders
from ringflash.attention.spec import Request, Spec

Array = jax.Array
FLOOR = -1e30  # the lse of a row that saw nothing: finite, so that no inf - inf is ever formed


class Partial(NamedTuple):
    """An unfinished softmax: `out_BTNH` and `lse_BNT`, both fp32. An empty row: out 0, lse FLOOR."""

    out_BTNH: Any
    lse_BNT: Any


class Grads(NamedTuple):
    """Gradients in fp32, whatever the dtype of the inputs. As `into`, a field may be None: nothing yet."""

    dq_BTNH: Any
    dk_BSKH: Any
    dv_BSKH: Any


def add_grads(into: Grads | None, fresh: Grads) -> Grads:
    """`fresh` added to what a backward was given."""
    if into is None:
        return fresh
    return Grads(*(b if a is None else a + b for a, b in zip(into, fresh, strict=True)))


def empty_partial(q_BTNH: Array, value_width: int) -> Partial:
    """The Partial that has seen no key; the unit of `merge`."""
    B, T, N, _ = q_BTNH.shape
    out = jnp.zeros((B, T, N, value_width), jnp.float32)
    return Partial(out, jnp.full((B, N, T), FLOOR, jnp.float32))


def merge(a: Partial, b: Partial) -> Partial:
    """The softmax over the keys of both. Associative, commutative; an empty row weighs nothing."""
    top = jnp.maximum(a.lse_BNT, b.lse_BNT)
    weight_a, weight_b = jnp.exp(a.lse_BNT - top), jnp.exp(b.lse_BNT - top)
    total = weight_a + weight_b

    def share(weight_BNT: Array, out_BTNH: Array) -> Array:
        return (weight_BNT / total).swapaxes(1, 2)[..., None] * out_BTNH

    out = share(weight_a, a.out_BTNH) + share(weight_b, b.out_BTNH)
    return Partial(out, top + jnp.log(total))


class Forward(Protocol):
    """See the module's docstring."""

    def __call__(
        self, q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial: ...


class Backward(Protocol):
    """See the module's docstring; `into` is what the result is added to."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        q_at: Tokens,
        k_at: Tokens,
        dout: Array,
        lse_BNT: Array,
        delta_BNT: Array,
        into: Grads | None = None,
    ) -> Grads: ...


# K or V [B, S, K, width], whole or some rows of the batch in each: what arrives apart is read where it lies.
Keys = Sequence[Array]
ForwardOf = Callable[[Keys, Keys, Tokens, Partial], Partial]  # k, v, k_at, carry
BackwardOf = Callable[[Keys, Keys, Tokens, Array], Grads]  # k, v, k_at, the dq to add to


class Prepared(NamedTuple):
    """The pair once more, for queries that meet one block of keys after another, as in a ring.

    forward(q, q_at, (k, v)) and backward(q, q_at, (dout, lse, delta), (k, v)) make ready what depends on the
    queries alone, and give the function of the keys; k and v are like each of those that will come.
    orders(width of K, of V): in which the keys best arrive.
    put(fresh, old, behind): `fresh`, in the memory of `old`, when `behind` is there: for loops on a TPU.
    """

    forward: Callable[[Array, Tokens, tuple[Array, Array]], ForwardOf]
    backward: Callable[[Array, Tokens, tuple[Array, ...], tuple[Array, Array]], BackwardOf]
    orders: Callable[[int, int], Orders]
    put: Callable[[Sequence[Array], Sequence[Array], Array], Sequence[Array]]


def serves(request: Request) -> str | None:
    """The `unsupported` of a kernel that takes everything."""
    del request
    return None


@dataclass(frozen=True)
class Kernel:
    """A pair of functions, its name, and the mesh axes that it communicates over (none: local)."""

    name: str
    spec: Spec
    forward: Forward
    backward: Backward
    axes: tuple[Axis, ...] = ()
    unsupported: Callable[[Request], str | None] = serves
    cost: Callable[[Request], Costs] = costs_needed
    prepared: Prepared | None = None  # None: nothing is gained by it


def differentiable(kernel: Kernel) -> Callable[..., tuple[Array, Array]]:
    """attention(q, k, v, q_at, k_at, sinks_N=None) -> (out in q's dtype, lse_BNT in fp32).

    The one custom_vjp of the library, with gradients of both results. `out` and `lse` carry the names
    `attention_out` and `attention_lse`: a remat policy that saves them never runs the forward, hence the
    ring, again. `sinks_N` are learned logits that take part in the softmax without a value
    (arXiv:2309.17453; gpt-oss): they come in here, after the last merge, so they are counted once.
    """

    def run(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, sinks_N: Array | None
    ) -> tuple[tuple[Array, Array], Any]:
        with jax.named_scope(f"attention/{kernel.name}/forward"):
            partial = with_sinks(kernel.forward(q, k, v, q_at, k_at), sinks_N)
        out = checkpoint_name(partial.out_BTNH.astype(q.dtype), "attention_out")
        lse = checkpoint_name(partial.lse_BNT, "attention_lse")
        return (out, lse), (q, k, v, q_at, k_at, sinks_N, out, lse)

    def gradient(saved: Any, cotangents: tuple[Array, Array]) -> Any:
        q, k, v, q_at, k_at, sinks_N, out, lse = saved
        dout, dlse = cotangents
        with jax.named_scope(f"attention/{kernel.name}/backward"):
            delta = row_dot(dout, out) - dlse
            grads = kernel.backward(q, k, v, q_at, k_at, dout, lse, delta)
        dq, dk, dv = (
            summed_as(g, x).astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)
        )
        return dq, dk, dv, None, None, sinks_gradient(sinks_N, lse, delta)

    @jax.custom_vjp
    def attention(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, sinks_N: Array | None
    ) -> tuple[Array, Array]:
        return run(q, k, v, q_at, k_at, sinks_N)[0]

    attention.defvjp(run, gradient)
    return lambda q, k, v, q_at, k_at, sinks_N=None: attention(q, k, v, q_at, k_at, sinks_N)


def with_sinks(partial: Partial, sinks_N: Array | None) -> Partial:
    """The softmax with one more logit per head, whose value is zero."""
    if sinks_N is None:
        return partial
    lse = jnp.logaddexp(partial.lse_BNT, sinks_N.astype(partial.lse_BNT.dtype)[None, :, None])
    share = jnp.exp(partial.lse_BNT - lse).swapaxes(1, 2)[..., None]
    return Partial(partial.out_BTNH * share, lse)


def sinks_gradient(sinks_N: Array | None, lse_BNT: Array, delta_BNT: Array) -> Array | None:
    """-sum of p(sink) * delta over the rows: the sink's own d score, its value being zero."""
    if sinks_N is None:
        return None
    p = jnp.exp(sinks_N.astype(lse_BNT.dtype)[None, :, None] - lse_BNT)
    return summed_as(-(p * delta_BNT).sum((0, 2)), sinks_N).astype(sinks_N.dtype)


def row_dot(a_BTNH: Array, b_BTNH: Array) -> Array:
    """Sum over the head width in fp32 or wider, as [B, N, T]: delta = rowsum(dout * out)."""
    sums = sum_dtype(a_BTNH)
    return (a_BTNH.astype(sums) * b_BTNH.astype(sums)).sum(-1).swapaxes(1, 2)


def sum_dtype(x: Array) -> Any:
    """The dtype to add up in: fp32, or fp64 if that is what came."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32
