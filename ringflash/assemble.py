"""From a configuration to the parts of a run: the step of each stage (`legs`), its data, its evaluation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringflash.attention import (
    compiler_options,
    order_rows,
)
from ringflash.build import (
    batch_losses,
    hop_bytes,
    make_model,
    serving_kernel,
    strategy_of,
)
from ringflash.config import Config
from ringflash.data.batch import Batch
from ringflash.data.cuts import Cut
from ringflash.data.pipeline import EvalRows, Pipeline, eval_batches, train_pipeline
from ringflash.data.sources import make_source, split
from ringflash.data.tokenizers import check_vocab, make_tokenizer
from ringflash.evaluate import perplexity
from ringflash.legs import Leg, in_short, leg_at, make_leg
from ringflash.loss import counted
from ringflash.mesh import BATCH_AXES, extent, move, put
from ringflash.ring_order import ring_hops
from ringflash.stages import stages_of

Array = jax.Array


@dataclass(frozen=True)
class Parts:
    """What a run is made of: a leg for each stage, and what is of all of them."""

    legs: tuple[Leg, ...]
    score: Callable[[Any, int], list[perplexity.Score]]  # of parameters after so many steps
    train_data: Pipeline
    eval_rows: EvalRows
    description: list[tuple[str, str]]

    @property
    def own(self) -> Leg:
        """The last leg, which is as the configuration itself says."""
        return self.legs[-1]


def assemble(config: Config, devices: Sequence[jax.Device] | None = None) -> Parts:
    """Everything but the run itself, on these devices (None: all there are).

    Raises ValueError for what cannot be put together.
    """
    legs = tuple(make_leg(stage, devices) for stage in stages_of(config))
    train_data, eval_rows = make_data(config, [leg.mesh for leg in legs])
    return Parts(
        legs=legs,
        score=make_score(legs, eval_rows),
        train_data=train_data,
        eval_rows=eval_rows,
        description=describe(legs),
    )


def make_data(config: Config, meshes: Sequence[Mesh]) -> tuple[Pipeline, EvalRows]:
    """Training batches and held-out rows, in the layout's order of tokens; a mesh for each stage."""
    tokenizer = make_tokenizer(config.data.tokenizer)
    check_vocab(tokenizer, config.model.vocab_size)
    train, held_out = split(make_source(config.data.source), config.data.held_out_percent)

    def order(shards: int, batch: Batch) -> np.ndarray:
        layout = config.attention.layout
        return order_rows(layout, batch.positions_BT, batch.segment_ids_BT, shards)

    orders = [partial(order, mesh.shape["context"]) for mesh in meshes]
    cuts = [
        Cut(stage.begin, stage.config.seq_len, stage.config.global_batch_size, of_mesh)
        for stage, of_mesh in zip(stages_of(config), orders, strict=True)
    ]
    train_data = train_pipeline(train, tokenizer, cuts, seed=config.seed, epochs=config.data.epochs)
    eval_rows = eval_batches(
        held_out,
        tokenizer,
        seq_len=config.seq_len,
        batch_size=extent(BATCH_AXES, meshes[-1]),
        documents=config.eval.documents,
        order=orders[-1],
    )
    return train_data, eval_rows


def make_score(legs: Sequence[Leg], rows: EvalRows) -> Callable[[Any, int], list[perplexity.Score]]:
    """(params, step) -> held-out scores, overall and by position.

    At the last stage's length and on its mesh, so that the scores of a run can be compared; but with RoPE's
    theta of the stage that made the step, for by another one the parameters mean something else.
    """
    own, mesh = legs[-1].config, legs[-1].mesh
    bounds = perplexity.edges(own.seq_len)

    @functools.cache
    def sums_of(rope_theta: float) -> jax.stages.Wrapped:
        model = dataclasses.replace(own.model, rope_theta=rope_theta)
        graph, _ = make_model(dataclasses.replace(own, model=model), mesh)

        @partial(
            jax.jit,
            out_shardings=NamedSharding(mesh, P()),  # each process reads them
            compiler_options=compiler_options(mesh),
        )
        def sums(params: Any, batch: Batch, bytes_BT: Array) -> tuple[Array, Array, Array]:
            losses_BT = batch_losses(graph, own.loss, mesh, params, batch)
            counts_BT = counted(batch.targets_BT, batch.loss_mask_BT)
            return perplexity.bucket_sums(
                losses_BT, batch.positions_BT, counts_BT, bytes_BT, bounds
            )

        return sums

    def score(params: Any, step: int) -> list[perplexity.Score]:
        sums = sums_of(leg_at(legs, max(0, step - 1)).config.model.rope_theta)
        params = move(params, legs[-1].abstract_state.params)
        pairs = zip(rows.batches, rows.target_bytes, strict=True)
        return perplexity.measure(sums, params, (put(pair, mesh) for pair in pairs), bounds)

    return score


def describe(legs: Sequence[Leg]) -> list[tuple[str, str]]:
    """The start-up table: what runs, where, and what a hop of the ring carries; stages before it last."""
    config, mesh, state = legs[-1].config, legs[-1].mesh, legs[-1].abstract_state
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
        *((f"until step {later.begin}", in_short(leg)) for leg, later in pairwise(legs)),
    ]
