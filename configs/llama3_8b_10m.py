"""Llama 3 8B at ten million tokens, one sequence a step.

Command:  ringflash train --config=configs/llama3_8b_10m.py --workdir=DIR, on every host of the slice
Plan:     ringflash plan --config=configs/llama3_8b_10m.py --topology=v5p:4x8x8
Hardware: 256 chips of v5p
Data:     yours, with --config.data.source='files:DIR/**/*.txt'; else the sources of Python's own library
Expect:   by the plan 27.2 of 95.73 GiB a device; an estimated 905 s a step, MFU 82 %.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 200
    config.seq_len = 10_485_760
    config.global_batch_size = 1
    config.model.preset = "llama3-8b"
    config.model.tied_embeddings = False
    config.model.remat = "attention"
    config.model.mlp_chunk = 8192
    config.mesh.context = 256
    config.checkpoint.every = 10
    config.optimizer.warmup_steps = 20
    config.optimizer.decay_steps = 200
    return config
