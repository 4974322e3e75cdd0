"""From a ConfigDict to small frozen dataclasses, one per component.

A component is given its own dataclass and never sees the whole configuration. What is wrong with a
configuration is said by `ringflash.checks`, all of it at once; here are only the shapes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from absl import flags
from ml_collections import ConfigDict, config_flags

from ringflash import config_file
from ringflash.exits import ConfigFault
from ringflash.model.presets import PRESETS


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    preset: str
    vocab_size: int
    layers: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    dtype: str
    param_dtype: str
    remat: str
    qk_norm: bool
    mlp_chunk: int
    matmul: str


@dataclass(frozen=True)
class AttentionConfig:
    """Which kernel runs on a shard, how shards meet, and how tokens lie over them."""

    kernel: str
    strategy: str
    layout: str


@dataclass(frozen=True)
class MeshConfig:
    """Size of each mesh axis, in devices; one may be -1, which takes what is left."""

    data: int
    fsdp: int
    context: int
    tensor: int


@dataclass(frozen=True)
class DataConfig:
    """Where documents come from and how they become tokens."""

    source: str
    tokenizer: str
    held_out_percent: int
    epochs: int


@dataclass(frozen=True)
class OptimizerConfig:
    """The direction of an update, its size over the steps, and the average of what it leads to."""

    name: str
    schedule: str
    learning_rate: float
    warmup_steps: int
    decay_start: int
    decay_steps: int
    final_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    momentum: float
    clip_norm: float
    offload: bool
    ema_decay: float


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy in chunks of tokens and vocabulary: no [T, V] array is made, no [D, V] gathered."""

    chunk: int
    vocab_chunk: int
    z_loss: float


@dataclass(frozen=True)
class CheckpointConfig:
    """How often to save, in steps, and how many steps to keep."""

    every: int
    keep: int


@dataclass(frozen=True)
class EvalConfig:
    """How often to evaluate, in steps (0: only at the end), and on how many held-out documents."""

    every: int
    documents: int


@dataclass(frozen=True)
class Config:
    """The whole configuration, as `assemble` alone sees it."""

    seed: int
    steps: int
    seq_len: int
    stages: str
    global_batch_size: int
    accumulation: int
    max_skipped: int
    skip_norm: float
    log_every: int
    cpu_devices: int
    model: ModelConfig
    attention: AttentionConfig
    mesh: MeshConfig
    data: DataConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig


# The leaves of `model` that name sizes: one that is 0 takes the value of the preset.
SIZES = (
    "vocab_size",
    "layers",
    "width",
    "mlp_width",
    "heads",
    "kv_heads",
    "head_dim",
    "rope_theta",
    "norm_eps",
)


def leaves(section: type = Config, prefix: str = "") -> dict[str, type]:
    """Every leaf's dotted key and its type, in order: {"seed": int, "model.preset": str, ...}."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(section).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= leaves(kind, f"{prefix}{name}.")
        else:
            found[prefix + name] = kind
    return found


def sections() -> tuple[str, ...]:
    """The keys that hold leaves: model, attention, mesh, ..."""
    return tuple(dict.fromkeys(key.split(".")[0] for key in leaves() if "." in key))


def get(values: ConfigDict, key: str) -> Any:
    """The value at a dotted key; KeyError where there is none."""
    for name in key.split("."):
        if not isinstance(values, ConfigDict):
            raise KeyError(key)
        values = values[name]
    return values


def load(path: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The values of `FILE.py[:ARG]` with `--config.KEY=VALUE` flags applied; not yet checked."""
    return override(config_file.read(path).values, overrides)


def override(values: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """A copy of `values` with `--config.KEY=VALUE` flags applied, in order, by config_flags."""
    values = values.copy_and_resolve_references()
    values.unlock()
    # config_flags parses by the type it finds at the key: let it find the right one there.
    kinds = leaves()
    with values.ignore_type():
        for key in map(override_key, overrides):
            section, _, name = key.rpartition(".")
            holder = values.get(section) if section else values
            if key in kinds and isinstance(holder, ConfigDict):
                holder[name] = kinds[key]()
    parsed = flags.FlagValues()
    argv = ["ringflash", *overrides]
    config_flags.DEFINE_config_dict("config", values, flag_values=parsed, sys_argv=argv)
    try:
        parsed(argv)
    except (flags.Error, LookupError, TypeError, ValueError) as error:
        raise ConfigFault(f"command line: {error}") from error
    return parsed.config


def override_key(flag: str) -> str:
    """The dotted key of a `--config.KEY=VALUE` flag."""
    return flag.partition("=")[0].removeprefix("--config.")


def origins(file: config_file.ConfigFile, overrides: Sequence[str]) -> dict[str, str]:
    """Where each leaf's value comes from: the file, `base`, `preset NAME` or `command line`."""
    values = override(file.values, overrides)
    given = set(map(override_key, overrides))
    preset = values.model.preset
    return {key: _origin(file, values, key, given, preset) for key in leaves()}


def _origin(
    file: config_file.ConfigFile, values: ConfigDict, key: str, given: set[str], preset: str
) -> str:
    section, _, name = key.rpartition(".")
    if section == "model" and name in SIZES and get(values, key) == 0:
        return f"preset {preset}"
    if key in given:
        return "command line"
    try:
        unchanged = get(file.base, key) == get(file.values, key)
    except KeyError:
        unchanged = False
    return "base" if unchanged else file.path


def resolve(values: ConfigDict) -> Config:
    """The frozen dataclasses of checked values, with the sizes of the model's preset filled in."""
    filled = dict(values.model)
    preset = PRESETS[filled["preset"]]
    filled |= {size: preset[size] for size in SIZES if filled[size] == 0}
    return _build(Config, {**values, "model": filled})


def from_json(values: Mapping[str, Any]) -> Config:
    """The inverse of `dataclasses.asdict`."""
    return _build(Config, values)


def _build(section: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass of the tree from its part of the values; an int given for a float is cast."""
    built = {}
    for name, kind in get_type_hints(section).items():
        nested = dataclasses.is_dataclass(kind)
        built[name] = _build(kind, values[name]) if nested else kind(values[name])
    return section(**built)


def device_count(mesh: MeshConfig, available: int) -> int:
    """How many devices the mesh takes out of `available`; an axis of -1 takes all."""
    sizes = dataclasses.astuple(mesh)
    return available if -1 in sizes else math.prod(sizes)


def flat(config: Config) -> dict[str, Any]:
    """The value of every leaf by its dotted key."""
    tree = dataclasses.asdict(config)
    found = {key: tree[key] for key in tree if not isinstance(tree[key], dict)}
    for section in sections():
        found |= {f"{section}.{name}": value for name, value in tree[section].items()}
    return found


def with_leaves(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with these leaves, by dotted key."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        part = dataclasses.replace(getattr(config, section), **{name: value}) if section else value
        config = dataclasses.replace(config, **{section or name: part})
    return config


def with_origins(config: Config, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """{key: {"value": ..., "from": ...}} for every leaf, ready for JSON."""
    values = flat(config)
    return {key: {"value": values[key], "from": sources[key]} for key in leaves()}


def write_config(path: str | Path, config: Config, sources: Mapping[str, str]) -> None:
    """Write `with_origins` as JSON, whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(with_origins(config, sources), indent=2) + "\n")
    part.replace(path)
