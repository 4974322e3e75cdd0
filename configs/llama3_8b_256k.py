"""Llama 3 8B at 256K tokens, four sequences a step.

Command:  ringflash train --config=configs/llama3_8b_256k.py --workdir=DIR, on every host of the slice
Plan:     ringflash plan --config=configs/llama3_8b_256k.py --topology=v5p:4x4x4
Hardware: 64 chips of v5p
Data:     yours, with --config.data.source='files:DIR/**/*.txt'; else the sources of Python's own library
Expect:   by the plan 14.51 of 95.73 GiB a device; an estimated 12.5 s a step, MFU 72 %.
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
    config.mesh.fsdp = 4
    config.mesh.context = 16
    config.optimizer.warmup_steps = 500
    config.optimizer.decay_steps = 10_000
    return config
