"""One way round a ring, or a few hops along it: what moves, what stays, and what is computed meanwhile.

The loop over hops is rolled: the program does not grow with the ring. In the backward the fp32 dk and dv of
a block travel one hop behind it, beside the next hop's products. Each shard's own block is kept for the two
transfers that have no other work beside them: the first of K and V, and the one that brings dk and dv home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.axis import Axis, alike, shifted, size_of
from ringflash.attention.here import platform_here
from ringflash.attention.kernel import (
    BackwardOf,
    ForwardOf,
    Grads,
    Kernel,
    Partial,
    add_grads,
    sum_dtype,
)
from ringflash.attention.mask import EMPTY, Tokens, spans
from ringflash.attention.orders import Orders, ordered, restored
from ringflash.attention.shares import (
    Parcel,
    Share,
    collected,
    moved,
    opened,
    parcel,
    shared,
    sums_moved,
)
from ringflash.attention.strategies.routes import Route

Array = jax.Array
Sums = tuple[Array, Array]  # dk and dv of a parcel, in the kernel's order of dims


@dataclass(frozen=True)
class Trip:
    """One route, and what stays at home: the queries. Rows of queries are cut to the heads of a share."""

    kernel: Kernel
    axis: Axis
    route: Route
    shares: tuple[Share, ...]
    orders: Orders
    apart: bool  # whether K, V and tokens travel each for itself
    q: Array
    q_at: Tokens

    @staticmethod
    def of(
        kernel: Kernel, axis: Axis, route: Route, q: Array, k: Array, v: Array, q_at: Tokens
    ) -> Trip:
        """For K and V of these shapes."""
        shares = shared(len(route.shifts), k, by_heads=not kernel.axes)
        prepared = kernel.prepared
        apart = platform_here() != "cpu"  # where XLA confuses transfers that are under way together
        orders = prepared.orders(k.shape[3], v.shape[3]) if prepared and apart else Orders()
        return Trip(kernel, axis, route, shares, orders, apart, q, q_at)

    @property
    def heads(self) -> tuple[Share, ...]:
        """One share for each part of the heads."""
        return self.shares[: self.shares[0].parts]

    def forward_of(self, share: Share, like: tuple[Array, Array]) -> ForwardOf:
        """The kernel's forward for the queries of the share's heads."""
        kernel, q, q_at = self.kernel, share.heads(self.q, 2), share.queries(self.q_at)
        if kernel.prepared:
            return kernel.prepared.forward(q, q_at, like)
        return lambda k, v, k_at, part: kernel.forward(q, k, v, q_at, k_at, part)

    def backward_of(
        self, share: Share, rows: tuple[Array, ...], like: tuple[Array, Array]
    ) -> BackwardOf:
        """The kernel's backward, likewise."""
        kernel, q, q_at = self.kernel, share.heads(self.q, 2), share.queries(self.q_at)
        dout, lse, delta = (share.heads(x, dim) for x, dim in zip(rows, (2, 1, 1), strict=True))
        if kernel.prepared:
            return kernel.prepared.backward(q, q_at, (dout, lse, delta), like)
        return lambda k, v, k_at, dq: kernel.backward(
            q, k, v, q_at, k_at, dout, lse, delta, Grads(dq, None, None)
        )

    def forward(self, k: Array, v: Array, k_at: Tokens, part: Partial) -> Partial:
        """Each hop: send the parcels on, and meanwhile attend to what they held."""
        orders = self.orders[:2]
        parcels = tuple(parcel(share, k, v, k_at, orders) for share in self.shares)
        pairs = list(zip(self.heads, parcels, strict=False))
        forwards = [self.forward_of(share, opened(it, orders)) for share, it in pairs]
        parts = tuple(Partial(s.heads(part[0], 2), s.heads(part[1], 1)) for s in self.heads)

        def work(share: Share, it: Parcel, part: Partial) -> tuple[Partial, tuple[()]]:
            return forwards[share.part](*opened(it, orders), it.at, part), ()

        def body(hop: Array, state: tuple) -> tuple:
            parcels, parts = state
            sent = self.send(parcels)
            done: tuple = lax.optimization_barrier((sent, self.visit(hop, parcels, parts, work)[0]))
            return done

        parcels, parts = lax.fori_loop(0, self.route.hops, body, (parcels, parts))
        parts, _ = self.visit(self.route.hops, parcels, parts, work)
        outs, lses = zip(*parts, strict=True)
        return Partial(side_by_side(outs, 2), side_by_side(lses, 1))

    def backward(
        self, k: Array, v: Array, k_at: Tokens, rows: tuple[Array, Array, Array], into: Grads
    ) -> Grads:
        """As `forward`; `behind` is the dk and dv of the block visited last. rows: dout, lse, delta."""
        orders = self.orders[2:4]
        parcels = tuple(parcel(share, k, v, k_at, orders) for share in self.shares)
        pairs = list(zip(self.heads, parcels, strict=False))
        backwards = [self.backward_of(share, rows, opened(it, orders)) for share, it in pairs]
        dqs = tuple(share.heads(into.dq_BTNH, 2) for share in self.heads)

        def work(share: Share, it: Parcel, dq: Array) -> tuple[Array, Sums]:
            dq, dk, dv = backwards[share.part](*opened(it, orders), it.at, dq)
            return dq, (ordered(dk, self.orders.dk), ordered(dv, self.orders.dv))

        def visit(hop: Array | int, parcels: Any, dqs: Any, which: slice = slice(None)) -> Any:
            return self.visit(hop, parcels, dqs, work, which)

        nothing = alike(tuple(self.nothing(it) for it in parcels), dqs)
        trip = self.round_trip if self.route.onward else self.there_and_back
        dqs, sums = trip(visit, parcels, dqs, nothing)
        dk, dv = (
            collected([restored(x, order) for x in xs], self.shares)
            for xs, order in zip(zip(*sums, strict=True), self.orders[4:], strict=True)
        )
        ours = Grads(side_by_side(dqs, 2), dk, dv)
        return add_grads(into._replace(dq_BTNH=None), ours)

    def round_trip(self, visit: Any, mine: Any, dqs: Any, nothing: Any) -> Any:
        """Once round the ring. Of the block at home the first parcel is worked on while K and V take their
        first hop, the second while dk and dv come home."""
        early, late = slice(0, 1), slice(1, None)
        sent = self.send(mine)
        dqs, fresh = visit(0, mine, dqs, early)
        parcels, dqs, fresh = lax.optimization_barrier((sent, dqs, fresh))

        size = size_of(self.axis)
        state = (parcels, (*fresh, *nothing[late]), dqs)
        parcels, behind, dqs = lax.fori_loop(1, size - 1, self.hop_with(visit), state)
        arrived = self.send_sums(behind)
        dqs, fresh = visit(size - 1, parcels, dqs)
        home = self.send_sums(plus(arrived, fresh))
        dqs, fresh = visit(0, mine, dqs, late)
        home, dqs = lax.optimization_barrier((home, dqs))
        return dqs, (*home[early], *plus(home[late], fresh))

    def hop_with(self, visit: Any) -> Callable[[Array, tuple], tuple]:
        """One hop of a backward: what the parcels held is worked on; they go on, dk and dv follow."""

        def body(hop: Array, state: tuple) -> tuple:
            parcels, behind, dqs = state
            sent, arrived = self.send(parcels), self.send_sums(behind)
            dqs, fresh = visit(hop, parcels, dqs)
            sent, dqs = lax.optimization_barrier((sent, dqs))
            return sent, plus(arrived, fresh), dqs

        return body

    def there_and_back(self, visit: Any, parcels: Any, dqs: Any, nothing: Any) -> Any:
        """A few hops one way; dk and dv come back the same way."""
        state = (parcels, nothing, dqs)
        parcels, behind, dqs = lax.fori_loop(0, self.route.hops, self.hop_with(visit), state)
        dqs, fresh = visit(self.route.hops, parcels, dqs)
        behind = plus(self.send_sums(behind), fresh)
        return dqs, lax.fori_loop(0, self.route.hops, lambda _, x: self.send_sums(x, -1), behind)

    def visit(
        self,
        hop: Array | int,
        parcels: Sequence[Parcel],
        states: Sequence[Any],
        work: Callable[[Share, Parcel, Any], tuple[Any, Any]],
        which: slice = slice(None),
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """work(share, parcel, the state of its heads) -> (state, what else comes) for these parcels."""
        states, others = list(states), []
        for share, it in list(zip(self.shares, parcels, strict=True))[which]:
            met = self.where_needed(hop, it, partial(work, share, it), states[share.part])
            states[share.part] = met[0]
            others.append(met[1])
        return tuple(states), tuple(others)

    def where_needed(
        self, hop: Array | int, it: Parcel, work: Callable[[Any], Any], state: Any
    ) -> Any:
        """work(state); or `state` and zeros where no pair meets or another route serves the block."""
        spec = self.kernel.spec
        conditions = [] if self.route.home else [jnp.asarray(hop) > 0]
        if not self.kernel.axes:  # what communicates is run by all or by none, and skips by itself
            conditions.append((spec.relation(spans(self.q_at, 1), spans(it.at, 1)) > EMPTY).any())
        if not spec.mask.local or not conditions:
            return work(state)

        def idle(state: Any) -> Any:
            other = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work, state)[1]
            )
            return state, alike(other, state)

        return lax.cond(reduce(jnp.logical_and, conditions), work, idle, state)

    def nothing(self, it: Parcel) -> Sums:
        """dk and dv of a parcel, zero."""
        sums = sum_dtype(self.q)
        pairs = zip(it[:2], self.orders[2:4], self.orders[4:], strict=True)
        dk, dv = (ordered(restored(jnp.zeros(x.shape, sums), a), b) for x, a, b in pairs)
        return dk, dv

    def send(self, parcels: Sequence[Parcel]) -> tuple[Parcel, ...]:
        """One hop for each."""
        pairs = zip(parcels, self.route.shifts, strict=True)
        return tuple(moved(it, partial(self.shift, way), apart=self.apart) for it, way in pairs)

    def send_sums(self, sums: Sequence[Sums], way: int = 1) -> tuple[Sums, ...]:
        """One hop for the dk and dv of each; way = -1 sends them back."""
        pairs = zip(sums, self.route.shifts, strict=True)
        return tuple(
            sums_moved(it, partial(self.shift, way * shift), apart=self.apart)
            for it, shift in pairs
        )

    def shift(self, way: int, x: Array) -> Array:
        """x of the device before, or behind."""
        return shifted(x, self.axis, way)


def plus(a: Any, b: Any) -> Any:
    """Leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def side_by_side(xs: Sequence[Array], dim: int) -> Array:
    """What the shares of heads made, as one."""
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=dim)
