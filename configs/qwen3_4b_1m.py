"""Qwen3 4B at a million tokens, one sequence a step.

Command:  ringflash train --config=configs/qwen3_4b_1m.py --workdir=DIR, on every host of the slice
Plan:     ringflash plan --config=configs/qwen3_4b_1m.py --topology=v6e:16x16
Hardware: 256 chips of v6e
Data:     yours, with --config.data.source='files:DIR/**/*.txt'; else the sources of Python's own library
Expect:   by the plan 2.95 of 31.24 GiB a device; an estimated 12.3 s a step, MFU 35 %.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 2_000
    config.seq_len = 1_048_576
    config.global_batch_size = 1
    config.model.preset = "qwen3-4b"
    config.model.qk_norm = True
    config.model.remat = "attention"
    config.mesh.context = 256
    config.optimizer.warmup_steps = 100
    config.optimizer.decay_steps = 2_000
    return config
