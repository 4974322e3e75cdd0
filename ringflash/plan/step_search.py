"""Which change of a configuration would fit, or be faster: other ones, compiled.

Changed are mesh, remat, accumulation and strategy; what is trained is not: tokens of a step, model and data
stay. What is told to fit was compiled; by `guess` it is only decided what is worth compiling.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ringflash import combinations
from ringflash.config import Config, flat, with_leaves
from ringflash.plan.forecast import choose
from ringflash.plan.generations import Generation
from ringflash.plan.step import StepFacts, compiled
from ringflash.plan.step_guess import guess, job_of
from ringflash.plan.step_time import Step, StepTime, step_time
from ringflash.plan.where import Where

LIGHTER = ("none", "attention", "offload", "full")  # remat, by what it leaves on a device
MOST = 6  # configurations that a search compiles
TRIES = 3  # lengths that are compiled to find the longest
GIB = 2**30


@dataclass(frozen=True)
class Found:
    """A compiled configuration: what is different as leaves, and what came of it."""

    leaves: dict[str, Any]
    where: Where
    facts: StepFacts
    time: StepTime | None

    def __str__(self) -> str:
        flags = " ".join(f"--config.{key}={value}" for key, value in self.leaves.items())
        size = f"{self.facts.needed_bytes / GIB:.2f} GiB"
        speed = (
            f", {self.time.total_seconds:.3g} s a step, MFU {self.time.mfu:.1%}"
            if self.time
            else ""
        )
        return f"{flags or 'as it is'} on {self.where}: {size}{speed}"


def fits(facts: StepFacts, generation: Generation) -> bool:
    """The program's code lies in the same memory."""
    return facts.fits and facts.needed_bytes <= generation.hbm_gib * GIB


def tried(config: Config, where: Where, leaves: dict[str, Any]) -> Found | None:
    """Compiled with other leaves; None where it cannot be put together or does not fit."""
    assert where.generation is not None
    changed = with_leaves(config, leaves)
    (facts,) = compiled([(changed, where)])
    if isinstance(facts, str) or not fits(facts, where.generation):
        return None
    return Found(leaves, where, facts, step_time(Step(changed, where, where.generation, facts)))


def nearest(config: Config, where: Where, mesh: dict[str, int]) -> Found | None:
    """What fits and is least changed: less kept for the backward, then fewer sequences at a time, then a
    slice of twice the size. None if none of them does."""
    for leaves in nearer(config, mesh):
        found = tried(config, where, leaves)
        if found:
            return found
    wider, larger = twice(where), {"mesh.context": 2 * mesh["context"]}
    if wider is None or not right(config, larger):
        return None
    return tried(config, wider, larger) or tried(config, wider, larger | {"model.remat": "full"})


def nearer(config: Config, mesh: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Leaves to change, the least change first."""
    lighter = LIGHTER[LIGHTER.index(config.model.remat) + 1 :]
    rows = config.global_batch_size // (mesh["data"] * mesh["fsdp"])
    parts = [n for n in range(config.accumulation + 1, rows + 1) if rows % n == 0]
    yield from ({"model.remat": each} for each in lighter)
    if parts:
        yield {"accumulation": parts[-1]}
        if lighter:
            yield {"model.remat": "full", "accumulation": parts[-1]}


def right(config: Config, leaves: dict[str, Any]) -> bool:
    """Whether the leaves fit together."""
    return not list(combinations.faults(flat(with_leaves(config, leaves)), platform="tpu"))


def twice(where: Where) -> Where | None:
    """A slice of twice the chips, its shortest side doubled; None: not of this shape."""
    name, _, shape = where.topology.partition(":")
    sides = [int(n) for n in shape.split("x")]
    sides[sides.index(min(sides))] *= 2
    if len(sides) == 2:
        sides.sort()
        if max(sides) > 16:
            return None
    return dataclasses.replace(where, topology=f"{name}:{'x'.join(map(str, sorted(sides)))}")


def search(config: Config, where: Where) -> list[Found]:
    """The quickest that fit, by the estimate: those that `guess` puts first, compiled until `MOST` are."""
    generation = where.generation
    assert generation is not None
    ranked = sorted(
        ((seconds, n, leaves) for n, (seconds, leaves) in enumerate(guessed(config, where)))
    )
    found: list[Found] = []
    for _, _, leaves in ranked[:MOST]:
        one = tried(config, where, leaves)
        found += [one] if one else []
    return sorted(found, key=lambda one: one.time.total_seconds if one.time else math.inf)


def guessed(config: Config, where: Where) -> Iterator[tuple[float, dict[str, Any]]]:
    """Every configuration worth a thought, with its guess; what differs as leaves."""
    assert where.generation is not None
    own = flat(config)
    for mesh, remat in itertools.product(meshes(config, where), LIGHTER):
        rows = config.global_batch_size // (mesh["data"] * mesh["fsdp"])
        for parts in {1, rows}:
            leaves: dict[str, Any] = {f"mesh.{axis}": size for axis, size in mesh.items()}
            leaves |= {"model.remat": remat, "accumulation": parts}
            at_hand = with_leaves(config, leaves)
            served, _ = choose(job_of(at_hand, mesh, where.generation, 1))
            for strategy in dict.fromkeys([config.attention.strategy, served[0].strategy]):
                every = leaves | {"attention.strategy": strategy}
                differs = {key: value for key, value in every.items() if own[key] != value}
                if right(config, differs):
                    yield guess(with_leaves(config, differs), mesh, where.generation), differs


def meshes(config: Config, where: Where) -> Iterator[dict[str, int]]:
    """Every mesh of these devices whose batch axes the sequences of a step fill."""
    devices, batch = where.devices, config.global_batch_size
    for tensor in (n for n in (1, 2, 4, 8) if devices % n == 0 and config.model.kv_heads % n == 0):
        left = devices // tensor
        for context in (n for n in range(1, left + 1) if left % n == 0):
            rest = left // context
            if rest % where.slices == 0 and batch % rest == 0:
                fsdp = rest // where.slices
                yield {"data": where.slices, "fsdp": fsdp, "context": context, "tensor": tensor}


def longest(config: Config, found: Found) -> Found | None:
    """The longest sequence that fits with these leaves, one to each part of the batch's axes."""
    where, mesh = found.where, found.facts.mesh
    assert where.generation is not None
    parts = mesh["data"] * mesh["fsdp"]
    unit = 2 * mesh["context"] * 1024
    facts = found.facts
    room = where.generation.hbm_gib * GIB - facts.needed_bytes
    held = config.seq_len * config.global_batch_size // (parts * config.accumulation)
    tokens = held * (1 + room / facts.temporary_bytes)
    for _ in range(TRIES):
        seq_len = int(tokens) // unit * unit
        if seq_len < unit:
            return None
        leaves = found.leaves | {"seq_len": seq_len, "global_batch_size": parts, "accumulation": 1}
        one = tried(config, where, leaves) if right(config, leaves) else None
        if one:
            return one
        tokens *= 0.9
    return None
