"""From a ConfigDict to small frozen dataclasses, one per component.

A component is given its own dataclass and never sees the whole configuration. What is wrong with a
configuration is said by `ringflash.checks`, all of it at once; here are only the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """AdamW with linear warm-up and a cosine schedule down to `final_fraction` of the peak."""

    learning_rate: float
    warmup_steps: int
    decay_steps: int
    final_fraction: float
    weight_decay: float
    beta1: float
    beta2: float
    clip_norm: float


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy in chunks, so that no [T, V] array is ever made."""

    chunk: int


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
    global_batch_size: int
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
