"""The arithmetic of a tile of the TPU kernel against plain formulas, without Pallas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.attention import FLOOR, Spec
from ringflash.attention.kernels.mosaic.agenda import HI, LAST, LO, SEGMENT
from ringflash.attention.tile import (
    HIDDEN,
    LOG2E,
    hidden,
    in_base_2,
    query_factor,
    score_gradient,
    seen,
)

LAWS = settings(max_examples=100, deadline=None, derandomize=True)
SOFTCAPS = [None, 2.0, 50.0]
SCALES = [None, 0.3]
places = st.sampled_from([-LAST, -7, 0, 1, 5, 1_000_000, LAST - 8, LAST - 1])
bounds = st.tuples(places, places).map(sorted)
positions = st.lists(
    st.integers(-9, 12) | st.integers(LAST - 12, LAST), min_size=6, max_size=6
).map(lambda found: np.array(found, np.int32)[None])


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@LAWS
@given(
    st.lists(bounds, min_size=4, max_size=4),
    positions,
    st.sets(st.sampled_from([HI, LO, SEGMENT])),
)
def test_seen_is_each_test_that_is_asked_for(intervals, position, tests):
    """Both bounds at once are one comparison, which must not wrap: from -LAST to the LAST of padding."""
    lo, hi = (np.array(side, np.int32)[:, None] for side in zip(*intervals, strict=True))
    same = np.arange(24).reshape(4, 6) % 3 > 0
    passed = seen(tuple(tests), *map(jnp.asarray, (lo, hi, position)), lambda: jnp.asarray(same))
    if not tests:
        assert passed is None
        return
    each = {HI: position <= hi, LO: position >= lo, SEGMENT: same}
    wanted = np.logical_and.reduce([np.broadcast_to(each[name], (4, 6)) for name in tests])
    np.testing.assert_array_equal(np.broadcast_to(passed, (4, 6)), wanted)


def test_segments_are_not_compared_unasked():
    def compared():
        raise AssertionError("the segments of a tile that needs no such test")

    assert seen((HI,), *(jnp.zeros((1, 1), jnp.int32),) * 3, compared) is not None


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("scale", SCALES)
def test_scores_in_base_2(scale, softcap):
    """2^score of q times its factor is e^score of the definition."""
    spec, width = Spec(scale=scale, softcap=softcap), 24
    q, k = normal(5, width), normal(7, width, seed=1)
    plain = (q @ k.T) * (width**-0.5 if scale is None else scale)
    plain = plain if softcap is None else softcap * np.tanh(plain / softcap)
    found = in_base_2((q * query_factor(spec, width)) @ k.T, softcap)
    np.testing.assert_allclose(jnp.exp2(found), np.exp(plain), rtol=2e-5)


@pytest.mark.parametrize("top", [FLOOR * LOG2E, FLOOR, -1e4, 0.0, 1e4])
def test_hidden_weighs_nothing_under_every_maximum(top):
    """Even where the row saw nothing; without tests nothing is hidden."""
    score = normal(3, 4)
    found = hidden(score, jnp.zeros((3, 4), bool))
    assert np.isfinite(HIDDEN)
    np.testing.assert_array_equal(jnp.exp2(found - jnp.float32(top)), 0)
    assert hidden(score, None) is score
    visible = jnp.arange(12).reshape(3, 4) % 2 > 0
    np.testing.assert_array_equal(hidden(score, visible), np.where(visible, score, HIDDEN))


@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("scale", SCALES)
def test_score_gradient(scale, softcap):
    """Of attention of one head by JAX; the scale is put back as the backward kernel does it."""
    spec, width = Spec(scale=scale, softcap=softcap), 16
    q, k, v = normal(5, width), normal(7, width, seed=1), normal(7, 8, seed=2)
    dout = normal(5, 8, seed=3)
    used = spec.scale_for(width)

    def attention(q, k):
        score = (q @ k.T) * used
        score = score if softcap is None else softcap * jnp.tanh(score / softcap)
        return jax.nn.softmax(score) @ v

    out, pull = jax.vjp(attention, q, k)
    factor = query_factor(spec, width)
    raw = (q * factor) @ k.T
    score = in_base_2(raw, softcap)
    p = jnp.exp2(score - jnp.log2(jnp.exp2(score).sum(1, keepdims=True)))
    ds = score_gradient(p, dout @ v.T, (dout * out).sum(1, keepdims=True), raw, softcap)
    dq, dk = pull(dout)
    np.testing.assert_allclose(ds @ k * used, dq, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ds.T @ (q * factor) * (used / factor), dk, rtol=1e-4, atol=1e-5)
