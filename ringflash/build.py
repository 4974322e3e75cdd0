"""From a configuration to the training step: the model, its loss, its update. No data, no devices touched.

What is jitted for a run is what `ringflash plan` compiles for a slice that is not there.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import (
    Axes,
    Causal,
    Segments,
    Spec,
    Tokens,
    attend,
    compiler_options,
    make_kernel,
)
from ringflash.attention.attend import request
from ringflash.config import Config, LossConfig
from ringflash.data.batch import Batch, padding_rows
from ringflash.embedding import make_lookup
from ringflash.logits import Cut
from ringflash.loss import counted, summed_loss, token_losses
from ringflash.mesh import BATCH, BATCH_AXES, extent, shardings, spec_of
from ringflash.model.layers import Pieces, at_once
from ringflash.model.matmul import make_product
from ringflash.model.transformer import Decoder
from ringflash.optimizer import make_optimizer
from ringflash.plan.auto import Choice, strategy_for
from ringflash.step import LossSum, State, init_state, make_grads, make_step

log = logging.getLogger(__name__)

Array = jax.Array
Step = Callable[[State, Batch], tuple[State, dict[str, Array]]]
ATTENTION_AXES = Axes(BATCH_AXES, ("context",), ("tensor",))


@dataclass(frozen=True)
class Built:
    """A training step and its state. `abstract_state` has the shape, dtype and sharding of every leaf."""

    graph: nnx.GraphDef
    abstract_state: State
    init: jax.stages.Wrapped  # () -> State
    step: jax.stages.Wrapped  # (State, Batch) -> (State, metrics); the state is donated


def build(config: Config, mesh: Mesh) -> Built:
    """The step of this configuration on this mesh, whose devices need not be there."""
    graph, init_params = make_model(config, mesh)
    optimizer = make_optimizer(config.optimizer)

    def init() -> State:
        return init_state(init_params(), optimizer)

    abstract = jax.eval_shape(init)
    placed = shardings(abstract, mesh)
    step = make_step(
        grads_of(config, graph, mesh, placed.params),
        optimizer,
        skip_norm=config.skip_norm or math.inf,
    )
    if config.optimizer.offload:
        step, placed = fetching(step, placed), on_host(placed)
    step = jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(placed, NamedSharding(mesh, P())),
        compiler_options=compiler_options(mesh),
    )
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed
    )
    return Built(graph, abstract, jax.jit(init, out_shardings=placed), step)


def on_host(placed: State) -> State:
    """Shardings with the optimizer's in the memory of the hosts that the devices belong to."""
    host = jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), placed.opt_state)
    return placed._replace(opt_state=host)


def fetching(step: Step, placed: State) -> Step:
    """The step with the optimizer's state brought to the devices first; `out_shardings` takes it back.

    It keeps its name, by which a profile and the compiler's dump call the program.
    """

    @functools.wraps(step)
    def fetched(state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        here = jax.device_put(state.opt_state, placed.opt_state)
        return step(state._replace(opt_state=here), batch)

    return fetched


def abstract_batch(config: Config, mesh: Mesh) -> Batch:
    """The batch of a step, shapes and shardings alone."""
    size = (config.global_batch_size, config.seq_len)
    placed = NamedSharding(mesh, BATCH)
    row = padding_rows(1, seq_len=1)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(size, x.dtype, sharding=placed), row)


def make_model(config: Config, mesh: Mesh) -> tuple[nnx.GraphDef, Callable[[], Any]]:
    """The model's structure, and the function that draws its parameters."""

    def attention(
        q: Array, k: Array, v: Array, positions_BT: Array, segment_ids_BT: Array
    ) -> Array:
        return attend(
            q,
            k,
            v,
            at=Tokens(positions_BT, segment_ids_BT),
            mask=Causal(),
            kernel=config.attention.kernel,
            strategy=strategy_of(config, mesh).strategy,
            mesh=mesh,
            axes=ATTENTION_AXES,
        )

    model = config.model
    split = spec_of("embedding_VD", (model.vocab_size, model.width), mesh)
    lookup = make_lookup(mesh, axes=BATCH, split=split, dtype=model.dtype)

    product = make_product(
        model.matmul, rows=extent(BATCH_AXES, mesh), shards=mesh.shape["context"]
    )

    def build() -> Decoder:
        pieces = in_pieces(mesh, model.mlp_chunk)
        rngs = nnx.Rngs(config.seed)
        return Decoder(model, attention, rngs, lookup=lookup, pieces=pieces, product=product)

    graph = nnx.graphdef(nnx.eval_shape(build))
    return graph, lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param))


@functools.cache
def in_pieces(mesh: Mesh, chunk: int) -> Pieces:
    """The tokens of each shard in equal pieces of at most `chunk`, one after another, each computed again in
    the backward: blockwise parallel transformer (arXiv:2305.19370). chunk 0: all at once."""
    if not chunk:
        return at_once

    def run(f: Callable[[Array], Array], x_BTD: Array) -> Array:
        B, T, D = x_BTD.shape
        shards = mesh.shape["context"]
        count = pieces_of(T // shards, chunk)
        if count == 1:
            return f(x_BTD)
        own = NamedSharding(mesh, P(None, BATCH_AXES, "context"))
        x = x_BTD.reshape(B, shards, count, -1, D).transpose(2, 0, 1, 3, 4)
        x = jax.lax.with_sharding_constraint(x, own)
        y = jax.lax.map(jax.checkpoint(f), x)
        return y.transpose(1, 2, 0, 3, 4).reshape(B, T, D)

    return run


def pieces_of(tokens: int, chunk: int) -> int:
    """The least number of equal pieces, none longer than `chunk`."""
    return next(n for n in range(1, tokens + 1) if tokens % n == 0 and tokens // n <= chunk)


def hidden(graph: nnx.GraphDef, params: Any, batch: Batch) -> tuple[Array, Array]:
    """The states that logits are made of, [B, T, D], and the matrix that makes them, [D, V]."""
    model = nnx.merge(graph, params)
    return model(batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT), model.unembedding()


def cut_of(loss: LossConfig, unembedding_DV: Array, mesh: Mesh) -> Cut:
    """How the loss is cut up. Tied, the unembedding lies as the embedding transposed: the same way."""
    split = spec_of("unembedding_DV", unembedding_DV.shape, mesh)
    return Cut(mesh, BATCH, split, loss.chunk, loss.vocab_chunk)


def loss_sum(
    graph: nnx.GraphDef, loss: LossConfig, mesh: Mesh, params: Any, batch: Batch
) -> LossSum:
    """The loss over the batch, as sums and count."""
    x_BTD, w_DV = hidden(graph, params, batch)
    objective, total = summed_loss(
        x_BTD,
        w_DV,
        batch.targets_BT,
        batch.loss_mask_BT,
        cut=cut_of(loss, w_DV, mesh),
        z_loss=loss.z_loss,
    )
    return LossSum(total, counted(batch.targets_BT, batch.loss_mask_BT).sum(), objective)


def grads_of(
    config: Config, graph: nnx.GraphDef, mesh: Mesh, placed: Any
) -> Callable[[Any, Batch], tuple[LossSum, Any]]:
    """(params, batch) -> sums and gradients, as a step has them. placed: the shardings of the parameters."""
    return make_grads(
        partial(loss_sum, graph, config.loss, mesh),
        accumulation=config.accumulation,
        place=lambda grads: jax.lax.with_sharding_constraint(grads, placed),
    )


def batch_losses(
    graph: nnx.GraphDef, loss: LossConfig, mesh: Mesh, params: Any, batch: Batch
) -> Array:
    """The loss of each target in nats, [B, T]; never with the z-loss."""
    x_BTD, w_DV = hidden(graph, params, batch)
    return token_losses(x_BTD, w_DV, batch.targets_BT, cut=cut_of(loss, w_DV, mesh))


def serving_kernel(config: Config, mesh: Mesh) -> str:
    """The kernel that will run. Raises ValueError, with each candidate's reason, where none can."""
    model = config.model

    def rows(heads: int) -> jax.ShapeDtypeStruct:
        shape = (
            config.global_batch_size // config.accumulation,
            config.seq_len,
            heads,
            model.head_dim,
        )
        return jax.ShapeDtypeStruct(shape, model.dtype)

    q, kv = rows(model.heads), rows(model.kv_heads)
    asked = request(q, kv, kv, Spec(Causal() & Segments()), mesh, ATTENTION_AXES)
    return make_kernel(config.attention.kernel, asked).name


@functools.cache
def strategy_of(config: Config, mesh: Mesh) -> Choice:
    """What shards meet by; for "auto" the quickest by forecast, which is logged, once."""
    model, attention = config.model, config.attention
    if attention.strategy != "auto":
        return Choice(attention.strategy, "")
    choice = strategy_for(
        mesh,
        Causal(),
        attention.layout,
        seq_len=config.seq_len,
        rows=rows_at_once(config, mesh),
        heads=model.heads // mesh.shape["tensor"],
        kv_heads=model.kv_heads // mesh.shape["tensor"],
        head_dim=model.head_dim,
    )
    log.info("attention strategy auto: %s (%s)", choice.strategy, choice.why)
    return choice


def rows_at_once(config: Config, mesh: Mesh) -> int:
    """Sequences that are worked on together, of those that one part of `data` and `fsdp` has."""
    return config.global_batch_size // config.accumulation // extent(BATCH_AXES, mesh)


def hop_bytes(config: Config, mesh: Mesh) -> int:
    """Bytes that a device sends in one hop: K, V, and 8 bytes a token for position and segment."""
    tokens = rows_at_once(config, mesh) * config.seq_len // mesh.shape["context"]
    heads = config.model.kv_heads // mesh.shape["tensor"]
    width = 2 * config.model.head_dim * np.dtype(jax.numpy.dtype(config.model.dtype)).itemsize
    return tokens * (heads * width + 8)
