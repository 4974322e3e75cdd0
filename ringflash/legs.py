"""A stage of a run on its mesh: the step that it is made with, and the program of that step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from ringflash.build import abstract_batch, build, serving_kernel, strategy_of
from ringflash.config import Config
from ringflash.data.batch import Batch
from ringflash.mesh import make_mesh, put
from ringflash.stages import Stage
from ringflash.step import State


@dataclass(frozen=True)
class Leg:
    """A stage of a run, put together: the steps after the first `begin` ones are made with this.

    `config` is the stage's, without stages. `abstract_state` has the shape, dtype and sharding of every leaf.
    """

    begin: int
    config: Config
    mesh: Mesh
    abstract_state: State
    init: Callable[[], State]
    step: jax.stages.Wrapped  # (State, Batch) -> (State, metrics); the state is donated

    def put(self, batch: Batch) -> Batch:
        """A batch of the stage, from the host onto the mesh."""
        return put(batch, self.mesh)

    def compile(self) -> jax.stages.Compiled:
        """The program of a step; needs no state and no batch."""
        batch = abstract_batch(self.config, self.mesh)
        return self.step.lower(self.abstract_state, batch).compile()


def make_leg(stage: Stage, devices: Sequence[jax.Device] | None) -> Leg:
    """The stage on its mesh of all these devices."""
    mesh = make_mesh(stage.config.mesh, devices)
    built = build(stage.config, mesh)
    return Leg(stage.begin, stage.config, mesh, built.abstract_state, built.init, built.step)


def leg_at(legs: Sequence[Leg], step: int) -> Leg:
    """The leg that goes on where so many steps are done."""
    return [leg for leg in legs if leg.begin <= step][-1]


def in_short(leg: Leg) -> str:
    """What a stage has of its own; raises ValueError where no kernel serves it."""
    config, mesh = leg.config, leg.mesh
    return (
        f"{config.global_batch_size} x {config.seq_len:,} tokens, RoPE theta "
        f"{config.model.rope_theta:g}, {strategy_of(config, mesh).strategy} over "
        f"context={mesh.shape['context']}, fsdp={mesh.shape['fsdp']}, {serving_kernel(config, mesh)}"
    )
