"""A small decoder on the Python standard library's sources, over a ring of eight CPU devices.

Command:  bash launch/quickstart.sh, or
          ringflash train --config=configs/quickstart.py --workdir=runs/quickstart
Hardware: 2 CPU cores; eight devices are simulated. No network, no accelerator.
Time:     2 minutes; the first loss after 20 seconds, with an empty compilation cache.
Expect:   held-out perplexity 13.5 (3.75 bits per byte) at step 80, from 114 at step 1.
          Other Pythons have other sources, and so other figures.
"""

from base import get_config as base
from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = base()
    config.steps = 80
    config.seq_len = 8192
    config.global_batch_size = 1
    config.log_every = 1
    config.model.preset = "quickstart"
    config.model.dtype = "float32"
    config.attention.kernel = "chunked"
    config.attention.strategy = "ring"
    config.attention.layout = "zigzag"
    config.mesh.context = 8
    config.data.source = "stdlib"
    config.data.tokenizer = "byte"
    config.optimizer.learning_rate = 3e-3
    config.optimizer.warmup_steps = 5
    config.optimizer.decay_steps = 80
    config.loss.chunk = 512
    config.checkpoint.every = 20
    config.eval.every = 0
    config.eval.documents = 8
    return config
