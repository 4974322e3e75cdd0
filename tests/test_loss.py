import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringflash.config import MeshConfig
from ringflash.logits import Cut, chunks, columns
from ringflash.loss import counted, summed_loss, token_losses
from ringflash.mesh import BATCH, make_mesh, put, spec_of

MESHES = {1: MeshConfig(1, 1, 1, 1), 4: MeshConfig(1, 1, 2, 2), 8: MeshConfig(2, 1, 4, 1)}
# B, T, D, V, chunk, vocab_chunk: chunks that divide a shard's tokens, that do not, and that are larger.
SHAPES = [
    (2, 8, 3, 5, 2, 5),
    (2, 8, 3, 5, 3, 2),
    (4, 12, 6, 17, 100, 7),
    (2, 24, 5, 2, 4, 100),
    (2, 4, 4, 9, 1, 1),
]
MASKS = {
    "all": lambda draw, mask: mask.fill(True),
    "none": lambda draw, mask: mask.fill(False),
    "one": lambda draw, mask: mask.flat.__setitem__(draw.integers(mask.size), True),
    "some": lambda draw, mask: mask.__setitem__(..., draw.random(mask.shape) < 0.5),
    "one shard": lambda draw, mask: mask[:, : mask.shape[1] // 4].fill(True),
}


def drawn(shape, kind="some", seed=0, dtype=jnp.float32):
    """x_BTD, w_DV, targets_BT and mask_BT."""
    draw, (B, T, D, V, *_) = np.random.default_rng(seed), shape
    mask = np.zeros((B, T), bool)
    MASKS[kind](draw, mask)
    x, w = draw.normal(size=(B, T, D)), draw.normal(size=(D, V))
    return (*(jnp.array(a, dtype) for a in (x, w)), draw.integers(0, V, (B, T)), mask)


def plain(x, w, targets, mask, z_loss=0.0):
    """The definition: all logits at once."""
    logits = jnp.einsum("btd,dv->btv", x, w, preferred_element_type=jnp.float32)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    losses += z_loss * jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(mask, losses, 0.0).sum()


plain_grads = jax.jit(jax.value_and_grad(plain, (0, 1)))


@functools.cache
def mesh_of(devices):
    return make_mesh(MESHES[devices], jax.devices()[:devices])


def cut_of(mesh, shape):
    *_, D, V, chunk, vocab_chunk = shape
    return Cut(mesh, BATCH, spec_of("unembedding_DV", (D, V), mesh), chunk, vocab_chunk)


def summed(mesh, shape, z_loss=0.0):
    """(x, w, targets, mask) -> what to minimise."""
    cut = cut_of(mesh, shape)
    return lambda *args: summed_loss(*args, cut=cut, z_loss=z_loss)[0]


@functools.cache
def chunked(devices, shape):
    """value_and_grad of the sum in chunks on that many devices, jitted."""
    return jax.jit(jax.value_and_grad(summed(mesh_of(devices), shape), (0, 1)))


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
    found = chunked(devices, shape)(*on_mesh(devices, *given_))
    assert_near(found, plain_grads(*given_))
    if kind == "none":
        assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(found))


def test_devices_that_hold_copies_do_not_count_twice():
    """Over `tensor` every device holds the same tokens."""
    given_ = drawn(SHAPES[0])
    assert_near(chunked(4, SHAPES[0])(*on_mesh(4, *given_)), plain_grads(*given_))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("where", [0, 7, 15], ids="at {}".format)
def test_one_target_that_counts_weighs_the_same_on_any_shard(devices, where):
    """The mean of one target over eight shards is that target's loss, not an eighth of it."""
    x, w, targets, _ = drawn(SHAPES[0])
    mask = np.zeros(targets.shape, bool)
    mask.flat[where] = True
    total = summed(mesh_of(devices), SHAPES[0])

    def mean(x, w, targets, mask):
        return total(x, w, targets, mask) / jnp.maximum(mask.sum(), 1)

    found = jax.jit(jax.value_and_grad(mean, (0, 1)))(*on_mesh(devices, x, w, targets, mask))
    assert_near(found, plain_grads(x, w, targets, mask))


def test_the_gradient_follows_what_comes_after():
    given_ = drawn(SHAPES[0])
    total = summed(mesh_of(1), SHAPES[0])
    found = jax.grad(lambda x, w: jnp.sin(total(x, w, *given_[2:])), (0, 1))(*given_[:2])
    wanted = jax.grad(lambda x, w: jnp.sin(plain(x, w, *given_[2:])), (0, 1))(*given_[:2])
    assert_near(found, wanted)


@pytest.mark.parametrize("devices", [1, 8])
def test_losses_of_tokens_are_the_plain_ones(devices):
    x, w, targets, mask = on_mesh(devices, *drawn(SHAPES[1]))
    cut = cut_of(mesh_of(devices), SHAPES[1])
    found = token_losses(x, w, targets, cut=cut)
    logits = np.asarray(x) @ np.asarray(w)
    wanted = -jax.nn.log_softmax(logits)[(*np.indices(targets.shape), np.asarray(targets))]
    assert found.dtype == jnp.float32
    assert_near(found, wanted)
    # Without a gradient the sum is made of these.
    total = summed_loss(x, w, targets, mask, cut=cut)
    assert_near(total, [np.where(mask, wanted, 0).sum()] * 2)


@pytest.mark.parametrize("vocab_chunk", [50, 20])
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_bfloat16_is_no_worse_than_plain_bfloat16(devices, vocab_chunk):
    shape = (2, 64, 32, 50, 16, vocab_chunk)
    low = drawn(shape, dtype=jnp.bfloat16)
    exact = plain_grads(*(jnp.asarray(a, jnp.float32) for a in low[:2]), *low[2:])
    found = chunked(devices, shape)(*on_mesh(devices, *low))
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


MIXES = {
    "data 2, context 4": MeshConfig(2, 1, 4, 1),
    "context 8": MeshConfig(1, 1, 8, 1),
    "fsdp 2, context 2, tensor 2": MeshConfig(1, 2, 2, 2),
    "data 2, context 2, tensor 2": MeshConfig(2, 1, 2, 2),
    "fsdp 2, tensor 4": MeshConfig(1, 2, 1, 4),
}
# D and V that divide over the axes of a mesh, and that do not; a device's columns are no whole chunks of 5.
SIZES = {"both divide": (16, 28), "D does not": (6, 28), "V does not": (16, 27), "none": (7, 9)}


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("vocab_chunk", [100, 5])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("mix", MIXES)
def test_every_mesh_finds_the_plain_sum_and_gradients(mix, sizes, vocab_chunk, z_loss):
    """Each device has the parts of W that parameters have, and what is whole counts once."""
    mesh, shape = make_mesh(MIXES[mix]), (4, 8, *SIZES[sizes], 3, vocab_chunk)
    x, w, targets, mask = drawn(shape)
    targets[0, :3], mask[0, :3] = (-1, -100, -(2**31)), True
    split = cut_of(mesh, shape).split
    given_ = put([targets.astype(np.int32), mask], mesh)
    found = jax.jit(jax.value_and_grad(summed(mesh, shape, z_loss), (0, 1)))(
        jax.device_put(x, jax.NamedSharding(mesh, BATCH)),
        jax.device_put(w, jax.NamedSharding(mesh, split)),
        *given_,
    )
    counts = np.asarray(counted(targets, mask))
    assert counts.sum() == mask.sum() - 3
    assert_near(found, plain_grads(x, w, np.maximum(targets, 0), counts, z_loss))


@pytest.mark.parametrize("vocab_chunk", [100, 2])
def test_the_z_loss_is_minimised_and_not_told(vocab_chunk):
    shape = (*SHAPES[0][:-1], vocab_chunk)
    x, w, targets, mask = drawn(shape)

    def both(x, w):
        return summed_loss(x, w, targets, mask, cut=cut_of(mesh_of(1), shape), z_loss=0.1)

    (objective, told), grads = jax.value_and_grad(both, (0, 1), has_aux=True)(x, w)
    assert_near((objective, grads), plain_grads(x, w, targets, mask, 0.1))
    assert_near(told, plain(x, w, targets, mask))
    assert_near(both(x, w), (objective, told))
    assert objective > told + 0.1
    assert not np.asarray(jax.grad(lambda x: both(x, w)[1])(x)).any()


def test_a_negative_target_counts_for_nothing_and_one_too_large_is_seen():
    shape = SHAPES[1]
    x, w, targets, mask = drawn(shape, "all")
    cut = cut_of(mesh_of(1), shape)
    targets[0, 0], targets[1, 1] = -1, -100
    losses = np.asarray(token_losses(x, w, targets, cut=cut))
    assert losses[0, 0] == losses[1, 1] == 0
    total = summed(mesh_of(1), shape)
    slope = np.asarray(jax.grad(total)(x, w, targets, mask))
    assert not slope[0, 0].any()
    assert not slope[1, 1].any()
    assert slope[0, 1].any()
    targets[0, 1] = w.shape[1]
    assert np.isnan(total(x, w, targets, mask))
    mask[0, 1] = False
    assert np.isfinite(total(x, w, targets, mask))


@pytest.mark.parametrize("vocab_chunk", [100, 5])
@pytest.mark.parametrize("devices", [1, 4])
def test_large_logits_do_not_overflow(devices, vocab_chunk):
    """exp(logit) would be infinite for some chunks and 0 for others."""
    shape = (2, 8, 4, 24, 3, vocab_chunk)
    x, w, targets, mask = drawn(shape, "all")
    x, w = x * 10, w * jnp.linspace(-1, 10, 24)
    found = chunked(devices, shape)(*on_mesh(devices, x, w, targets, mask))
    wanted = plain_grads(x, w, targets, mask)
    assert 200 < np.asarray(x @ w).max() < 1000
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("vocab_chunk", [97, 10])
def test_no_array_of_all_logits_exists(vocab_chunk):
    """In the compiled program whatever is V long has at most a chunk's, or D, rows of it."""
    B, T, D, V, chunk, _ = shape = (2, 64, 6, 97, 4, vocab_chunk)
    given_ = on_mesh(8, *drawn(shape))
    text = chunked(8, shape).lower(*given_).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)}
    rows = {np.prod(dims) // V for dims in shapes if V in dims}
    assert max(rows) == max(D, chunk if vocab_chunk == V else 0) < B * T // 8, sorted(rows)


@pytest.mark.parametrize(
    ("V", "vocab_chunk", "wanted"), [(6, 6, (1, 6)), (6, 9, (1, 6)), (7, 4, (2, 4)), (9, 4, (3, 3))]
)
def test_columns_are_filled_up_as_little_as_may_be(V, vocab_chunk, wanted):
    w = jnp.arange(2 * V, dtype=jnp.float32).reshape(2, V)
    cut = cut_of(mesh_of(1), (2, V, 1, vocab_chunk))
    found, first = columns(w, cut, jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    assert (len(found), found.shape[2]) == wanted
    assert first.tolist() == [n * wanted[1] for n in range(wanted[0])]
    joined = np.float32(jnp.concatenate(list(found), 1))
    np.testing.assert_array_equal(joined[:, :V], w)
    assert not joined[:, V:].any()


@pytest.mark.parametrize(
    ("tokens", "chunk", "wanted"), [(6, 4, (2, 4)), (6, 3, (2, 3)), (6, 9, (1, 6))]
)
def test_chunks_are_filled_up_with_zeros(tokens, chunk, wanted):
    x = jnp.arange(1, tokens + 1).reshape(2, -1)
    found = np.asarray(chunks(x, chunk))
    assert found.shape == wanted
    np.testing.assert_array_equal(found.reshape(-1)[:tokens], np.arange(1, tokens + 1))
    assert not found.reshape(-1)[tokens:].any()
