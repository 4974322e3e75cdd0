"""Checkpoints: state, data position and config of one step, saved together by orbax.

    <workdir>/checkpoints/<step>/{state,data,config}/...  integrity.json

Saving runs in the background; its errors come out of the next `check_errors`, `save` or `close`.
Only a step whose manifest verifies counts (`ringflash.integrity`). Reading changes nothing on disk:
what an interrupted run left behind is cleared by the first `save`. Nothing here decides when to
save, and nothing keeps two runs out of one workdir.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import args

from ringflash import integrity, leaves
from ringflash.processes import agreed, is_first

log = logging.getLogger(__name__)

ABSENT, DAMAGED = -1, -2  # no step: there is none, or none that verifies


class CheckpointMismatch(ValueError):
    """The checkpoint's arrays are not those of the state that was asked for."""


class CheckpointDamaged(ValueError):
    """There are checkpoints, and none of those asked for can be trusted."""


class SaveFailed(RuntimeError):
    """A save in the background did not reach the disk (whatever orbax raised is its cause)."""


@dataclass(frozen=True)
class Restored:
    """What one step held."""

    step: int
    state: Any
    data: dict[str, Any]
    config: dict[str, Any]


class Checkpoints:
    """The newest `keep` checkpoints of one workdir. Call each method on every host."""

    def __init__(self, workdir: Path, *, keep: int) -> None:
        assert keep >= 1, keep
        self.directory = Path(workdir).resolve() / "checkpoints"
        _refuse_unsafe(self.directory)
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers()))
        self._saving: int | None = None
        self._held: int | None = None  # the step whose contents this run has on disk, or on the way
        self._passed_over: dict[int, str] = {}  # step: why its bytes cannot be trusted

    def latest(self) -> int | None:
        """The newest whole step on disk, or None; its bytes are not read."""
        steps = integrity.steps(self.directory)
        return next((s for s in steps if not integrity.incomplete(self._path(s))), None)

    def save(self, step: int, state: Any, *, data: dict[str, Any], config: dict[str, Any]) -> None:
        """Start saving `state`, a tree of jax arrays, with its data position and config.

        A step that this run has saved or restored already is not written again; the log says so.
        Raises ValueError where a step at or after this one is on disk from elsewhere, SaveFailed
        if the save before this one failed.
        """
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        assert json.loads(json.dumps([data, config])) == [data, config], "not plain JSON"
        self._wait()
        if step == self._held:
            log.warning("step %d is already saved in %s: not saved again", step, self.directory)
            return
        manager, newest = self._writer(), self.latest()
        if newest is not None and step <= newest:
            raise ValueError(f"step {step} not saved: {self.directory} holds step {newest} already")
        items = args.Composite(
            state=args.StandardSave(state), data=args.JsonSave(data), config=args.JsonSave(config)
        )
        self._saving = step
        started = manager.save(step, args=items)
        assert started, f"orbax did not save step {step}"
        self._held = step

    def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
        """The newest step that verifies (or `step`), or None where there is no checkpoint.

        `abstract_state` is a tree of jax.ShapeDtypeStruct with shardings, of any mesh. Raises
        CheckpointMismatch where its shapes or dtypes are not those saved, CheckpointDamaged where
        there are checkpoints but none verifies, ValueError where `step` was never saved.
        """
        assert all(leaf.sharding is not None for leaf in jax.tree.leaves(abstract_state))
        steps = integrity.steps(self.directory)
        if step is not None and step not in steps:
            raise ValueError(f"no step {step} in {self.directory}; found {steps[::-1]}")
        chosen = agreed(lambda: self._choose(steps if step is None else [step]))
        if chosen == ABSENT and step is None:
            return None
        if chosen in (ABSENT, DAMAGED):
            reasons = "; ".join(self._passed_over.values()) or "see the log of the first host"
            raise CheckpointDamaged(f"no checkpoint in {self.directory} can be used: {reasons}")
        path = self._path(chosen)
        saved = self._reader.metadata(path).item_metadata["state"].tree
        difference = leaves.difference(saved, abstract_state)
        if difference is not None:
            raise CheckpointMismatch(
                f"{path} is a checkpoint of another model or optimizer: {difference}"
            )
        state, plain = args.StandardRestore(abstract_state), args.JsonRestore()
        wanted = args.Composite(state=state, data=plain, config=plain)
        items = self._reader.restore(path, args=wanted)
        self._held = chosen
        return Restored(chosen, items["state"], items["data"], items["config"])

    def check_errors(self) -> None:
        """Raise SaveFailed if a save in the background has failed; does not wait for it."""
        if self._manager is not None and not self._manager.is_saving_in_progress():
            self._wait()

    def close(self) -> None:
        """Wait until everything is on disk, then let go; raises SaveFailed."""
        try:
            self._wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None
            self._reader.close()

    def _wait(self) -> None:
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:
            self._held = None
            raise SaveFailed(f"step {self._saving} is not saved: {error}") from error

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _choose(self, candidates: list[int]) -> int:
        """The first of `candidates` that verifies, or ABSENT, or DAMAGED."""
        for step in candidates:
            reason = integrity.damage(self._path(step))
            if reason is None:
                return step
            log.warning("CHECKPOINT PASSED OVER: step %d cannot be used: %s", step, reason)
            self._passed_over[step] = reason
        # A step that lost only its manifest was somebody's run: never begin again over it in silence.
        signs = (integrity.MANIFEST, "state")
        ours = any((self._path(step) / sign).exists() for step in candidates for sign in signs)
        return DAMAGED if ours else ABSENT

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            if is_first():
                integrity.clear(self.directory, damaged=self._passed_over)
            multihost_utils.sync_global_devices("ringflash: checkpoints cleared")
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(self._keep),
                async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
            )
            self._manager = ocp.CheckpointManager(
                self.directory, options=options, item_handlers=_handlers()
            )
        return self._manager

    def _seal(self) -> None:
        """Called by orbax, on the first host, when all files are written and before it commits."""
        drafts = list(self.directory.glob(f"{self._saving}.orbax-checkpoint-tmp*"))
        assert len(drafts) == 1, drafts
        integrity.seal(drafts[0])


def _handlers() -> dict[str, ocp.CheckpointHandler]:
    json_items = {name: ocp.JsonCheckpointHandler() for name in ("data", "config")}
    return {"state": ocp.StandardCheckpointHandler(), **json_items}


def _refuse_unsafe(directory: Path) -> None:
    """Orbax commits a step below such a path without an error, and cannot read it back."""
    bad = sorted(set(str(directory)) & set("[]\\"))
    if bad:
        raise ValueError(f"workdir {directory.parent} holds {' '.join(bad)}, which orbax misreads")
