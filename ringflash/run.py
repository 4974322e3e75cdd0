"""A run under way, and how one begins: fresh, or from the newest checkpoint that is of this model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringflash.assemble import Parts, assemble
from ringflash.checkpoint import CheckpointDamaged, CheckpointMismatch, Checkpoints, Restored
from ringflash.config import Config, with_origins
from ringflash.data.sources import DataError
from ringflash.exits import ConfigFault, DataFault
from ringflash.step import State

# Leaves of `model` that change what the parameters mean, and that no parameter's shape tells of.
MEANING = ("rope_theta", "norm_eps")


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
    program: Any = None  # parts.step, once it is compiled
    skipped: int = 0  # updates in a row that were left out, up to this step

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
    """The parts, or the fault that says why not."""
    try:
        return assemble(config)
    except DataError as error:
        raise DataFault(str(error)) from error
    except ValueError as error:
        raise ConfigFault(str(error)) from error


def begin(
    config: Config,
    workdir: Path,
    parts: Parts,
    checkpoints: Checkpoints,
    origins: Mapping[str, str],
) -> Run:
    """Go on from what `workdir` holds, or begin; changes nothing on disk."""
    restored = restore(config, parts, checkpoints)
    if restored is None:
        return Run(config, workdir, origins, parts, checkpoints, parts.init(), 0, 0)
    try:
        parts.train_data.set_state(restored.data)
    except DataError as error:
        raise ConfigFault(f"{workdir} cannot go on: {error}") from error
    print(f"resuming from step {restored.step} of {workdir}", flush=True)
    step = restored.step
    return Run(config, workdir, origins, parts, checkpoints, restored.state, step, step)


def restore(config: Config, parts: Parts, checkpoints: Checkpoints) -> Restored | None:
    """The newest checkpoint that verifies, or None; ConfigFault where it is of another model."""
    try:
        restored = checkpoints.restore(parts.abstract_state)
    except (CheckpointMismatch, CheckpointDamaged) as error:
        raise ConfigFault(str(error)) from error
    if restored is None:
        return None
    saved = {name: restored.config[f"model.{name}"]["value"] for name in MEANING}
    differ = [
        f"model.{name}: found {value}, wanted {getattr(config.model, name)}"
        for name, value in saved.items()
        if value != getattr(config.model, name)
    ]
    if differ:
        where = checkpoints.directory / str(restored.step)
        raise ConfigFault(f"{where} is a checkpoint of another model: {'; '.join(differ)}")
    return restored
