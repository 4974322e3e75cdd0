"""From a configuration to the parts of a run. The only file that knows them all."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
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
    order_rows,
)
from ringflash.attention.attend import request
from ringflash.config import Config
from ringflash.data.batch import Batch
from ringflash.data.pipeline import EvalRows, Pipeline, eval_batches, train_pipeline
from ringflash.data.sources import make_source, split
from ringflash.data.tokenizers import check_vocab, make_tokenizer
from ringflash.evaluate import perplexity
from ringflash.loss import summed_loss, token_losses
from ringflash.mesh import BATCH, BATCH_AXES, extent, make_mesh, put, shardings
from ringflash.model.transformer import Decoder
from ringflash.optimizer import make_optimizer
from ringflash.plan.auto import Choice, strategy_for
from ringflash.ring_order import ring_hops
from ringflash.step import LossSum, State, init_state, make_grads, make_step

log = logging.getLogger(__name__)

Array = jax.Array
ATTENTION_AXES = Axes(BATCH_AXES, ("context",), ("tensor",))


@dataclass(frozen=True)
class Parts:
    """What a run is made of. `abstract_state` has the shape, dtype and sharding of every leaf."""

    mesh: Mesh
    abstract_state: State
    init: Callable[[], State]
    step: jax.stages.Wrapped  # (State, Batch) -> (State, metrics); the state is donated
    score: Callable[[Any], list[perplexity.Score]]
    train_data: Pipeline
    eval_rows: EvalRows
    put: Callable[[Batch], Batch]
    description: list[tuple[str, str]]


def assemble(config: Config, devices: Sequence[jax.Device] | None = None) -> Parts:
    """Everything but the run itself, on these devices (None: all there are).

    Raises ValueError for what cannot be put together.
    """
    mesh = make_mesh(config.mesh, devices)
    train_data, eval_rows = make_data(config, mesh)
    graph, init_params = make_model(config, mesh)
    optimizer = make_optimizer(config.optimizer)

    def init() -> State:
        return init_state(init_params(), optimizer)

    abstract = jax.eval_shape(init)
    placed = shardings(abstract, mesh)
    whole = NamedSharding(mesh, P())
    step = jax.jit(
        make_step(
            grads_of(config, graph, mesh, placed.params),
            optimizer,
            skip_norm=config.skip_norm or math.inf,
        ),
        donate_argnums=0,
        out_shardings=(placed, whole),
        compiler_options=compiler_options(mesh),
    )
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, placed
    )
    return Parts(
        mesh=mesh,
        abstract_state=abstract,
        init=jax.jit(init, out_shardings=placed),
        step=step,
        score=make_score(config, graph, mesh, eval_rows),
        train_data=train_data,
        eval_rows=eval_rows,
        put=partial(put, mesh=mesh),
        description=describe(config, mesh, abstract),
    )


def make_data(config: Config, mesh: Mesh) -> tuple[Pipeline, EvalRows]:
    """Training batches and held-out rows, in the layout's order of tokens."""
    tokenizer = make_tokenizer(config.data.tokenizer)
    check_vocab(tokenizer, config.model.vocab_size)
    train, held_out = split(make_source(config.data.source), config.data.held_out_percent)
    shards = mesh.shape["context"]

    def order(batch: Batch) -> np.ndarray:
        layout = config.attention.layout
        return order_rows(layout, batch.positions_BT, batch.segment_ids_BT, shards)

    train_data = train_pipeline(
        train,
        tokenizer,
        seq_len=config.seq_len,
        global_batch_size=config.global_batch_size,
        seed=config.seed,
        epochs=config.data.epochs,
        order=order,
    )
    eval_rows = eval_batches(
        held_out,
        tokenizer,
        seq_len=config.seq_len,
        batch_size=extent(BATCH_AXES, mesh),
        documents=config.eval.documents,
        order=order,
    )
    return train_data, eval_rows


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

    def build() -> Decoder:
        return Decoder(config.model, attention, nnx.Rngs(config.seed))

    graph = nnx.graphdef(nnx.eval_shape(build))
    return graph, lambda: nnx.to_pure_dict(nnx.state(build(), nnx.Param))


def restore_model(graph: nnx.GraphDef, params: Any, mesh: Mesh) -> Decoder:
    """The model with these parameters, the embedding gathered whole.

    Tokens are looked up in a table that is split as parameters are, over context too, by gathering
    the tokens of the whole sequence instead.
    """
    whole = jax.lax.with_sharding_constraint(params["embedding_VD"], NamedSharding(mesh, P()))
    model = nnx.merge(graph, params | {"embedding_VD": whole})
    assert isinstance(model, Decoder)
    return model


def loss_sum(graph: nnx.GraphDef, chunk: int, mesh: Mesh, params: Any, batch: Batch) -> LossSum:
    """The loss over the batch, as sum and count."""
    model = restore_model(graph, params, mesh)
    x_BTD = model(batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT)
    total = summed_loss(
        x_BTD,
        model.unembedding(),
        batch.targets_BT,
        batch.loss_mask_BT,
        chunk=chunk,
        mesh=mesh,
        axes=BATCH,
    )
    return LossSum(total, batch.loss_mask_BT.sum())


def grads_of(
    config: Config, graph: nnx.GraphDef, mesh: Mesh, placed: Any
) -> Callable[[Any, Batch], tuple[LossSum, Any]]:
    """(params, batch) -> sums and gradients, as a step has them. placed: the shardings of the parameters."""
    return make_grads(
        partial(loss_sum, graph, config.loss.chunk, mesh),
        accumulation=config.accumulation,
        place=lambda grads: jax.lax.with_sharding_constraint(grads, placed),
    )


def batch_losses(graph: nnx.GraphDef, chunk: int, mesh: Mesh, params: Any, batch: Batch) -> Array:
    """The loss of each target in nats, [B, T]."""
    model = restore_model(graph, params, mesh)
    x_BTD = model(batch.tokens_BT, batch.positions_BT, batch.segment_ids_BT)
    return token_losses(
        x_BTD, model.unembedding(), batch.targets_BT, chunk=chunk, mesh=mesh, axes=BATCH
    )


def make_score(
    config: Config, graph: nnx.GraphDef, mesh: Mesh, rows: EvalRows
) -> Callable[[Any], list[perplexity.Score]]:
    """params -> held-out scores, overall and by position."""
    bounds = perplexity.edges(config.seq_len)

    @partial(jax.jit, compiler_options=compiler_options(mesh))
    def sums(params: Any, batch: Batch, bytes_BT: Array) -> tuple[Array, Array, Array]:
        losses_BT = batch_losses(graph, config.loss.chunk, mesh, params, batch)
        return perplexity.bucket_sums(
            losses_BT, batch.positions_BT, batch.loss_mask_BT, bytes_BT, bounds
        )

    def score(params: Any) -> list[perplexity.Score]:
        pairs = zip(rows.batches, rows.target_bytes, strict=True)
        return perplexity.measure(sums, params, (put(pair, mesh) for pair in pairs), bounds)

    return score


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


def describe(config: Config, mesh: Mesh, state: State) -> list[tuple[str, str]]:
    """The start-up table: what runs, where, and what a hop of the ring carries."""
    model, attention = config.model, config.attention
    devices = mesh.devices.flat
    kind = devices[0].device_kind
    parameters = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(state.params))
    shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    taken, links = strategy_of(config, mesh).strategy, ring_hops(mesh)
    if taken != attention.strategy:
        taken = f"{attention.strategy}: {taken}"
    return [
        ("devices", f"{mesh.devices.size} x {kind} in {jax.process_count()} process(es)"),
        ("mesh", shape),
        ("kernel", serving_kernel(config, mesh)),
        ("strategy", f"{taken} over context={mesh.shape['context']}"),
        *([("links per hop", f"{links}, of the longest on the ring")] if links else []),
        ("layout", attention.layout),
        ("bytes per hop", f"{hop_bytes(config, mesh):,} per device, K and V of one layer"),
        ("tokens per step", f"{config.seq_len * config.global_batch_size:,}"),
        (
            "model",
            f"{model.preset}: {model.layers} layers, width {model.width}, "
            f"{model.heads}/{model.kv_heads} heads of {model.head_dim}",
        ),
        ("parameters", f"{parameters:,}"),
    ]


def rows_at_once(config: Config, mesh: Mesh) -> int:
    """Sequences that are worked on together, of those that one part of `data` and `fsdp` has."""
    return config.global_batch_size // config.accumulation // extent(BATCH_AXES, mesh)


def hop_bytes(config: Config, mesh: Mesh) -> int:
    """Bytes that a device sends in one hop: K, V, and 8 bytes a token for position and segment."""
    tokens = rows_at_once(config, mesh) * config.seq_len // mesh.shape["context"]
    heads = config.model.kv_heads // mesh.shape["tensor"]
    width = 2 * config.model.head_dim * np.dtype(jax.numpy.dtype(config.model.dtype)).itemsize
    return tokens * (heads * width + 8)
