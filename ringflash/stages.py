"""The stages of a run: shorter sequences first, by `config.stages`, and then what the config itself says.

    until=1000 seq_len=8192 context=2 theta=10000; until=1500 seq_len=32768 context=4

The first 1000 steps are of the first stage, the next 500 of the second, all others of the config's own
`seq_len`, `mesh.context` and `model.rope_theta`; a stage that leaves one of the three out has the config's.
Each step has as many tokens as any other, so `global_batch_size` follows; devices that `context` gives up
go to `fsdp`. A stage is a configuration like any other, without stages: nothing else knows of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ringflash.config import Config, with_leaves

EXAMPLE = "until=1000 seq_len=8192 context=2 theta=10000; until=1500 ..."


@dataclass(frozen=True)
class Early:
    """A stage as it is spelled, up to the step `until`; what it leaves out is None."""

    until: int
    seq_len: int | None = None  # tokens
    context: int | None = None  # devices
    theta: float | None = None  # of RoPE, in positions


@dataclass(frozen=True)
class Stage:
    """The steps after the first `begin` ones, up to the next stage, are as `config` says."""

    begin: int
    config: Config


def stages_of(config: Config) -> tuple[Stage, ...]:
    """The stages of a checked configuration, the config's own last; each begins later than the one before."""
    own = dataclasses.replace(config, stages="")
    early, wrong = parse(config.stages)
    assert not wrong, wrong
    begins = [0, *(stage.until for stage in early)]
    configs = [*(with_leaves(own, changed(stage, _leaves(own))) for stage in early), own]
    return tuple(map(Stage, begins, configs))


def changed(stage: Early, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that the stage sets, by dotted key; None where `leaves`, the config's, do not tell.

    Rounds down where a size does not divide: that is for `ringflash.combinations` to refuse.
    """
    found: dict[str, Any] = {}
    if stage.theta is not None:
        found["model.rope_theta"] = stage.theta
    if stage.seq_len is not None:
        found["seq_len"] = stage.seq_len
        size, batch = leaves.get("seq_len"), leaves.get("global_batch_size")
        found["global_batch_size"] = size * batch // stage.seq_len if size and batch else None
    if stage.context is not None:
        found["mesh.context"] = stage.context
        context, fsdp = leaves.get("mesh.context"), leaves.get("mesh.fsdp")
        known = None if context is None or fsdp is None else fsdp * context // stage.context
        found["mesh.fsdp"] = -1 if -1 in (context, fsdp) else known
    return found


def thetas(text: str, own: float) -> list[tuple[int, float]]:
    """(begin, RoPE's theta) of each stage that `text` spells; `own` is the config's."""
    early, _ = parse(text)
    begins = [0, *(stage.until for stage in early)]
    return list(zip(begins, [*(stage.theta or own for stage in early), own], strict=True))


def history(values: Iterable[tuple[int, Any]], step: int) -> Any:
    """What a value was in the first `step` steps, of (begin, value) by stage: itself, or told in words.

    [(0, 64), (100, 128)] is 64 up to step 100, and from then on "64 until 100, then 128".
    """
    begun: list[tuple[int, Any]] = []
    for begin, value in values:
        if not begun or (begin < step and value != begun[-1][1]):
            begun.append((begin, value))
    ends = [f"{value} until {end}, then " for (_, value), (end, _) in pairwise(begun)]
    return "".join([*ends, str(begun[-1][1])]) if ends else begun[-1][1]


def parse(text: str) -> tuple[list[Early], list[str]]:
    """The stages that come before the config's own, and all that is wrong with the spelling."""
    early: list[Early] = []
    wrong: list[str] = []
    for part in text.split(";") if text.strip() else []:
        fields, faults = _fields(part)
        before = early[-1].until if early else 0
        if not faults and fields["until"] <= before:
            faults = [f"wanted until above {before}, where the stage begins"]
        if faults:
            wrong += [f"{part.strip()!r}: {fault}" for fault in faults]
        else:
            early.append(Early(**fields))
    return early, wrong


def _fields(part: str) -> tuple[dict[str, Any], list[str]]:
    """The values of one stage by name, and what is wrong with it."""
    found: dict[str, Any] = {}
    faults: list[str] = []
    for word in part.split():
        name, _, value = word.partition("=")
        if name not in _READ:
            faults.append(f"{name!r} is none of {', '.join(_READ)}, as in {EXAMPLE}")
        elif name in found:
            faults.append(f"{name} stands there twice")
        else:
            wanted, read = _READ[name]
            try:
                found[name] = read(value)
            except ValueError:
                found[name] = None
                faults.append(f"{name} = {value!r}: wanted {wanted}")
    if not faults and "until" not in found:
        faults.append(f"until=STEP is missing, as in {EXAMPLE}")
    return found, faults


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ValueError(text)
    return int(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(text)
    return value


_READ: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "until": ("a whole number, at least 1", _whole),
    "seq_len": ("a whole number, at least 1", _whole),
    "context": ("a whole number, at least 1", _whole),
    "theta": ("a number above 0", _positive),
}


def _leaves(config: Config) -> dict[str, Any]:
    """What `changed` looks at, by dotted key."""
    sizes = {key: getattr(config, key) for key in ("seq_len", "global_batch_size")}
    return sizes | {"mesh.context": config.mesh.context, "mesh.fsdp": config.mesh.fsdp}
