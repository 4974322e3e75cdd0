import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ringflash import rules
from ringflash.config import OptimizerConfig
from ringflash.mesh import RULES
from ringflash.optimizer import (
    ADAMS_RMS,
    DIRECTIONS,
    MATRICES,
    average,
    averaged,
    decayed,
    make_optimizer,
    make_schedule,
)
from ringflash.schedule import SCHEDULES

CONFIG = OptimizerConfig(
    name="adamw",
    schedule="cosine",
    learning_rate=0.1,
    warmup_steps=4,
    decay_start=12,
    decay_steps=20,
    final_fraction=0.25,
    weight_decay=0.5,
    beta1=0.9,
    beta2=0.95,
    momentum=0.9,
    clip_norm=1.0,
    offload=False,
    ema_decay=0.0,
)
PARAMS = {"blocks": {"q_DNH": jnp.full((2, 3), 2.0), "scale_D": jnp.full((2,), 2.0)}}


def updates(grads, config=CONFIG):
    optimizer = make_optimizer(config)
    found, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    return found["blocks"]


def test_names_are_those_of_the_rules():
    """The rules are read before optax is imported, so they cannot look at the tables."""
    assert rules.RULES["optimizer.name"].allowed == rules.one_of(DIRECTIONS).allowed
    assert rules.RULES["optimizer.schedule"].allowed == rules.one_of(SCHEDULES).allowed


# At updates 0, 2, 4, 12, 16, 20 and 1000: warm-up ends at 4, wsd falls from 12, all end at 20.
CURVES = {
    "cosine": [0.02, 0.06, 0.1, 0.0625, 0.0359835, 0.025, 0.025],
    "linear": [0.02, 0.06, 0.1, 0.0625, 0.04375, 0.025, 0.025],
    "wsd": [0.02, 0.06, 0.1, 0.1, 0.0625, 0.025, 0.025],
    "constant": [0.02, 0.06, 0.1, 0.1, 0.1, 0.1, 0.1],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_rises_falls_and_stays(name):
    """The first step learns already; half-way down all are at the mean of peak and end."""
    schedule = make_schedule(dataclasses.replace(CONFIG, schedule=name))
    found = [float(schedule(step)) for step in (0, 2, 4, 12, 16, 20, 1000)]
    np.testing.assert_allclose(found, CURVES[name], rtol=1e-5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_without_warm_up_begins_at_the_peak(name):
    schedule = make_schedule(dataclasses.replace(CONFIG, schedule=name, warmup_steps=0))
    assert float(schedule(0)) == pytest.approx(0.1)
    assert float(schedule(20)) == pytest.approx(CURVES[name][-1])


def test_wsd_that_is_never_stable_is_linear():
    wsd = make_schedule(dataclasses.replace(CONFIG, schedule="wsd", decay_start=4))
    linear = make_schedule(dataclasses.replace(CONFIG, schedule="linear"))
    assert [wsd(step) for step in range(30)] == [linear(step) for step in range(30)]


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


SHAPES = {
    "q_DNH": (12, 4, 2),
    "k_DKH": (12, 2, 2),
    "v_DKH": (12, 2, 2),
    "out_NHD": (4, 2, 12),
    "gate_DF": (12, 16),
    "up_DF": (12, 16),
    "down_FD": (16, 12),
}
SIDES = {name: 2 if name == "out_NHD" else 1 for name in SHAPES}  # dims that meet the input
MUON = dataclasses.replace(CONFIG, name="muon", weight_decay=0.0, schedule="constant")
SECOND_RATE = 0.04


def drawn(layers=3, seed=0):
    """A model's parameters, or as many gradients, layers stacked."""
    draw = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    blocks = {name: normal(layers, *shape) for name, shape in SHAPES.items()}
    return {
        "blocks": blocks | {"scale_D": normal(layers, 12)},
        "embedding_VD": normal(20, 12),
        "unembedding_DV": normal(12, 20),
    }


def two_updates(config, params, seeds=(1, 2)):
    """The second update: momentum and moments are in it."""
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    layers = len(params["blocks"]["q_DNH"])
    for seed in seeds:
        found, state = jax.jit(optimizer.update)(drawn(layers, seed), state, params)
    return found, state


def test_muon_turns_each_matrix_of_a_block_and_only_those():
    """What is split by mesh rules is a model's parameters: none is left to AdamW unseen."""
    rest = {"embedding_VD", "unembedding_DV", "scale_D"}
    assert MATRICES.keys() == RULES.keys() - rest == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_an_update_of_muon_is_nearly_orthogonal_and_as_large_as_adams(name):
    found = two_updates(MUON, drawn())[0]["blocks"][name] / -SECOND_RATE
    rows = int(np.prod(SHAPES[name][: SIDES[name]]))
    for layer in np.asarray(found).reshape(3, rows, -1):
        values = np.linalg.svd(layer, compute_uv=False) / ADAMS_RMS / np.sqrt(max(layer.shape))
        assert 0.65 < values.min() <= values.max() < 1.25
        assert np.sqrt(np.square(layer).mean()) == pytest.approx(ADAMS_RMS, rel=0.2)


@pytest.mark.parametrize("name", SHAPES)
def test_muon_turns_towards_the_polar_factor_of_the_momentum(name):
    """The sign is kept and nothing but singular values is changed: U S V' becomes U S' V'."""
    grads = drawn(seed=1)
    optimizer = make_optimizer(MUON)
    found, _ = optimizer.update(grads, optimizer.init(grads), grads)
    rows = int(np.prod(SHAPES[name][: SIDES[name]]))
    pairs = zip(found["blocks"][name], grads["blocks"][name], strict=True)
    for update, grad in ((np.asarray(a).reshape(rows, -1) for a in pair) for pair in pairs):
        u, _, vt = np.linalg.svd(grad, full_matrices=False)
        turned = -u.T @ update @ vt.T
        np.testing.assert_allclose(turned, np.diag(turned.diagonal()), atol=1e-5)
        assert turned.diagonal().min() > 0


def test_muon_of_stacked_layers_is_optaxs_of_each_matrix_alone():
    """With momentum in it, and clipping out of it, which is by the norm of all."""
    found, _ = two_updates(dataclasses.replace(MUON, clip_norm=1e9), drawn())
    alone = optax.contrib.muon(make_schedule(MUON), beta=0.9, consistent_rms=ADAMS_RMS)
    for name, shape in SHAPES.items():
        rows = int(np.prod(shape[: SIDES[name]]))
        for layer in range(3):
            grads = [drawn(seed=n)["blocks"][name][layer].reshape(rows, -1) for n in (1, 2)]
            state = alone.init(grads[0])
            for grad in grads:
                wanted, state = alone.update(grad, state, grad)
            update = found["blocks"][name][layer].reshape(rows, -1)
            np.testing.assert_allclose(update, wanted, rtol=1e-4, atol=1e-6)


def test_beside_muon_the_rest_is_adamws():
    config = dataclasses.replace(MUON, weight_decay=0.5)
    muon = two_updates(config, drawn())[0]
    adamw = two_updates(dataclasses.replace(config, name="adamw"), drawn())[0]
    for tree in (muon, adamw):
        for name in MATRICES:
            del tree["blocks"][name]
    jax.tree.map(np.testing.assert_array_equal, muon, adamw)


def test_muons_matrices_decay_as_adamws_do():
    params = drawn()
    plain = two_updates(MUON, params)[0]["blocks"]
    decayed = two_updates(dataclasses.replace(MUON, weight_decay=0.5), params)[0]["blocks"]
    for name in MATRICES:
        wanted = -0.5 * SECOND_RATE * params["blocks"][name]
        np.testing.assert_allclose(decayed[name] - plain[name], wanted, rtol=1e-3, atol=1e-6)


def test_adamw_is_optaxs():
    """The state too, leaf by leaf: checkpoints of either are the other's."""
    wanted = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(make_schedule(CONFIG), b1=0.9, b2=0.95, weight_decay=0.5, mask=decayed),
    )
    params, state = drawn(), wanted.init(drawn())
    for seed in (1, 2):
        updates, state = jax.jit(wanted.update)(drawn(seed=seed), state, params)
    found = two_updates(CONFIG, params)
    assert jax.tree.structure(found) == jax.tree.structure((updates, state))
    jax.tree.map(np.testing.assert_array_equal, found, (updates, state))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_the_average_is_the_weighted_mean_of_what_was_reached(decay, dtype):
    transform = average(decay)
    params = {"w": jnp.asarray([100.0, -100.0], dtype)}
    state = transform.init(params)
    reached = []
    for step in range(1, 6):
        updates = {"w": jnp.asarray([step, 1.0 / step], dtype)}
        same, state = transform.update(updates, state, params)
        assert same is updates
        params = optax.apply_updates(params, updates)
        reached.append(np.asarray(params["w"], np.float64))
    weights = decay ** np.arange(4, -1, -1.0)
    wanted = (weights[:, None] * reached).sum(0) / weights.sum()
    assert state.mean["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.mean["w"], wanted, rtol=1e-5)


def test_the_average_is_evaluated_where_there_is_one():
    params = {"q_DNH": jnp.ones((2, 3), jnp.bfloat16)}
    assert averaged(params, make_optimizer(CONFIG).init(params)) is params
    optimizer = make_optimizer(dataclasses.replace(CONFIG, ema_decay=0.9))
    state = optimizer.init(params)
    np.testing.assert_array_equal(averaged(params, state)["q_DNH"], params["q_DNH"])
    updates, state = optimizer.update(params, state, params)
    reached = optax.apply_updates(params, updates)
    found = averaged(params, state)
    assert found["q_DNH"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["q_DNH"], reached["q_DNH"])


@pytest.mark.parametrize("name", DIRECTIONS)
def test_without_an_average_there_is_no_state_of_one(name):
    config = dataclasses.replace(CONFIG, name=name)
    without = jax.tree.leaves(make_optimizer(config).init(drawn()))
    optimizer = make_optimizer(dataclasses.replace(config, ema_decay=0.9))
    held = jax.tree.leaves(optimizer.init(drawn()))
    assert len(held) - len(without) == len(jax.tree.leaves(drawn())) + 1
