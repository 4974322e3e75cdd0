import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringflash.model.rope import angles, rotate

THETA = 10_000.0


def turned(x_BTNH, positions_BT):
    turn = angles(jnp.asarray(positions_BT), head_dim=x_BTNH.shape[-1], theta=THETA)
    return np.asarray(rotate(jnp.asarray(x_BTNH), turn))


def by_hand(x, positions):
    """Each pair (i, i + H/2) as a complex number, times e^(i * position * theta^(-2i/H)), in fp64."""
    half = x.shape[-1] // 2
    rates = THETA ** (-2 * np.arange(half) / x.shape[-1])
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * positions[:, :, None, None] * rates)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@pytest.mark.parametrize("start", [0, 100, 30_000])
def test_is_the_formula(start):
    """An angle is a product in fp32: at 30,000 its last digit is worth 0.002 radians."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(2, 6, 3, 8)).astype(np.float32)
    positions = start + draw.permutation(12).reshape(2, 6)
    tolerance = 1e-6 + start * 2**-22
    np.testing.assert_allclose(turned(x, positions), by_hand(x, positions), atol=tolerance)


def test_scores_depend_on_the_distance_alone():
    draw = np.random.default_rng(1)
    q, k = draw.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(at_q, at_k):
        return (turned(q, np.array([[at_q]])) * turned(k, np.array([[at_k]]))).sum()

    assert score(107, 100) == pytest.approx(score(7, 0), abs=1e-4)
    assert score(0, 7) != pytest.approx(score(7, 0), abs=1e-2)


def test_position_0_stays_and_lengths_are_kept():
    x = np.random.default_rng(2).normal(size=(1, 4, 2, 8)).astype(np.float32)
    np.testing.assert_array_equal(turned(x, np.zeros((1, 4), int)), x)
    far = turned(x, np.array([[3, 1, 4, 1000]]))
    np.testing.assert_allclose(np.linalg.norm(far, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_bfloat16_is_turned_in_fp32():
    x = np.random.default_rng(3).normal(size=(1, 4, 2, 8)).astype(jnp.bfloat16)
    positions = jnp.array([[1000, 2000, 3000, 4001]])
    found = rotate(jnp.asarray(x), angles(positions, head_dim=8, theta=THETA))
    wanted = jnp.asarray(turned(x.astype(np.float32), positions)).astype(jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, wanted)


def test_angles_are_fp32_whatever_the_positions_are():
    found = jax.eval_shape(lambda: angles(jnp.zeros((1, 4), jnp.int32), head_dim=8, theta=THETA))
    assert (found.shape, found.dtype) == ((1, 4, 4), jnp.float32)
