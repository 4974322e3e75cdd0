"""A run small enough for a test: its documents, its configuration, and its parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax

from ringflash import config
from ringflash.assemble import Parts, assemble

BASE = str(Path(__file__).parents[1] / "configs" / "base.py")
VALUES: dict[str, Any] = {
    "steps": 10,
    "seq_len": 64,
    "global_batch_size": 2,
    "log_every": 1,
    "model.preset": "quickstart",
    "model.width": 32,
    "model.mlp_width": 48,
    "model.heads": 4,
    "model.head_dim": 8,
    "model.dtype": "float32",
    "attention.kernel": "chunked",
    "mesh.context": 8,
    "data.held_out_percent": 25,
    "optimizer.learning_rate": 0.003,
    "optimizer.warmup_steps": 2,
    "optimizer.decay_steps": 20,
    "loss.chunk": 12,
    "checkpoint.every": 0,
    "eval.documents": 3,
}


def write_documents(folder: Path, count: int = 40) -> str:
    """Documents of 3 to 150 bytes, so that a row holds several and many span shards; the source."""
    draw = random.Random(0)
    words = [bytes(draw.choices(b"abcdefghij", k=draw.randint(1, 6))) for _ in range(30)]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        text = b" ".join(draw.choices(words, k=40))[: draw.randint(3, 150)]
        (folder / f"{number}.txt").write_bytes(text)
    return f"files:{folder}/*.txt"


def tiny(source: str, **changes: Any) -> config.Config:
    """The configuration; a change is named with `__` for the dot: mesh__context=4."""
    given = {key.replace("__", "."): value for key, value in changes.items()}
    values = VALUES | {"data.source": source} | given
    return config.resolve(config.load(BASE, [f"--config.{k}={v}" for k, v in values.items()]))


def tiny_parts(source: str, **changes: Any) -> Parts:
    """The parts on as many of the eight devices as the mesh takes."""
    cfg = tiny(source, **changes)
    return assemble(cfg, jax.devices()[: config.device_count(cfg.mesh, 8)])
