"""One way round a ring, or a few hops along it: what moves, what stays, and what is computed meanwhile.

The loop over hops is rolled, and one call of the kernel serves all parcels: the program does not grow with
the ring. In the backward the fp32 dk and dv of a block travel one hop behind it, beside the next hop's
products. Each shard's own block serves the two transfers that have no other work beside them: of its first
parcel while K and V take their first hop, of the other while dk and dv come home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from ringflash.attention.shares import Parcel, Shares, Sums, moved, sums_moved
from ringflash.attention.strategies.routes import Route

Array = jax.Array
Parcels = tuple[Parcel, ...]


@dataclass(frozen=True)
class Trip:
    """One route, and what stays at home: the queries, in rows as `Shares.rows` has them."""

    kernel: Kernel
    axis: Axis
    route: Route
    shares: Shares
    orders: Orders
    apart: bool  # whether K, V and tokens travel each for itself
    q: Array
    q_at: Tokens

    @staticmethod
    def of(
        kernel: Kernel, axis: Axis, route: Route, q: Array, k: Array, v: Array, q_at: Tokens
    ) -> Trip:
        """For K and V of these shapes."""
        shares = Shares.of(k, by_heads=kernel.prepared is not None)
        prepared = kernel.prepared
        apart = platform_here() != "cpu"  # where XLA confuses transfers that are under way together
        orders = prepared.orders(k.shape[3], v.shape[3]) if prepared and apart else Orders()
        q, q_at = shares.rows(q, 2), shares.queries(q_at)
        return Trip(kernel, axis, route, shares, orders, apart, q, q_at)

    def forward_of(self, like: tuple[Array, Array]) -> ForwardOf:
        """The kernel's forward for the queries."""
        kernel, q, q_at = self.kernel, self.q, self.q_at
        if kernel.prepared:
            return kernel.prepared.forward(q, q_at, like)
        return lambda k, v, k_at, part: kernel.forward(q, k[0], v[0], q_at, k_at, part)

    def backward_of(self, rows: tuple[Array, ...], like: tuple[Array, Array]) -> BackwardOf:
        """The kernel's backward, likewise."""
        kernel, q, q_at = self.kernel, self.q, self.q_at
        dout, lse, delta = (
            self.shares.rows(x, dim) for x, dim in zip(rows, (2, 1, 1), strict=True)
        )
        if kernel.prepared:
            return kernel.prepared.backward(q, q_at, (dout, lse, delta), like)
        return lambda k, v, k_at, dq: kernel.backward(
            q, k[0], v[0], q_at, k_at, dout, lse, delta, Grads(dq, None, None)
        )

    def forward(self, k: Array, v: Array, k_at: Tokens, part: Partial) -> Partial:
        """Each hop: send the parcels on, and meanwhile attend to what they held."""
        orders, shares, hops = self.orders[:2], self.shares, self.route.hops
        parcels = shares.parcels(k, v, k_at, orders)
        ks, vs, _ = shares.given(parcels, orders)
        run = self.forward_of((ks[0], vs[0]))

        def visit(hop: Array, parcels: Parcels, part: Partial) -> Partial:
            def work(part: Partial) -> tuple[Partial, tuple[()]]:
                return run(*shares.given(parcels, orders), part), ()

            if not self.route.home:
                parcels = shown(parcels, (hop > 0,) * 2)
            return self.where_needed(parcels, work, part)[0]

        def body(hop: Array, state: tuple) -> tuple:
            parcels, part = state
            done = lax.optimization_barrier((self.send(parcels), visit(hop, parcels, part)))
            sent, part = done
            return self.instead(parcels, sent, part.lse_BNT), part

        part = Partial(shares.rows(part[0], 2), shares.rows(part[1], 1))
        parcels, part = lax.fori_loop(0, hops, body, (parcels, part))
        part = visit(jnp.asarray(hops), parcels, part)
        return Partial(shares.heads(part[0], 2), shares.heads(part[1], 1))

    def backward(
        self, k: Array, v: Array, k_at: Tokens, rows: tuple[Array, Array, Array], into: Grads
    ) -> Grads:
        """As `forward`; `behind` is the dk and dv of the block visited last. rows: dout, lse, delta."""
        orders, shares = self.orders[2:4], self.shares
        # Nothing is sent before the forward is done: what arrived would be held all the while.
        mine, rows = lax.optimization_barrier((shares.parcels(k, v, k_at, orders), rows))
        ks, vs, _ = shares.given(mine, orders)
        run = self.backward_of(rows, (ks[0], vs[0]))

        def visit(moving: Any, parcels: Parcels, dq: Array) -> Any:
            """What moves meanwhile, dq, and dk and dv of the parcels."""

            def work(dq: Array) -> tuple[Array, tuple[Array, Array]]:
                dq, dk, dv = run(*shares.given(parcels, orders), dq)
                return dq, (dk, dv)

            met = self.where_needed(parcels, work, dq)
            moving, (dq, dk_dv) = lax.optimization_barrier((moving, met))
            return moving, dq, self.sums(*dk_dv)

        dq = shares.rows(into.dq_BTNH, 2)
        trip = self.round_trip if self.route.onward else self.there_and_back
        dq, sums = trip(visit, mine, dq)
        dk, dv = (
            shares.collected([restored(x, order) for x in xs])
            for xs, order in zip(zip(*sums, strict=True), self.orders[4:], strict=True)
        )
        return add_grads(into._replace(dq_BTNH=None), Grads(shares.heads(dq, 2), dk, dv))

    def round_trip(self, visit: Any, mine: Parcels, dq: Array) -> tuple[Array, tuple[Sums, ...]]:
        """Once round the ring; the last two hops bring dk and dv home, and K and V stay."""
        early, late = (True, False), (False, True)
        state = visit(self.send(mine), shown(mine, early), dq)
        size = size_of(self.axis)
        parcels, dq, behind = lax.fori_loop(1, size - 1, self.hop_with(visit), state)

        def homeward(_: Array, state: tuple) -> tuple:
            parcels, dq, behind = state
            arrived, dq, fresh = visit(self.send_sums(behind), parcels, dq)
            home = self.instead(parcels, shown(mine, late), fresh[0][0])
            return home, dq, plus(arrived, fresh)

        _, dq, sums = lax.fori_loop(0, 2, homeward, (parcels, dq, behind))
        return dq, sums

    def hop_with(self, visit: Any) -> Callable[[Array, tuple], tuple]:
        """One hop of a backward: what the parcels held is worked on; they go on, dk and dv follow."""

        def body(hop: Array, state: tuple) -> tuple:
            parcels, dq, behind = state
            moving = self.send(parcels), self.send_sums(behind)
            (sent, arrived), dq, fresh = visit(moving, self.on_the_way(hop, parcels), dq)
            return self.instead(parcels, sent, fresh[0][0]), dq, plus(arrived, fresh)

        return body

    def on_the_way(self, hop: Array, parcels: Parcels) -> Parcels:
        """What of the parcels is worked on at some hop of a backward."""
        if self.route.onward:
            return parcels
        away = hop > 0
        if not self.route.home:
            return shown(parcels, (away, away))
        return shown(parcels, (True, away | (jnp.asarray(self.route.hops) == 0)))

    def there_and_back(
        self, visit: Any, mine: Parcels, dq: Array
    ) -> tuple[Array, tuple[Sums, ...]]:
        """A few hops one way; dk and dv come back the same way."""
        hops = self.route.hops
        state = alike((mine, dq, self.nothing(mine)), dq)
        parcels, dq, behind = lax.fori_loop(0, hops, self.hop_with(visit), state)
        held = self.on_the_way(jnp.asarray(hops), parcels)
        arrived, dq, fresh = visit(self.send_sums(behind), held, dq)

        def back(hop: Array, state: tuple) -> tuple:
            dq, sums = state
            arrived = self.send_sums(sums, -1)
            if not self.route.home:
                return dq, arrived
            arrived, dq, fresh = visit(arrived, shown(mine, (False, hop == hops - 1)), dq)
            return dq, plus(arrived, fresh)

        state = dq, plus(arrived, fresh)
        done: tuple[Array, tuple[Sums, ...]] = lax.fori_loop(0, hops, back, state)
        return done

    def where_needed(self, parcels: Parcels, work: Callable[[Any], Any], state: Any) -> Any:
        """work(state) -> (state, what else comes); or `state` and zeros where no pair meets."""
        spec = self.kernel.spec
        # What communicates is run by all or by none, and skips by itself.
        if self.kernel.axes or not spec.mask.local:
            return work(state)
        met = spec.relation(spans(self.q_at, 1), spans(self.shares.at(parcels), 1)) > EMPTY

        def idle(state: Any) -> Any:
            other = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(work, state)[1]
            )
            return state, alike(other, state)

        return lax.cond(met.any(), work, idle, state)

    def sums(self, dk: Array, dv: Array) -> tuple[Sums, ...]:
        """dk and dv of each parcel, as they travel."""
        pairs = zip((dk, dv), self.orders[4:], strict=True)
        dks, dvs = ([ordered(x, order) for x in self.shares.of_each(d)] for d, order in pairs)
        return tuple(zip(dks, dvs, strict=True))

    def nothing(self, parcels: Parcels) -> tuple[Sums, ...]:
        """dk and dv of each parcel, zero."""
        came, made = self.orders[2:4], self.orders[4:]

        def zero(x: Array, n: int) -> Array:
            zeros = jnp.zeros(x.shape, sum_dtype(self.q))
            return ordered(restored(zeros, came[n]), made[n])

        return tuple((zero(it.k, 0), zero(it.v, 1)) for it in parcels)

    def send(self, parcels: Parcels) -> Parcels:
        """One hop for each."""
        pairs = zip(parcels, self.route.shifts, strict=False)
        return tuple(moved(it, partial(self.shift, way), apart=self.apart) for it, way in pairs)

    def send_sums(self, sums: Sequence[Sums], way: int = 1) -> tuple[Sums, ...]:
        """One hop for the dk and dv of each; way = -1 sends them back."""
        pairs = zip(sums, self.route.shifts, strict=False)
        return tuple(
            sums_moved(it, partial(self.shift, way * shift), apart=self.apart)
            for it, shift in pairs
        )

    def instead(self, old: Parcels, fresh: Parcels, behind: Array) -> Parcels:
        """What a loop carries on: `fresh`, in the memory of `old`. behind: made by what reads `old` last."""
        if not (self.kernel.prepared and self.apart):
            return fresh
        news, olds = ([x for it in parcels for x in it[:2]] for parcels in (fresh, old))
        put = iter(self.kernel.prepared.put(news, olds, behind))
        return tuple(Parcel(next(put), next(put), it.tokens) for it in fresh)

    def shift(self, way: int, x: Array) -> Array:
        """x of the device before, or behind."""
        return shifted(x, self.axis, way)


def shown(parcels: Parcels, which: Sequence[bool | Array]) -> Parcels:
    """The parcels, of which the others hold nothing but padding."""
    return tuple(it.shown(if_so) for it, if_so in zip(parcels, which, strict=False))


def plus(a: Any, b: Any) -> Any:
    """Leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)
