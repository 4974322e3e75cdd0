import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.config import MeshConfig
from ringflash.loss import chunks, summed_loss, token_losses
from ringflash.mesh import BATCH, make_mesh, put

MESHES = {1: MeshConfig(1, 1, 1, 1), 4: MeshConfig(1, 1, 2, 2), 8: MeshConfig(2, 1, 4, 1)}
# B, T, D, V, chunk: chunks that divide a shard's tokens, that do not, and that are larger.
SHAPES = [(2, 8, 3, 5, 2), (2, 8, 3, 5, 3), (4, 12, 6, 17, 100), (2, 24, 5, 2, 4), (2, 4, 4, 9, 1)]
MASKS = {
    "all": lambda draw, mask: mask.fill(True),
    "none": lambda draw, mask: mask.fill(False),
    "one": lambda draw, mask: mask.flat.__setitem__(draw.integers(mask.size), True),
    "some": lambda draw, mask: mask.__setitem__(..., draw.random(mask.shape) < 0.5),
    "one shard": lambda draw, mask: mask[:, : mask.shape[1] // 4].fill(True),
}


def drawn(shape, kind="some", seed=0, dtype=jnp.float32):
    """x_BTD, w_DV, targets_BT and mask_BT."""
    draw, (B, T, D, V, _) = np.random.default_rng(seed), shape
    mask = np.zeros((B, T), bool)
    MASKS[kind](draw, mask)
    x, w = draw.normal(size=(B, T, D)), draw.normal(size=(D, V))
    return (*(jnp.array(a, dtype) for a in (x, w)), draw.integers(0, V, (B, T)), mask)


def plain(x, w, targets, mask):
    """The definition: all logits at once."""
    logits = jnp.einsum("btd,dv->btv", x, w, preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.where(mask, losses, 0.0).sum()


plain_grads = jax.jit(jax.value_and_grad(plain, (0, 1)))


@functools.cache
def mesh_of(devices):
    return make_mesh(MESHES[devices], jax.devices()[:devices])


@functools.cache
def chunked(devices, chunk):
    """value_and_grad of the sum in chunks on that many devices, jitted."""
    total = functools.partial(summed_loss, chunk=chunk, mesh=mesh_of(devices), axes=BATCH)
    return jax.jit(jax.value_and_grad(total, (0, 1)))


def on_mesh(devices, x, w, targets, mask):
    targets, mask = put([targets.astype(np.int32), mask], mesh_of(devices))
    return jax.device_put(x, jax.NamedSharding(mesh_of(devices), BATCH)), w, targets, mask


def assert_near(found, wanted, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(SHAPES), st.sampled_from(sorted(MASKS)), st.integers(0, 2**31))
@pytest.mark.parametrize("devices", [1, 8])
def test_the_sum_and_its_gradients_are_the_plain_ones(devices, shape, kind, seed):
    given_ = drawn(shape, kind, seed)
    found = chunked(devices, shape[-1])(*on_mesh(devices, *given_))
    assert_near(found, plain_grads(*given_))
    if kind == "none":
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(found))


def test_devices_that_hold_copies_do_not_count_twice():
    """Over `tensor` every device holds the same tokens."""
    given_ = drawn(SHAPES[0])
    assert_near(chunked(4, 2)(*on_mesh(4, *given_)), plain_grads(*given_))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("where", [0, 7, 15], ids="at {}".format)
def test_one_target_that_counts_weighs_the_same_on_any_shard(devices, where):
    """The mean of one target over eight shards is that target's loss, not an eighth of it."""
    x, w, targets, _ = drawn(SHAPES[0])
    mask = np.zeros(targets.shape, bool)
    mask.flat[where] = True
    total = functools.partial(summed_loss, chunk=2, mesh=mesh_of(devices), axes=BATCH)

    def mean(x, w, targets, mask):
        return total(x, w, targets, mask) / jnp.maximum(mask.sum(), 1)

    found = jax.jit(jax.value_and_grad(mean, (0, 1)))(*on_mesh(devices, x, w, targets, mask))
    assert_near(found, plain_grads(x, w, targets, mask))


def test_the_gradient_follows_what_comes_after():
    given_ = drawn(SHAPES[0])
    total = functools.partial(summed_loss, chunk=3, mesh=mesh_of(1), axes=BATCH)
    found = jax.grad(lambda x, w: jnp.sin(total(x, w, *given_[2:])), (0, 1))(*given_[:2])
    wanted = jax.grad(lambda x, w: jnp.sin(plain(x, w, *given_[2:])), (0, 1))(*given_[:2])
    assert_near(found, wanted)


@pytest.mark.parametrize("devices", [1, 8])
def test_losses_of_tokens_are_the_plain_ones(devices):
    x, w, targets, mask = on_mesh(devices, *drawn(SHAPES[1]))
    found = token_losses(x, w, targets, chunk=3, mesh=mesh_of(devices), axes=BATCH)
    logits = np.asarray(x) @ np.asarray(w)
    wanted = -jax.nn.log_softmax(logits)[(*np.indices(targets.shape), np.asarray(targets))]
    assert found.dtype == jnp.float32
    assert_near(found, wanted)
    # Without a gradient the sum is made of these.
    total = summed_loss(x, w, targets, mask, chunk=3, mesh=mesh_of(devices), axes=BATCH)
    assert_near(total, np.where(mask, wanted, 0).sum())


@pytest.mark.parametrize("devices", [1, 8])
def test_bfloat16_is_no_worse_than_plain_bfloat16(devices):
    shape = (2, 64, 32, 50, 16)
    low = drawn(shape, dtype=jnp.bfloat16)
    exact = plain_grads(*(jnp.asarray(a, jnp.float32) for a in low[:2]), *low[2:])
    found = chunked(devices, 16)(*on_mesh(devices, *low))
    assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [
        jnp.float32,
        jnp.bfloat16,
        jnp.bfloat16,
    ]

    def error(grads):
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True)
        return np.array([np.abs(np.float32(a) - np.float32(b)).max() for a, b in pairs])

    slack = np.array([1e-3, 0, 0])  # the sums in fp32 differ by their order alone
    assert (error(found) <= 2 * error(plain_grads(*low)) + slack).all()


def test_no_array_of_all_logits_exists():
    """In the compiled program whatever is V long has at most a chunk's, or D, rows of it."""
    B, T, D, V, chunk = shape = (2, 64, 6, 97, 4)
    given_ = on_mesh(8, *drawn(shape))
    text = chunked(8, chunk).lower(*given_).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)}
    rows = {np.prod(dims) // V for dims in shapes if V in dims}
    assert max(rows) == max(D, chunk) < B * T // 8, sorted(rows)


@pytest.mark.parametrize(
    ("tokens", "chunk", "wanted"), [(6, 4, (2, 4)), (6, 3, (2, 3)), (6, 9, (1, 6))]
)
def test_chunks_are_filled_up_with_zeros(tokens, chunk, wanted):
    x = jnp.arange(1, tokens + 1).reshape(2, -1)
    found = np.asarray(chunks(x, chunk))
    assert found.shape == wanted
    np.testing.assert_array_equal(found.reshape(-1)[:tokens], np.arange(1, tokens + 1))
    assert not found.reshape(-1)[tokens:].any()
