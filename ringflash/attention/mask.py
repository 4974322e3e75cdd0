"""Masks: which keys a query may see, as values that never become a [T, S] array.

A mask answers two questions. `relation` works on spans (what a run of tokens covers) and says EMPTY,
PARTIAL or FULL: the tile loop asks it for tiles, the ring for hops, the work counter for useful tiles.
`visible` works on tokens and is only asked inside a PARTIAL tile. `relation` may say PARTIAL where the
truth is EMPTY or FULL (that costs time, not truth), never the other way round.

Both work alike on numpy arrays, jax arrays and traced values, of any broadcastable shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array | Any

EMPTY, PARTIAL, FULL = 0, 1, 2
LAST_POSITION = 2**31 - 1
PADDING = -1  # any negative segment id is padding: it sees nothing and nothing sees it


class Tokens(NamedTuple):
    """Where the rows of an array come from: int32 `positions_BT` and `segment_ids_BT`.

    Positions are compared between queries and keys, so both must count from the same origin: the row,
    or (with `Segments` in the mask) the document; differences must fit in int32. A negative segment id
    is padding.

    Of queries only, and only where a bias or dropout asks for them: `heads_N`, the ids of the query heads
    that the array holds (int32), and `seeds_B`, a random number for each batch row (uint32).
    """

    positions_BT: Array
    segment_ids_BT: Array
    heads_N: Array | None = None
    seeds_B: Array | None = None


def lengthened(at: Tokens, more: int) -> Tokens:
    """`more` rows of padding added at the end.

    XLA's partitioner takes two pads of one array for the same, whatever they pad with (jaxlib 0.10.2), and
    both fields may be one array. So both are padded with 0.
    """
    rows = ((0, 0), (0, more))
    return at._replace(
        positions_BT=jnp.pad(at.positions_BT, rows),
        segment_ids_BT=jnp.pad(at.segment_ids_BT - PADDING, rows) + PADDING,
    )


class Span(NamedTuple):
    """What a run of tokens covers: least and greatest position and segment id. Padding has no position."""

    position_min: Array
    position_max: Array
    segment_min: Array
    segment_max: Array


def spans(at: Tokens, blocks: int) -> Span:
    """The spans of `blocks` equal runs of the tokens [B, T]; each field is [B, blocks]."""

    def fold(x_BT: Array) -> Array:
        return x_BT.reshape(x_BT.shape[0], blocks, -1)

    largest = jnp.iinfo(jnp.int32).max
    segment = fold(at.segment_ids_BT)
    position = fold(at.positions_BT)
    real = segment >= 0
    return Span(
        jnp.where(real, position, largest).min(-1),
        jnp.where(real, position, -largest).max(-1),
        segment.min(-1),
        segment.max(-1),
    )


class Bounds(NamedTuple):
    """Least and greatest key position that a query sees, both inclusive, int32; None is no bound."""

    lo: Array | None = None
    hi: Array | None = None


def whole(x: Any, least: int) -> bool:
    """Whether x is a whole number that positions can be compared with."""
    number = isinstance(x, Integral) and not isinstance(x, bool)
    return number and least <= x <= LAST_POSITION


def moved(x: Array, by: int) -> Array:
    """x + by, no further than positions go."""
    if by < 0:
        return jnp.where(x < -LAST_POSITION - by, -LAST_POSITION, x + by)
    return jnp.where(x > LAST_POSITION - by, LAST_POSITION, x + by)


def classify(empty: Array, full: Array) -> Array:
    """EMPTY, PARTIAL or FULL from two truth values."""
    return jnp.where(empty, EMPTY, jnp.where(full, FULL, PARTIAL)).astype(jnp.int8)


class Mask:
    """The contract. Combine with `&`: a pair must be visible under both."""

    local = False  # whether it can leave two whole shards without a pair, wherever they lie

    def visible(self, q: Tokens, k: Tokens) -> Array:
        """Truth per pair; the fields of `q` and `k` broadcast against each other."""
        raise NotImplementedError

    def relation(self, q: Span, k: Span) -> Array:
        """EMPTY, PARTIAL or FULL (int8) per pair of spans."""
        raise NotImplementedError

    def bounds(self, q: Tokens) -> Bounds:
        """The key positions that each query sees, as an interval; (None, None) is every position.

        For kernels that know no other masks. Raises NotImplementedError where it is not an interval.
        """
        raise NotImplementedError

    def __and__(self, other: Mask) -> Mask:
        return Both((*parts(self), *parts(other)))


def parts(mask: Mask) -> tuple[Mask, ...]:
    """The masks that `&` joined."""
    return mask.masks if isinstance(mask, Both) else (mask,)


@dataclass(frozen=True)
class Both(Mask):
    """Visible under every one of `masks`: what `&` makes."""

    masks: tuple[Mask, ...]

    @property
    def local(self) -> bool:  # type: ignore[override]
        return any(m.local for m in self.masks)

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return reduce(jnp.logical_and, (m.visible(q, k) for m in self.masks))

    def relation(self, q: Span, k: Span) -> Array:
        # EMPTY < PARTIAL < FULL, so the least is right: one EMPTY empties, FULL needs all.
        return reduce(jnp.minimum, (m.relation(q, k) for m in self.masks))

    def bounds(self, q: Tokens) -> Bounds:
        each = [mask.bounds(q) for mask in self.masks]
        lows = [x.lo for x in each if x.lo is not None]
        highs = [x.hi for x in each if x.hi is not None]
        return Bounds(
            reduce(jnp.maximum, lows) if lows else None,
            reduce(jnp.minimum, highs) if highs else None,
        )


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return jnp.ones(jnp.broadcast_shapes(q.positions_BT.shape, k.positions_BT.shape), bool)

    def relation(self, q: Span, k: Span) -> Array:
        return jnp.full(
            jnp.broadcast_shapes(q.segment_min.shape, k.segment_min.shape), FULL, jnp.int8
        )

    def bounds(self, q: Tokens) -> Bounds:
        return Bounds()


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees its own position and those before it."""

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return q.positions_BT >= k.positions_BT

    def relation(self, q: Span, k: Span) -> Array:
        return classify(q.position_max < k.position_min, q.position_min >= k.position_max)

    def bounds(self, q: Tokens) -> Bounds:
        return Bounds(hi=q.positions_BT)


@dataclass(frozen=True)
class Window(Mask):
    """A query at i sees the keys j with -right <= i - j < left.

    `left` counts the token itself, as Mistral's `sliding_window` does; `right` = None does not look
    at keys to the right, so that `Causal() & Window(n)` is the usual sliding window.
    """

    left: int
    right: int | None = None
    local = True

    def __post_init__(self) -> None:
        if not whole(self.left, 1) or not (self.right is None or whole(self.right, 0)):
            raise ValueError(
                f"Window needs whole numbers, left >= 1 and right >= 0, below 2**31, found {self}"
            )

    def visible(self, q: Tokens, k: Tokens) -> Array:
        back = q.positions_BT - k.positions_BT
        seen = back < self.left
        return seen if self.right is None else seen & (back >= -self.right)

    def relation(self, q: Span, k: Span) -> Array:
        # A span of padding alone holds no position; wrapped differences there must not read as FULL.
        nothing = (q.position_max < q.position_min) | (k.position_max < k.position_min)
        least, most = q.position_min - k.position_max, q.position_max - k.position_min
        empty, full = least >= self.left, most < self.left
        if self.right is not None:
            empty, full = empty | (most < -self.right), full & (least >= -self.right)
        return classify(nothing | empty, full)

    def bounds(self, q: Tokens) -> Bounds:
        position = q.positions_BT
        lo = moved(position, 1 - self.left)
        return Bounds(lo) if self.right is None else Bounds(lo, moved(position, self.right))


@dataclass(frozen=True)
class Chunked(Mask):
    """Positions are cut in chunks of `size`; a query sees the keys of its own chunk."""

    size: int
    local = True

    def __post_init__(self) -> None:
        if not whole(self.size, 1):
            raise ValueError(f"Chunked needs a whole number 1 <= size < 2**31, found {self.size!r}")

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return q.positions_BT // self.size == k.positions_BT // self.size

    def relation(self, q: Span, k: Span) -> Array:
        q_first, q_last = q.position_min // self.size, q.position_max // self.size
        k_first, k_last = k.position_min // self.size, k.position_max // self.size
        apart = (q_last < k_first) | (k_last < q_first)
        return classify(apart, (q_first == k_last) & (q_last == k_first))

    def bounds(self, q: Tokens) -> Bounds:
        first = q.positions_BT // self.size * self.size
        return Bounds(first, moved(first, self.size - 1))


@dataclass(frozen=True)
class Prefix(Mask):
    """Prefix-LM: the first `length` positions are seen by all, the others causally."""

    length: int

    def __post_init__(self) -> None:
        if not whole(self.length, -LAST_POSITION):
            raise ValueError(f"Prefix needs a whole number below 2**31, found {self.length!r}")

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return (k.positions_BT < self.length) | (q.positions_BT >= k.positions_BT)

    def relation(self, q: Span, k: Span) -> Array:
        empty = (k.position_min >= self.length) & (q.position_max < k.position_min)
        return classify(empty, (k.position_max < self.length) | (q.position_min >= k.position_max))

    def bounds(self, q: Tokens) -> Bounds:
        return Bounds(hi=jnp.maximum(q.positions_BT, self.length - 1))


@dataclass(frozen=True)
class Segments(Mask):
    """Packed documents: a query sees the keys of its own segment; padding sees and is seen by none."""

    local = True

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return (q.segment_ids_BT == k.segment_ids_BT) & (q.segment_ids_BT >= 0)

    def relation(self, q: Span, k: Span) -> Array:
        padding = (q.segment_max < 0) | (k.segment_max < 0)
        apart = (q.segment_max < k.segment_min) | (k.segment_max < q.segment_min)
        one = (q.segment_min == k.segment_max) & (q.segment_max == k.segment_min)
        return classify(padding | apart, one & (q.segment_min >= 0))

    def bounds(self, q: Tokens) -> Bounds:
        return Bounds()


@dataclass(frozen=True)
class RealKeys(Mask):
    """No key is padding. Every kernel adds it, so that lengths need not divide its tiles."""

    def visible(self, q: Tokens, k: Tokens) -> Array:
        return (k.segment_ids_BT >= 0) & (q.segment_ids_BT == q.segment_ids_BT)

    def relation(self, q: Span, k: Span) -> Array:
        some = jnp.broadcast_shapes(q.segment_min.shape, k.segment_min.shape)
        return jnp.broadcast_to(classify(k.segment_max < 0, k.segment_min >= 0), some)
