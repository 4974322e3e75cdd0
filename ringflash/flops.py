"""The arithmetic that a model needs, whoever computes it: what MFU is measured by.

Model FLOPs as PaLM counts them (arXiv:2204.02311, appendix B): a product of matrices is two FLOPs a
multiplication, a backward is two forwards, and what is computed again is not counted. Of attention only the
pairs of tokens that the mask lets see each other are, so that MFU is never above 1.
"""

from __future__ import annotations

import numpy as np

from ringflash.config import ModelConfig

FORWARD_AND_BACKWARD = 3  # forwards


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that each token is multiplied with: all but the embedding's look-up and the norms."""
    D, F, H = model.width, model.mlp_width, model.head_dim
    attention = D * H * (2 * model.heads + 2 * model.kv_heads)
    return model.layers * (attention + 3 * D * F) + D * model.vocab_size


def causal_pairs(tokens: int) -> int:
    """How many pairs of a query and a key a document of so many tokens has."""
    return tokens * (tokens + 1) // 2


def counts(segment_ids_BT: np.ndarray) -> tuple[int, int]:
    """Tokens that are no padding, and pairs that a causal mask within documents lets see each other."""
    tokens = pairs = 0
    for ids_T in segment_ids_BT:
        lengths = np.bincount(ids_T[ids_T >= 0])
        tokens += int(lengths.sum())
        pairs += int((lengths * (lengths + 1) // 2).sum())
    return tokens, pairs


def step_flops(model: ModelConfig, tokens: int, pairs: int) -> int:
    """Of one step over so many tokens, whose attention has so many visible pairs in a layer."""
    linear = 2 * matmul_parameters(model) * tokens
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    return FORWARD_AND_BACKWARD * (linear + attention)
