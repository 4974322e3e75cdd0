"""How a block multiplies with its weights: what a product is, the plain one, and who makes the others.

A product is a function (x, w, axes) -> y: the last `axes` dims of x with the first ones of w, as
`jnp.tensordot` has them. x is [B, T, ...] or [B, shards, T, ...] in the compute dtype, and so is y; w has the
parameters' dtype. The parameters do not depend on it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ringflash.exits import ConfigFault

Array = jax.Array
Product = Callable[[Array, Array, int], Array]
NAMES = ("plain", "int8", "fp8")


def plain(x: Array, w: Array, axes: int) -> Array:
    """In x's dtype."""
    return jnp.tensordot(x, w.astype(x.dtype), axes)


def fault(name: str) -> str | None:
    """Why there can be no product of this name here, in words."""
    if name == "plain" or importlib.util.find_spec("qwix"):
        return None
    return f"{name} products need qwix, which is not installed: pip install 'ringflash[quant]'"


def make_product(name: str, *, rows: int = 1, shards: int = 1) -> Product:
    """The product of this name. rows, shards: in how many parts the devices have the first and second dim.

    Raises ConfigFault where what it needs is not installed.
    """
    if name == "plain":
        return plain
    missing = fault(name)
    if missing:
        raise ConfigFault(missing)
    # An optional extra.
    from ringflash.model.quantized import quantized

    return quantized(name, rows, shards)
