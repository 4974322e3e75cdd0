import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ringflash.step import LossSum, init_state, make_grads, make_step

X_TD = jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]])


def loss_sum(params, mask_T):
    """A loss of w^2 x for each row that counts."""
    losses_T = (X_TD * params["w"] ** 2).sum(-1)
    return LossSum(jnp.where(mask_T, losses_T, 0.0).sum(), mask_T.sum())


def step_of(learning_rate=0.5):
    optimizer = optax.sgd(learning_rate)
    state = init_state({"w": jnp.array([1.0, 3.0])}, optimizer)
    return jax.jit(make_step(make_grads(loss_sum), optimizer)), state


def test_the_loss_is_a_sum_over_a_count():
    step, state = step_of()
    state, metrics = step(state, jnp.array([True, False, True]))
    slope = np.array([(1.0 + 0.5) * 2 * 1.0, (2.0 + 4.0) * 2 * 3.0]) / 2
    wanted = np.array([1.0, 3.0]) - 0.5 * slope
    assert metrics["train/loss"] == pytest.approx((1.5 + 54.0) / 2)
    assert metrics["train/grad_norm"] == pytest.approx(np.linalg.norm(slope))
    assert metrics["train/param_norm"] == pytest.approx(np.linalg.norm(wanted))
    assert metrics["train/tokens"] == 2
    np.testing.assert_allclose(state.params["w"], wanted, rtol=1e-6)
    assert state.step == 1


@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_is_minimised_need_not_be_what_is_told(accumulation):
    """The gradient is that of the objective, the loss that of the total."""

    def with_more(params, mask_T):
        found = loss_sum(params, mask_T)
        return found._replace(objective=found.total + 4 * params["w"].sum())

    state, mask = {"w": jnp.array([1.0, 3.0])}, jnp.ones(3, bool)

    def part(params, mask_T):  # each row counts as one part, whichever it is
        return jax.tree.map(lambda x: x / accumulation, with_more(params, jnp.ones(3, bool)))

    found, grads = jax.jit(make_grads(part, accumulation=accumulation))(state, mask)
    plain, wanted = jax.jit(make_grads(loss_sum))(state, mask)
    assert found.total == pytest.approx(float(plain.total))
    np.testing.assert_allclose(grads["w"], wanted["w"] + 4, rtol=1e-6)


def test_a_batch_of_padding_changes_nothing_and_is_no_nan():
    step, state = step_of()
    after, metrics = step(state, jnp.zeros(3, bool))
    assert (metrics["train/loss"], metrics["train/grad_norm"], metrics["train/tokens"]) == (0, 0, 0)
    np.testing.assert_array_equal(after.params["w"], state.params["w"])
    assert after.step == 1


def test_parameters_that_overflow_are_seen_in_the_same_step():
    step, state = step_of(learning_rate=1e38)
    _, metrics = step(state, jnp.ones(3, bool))
    assert np.isfinite([metrics["train/loss"], metrics["train/grad_norm"]]).all()
    assert metrics["train/skipped"] == 0
    assert not np.isfinite(metrics["train/param_norm"])


@pytest.mark.parametrize("odd", [jnp.nan, jnp.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_count(odd):
    optimizer = optax.adam(0.5)
    step = jax.jit(make_step(make_grads(lambda p, x: LossSum((p * x).sum(), x.size)), optimizer))
    state, _ = step(init_state(jnp.ones(3), optimizer), jnp.arange(3.0))
    after, metrics = step(state, jnp.array([1.0, odd, 1.0]))
    assert metrics["train/skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, after._replace(step=0), state._replace(step=0))
    assert after.step == state.step + 1
    assert step(after, jnp.arange(3.0))[1]["train/skipped"] == 0


def test_a_gradient_above_the_norm_that_is_allowed_is_skipped_before_any_clipping():
    """The optimizer clips to 1: what is judged is the norm of 5 that came."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.5))
    grads = make_grads(lambda p, x: LossSum((p * x).sum(), jnp.ones((), jnp.int32)))
    batch, start = jnp.array([3.0, 4.0]), init_state(jnp.ones(2), optimizer)
    for skip_norm, skipped in ((5.1, 0), (4.9, 1)):
        step = jax.jit(make_step(grads, optimizer, skip_norm=skip_norm))
        after, metrics = step(start, batch)
        assert (metrics["train/grad_norm"], metrics["train/skipped"]) == (5.0, skipped)
        same = [
            np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (after, start)), strict=True)
        ]
        assert sum(same) == (len(same) - 1 if skipped else 0)
        assert after.step == 1


@pytest.mark.parametrize("accumulation", [2, 3, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_the_whole_however_few_of_their_targets_count(accumulation, dtype):
    """One denominator for all: a mean of means would weigh the targets of a poor part more."""
    draw = np.random.default_rng(0)
    params = {"w": jnp.asarray(draw.normal(size=4), dtype)}
    batch = jnp.asarray(draw.normal(size=(12, 4)), jnp.float32), jnp.arange(12) % 4 == 0

    def loss_sum(params, batch):
        x_BD, mask_B = batch
        losses_B = (x_BD * params["w"].astype(jnp.float32) ** 2).sum(-1)
        return LossSum(jnp.where(mask_B, losses_B, 0.0).sum(), mask_B.sum())

    optimizer = optax.sgd(0.5)
    state = init_state(params, optimizer)
    wanted, whole = jax.jit(make_step(make_grads(loss_sum), optimizer))(state, batch)
    in_parts = make_step(make_grads(loss_sum, accumulation=accumulation), optimizer)
    found, metrics = jax.jit(in_parts)(state, batch)
    limit = 1e-6 if dtype == "float32" else 1e-2
    assert found.params["w"].dtype == dtype
    np.testing.assert_allclose(
        found.params["w"].astype(jnp.float32), wanted.params["w"].astype(jnp.float32), rtol=limit
    )
    assert metrics["train/tokens"] == whole["train/tokens"] == 3
    assert float(metrics["train/loss"]) == pytest.approx(float(whole["train/loss"]), rel=1e-6)
    norm = float(whole["train/grad_norm"])
    assert float(metrics["train/grad_norm"]) == pytest.approx(norm, rel=limit)
