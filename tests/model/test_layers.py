import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import config
from flax import nnx

from ringflash.model.layers import MLP, Attention, RMSNorm, matrix

POSITIONS = jnp.arange(5)[None]
SEGMENTS = jnp.zeros((1, 5), jnp.int32)


def states(dtype=jnp.float32, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(0).normal(size=(1, 5, 16)), dtype)


def test_rms_norm_is_the_formula():
    norm = RMSNorm(config(norm_eps=0.1))
    norm.scale_D.set_value(jnp.arange(16.0))
    x = np.asarray(states(), np.float64)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * np.arange(16)
    np.testing.assert_allclose(norm(states()), wanted, rtol=1e-5)


def test_rms_norm_squares_in_fp32():
    """In bfloat16 this sum would be wrong in the second digit; the result is rounded only once."""
    norm, x = RMSNorm(config(width=2048)), jnp.full((1, 1, 2048), 1.0, jnp.bfloat16)
    found = norm(x.at[0, 0, 0].set(30.0))
    assert found.dtype == jnp.bfloat16
    wanted = jnp.asarray(1 / np.sqrt((2047 + 900) / 2048), jnp.bfloat16)
    assert found[0, 0, 1] == wanted


def test_matrices_have_variance_1_over_fan_in():
    drawn = matrix(nnx.Rngs(0), (64, 64, 4), 64, "bfloat16")[...]
    assert drawn.dtype == jnp.bfloat16
    assert float(jnp.std(drawn.astype(jnp.float32))) == pytest.approx(64**-0.5, rel=0.03)
    assert float(jnp.abs(drawn).max()) <= 2.3 * 64**-0.5


def test_attention_is_given_turned_q_and_k_and_plain_v():
    seen = {}

    def spy(q, k, v, positions, segments):
        seen.update(q=q, k=k, v=v, positions=positions, segments=segments)
        return q * 0 + 2.0

    layer = Attention(config(), spy, nnx.Rngs(0))
    found = layer(states(), POSITIONS, SEGMENTS)
    assert (seen["q"].shape, seen["k"].shape, seen["v"].shape) == (
        (1, 5, 4, 6),
        (1, 5, 2, 6),
        (1, 5, 2, 6),
    )
    q, k, v = (
        np.einsum("btd,dnh->btnh", states(), weight[...])
        for weight in (layer.q_DNH, layer.k_DKH, layer.v_DKH)
    )
    for name, raw in [("q", q), ("k", k)]:
        np.testing.assert_allclose(seen[name][:, 0], raw[:, 0], rtol=1e-5, atol=1e-6)
        assert np.abs(seen[name][:, 1:] - raw[:, 1:]).max() > 0.1
    np.testing.assert_allclose(seen["v"], v, rtol=1e-5, atol=1e-6)
    assert seen["positions"] is POSITIONS
    assert seen["segments"] is SEGMENTS
    wanted = np.full(16, 2.0) * np.asarray(layer.out_NHD[...]).sum((0, 1))
    np.testing.assert_allclose(found[0, 3], wanted, rtol=1e-4, atol=1e-6)


def test_mlp_is_swiglu():
    mlp = MLP(config(), nnx.Rngs(0))
    gate, up, down = (np.asarray(w[...], np.float64) for w in (mlp.gate_DF, mlp.up_DF, mlp.down_FD))
    x = np.asarray(states(), np.float64)
    sigmoid = 1 / (1 + np.exp(-(x @ gate)))
    wanted = (x @ gate * sigmoid * (x @ up)) @ down
    np.testing.assert_allclose(mlp(states()), wanted, rtol=1e-4, atol=1e-6)


def test_layers_compute_in_the_dtype_of_the_states():
    low = states(jnp.bfloat16)
    assert MLP(config(), nnx.Rngs(0))(low).dtype == jnp.bfloat16
    layer = Attention(config(), lambda q, *rest: q, nnx.Rngs(0))
    assert jax.eval_shape(layer, low, POSITIONS, SEGMENTS).dtype == jnp.bfloat16
