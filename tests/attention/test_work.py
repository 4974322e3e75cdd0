"""The counter of tiles and pairs, against the dense mask."""

import numpy as np
import pytest

from ringflash.attention import LAYOUTS, Causal, Segments, Tokens, Window
from ringflash.attention.cases import EVERYTHING, MASKS, inputs
from ringflash.attention.work import TileCounts, tile_counts


def dense(case, x):
    """[B, T, S] truth."""
    q, k = (Tokens(*(np.asarray(a) for a in at[:2])) for at in (x.q_at, x.k_at))
    seen = case.spec.mask.visible(
        Tokens(*(a[:, :, None] for a in q[:2])), Tokens(*(a[:, None, :] for a in k[:2]))
    )
    B, T = q.positions_BT.shape
    seen = np.broadcast_to(np.asarray(seen), (B, T, k.positions_BT.shape[1]))
    return seen & (k.segment_ids_BT >= 0)[:, None, :]


@pytest.mark.parametrize("case", [*MASKS, EVERYTHING], ids=lambda case: case.name)
@pytest.mark.parametrize(("block_q", "block_k"), [(16, 24), (20, 7), (1000, 1000)])
def test_counts_are_those_of_the_dense_mask(case, block_q, block_k):
    x = inputs(case)
    found = tile_counts(case.spec.mask, x.q_at, x.k_at, block_q, block_k)
    seen = dense(case, x)
    tiles = [
        seen[:, i : i + block_q, j : j + block_k].any((1, 2))
        for i in range(0, case.T, block_q)
        for j in range(0, case.T, block_k)
    ]
    assert found.pairs == seen.sum()
    assert found.needed == np.sum(tiles)
    assert found.needed <= found.visited <= found.total == np.size(tiles)


def test_causal_visits_what_it_needs():
    """In one sequence `relation` is exact: the triangle of tiles, the diagonal included."""
    at = Tokens(np.arange(1024, dtype=np.int32)[None], np.zeros((1, 1024), np.int32))
    counts = tile_counts(Causal(), at, at, 64, 64)
    assert counts == TileCounts(256, 136, 136, 1024 * 1025 // 2)
    windowed = tile_counts(Causal() & Window(64), at, at, 64, 64)
    assert windowed.visited == windowed.needed == 31


def test_a_layout_of_16k_tokens_over_8_shards():
    """The figures promised for causal work: no tile visited in vain, and zigzag is even."""
    length, shards = 16384, 8
    at = Tokens(np.arange(length, dtype=np.int32)[None], np.zeros((1, length), np.int32))
    visited = {}
    for name in ("contiguous", "zigzag"):
        laid = Tokens(*(x[:, LAYOUTS[name](length, shards)] for x in at[:2]))
        parts = [Tokens(*(np.split(x, shards, 1)[n] for x in laid[:2])) for n in range(shards)]
        counts = [tile_counts(Causal(), part, laid, 256, 128) for part in parts]
        visited[name] = [c.visited for c in counts]
        assert sum(visited[name]) <= 1.1 * sum(c.needed for c in counts)
        assert sum(c.pairs for c in counts) == length * (length + 1) // 2
    assert max(visited["zigzag"]) <= 1.02 * np.mean(visited["zigzag"])
    assert max(visited["contiguous"]) > 1.8 * np.mean(visited["contiguous"])


def test_padding_is_no_work():
    at = Tokens(np.zeros((2, 32), np.int32), np.full((2, 32), -1, np.int32))
    assert tile_counts(Causal() & Segments(), at, at, 8, 8) == TileCounts(32, 0, 0, 0)


def test_padding_has_no_position():
    """Else the keys of a tile that is half padding would seem to begin at the padding's position, 0."""
    segments = np.repeat(np.array([[0, -1]], np.int32), 4, axis=1)
    k_at = Tokens(np.array([[9, 9, 9, 9, 0, 0, 0, 0]], np.int32), segments)
    q_at = Tokens(np.full((1, 8), 5, np.int32), np.zeros((1, 8), np.int32))
    assert tile_counts(Causal(), q_at, k_at, 8, 8) == TileCounts(1, 0, 0, 0)
