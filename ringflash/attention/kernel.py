"""The contract of a kernel: a pair of pure functions on the arrays that one device holds.

    forward(q_BTNH, k_BSKH, v_BSKH, q_at, k_at, carry=None)              -> Partial
    backward(q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into=None)   -> Grads (dq, dk, dv in fp32)

`Partial` is a softmax that is not finished: more keys may be merged into it. The backward is given the
*final* lse and delta, so the same pair serves on one tile, one hop, one shard or the whole sequence, and
a strategy is a function from kernel to kernel. `differentiable` is the one place where the two become a
function with a gradient. The mathematics is FlashAttention-2 (arXiv:2307.08691, algorithms 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ringflash.attention.mask import Causal, Mask, RealKeys, Span, Tokens

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


@dataclass(frozen=True)
class Spec:
    """What attention computes, apart from how: bound when a kernel is made.

    scale: factor of q.k; None is 1/sqrt(head_dim).  softcap: cap*tanh(score/cap) before the mask.
    """

    mask: Mask = Causal()
    scale: float | None = None
    softcap: float | None = None

    def scale_for(self, head_dim: int) -> float:
        """The scale in use for this head width."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def visible(self, q: Tokens, k: Tokens) -> Array:
        """[B, T, S] truth for the tokens of a tile: the mask, and no key is padding."""
        q_BT1 = Tokens(*(x[..., :, None] for x in q))
        k_B1S = Tokens(*(x[..., None, :] for x in k))
        return (self.mask & RealKeys()).visible(q_BT1, k_B1S)

    def relation(self, q: Span, k: Span) -> Array:
        """EMPTY, PARTIAL or FULL for spans that broadcast against each other."""
        return (self.mask & RealKeys()).relation(q, k)


class Request(NamedTuple):
    """What a kernel is asked to serve, for `unsupported` and `cost`: local shapes and the platform."""

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    value_width: int
    dtype: str
    platform: str
    spec: Spec


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
    axes: tuple[str, ...] = ()
    unsupported: Callable[[Request], str | None] = serves


def check_shapes(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError, with shapes found and wanted, unless q, k and v fit each other."""
    found = f"found q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [batch, time, heads, head_dim]; {found}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, time and heads; {found}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim; {found}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads; {found}")


def differentiable(kernel: Kernel) -> Callable[..., tuple[Array, Array]]:
    """attention(q, k, v, q_at, k_at) -> (out in q's dtype, lse_BNT in fp32), with gradients of both.

    The one custom_vjp of the library. `out` and `lse` carry the names `attention_out` and
    `attention_lse`: a remat policy that saves them never runs the forward, hence the ring, again.
    """

    @jax.custom_vjp
    def attention(q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens) -> tuple[Array, Array]:
        return run(q, k, v, q_at, k_at)[0]

    def run(q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens) -> Any:
        with jax.named_scope(f"attention/{kernel.name}/forward"):
            partial = kernel.forward(q, k, v, q_at, k_at)
        out = checkpoint_name(partial.out_BTNH.astype(q.dtype), "attention_out")
        lse = checkpoint_name(partial.lse_BNT, "attention_lse")
        return (out, lse), (q, k, v, q_at, k_at, out, lse)

    def gradient(saved: Any, cotangents: tuple[Array, Array]) -> Any:
        q, k, v, q_at, k_at, out, lse = saved
        dout, dlse = cotangents
        with jax.named_scope(f"attention/{kernel.name}/backward"):
            delta = row_dot(dout, out) - dlse
            grads = kernel.backward(q, k, v, q_at, k_at, dout, lse, delta)
        return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None

    attention.defvjp(run, gradient)
    return attention


def row_dot(a_BTNH: Array, b_BTNH: Array) -> Array:
    """Sum over the head width in fp32, as [B, N, T]: delta = rowsum(dout * out)."""
    product = a_BTNH.astype(jnp.float32) * b_BTNH.astype(jnp.float32)
    return product.sum(-1).swapaxes(1, 2)
