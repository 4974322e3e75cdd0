"""How the keys of a shard are shared out to the parcels that travel round a ring.

Two parcels take half of the key/value heads each where the kernel takes K and V in parts (`Prepared`): the
heads of a parcel, of queries too, are then rows of the batch, and one call serves both. Else they take half
of the keys: of each half of the shard one quarter each, so that both bring early and late keys alike and a
zigzag shard has the same work at every hop; a call is given the keys of both, one after the other.

A parcel is K, V and their Tokens. Where the kernel has an order of dims (`Orders`) each travels as an array
of its own, in that order: to lay them side by side costs passes over HBM at each hop (docs/log.md). Else they
travel as one array: XLA on CPU confuses transfers that are under way together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ringflash.attention.mask import PADDING, Tokens
from ringflash.attention.orders import ordered, restored
from ringflash.attention.parcel import pack, unpack

Array = jax.Array
Sums = tuple[Array, Array]  # dk and dv of a parcel, in the kernel's order of dims


class Parcel(NamedTuple):
    """What travels: K and V in their order of dims, positions and segments as int32 [2, B, S]."""

    k: Array
    v: Array
    tokens: Array

    def shown(self, if_so: bool | Array) -> Parcel:
        """The same, or with nothing in it but padding."""
        segments = jnp.where(if_so, self.tokens[1], PADDING)
        return self._replace(tokens=jnp.stack([self.tokens[0], segments]))


@dataclass(frozen=True)
class Shares:
    """So many parcels: of the heads, or (runs) each of these runs of the keys."""

    count: int
    runs: tuple[tuple[slice, ...], ...] = ()

    @staticmethod
    def of(k_BSKH: Array, *, by_heads: bool) -> Shares:
        """Two, where there is so much to share."""
        _, S, K, _ = k_BSKH.shape
        if by_heads and K % 2 == 0:
            return Shares(2)
        count = min(S, 4)
        cuts = [S * n // count for n in range(count + 1)]
        runs = tuple(slice(*ends) for ends in itertools.pairwise(cuts))
        parcels = tuple(part for part in (runs[::2], runs[1::2]) if part)
        return Shares(len(parcels), parcels)

    def rows(self, x: Array, dim: int) -> Array:
        """The heads of x, its dim `dim`, cut to parcels, which become rows of the batch: first all of one."""
        if self.runs:
            return x
        B, heads = x.shape[0], x.shape[dim]
        cut = x.reshape(*x.shape[:dim], self.count, heads // self.count, *x.shape[dim + 1 :])
        first = jnp.moveaxis(cut, dim, 0)
        return first.reshape(self.count * B, *first.shape[2:])

    def heads(self, x: Array, dim: int) -> Array:
        """The inverse of `rows`."""
        if self.runs:
            return x
        cut = jnp.moveaxis(x.reshape(self.count, -1, *x.shape[1:]), 0, dim)
        return cut.reshape(*cut.shape[:dim], -1, *cut.shape[dim + 2 :])

    def queries(self, at: Tokens) -> Tokens:
        """The tokens of the rows of queries."""
        if self.runs:
            return at
        return Tokens(*(jnp.concatenate([jnp.asarray(x)] * self.count) for x in at[:2]))

    def parcels(
        self, k_BSKH: Array, v_BSKH: Array, at: Tokens, orders: Sequence[str]
    ) -> tuple[Parcel, ...]:
        """What is sent at the start. orders: of K and of V."""
        tokens = jnp.stack([jnp.asarray(x) for x in at[:2]])
        ks, vs = (
            [ordered(x, order) for x in self.parted(x_BSKH)]
            for x_BSKH, order in zip((k_BSKH, v_BSKH), orders, strict=True)
        )
        parts = [joined([tokens[:, :, run] for run in runs], 2) for runs in self.runs]
        return tuple(map(Parcel, ks, vs, parts or [tokens] * self.count))

    def parted(self, x_BSKH: Array) -> list[Array]:
        """x cut to parcels."""
        if self.runs:
            return [joined([x_BSKH[:, run] for run in runs], 1) for runs in self.runs]
        return jnp.split(x_BSKH, self.count, axis=2)

    def given(
        self, parcels: Sequence[Parcel], orders: Sequence[str]
    ) -> tuple[list[Array], list[Array], Tokens]:
        """K and V as a kernel is given them, in parts, and their Tokens."""
        ks = [restored(it.k, orders[0]) for it in parcels]
        vs = [restored(it.v, orders[1]) for it in parcels]
        if self.runs:
            ks, vs = [joined(ks, 1)], [joined(vs, 1)]
        return ks, vs, self.at(parcels)

    def at(self, parcels: Sequence[Parcel]) -> Tokens:
        """The tokens of all."""
        positions, segments = joined([it.tokens for it in parcels], 2 if self.runs else 1)
        return Tokens(positions, segments)

    def of_each(self, d: Array) -> list[Array]:
        """dk or dv as a kernel gives it, cut to parcels."""
        if not self.runs:
            return jnp.split(d, self.count)
        lengths = [sum(run.stop - run.start for run in runs) for runs in self.runs]
        return jnp.split(d, list(itertools.accumulate(lengths))[:-1], axis=1)

    def collected(self, parts: Sequence[Array]) -> Array:
        """The parcels' [B, S, K, H] put together again: the inverse of `parted`."""
        if not self.runs:
            return joined(parts, 2)
        found: dict[int, Array] = {}
        for part, runs in zip(parts, self.runs, strict=True):
            first = 0
            for run in runs:
                length = run.stop - run.start
                found[run.start] = part[:, first : first + length]
                first += length
        return joined([found[start] for start in sorted(found)], 1)


def joined(xs: Sequence[Array], dim: int) -> Array:
    """As one."""
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=dim)


def moved(it: Parcel, move: Callable[[Array], Array], *, apart: bool) -> Parcel:
    """The parcel after `move`."""
    if apart:
        return Parcel(*map(move, it))
    k, v, at = unpack(move(pack(it.k, it.v, Tokens(it.tokens[0], it.tokens[1]))), it.k, it.v)
    return Parcel(k, v, jnp.stack(at[:2]))


def sums_moved(dk_dv: Sums, move: Callable[[Array], Array], *, apart: bool) -> Sums:
    """The dk and dv of a parcel after `move`."""
    if apart:
        return move(dk_dv[0]), move(dk_dv[1])
    both = move(jnp.concatenate(dk_dv, axis=-1))
    width = dk_dv[0].shape[-1]
    return both[..., :width], both[..., width:]
