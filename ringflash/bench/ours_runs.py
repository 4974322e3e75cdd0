"""What a call of our TPU kernel does, counted: its steps, units and copies, and how often its code runs.

A step of either kernel is: begin, two turns that fill the pipeline, the main loop, two that drain it, finish.
The main loop has one body per choice of tests, which for a causal mask are none (FULL) and one (PARTIAL).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ringflash.attention.kernels.mosaic.steps import Sizes, Steps, backward_steps, forward_steps
from ringflash.attention.kernels.mosaic.tiles import Tiles
from ringflash.bench.candidates import Job
from ringflash.bench.cycles import bodies_of, turns_of
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
    begins: float = 0  # turns of the loops that begin and finish a step
    fetched: float = 0  # streamed tiles
    units: tuple[int, int] = (0, 0)  # FULL and PARTIAL
    main: tuple[float, ...] = (0, 0)  # the same, of the main loop
    ends: tuple[float, ...] = ()  # the turns outside of it, in the order of their code

    def __call__(self, schedule: Schedule, block: Block) -> float:
        """`Part.runs`."""
        if not block.loops:
            return 1 / self.heads
        bodies = bodies_of(schedule)
        depth, loop = bodies[0][0].loops, bodies[0][0].skips[:-1]
        if block.loops == depth and block.skips[: len(loop)] == loop:
            for body, runs in zip(bodies, self.main, strict=True):
                if block in body:
                    return runs
            return self.fetched if len(block.skips) > len(loop) else sum(self.main)
        if block.slots["MATMUL"]:
            return self.ends[self.which(schedule, block, depth)]
        return self.begins if block.loops > 1 else self.steps

    def which(self, schedule: Schedule, block: Block, depth: int) -> int:
        """Which of the turns outside of the main loop a block belongs to."""
        outside = [b for b in schedule.matrix_blocks() if b.loops < depth]
        turns = turns_of(outside)
        if len(turns) != len(self.ends):
            raise ValueError(
                f"{schedule.kernel}: wanted {len(self.ends)} turns beside the main loop,"
                f" found {len(turns)}"
            )
        return next(n for n, turn in enumerate(turns) if block in turn)


def counts_of(job: Job, plan: Steps) -> Counts:
    """Of the kernel that `plan` describes."""
    up = job.direction == "forward"
    group = job.shape.heads // job.shape.kv_heads
    parts = group // plan.heads
    steps = kinds_of_steps(job, plan)
    ends, main, units, fetched = np.zeros((4, 2)), np.zeros(2), np.zeros(2, int), 0
    for step in steps:
        kinds = [kind for _, kind in step]
        # Forward: a unit for each head in turn. Backward: the list for each head in turn.
        turns = list(np.repeat(kinds, plan.heads)) if up else kinds * plan.heads
        units += np.bincount(kinds, minlength=2)
        fetched += len({tile for tile, _ in step}) * (parts if up else group)
        main += parts * np.bincount(turns[2:] if up else turns[1:-1], minlength=2)
        for end, at in zip(ends, (0, 1) if up else (0, -1), strict=False):
            end[turns[at]] += parts
    once = float(len(steps) * parts)
    first, second = ends[0] / group, ends[1] / group
    share = once / group
    around = (*first, *second, share, share) if up else (share, *first, *second, share)
    return Counts(
        heads=job.shape.heads,
        steps=share,
        begins=share * plan.heads,
        fetched=fetched / group,
        units=(int(units[0]), int(units[1])),
        main=tuple(map(float, main / group)),
        ends=tuple(map(float, around)),
    )
