"""Perplexity of long documents, overall and by position.

Definition used here ("full context"): one forward a document, BOS in front, every target sees all earlier
tokens of its document; loss is summed over all documents and divided once; perplexity is exp of that.
The position of a target is the number of tokens of its document before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
FIRST_EDGE = 512


@dataclass(frozen=True)
class Score:
    """Sums over the targets of one run of positions: nats, targets, and the bytes they stand for."""

    first: int
    last: int
    nats: float
    targets: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """exp(nats / targets); infinite where that overflows."""
        mean = self.nats / self.targets
        return math.inf if mean > 700 else math.exp(mean)

    @property
    def bits_per_byte(self) -> float:
        """nats / (bytes * ln 2)."""
        return self.nats / (self.bytes * math.log(2)) if self.bytes else math.nan

    @property
    def name(self) -> str:
        """The run of positions, such as 512-1024."""
        return f"{self.first}-{self.last}"


def edges(seq_len: int) -> list[int]:
    """0, 512, 1024, 2048, ... and seq_len last."""
    found = [0]
    edge = FIRST_EDGE
    while edge < seq_len:
        found.append(edge)
        edge *= 2
    return [*found, seq_len]


def bucket_sums(
    losses_BT: Array, positions_BT: Array, mask_BT: Array, bytes_BT: Array, bounds: list[int]
) -> tuple[Array, Array, Array]:
    """Sums of losses (fp32), targets and bytes (int32) between each two bounds; global, in a jit."""
    bucket = jnp.searchsorted(jnp.array(bounds[1:-1]), positions_BT, side="right")
    buckets = jnp.arange(len(bounds) - 1)
    here = (bucket[..., None] == buckets) & mask_BT[..., None]
    losses = jnp.where(here, losses_BT[..., None], 0.0).sum((0, 1))
    return losses, here.sum((0, 1)), jnp.where(here, bytes_BT[..., None], 0).sum((0, 1))


def measure(
    sums: Callable[[Any, Any, Any], tuple[Array, Array, Array]],
    params: Any,
    batches: Iterable[tuple[Any, Any]],
    bounds: list[int],
) -> list[Score]:
    """Overall first, then each run of positions that holds a target.

    `sums(params, batch, target_bytes)` is a jitted `bucket_sums`; `batches` are on the mesh already.
    Batches are added up in fp64.
    """
    totals = np.zeros((3, len(bounds) - 1), np.float64)
    for batch, target_bytes in batches:
        totals += np.stack([np.asarray(x, np.float64) for x in sums(params, batch, target_bytes)])
    scores = [
        Score(first, last, float(nats), int(targets), int(size))
        for first, last, (nats, targets, size) in zip(bounds, bounds[1:], totals.T, strict=False)
        if targets
    ]
    nats, targets, size = totals.sum(1)
    return [Score(0, bounds[-1], float(nats), int(targets), int(size)), *scores]


def metrics(scores: list[Score]) -> dict[str, float]:
    """`eval/perplexity` and `eval/bits_per_byte`, and both by position: `.../512-1024`."""
    overall, *buckets = scores
    found = {
        "eval/loss": overall.nats / overall.targets,
        "eval/perplexity": overall.perplexity,
        "eval/bits_per_byte": overall.bits_per_byte,
    }
    for score in buckets:
        found[f"eval/perplexity/{score.name}"] = score.perplexity
        found[f"eval/bits_per_byte/{score.name}"] = score.bits_per_byte
    return found
