"""From names to kernels, strategies and layouts; why a candidate cannot serve; what `auto` takes.

A new kernel is one file and one line here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from ringflash.attention.kernel import Kernel, Request, Spec
from ringflash.attention.kernels.chunked import chunked
from ringflash.attention.kernels.reference import reference
from ringflash.attention.layout import Layout, contiguous, striped, zigzag
from ringflash.attention.strategies.all_gather import all_gather
from ringflash.attention.strategies.ring import ring

log = logging.getLogger(__name__)

Strategy = Callable[[Kernel, str], Kernel]

KERNELS: dict[str, Callable[[Spec], Kernel]] = {"chunked": chunked, "reference": reference}
STRATEGIES: dict[str, Strategy] = {"ring": ring, "all_gather": all_gather}
LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
AUTO = ("chunked",)  # in the order of preference; `reference` is never taken unasked


def make_kernel(name: str, request: Request) -> Kernel:
    """The kernel of that name, or for "auto" the first that serves `request`.

    Raises ValueError with every candidate's reason where none serves, and for an unknown name.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"attention kernel {name!r} is unknown; known: auto, {', '.join(KERNELS)}")
    reasons: dict[str, str] = {}
    for candidate in AUTO if name == "auto" else (name,):
        kernel = KERNELS[candidate](request.spec)
        reason = kernel.unsupported(request)
        if reason is None:
            if name == "auto":
                tell(candidate, tuple(reasons.items()))
            return kernel
        reasons[candidate] = reason
    told = "; ".join(f"{candidate}: {reason}" for candidate, reason in reasons.items())
    raise ValueError(f"no attention kernel can serve {request}: {told}")


def make_strategy(name: str) -> Strategy:
    """The strategy of that name. Raises ValueError for an unknown one."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown; known: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


@functools.cache
def tell(taken: str, passed_over: tuple[tuple[str, str], ...]) -> None:
    """One line a choice: what serves, what was passed over, and why."""
    over = "; ".join(f"{name}: {reason}" for name, reason in passed_over) or "nothing passed over"
    log.info("attention kernel auto: %s serves (%s)", taken, over)
