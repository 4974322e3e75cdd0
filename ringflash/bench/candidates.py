"""A kernel to compile for a TPU: how it is built, and how often the parts of its code run.

A candidate is one small object. `build` runs in the child that has the compiler; `parts` is plain
arithmetic, so that the schedule that comes back can be weighed without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringflash.plan.schedule import Block, Schedule

DIRECTIONS = ("forward", "backward")
PRODUCTS = {"forward": 2, "backward": 5}  # matrix products of [rows, keys] by [keys, width] needed


@dataclass(frozen=True)
class Shape:
    """The attention that is compiled: causal, batch 1."""

    seq_len: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Job:
    """One program to compile. `tiles`: sizes in the candidate's own order; None: its own choice."""

    candidate: str
    direction: str
    shape: Shape
    generation: str
    tiles: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Part:
    """One Pallas kernel of a candidate. The counts are those of one query head.

    rows, keys: the piece of the score matrix that one run of the body computes.
    full, partial: how often the body runs for pieces without and with a mask.
    steps: grid steps, those included that only pass by.  starts: how often an accumulator is begun.
    moved: bytes between HBM and VMEM that go with one run of the body.
    cores: TensorCores of a device that share the heads.
    runs: how often a block runs for one head, where the counts above do not tell it.
    """

    kernel: str  # part of its name
    rows: int
    keys: int
    full: int
    partial: int
    steps: int
    starts: int
    moved: int
    cores: int = 1
    runs: Callable[[Schedule, Block], float] | None = None


@dataclass(frozen=True)
class Candidate:
    """`build(job, device)` -> a function and its abstract arguments; `parts(job)` -> its kernels.

    sweep: what `Job.tiles` may be; each figure of it is told for the tiles that are best there.
    """

    name: str
    needs: str  # the module that must be installed
    build: Callable[[Job, Any], tuple[Callable[..., Any], tuple[Any, ...]]]
    parts: Callable[[Job], list[Part]]
    directions: tuple[str, ...] = DIRECTIONS
    sweep: tuple[tuple[int, ...] | None, ...] = (None,)


def causal_tiles(seq_len: int, block_q: int, block_k: int) -> tuple[int, int]:
    """How many tiles of a causal square are FULL, and how many are PARTIAL."""
    first_q = np.arange(0, seq_len, block_q)[:, None]
    first_k = np.arange(0, seq_len, block_k)[None, :]
    full = int((first_k + block_k - 1 <= first_q).sum())
    met = int((first_k <= first_q + block_q - 1).sum())
    return full, met - full
