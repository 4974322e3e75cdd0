"""Layouts: the order of a row's tokens over the shards of the ring, as a permutation.

`order(length, shards)` gives order_T with slot t holding token order_T[t]; shard r holds the slots
[r * length / shards, (r + 1) * length / shards). The pipeline applies it once, to every array alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Layout = Callable[[int, int], np.ndarray]


def contiguous(length: int, shards: int) -> np.ndarray:
    """Shard r holds the r-th run. Causal work is unbalanced: the last shard has all of it."""
    divide("contiguous", length, shards, 1)
    return np.arange(length)


def zigzag(length: int, shards: int) -> np.ndarray:
    """Shard r holds runs r and 2 * shards - 1 - r of 2 * shards: causal work is equal on all shards."""
    divide("zigzag", length, shards, 2)
    runs = np.arange(length).reshape(2 * shards, -1)
    first = np.arange(shards)
    return runs[np.stack([first, 2 * shards - 1 - first], axis=1)].reshape(-1)


def striped(length: int, shards: int) -> np.ndarray:
    """Shard r holds tokens r, r + shards, r + 2 * shards, ... (arXiv:2311.09431)."""
    divide("striped", length, shards, 1)
    return np.arange(length).reshape(-1, shards).T.reshape(-1)


def divide(name: str, length: int, shards: int, runs: int) -> None:
    """Raise ValueError unless `length` divides into `runs` runs for each shard."""
    if length < 1 or shards < 1 or length % (runs * shards):
        unit = runs * shards
        raise ValueError(f"{name} over {shards} shards needs a multiple of {unit}, found {length}")


def inverse(order_T: np.ndarray) -> np.ndarray:
    """The permutation that puts slots back: x[order][inverse(order)] == x."""
    return np.argsort(order_T)
