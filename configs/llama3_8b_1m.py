"""Llama 3 8B at a million tokens, one sequence a step.

Command:  ringflash train --config=configs/llama3_8b_1m.py --workdir=DIR, on every host of the slice
Plan:     ringflash plan --config=configs/llama3_8b_1m.py --topology=v5p:4x4x8
Hardware: 128 chips of v5p
Data:     yours, with --config.data.source='files:DIR/**/*.txt'; else the sources of Python's own library
Expect:   by the plan 6.82 of 95.73 GiB a device; an estimated 21.2 s a step, MFU 73 %.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 2_000
    config.seq_len = 1_048_576
    config.global_batch_size = 1
    config.model.preset = "llama3-8b"
    config.model.tied_embeddings = False
    config.model.remat = "attention"
    config.mesh.context = 128
    config.optimizer.warmup_steps = 100
    config.optimizer.decay_steps = 2_000
    return config
