"""What a caller gets wrong in `attend` is told; what lies in padding reaches nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringflash.attention import Axes, Causal, Full, Tokens, Window, attend

RNG = np.random.default_rng(0)
Q = jnp.asarray(RNG.normal(size=(2, 16, 4, 8)), jnp.float32)
K, V = (jnp.asarray(RNG.normal(size=(2, 16, 2, 8)), jnp.float32) for _ in range(2))
POSITIONS = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
ZEROS = np.zeros((2, 16), np.int32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"at": Tokens(POSITIONS.astype(np.uint32), ZEROS)},
            "must be signed integers, found uint32",
        ),
        ({"at": Tokens(POSITIONS.astype(np.float32), ZEROS)}, "signed integers, found float32"),
        ({"at": Tokens(POSITIONS, ZEROS.astype(np.int64) + 2**32)}, "must lie within 2"),
        ({"at": (POSITIONS, ZEROS)}, "at must be Tokens"),
        ({"mask": None}, "mask must be a Mask"),
        ({"mask": Causal}, "mask must be a Mask"),
        ({"bias": np.zeros(4)}, "bias must be a function"),
        ({"sinks_N": np.zeros(1)}, r"sinks_N must be \(4,\), found \(1,\)"),
        ({"dropout": 2.0}, "dropout must be in"),
        ({"strategy": "rong"}, "strategy 'rong' is unknown"),
    ],
)
def test_wrong_options_are_told(change, said):
    with pytest.raises(ValueError, match=said):
        attend(Q, K, V, **change)


@pytest.mark.parametrize("kind", ["int32", "complex64"])
def test_only_floats(kind):
    with pytest.raises(ValueError, match="one floating dtype; found"):
        attend(*(x.astype(kind) for x in (Q, K, V)))


@pytest.mark.parametrize("shape", [(0, 16, 4, 8), (2, 0, 4, 8), (2, 16, 4, 0)])
def test_empty_dims_are_told(shape):
    x = jnp.zeros(shape)
    with pytest.raises(ValueError, match="no dim of q, k, v may be empty"):
        attend(x, x, x)


def test_a_mesh_that_shards_nothing_is_refused():
    mesh = jax.make_mesh((8,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="name them in axes="):
        attend(Q, K, V, mesh=mesh)
    named = jax.jit(lambda *x: attend(*x, mesh=mesh, axes=Axes(time="sp"), strategy="all_gather"))
    np.testing.assert_allclose(named(Q, K, V), attend(Q, K, V), atol=1e-5)


@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_nan_in_padding_reaches_nothing(kernel):
    segments = ZEROS.copy()
    segments[:, 10:] = -1
    real = jnp.asarray(segments >= 0)[:, :, None, None]
    dirty = [jnp.where(real, x, jnp.nan) for x in (Q, K, V)]

    def total(q, k, v):
        out = attend(q, k, v, at=Tokens(POSITIONS, segments), mask=Full(), kernel=kernel)
        return jnp.where(real, out, 0.0).sum(), out

    found = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*dirty)
    wanted = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(Q, K, V)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)


def test_int64_numpy_tokens_are_taken_as_they_are():
    at = Tokens(POSITIONS.astype(np.int64), ZEROS.astype(np.int64))
    mask = Causal() & Window(4)
    np.testing.assert_array_equal(attend(Q, K, V, at=at, mask=mask), attend(Q, K, V, mask=mask))
