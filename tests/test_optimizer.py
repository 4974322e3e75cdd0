import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringflash.config import OptimizerConfig
from ringflash.optimizer import decayed, make_optimizer, make_schedule

CONFIG = OptimizerConfig(
    learning_rate=0.1,
    warmup_steps=4,
    decay_steps=20,
    final_fraction=0.25,
    weight_decay=0.5,
    beta1=0.9,
    beta2=0.95,
    clip_norm=1.0,
)
PARAMS = {"blocks": {"q_DNH": jnp.full((2, 3), 2.0), "scale_D": jnp.full((2,), 2.0)}}


def updates(grads, config=CONFIG):
    optimizer = make_optimizer(config)
    found, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    return found["blocks"]


def test_the_schedule_rises_falls_and_stays():
    schedule = make_schedule(CONFIG)
    found = [float(schedule(step)) for step in (0, 2, 4, 12, 20, 1000)]
    # The first step learns already; half-way down the cosine is the mean of peak and end.
    np.testing.assert_allclose(found, [0.02, 0.06, 0.1, 0.0625, 0.025, 0.025], rtol=1e-6)


def test_a_schedule_without_warm_up_begins_at_the_peak():
    schedule = make_schedule(dataclasses.replace(CONFIG, warmup_steps=0))
    assert float(schedule(0)) == pytest.approx(0.1)
    assert float(schedule(20)) == pytest.approx(0.025)


def test_only_matrices_decay():
    assert decayed(PARAMS) == {"blocks": {"q_DNH": True, "scale_D": False}}
    still = updates(jax.tree.map(jnp.zeros_like, PARAMS))
    np.testing.assert_allclose(still["q_DNH"], np.full((2, 3), -0.02 * 0.5 * 2.0), rtol=1e-6)
    np.testing.assert_array_equal(still["scale_D"], np.zeros(2))


def test_the_first_update_is_adams():
    """With both moments corrected it is the sign of the gradient, times the learning rate."""
    grads = {"blocks": {"q_DNH": jnp.full((2, 3), -0.1), "scale_D": jnp.array([0.1, -0.1])}}
    config = dataclasses.replace(CONFIG, weight_decay=0.0)
    found = updates(grads, config)
    np.testing.assert_allclose(found["q_DNH"], np.full((2, 3), 0.02), rtol=1e-5)
    np.testing.assert_allclose(found["scale_D"], [-0.02, 0.02], rtol=1e-5)


def test_the_global_norm_is_clipped_before_the_moments():
    """Adam forgets the size of a first gradient: look at what the moments keep of it."""
    optimizer = make_optimizer(CONFIG)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 30.0), PARAMS)
    _, state = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (2, 3)]
    np.testing.assert_allclose(moments[0], np.full((2, 3), 0.1 / np.sqrt(8)), rtol=1e-5)
