"""Our attention where flax takes a function: `nnx.MultiHeadAttention(attention_fn=attention_fn(...))`.

Imports no flax: it only has the signature that flax calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ringflash.attention.attend import attend
from ringflash.attention.mask import Causal, Full

Array = jax.Array


def attention_fn(**bound: Any) -> Callable[..., Array]:
    """A function for flax that computes `attend(query, key, value, **bound)`.

    bound: what `attend` takes by keyword: mask (if not given all see all, as in flax), at, kernel,
    strategy, mesh, ... Dropout is flax's to say: its rate and key come with each call.

    Calling it raises ValueError for what flax may hand over and we would have to ignore: a dense mask
    (decoding with a cache makes one) or bias, a precision, weights to be sown.
    """
    if "dropout" in bound or "dropout_key" in bound:
        raise ValueError("dropout is told to flax: nnx.MultiHeadAttention(dropout_rate=...)")

    def attention(
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | None = None,
        broadcast_dropout: bool = False,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
        **unknown: Any,
    ) -> Array:
        refuse(bias, mask, precision, module, unknown)
        dropped = 0.0 if deterministic else dropout_rate
        if dropped and broadcast_dropout:
            raise ValueError(
                "dropout here is drawn for each head and row: pass broadcast_dropout=False, found True"
            )
        options = {"mask": Full(), **bound}
        if is_causal:
            options["mask"] = options["mask"] & Causal()
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        q, k, v = (flat(x).astype(dtype) for x in (query, key, value))
        key_of_dropout = dropout_rng if dropped else None
        out = attend(q, k, v, dropout=dropped, dropout_key=key_of_dropout, **options)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    return attention


def refuse(bias: Any, mask: Any, precision: Any, module: Any, unknown: dict[str, Any]) -> None:
    """Raise ValueError, with what to do instead, for arguments that would change the result."""
    if mask is not None:
        raise ValueError(
            f"a dense mask {shape(mask)} cannot be honoured: say it as a value when binding, "
            "attention_fn(mask=Causal()), Prefix(n), Causal() & Window(n), or at=Tokens(...) for "
            "packed rows and padding"
        )
    if bias is not None:
        raise ValueError(
            f"a dense bias {shape(bias)} cannot be honoured: pass it as a function of positions when "
            "binding, attention_fn(bias=alibi(heads))"
        )
    if precision is not None:
        raise ValueError(f"precision={precision} cannot be honoured: sums are fp32; pass None")
    if module is not None:
        raise ValueError("the weights are never formed, so they cannot be sown: sow_weights=False")
    if unknown:
        raise ValueError(f"arguments {sorted(unknown)} are unknown here; found another flax?")


def shape(x: Any) -> Any:
    """For a message."""
    return getattr(x, "shape", x)


def flat(x: Array) -> Array:
    """All batch dims as one: [B, T, N, H]."""
    if x.ndim < 3:
        raise ValueError(f"wanted [batch..., time, heads, width], found {x.shape}")
    return x.reshape(-1, *x.shape[-3:])
