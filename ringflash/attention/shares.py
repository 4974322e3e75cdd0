"""How the keys of a shard are shared out to the parcels that travel round a ring.

Two parcels take half of the key/value heads each. Where these are odd in number they take half of the keys:
of each half of the shard one quarter each, so that both bring early and late keys alike and a zigzag shard
has the same work at every hop.

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

from ringflash.attention.mask import Tokens
from ringflash.attention.orders import ordered, restored
from ringflash.attention.parcel import pack, unpack

Array = jax.Array


class Parcel(NamedTuple):
    """What travels: K and V in their order of dims, positions and segments as int32 [2, B, S]."""

    k: Array
    v: Array
    tokens: Array

    @property
    def at(self) -> Tokens:
        """Of the keys."""
        return Tokens(self.tokens[0], self.tokens[1])


@dataclass(frozen=True)
class Share:
    """One parcel's: part `part` of `parts` equal parts of the heads; of the keys these runs (none: all)."""

    part: int = 0
    parts: int = 1
    runs: tuple[slice, ...] = ()

    def heads(self, x: Array, dim: int) -> Array:
        """x cut to the heads of the share, of queries or of keys."""
        if self.parts == 1:
            return x
        count = x.shape[dim] // self.parts
        return jax.lax.slice_in_dim(x, self.part * count, (self.part + 1) * count, axis=dim)

    def keys(self, x: Array, dim: int = 1) -> Array:
        """x cut to the keys of the share."""
        if not self.runs:
            return x
        runs = [jax.lax.slice_in_dim(x, run.start, run.stop, axis=dim) for run in self.runs]
        return jnp.concatenate(runs, axis=dim)

    def queries(self, at: Tokens) -> Tokens:
        """The tokens of the queries of these heads."""
        heads = None if at[2] is None else self.heads(jnp.asarray(at[2]), 0)
        return Tokens(at[0], at[1], heads, *at[3:])


def shared(parcels: int, k_BSKH: Array, *, by_heads: bool) -> tuple[Share, ...]:
    """The shares of so many parcels, one or two.

    by_heads False: for a kernel that communicates. Two calls of it that do not depend on one another have no
    order, and devices that take another order than others wait for ever.
    """
    _, S, K, _ = k_BSKH.shape
    if parcels == 1:
        return (Share(),)
    if by_heads and K % parcels == 0:
        return tuple(Share(n, parcels) for n in range(parcels))
    count = min(S, 2 * parcels)
    cuts = [S * n // count for n in range(count + 1)]
    runs = tuple(slice(*ends) for ends in itertools.pairwise(cuts))
    return tuple(Share(runs=runs[n::parcels]) for n in range(parcels))


def parcel(share: Share, k_BSKH: Array, v_BSKH: Array, at: Tokens, orders: Sequence[str]) -> Parcel:
    """What the share sends at the start. orders: of K and of V."""
    arrays = [
        ordered(share.keys(share.heads(x, 2)), order)
        for x, order in zip((k_BSKH, v_BSKH), orders, strict=True)
    ]
    tokens = share.keys(jnp.stack([jnp.asarray(x) for x in at[:2]]), dim=2)
    return Parcel(arrays[0], arrays[1], tokens)


def opened(it: Parcel, orders: Sequence[str]) -> tuple[Array, Array]:
    """k_BSKH and v_BSKH."""
    return restored(it.k, orders[0]), restored(it.v, orders[1])


def moved(it: Parcel, move: Callable[[Array], Array], *, apart: bool) -> Parcel:
    """The parcel after `move`."""
    if apart:
        return Parcel(*map(move, it))
    k, v, at = unpack(move(pack(it.k, it.v, it.at)), it.k, it.v)
    return Parcel(k, v, jnp.stack(at[:2]))


def sums_moved(
    dk_dv: tuple[Array, Array], move: Callable[[Array], Array], *, apart: bool
) -> tuple[Array, Array]:
    """The dk and dv of a parcel after `move`."""
    if apart:
        return move(dk_dv[0]), move(dk_dv[1])
    both = move(jnp.concatenate(dk_dv, axis=-1))
    width = dk_dv[0].shape[-1]
    return both[..., :width], both[..., width:]


def collected(parts: Sequence[Array], shares: Sequence[Share]) -> Array:
    """The shares' [B, S, K, H] put together again."""
    if len(parts) == 1:
        return parts[0]
    if shares[0].parts > 1:
        return jnp.concatenate(parts, axis=2)
    runs: dict[int, Array] = {}
    for part, share in zip(parts, shares, strict=True):
        first = 0
        for run in share.runs:
            length = run.stop - run.start
            runs[run.start] = part[:, first : first + length]
            first += length
    return jnp.concatenate([runs[start] for start in sorted(runs)], axis=1)
