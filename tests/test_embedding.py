import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringflash.config import MeshConfig
from ringflash.embedding import make_lookup
from ringflash.mesh import BATCH, make_mesh, put, spec_of

MESHES = {
    "one device": MeshConfig(1, 1, 1, 1),
    "context 8": MeshConfig(1, 1, 8, 1),
    "data 2, context 4": MeshConfig(2, 1, 4, 1),
    "data 2, fsdp 2, context 2": MeshConfig(2, 2, 2, 1),
    "fsdp 2, context 2, tensor 2": MeshConfig(1, 2, 2, 2),
    "data 2, context 2, tensor 2": MeshConfig(2, 1, 2, 2),
    "fsdp 2, tensor 4": MeshConfig(1, 2, 1, 4),
    "tensor 8": MeshConfig(1, 1, 1, 8),
}
# V and D that divide over the axes of a mesh, and that do not.
SIZES = {"both divide": (24, 16), "D does not": (24, 6), "V does not": (23, 16), "none": (9, 7)}


def placed(mesh, sizes, dtype="float32", B=4, T=16):
    """The look-up, and a table, tokens and weights where a run has them."""
    draw, split = np.random.default_rng(0), spec_of("embedding_VD", sizes, mesh)
    tokens = draw.integers(0, sizes[0], (B, T)).astype(np.int32)
    table, weights = (draw.normal(size=s).astype(np.float32) for s in (sizes, (B, T, sizes[1])))
    lookup = make_lookup(mesh, axes=BATCH, split=split, dtype=dtype)
    table = jax.device_put(table, jax.NamedSharding(mesh, split))
    return lookup, table, *put([tokens, weights], mesh)


def mesh_of(name):
    config = MESHES[name]
    size = config.data * config.fsdp * config.context * config.tensor
    return make_mesh(config, jax.devices()[:size])


def total(lookup, table, tokens, weights):
    """Something whose slope is another for each entry of x."""
    return (jnp.sin(lookup(table, tokens)) * weights).sum()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MESHES)
def test_rows_and_gradients_are_those_of_a_whole_table(name, sizes):
    lookup, table, tokens, weights = placed(mesh_of(name), SIZES[sizes])
    found = jax.jit(lookup)(table, tokens)
    np.testing.assert_array_equal(found, np.asarray(table)[np.asarray(tokens)])

    def slope(lookup, *args):
        return jax.jit(jax.grad(functools.partial(total, lookup)))(*args)

    wanted = slope(lambda table, tokens: table[tokens], *map(np.asarray, (table, tokens, weights)))
    got = slope(lookup, table, tokens, weights)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert got.dtype == table.dtype


@pytest.mark.parametrize("name", ["one device", "context 8", "fsdp 2, context 2, tensor 2"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_rows_are_cast_and_their_gradients_added_up_in_fp32(name, param_dtype):
    """1,024 times one token: in bfloat16 a sum stands still once it is 256 times its parts."""
    lookup, table, tokens, _ = placed(mesh_of(name), (24, 16), "bfloat16", B=4, T=256)
    table, tokens = table.astype(param_dtype), jnp.zeros_like(tokens)
    assert lookup(table, tokens).dtype == jnp.bfloat16
    grad = jax.jit(jax.grad(lambda table: lookup(table, tokens).astype(jnp.float32).sum()))(table)
    assert grad.dtype == param_dtype
    np.testing.assert_array_equal(np.float32(grad[0]), 1024)
    assert not np.float32(grad[1:]).any()


@pytest.mark.parametrize("name", ["one device", "fsdp 2, context 2, tensor 2"])
def test_an_id_outside_the_table_gives_zeros_and_takes_no_gradient(name):
    lookup, table, tokens, weights = placed(mesh_of(name), (24, 16))
    tokens = jnp.where(jnp.arange(16) % 2 == 0, tokens, jnp.where(tokens < 12, -1, 24))
    found = np.asarray(lookup(table, tokens))
    assert found[:, ::2].all()
    assert not found[:, 1::2].any()
    grad = jax.grad(lambda table: lookup(table, tokens).sum())(table)
    assert float(grad.sum()) == 4 * 8 * 16
    assert weights.shape == found.shape


@pytest.mark.parametrize("name", ["context 8", "fsdp 2, context 2, tensor 2"])
def test_no_device_has_the_table_or_all_states(name):
    """In the compiled program, forward and backward, no array is as large as either."""
    V, D, B, T = 512, 64, 4, 128
    args = placed(mesh_of(name), (V, D), B=B, T=T)
    run = jax.jit(jax.grad(functools.partial(total, args[0])))
    text = run.lower(*args[1:]).compile().as_text()
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", text)}
    sizes = {int(np.prod(dims)) for dims in shapes}
    assert V * D // 8 in sizes, "the device's own part"
    assert max(sizes) <= max(V * D // 8, B * T * D // 4), sorted(sizes)[-3:]
