"""What the TPU kernel is told to do, against every pair of tokens and against loops, without Pallas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention import (
    LAYOUTS,
    PADDING,
    PARTIAL,
    Causal,
    Chunked,
    Full,
    Prefix,
    Segments,
    Spec,
    Tokens,
    Window,
)
from ringflash.attention.cases import tokens
from ringflash.attention.kernels.mosaic import agenda as made
from ringflash.attention.kernels.mosaic.agenda import HI, LAST, LO, SEGMENT
from ringflash.attention.mask import Bounds, Mask
from ringflash.attention.tile import seen

B, TILES_Q, TILES_K, BLOCK_Q, BLOCK_K = 2, 4, 6, 6, 4
LENGTH = TILES_Q * BLOCK_Q
assert LENGTH == TILES_K * BLOCK_K
LAWS = settings(max_examples=150, deadline=None, derandomize=True)


class Alone(Mask):
    """Even positions see their own, odd ones nothing: the interval of a user's mask may be empty."""

    def visible(self, q, k):
        return (q.positions_BT == k.positions_BT) & (q.positions_BT % 2 == 0)

    def relation(self, q, k):
        return Full().relation(q, k).clip(max=PARTIAL)

    def bounds(self, q):
        return Bounds(q.positions_BT, q.positions_BT - q.positions_BT % 2)


size = st.integers(1, LENGTH)
single = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.just(Segments()),
    st.just(Alone()),
    st.builds(Window, size, st.none() | st.integers(0, LENGTH)),
    st.builds(Chunked, size),
    st.builds(Prefix, st.integers(0, 2 * LENGTH)),
)
masks = st.lists(single, min_size=1, max_size=3).map(lambda every: joined(*every))


def joined(first, *others):
    for other in others:
        first = first & other
    return first


@st.composite
def packed(draw):
    """Rows of documents with padding behind them."""
    sizes = draw(st.lists(st.integers(1, LENGTH), max_size=6))
    while sum(sizes) > LENGTH:
        sizes.pop()
    return tokens(B, LENGTH, tuple(sizes))


@st.composite
def shard(draw):
    """A shard of a longer sequence, of one document or of several, in the order of a layout."""
    shards, layout = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from(sorted(LAYOUTS)))
    whole = draw(st.sampled_from([None, (40,), (20, 3, 30), (5, 15, 9, 7)]))
    whole = whole if whole is None or sum(whole) <= LENGTH * shards else (LENGTH,)
    at, rank = tokens(B, LENGTH * shards, whole), draw(st.integers(0, shards - 1))
    mine = LAYOUTS[layout](LENGTH * shards, shards)[rank * LENGTH :][:LENGTH]
    return Tokens(*(x[:, mine] for x in at[:2]))


@st.composite
def scattered(draw):
    """Any positions, in any segments, any of them padding."""

    def rows(values):
        flat = draw(st.lists(values, min_size=B * LENGTH, max_size=B * LENGTH))
        return np.array(flat, np.int32).reshape(B, LENGTH)

    ids = draw(st.sampled_from([(0,), (0, PADDING), (PADDING, -7, 0, 1, 2)]))
    return Tokens(rows(st.integers(0, 3 * LENGTH)), rows(st.sampled_from(ids)))


any_tokens = packed() | shard() | scattered()


def tiled(x, tiles):
    return np.asarray(x).reshape(B, tiles, -1)


@LAWS
@given(masks, any_tokens, any_tokens, st.booleans())
def test_units_are_what_is_visible(mask, q_at, k_at, apart):
    """The tests of a unit leave just the visible pairs of its tile; a tile left out has none."""
    spec = Spec(mask)
    tests = made.Tests.of(spec, apart=apart)
    kinds = np.asarray(made.tests_of_tiles(spec, tests, q_at, k_at, TILES_Q, TILES_K))
    assert kinds.shape == (B, TILES_Q, TILES_K)
    real = tiled(q_at.segment_ids_BT, TILES_Q) >= 0
    truth = np.broadcast_to(spec.visible(q_at, k_at), (B, LENGTH, LENGTH))
    truth = truth.reshape(B, TILES_Q, BLOCK_Q, TILES_K, BLOCK_K).swapaxes(2, 3)
    queries = [tiled(x, TILES_Q)[:, :, None, :, None] for x in made.query_rows(spec, q_at)]
    position, segment = (tiled(x, TILES_K)[:, None, :, None] for x in made.key_rows(k_at))
    for kind in np.unique(kinds):
        passed = np.zeros(truth.shape, bool)
        if kind >= 0:
            same = queries[2] == segment
            found = seen(tests.choices[kind], *queries[:2], position, lambda same=same: same)
            passed = np.broadcast_to(True if found is None else np.asarray(found), truth.shape)
        ours = (kinds == kind)[..., None, None]
        blind = ours & ~real[:, :, None, :, None]
        ours = np.broadcast_to(ours & real[:, :, None, :, None], truth.shape)
        np.testing.assert_array_equal(passed[ours], truth[ours])
        if made.segmented(spec):
            assert not passed[np.broadcast_to(blind, truth.shape)].any(), "padding sees a key"


@LAWS
@given(masks, any_tokens, any_tokens)
def test_a_query_that_sees_nothing_has_no_interval_of_its_own(mask, q_at, k_at):
    """lo <= hi always, as the one comparison of both bounds needs it; a padded key is above every hi."""
    rows, keys = made.query_rows(Spec(mask), q_at), made.key_rows(k_at)
    assert (np.asarray(rows.lo) <= np.asarray(rows.hi)).all()
    padding = np.asarray(k_at.segment_ids_BT) < 0
    assert (np.asarray(keys.position)[padding] > np.asarray(rows.hi).max()).all()


@pytest.mark.parametrize(
    ("mask", "choices"),
    [
        (Full(), ((), (HI,))),
        (Causal(), ((), (HI,))),
        (Window(3), ((), (HI,), (LO,), (HI, LO))),
        (Full() & Segments(), ((), (HI,), (SEGMENT,), (HI, SEGMENT))),
        (
            Causal() & Chunked(9) & Segments(),
            ((), (HI,), (LO,), (SEGMENT,), (HI, LO, SEGMENT)),
        ),
    ],
    ids=str,
)
def test_no_body_that_a_mask_cannot_need(mask, choices):
    assert made.Tests.of(Spec(mask)).choices == choices
    assert made.Tests.of(Spec(mask), apart=False).choices == (choices[0], choices[-1])


@LAWS
@given(masks, any_tokens, any_tokens, st.booleans())
def test_tiles_take_no_more_tests_than_they_need(mask, q_at, k_at, apart):
    """None where every pair passes, one where only that fails some pair, else all; or none and all."""
    spec = Spec(mask)
    tests = made.Tests.of(spec, apart=apart)
    kinds = np.asarray(made.tests_of_tiles(spec, tests, q_at, k_at, TILES_Q, TILES_K))
    lo, hi, q_segment = (
        tiled(x, TILES_Q)[:, :, None, :, None] for x in made.query_rows(spec, q_at)
    )
    position, k_segment = (tiled(x, TILES_K)[:, None, :, None] for x in made.key_rows(k_at))
    real_q, real_k = q_segment >= 0, k_segment >= 0
    fails = {
        HI: (position > hi) & real_q,
        LO: (position < lo) & real_q & real_k,
        SEGMENT: (q_segment != k_segment) | ~real_q,
    }
    known = tests.choices[-1]
    for place in np.argwhere(kinds >= 0):
        needed = tuple(name for name in known if fails[name][tuple(place)].any())
        choice = tests.choices[kinds[tuple(place)]]
        more = len(needed) > (1 if apart else 0)
        assert choice == (known if more else needed), f"tile {place}"


KINDS = 5


def drawn(steps, sub, streamed, share, seed=0):
    """Tests of tiles at random, [B, resident, streamed]; -1 with that chance, one step without any."""
    draw = np.random.default_rng(seed)
    tests = draw.integers(0, KINDS, size=(B, steps * sub, streamed))
    tests = np.where(draw.random(tests.shape) < share, -1, tests)
    tests[0, : sub if steps > 1 else 0] = -1
    return tests.astype(np.int32)


every_list = pytest.mark.parametrize(
    ("steps", "sub", "streamed", "share", "look"),
    [
        (1, 1, 1, 0.0, 1),
        (4, 1, 7, 0.3, 1),
        (4, 1, 7, 0.3, 4),
        (3, 2, 5, 0.7, 3),
        (3, 3, 5, 0.2, 1),
        (2, 16, 9, 0.5, 2),
        (4, 2, 6, 1.0, 4),
        (6, 2, 6, 0.9, 6),
        (2, 1, 128, 0.5, 2),
        (2, 1, 129, 0.0, 1),
    ],
)


def lists(steps, sub, streamed, share, look):
    """The tests, and of the agenda the words, the tiles ahead and the counts."""
    tests = drawn(steps, sub, streamed, share)
    found = np.asarray(made.agenda(tests, sub, look=look))
    length = -(-streamed * sub // 128) * 128
    assert found.dtype == np.int32
    assert found.shape == (B, steps, 1, 2 * length + made.AGENDA_TAIL)
    return tests, *np.split(found[:, :, 0], [length, 2 * length], axis=2)


@every_list
def test_the_units_of_a_step(steps, sub, streamed, share, look):
    """Every tile that is not EMPTY once, in the order of the streamed tiles; then zeros."""
    tests, words, _, counts = lists(steps, sub, streamed, share, look)
    for row, step in np.ndindex(B, steps):
        mine = tests[row, step * sub : (step + 1) * sub]
        wanted = [
            (c, r, mine[r, c]) for c in range(streamed) for r in range(sub) if mine[r, c] >= 0
        ]
        count = len(wanted)
        assert (counts[row, step] == count).all()
        assert not words[row, step, count:].any()
        fields = [np.asarray(x)[:count].tolist() for x in made.unpacked(words[row, step])]
        assert list(zip(*fields[:3], strict=True)) == wanted
        tiles = [None, *(tile for tile, *_ in wanted), None]
        assert fields[3] == [tiles[n] != tiles[n + 1] for n in range(count)], "new"
        assert fields[4] == [tiles[n + 1] != tiles[n + 2] for n in range(count)], "final"


@every_list
def test_what_is_fetched_next(steps, sub, streamed, share, look):
    """At each new tile the next new one, also that of a later step as far as `look` goes; else -1."""
    _, words, ahead, counts = lists(steps, sub, streamed, share, look)
    for row in range(B):
        for first in range(0, steps, look):
            fetched, told = [], []
            for step in range(first, first + look):
                tile, _, _, new, _ = (np.asarray(x) for x in made.unpacked(words[row, step]))
                new = new & (np.arange(len(new)) < counts[row, step, 0])
                fetched += tile[new].tolist()
                told += ahead[row, step][new].tolist()
            assert told == [*fetched[1:], -1][: len(told)]


@LAWS
@given(st.lists(st.booleans(), min_size=11, max_size=11))
def test_gathered_left(active):
    """The words that count, in their order, then zeros; a word of zero counts too."""
    words = np.arange(11, dtype=np.int32)
    found, count = made.gathered_left(words[None], np.array([active]))
    kept = words[np.array(active)]
    assert int(count[0]) == len(kept)
    np.testing.assert_array_equal(found[0], np.pad(kept, (0, 11 - len(kept))))


@given(st.lists(st.integers(-1, 5), min_size=9, max_size=9))
@LAWS
def test_following(values):
    wanted = [next((x for x in values[n + 1 :] if x >= 0), -1) for n in range(len(values))]
    np.testing.assert_array_equal(made.following(np.array([values], np.int32)), [wanted])


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("full", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_unpacked(full, new, final):
    """Fields filled to the last bit do not reach into each other, and a word is not negative."""
    sizes = (made.TILE_BITS, made.SUB_BITS, made.TEST_BITS)
    tile, lane, kind = (
        (1 << bits) - 1 if one else 0 for bits, one in zip(sizes, full, strict=True)
    )
    word = tile | lane << made.TILE_BITS | kind << (made.TILE_BITS + made.SUB_BITS)
    word |= (made.NEW if new else 0) | (made.FINAL if final else 0)
    assert 0 <= word <= LAST
    found = made.unpacked(np.int32(word))
    assert [int(x) for x in found] == [tile, lane, kind, new, final]
