"""What the ring compiles to and what it does when it runs: sizes, hops, bytes, memory."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import mesh_of
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from ringflash.attention import (
    KERNELS,
    LAYOUTS,
    Causal,
    Full,
    Kernel,
    Segments,
    Spec,
    Tokens,
    Window,
    attend,
    differentiable,
)
from ringflash.attention.cases import Case, inputs, tokens
from ringflash.attention.strategies import trip
from ringflash.attention.strategies.ring import ring
from ringflash.attention.strategies.sharded import sharded


def ringed(kernel, mesh):
    return differentiable(
        sharded(ring(kernel, "context"), mesh, batch=None, time="context", heads=None)
    )


# ---- size of the program ----


def lowered(devices, mask):
    """Forward and backward over so many devices, of which none need exist; 32 tokens on each."""
    mesh = AbstractMesh((devices,), ("context",), axis_types=(AxisType.Auto,))
    attention = ringed(KERNELS["reference"](Spec(mask)), mesh)
    T = 32 * devices
    x = [jax.ShapeDtypeStruct((1, T, n, 8), jnp.float32) for n in (4, 2, 2)]
    at = Tokens(*(jax.ShapeDtypeStruct((1, T), jnp.int32),) * 2)

    def loss(q, k, v, at):
        out, lse = attention(q, k, v, at, at)
        return out.sum() + lse.sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*x, at)
    return traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(100)], ids=["split", "near_or_split"])
def test_the_program_does_not_grow_with_the_ring(mask):
    """Unrolled loops compile slowly: as many operations and transfers for 64 devices as for 4."""
    sizes, permutes = {}, {}
    for devices in (4, 8, 16, 64):
        text = lowered(devices, mask)
        sizes[devices] = len(re.findall(r"^ +%", text, re.MULTILINE))
        permutes[devices] = text.count("stablehlo.collective_permute")
    assert len(set(sizes.values())) == 1, sizes
    # Of each of two parcels. Whole way: K and V in a loop; backward, once for the first hop and in a loop;
    # dk and dv behind them, and home. Near, up and down: K and V in a loop; dk and dv behind, once more, and
    # home.
    split, near = 2 * (1 + 2 + 2), 2 * 2 * (1 + 1 + 3)
    assert set(permutes.values()) == {split if isinstance(mask, Causal) else split + near}, permutes


# ---- what it does ----


@pytest.fixture
def watch(monkeypatch):
    """Counts, by device: kernel visits, and bytes of what was sent, of each transfer that ran."""
    visits, sent = Counter(), Counter()

    def shifted(x, axis, shift, original=trip.shifted):
        size = x.size * x.dtype.itemsize
        jax.debug.callback(lambda r: sent.update({(int(r), size): 1}), lax.axis_index("context"))
        return original(x, axis, shift)

    def spy(spec):
        kernel = KERNELS["reference"](spec)

        def forward(*args):
            jax.debug.callback(lambda r: visits.update([int(r)]), lax.axis_index("context"))
            return kernel.forward(*args)

        def backward(*args, **more):
            jax.debug.callback(lambda r: visits.update([int(r)]), lax.axis_index("context"))
            return kernel.backward(*args, **more)

        return Kernel("spy", spec, forward, backward)

    monkeypatch.setattr(trip, "shifted", shifted)
    return spy, visits, sent


def forward(watch, case, devices):
    """Visits by device, and transfers by device, of the forward."""
    spy, visits, sent = watch
    x = inputs(case)
    run = jax.jit(ringed(spy(case.spec), mesh_of(devices)))
    jax.block_until_ready(run(*map(jnp.asarray, x[:3]), x.q_at, x.k_at))
    jax.effects_barrier()
    transfers = Counter()
    for (device, _), count in sent.items():
        transfers[device] += count
    return [visits[n] for n in range(devices)], [transfers[n] for n in range(devices)]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_hops(watch, devices):
    """N blocks met with N - 1 hops, in two parcels, one each way; one visit for both."""
    visits, transfers = forward(watch, Case("", B=1, T=64, mask=Full()), devices)
    assert visits == [devices] * devices
    assert transfers == [2 * (devices - 1)] * devices


def test_hops_of_one_key_head(watch):
    visits, transfers = forward(watch, Case("", B=1, T=64, K=1, mask=Full()), 4)
    assert visits == [4] * 4
    assert transfers == [2 * 3] * 4


@pytest.mark.parametrize(
    ("window", "hops"), [(1, 0), (2, 1), (8, 1), (9, 1), (10, 2), (17, 2), (25, 3)]
)
def test_hops_of_a_window(watch, window, hops):
    """Shards of 8: as many hops as the window reaches back, and no visit where no pair meets."""
    case = Case("", B=1, T=64, mask=Causal() & Window(window))
    visits, transfers = forward(watch, case, 8)
    assert visits == [min(n, hops) + 1 for n in range(8)]
    assert transfers == [2 * hops] * 8


def test_hops_of_a_window_to_both_sides(watch):
    visits, transfers = forward(watch, Case("", B=1, T=64, mask=Window(5, 12)), 8)
    assert visits == [3, 4, 4, 4, 4, 4, 3, 2]
    assert transfers == [2 * 3] * 8


@pytest.mark.parametrize(
    ("documents", "visits", "hops"),
    [
        ((8,) * 8, [1] * 8, 0),
        ((5, 3, 2, 6, 4, 4, 1, 7, 8, 8, 8, 8), [1] * 8, 0),
        ((12, 20, 24, 8), [1, 2, 2, 3, 1, 2, 3, 1], 2),
        ((8, 8), [1, 1, 0, 0, 0, 0, 0, 0], 0),
    ],
)
def test_hops_of_documents(watch, documents, visits, hops):
    """Only where some pair meets; a shard of padding does nothing."""
    case = Case("", B=1, T=64, documents=documents)
    assert forward(watch, case, 8) == (visits, [2 * hops] * 8)


def test_backward_hops(watch):
    """K and V as in the forward. dk and dv of a parcel: N times, the last brings them home."""
    spy, visits, sent = watch
    x = inputs(Case("", B=1, T=64, mask=Full()))
    attention = ringed(spy(Spec(Full())), mesh_of(4))

    def loss(*qkv):
        return attention(*qkv, x.q_at, x.k_at)[0].sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*map(jnp.asarray, x[:3])))
    jax.effects_barrier()
    assert [visits[n] for n in range(4)] == [4 + 5] * 4  # at home twice, half of it each time
    # 8 of 16 keys of 2 heads, of 32 words; the tokens' two words each take a row.
    key_bytes, grad_bytes = 4 * (8 + 1) * 2 * 32, 4 * 8 * 2 * 32
    assert sent == {
        (n, size): count
        for n in range(4)
        for size, count in ((key_bytes, 2 * 2 * 3), (grad_bytes, 2 * 4))
    }


def bytes_sent(watch, **sizes):
    """Of device 0 in the forward."""
    watch[2].clear()
    forward(watch, Case("", B=1, T=64, mask=Full(), **sizes), 4)
    return sum(size * count for (device, size), count in watch[2].items() if device == 0)


def test_traffic_goes_by_the_key_heads(watch):
    """Repeating K and V first would cost four times as much."""
    for N, K in ((32, 8), (8, 8), (8, 2)):
        keys, tokens, row = 8 * K * 32, 8 * 2, K * 32  # in words, of one parcel
        wanted = 2 * 3 * 4 * (keys + -(-tokens // row) * row)
        assert bytes_sent(watch, N=N, K=K) == wanted


# ---- memory ----


def compiled(T, **mask):
    def loss(q, k, v):
        return attend(q, k, v, kernel="chunked", **mask).sum()

    x = [jax.ShapeDtypeStruct((1, T, n, 32), jnp.float32) for n in (2, 1, 1)]
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x).compile()


def test_memory_is_linear_and_no_array_is_square():
    """Forward and backward of `chunked` at 2k, 4k, 8k."""
    temporary = {}
    for T in (2048, 4096, 8192):
        program = compiled(T)
        temporary[T] = program.memory_analysis().temp_size_in_bytes
        shapes = re.findall(r"[a-z]+\d+\[([\d,]+)\]", program.as_text())
        largest = max(
            np.prod([int(n) for n in shape.split(",")], dtype=np.int64) for shape in shapes
        )
        assert largest < T * T / 4, f"{largest} elements at T = {T}"
    assert temporary[8192] < 2.2 * temporary[4096], temporary
    assert temporary[4096] < 2.2 * temporary[2048], temporary


def test_the_callers_mask_is_never_dense():
    """Packed documents and a window at 8192, by layout: the same program, whatever the tokens."""
    at = tokens(1, 8192, (5000, 3000))
    order = LAYOUTS["zigzag"](8192, 2)
    at = Tokens(*(jnp.asarray(x[:, order]) for x in at[:2]))
    program = compiled(8192, at=at, mask=Causal() & Window(1000) & Segments())
    shapes = re.findall(r"pred\[([\d,]+)\]", program.as_text())
    assert (
        max(np.prod([int(n) for n in s.split(",")], dtype=np.int64) for s in shapes) < 8192 * 1024
    )


def test_where_the_arrays_lie():
    """The output of the shard_map lies as the queries do."""
    q = jax.device_put(
        jnp.zeros((1, 64, 2, 8)), jax.NamedSharding(mesh_of(4), P(None, "context", None, None))
    )
    out = jax.jit(lambda q: attend(q, q, q, mesh=mesh_of(4), kernel="reference"))(q)
    assert out.sharding.is_equivalent_to(q.sharding, 4)
