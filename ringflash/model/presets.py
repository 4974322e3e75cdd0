"""Named model sizes: what `model.preset` stands for.

A leaf of `model` left at 0 takes the preset's value; one that is set wins. Plain numbers only: this
file is read before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping

PRESETS: Mapping[str, Mapping[str, int | float]] = {
    # About 0.4 million parameters, for bytes: trains on two CPU cores in minutes.
    "quickstart": {
        "vocab_size": 258,
        "layers": 2,
        "width": 128,
        "mlp_width": 384,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "rope_theta": 10_000.0,
        "norm_eps": 1e-5,
    },
    # About 75 million parameters, for bytes; the vocabulary is padded to a multiple of 128.
    "small": {
        "vocab_size": 384,
        "layers": 12,
        "width": 768,
        "mlp_width": 2048,
        "heads": 12,
        "kv_heads": 4,
        "head_dim": 64,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-5,
    },
    # The sizes of Llama 3 8B.
    "llama3-8b": {
        "vocab_size": 128_256,
        "layers": 32,
        "width": 4096,
        "mlp_width": 14_336,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-5,
    },
    # The sizes of Llama 3 70B.
    "llama3-70b": {
        "vocab_size": 128_256,
        "layers": 80,
        "width": 8192,
        "mlp_width": 28_672,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-5,
    },
    # The sizes of Qwen3 4B, which has qk_norm and tied embeddings.
    "qwen3-4b": {
        "vocab_size": 151_936,
        "layers": 36,
        "width": 2560,
        "mlp_width": 9728,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-6,
    },
    # The sizes of SmolLM2 135M, which has tied embeddings.
    "smollm2-135m": {
        "vocab_size": 49_152,
        "layers": 30,
        "width": 576,
        "mlp_width": 1536,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "rope_theta": 100_000.0,
        "norm_eps": 1e-5,
    },
}

# What the backward pass keeps of a layer; `ringflash.model.transformer.POLICIES` says how.
REMAT = ("none", "attention", "offload", "full")
