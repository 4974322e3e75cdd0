"""Layouts are permutations, put what they say where they say, and share causal work out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention import EMPTY, LAYOUTS, Causal, Segments, Span, Tokens
from ringflash.attention.cases import tokens
from ringflash.attention.layout import balanced, contiguous, inverse, striped, zigzag
from ringflash.attention.mask import spans
from ringflash.attention.work import tile_counts


@given(st.sampled_from(list(LAYOUTS)), st.integers(1, 9), st.integers(1, 7))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_permutation_and_its_inverse(name, shards, share):
    length = 2 * shards * share
    order = LAYOUTS[name](length, shards)
    np.testing.assert_array_equal(np.sort(order), np.arange(length))
    tokens_T = np.random.default_rng(0).integers(1000, size=length)
    np.testing.assert_array_equal(tokens_T[order][inverse(order)], tokens_T)
    np.testing.assert_array_equal(order[inverse(order)], np.arange(length))


def test_what_the_shards_hold():
    """RoPE per rank is wrong where these are not the positions: S = 16, N = 2."""
    half = {name: order(16, 2)[:8].tolist() for name, order in LAYOUTS.items()}
    assert half == {
        "contiguous": [0, 1, 2, 3, 4, 5, 6, 7],
        "zigzag": [0, 1, 2, 3, 12, 13, 14, 15],
        "striped": [0, 2, 4, 6, 8, 10, 12, 14],
    }
    assert zigzag(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert striped(6, 3).tolist() == [0, 3, 1, 4, 2, 5]


def tiles_by_shard(at, shards, block):
    """How many tiles of a causal mask each shard visits."""
    span = spans(at, at.positions_BT.shape[1] // block)
    q, k = Span(*(x[0][:, None] for x in span)), Span(*(x[0][None] for x in span))
    visited = np.asarray(Causal().relation(q, k)) > EMPTY
    return visited.sum(1).reshape(shards, -1).sum(1)


@pytest.mark.parametrize("shards", [2, 8])
def test_zigzag_balances_causal_work(shards):
    """Busiest shard / mean at T = 16384; in one piece it is nearly 2."""

    def imbalance(order):
        positions = order(16384, shards).astype(np.int32)[None]
        work = tiles_by_shard(Tokens(positions, np.zeros_like(positions)), shards, 128)
        return work.max() / work.mean()

    assert imbalance(zigzag) <= 1.02
    assert imbalance(contiguous) > 2 - 1.2 / shards


def test_balanced_balances_documents():
    """Useful tiles of the busiest shard over the mean; and that it permutes."""
    at = tokens(1, 8192, (4000, 1400, 600, 80, 1800))
    order = balanced(at.positions_BT[0], at.segment_ids_BT[0], 8)
    np.testing.assert_array_equal(np.sort(order), np.arange(8192))

    def imbalance(order):
        keys = Tokens(*(x[:, order] for x in at[:2]))
        shards = [Tokens(*(x[:, cut] for x in keys[:2])) for cut in np.arange(8192).reshape(8, -1)]
        work = [tile_counts(Causal() & Segments(), q, keys, 256, 256).needed for q in shards]
        return max(work) / np.mean(work)

    assert imbalance(order) < 1.1
    assert imbalance(zigzag(8192, 8)) > 1.3


@pytest.mark.parametrize(
    ("order", "length", "shards", "said"),
    [
        (zigzag, 12, 4, "zigzag over 4 shards needs a multiple of 8, found 12"),
        (striped, 13, 4, "striped over 4 shards needs a multiple of 4, found 13"),
        (contiguous, 0, 4, "contiguous over 4 shards needs a multiple of 4, found 0"),
        (contiguous, 4, 0, "contiguous over 0 shards"),
    ],
)
def test_lengths_that_do_not_divide(order, length, shards, said):
    with pytest.raises(ValueError, match=said):
        order(length, shards)


def test_balanced_needs_whole_shards():
    at = tokens(1, 13, None)
    with pytest.raises(ValueError, match="balanced over 4 shards needs a multiple of 4, found 13"):
        balanced(at.positions_BT[0], at.segment_ids_BT[0], 4)
