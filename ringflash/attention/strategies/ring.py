"""Ring attention (arXiv:2310.01889) as a function from kernel to kernel.

K, V and their Tokens travel in one array, over one or two routes:

- `split`: half of a shard's keys goes up the ring and half goes down, each len(axis) - 1 hops, so that both
  directions of every link carry all the time. Of each half of the shard one quarter goes up and one down:
  then both ways bring early and late keys alike, and a zigzag shard has the same work at every hop.
- `near`: all keys go up, then down, only as far as some query can see. For windows and short documents;
  taken, by a condition that is the same on all devices, where it costs fewer transfers.

What came up and what came down is one run of keys for the kernel: a hop is one call.

The loop over hops is rolled: the program does not grow with the ring. In the backward the fp32 dk and dv
of a block travel one hop behind it, beside the next hop's products, and come home at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringflash.attention.axis import Axis, alike, gathered, shifted, size_of
from ringflash.attention.kernel import Grads, Kernel, Partial, add_grads, empty_partial, sum_dtype
from ringflash.attention.mask import EMPTY, Span, Tokens, spans
from ringflash.attention.parcel import pack, unpack

Array = jax.Array
SPAN_BLOCKS = (
    8  # a shard is described by the spans of so many runs; a zigzag shard needs at least 2
)


class Route(NamedTuple):
    """Parcels that share the keys out, how far they go, and whether they serve the block at home."""

    shifts: tuple[int, ...]  # of each parcel: +1 goes up the ring, -1 down
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

        return routed(kernel, axis, k.shape[1], q_at, k_at, along)

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

        return add_grads(into, routed(kernel, axis, k.shape[1], q_at, k_at, along))

    name, axes = f"ring({kernel.name})", (axis, *kernel.axes)
    return Kernel(name, kernel.spec, forward, backward, axes, kernel.unsupported)


def routed(
    kernel: Kernel, axis: Axis, S: int, q_at: Tokens, k_at: Tokens, along: Callable[[Any], Any]
) -> Any:
    """`along` the routes that cost least: half of K and V over len(axis) - 1 hops, or all over a few."""
    size = size_of(axis)
    split = [Route((1, -1) if S > 1 else (1,), size - 1, home=True, onward=True)]
    # A kernel that communicates shortens its own way; two routes at each level would multiply.
    if kernel.axes or not kernel.spec.mask.local:
        return along(split)
    up, down = reach(kernel, axis, q_at, k_at)
    near = [
        Route((1,), up, home=True, onward=False),
        Route((-1,), down, home=False, onward=False),
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
    like = list(zip(dealt(k, route), dealt(v, route), strict=True))

    def visit(hop: Array | int, parcels: Sequence[Array], part: Partial) -> Partial:
        keys, values, at = opened(parcels, like)
        work = partial(kernel.forward, q, keys, values, q_at, at)
        met: Partial = where_needed(kernel, route, hop, q_at, at, work, part)
        return met

    def body(hop: Array, state: tuple) -> tuple:
        parcels, part = state
        moved = send(route, parcels, axis)
        return lax.optimization_barrier((moved, visit(hop, parcels, part)))

    parcels, part = lax.fori_loop(0, route.hops, body, (parcels_of(route, like, k_at), part))
    return visit(route.hops, parcels, part)


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
    like = list(zip(dealt(k, route), dealt(v, route), strict=True))
    sums, width = sum_dtype(q), k.shape[3]

    def visit(hop: Array | int, parcels: Sequence[Array], dq: Array) -> tuple:
        keys, values, at = opened(parcels, like)
        work = partial(dkv_of, kernel, (q, keys, values, q_at, at, dout, lse, delta))
        nothing = jnp.zeros((*keys.shape[:3], width + v.shape[3]), sums)
        dq, dkv = where_needed(kernel, route, hop, q_at, at, work, (dq, alike(nothing, dq)))
        ends = itertools.accumulate(x.shape[1] for x, _ in like[:-1])
        return dq, tuple(jnp.split(dkv, list(ends), axis=1))

    def body(hop: Array, state: tuple) -> tuple:
        parcels, behind, dq = state
        moved, arrived = send(route, parcels, axis), send(route, behind, axis)
        dq, fresh = visit(hop, parcels, dq)
        moved, dq = lax.optimization_barrier((moved, dq))
        return moved, tuple(map(jnp.add, arrived, fresh)), dq

    none = jnp.zeros(q.shape, sums) if into is None else into.dq_BTNH
    behind = tuple(jnp.zeros((*x.shape[:3], width + v.shape[3]), sums) for x, _ in like)
    dq, behind = alike((none, behind), rows, k, v, q_at, k_at)
    state = (parcels_of(route, like, k_at), behind, dq)
    parcels, behind, dq = lax.fori_loop(0, route.hops, body, state)
    dq, fresh = visit(route.hops, parcels, dq)
    behind = tuple(map(jnp.add, send(route, behind, axis), fresh))
    way, left = (1, size_of(axis) - route.hops) if route.onward else (-1, route.hops)
    behind = lax.fori_loop(0, left, lambda _, x: send(route, x, axis, way), behind)
    dkv = collected(behind, k.shape[1])
    ours = Grads(dq, dkv[..., :width], dkv[..., width:])
    return ours if into is None else add_grads(into._replace(dq_BTNH=None), ours)


def dkv_of(kernel: Kernel, args: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
    """dq added to what is there, and the dk and dv of one block side by side."""
    backward: Any = kernel.backward
    dq, dk, dv = backward(*args, into=Grads(state[0], None, None))
    return dq, jnp.concatenate([dk, dv], axis=-1)


def shares(S: int, parcels: int) -> list[list[slice]]:
    """For each parcel the runs of a shard's S keys that it holds: every other quarter, or all."""
    runs = min(S, 2 * parcels) if parcels > 1 else 1
    cuts = [S * n // runs for n in range(runs + 1)]
    slices = [slice(*ends) for ends in itertools.pairwise(cuts)]
    return [slices[n::parcels] for n in range(parcels)]


def dealt(x_BS: Array, route: Route) -> list[Array]:
    """The keys of each parcel."""
    whole = shares(x_BS.shape[1], len(route.shifts))
    return [joined([x_BS[:, run] for run in runs]) for runs in whole]


def collected(parts: Sequence[Array], S: int) -> Array:
    """The inverse of `dealt`."""
    runs: dict[int, Array] = {}
    for part, slices in zip(parts, shares(S, len(parts)), strict=True):
        first = 0
        for run in slices:
            runs[run.start] = part[:, first : first + run.stop - run.start]
            first += run.stop - run.start
    return joined([runs[start] for start in sorted(runs)])


def joined(xs: Sequence[Array]) -> Array:
    """One after the other in time."""
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, axis=1)


def parcels_of(route: Route, keys: Sequence[tuple[Array, Array]], at: Tokens) -> tuple[Array, ...]:
    """What travels at the start: the keys and values of each parcel, with their tokens."""
    tokens = zip(*(dealt(jnp.asarray(x), route) for x in at[:2]), strict=True)
    parts = zip(keys, tokens, strict=True)
    return tuple(pack(k_s, v_s, Tokens(*at_s)) for (k_s, v_s), at_s in parts)


def opened(
    parcels: Sequence[Array], like: Sequence[tuple[Array, Array]]
) -> tuple[Array, Array, Tokens]:
    """The keys, values and tokens that are here, one parcel's after the other's."""
    parts = [unpack(x, *shapes) for x, shapes in zip(parcels, like, strict=True)]
    keys, values, ats = zip(*parts, strict=True)
    at = Tokens(*(joined(field) for field in zip(*(at[:2] for at in ats), strict=True)))
    return joined(keys), joined(values), at


def send(route: Route, xs: Sequence[Array], axis: Axis, way: int = 1) -> tuple[Array, ...]:
    """One hop for each parcel; way = -1 sends them back."""
    return tuple(shifted(x, axis, way * s) for x, s in zip(xs, route.shifts, strict=True))


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
