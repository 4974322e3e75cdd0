"""Laws of masks: what `relation` says of two spans against every pair of tokens in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention import (
    EMPTY,
    FULL,
    PADDING,
    PARTIAL,
    Causal,
    Chunked,
    Full,
    Prefix,
    Segments,
    Span,
    Spec,
    Tokens,
    Window,
)
from ringflash.attention.mask import Mask, parts, spans

Q, K, NEAR = 3, 4, 12  # queries and keys of an example, and how far apart they may lie
FIRST = [0, 10_000_000, 2**31 - 2 - NEAR]  # the last: the greatest position is 2^31 - 2
LAWS = settings(max_examples=200, deadline=None, derandomize=True)

size = st.integers(1, 2 * NEAR)
single = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.just(Segments()),
    st.builds(Window, size, st.none() | st.integers(0, NEAR)),
    st.builds(Chunked, size | st.just(2**31 - 1)),
    st.builds(Prefix, st.sampled_from(FIRST).flatmap(lambda n: st.integers(n, n + NEAR))),
)
masks = st.lists(single, min_size=1, max_size=3).map(lambda every: joined(*every))


def joined(first, *others):
    for other in others:
        first = first & other
    return first


@st.composite
def pairs(draw, ids=(PADDING, -7, 0, 1, 2)):
    """Queries and keys from one neighbourhood, some or all of them padding."""
    first = draw(st.sampled_from(FIRST))

    def tokens(count):
        near = st.integers(first, first + NEAR)
        positions = draw(st.lists(near, min_size=count, max_size=count))
        allowed = draw(st.sampled_from([ids, (0,), (PADDING,), (1, 2), (0, PADDING)]))
        segments = draw(st.lists(st.sampled_from(allowed), min_size=count, max_size=count))
        return Tokens(np.array([positions], np.int32), np.array([segments], np.int32))

    return tokens(Q), tokens(K)


def verdicts(mask, q, k):
    """The relation, and the truth of every pair whose query is not padding."""
    spec = Spec(mask)
    relation = int(spec.relation(spans(q, 1), spans(k, 1))[0, 0])
    seen = np.broadcast_to(spec.visible(q, k)[0], (Q, K))
    return relation, seen[q.segment_ids_BT[0] >= 0]


@LAWS
@given(masks, pairs())
def test_empty_and_full_are_never_wrong(mask, at):
    """EMPTY never where a pair is visible, FULL never where one is not; PARTIAL may be either."""
    relation, seen = verdicts(mask, *at)
    if relation == EMPTY:
        assert not seen.any()
    if relation == FULL:
        assert seen.all()


EVERY = [
    Full(),
    Causal(),
    Segments(),
    Window(1),
    Window(3),
    Window(3, 2),
    Window(100, 0),
    Chunked(1),
    Chunked(5),
    Prefix(0),
    Prefix(8),
]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("mask", EVERY, ids=str)
def test_relation_of_runs_is_exact(mask, first):
    """Two runs of positions and one mask: PARTIAL only where some pairs are visible and some are not.

    Every place of a run of 3 against a run of 4, within 12.
    """
    if isinstance(mask, Prefix):
        mask = Prefix(first + mask.length)
    places = first + np.arange(NEAR - K + 1, dtype=np.int32)
    runs = [Tokens(*(places[:, None] + np.arange(n, dtype=np.int32),) * 2) for n in (Q, K)]
    q, k = (at._replace(segment_ids_BT=np.zeros_like(at.positions_BT)) for at in runs)
    spans_q, spans_k = spans(q, 1), spans(k, 1)
    relation = Spec(mask).relation(spans_q, Span(*(x[:, 0] for x in spans_k)))
    seen = Spec(mask).visible(
        Tokens(*(x[:, None] for x in q[:2])), Tokens(*(x[None] for x in k[:2]))
    )
    seen = np.broadcast_to(seen, (len(places), len(places), Q, K))
    exact = np.where(seen.all((2, 3)), FULL, np.where(seen.any((2, 3)), PARTIAL, EMPTY))
    np.testing.assert_array_equal(relation, exact)


@pytest.mark.parametrize("mask", [m for m in EVERY if not isinstance(m, Full | Prefix)], ids=str)
@pytest.mark.parametrize("at", [0, 1, 5, 2**31 - 2])
def test_padding_has_no_position(mask, at):
    """A span of nothing but padding is EMPTY for any mask of positions; differences with it wrap."""
    one = np.array([[at]], np.int32)
    real = spans(Tokens(one, np.zeros_like(one)), 1)
    nothing = spans(Tokens(one, np.full_like(one, PADDING)), 1)
    for q, k in ((real, nothing), (nothing, real), (nothing, nothing)):
        assert int(mask.relation(q, k)[0, 0]) == EMPTY


@LAWS
@given(pairs(ids=(PADDING,)) | pairs(), masks)
def test_padding_alone_is_empty(at, mask):
    """No key but padding: nothing to do, whatever the mask."""
    q, k = at
    nothing = k._replace(segment_ids_BT=np.full((1, K), PADDING, np.int32))
    relation, seen = verdicts(mask, q, nothing)
    assert relation == EMPTY
    assert not seen.any()


@LAWS
@given(single, single, single, pairs())
def test_and(a, b, c, at):
    """Associative, and a pair must be visible under both."""
    q, k = (Tokens(*(x[:, :, None] for x in at[0][:2])), Tokens(*(x[:, None] for x in at[1][:2])))
    both = np.asarray((a & b).visible(q, k)) & np.ones((1, Q, K), bool)
    np.testing.assert_array_equal(both, np.asarray(a.visible(q, k)) & np.asarray(b.visible(q, k)))
    assert (a & b) & c == a & (b & c)
    assert parts((a & b) & c) == (a, b, c)
    assert (a & b).local == (a.local or b.local)


@pytest.mark.parametrize("mask", [*EVERY, Causal() & Window(20) & Segments()], ids=str)
def test_numpy_and_traced_agree(mask):
    """On [B, q blocks, 1] against [B, 1, k blocks], as kernels ask, spans of padding among them."""
    draw = np.random.default_rng(0)
    positions = draw.integers(0, 100, size=(3, 48)).astype(np.int32)
    segments = np.sort(draw.integers(-1, 3, size=(3, 48)).astype(np.int32), 1)
    segments[0, 8:16] = PADDING
    span = Span(*map(np.asarray, spans(Tokens(positions, segments), 12)))
    q, k = Span(*(x[:, :, None] for x in span)), Span(*(x[:, None] for x in span))
    with np.errstate(all="raise"):
        plain = np.asarray(mask.relation(q, k))
    assert plain.shape == (3, 12, 12)
    assert plain.dtype == np.int8
    np.testing.assert_array_equal(jax.jit(mask.relation)(q, k), plain)
    at = Tokens(positions, segments)
    q, k = Tokens(*(x[:, :, None] for x in at[:2])), Tokens(*(x[:, None] for x in at[:2]))
    np.testing.assert_array_equal(jax.jit(mask.visible)(q, k), mask.visible(q, k))


def test_spans():
    """Padding has a segment id but no position."""
    positions = np.array([[5, 3, 9, 1, 2, 7, 4, 4]], np.int32)
    segments = np.array([[0, 0, -1, 2, -1, -1, 3, 3]], np.int32)
    most = 2**31 - 1
    found = spans(Tokens(positions, segments), 4)
    wanted = Span([[3, 1, most, 4]], [[5, 1, -most, 4]], [[0, -1, -1, 3]], [[0, 2, -1, 3]])
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def visible(mask, i, j):
    """Whether the query at i sees the key at j."""
    i, j = (Tokens(jnp.array([[n]], jnp.int32), jnp.zeros((1, 1), jnp.int32)) for n in (i, j))
    return bool(mask.visible(i, j).all())


@pytest.mark.parametrize("first", FIRST)
def test_window_convention(first):
    """Key j is visible to i iff 0 <= i - j < W: the token itself counts, as in Mistral."""
    near = range(NEAR + 1)
    seen = [n for n in near if visible(Causal() & Window(8), first + 10, first + n)]
    assert seen == list(range(3, 11))
    seen = [n for n in near if visible(Window(8, 2), first + 9, first + n)]
    assert seen == list(range(2, 12))


def test_the_other_conventions():
    assert [visible(Chunked(4), 5, j) for j in (3, 4, 7, 8)] == [False, True, True, False]
    assert [visible(Prefix(4), 1, j) for j in (0, 3, 4)] == [True, True, False]
    assert [visible(Prefix(4), 6, j) for j in (3, 5, 6, 7)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Window(0), r"left >= 1 and right >= 0, below 2\*\*31, found Window\(left=0"),
        (lambda: Window(2, -1), "found .*right=-1"),
        (lambda: Window(2**40), "below .*left=1099511627776"),
        (lambda: Window("3"), "found .*left='3'"),
        (lambda: Window(True), "whole numbers.*left=True"),
        (lambda: Chunked(0), r"Chunked needs a whole number 1 <= size < 2\*\*31, found 0"),
        (lambda: Chunked(2.5), "found 2.5"),
        (lambda: Prefix(2**31), "Prefix needs a whole number below .*, found 2147483648"),
    ],
)
def test_sizes_out_of_range(make, said):
    with pytest.raises(ValueError, match=said):
        make()


class Custom(Mask):
    """A mask of a user, who did not write `bounds`."""

    def visible(self, q, k):
        return q.positions_BT % 2 == k.positions_BT % 2

    def relation(self, q, k):
        return Full().relation(q, k).clip(max=PARTIAL)


def within(found, k):
    """The truth that an interval of positions stands for, [.., queries, keys]."""
    at = np.asarray(k.positions_BT, np.int64)[:, None, :]
    sides = [None if x is None else np.asarray(x, np.int64)[:, :, None] for x in found]
    seen = np.ones((1, Q, K), bool)
    for side, outside in zip(sides, (np.less, np.greater), strict=True):
        seen = seen if side is None else seen & ~outside(at, side)
    return seen


@LAWS
@given(masks, pairs())
def test_bounds_are_what_is_visible(mask, at):
    """The interval and, where documents are asked for, one segment: every pair of every mask."""
    q, k = at
    seen = within(mask.bounds(q), k)
    facing = Tokens(*(x[:, :, None] for x in q[:2])), Tokens(*(x[:, None] for x in k[:2]))
    if any(isinstance(part, Segments) for part in parts(mask)):
        seen = seen & np.asarray(Segments().visible(*facing))
    np.testing.assert_array_equal(seen, np.asarray(mask.visible(*facing)) & np.ones((Q, K), bool))


@pytest.mark.parametrize("mask", EVERY, ids=str)
def test_bounds_at_the_last_positions(mask):
    """Up to 2^31 - 2 nothing wraps."""
    last = 2**31 - 2
    q = Tokens(last - np.arange(Q, dtype=np.int32)[None], np.zeros((1, Q), np.int32))
    k = Tokens(last - 2 * np.arange(K, dtype=np.int32)[None], np.zeros((1, K), np.int32))
    facing = Tokens(*(x[:, :, None] for x in q[:2])), Tokens(*(x[:, None] for x in k[:2]))
    seen = np.asarray(mask.visible(*facing)) & np.ones((1, Q, K), bool)
    np.testing.assert_array_equal(within(mask.bounds(q), k), seen)


@pytest.mark.parametrize(
    "mask",
    [*EVERY, Window(2**31 - 1), Window(2**31 - 1, 2**31 - 1), Chunked(2**31 - 1), Chunked(7)],
    ids=str,
)
def test_bounds_of_negative_positions(mask):
    """Nothing wraps there either."""
    for first in (-20, -(2**30)):
        q = Tokens(first + np.arange(40, dtype=np.int32)[None], np.zeros((1, 40), np.int32))
        facing = Tokens(*(x[:, :, None] for x in q[:2])), Tokens(*(x[:, None] for x in q[:2]))
        seen = np.asarray(mask.visible(*facing)) & np.ones((1, 40, 40), bool)
        lo, hi = mask.bounds(q)
        at = q.positions_BT[:, None]
        found = np.ones((1, 40, 40), bool)
        found &= True if lo is None else at >= np.asarray(lo)[..., None]
        found &= True if hi is None else at <= np.asarray(hi)[..., None]
        np.testing.assert_array_equal(found, seen)


@LAWS
@given(masks, pairs())
def test_bounds_are_int32(mask, at):
    for side in mask.bounds(at[0]):
        assert side is None or side.dtype == np.int32


def test_bounds_of_both():
    """The narrower on each side; None where none has a bound."""
    at = Tokens(np.array([[7, 20]], np.int32), np.zeros((1, 2), np.int32))
    lo, hi = (Causal() & Window(3, 2) & Chunked(8)).bounds(at)
    np.testing.assert_array_equal(lo, [[5, 18]])
    np.testing.assert_array_equal(hi, [[7, 20]])
    lo, hi = (Full() & Prefix(10)).bounds(at)
    assert lo is None
    np.testing.assert_array_equal(hi, [[9, 20]])
    assert (Full() & Segments()).bounds(at) == (None, None)


@pytest.mark.parametrize(
    "mask", [Custom(), Causal() & Custom(), Custom() & Segments()], ids=["alone", "last", "first"]
)
def test_a_mask_that_is_no_interval_says_so(mask):
    with pytest.raises(NotImplementedError):
        mask.bounds(Tokens(*(np.zeros((1, 1), np.int32),) * 2))
