"""Tile sizes of the TPU kernel: a table per generation and head width, and a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Sizes of one pass, in rows; all are multiples of 128 (chunks divide their blocks).

    block_q, block_k: a unit.  chunk: of its queries (forward) or keys (backward), how many the stages of the
    pipeline take at a time.  held: how many tiles of one head the resident side has at most, per step.
    """

    block_q: int
    block_k: int
    chunk: int
    held: int
