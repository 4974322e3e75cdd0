"""From a schedule to cycles: of one tile, and of a whole kernel.

A tile: the cycles of a *body*, the blocks with matrix products that stand in the same loops and under the
same branches, scaled from its own area to 1024 x 1024. A kernel with two bodies of like size has one
for FULL tiles and one for PARTIAL ones: the one with less vector work is FULL.

A whole kernel, for one query head: each block's bundles times how often it runs, over how many heads run
at once. How often follows from where a block stands:
  no loop                               once a call
  a body                                once for each tile that it serves
  beside a body, under its branch       as often as that body
  under a branch with no body           once for each accumulator begun: it starts or ends one
  anything else in a loop               each grid step
A candidate whose code has another form says so itself (`Part.runs`). Waiting for DMA is not in the
schedule, nor what XLA does before and after the kernel (the peers add up a dq for each block of keys):
DMA is told beside the units, as the cycles that its bytes take at the full rate of HBM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ringflash.bench.candidates import PRODUCTS, Job, Part
from ringflash.plan.generations import Generation
from ringflash.plan.schedule import PARTS_OF_OTHERS, UNITS, Block, Schedule

AREA = 1024 * 1024
LIKE = 0.9  # a body has at least this share of the largest one's matrix work


class Body(tuple[Block, ...]):
    """The blocks of one body."""

    @property
    def bundles(self) -> int:
        """Cycles of one run."""
        return sum(block.bundles for block in self)

    def slots(self, unit: str) -> int:
        """Instructions of one unit."""
        return sum(block.slots[unit] for block in self)

    def busy(self, unit: str) -> float:
        """Cycles that a unit needs at least."""
        return sum(block.busy[unit] for block in self)


@dataclass(frozen=True)
class Cycles:
    """What is known of a job.

    busy: cycles a FULL tile by unit, DMA too.  whole: of one query head.  beside: how much longer that is
    than the bodies of all its tiles, as a share: what fills, drains, loops, fetches and begins.
    """

    full: float
    partial: float
    efficiency: (
        float  # of the matrix units' bf16 peak, on a FULL tile, counting needed products only
    )
    busy: dict[str, float]
    spills: int
    vmem_bytes: int | None
    whole: float
    beside: float

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        return max(self.busy, key=lambda unit: self.busy[unit])


def cycles(
    job: Job, parts: Sequence[Part], schedules: Sequence[Schedule], generation: Generation
) -> Cycles:
    """All parts of a job together: those of one tile follow one another."""
    pairs = list(zip(parts, schedules, strict=True))
    bodies = [(part, *bodies_of(schedule)) for part, schedule in pairs]
    full = sum(full.bundles * scale(part) for part, full, _ in bodies)
    busy = {
        unit: sum(full.busy(unit) * scale(part) for part, full, _ in bodies)
        for unit in UNITS
        if unit not in PARTS_OF_OTHERS
    }
    moved = sum(part.moved * scale(part) for part in parts)
    busy["DMA"] = moved / generation.hbm_bytes_per_cycle
    flops = PRODUCTS[job.direction] * 2 * AREA * job.shape.head_dim
    vmem = [schedule.vmem_bytes for schedule in schedules]
    total = sum(whole(part, schedule, job.shape.heads) for part, schedule in pairs)
    inside = sum(
        (part.full * full.bundles + part.partial * partial.bundles) / part.cores
        for part, full, partial in bodies
    )
    return Cycles(
        full=full,
        partial=sum(partial.bundles * scale(part) for part, _, partial in bodies),
        efficiency=flops / (generation.flops_per_cycle * full),
        busy=busy,
        spills=sum(full.slots("SPILL") + full.slots("FILL") for _, full, _ in bodies),
        vmem_bytes=max((v for v in vmem if v is not None), default=None),
        whole=total,
        beside=total / inside - 1,
    )


def scale(part: Part) -> float:
    """How many bodies make up 1024 x 1024."""
    return AREA / (part.rows * part.keys)


def bodies_of(schedule: Schedule) -> tuple[Body, Body]:
    """The body of FULL tiles and that of PARTIAL ones, which may be the same: of the innermost loops."""
    bodies = turns_of(schedule.matrix_blocks())
    if not bodies:
        raise ValueError(f"{schedule.kernel}: wanted a block with matrix products, found none")
    deepest = max(len(body[0].loops) for body in bodies)
    bodies = [body for body in bodies if len(body[0].loops) == deepest]
    most = max(body.slots("MATMUL") for body in bodies)
    bodies = [body for body in bodies if body.slots("MATMUL") >= LIKE * most]
    bodies.sort(key=lambda body: body.slots("VALU"))
    return bodies[0], bodies[-1]


def turns_of(blocks: Sequence[Block]) -> list[Body]:
    """The blocks, those together that follow one another in the same loops and under the same branches."""
    same = itertools.groupby(blocks, key=lambda block: (block.loops, block.skips))
    return [Body(group) for _, group in same]


def whole(part: Part, schedule: Schedule, heads: int) -> float:
    """Cycles of the kernel for one query head, as the docstring of this file counts them."""
    runs = part.runs or (lambda schedule, block: runs_of(part, schedule, block, heads))
    return sum(runs(schedule, block) * block.bundles for block in schedule.blocks) / part.cores


def runs_of(part: Part, schedule: Schedule, block: Block, heads: int) -> float:
    """How often a block runs for one query head."""
    if not block.loops:
        return 1 / heads
    full, partial = bodies_of(schedule)
    place = (block.loops, block.skips)
    serves = {
        (body[0].loops, body[0].skips): n
        for body, n in ((full, part.full), (partial, part.partial))
    }
    if full == partial:
        serves = dict.fromkeys(serves, part.full + part.partial)
    if place in serves:
        return serves[place]
    if block.skips and not any(block.skips[-1] in b.skips for b in (*full, *partial)):
        return part.starts
    return part.steps
