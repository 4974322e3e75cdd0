"""What each leaf of a configuration may be, judged alone: one rule per leaf."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ringflash.attention.dispatch import (
    KERNELS,
    LAYOUTS,
    ONE_PLATFORM,
    ROW_LAYOUTS,
    STRATEGIES,
    parse,
)
from ringflash.data.sources import SOURCES
from ringflash.data.tokenizers import TOKENIZERS
from ringflash.model.matmul import NAMES
from ringflash.model.presets import PRESETS, REMAT

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}


@dataclass(frozen=True)
class Rule:
    """Which values a leaf may have, in words and as a test; its type has been checked before."""

    allowed: str
    holds: Callable[[Any], bool]


def at_least(low: float) -> Rule:
    """`low` or more."""
    return Rule(f"at least {low}", lambda value: value >= low)


def above(low: float) -> Rule:
    """More than `low`."""
    return Rule(f"above {low}", lambda value: value > low)


def between(low: float, high: float) -> Rule:
    """From `low` to `high`, both included."""
    return Rule(f"{low} to {high}", lambda value: low <= value <= high)


def one_of(names: Collection[str]) -> Rule:
    """A name out of `names`."""
    return Rule(f"one of {', '.join(sorted(names))}", lambda value: value in names)


FRACTION_BELOW_1 = Rule("at least 0 and below 1", lambda value: 0 <= value < 1)
AXIS = Rule("at least 1, or -1 for what is left", lambda value: value == -1 or value >= 1)
SIZE = Rule("at least 1, or 0 for the preset's", lambda value: value >= 0)
DTYPE = one_of(["bfloat16", "float32"])


def _is_source(value: str) -> bool:
    name, _, argument = value.partition(":")
    return name in SOURCES and bool(argument) == (name != "stdlib")


def _is_strategy(value: str) -> bool:
    if value == "auto":
        return True
    try:
        parse(value)
    except ValueError:
        return False
    return True


RULES: Mapping[str, Rule] = {
    "seed": between(0, 2**31 - 1),
    "steps": at_least(1),
    "seq_len": at_least(1),
    "stages": Rule(
        "", lambda value: True
    ),  # its spelling is told by `combinations`, fault by fault
    "global_batch_size": at_least(1),
    "accumulation": at_least(1),
    "max_skipped": at_least(0),
    "skip_norm": at_least(0),
    "log_every": at_least(1),
    "cpu_devices": between(1, 4096),
    "model.preset": one_of(PRESETS),
    "model.vocab_size": SIZE,
    "model.layers": SIZE,
    "model.width": SIZE,
    "model.mlp_width": SIZE,
    "model.heads": SIZE,
    "model.kv_heads": SIZE,
    "model.head_dim": SIZE,
    "model.rope_theta": Rule("above 0, or 0 for the preset's", lambda value: value >= 0),
    "model.norm_eps": Rule("above 0, or 0 for the preset's", lambda value: value >= 0),
    "model.tied_embeddings": Rule("", lambda value: True),
    "model.dtype": DTYPE,
    "model.param_dtype": DTYPE,
    "model.remat": one_of(REMAT),
    "model.qk_norm": Rule("", lambda value: True),
    "model.mlp_chunk": at_least(0),
    "model.matmul": one_of(NAMES),
    "attention.kernel": one_of(["auto", *KERNELS, *ONE_PLATFORM]),
    "attention.strategy": Rule(
        f"one of auto, {', '.join(sorted(STRATEGIES))}, or parts of context as in ulysses:2*ring:4",
        _is_strategy,
    ),
    "attention.layout": one_of([*LAYOUTS, *ROW_LAYOUTS]),
    "mesh.data": AXIS,
    "mesh.fsdp": AXIS,
    "mesh.context": AXIS,
    "mesh.tensor": AXIS,
    "data.source": Rule("stdlib or files:GLOB", _is_source),
    "data.tokenizer": one_of(TOKENIZERS),
    "data.held_out_percent": between(1, 99),
    "data.epochs": at_least(0),
    "optimizer.name": one_of(["adamw", "muon"]),
    "optimizer.schedule": one_of(["constant", "cosine", "linear", "wsd"]),
    "optimizer.learning_rate": above(0),
    "optimizer.warmup_steps": at_least(0),
    "optimizer.decay_start": at_least(0),
    "optimizer.decay_steps": at_least(1),
    "optimizer.final_fraction": between(0, 1),
    "optimizer.weight_decay": at_least(0),
    "optimizer.beta1": FRACTION_BELOW_1,
    "optimizer.beta2": FRACTION_BELOW_1,
    "optimizer.momentum": FRACTION_BELOW_1,
    "optimizer.clip_norm": above(0),
    "optimizer.offload": Rule("", lambda value: True),
    "optimizer.ema_decay": FRACTION_BELOW_1,
    "loss.chunk": at_least(1),
    "loss.vocab_chunk": at_least(1),
    "loss.z_loss": at_least(0),
    "checkpoint.every": at_least(0),
    "checkpoint.keep": at_least(1),
    "eval.every": at_least(0),
    "eval.documents": at_least(1),
}


def wanted(key: str, kind: type) -> str:
    """What the leaf may be, in words: its type and its rule."""
    return ", ".join(filter(None, [KINDS[kind], RULES[key].allowed]))


def allows(key: str, kind: type, value: object) -> bool:
    """Whether the leaf may have this value. A bool is no number; an int may stand for a float."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return RULES[key].holds(value)
