"""flax's MultiHeadAttention with our attention in it, beside its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from ringflash.attention import Causal, Window
from ringflash.attention.flax import attention_fn
from ringflash.attention.tile import alibi

T, WIDTH, HEADS = 64, 32, 4
X = np.random.default_rng(0).normal(size=(2, T, WIDTH)).astype(np.float32)
ARRAY = jnp.zeros((2, T, HEADS, 8))


def layer(**more):
    """The same parameters each time."""
    return nnx.MultiHeadAttention(
        num_heads=HEADS, in_features=WIDTH, decode=False, rngs=nnx.Rngs(0), **more
    )


def outputs(module, **call):
    """Output, and gradients of parameters and input."""
    graph, parameters = nnx.split(module, nnx.Param)[:2]

    @jax.jit
    def run(parameters, x):
        def loss(parameters, x):
            out = nnx.merge(graph, parameters)(x, **call)
            return (out * jnp.cos(jnp.arange(WIDTH))).sum(), out

        gradients, out = jax.grad(loss, (0, 1), has_aux=True)(parameters, x)
        return out, gradients

    return run(parameters, X)


def agree(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def wanted():
    return outputs(layer(), mask=nnx.make_causal_mask(X[..., 0]))


def test_without_a_mesh(wanted):
    agree(outputs(layer(attention_fn=attention_fn(mask=Causal()))), wanted)


def test_is_causal_of_the_call(wanted):
    agree(outputs(layer(attention_fn=attention_fn()), is_causal=True), wanted)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses:2*ring:2"])
def test_on_a_mesh(wanted, strategy):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    ours = attention_fn(mask=Causal(), mesh=mesh, strategy=strategy)
    agree(outputs(layer(attention_fn=ours)), wanted)


def test_all_see_all_unless_a_mask_is_given():
    agree(outputs(layer(attention_fn=attention_fn())), outputs(layer()))


def test_computes_in_the_dtype_of_the_layer():
    ours = layer(attention_fn=attention_fn(mask=Causal()), dtype=jnp.bfloat16)
    assert ours(jnp.asarray(X)).dtype == jnp.bfloat16
    assert attention_fn()(ARRAY, ARRAY, ARRAY, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_any_batch_dims():
    x = jnp.asarray(X).reshape(2, 1, T, WIDTH)
    ours = layer(attention_fn=attention_fn(mask=Causal()))
    np.testing.assert_allclose(ours(x)[:, 0], ours(X), rtol=1e-5, atol=1e-5)


def test_dropout_is_that_of_flax():
    """Drawn from its key, and none where the layer is deterministic."""
    ours = layer(attention_fn=attention_fn(), dropout_rate=0.5, broadcast_dropout=False)
    plain = layer(attention_fn=attention_fn())(X)
    np.testing.assert_array_equal(ours(X, deterministic=True), plain)
    given = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0), "broadcast_dropout": False}
    ones = jnp.ones_like(ARRAY)
    np.testing.assert_allclose(attention_fn()(ones, ones, ones, deterministic=True, **given), ones)
    one, other = (ours(X, deterministic=False, rngs=nnx.Rngs(n)) for n in (1, 2))
    assert not np.allclose(one, plain)
    assert not np.allclose(one, other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask": jnp.ones((1, 1, T, T))}, r"\(1, 1, 64, 64\).*mask=Causal\(\)"),
        ({"bias": jnp.ones((1, 1, T, T))}, r"\(1, 1, 64, 64\).*bias=alibi"),
        ({"precision": "highest"}, "precision=highest"),
        ({"module": object()}, "sow_weights=False"),
        ({"window": 3}, "window"),
        (
            {"dropout_rate": 0.1, "broadcast_dropout": True, "dropout_rng": jax.random.key(0)},
            "broadcast_dropout=False",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        attention_fn()(ARRAY, ARRAY, ARRAY, **given)


def test_dropout_is_not_bound():
    with pytest.raises(ValueError, match="dropout_rate"):
        attention_fn(dropout=0.1)


def test_what_is_bound_arrives():
    """The other masks, and a bias by positions."""
    found = attention_fn(mask=Causal() & Window(1), bias=alibi(HEADS))(
        ARRAY, ARRAY, ARRAY + X[0, 0, 0]
    )
    np.testing.assert_allclose(found, ARRAY + X[0, 0, 0], rtol=1e-6)
