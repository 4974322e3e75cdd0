"""Every local kernel on every case, fp32 and bf16, against the reference in fp64; and the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expected import NAMES, TOLERANCE, check, errors, norm, plain, results, truth, truth_of

from ringflash.attention import (
    FLOOR,
    KERNELS,
    PADDING,
    Causal,
    Grads,
    Partial,
    Spec,
    Tokens,
    differentiable,
)
from ringflash.attention.cases import CASES, EVERYTHING, Case, inputs
from ringflash.attention.kernel import row_dot
from ringflash.attention.spec import facing

# Tiles so small that each case has many, of two sizes, so that rows and columns cannot be confused.
TILES = {"chunked": {"block_q": 16, "block_k": 24}}
BY_NAME = {case.name: case for case in CASES}
every_kernel = pytest.mark.parametrize("name", KERNELS)


def make(name, spec):
    return KERNELS[name](spec, **TILES.get(name, {}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_is_the_definition(case):
    """In fp64, so nothing is left to rounding; its backward against jax.grad of the forward."""
    x = inputs(case)
    with jax.enable_x64(True):
        wanted = results(plain(case.spec), x, dtype=jnp.float64)
    check(truth_of(case), wanted, at_most=1e-12)


@every_kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fp32(name, case):
    x = inputs(case)
    found = results(differentiable(make(name, case.spec)), x)
    check(found, truth_of(case))
    assert all(array.dtype == np.float32 for array in found.values() if array is not None)


@pytest.mark.slow
@every_kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bf16_is_at_most_twice_as_far_off_as_plain_bf16(name, case):
    x = inputs(case)
    wanted = truth_of(case, jnp.bfloat16)
    usual = errors(results(plain(case.spec), x, dtype=jnp.bfloat16), wanted, norm)
    found = results(differentiable(make(name, case.spec)), x, dtype=jnp.bfloat16)
    off = errors(found, wanted, norm)
    assert all(off[n] <= 2 * usual[n] + TOLERANCE for n in off), f"errors {off}, plain bf16 {usual}"
    low = {"out", "dq", "dk", "dv"}
    assert all(found[n].dtype == (jnp.bfloat16 if n in low else np.float32) for n in usual)


@pytest.mark.parametrize("length", [255, 256, 257, 1001])
def test_default_tiles(length):
    """One tile of just that size, and one token less and more."""
    case = Case("", B=1, T=length, N=2, K=1)
    x = inputs(case)
    check(results(differentiable(KERNELS["chunked"](case.spec)), x), truth(case.spec, x))


@every_kernel
def test_carry_continues(name):
    """The keys in two parts, the second continuing from the first, are the whole."""
    case = BY_NAME["packed_window"]
    x, kernel = inputs(case), make(name, case.spec)
    q, q_at, cut = jnp.asarray(x.q_BTNH), x.q_at, 37

    @jax.jit
    def whole():
        return kernel.forward(q, x.k_BSKH, x.v_BSKH, q_at, x.k_at)

    @jax.jit
    def parts():
        first, second = halves(x, cut)
        return kernel.forward(
            q, *second[:2], q_at, second[2], kernel.forward(q, *first[:2], q_at, first[2])
        )

    for found, wanted in zip(parts(), whole(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def halves(x, cut):
    """(k, v, tokens) before and after `cut`."""
    k, v = jnp.asarray(x.k_BSKH), jnp.asarray(x.v_BSKH)
    return [
        (k[:, part], v[:, part], Tokens(*(a[:, part] for a in x.k_at[:2])))
        for part in (slice(None, cut), slice(cut, None))
    ]


@every_kernel
def test_backward_adds_into_what_it_is_given(name):
    """dq of two parts of the keys, each added to what was there; a field that is None is nothing yet."""
    case = EVERYTHING
    x, kernel = inputs(case), make(name, case.spec)
    q, dout = jnp.asarray(x.q_BTNH), jnp.asarray(x.dout_BTNH)
    start = 3.0 * q

    @jax.jit
    def run():
        part = kernel.forward(q, x.k_BSKH, x.v_BSKH, x.q_at, x.k_at)
        rest = (dout, part.lse_BNT, row_dot(dout, part.out_BTNH))
        whole = kernel.backward(q, x.k_BSKH, x.v_BSKH, x.q_at, x.k_at, *rest)
        (k0, v0, at0), (k1, v1, at1) = halves(x, 37)
        first = kernel.backward(q, k0, v0, x.q_at, at0, *rest, into=Grads(start, None, None))
        second = kernel.backward(
            q, k1, v1, x.q_at, at1, *rest, into=Grads(first.dq_BTNH, 2.0 * k1, 5.0 * v1)
        )
        return whole, first, second

    whole, first, second = run()
    wanted = Grads(
        whole.dq_BTNH + start,
        whole.dk_BSKH.at[:, 37:].add(2.0 * x.k_BSKH[:, 37:]),
        whole.dv_BSKH.at[:, 37:].add(5.0 * x.v_BSKH[:, 37:]),
    )
    found = Grads(
        second.dq_BTNH,
        jnp.concatenate([first.dk_BSKH, second.dk_BSKH], 1),
        jnp.concatenate([first.dv_BSKH, second.dv_BSKH], 1),
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@every_kernel
def test_rows_that_see_nothing(name):
    """Out 0, gradients 0, lse FLOOR: queries before every key, and padding on either side."""
    case = Case("", B=1, T=40, mask=Causal(), documents=(40,))
    x = inputs(case)
    x.k_at.positions_BT[:] += 15  # queries 0 ... 14 are before every key
    x.k_at.segment_ids_BT[:, 30:] = PADDING
    x.q_at.segment_ids_BT[:, 35:] = PADDING
    found = results(differentiable(make(name, case.spec)), x)
    blind = np.r_[0:15, 35:40]
    np.testing.assert_array_equal(found["out"][:, blind], 0)
    np.testing.assert_array_equal(found["dq"][:, blind], 0)
    np.testing.assert_array_equal(found["lse"][..., blind], np.float32(FLOOR))
    np.testing.assert_array_equal(found["dk"][:, 30:], 0)
    np.testing.assert_array_equal(found["dv"][:, 30:], 0)
    check(found, truth(case.spec, x))


@every_kernel
def test_carry_survives_rows_that_see_nothing(name):
    """What was merged before stays as it is, and FLOOR stays FLOOR."""
    x = inputs(Case("", B=1, T=40))
    at = x.k_at._replace(segment_ids_BT=np.full_like(x.k_at.segment_ids_BT, PADDING))
    lse = np.where(np.arange(40) % 2, 200.0, FLOOR).astype(np.float32) + np.zeros_like(x.dlse_BNT)
    carry = Partial(jnp.where(np.arange(40)[:, None, None] % 2, x.dout_BTNH, 0.0), jnp.asarray(lse))
    forward = jax.jit(make(name, Spec()).forward)
    out, lse = forward(jnp.asarray(x.q_BTNH), x.k_BSKH, x.v_BSKH, x.q_at, at, carry)
    np.testing.assert_allclose(out, carry.out_BTNH, rtol=1e-6)
    np.testing.assert_allclose(lse, carry.lse_BNT, rtol=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_keeps_its_share(share):
    """Values of one and equal weights: a row's sum is (keys kept) / S / (1 - share)."""
    case = Case("", B=2, T=512, N=4, K=2, H=4, dropout=share, mask=BY_NAME["full"].mask)
    x = inputs(case)
    x = x._replace(q_BTNH=np.zeros_like(x.q_BTNH), v_BSKH=np.ones_like(x.v_BSKH))
    out = KERNELS["reference"](case.spec).forward(*map(jnp.asarray, x[:3]), x.q_at, x.k_at).out_BTNH
    kept = np.asarray(out[..., 0]) * (1 - share)
    rows, keys = kept.size, 512
    deviation = np.sqrt(share * (1 - share) / keys)
    assert abs(kept.mean() - (1 - share)) < 5 * deviation / np.sqrt(rows)
    assert kept.std() == pytest.approx(deviation, rel=0.1)  # so rows are drawn apart
    for axis in range(3):  # and so are batch rows, queries and heads
        one, other = np.take(kept, 0, axis), np.take(kept, 1, axis)
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.2 + 0.8 * (axis == 1)


def test_dropout_follows_the_tokens():
    """Keys and queries in another order give the same rows: it goes by position, not by slot."""
    case = BY_NAME["dropout"]
    x, forward = inputs(case), KERNELS["reference"](case.spec).forward
    order = np.random.default_rng(1).permutation(case.T)
    turned = [jnp.asarray(a[:, order]) for a in x[:3]]
    q_at = x.q_at._replace(positions_BT=x.q_at.positions_BT[:, order])
    k_at = x.k_at._replace(positions_BT=x.k_at.positions_BT[:, order])
    found = forward(*turned, q_at, k_at).out_BTNH
    wanted = forward(*map(jnp.asarray, x[:3]), x.q_at, x.k_at).out_BTNH[:, order]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_facing_tells_rows_from_columns():
    q, k = facing(Tokens(np.arange(3), np.zeros(3)), Tokens(np.arange(5), np.ones(5)))
    assert np.broadcast_shapes(q.positions_BT.shape, k.positions_BT.shape) == (3, 5)


def test_every_result_is_compared():
    assert set(results(plain(Spec()), inputs(BY_NAME["sinks"]))) == set(NAMES)
