"""What leaves of a configuration must be to one another: divisibility, order, fit.

A combination is judged only where each of its leaves is right alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ringflash.attention.dispatch import check_strategy, parse
from ringflash.attention.strategies.ulysses import key_copies
from ringflash.data.tokenizers import TOKENIZERS
from ringflash.model import matmul
from ringflash.stages import Early, changed
from ringflash.stages import parse as parse_stages

AXES = ("data", "fsdp", "context", "tensor")
MESH = tuple(f"mesh.{axis}" for axis in AXES)


@dataclass(frozen=True)
class Combination:
    """Leaves that must fit together; `fault` takes their values and says what is wanted, if not."""

    keys: tuple[str, ...]
    fault: Callable[..., str | None]


def faults(leaves: Mapping[str, Any], *, platform: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Which leaves do not fit together, and what is wanted.

    `leaves` has the values that are right alone, sizes of the preset filled in. How many devices
    there are is known here on `cpu` only, where they are simulated.
    """
    mesh_keys = (*MESH, "cpu_devices") if platform == "cpu" else MESH
    mesh_fault = _cpu_mesh if platform == "cpu" else _mesh
    of_mesh = list(_judged(Combination(mesh_keys, mesh_fault), leaves))
    yield from of_mesh
    # By a mesh that will be changed nothing else is judged.
    filled = _without_mesh(leaves) if of_mesh else _fill_mesh(leaves, platform)
    for combination in COMBINATIONS:
        yield from _judged(combination, filled)
    yield from _of_stages(filled)


def _judged(
    combination: Combination, leaves: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], str]]:
    if all(key in leaves for key in combination.keys):
        fault = combination.fault(*(leaves[key] for key in combination.keys))
        if fault:
            yield combination.keys, fault


def _without_mesh(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in leaves.items() if key not in MESH}


def _fill_mesh(leaves: Mapping[str, Any], platform: str) -> dict[str, Any]:
    """`leaves` with an axis of -1 replaced by what is left, or left out where that is unknown."""
    open_axes = [axis for axis in MESH if leaves.get(axis) == -1]
    filled = {key: value for key, value in leaves.items() if key not in open_axes}
    known = platform == "cpu" and all(key in leaves for key in (*MESH, "cpu_devices"))
    if known and open_axes:
        fixed = math.prod(filled[axis] for axis in MESH if axis in filled)
        filled[open_axes[0]] = leaves["cpu_devices"] // fixed
    return filled


def _mesh(*sizes: int) -> str | None:
    """One axis at most takes what is left."""
    return "wanted -1 on one axis at most" if sizes.count(-1) > 1 else None


def _cpu_mesh(*sizes_and_devices: int) -> str | None:
    """The mesh takes all simulated devices, or a part that divides them."""
    *sizes, devices = sizes_and_devices
    fixed = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1:
        return _mesh(*sizes)
    if devices % fixed == 0:
        return None
    fit = ", ".join(f"{a} = {s}" for a, s in zip(MESH, _fitting(sizes, devices), strict=True))
    return (
        f"the axes' product is {fixed}, which does not divide cpu_devices = {devices}; "
        f"a mesh that fits: {fit}; or cpu_devices = {fixed}"
    )


def _fitting(sizes: list[int], devices: int) -> list[int]:
    """The mesh nearest to `sizes`, none larger, whose product divides `devices`."""
    left, fit = devices, []
    for size in sizes:
        if size != -1:
            size = max(n for n in range(1, min(size, left) + 1) if left % n == 0)
            left //= size
        fit.append(size)
    return fit


def _nearest(value: int, unit: int) -> str:
    """The multiples of `unit` around `value`, as words."""
    below = value // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n > 0)


def _multiple(name: str) -> Callable[[int, int], str | None]:
    """The first leaf must be a multiple of the second."""

    def fault(value: int, unit: int) -> str | None:
        if value % unit == 0:
            return None
        return f"wanted a multiple of {name} = {unit}; nearest: {_nearest(value, unit)}"

    return fault


def _batch(batch: int, accumulation: int, data: int, fsdp: int) -> str | None:
    unit = accumulation * data * fsdp
    if batch % unit == 0:
        return None
    name = "data * fsdp" if accumulation == 1 else "accumulation * data * fsdp"
    return f"wanted a multiple of {name} = {unit}; nearest: {_nearest(batch, unit)}"


def _seq_len(seq_len: int, context: int, layout: str) -> str | None:
    runs = 2 if layout == "zigzag" else 1
    unit = runs * context
    if seq_len % unit == 0:
        return None
    name = "2 * context" if layout == "zigzag" else "context"
    return f"wanted a multiple of {name} = {unit}; nearest: {_nearest(seq_len, unit)}"


def _even(head_dim: int) -> str | None:
    return None if head_dim % 2 == 0 else f"wanted an even number; nearest: {_nearest(head_dim, 2)}"


def _vocabulary(vocab_size: int, tokenizer: str) -> str | None:
    ids = TOKENIZERS[tokenizer]().vocab_size
    return None if vocab_size >= ids else f"wanted at least the tokenizer's {ids} ids"


def _schedule(schedule: str, warmup: int, decay: int) -> str | None:
    if schedule == "constant" or warmup < decay:
        return None
    return "wanted warmup_steps below decay_steps"


def _decay_start(schedule: str, warmup: int, start: int, decay: int) -> str | None:
    if schedule != "wsd" or warmup >= decay or warmup <= start < decay:
        return None
    return f"wanted decay_start from {warmup} to {decay - 1}: after the warm-up, before the end"


def _strategy(spelling: str, context: int, heads: int, kv_heads: int, tensor: int) -> str | None:
    """The parts make up the context axis, and Ulysses can share the heads out."""
    if heads % tensor or kv_heads % tensor or heads % kv_heads or spelling == "auto":
        return None  # told by itself; auto takes what serves
    try:
        check_strategy(spelling, context)
        for name, size in parse(spelling):
            if name == "ulysses":
                key_copies(heads // tensor, kv_heads // tensor, size or context)
    except ValueError as error:
        return str(error)
    return None


def _of_stages(leaves: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with the spelling of stages, or with the configuration that each of them is."""
    early, wrong = parse_stages(leaves.get("stages", ""))
    told = wrong or [
        f"until={each.until}: {text}" for each in early for text in _stage(each, leaves)
    ]
    yield from ((("stages",), text) for text in told)


def _stage(stage: Early, leaves: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with one stage, by the leaves that it sets."""
    tokens = leaves.get("seq_len", 0) * leaves.get("global_batch_size", 0)
    if tokens % (stage.seq_len or 1):
        yield (
            f"seq_len = {stage.seq_len} does not divide the tokens of a step, "
            f"seq_len * global_batch_size = {tokens}"
        )
        return
    if stage.context and leaves.get("mesh.context", stage.context) % stage.context:
        yield f"context = {stage.context} does not divide mesh.context = {leaves['mesh.context']}"
        return
    sets = changed(stage, leaves)
    known = {key: value for key, value in {**leaves, **sets}.items() if value not in (None, -1)}
    for combination in COMBINATIONS:
        if sets.keys() & set(combination.keys):
            for keys, fault in _judged(combination, known):
                yield f"{', '.join(f'{key} = {known[key]}' for key in keys)}: {fault}"


COMBINATIONS = (
    Combination(
        ("attention.strategy", "mesh.context", "model.heads", "model.kv_heads", "mesh.tensor"),
        _strategy,
    ),
    Combination(("model.heads", "model.kv_heads"), _multiple("kv_heads")),
    Combination(("model.heads", "mesh.tensor"), _multiple("tensor")),
    Combination(("model.kv_heads", "mesh.tensor"), _multiple("tensor")),
    Combination(("model.mlp_width", "mesh.tensor"), _multiple("tensor")),
    Combination(("model.head_dim",), _even),
    Combination(("model.matmul",), matmul.fault),
    Combination(("model.vocab_size", "data.tokenizer"), _vocabulary),
    Combination(("global_batch_size", "accumulation", "mesh.data", "mesh.fsdp"), _batch),
    Combination(("seq_len", "mesh.context", "attention.layout"), _seq_len),
    Combination(
        ("optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps"), _schedule
    ),
    Combination(
        (
            "optimizer.schedule",
            "optimizer.warmup_steps",
            "optimizer.decay_start",
            "optimizer.decay_steps",
        ),
        _decay_start,
    ),
)
