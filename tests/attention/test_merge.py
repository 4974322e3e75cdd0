"""Laws of `merge`: a Partial is a softmax that is not finished, and the order of finishing is free."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention import FLOOR, PADDING, Causal, Full, Partial, Spec, empty_partial, merge
from ringflash.attention.cases import Case, inputs
from ringflash.attention.kernels.reference import reference

B, T, N, H = 1, 3, 2, 2
LAWS = settings(max_examples=200, deadline=None, derandomize=True)
lse = st.floats(-250, 250, width=32, allow_subnormal=False) | st.just(FLOOR)


@st.composite
def partials(draw):
    """Rows that saw something, with lse up to 500 apart, and rows that saw nothing."""
    stats = np.array(draw(st.lists(lse, min_size=N * T, max_size=N * T)), np.float32)
    out = draw(
        st.lists(
            st.floats(-4, 4, width=32, allow_subnormal=False),
            min_size=T * N * H,
            max_size=T * N * H,
        )
    )
    stats, out = stats.reshape(B, N, T), np.array(out, np.float32).reshape(B, T, N, H)
    return Partial(np.where((stats == np.float32(FLOOR)).swapaxes(1, 2)[..., None], 0, out), stats)


def close(a, b):
    for x, y in zip(a, b, strict=True):
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@LAWS
@given(partials(), partials(), partials())
def test_associative(a, b, c):
    close(merge(merge(a, b), c), merge(a, merge(b, c)))


@LAWS
@given(partials(), partials())
def test_commutative(a, b):
    close(merge(a, b), merge(b, a))


@LAWS
@given(partials())
def test_an_empty_partial_is_the_unit(a):
    """Exactly: not one bit moves."""
    nothing = empty_partial(jnp.zeros((B, T, N, 8)), H)
    for one in (merge(a, nothing), merge(nothing, a)):
        for x, y in zip(one, a, strict=True):
            np.testing.assert_array_equal(x, y)


def test_empty_partial():
    out, lse = empty_partial(jnp.zeros((B, T, N, 8), jnp.bfloat16), H)
    assert (out.shape, lse.shape) == ((B, T, N, H), (B, N, T))
    assert out.dtype == lse.dtype == jnp.float32
    np.testing.assert_array_equal(lse, np.float32(FLOOR))
    np.testing.assert_array_equal(merge(Partial(out, lse), Partial(out, lse)).lse_BNT, lse)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 200.0), (-200.0, 0.0), (FLOOR, 200.0), (FLOOR, -200.0)]
)
def test_lse_far_apart(low, high):
    """0 and 200 give 200, with the values of the heavier one, and a finite gradient."""
    ones = np.ones((B, T, N, H), np.float32)
    stats = np.ones((B, N, T), np.float32)

    def total(low, high):
        return merge(Partial(3 * ones, low * stats), Partial(5 * ones, high * stats))

    for found in (total(low, high), total(high, low)):
        np.testing.assert_array_equal(found.lse_BNT, np.float32(high))
    np.testing.assert_allclose(total(low, high).out_BTNH, 5, rtol=1e-6)
    np.testing.assert_allclose(total(high, low).out_BTNH, 3, rtol=1e-6)
    for grad in jax.grad(lambda *x: total(*x).out_BTNH.sum(), (0, 1))(low, high):
        assert np.isfinite(grad)


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=["causal", "full"])
def test_split_and_merge_is_the_whole(mask):
    """Keys dealt out anyhow and merged in any order, some parts seen by no query at all."""
    x = inputs(Case("", B=1, T=6, S=24, N=N, K=1, H=4, mask=mask, q_start=10))
    q, k, v = map(jnp.asarray, x[:3])
    forward = jax.jit(reference(Spec(mask)).forward)
    whole = forward(q, k, v, x.q_at, x.k_at)

    @LAWS
    @given(st.lists(st.integers(0, 4), min_size=24, max_size=24), st.permutations(range(5)))
    def law(hands, order):
        found = empty_partial(q, 4)
        for hand in order:
            segments = np.where(np.array([hands]) == hand, 0, PADDING).astype(np.int32)
            part = forward(q, k, v, x.q_at, x.k_at._replace(segment_ids_BT=segments))
            found = merge(found, part)
        close(found, whole)

    law()
