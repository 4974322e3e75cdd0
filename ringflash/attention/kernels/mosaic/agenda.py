"""What the TPU kernel has to do, as data: which pairs of tiles meet, in which order, and what to test there.

A kernel holds one side of the tiles (`resident`) while the other side streams past it. Plain XLA makes the
list of units (a resident tile against a streamed one) that are not EMPTY; the kernel only follows it, so that
no mask costs it more than the tests of its PARTIAL tiles. All masks are intervals of key positions, and
equality of segments: three tests, `HI` (key position <= hi), `LO` (>= lo) and `SEGMENT`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.mask import EMPTY, FULL, Segments, Tokens, parts, spans
from ringflash.attention.spec import Spec

Array = jax.Array
HI, LO, SEGMENT = "hi", "lo", "segment"
LAST = jnp.iinfo(jnp.int32).max  # the position of a padded key: above every `hi`
AGENDA_TAIL = 128  # words after the lists; the first is how many units there are
TILE_BITS, SUB_BITS, TEST_BITS = (
    20,
    4,
    4,
)  # fields of a word; then one bit each for `new` and `last`
NEW, FINAL = 1 << (TILE_BITS + SUB_BITS + TEST_BITS), 1 << (TILE_BITS + SUB_BITS + TEST_BITS + 1)


class QueryRows(NamedTuple):
    """What the tests compare of queries: int32 [B, n]."""

    lo: Array
    hi: Array
    segment: Array


class KeyRows(NamedTuple):
    """What the tests compare of keys: int32 [B, n]."""

    position: Array
    segment: Array


@dataclass(frozen=True)
class Tests:
    """The combinations of tests that a unit may need; a unit names one by its index. The first is none."""

    choices: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(spec: Spec, *, apart: bool = True) -> Tests:
        """Each alone, and all together; only all together unless `apart`."""
        lo, _ = spec.mask.bounds(Tokens(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1), jnp.int32)))
        single = [HI]
        single += [LO] if lo is not None else []
        single += [SEGMENT] if segmented(spec) else []
        together = [tuple(single)] if len(single) > 1 else []
        alone = [(name,) for name in single] if apart or not together else []
        return Tests(((), *alone, *together))

    def index(self, needed: dict[str, Array]) -> Array:
        """The least combination that holds what is needed."""
        count = sum(needed[name].astype(jnp.int32) for name in needed)
        index = jnp.where(count > 0, len(self.choices) - 1, 0)
        for n, choice in enumerate(self.choices):
            if len(choice) == 1:
                index = jnp.where(needed[choice[0]] & (count == 1), n, index)
        return index


def segmented(spec: Spec) -> bool:
    """Whether queries see their own segment only."""
    return any(isinstance(mask, Segments) for mask in parts(spec.mask))


def query_rows(spec: Spec, at: Tokens) -> QueryRows:
    """lo <= hi, or both LAST - 1 where nothing is seen: no key has that position."""
    lo, hi = spec.mask.bounds(at)
    position, segment = jnp.asarray(at.positions_BT), jnp.asarray(at.segment_ids_BT)
    lo = jnp.full_like(position, -LAST) if lo is None else lo
    hi = jnp.full_like(position, LAST - 1) if hi is None else jnp.minimum(hi, LAST - 1)
    nothing = lo > hi
    if segmented(spec):
        nothing |= segment < 0
    return QueryRows(jnp.where(nothing, LAST - 1, lo), jnp.where(nothing, LAST - 1, hi), segment)


def key_rows(at: Tokens) -> KeyRows:
    """The position is LAST where the key is padding."""
    position, segment = jnp.asarray(at.positions_BT), jnp.asarray(at.segment_ids_BT)
    return KeyRows(jnp.where(segment < 0, LAST, position), segment)


def tests_of_tiles(
    spec: Spec, tests: Tests, q_at: Tokens, k_at: Tokens, q_tiles: int, k_tiles: int
) -> Array:
    """[B, q tiles, k tiles]: -1 where no pair meets, else the index of the tests that are needed."""

    def fold(x: Array, tiles: int) -> Array:
        return x.reshape(x.shape[0], tiles, -1)

    rows, keys = query_rows(spec, q_at), key_rows(k_at)
    real_q = fold(jnp.asarray(q_at.segment_ids_BT), q_tiles) >= 0
    real_k = fold(keys.segment, k_tiles) >= 0
    highest_lo = jnp.where(real_q, fold(rows.lo, q_tiles), -LAST).max(-1)[:, :, None]
    lowest_hi = jnp.where(real_q, fold(rows.hi, q_tiles), LAST).min(-1)[:, :, None]
    position = fold(keys.position, k_tiles)
    first = jnp.where(real_k, position, LAST).min(-1)[:, None, :]
    q_span, k_span = spans(q_at, q_tiles), spans(k_at, k_tiles)
    q_span = type(q_span)(*(x[:, :, None] for x in q_span))
    k_span = type(k_span)(*(x[:, None, :] for x in k_span))
    needed = {HI: position.max(-1)[:, None, :] > lowest_hi}
    if any(LO in choice for choice in tests.choices):
        needed[LO] = first < highest_lo
    if segmented(spec):
        needed[SEGMENT] = Segments().relation(q_span, k_span) != FULL
    meets = spec.relation(q_span, k_span) > EMPTY
    return jnp.where(meets, tests.index(needed), -1)


def agenda(tests_BRC: Array, sub: int, *, look: int = 1) -> Array:
    """The lists of a kernel that holds `sub` resident tiles a step: int32 [B, R / sub, 1, 2 L + AGENDA_TAIL].

    First L words, one a unit, in the order of the streamed tiles; then for each that is `new` the streamed
    tile to fetch after its own, within `look` steps, or -1; then the number of units.
    """
    B, R, C = tests_BRC.shape
    steps, length = R // sub, -(-C * sub // 128) * 128
    tests = tests_BRC.reshape(B, steps, sub, C).swapaxes(2, 3)
    tile = jnp.arange(C, dtype=jnp.int32)[:, None]
    lane = jnp.arange(sub, dtype=jnp.int32)
    words = tile | lane << TILE_BITS | tests.astype(jnp.int32) << (TILE_BITS + SUB_BITS)
    words, count = gathered_left(words.reshape(B * steps, -1), tests.reshape(B * steps, -1) >= 0)
    tile = unpacked(words)[0]
    place = jnp.arange(C * sub)
    valid = place < count[:, None]
    new = valid & ((place == 0) | (tile != jnp.roll(tile, 1, axis=-1)))
    final = valid & ((place == count[:, None] - 1) | jnp.roll(new, -1, axis=-1))
    ahead = following(jnp.where(new, tile, -1))
    later = following(jnp.where(count > 0, tile[:, 0], -1).reshape(-1, look)).reshape(-1, 1)
    ahead = jnp.where(ahead < 0, later, ahead)
    words = words | jnp.where(new, NEW, 0) | jnp.where(final, FINAL, 0)
    room = ((0, 0), (0, length - C * sub))
    tail = jnp.broadcast_to(count[:, None], (B * steps, AGENDA_TAIL))
    lists = [jnp.pad(x, room) for x in (words, ahead)]
    return jnp.concatenate([*lists, tail], -1).reshape(B, steps, 1, -1)


def gathered_left(words: Array, active: Array) -> tuple[Array, Array]:
    """The active words of each row [rows, n] at its start, in order, then zeros; and how many, [rows].

    Each word goes left by as many places as there are idle ones before it: by 1, 2, 4, ... as the bits of
    that number say, which keeps the order ("compress" of Hacker's Delight, 7-4). A sort of thousands of
    words, or a scatter, which becomes one, takes the TPU compiler minutes (docs/log.md).
    """
    n = words.shape[1]
    idle = jnp.cumsum(~active, axis=-1, dtype=jnp.int32)
    way = jnp.where(active, idle, 0)
    words = jnp.where(active, words, -1)
    for step in (1 << bit for bit in range(n.bit_length())):

        def from_right(x: Array, empty: int, step: int = step) -> Array:
            return jnp.pad(x[:, step:], ((0, 0), (0, min(step, n))), constant_values=empty)

        comes = (from_right(way, 0) & step) != 0
        goes = (way & step) != 0
        words = jnp.where(comes, from_right(words, -1), jnp.where(goes, -1, words))
        way = jnp.where(comes, from_right(way, 0), jnp.where(goes, 0, way))
    return jnp.maximum(words, 0), n - idle[:, -1]


def following(fetched: Array) -> Array:
    """For each place the next value above -1 behind it, or -1. int32 [B, n]."""
    n = fetched.shape[1]
    place = jnp.where(fetched >= 0, jnp.arange(n), n)
    later = jnp.pad(place[:, 1:], ((0, 0), (0, 1)), constant_values=n)
    nearest = lax.cummin(later, axis=1, reverse=True)
    found = jnp.take_along_axis(fetched, jnp.minimum(nearest, n - 1), axis=1)
    return jnp.where(nearest < n, found, -1).astype(jnp.int32)


class Fields(NamedTuple):
    """Of a word."""

    tile: Any  # the streamed one
    resident: Any  # tile of the step
    tests: Any  # which choice of `Tests` it needs
    new: Any  # whether its streamed tile comes with it
    final: Any  # whether it is the last unit of that


def unpacked(word: Any) -> Fields:
    """The fields of a word."""
    tile = word & ((1 << TILE_BITS) - 1)
    lane = lax.shift_right_logical(word, TILE_BITS) & ((1 << SUB_BITS) - 1)
    kind = lax.shift_right_logical(word, TILE_BITS + SUB_BITS) & ((1 << TEST_BITS) - 1)
    return Fields(tile, lane, kind, (word & NEW) != 0, (word & FINAL) != 0)
