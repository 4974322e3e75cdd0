"""Llama 3 8B at 256K tokens: a long-context run on 64 chips of v5p, trained from random parameters.

Command:  ringflash train --config=configs/llama3_8b_256k.py --workdir=gs://BUCKET/RUN, on every host
Plan:     ringflash plan --config=configs/llama3_8b_256k.py --topology=v5p:4x4x4
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 10_000
    config.seq_len = 262_144
    config.global_batch_size = 4
    config.model.preset = "llama3-8b"
    config.model.tied_embeddings = False
    config.model.remat = "attention"
    config.attention.kernel = "tpu"
    config.mesh.fsdp = 4
    config.mesh.context = 16
    config.optimizer.decay_steps = 10_000
    config.optimizer.warmup_steps = 500
    return config
