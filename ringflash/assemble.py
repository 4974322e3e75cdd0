"""From a configuration to the parts of a run: the step (`build`), its data, its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ringflash.attention import (
    compiler_options,
    order_rows,
)
from ringflash.build import (
    batch_losses,
    build,
    hop_bytes,
    serving_kernel,
    strategy_of,
)
from ringflash.config import Config
from ringflash.data.batch import Batch
from ringflash.data.pipeline import EvalRows, Pipeline, eval_batches, train_pipeline
from ringflash.data.sources import make_source, split
from ringflash.data.tokenizers import check_vocab, make_tokenizer
from ringflash.evaluate import perplexity
from ringflash.loss import counted
from ringflash.mesh import BATCH_AXES, extent, make_mesh, put
from ringflash.ring_order import ring_hops
from ringflash.step import State

Array = jax.Array


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
    built = build(config, mesh)
    return Parts(
        mesh=mesh,
        abstract_state=built.abstract_state,
        init=built.init,
        step=built.step,
        score=make_score(config, built.graph, mesh, eval_rows),
        train_data=train_data,
        eval_rows=eval_rows,
        put=partial(put, mesh=mesh),
        description=describe(config, mesh, built.abstract_state),
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


def make_score(
    config: Config, graph: nnx.GraphDef, mesh: Mesh, rows: EvalRows
) -> Callable[[Any], list[perplexity.Score]]:
    """params -> held-out scores, overall and by position."""
    bounds = perplexity.edges(config.seq_len)

    @partial(jax.jit, compiler_options=compiler_options(mesh))
    def sums(params: Any, batch: Batch, bytes_BT: Array) -> tuple[Array, Array, Array]:
        losses_BT = batch_losses(graph, config.loss, mesh, params, batch)
        counts_BT = counted(batch.targets_BT, batch.loss_mask_BT)
        return perplexity.bucket_sums(losses_BT, batch.positions_BT, counts_BT, bytes_BT, bounds)

    def score(params: Any) -> list[perplexity.Score]:
        pairs = zip(rows.batches, rows.target_bytes, strict=True)
        return perplexity.measure(sums, params, (put(pair, mesh) for pair in pairs), bounds)

    return score


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
