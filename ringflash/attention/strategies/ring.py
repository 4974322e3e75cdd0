"""Ring attention (arXiv:2310.01889) as a function from kernel to kernel.

K, V and their Tokens travel in one array, over one or two routes:

- `split`: half of the key/value heads goes up the ring and half goes down, each len(axis) - 1 hops, so that
  both directions of every link carry all the time. For work that needs every pair of shards.
- `near`: all heads go up, then down, only as far as some query can see. For windows and short documents;
  taken, by a condition that is the same on all devices, where it costs fewer transfers.

The loop over hops is rolled: the program does not grow with the ring. In the backward the fp32 dk and dv
of a block travel one hop behind it, beside the next hop's products, and come home at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.axis import Axis, alike, gathered, shifted, size_of
from ringflash.attention.kernel import Grads, Kernel, Partial, add_grads, empty_partial, sum_dtype
from ringflash.attention.mask import EMPTY, Span, Tokens, only, spans
from ringflash.attention.parcel import pack, unpack

Array = jax.Array
SPAN_BLOCKS = (
    8  # a shard is described by the spans of so many runs; a zigzag shard needs at least 2
)


class Stream(NamedTuple):
    """A run of key/value heads that travels; `shift` is +1 up the ring, -1 down."""

    first: int
    last: int
    shift: int

    def keys(self, x_BSKH: Array) -> Array:
        """Its key/value heads."""
        return x_BSKH[:, :, self.first : self.last]

    def queries(self, x: Array, group: int, axis: int = 2) -> Array:
        """The query heads of its key/value heads; heads lie on `axis`."""
        return lax.slice_in_dim(x, self.first * group, self.last * group, axis=axis)

    def asking(self, q_at: Tokens, group: int) -> Tokens:
        """The tokens of those queries."""
        return only(q_at, self.first * group, self.last * group)


class Route(NamedTuple):
    """Streams that share the heads out, how far they go, and whether they serve the block at home."""

    streams: tuple[Stream, ...]
    hops: int | Array
    home: bool
    onward: bool  # dk and dv come home by going on round the ring; else by going back


def ring(kernel: Kernel, axis: Axis) -> Kernel:
    """`kernel` over a sequence sharded on mesh axis `axis`."""

    def forward(
        q: Array, k: Array, v: Array, q_at: Tokens, k_at: Tokens, carry: Partial | None = None
    ) -> Partial:
        if size_of(axis) == 1:
            return kernel.forward(q, k, v, q_at, k_at, carry)

        def along(routes: Sequence[Route]) -> Partial:
            part = empty_partial(q, v.shape[3]) if carry is None else carry
            part = alike(part, q, k, v, q_at, k_at)
            for route in routes:
                part = forward_along(kernel, axis, route, q, k, v, q_at, k_at, part)
            return part

        return routed(kernel, axis, k.shape[2], q_at, k_at, along)

    def backward(
        q: Array,
        k: Array,
        v: Array,
        q_at: Tokens,
        k_at: Tokens,
        dout: Array,
        lse_BNT: Array,
        delta_BNT: Array,
        into: Grads | None = None,
    ) -> Grads:
        if size_of(axis) == 1:
            return kernel.backward(q, k, v, q_at, k_at, dout, lse_BNT, delta_BNT, into)
        rows = (q, dout, lse_BNT, delta_BNT)

        def along(routes: Sequence[Route]) -> Grads:
            grads = None
            for route in routes:
                grads = backward_along(kernel, axis, route, rows, k, v, q_at, k_at, grads)
            assert grads is not None
            return grads

        return add_grads(into, routed(kernel, axis, k.shape[2], q_at, k_at, along))

    name, axes = f"ring({kernel.name})", (axis, *kernel.axes)
    return Kernel(name, kernel.spec, forward, backward, axes, kernel.unsupported)


def routed(
    kernel: Kernel, axis: Axis, K: int, q_at: Tokens, k_at: Tokens, along: Callable[[Any], Any]
) -> Any:
    """`along` the routes that cost least: half of K and V over len(axis) - 1 hops, or all over a few."""
    size = size_of(axis)
    halves = (Stream(0, K // 2, 1), Stream(K // 2, K, -1)) if K > 1 else (Stream(0, 1, 1),)
    split = [Route(halves, size - 1, home=True, onward=True)]
    # A kernel that communicates shortens its own way; two routes at each level would multiply.
    if kernel.axes or not kernel.spec.mask.local:
        return along(split)
    up, down = reach(kernel, axis, q_at, k_at)
    near = [
        Route((Stream(0, K, 1),), up, home=True, onward=False),
        Route((Stream(0, K, -1),), down, home=False, onward=False),
    ]
    if size == 2:
        return along(near)
    return lax.cond(2 * (up + down) < size, lambda: along(near), lambda: along(split))


def reach(kernel: Kernel, axis: Axis, q_at: Tokens, k_at: Tokens) -> tuple[Array, Array]:
    """How many hops up and down some query somewhere needs, taking for each pair the shorter way.

    Exchanges a few spans per shard. The same on every device of the mesh, as a loop bound must be.
    """
    size = size_of(axis)

    def everywhere(at: Tokens) -> Span:  # fields [ring, batch, runs]
        blocks = SPAN_BLOCKS if at.positions_BT.shape[1] % SPAN_BLOCKS == 0 else 1
        return Span(*(gathered(x, axis, dim=0, tiled=False) for x in spans(at, blocks)))

    q_span = Span(*(x[:, None, :, :, None] for x in everywhere(q_at)))
    k_span = Span(*(x[None, :, :, None, :] for x in everywhere(k_at)))
    meet_RR = (kernel.spec.relation(q_span, k_span) > EMPTY).any((2, 3, 4))
    rank = jnp.arange(size)
    up_RR = (rank[:, None] - rank[None]) % size  # hops up the ring from the owner of k to q
    up = jnp.where(meet_RR & (2 * up_RR <= size), up_RR, 0).max()
    down = jnp.where(meet_RR & (2 * up_RR > size), size - up_RR, 0).max()
    everyone = jax.sharding.get_abstract_mesh().manual_axes
    return lax.pmax(up, everyone), lax.pmax(down, everyone)


def forward_along(
    kernel: Kernel,
    axis: Axis,
    route: Route,
    q: Array,
    k: Array,
    v: Array,
    q_at: Tokens,
    k_at: Tokens,
    part: Partial,
) -> Partial:
    """Each hop: send the parcels on, and meanwhile attend to what they held."""
    group = q.shape[2] // k.shape[2]
    qs = [s.queries(q, group) for s in route.streams]

    def visit(hop: Array | int, parcels: Sequence[Array], parts: Sequence[Partial]) -> tuple:
        done = []
        for s, q_s, parcel, mine in zip(route.streams, qs, parcels, parts, strict=True):
            k_s, v_s, at = unpack(parcel, s.keys(k), s.keys(v))
            work = partial(kernel.forward, q_s, k_s, v_s, s.asking(q_at, group), at)
            done.append(where_needed(kernel, route, hop, q_at, at, work, mine))
        return tuple(done)

    def body(hop: Array, state: tuple) -> tuple:
        parcels, parts = state
        moved = send(route, parcels, axis)
        return lax.optimization_barrier((moved, visit(hop, parcels, parts)))

    parts = tuple(
        Partial(s.queries(part.out_BTNH, group), s.queries(part.lse_BNT, group, axis=1))
        for s in route.streams
    )
    state = (parcels_of(route, k, v, k_at), parts)
    parcels, parts = lax.fori_loop(0, route.hops, body, state)
    parts = visit(route.hops, parcels, parts)
    return Partial(joined([x.out_BTNH for x in parts], 2), joined([x.lse_BNT for x in parts], 1))


def backward_along(
    kernel: Kernel,
    axis: Axis,
    route: Route,
    rows: tuple[Array, Array, Array, Array],
    k: Array,
    v: Array,
    q_at: Tokens,
    k_at: Tokens,
    into: Grads | None,
) -> Grads:
    """As `forward_along`; `behind` is the dk and dv of the block visited last, side by side."""
    q, dout, lse, delta = rows
    group, width = q.shape[2] // k.shape[2], k.shape[3]

    def visit(hop: Array | int, parcels: Sequence[Array], dqs: Sequence[Array]) -> tuple:
        new_dqs, fresh = [], []
        for s, parcel, dq in zip(route.streams, parcels, dqs, strict=True):
            k_s, v_s, at = unpack(parcel, s.keys(k), s.keys(v))
            stats = [s.queries(x, group, axis=1) for x in (lse, delta)]
            q_s, dout_s = s.queries(q, group), s.queries(dout, group)

            work = partial(
                dkv_of, kernel, (q_s, k_s, v_s, s.asking(q_at, group), at, dout_s, *stats)
            )
            nothing = jnp.zeros((*k_s.shape[:3], width + v.shape[3]), dq.dtype)
            dq, dkv = where_needed(kernel, route, hop, q_at, at, work, (dq, alike(nothing, dq)))
            new_dqs.append(dq)
            fresh.append(dkv)
        return tuple(new_dqs), tuple(fresh)

    def body(hop: Array, state: tuple) -> tuple:
        parcels, behind, dqs = state
        moved, arrived = send(route, parcels, axis), send(route, behind, axis)
        dqs, fresh = visit(hop, parcels, dqs)
        moved, dqs = lax.optimization_barrier((moved, dqs))
        return moved, tuple(map(jnp.add, arrived, fresh)), dqs

    sums = sum_dtype(q)
    none = jnp.zeros(q.shape, sums) if into is None else into.dq_BTNH
    dqs = tuple(s.queries(none, group) for s in route.streams)
    behind = tuple(
        jnp.zeros((*s.keys(k).shape[:3], width + v.shape[3]), sums) for s in route.streams
    )
    dqs, behind = alike((dqs, behind), rows, k, v, q_at, k_at)
    state = (parcels_of(route, k, v, k_at), behind, dqs)
    parcels, behind, dqs = lax.fori_loop(0, route.hops, body, state)
    dqs, fresh = visit(route.hops, parcels, dqs)
    behind = tuple(map(jnp.add, send(route, behind, axis), fresh))
    way, left = (1, size_of(axis) - route.hops) if route.onward else (-1, route.hops)
    behind = lax.fori_loop(0, left, lambda _, x: send(route, x, axis, way), behind)
    dkv = joined(behind, 2)
    ours = Grads(joined(dqs, 2), dkv[..., :width], dkv[..., width:])
    return ours if into is None else add_grads(into._replace(dq_BTNH=None), ours)


def dkv_of(kernel: Kernel, args: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
    """dq added to what is there, and the dk and dv of one block side by side."""
    backward: Any = kernel.backward
    dq, dk, dv = backward(*args, into=Grads(state[0], None, None))
    return dq, jnp.concatenate([dk, dv], axis=-1)


def joined(xs: Sequence[Array], axis: int) -> Array:
    """The heads of all streams, in order."""
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=axis)


def parcels_of(route: Route, k: Array, v: Array, at: Tokens) -> tuple[Array, ...]:
    """What each stream carries at the start."""
    return tuple(pack(s.keys(k), s.keys(v), at) for s in route.streams)


def send(route: Route, xs: Sequence[Array], axis: Axis, way: int = 1) -> tuple[Array, ...]:
    """One hop for each stream; way = -1 sends them back."""
    return tuple(shifted(x, axis, way * s.shift) for x, s in zip(xs, route.streams, strict=True))


def where_needed(
    kernel: Kernel,
    route: Route,
    hop: Array | int,
    q_at: Tokens,
    k_at: Tokens,
    work: Callable[[Any], Any],
    state: Any,
) -> Any:
    """work(state), or `state` as it is where no pair meets or another route serves the block."""
    conditions = [] if route.home else [jnp.asarray(hop) > 0]
    if not kernel.axes:  # what communicates is run by all or by none, and skips by itself
        meets = kernel.spec.relation(spans(q_at, 1), spans(k_at, 1)) > EMPTY
        conditions.append(meets.any())
    if not kernel.spec.mask.local or not conditions:
        return work(state)
    return lax.cond(reduce(jnp.logical_and, conditions), work, lambda x: x, state)
