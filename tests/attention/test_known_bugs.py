"""Faults reported of other systems, as small inputs. Each docstring is the symptom that was seen.

Where the input reported is large, a smaller one that takes the same way is used. Rows that belong to the
data path, to RoPE and to the loss are tested with those.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import (
    attended,
    check,
    errors,
    jitted,
    mesh_of,
    norm,
    over,
    plain,
    results,
    truth,
)

from ringflash.attention import (
    KERNELS,
    PADDING,
    Causal,
    Full,
    Kernel,
    Partial,
    Tokens,
    Window,
    attend,
    differentiable,
)
from ringflash.attention.cases import Case, inputs, tokens
from ringflash.attention.mask import spans

pytestmark = pytest.mark.slow  # faults of rings, not of JAX: with the oldest JAX only, in `.ci/run`

# ---- wrong numbers in the ring itself ----


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["causal", "full"])
def test_bf16_error_does_not_grow_with_the_ring(mask):
    """Gradient error grows with ring size; block outputs rounded to bf16 before merging."""
    case = Case("", B=1, T=1024, N=4, K=4, H=64, mask=mask)
    x = inputs(case)
    wanted = truth(case.spec, x, rounded=jnp.bfloat16)
    off = {}
    for devices in (1, 8):
        found = results(attended(case, devices, kernel="chunked"), x, dtype=jnp.bfloat16)
        off[devices] = errors(found, wanted, norm)
    assert all(off[8][n] <= 1.2 * off[1][n] for n in ("out", "dq", "dk", "dv")), off


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses:2*ring:2"])
def test_partial_results_are_fp32(strategy):
    """Partial outputs, dk and dv accumulated in bf16."""
    case = Case("", K=4)
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs(case)[:3])
    seen = []
    kernel = KERNELS["reference"](case.spec)

    def forward(*args):
        seen.append(kernel.forward(*args))
        return seen[-1]

    def backward(*args, **more):
        seen.append(kernel.backward(*args, **more))
        return seen[-1]

    spy = Kernel("spy", case.spec, forward, backward)
    at = inputs(case).q_at
    attention = over(strategy, 4, spy)
    jax.eval_shape(jax.grad(lambda x: attention(*x, at, at)[0].sum().astype(jnp.float32)), x)
    assert {a.dtype for part in seen for a in part} == {np.dtype(np.float32)}
    assert {type(part).__name__ for part in seen} == {"Partial", "Grads"}


@pytest.mark.parametrize("devices", [2, 8])
def test_lse_far_apart(devices):
    """log(1 + exp(b - a)) overflows where the lse of two hops lie 200 apart."""
    case = Case("", B=1, T=64, mask=Full())
    x = inputs(case)
    size = np.where(np.arange(64) < 32, 2.0, 0.0)[:, None, None]  # half of the keys score 0
    x = x._replace(q_BTNH=50 * x.q_BTNH, k_BSKH=np.float32(x.k_BSKH * size))
    wanted = truth(case.spec, x)
    assert wanted["lse"].max() > 200 + np.log(32)
    check(results(attended(case, devices), x), wanted, at_most=1e-4)  # scores of 500 in fp32


def test_padded_rows_stay_finite_for_two_steps():
    """NaN at training step 2 under a bf16 ring with padded rows."""
    case = Case("", B=1, T=64, N=2, K=2, documents=(24,))
    x = inputs(case)
    attention = attended(case, 2)

    def loss(weights, tokens_BTNH):
        q, k, v = (jnp.einsum("btnh,hd->btnd", tokens_BTNH, w) for w in weights)
        out, lse = attention(q, k, v, x.q_at, x.k_at, None)
        return jnp.square(out.astype(jnp.float32)).sum() + 1e-3 * lse[..., :24].sum()

    step = jax.jit(jax.value_and_grad(loss))
    weights = [jnp.eye(16, dtype=jnp.bfloat16)] * 3
    losses = []
    for _ in range(3):
        value, grads = step(weights, jnp.asarray(x.q_BTNH, jnp.bfloat16))
        weights = [w - 0.01 * g for w, g in zip(weights, grads, strict=True)]
        losses.append(float(value))
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads)
    assert losses[2] < losses[1] < losses[0]


def by_shard(found, wanted, devices):
    """Assert dk and dv of each shard, so that a message names the shard."""
    for name in ("dk", "dv"):
        pairs = zip(
            np.split(found[name], devices, 1), np.split(wanted[name], devices, 1), strict=True
        )
        for shard, (a, b) in enumerate(pairs):
            off = np.abs(a - b).max() / np.abs(wanted[name]).max()
            assert off < 2e-5, f"{name} of shard {shard} is off by {off}"


def test_backward_uses_the_keys_of_each_hop():
    """Backward uses the first hop's K and V on each hop: forward right, gradients silently wrong."""
    case = Case("", B=1, T=96, N=2, K=2, mask=Full())
    x = inputs(case)
    by_shard(results(attended(case, 3), x), truth(case.spec, x), 3)


@pytest.mark.parametrize("K", [1, 2])
def test_dk_and_dv_come_home(K):
    """Wrong ring order when dk and dv are returned; the keys of each shard have their own size."""
    case = Case("", B=1, T=64, N=2, K=K, mask=Full())
    x = inputs(case)
    size = np.repeat(np.arange(1, 5, dtype=np.float32), 16)[:, None, None]
    x = x._replace(k_BSKH=x.k_BSKH * size, v_BSKH=x.v_BSKH * size)
    by_shard(results(attended(case, 4), x), truth(case.spec, x), 4)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_have_the_dtype_of_the_inputs(dtype, strategy):
    """dq returned with the wrong dtype under fp16."""
    case = Case("", T=32)
    found = results(attended(case, 2, strategy=strategy), inputs(case), dtype=dtype)
    assert {found[name].dtype for name in ("out", "dq", "dk", "dv")} == {np.dtype(dtype)}
    assert found["lse"].dtype == np.float32
    wanted = truth(case.spec, inputs(case), rounded=dtype)
    assert max(errors(found, wanted, norm).values()) < 0.01


def test_bf16_gradients_of_a_ring_of_two():
    """dq, dk, dv off by up to 1.2 relative with point-to-point sends."""
    case = Case("", B=1, T=256)
    x = inputs(case)
    wanted = truth(case.spec, x, rounded=jnp.bfloat16)
    usual = errors(results(plain(case.spec), x, dtype=jnp.bfloat16), wanted, norm)
    off = errors(results(attended(case, 2), x, dtype=jnp.bfloat16), wanted, norm)
    assert all(off[name] <= 2 * usual[name] + 2e-5 for name in off), f"{off}, plain bf16 {usual}"


@pytest.mark.parametrize("strategy", ["ring", "ulysses:2*ring:2"])
def test_repeats_are_equal_bit_for_bit(strategy):
    """A race: the lse transposed on one stream and read on another."""
    case = Case("", B=1, T=64, K=4, documents=(30, 20))
    x = jax.tree.map(jnp.asarray, inputs(case))
    run = jitted(attended(case, 4, strategy=strategy))
    first = run(*x)
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, run(*x), first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ring_of_four_at_1024(kernel):
    """Ring output off by 1917 and gradients by 31; mismatch in ring scaled-dot-product attention."""
    case = Case("", B=1, T=1024, N=2, K=1)
    x = inputs(case)
    check(results(attended(case, 4, kernel=kernel), x), truth(case.spec, x), at_most=1e-5)


def test_compiler_options_change_nothing():
    """Two flags about asynchronous collectives together gave NaN with Ulysses."""
    case = Case("", B=1, T=64)
    x = [None if a is None else jnp.asarray(a) for a in inputs(case)[:4]]
    attention = attended(case, 2, strategy="ulysses")

    def loss(q, k, v):
        out, lse = attention(q, k, v, None, None, None)
        return (out * jnp.sin(out)).sum() + lse.sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x[:3])
    flags = (
        {},
        {"xla_backend_optimization_level": 3},
        {"xla_cpu_enable_concurrency_optimized_scheduler": True},
    )
    every = [lowered.compile(compiler_options=options)(*x[:3]) for options in flags]
    for other in every[1:]:
        for a, b in zip(every[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "devices", "block"), [(1024, 2, 512), (1536, 4, 512), (1020, 1, 32)]
)
def test_blocks_and_the_local_length(length, devices, block):
    """A key block equal to the local length is refused; mask padding from the global length; the padded
    columns of the last block not masked, so that 4 tokens less than whole blocks give NaN."""
    case = Case("", B=1, T=length, N=2, K=1, H=8)
    x = inputs(case)
    kernel = KERNELS["chunked"](case.spec, block_q=block, block_k=block)
    check(results(over("ring", devices, kernel), x), truth(case.spec, x))


# ---- packing, padding, lengths ----


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_documents_are_alone(strategy):
    """A batched ring ignores document boundaries; packed with padding, the backward is NaN."""
    sizes = (9, 20, 3, 14, 11)
    case = Case("", B=1, T=64, documents=sizes)
    x = inputs(case)
    found = results(attended(case, 2, strategy=strategy), x)
    check(found, truth(case.spec, x))
    first = 0
    for size in sizes[:2]:
        here = slice(first, first + size)
        one = Case("", B=1, T=size)
        parts = {f: getattr(x, f)[:, here] for f in ("q_BTNH", "k_BSKH", "v_BSKH", "dout_BTNH")}
        alone = inputs(one)._replace(**parts, dlse_BNT=x.dlse_BNT[..., here])
        wanted = truth(one.spec, alone)
        for name in ("out", "dq", "dk", "dv"):
            np.testing.assert_allclose(found[name][:, here], wanted[name], rtol=1e-3, atol=2e-5)
        first += size


def test_each_shard_holds_its_own_positions():
    """Position ids per rank wrong for packed documents; cu_seqlens built from local positions."""
    at = jax.tree.map(jnp.asarray, tokens(1, 10, (3, 2, 4, 1)))

    def forward(q, k, v, q_at, k_at, carry=None):
        shown = jnp.stack([*q_at[:2], *k_at[:2]], -1)[:, :, None].astype(jnp.float32)
        return Partial(shown, jnp.zeros((1, 1, q.shape[1])))

    def ring_of(kernel, axis):
        del axis
        return Kernel("spy", kernel.spec, forward, kernel.backward)

    q = jnp.zeros((1, 10, 1, 4))
    run = jax.jit(lambda at: attend(q, q, q, at=at, strategy=ring_of, mesh=mesh_of(5)))
    seen = np.asarray(run(at))[0, :, 0].T
    np.testing.assert_array_equal(seen[0][2:8], [2, 0, 1, 0, 1, 2])
    np.testing.assert_array_equal(seen[1], [0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    np.testing.assert_array_equal(seen[2:], seen[:2])


def test_documents_end_at_the_border_of_a_shard():
    """cu_seqlens of rank 1 began at 1024 in place of 0: one document for each of two shards."""
    case = Case("", B=1, T=2048, N=1, K=1, H=8, documents=(1024, 1024))
    x = inputs(case)
    check(results(attended(case, 2, kernel="chunked"), x), truth(case.spec, x))


@pytest.mark.parametrize(("length", "devices"), [(7, 2), (1001, 2), (1000, 3), (2049, 8)])
def test_lengths_that_do_not_divide(length, devices):
    """The last valid token is dropped; a hang or mismatched collectives; uneven shards unsupported."""
    case = Case("", B=1, T=length, N=1, K=1, H=8, mask=Causal() & Window(100))
    x = inputs(case)
    found = results(attended(case, devices), x)
    assert found["out"].shape == x.q_BTNH.shape
    check(found, truth(case.spec, x))


def test_one_token_more_than_divides_at_32769():
    """Collective mismatch at S = 32769 over 8: here it traces, and the shapes are the caller's."""
    q = jax.ShapeDtypeStruct((1, 32769, 1, 64), jnp.bfloat16)
    out, lse = jax.eval_shape(partial(attend, mesh=mesh_of(8), return_lse=True), q, q, q)
    assert (out.shape, lse.shape) == ((1, 32769, 1, 64), (1, 1, 32769))


def test_lse_of_documents_of_unequal_length():
    """The lse of packed sequences in the wrong layout: an illegal access."""
    case = Case("", B=1, T=512, N=4, K=2, documents=(100, 28, 384))
    x = inputs(case)
    found = results(attended(case, 2), x)
    assert found["lse"].shape == (1, 4, 512)
    check(found, truth(case.spec, x))


def test_all_gather_has_the_segments_of_all_keys():
    """Segment ids of the keys arrive local where those of the whole sequence are wanted."""
    case = Case("", B=1, T=256, documents=(100, 90, 50))
    x = inputs(case)
    check(results(attended(case, 4, strategy="all_gather"), x), truth(case.spec, x))


# ---- masks and windows ----


@pytest.mark.parametrize(
    ("window", "strategy"),
    [(8, "ring"), (24, "ring"), (24, "all_gather"), (24, "ulysses"), (24, "ulysses:2*ring:2")],
)
def test_window_is_kept_over_shards(window, strategy):
    """The window dropped, or its offset inverted: the weights themselves, from values that are one-hot.

    Key j is visible to query i where 0 <= i - j < window, and nowhere else.
    """
    q = jnp.zeros((1, 64, 4, 4))
    v = jnp.broadcast_to(jnp.eye(64)[:, None], (1, 64, 4, 64))
    run = partial(attend, mask=Causal() & Window(window), mesh=mesh_of(4), strategy=strategy)
    weights = np.asarray(jax.jit(run)(q, q, v))
    back = np.arange(64)[:, None] - np.arange(64)
    seen = (back >= 0) & (back < window)
    wanted = seen / seen.sum(1, keepdims=True)
    for head in range(4):
        np.testing.assert_allclose(weights[0, :, head], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_sinks_count_once(strategy, devices):
    """Sinks dropped under context parallelism, or added at every chunk of keys."""
    q, sinks = jnp.zeros((1, 64, 4, 8)), jnp.full(4, 2.0)
    out, lse = jax.jit(
        lambda q, sinks: attend(
            q, q, q + 1, sinks_N=sinks, mesh=mesh_of(devices), strategy=strategy, return_lse=True
        )
    )(q, sinks)
    seen = np.arange(1, 65)
    for head in range(4):
        np.testing.assert_allclose(lse[0, head], np.log(seen + np.exp(2.0)), rtol=1e-5)
        wanted = seen / (seen + np.exp(2.0))
        np.testing.assert_allclose(out[0, :, head, 0], wanted, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(20), Window(9, 5)])
def test_positions_near_the_end_of_int32(mask, kernel):
    """An index wraps past 2^31: the same result from any first position."""
    case = Case("", B=1, T=64, mask=mask)
    x = inputs(case)
    far = Tokens(x.q_at.positions_BT + (2**31 - 1 - 64), x.q_at.segment_ids_BT)
    tiles = {"chunked": {"block_q": 16, "block_k": 24}}.get(kernel, {})
    run = jitted(differentiable(KERNELS[kernel](case.spec, **tiles)))
    jax.tree.map(np.testing.assert_array_equal, run(*x._replace(q_at=far, k_at=far)), run(*x))


def test_a_block_table_is_all_there_is_of_a_mask():
    """An int8 to int32 copy of the mask took 32 GiB at 32768: ours at that length is 128 x 128."""
    at = tokens(1, 32768, None)
    span = spans(Tokens(*map(jnp.asarray, at[:2])), 128)
    q, k = (type(span)(*(x.reshape(shape) for x in span)) for shape in ((128, 1), (1, 128)))
    table = np.asarray((Causal() & Window(4096)).relation(q, k))
    assert table.shape == (128, 128)
    np.testing.assert_array_equal(table.sum(1)[20:], 15 * 2 + 2)  # 15 are FULL, two are cut


# ---- heads ----


def test_ulysses_with_fewer_key_heads_than_shards():
    """Refused or wrong: K and V are sent to each device that needs them, dk and dv summed over those."""
    case = Case("", B=1, T=32, N=32, K=2, H=8)
    x = inputs(case)
    check(results(attended(case, 4, strategy="ulysses"), x), truth(case.spec, x))


@pytest.mark.parametrize(("N", "K"), [(32, 8), (8, 1), (6, 3)])
def test_grouped_heads_in_a_ring(N, K):
    """Grouped heads crash, or K and V are repeated first; K = 3 does not split in two halves."""
    case = Case("", B=1, T=32, N=N, K=K, H=8)
    x = inputs(case)
    check(results(attended(case, 2), x), truth(case.spec, x))


@pytest.mark.parametrize("width", [64, 80, 96, 192, 256])
def test_head_widths(width):
    """Refused by TPU kernels."""
    case = Case("", B=1, T=32, N=2, K=1, H=width)
    x = inputs(case)
    check(results(attended(case, 2), x), truth(case.spec, x))


# ---- hangs, and what was asked for ----


def test_a_ring_of_three_finishes():
    """With one credit a ring deadlocks at three ranks and more: ten calls in flight at once."""
    case = Case("", B=1, T=48)
    x = jax.tree.map(jnp.asarray, inputs(case))
    run = jitted(attended(case, 3))
    every = [run(*x) for _ in range(10)]
    check(every[-1], truth(case.spec, x))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_cross_attention(strategy):
    """Asked for: 128 queries, 512 keys, four shards; some of the keys are padding."""
    case = Case("", B=1, T=128, S=512, mask=Full(), documents=(128,), k_documents=(400,))
    x = inputs(case)
    assert (x.k_at.segment_ids_BT == PADDING).sum() == 112
    check(results(attended(case, 4, strategy=strategy), x), truth(case.spec, x))


def test_windows_and_full_layers_at_262144():
    """Asked for: grouped heads at S = 262144, a window of 512 on three layers of four. It traces."""
    q = jax.ShapeDtypeStruct((1, 262144, 8, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 262144, 2, 64), jnp.bfloat16)
    for mask in (Causal() & Window(512), Causal()):
        run = partial(attend, mask=mask, mesh=mesh_of(8))
        grads = jax.eval_shape(
            jax.grad(lambda *x, run=run: run(*x).astype(jnp.float32).sum(), (0, 1, 2)), q, k, k
        )
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
