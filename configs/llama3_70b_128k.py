"""Llama 3 70B at 128K tokens, sixteen sequences a step.

Command:  ringflash train --config=configs/llama3_70b_128k.py --workdir=DIR, on every host of the slice
Plan:     ringflash plan --config=configs/llama3_70b_128k.py --topology=v5p:4x8x8
Hardware: 256 chips of v5p
Data:     yours, with --config.data.source='files:DIR/**/*.txt'; else the sources of Python's own library
Expect:   by the plan 29.01 of 95.73 GiB a device; an estimated 26.6 s a step, MFU 63 %.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 10_000
    config.seq_len = 131_072
    config.global_batch_size = 16
    config.model.preset = "llama3-70b"
    config.model.tied_embeddings = False
    config.model.remat = "attention"
    config.mesh.fsdp = 16
    config.mesh.context = 16
    config.optimizer.warmup_steps = 500
    config.optimizer.decay_steps = 10_000
    config.optimizer.learning_rate = 1.5e-4
    return config
