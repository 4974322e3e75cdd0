"""From names to kernels, strategies and layouts; why a candidate cannot serve; what `auto` takes.

A new kernel is one file and one line here.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ringflash.attention.axis import Factor
from ringflash.attention.kernel import Kernel
from ringflash.attention.kernels.chunked import chunked
from ringflash.attention.kernels.reference import reference
from ringflash.attention.kernels.tpu import tpu
from ringflash.attention.kernels.upstream import REFUSED, splash
from ringflash.attention.layout import Layout, RowLayout, balanced, contiguous, striped, zigzag
from ringflash.attention.spec import Request, Spec
from ringflash.attention.strategies.all_gather import all_gather
from ringflash.attention.strategies.ring import ring
from ringflash.attention.strategies.ulysses import ulysses

log = logging.getLogger(__name__)

Strategy = Callable[[Kernel, Any], Kernel]  # the axis: a name, or a tuple of names

KERNELS: dict[str, Callable[[Spec], Kernel]] = {"chunked": chunked, "reference": reference}
ONE_PLATFORM: dict[str, Callable[[Spec], Kernel]] = {"tpu": tpu, "splash": splash}
STRATEGIES: dict[str, Strategy] = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses}
LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
ROW_LAYOUTS: dict[str, RowLayout] = {"balanced": balanced}
# In the order of preference; elsewhere it is `chunked`. `reference` is never taken unasked.
AUTO = {"tpu": ("tpu", "chunked")}


def make_kernel(name: str, request: Request) -> Kernel:
    """The kernel of that name, or for "auto" the first that serves `request`.

    Raises ValueError with every candidate's reason where none serves, and for an unknown name.
    """
    makers = {**KERNELS, **ONE_PLATFORM}
    if name in REFUSED:
        raise ValueError(f"attention kernel {name} cannot serve: {REFUSED[name]}")
    if name != "auto" and name not in makers:
        raise ValueError(f"attention kernel {name!r} is unknown; known: auto, {', '.join(makers)}")
    reasons: dict[str, str] = {}
    for candidate in AUTO.get(request.platform, ("chunked",)) if name == "auto" else (name,):
        kernel = makers[candidate](request.spec)
        reason = kernel.unsupported(request)
        if reason is None:
            if name == "auto":
                tell(candidate, tuple(reasons.items()))
            return kernel
        reasons[candidate] = reason
    told = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    raise ValueError(f"no attention kernel can serve {request}: {told}")


def order_rows(
    layout: str, positions_BT: np.ndarray, segment_ids_BT: np.ndarray, shards: int
) -> np.ndarray:
    """The order of each row's tokens, [B, T], under the layout of that name."""
    if layout in LAYOUTS:
        order_T = LAYOUTS[layout](positions_BT.shape[1], shards)
        return np.broadcast_to(order_T, positions_BT.shape)
    rows = zip(positions_BT, segment_ids_BT, strict=True)
    return np.stack([ROW_LAYOUTS[layout](p, s, shards) for p, s in rows])


def make_strategy(spelling: str) -> Strategy:
    """A strategy by name, or a composition over factors of the axis: "ulysses:2*ring:4".

    The left one is outermost: ulysses(ring(kernel, 4 devices), 2 devices). Ulysses is given
    neighbouring devices, since all-to-all wants the shortest links; rings lie over what is left, the
    first over the longest strides. Raises ValueError for a spelling that says nothing.
    """
    factors = parse(spelling)
    if len(factors) == 1 and factors[0][1] is None:
        return STRATEGIES[factors[0][0]]
    order = sorted(range(len(factors)), key=lambda n: factors[n][0] == "ulysses")
    strides, stride = {}, 1
    for n in reversed(order):
        strides[n] = stride
        stride *= factors[n][1] or 1

    def strategy(kernel: Kernel, axis: Any) -> Kernel:
        for n in reversed(range(len(factors))):
            name, size = factors[n]
            kernel = STRATEGIES[name](kernel, Factor(axis, size or 1, strides[n]))
        return kernel

    return strategy


def parse(spelling: str) -> list[tuple[str, int | None]]:
    """[("ulysses", 2), ("ring", 4)] of "ulysses:2*ring:4"; the size is None for a bare name.

    Raises ValueError.
    """
    factors: list[tuple[str, int | None]] = []
    for factor in spelling.split("*"):
        name, colon, size = factor.partition(":")
        if name not in STRATEGIES:
            raise ValueError(f"strategy {name!r} is unknown; known: {', '.join(STRATEGIES)}")
        if colon and not (size.isdecimal() and int(size) > 0):
            raise ValueError(f"strategy {factor!r}: wanted {name}:DEVICES")
        factors.append((name, int(size) if colon else None))
    if len(factors) > 1 and any(size is None for _, size in factors):
        raise ValueError(
            f"strategy {spelling!r}: each part needs its devices, as in ulysses:2*ring:4"
        )
    return factors


def check_strategy(spelling: str, devices: int) -> None:
    """Raise ValueError unless the parts of the composition make up `devices`."""
    sizes = [size for _, size in parse(spelling) if size is not None]
    if sizes and math.prod(sizes) != devices:
        product = " * ".join(map(str, sizes))
        raise ValueError(f"strategy {spelling!r} is over {product} devices, found {devices}")


def sizes(spelling: str, devices: int) -> dict[str, int]:
    """Over how many of so many devices each strategy is, by name; 1 for one that is not in the composition.

    Raises ValueError as `parse` does.
    """
    found = dict.fromkeys(STRATEGIES, 1)
    for name, size in parse(spelling):
        found[name] *= size or devices
    return found


@functools.cache
def tell(taken: str, passed_over: tuple[tuple[str, str], ...]) -> None:
    """One line a choice: what serves, what was passed over, and why."""
    over = "; ".join(f"{name}: {reason}" for name, reason in passed_over) or "nothing passed over"
    log.info("attention kernel auto: %s serves (%s)", taken, over)
