"""A run under way, and how one begins: fresh, or from the newest checkpoint that is of this model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ringflash.ahead import Ahead
from ringflash.assemble import Parts, assemble
from ringflash.checkpoint import CheckpointDamaged, CheckpointMismatch, Checkpoints, Restored
from ringflash.config import Config, with_origins
from ringflash.data.sources import DataError
from ringflash.exits import ConfigFault, DataFault
from ringflash.legs import Leg
from ringflash.mesh import move
from ringflash.processes import odd_ones
from ringflash.stages import history, thetas
from ringflash.step import State

log = logging.getLogger(__name__)


@dataclass
class Run:
    """A run under way: `step` updates are made, of which `saved` are on disk or on the way there."""

    config: Config
    workdir: Path
    origins: Mapping[str, str]
    parts: Parts
    checkpoints: Checkpoints
    state: State
    step: int
    saved: int
    programs: Ahead[jax.stages.Compiled]  # the step of each leg up to the last step
    leg: Leg | None = None  # what the last step was made with
    program: Any = None  # leg.step, compiled
    skipped: int = 0  # updates in a row that were left out, up to this step

    def enter(self, leg: Leg) -> dict[str, float]:
        """Move the state to where this leg has it, and take its program; returns the seconds waited."""
        begun = time.perf_counter()
        self.state = jax.block_until_ready(move(self.state, leg.abstract_state, donate=True))
        moved = time.perf_counter()
        self.leg, self.program = leg, self.programs.take(self.parts.legs.index(leg))
        found = {
            "perf/move_seconds": moved - begun,
            "perf/compile_seconds": time.perf_counter() - moved,
        }
        log.info(
            "after step %d: %d sequences of %d tokens; %.2f s for the state, %.2f s for the program",
            *(self.step, leg.config.global_batch_size, leg.config.seq_len, *found.values()),
        )
        return found

    def save(self) -> None:
        """Start a checkpoint of this step: state, data position and config together."""
        if self.step == self.saved:
            return
        self.checkpoints.save(
            self.step,
            self.state,
            data=self.parts.train_data.get_state(),
            config=with_origins(self.config, self.origins),
        )
        self.saved = self.step


def put_together(config: Config) -> Parts:
    """The parts, or the fault that says why not; of several processes all must have the same data."""
    try:
        parts = assemble(config)
    except DataError as error:
        raise DataFault(str(error)) from error
    except ValueError as error:
        raise ConfigFault(str(error)) from error
    odd = odd_ones(json.dumps([parts.train_data.get_state(), parts.eval_rows.fingerprint]))
    if odd:
        ranks = ", ".join(map(str, odd))
        raise ConfigFault(f"data.source: rank {ranks} finds other data than rank 0")
    return parts


def begin(
    config: Config,
    workdir: Path,
    parts: Parts,
    checkpoints: Checkpoints,
    origins: Mapping[str, str],
) -> Run:
    """Go on from what `workdir` holds, or begin; changes nothing on disk."""
    restored = restore(config, parts, checkpoints)
    programs = Ahead([leg.compile for leg in parts.legs if leg.begin < config.steps])
    if restored is None:
        state = parts.legs[0].init()
        return Run(config, workdir, origins, parts, checkpoints, state, 0, 0, programs)
    try:
        parts.train_data.set_state(restored.data)
    except DataError as error:
        raise ConfigFault(f"{workdir} cannot go on: {error}") from error
    print(f"resuming from step {restored.step} of {workdir}", flush=True)
    step = restored.step
    return Run(config, workdir, origins, parts, checkpoints, restored.state, step, step, programs)


def restore(config: Config, parts: Parts, checkpoints: Checkpoints) -> Restored | None:
    """The newest checkpoint that verifies, or None; ConfigFault where it is of another model.

    RoPE's theta and the norms' epsilon change what the parameters mean, and no parameter's shape tells of
    them. Theta must have been the same in all steps that were made; of later stages it may be any.
    """
    try:
        restored = checkpoints.restore(parts.own.abstract_state)
    except (CheckpointMismatch, CheckpointDamaged) as error:
        raise ConfigFault(str(error)) from error
    if restored is None:
        return None
    saved = {key: leaf["value"] for key, leaf in restored.config.items()}
    stages = saved.get("stages", "")  # which checkpoints of before there were any do not have
    pairs = {
        "rope_theta": (
            history(thetas(stages, saved["model.rope_theta"]), restored.step),
            history(thetas(config.stages, config.model.rope_theta), restored.step),
        ),
        "norm_eps": (saved["model.norm_eps"], config.model.norm_eps),
    }
    differ = [
        f"model.{name}: found {found}, wanted {wanted}"
        for name, (found, wanted) in pairs.items()
        if found != wanted
    ]
    if differ:
        where = checkpoints.directory / str(restored.step)
        raise ConfigFault(f"{where} is a checkpoint of another model: {'; '.join(differ)}")
    return restored
