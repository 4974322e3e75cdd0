"""What a caller can get wrong in `attend`, told with what was found and what was wanted."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ringflash.attention.mask import Mask, Tokens

LARGEST = 2**30  # positions are subtracted in int32


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raise ValueError, with shapes and dtypes found and wanted, unless q, k and v fit each other."""
    found = f"found q {q.shape} {q.dtype}, k {k.shape} {k.dtype}, v {v.shape} {v.dtype}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k, v must be [batch, time, heads, head_dim]; {found}")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"no dim of q, k, v may be empty; {found}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must agree in batch, time and heads; {found}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim; {found}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads; {found}")
    if not jnp.issubdtype(q.dtype, jnp.floating) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must be of one floating dtype; {found}")


def check_options(mask: Any, bias: Any, sinks_N: Any, q: Any) -> None:
    """Raise ValueError unless the mask is a Mask, the bias a function, the sinks one for each head."""
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask such as Causal() or Window(4096), found {mask!r}")
    if bias is not None and not callable(bias):
        raise ValueError("bias must be a function (q position, k position, head), such as alibi(8)")
    if sinks_N is not None and np.shape(sinks_N) != (q.shape[2],):
        raise ValueError(f"sinks_N must be {(q.shape[2],)}, found {np.shape(sinks_N)}")


def int32_tokens(name: str, at: Any, x: Any) -> Tokens:
    """`at` in int32. Raises ValueError unless it describes the rows of x in whole, signed numbers."""
    if not isinstance(at, Tokens):
        raise ValueError(
            f"{name} must be Tokens(positions, segment_ids), found {type(at).__name__}"
        )
    fields = []
    for field, value in zip(at._fields[:2], at[:2], strict=True):
        value = value if hasattr(value, "dtype") else np.asarray(value)
        if value.shape != x.shape[:2]:
            raise ValueError(f"{name}.{field} must be {x.shape[:2]}, found {value.shape}")
        if not jnp.issubdtype(value.dtype, jnp.signedinteger):
            raise ValueError(f"{name}.{field} must be signed integers, found {value.dtype}")
        if isinstance(value, np.ndarray) and (np.abs(value.astype(np.int64)) > LARGEST).any():
            raise ValueError(f"{name}.{field} must lie within 2**30, found {np.abs(value).max()}")
        fields.append(jnp.asarray(value).astype(jnp.int32))
    return Tokens(*fields)
