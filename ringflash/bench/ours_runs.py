"""What a call of our TPU kernel does, counted: its steps, units and copies, and how often its code runs.

A step of either kernel is: begin, two turns that fill the pipeline, the main loop, two that drain it, finish.
The main loop is one over runs of turns, and in it one loop for each choice of tests, which for a causal mask
are none (FULL) and one (PARTIAL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ringflash.attention.kernels.mosaic.steps import Sizes, Steps, backward_steps, forward_steps
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench.candidates import Job
from ringflash.bench.cycles import bodies_of
from ringflash.plan.schedule import Block, Schedule


def plan_of(job: Job) -> Steps:
    """What the kernel makes of the job."""
    s, wanted = job.shape, Tiles(*job.tiles) if job.tiles else None
    size = jnp.dtype(s.dtype).itemsize
    sizes = Sizes(s.seq_len, s.seq_len, s.heads // s.kv_heads, s.head_dim, s.head_dim, size)
    steps = forward_steps if job.direction == "forward" else backward_steps
    return steps(job.generation, sizes, wanted)


def kinds_of_steps(job: Job, plan: Steps) -> list[list[tuple[int, int]]]:
    """For each step of one head the list of its units: (streamed tile, 0 for FULL or 1 for PARTIAL)."""
    bq, bk = plan.tiles.block_q, plan.tiles.block_k
    first_q = np.arange(0, job.shape.seq_len, bq)[:, None]
    first_k = np.arange(0, job.shape.seq_len, bk)[None, :]
    kind = np.where(first_k + bk - 1 <= first_q, 0, 1)
    kind = np.where(first_k <= first_q + bq - 1, kind, -1)
    resident = kind if job.direction == "forward" else kind.T
    steps = [resident[at : at + plan.held] for at in range(0, len(resident), plan.held)]
    return [
        [
            (c, int(column[r]))
            for c, column in enumerate(step.T)
            for r in np.flatnonzero(column >= 0)
        ]
        for step in steps
    ]


@dataclass
class Counts:
    """How often things happen, for one query head."""

    heads: int
    steps: float = 0
    begins: float = (
        0  # turns of the loops beside the main one: they begin and finish a step, or fetch
    )
    fetched: float = 0  # streamed tiles
    runs: float = 0  # of turns of the main loop, between which there is something else to do
    units: tuple[int, int] = (0, 0)  # FULL and PARTIAL
    main: tuple[float, ...] = (0, 0)  # the same, of the main loop

    def __call__(self, schedule: Schedule, block: Block) -> float:
        """`Part.runs`."""
        if not block.loops:
            return 1 / self.heads
        bodies = bodies_of(schedule)
        loop = bodies[0][0].loops[:-1]
        if block.loops[: len(loop)] == loop:
            for body, turns in zip(bodies, self.main, strict=True):
                if block.loops == body[0].loops:
                    return turns
            skips = {skip for body in bodies for skip in body[0].skips}
            return self.runs if skips.issuperset(block.skips) else self.fetched
        return self.begins if len(block.loops) > 1 else self.steps


def runs_in(kinds: Sequence[int], new: Any, up: bool) -> int:
    """How many runs the turns of the main loop make; `new`: the units that come with a tile.

    A run ends before such a unit, before another kind (of the newest unit, or in the backward of the one
    before it), and in the backward behind the turn that gathers the last unit of a tile.
    """
    kind, turn = np.asarray(kinds), np.arange(3, len(kinds))
    of = turn if up else turn - 1
    begins = np.isin(turn, new) | (kind[of] != kind[of - 1])
    if not up:
        begins |= np.isin(turn - 2, new)
    return int(len(kinds) > 2) + int(begins.sum())


def counts_of(job: Job, plan: Steps) -> Counts:
    """Of the kernel that `plan` describes."""
    up = job.direction == "forward"
    group = job.shape.heads // job.shape.kv_heads
    parts = group // plan.heads
    steps = kinds_of_steps(job, plan)
    main, units, fetched, runs = np.zeros(2), np.zeros(2, int), 0, 0
    for step in steps:
        kinds = [kind for _, kind in step]
        # Forward: a unit for each head in turn. Backward: the list for each head in turn.
        turns = list(np.repeat(kinds, plan.heads)) if up else kinds * plan.heads
        tiles = [tile for tile, _ in step]
        tiles = [t for t in tiles for _ in range(plan.heads)] if up else tiles * plan.heads
        runs += parts * runs_in(turns, np.flatnonzero(np.diff(tiles)) + 1, up)
        units += np.bincount(kinds, minlength=2)
        fetched += len({tile for tile, _ in step}) * (parts if up else group)
        main += parts * np.bincount(turns[2:] if up else turns[1:-1], minlength=2)
    share = len(steps) * parts / group
    return Counts(
        heads=job.shape.heads,
        steps=share,
        begins=share * (plan.heads if up else 1),
        fetched=fetched / group,
        runs=runs / group,
        units=(int(units[0]), int(units[1])),
        main=tuple(map(float, main / group)),
    )
