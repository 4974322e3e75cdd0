"""SmolLM2 135M at 64K tokens, eight sequences a step.

Command:  ringflash train --config=configs/smollm2_135m_64k.py --workdir=DIR, on every host of the slice
Plan:     ringflash plan --config=configs/smollm2_135m_64k.py --topology=v5e:2x4
Hardware: 8 chips of v5e, or one host with eight GPUs
Data:     yours, with --config.data.source='files:DIR/**/*.txt'; else the sources of Python's own library
Expect:   by the plan 7.62 of 15.75 GiB a device; an estimated 7.94 s a step, MFU 32 %.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 10_000
    config.seq_len = 65_536
    config.global_batch_size = 8
    config.model.preset = "smollm2-135m"
    config.model.remat = "attention"
    config.mesh.context = 8
    config.optimizer.warmup_steps = 200
    config.optimizer.decay_steps = 10_000
    config.optimizer.learning_rate = 1e-3
    return config
