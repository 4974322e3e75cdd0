"""Does the error grow with the ring? bf16 attention against the reference in fp32, ring by ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringflash.attention import Causal, Spec, differentiable
from ringflash.attention.kernels.reference import reference
from ringflash.bench.ours import counted, sharded
from ringflash.bench.peers import Problem, both, of_jax

NAMES = ("out", "dq", "dk", "dv")
LENGTH = 2048  # the reference holds every score at once


def by_ring(x: Problem, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """|found - wanted| / |wanted| in the 2-norm, for jax.nn and for rings of `sizes` devices.

    The reference is given the same numbers, rounded to bf16, and computes in fp32.
    """
    at = counted(x.q.shape[1])
    attention = differentiable(reference(Spec(Causal())))
    rounded = [a.astype(jnp.float32) for a in x.arrays()]
    wanted = results(both(lambda q, k, v: attention(q, k, v, at, at)[0], *rounded))
    found = {"jax.nn": results(of_jax(x))}
    for size in sizes:
        found[f"ring of {size}"] = results(sharded(x, "ring", "contiguous", size))
    return {
        who: dict(zip(NAMES, map(off, these, wanted), strict=True)) for who, these in found.items()
    }


def results(programs: Sequence[Any]) -> list[np.ndarray]:
    """out, dq, dk, dv of the second program, forward+backward."""
    out, gradients = programs[1].run()
    return [np.asarray(jax.device_get(a)).astype(np.float64) for a in (out, *gradients)]


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """The relative error in the 2-norm."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
