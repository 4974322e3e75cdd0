"""Model sizes and attention functions for tests."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringflash.attention import Causal, Tokens, attend
from ringflash.config import ModelConfig
from ringflash.model.transformer import Decoder

CONFIG = ModelConfig(
    preset="quickstart",
    vocab_size=19,
    layers=3,
    width=16,
    mlp_width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied_embeddings=True,
    dtype="float32",
    param_dtype="float32",
    remat="none",
    qk_norm=False,
    mlp_chunk=0,
    matmul="plain",
)


def config(**changes: Any) -> ModelConfig:
    return dataclasses.replace(CONFIG, **changes)


def attention(
    q: Any, k: Any, v: Any, positions: Any, segments: Any, kernel: str = "reference"
) -> Any:
    return attend(q, k, v, at=Tokens(positions, segments), mask=Causal(), kernel=kernel)


def decoder(model: ModelConfig = CONFIG, kernel: str = "reference") -> Decoder:
    return Decoder(model, partial(attention, kernel=kernel), nnx.Rngs(0))


def tree(model: Decoder) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@jax.jit
def _hidden(graph: Any, params: Any, tokens: Any, positions: Any, segments: Any) -> jax.Array:
    return nnx.merge(graph, params)(tokens, positions, segments)


def hidden(model: Decoder, tokens: Any, positions: Any, segments: Any) -> np.ndarray:
    """Hidden states of int rows, jitted."""
    graph, params = nnx.split(model)
    rows = (jnp.asarray(a, jnp.int32) for a in (tokens, positions, segments))
    return np.asarray(_hidden(graph, params, *rows))
