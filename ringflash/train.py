"""The run: restore or begin, update, record, save, evaluate; stop in a known way.

Each step is waited for before the next is sent off. At the lengths this is for a step takes seconds, so
nothing is gained by running ahead, and a stop or a non-finite loss is seen at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ringflash.assemble import Parts, assemble
from ringflash.checkpoint import CheckpointDamaged, CheckpointMismatch, Checkpoints
from ringflash.config import Config, with_origins, write_config
from ringflash.data.sources import DataError
from ringflash.evaluate import perplexity, report
from ringflash.exits import ConfigFault, DataFault, Diverged, Preempted
from ringflash.observe import memory, writers
from ringflash.observe.log import logged
from ringflash.observe.progress import Progress, progress
from ringflash.observe.table import table
from ringflash.preemption import StopRequest, stop_requested
from ringflash.step import State

FIRST = 1  # the step after which the first evaluation is made, to compare the last one with


@dataclass
class Run:
    """A run under way."""

    config: Config
    workdir: Path
    parts: Parts
    checkpoints: Checkpoints
    state: State
    step: int
    origins: Mapping[str, str]

    def save(self) -> None:
        """Start a checkpoint of this step: state, data position and config together."""
        self.checkpoints.save(
            self.step,
            self.state,
            data=self.parts.train_data.get_state(),
            config=with_origins(self.config, self.origins),
        )


def train(config: Config, workdir: Path, *, sources: Mapping[str, str]) -> None:
    """Train up to `config.steps`, going on from what `workdir` holds.

    Raises ConfigFault, DataFault, Diverged or Preempted, each with its exit code.
    """
    with logged(workdir / "log.txt"), stop_requested() as stop:
        parts = put_together(config)
        table("ringflash train", parts.description)
        checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
        try:
            run = begin(config, workdir, parts, checkpoints, sources)
            write_config(workdir / "config.json", config, sources)
            resume_step = run.step
            out = writers.fan_out(
                writers.jsonl(workdir / "metrics.jsonl", resume_step=resume_step),
                writers.tensorboard(workdir / "tensorboard", resume_step=resume_step),
            )
            try:
                loop(run, out, stop)
                finish(run, out)
            finally:
                out.close()
        finally:
            checkpoints.close()


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
    """The state to go on from: the newest checkpoint that verifies, or fresh parameters."""
    try:
        restored = checkpoints.restore(parts.abstract_state)
    except (CheckpointMismatch, CheckpointDamaged) as error:
        raise ConfigFault(str(error)) from error
    if restored is None:
        return Run(config, workdir, parts, checkpoints, parts.init(), 0, origins)
    try:
        parts.train_data.set_state(restored.data)
    except DataError as error:
        raise ConfigFault(f"{workdir} cannot go on: {error}") from error
    print(f"resuming from step {restored.step} of {workdir}", flush=True)
    return Run(config, workdir, parts, checkpoints, restored.state, restored.step, origins)


def loop(run: Run, out: writers.Writer, stop: StopRequest) -> None:
    """Update until the last step."""
    config = run.config
    if run.step >= config.steps:
        print(
            f"{run.step} steps are done and steps={config.steps}: nothing left to train", flush=True
        )
        return
    shown = progress(config.steps, run.step)
    try:
        while run.step < config.steps:
            metrics = update(run)
            check_finite(run.step, metrics)
            if run.step % config.log_every == 0 or run.step in (FIRST, config.steps):
                shown.update(run.step, metrics)
                out.write(run.step, metrics)
            run.checkpoints.check_errors()
            last = run.step == config.steps
            if due(config.checkpoint.every, run.step) or last:
                run.save()
            if stop.at(run.step) and not last:
                leave(run)
            if not last and (run.step == FIRST or due(config.eval.every, run.step)):
                evaluate_now(run, out, shown)
    finally:
        shown.close()


def update(run: Run) -> dict[str, float]:
    """One step, waited for. Returns its metrics."""
    start = time.perf_counter()
    try:
        batch = next(run.parts.train_data)
    except StopIteration:
        run.save()
        raise DataFault(
            f"the data ended after step {run.step} of {run.config.steps}: saved; raise data.epochs"
        ) from None
    except DataError as error:
        raise DataFault(str(error)) from error
    waited = time.perf_counter() - start
    run.state, metrics = run.parts.step(run.state, run.parts.put(batch))
    found = {name: float(value) for name, value in metrics.items()}
    run.step += 1
    seconds = time.perf_counter() - start
    tokens = run.config.seq_len * run.config.global_batch_size
    found |= {
        "perf/step_seconds": seconds,
        "perf/tokens_per_second": tokens / seconds,
        "data/wait_seconds": waited,
        "memory/host_bytes": memory.host_bytes(),
    }
    held = memory.device_bytes(jax.local_devices())
    return found if held is None else found | {"memory/device_bytes": held}


def check_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Raise Diverged for a loss or gradient that is not finite, before it is saved."""
    for name in ("train/loss", "train/grad_norm"):
        if not math.isfinite(metrics[name]):
            raise Diverged(f"{name} is {metrics[name]} at step {step}; the last checkpoint is good")


def due(every: int, step: int) -> bool:
    """Whether something that is done each `every` steps (0: never) is done now."""
    return every > 0 and step % every == 0


def leave(run: Run) -> None:
    """Save and stop."""
    run.save()
    run.checkpoints.close()
    raise Preempted(f"stopped and saved at step {run.step}; the same command goes on from there")


def evaluate_now(run: Run, out: writers.Writer, shown: Progress | None = None) -> Any:
    """Score the held-out documents, and record it."""
    scores = run.parts.score(run.state.params)
    report.write(run.workdir, run.step, scores, run.parts.eval_rows.document_names)
    out.write(run.step, perplexity.metrics(scores))
    if shown is not None:
        overall = scores[0]
        shown.note(
            f"held out at step {run.step}: perplexity {overall.perplexity:.3f}, "
            f"{overall.bits_per_byte:.3f} bits per byte"
        )
    return scores


def finish(run: Run, out: writers.Writer) -> None:
    """The evaluation at the end, beside that of the first step."""
    scores = evaluate_now(run, out)
    show(scores, report.read(run.workdir, FIRST), run.step)


def show(scores: list[perplexity.Score], first: list[perplexity.Score] | None, step: int) -> None:
    """The table of held-out perplexity."""
    header = ["positions", "targets", "perplexity", "bits/byte"]
    if first is not None:
        header += ["perplexity at step 1", "bits/byte at step 1"]
    title = f"held-out documents at step {step}"
    table(title, report.rows(scores, first), header=header)
