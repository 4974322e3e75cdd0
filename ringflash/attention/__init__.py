"""Attention over sequences too long for one device: kernels, strategies, masks and layouts.

A library of its own: it imports nothing else of ringflash. Start with `attend`; README.md is the contract.
"""

from ringflash.attention.attend import Axes, attend
from ringflash.attention.dispatch import (
    KERNELS,
    LAYOUTS,
    ROW_LAYOUTS,
    STRATEGIES,
    make_kernel,
    make_strategy,
    order_rows,
)
from ringflash.attention.here import compiler_options
from ringflash.attention.kernel import (
    FLOOR,
    Grads,
    Kernel,
    Partial,
    differentiable,
    empty_partial,
    merge,
)
from ringflash.attention.mask import (
    EMPTY,
    FULL,
    PADDING,
    PARTIAL,
    Causal,
    Chunked,
    Full,
    Mask,
    Prefix,
    Segments,
    Span,
    Tokens,
    Window,
)
from ringflash.attention.spec import Spec

__all__ = [
    "EMPTY",
    "FLOOR",
    "FULL",
    "KERNELS",
    "LAYOUTS",
    "PADDING",
    "PARTIAL",
    "ROW_LAYOUTS",
    "STRATEGIES",
    "Axes",
    "Causal",
    "Chunked",
    "Full",
    "Grads",
    "Kernel",
    "Mask",
    "Partial",
    "Prefix",
    "Segments",
    "Span",
    "Spec",
    "Tokens",
    "Window",
    "attend",
    "compiler_options",
    "differentiable",
    "empty_partial",
    "make_kernel",
    "make_strategy",
    "merge",
    "order_rows",
]
