"""A model's arithmetic, against its matrix products counted one by one in the traced program."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny import tiny

from ringflash.build import abstract_batch, loss_sum, make_model
from ringflash.flops import causal_pairs, matmul_parameters, step_flops
from ringflash.mesh import make_mesh
from ringflash.model.transformer import Decoder

ONE = {"mesh__context": 1, "loss__chunk": 16, "loss__vocab_chunk": 129}


def products(jaxpr, times=1):
    """FLOPs of every product of matrices: as often as its loops run."""
    total = 0
    for one in jaxpr.eqns:
        assert one.primitive.name not in ("while", "cond"), one
        if one.primitive.name == "dot_general":
            (over, _), _ = one.params["dimension_numbers"]
            depth = math.prod(one.invars[0].aval.shape[dim] for dim in over)
            total += times * 2 * one.outvars[0].aval.size * depth
        turns = one.params.get("length", 1) if one.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(one.params, is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                total += products(getattr(inner, "jaxpr", inner), times * turns)
    return total


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_the_count_by_hand_is_right():
    """3 products of [2, 5] and [5, 4], and one of [7, 2] and [2, 4]."""

    def f(x, y, z):
        _, many = jax.lax.scan(lambda carry, _: (carry, x @ y), 0, length=3)
        return z @ jax.jit(lambda a: a)(many[0])

    shapes = [jnp.zeros(shape) for shape in ((2, 5), (5, 4), (7, 2))]
    found = products(jax.make_jaxpr(f)(*shapes).jaxpr)
    assert found == 3 * 2 * 2 * 4 * 5 + 2 * 7 * 4 * 2


@pytest.mark.parametrize("changes", [{}, {"model__tied_embeddings": False, "model__layers": 3}])
def test_the_forward_has_the_products_that_are_counted(changes):
    """The reference kernel multiplies all pairs, seen or not: B T^2 in a layer."""
    config = tiny("stdlib", **ONE, attention__kernel="reference", **changes)
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    graph, init = make_model(config, mesh)
    loss = partial(loss_sum, graph, config.loss, mesh)
    traced = jax.make_jaxpr(loss)(jax.eval_shape(init), abstract_batch(config, mesh))
    B, T = config.global_batch_size, config.seq_len
    assert 3 * products(traced.jaxpr) == step_flops(config.model, B * T, B * T * T)


def test_a_backward_is_two_forwards():
    """Of the decoder and its logits, with attention that JAX differentiates itself."""
    config = tiny("stdlib", **ONE)
    B, T = config.global_batch_size, config.seq_len

    def attention(q, k, v, positions, segments):
        group = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def build():
        return Decoder(config.model, attention, nnx.Rngs(0))

    graph, params = nnx.split(nnx.eval_shape(build))
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def logits(params, tokens):
        model = nnx.merge(graph, params)
        return (model(tokens, tokens, tokens) @ model.unembedding()).sum()

    forward, both = (
        products(jax.make_jaxpr(f)(params, tokens).jaxpr) for f in (logits, jax.grad(logits))
    )
    assert both == 3 * forward == step_flops(config.model, B * T, B * T * T)


def test_parameters_that_are_multiplied():
    """Llama 3 8B has 8.03e9 parameters; the embedding's table and the norms are only looked up."""
    model = tiny("stdlib").model
    llama = dataclasses.replace(
        model, layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, head_dim=128,
        vocab_size=128256,
    )  # fmt: skip
    assert matmul_parameters(llama) == 8_030_261_248 - 128256 * 4096 - 65 * 4096


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
def test_causal_pairs(tokens):
    assert causal_pairs(tokens) == sum(
        key <= query for query in range(tokens) for key in range(tokens)
    )
