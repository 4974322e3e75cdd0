"""What attention costs at least: the pairs that its mask leaves, and each array moved once.

For XLA's scheduler, for profilers and for `plan`. A bound, not a forecast: tiles cut by the mask cost more.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from ringflash.attention.mask import Mask, Tokens
from ringflash.attention.spec import Request

SAMPLES = 256


class Cost(NamedTuple):
    """Operations of matrix products (a multiply and an add are two), exponentials, and bytes of HBM."""

    flops: int
    exponentials: int
    bytes: int


class Costs(NamedTuple):
    """Of one forward and one backward."""

    forward: Cost
    backward: Cost


def share_seen(mask: Mask, T: int, S: int) -> float:
    """The share of the T x S pairs that the mask leaves, the queries being the last T of S positions.

    From the interval of keys of some evenly spaced queries; segments, which are data, do not count.
    A mask that is no interval counts whole.
    """
    at = (np.linspace(0, T - 1, min(T, SAMPLES)).round() + max(0, S - T)).astype(np.int32)[None]
    try:
        with jax.ensure_compile_time_eval():
            lo, hi = mask.bounds(Tokens(at, np.zeros_like(at)))
    except NotImplementedError:
        return 1.0
    first = 0 if lo is None else np.clip(np.asarray(lo), 0, S)
    last = S - 1 if hi is None else np.clip(np.asarray(hi), -1, S - 1)
    return float(np.maximum(np.broadcast_to(last - first + 1, at.shape), 0).mean() / S)


def costs_needed(request: Request) -> Costs:
    """Two products forward, five backward (arXiv:2307.08691, section 3.1), over the pairs the mask leaves."""
    B, T, S, N, K, H, V, dtype, _, spec = request
    pairs = round(B * N * T * S * share_seen(spec.mask, T, S))
    wide = np.dtype("float32").itemsize
    narrow = 2 if dtype in ("bfloat16", "float16") else np.dtype(dtype).itemsize
    inputs = B * (T * N * H + S * K * (H + V)) * narrow
    forward = Cost(2 * pairs * (H + V), pairs, inputs + B * T * N * (V + 1) * wide)
    moved = inputs + B * T * N * (V * narrow + 2 * wide)
    gradients = B * (2 * T * N * H + S * K * (H + V)) * wide  # dq is read and written
    return Costs(forward, Cost(2 * pairs * (3 * H + 2 * V), pairs, moved + gradients))
