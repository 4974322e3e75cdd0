"""The work of a mask over the devices of a ring, against a count of every pair."""

import numpy as np
import pytest

from ringflash.attention import LAYOUTS
from ringflash.plan import load
from ringflash.plan.load import least_tiles, mask_of

LENGTH, SHARDS, TILE = 2048, 4, 128


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(load, "TILE", TILE)


def seen(text, layout):
    """[T, S] truth in the order of the layout."""
    at = LAYOUTS[layout](LENGTH, SHARDS)
    back = at[:, None] - at[None]
    wide = int(text.partition(":")[2] or LENGTH)
    return np.ones_like(back, bool) if text == "full" else (back >= 0) & (back < wide)


def tiled(truth):
    """How many tiles hold some pair, and only pairs, by shard of queries and of keys."""
    n = LENGTH // TILE
    tiles = truth.reshape(n, TILE, n, TILE)
    some, every = tiles.any((1, 3)), tiles.all((1, 3))
    by_shard = [x.reshape(SHARDS, -1, SHARDS, n // SHARDS).sum((1, 3)) for x in (some, every)]
    return by_shard


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mask", ["causal", "full", "window:300"])
def test_tiles(mask, layout):
    found = load.load(mask_of(mask), layout, LENGTH, SHARDS)
    some, every = tiled(seen(mask, layout))
    np.testing.assert_array_equal(found.tiles[0], every)
    np.testing.assert_array_equal(found.tiles.sum(0), some)
    assert found.executed == some.sum()
    assert found.busiest == pytest.approx(some.sum(1).max() / some.sum(1).mean())


def test_zigzag_balances_what_contiguous_does_not():
    found = {x: load.load(mask_of("causal"), x, LENGTH, SHARDS) for x in LAYOUTS}
    assert found["zigzag"].busiest == 1
    assert found["contiguous"].busiest > 1.5


@pytest.mark.parametrize("mask", ["causal", "full", "window:300"])
def test_least_tiles(mask):
    some, _ = tiled(seen(mask, "contiguous"))
    assert least_tiles(mask_of(mask), LENGTH, TILE) == some.sum()


@pytest.mark.parametrize("both_ways", [False, True])
def test_hops_visit_every_shard_once(both_ways):
    found = load.load(mask_of("causal"), "contiguous", LENGTH, SHARDS)
    hops = found.hops((1.0, 10.0), both_ways=both_ways)
    assert hops.shape == (SHARDS, SHARDS)
    wanted = found.tiles[0] + 10 * found.tiles[1]
    np.testing.assert_allclose(hops.sum(0), wanted.sum(1))
    np.testing.assert_allclose(hops[0], wanted.diagonal())


def test_the_keys_at_a_hop_come_from_before():
    found = load.load(mask_of("causal"), "contiguous", LENGTH, SHARDS)
    up = found.hops((1.0, 1.0), both_ways=False)
    assert up[1, 1] == found.tiles[:, 1, 0].sum()
    assert up[1, 0] == 0  # the last shard's keys are after the first one's queries
    both = found.hops((1.0, 1.0), both_ways=True)
    assert both[1, 1] == (found.tiles[:, 1, 0].sum() + found.tiles[:, 1, 2].sum()) / 2
    assert both[1, 0] == 0


@pytest.mark.parametrize(
    ("mask", "layout", "wanted"),
    [
        ("window:300", "contiguous", (1, 0)),
        ("window:200", "zigzag", (1, 1)),
        ("window:600", "contiguous", (2, 0)),
        ("causal", "contiguous", (2, 1)),
    ],
)
def test_reach(mask, layout, wanted):
    assert load.reach(mask_of(mask), layout, LENGTH, SHARDS) == wanted


@pytest.mark.parametrize("text", ["", "window", "window:0", "window:x", "causal:3", "prefix"])
def test_wrong_masks(text):
    with pytest.raises(ValueError, match="wanted causal, packed, full or window:TOKENS, found"):
        mask_of(text)
