"""The run: restore or begin, update, record, save, evaluate; stop in a known way.

Each step is waited for before the next is sent off. At the lengths this is for a step takes seconds, so
nothing is gained by running ahead, and a stop or a non-finite loss is seen at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from ringflash.checkpoint import Checkpoints
from ringflash.config import Config, write_config
from ringflash.data.batch import Batch
from ringflash.data.sources import DataError
from ringflash.evaluate import perplexity, report
from ringflash.evaluate.perplexity import Score
from ringflash.exits import DataFault, Diverged, Preempted
from ringflash.flops import counts, step_flops
from ringflash.legs import Leg, leg_at
from ringflash.observe import memory, writers
from ringflash.observe.log import logged
from ringflash.observe.progress import Progress, progress
from ringflash.observe.table import table
from ringflash.optimizer import averaged
from ringflash.plan.generations import of_device_kind
from ringflash.preemption import StopRequest, stop_requested
from ringflash.processes import agreed, is_first
from ringflash.run import Run, begin, put_together

log = logging.getLogger(__name__)

FINITE = ("train/loss", "train/grad_norm", "train/param_norm")
FIRST = 1  # the step after which the first evaluation is made, to compare the last one with


def train(config: Config, workdir: Path, *, sources: Mapping[str, str]) -> None:
    """Train up to `config.steps`, going on from what `workdir` holds.

    Raises ConfigFault, DataFault, Diverged or Preempted, each with its exit code.
    """
    with logged(workdir, jax.process_index()), stop_requested() as stop:
        parts = put_together(config)
        table("ringflash train", parts.description)
        checkpoints = Checkpoints(workdir, keep=config.checkpoint.keep)
        try:
            run = begin(config, workdir, parts, checkpoints, sources)
            out = records(run) if is_first() else writers.fan_out()
            try:
                loop(run, out, stop)
                finish(run, out)
            finally:
                out.close()
                run.programs.close()
        finally:
            checkpoints.close()


def records(run: Run) -> writers.Writer:
    """The workdir's files of a run that begins or goes on: of several processes, the first's alone."""
    write_config(run.workdir / "config.json", run.config, run.origins)
    report.forget(run.workdir, after=run.step)
    return writers.fan_out(
        writers.jsonl(run.workdir / "metrics.jsonl", resume_step=run.step),
        writers.tensorboard(run.workdir / "tensorboard", resume_step=run.step),
    )


def loop(run: Run, out: writers.Writer, stop: StopRequest) -> None:
    """Update until the last step."""
    steps, every = run.config.steps, run.config.checkpoint.every
    if run.step >= steps:
        print(f"{run.step} steps are done and steps={steps}: nothing left to train", flush=True)
        return
    shown = progress(steps, run.step)
    try:
        while run.step < steps:
            if run.step == FIRST or due(run.config.eval.every, run.step):
                evaluate(run, out, shown)
            metrics = update(run)
            skipped = check_skipped(run, metrics)
            if skipped or run.step in (FIRST, steps) or due(run.config.log_every, run.step):
                shown.update(run.step, metrics)
                out.write(run.step, metrics)
            run.checkpoints.check_errors()
            run.programs.check_errors()
            stopping = stop.at(run.step)
            if stopping or run.step == steps or due(every, run.step):
                run.save()
            if stopping:
                leave(run)
    finally:
        shown.close()


def update(run: Run) -> dict[str, float]:
    """One step, waited for; where a stage begins it is entered before. Returns the step's metrics."""
    start = time.perf_counter()
    leg = leg_at(run.parts.legs, run.step)
    rows = next_batch(run)
    batch = leg.put(rows)
    found = {"data/wait_seconds": time.perf_counter() - start}
    if leg is not run.leg:
        found |= run.enter(leg)
    begun = time.perf_counter()
    run.state, metrics = run.program(run.state, batch)
    found |= {name: float(value) for name, value in metrics.items()}
    run.step += 1
    seconds = time.perf_counter() - begun + found["data/wait_seconds"]
    found |= {
        "train/seq_len": leg.config.seq_len,
        "perf/step_seconds": seconds,
        "perf/tokens_per_second": run.config.seq_len * run.config.global_batch_size / seconds,
        "memory/host_bytes": memory.host_bytes(),
    }
    found |= used(leg, rows, seconds)
    held = memory.device_bytes(jax.local_devices())
    return found if held is None else found | {"memory/device_bytes": held}


def used(leg: Leg, rows: Batch, seconds: float) -> dict[str, float]:
    """Of the matrix units, by what the mask of these documents needs; nothing where no peak is known."""
    devices = leg.mesh.devices
    generation = of_device_kind(devices.flat[0].device_kind)
    if generation is None:
        return {}
    flops = step_flops(leg.config.model, *counts(rows.segment_ids_BT))
    return {"perf/mfu": flops / (seconds * generation.peak_flops * devices.size)}


def next_batch(run: Run) -> Batch:
    """The next batch of the data; where there is none, what was done is saved."""
    try:
        return next(run.parts.train_data)
    except (StopIteration, DataError) as error:
        run.save()
        ended = (
            f"the data ended after step {run.step} of {run.config.steps}: data.epochs holds no more"
        )
        what = str(error) if isinstance(error, DataError) else ended
        raise DataFault(f"{what}; step {run.step} is saved" if run.step else what) from error


def check_skipped(run: Run, metrics: Mapping[str, float]) -> bool:
    """Whether the step was skipped: its loss or gradient is not finite, or a spike.

    Raises Diverged where too many were in a row, and for a parameter that is not finite.
    """
    told = fault(metrics, run.config.skip_norm)
    if told is None:
        run.skipped = 0
        return False
    run.skipped += 1
    told += f" at step {run.step}"
    most = run.config.max_skipped
    if not metrics["train/skipped"] or run.skipped > most:
        row = f"; {run.skipped} in a row, of max_skipped = {most}" if most else ""
        raise Diverged(f"{told}, which is not saved{row}")
    log.warning("%s: no update, %d in a row (at most %d)", told, run.skipped, most)
    return True


def fault(metrics: Mapping[str, float], skip_norm: float) -> str | None:
    """What a step is skipped for, or None."""
    odd = [name for name in FINITE if not math.isfinite(metrics[name])]
    if odd:
        return f"{odd[0]} is {metrics[odd[0]]}"
    if metrics["train/skipped"]:
        return (
            f"train/grad_norm is {metrics['train/grad_norm']:.4g}, above skip_norm = {skip_norm:g},"
        )
    return None


def due(every: int, step: int) -> bool:
    """Whether something that is done each `every` steps (0: never) is done after this step."""
    return every > 0 and step > 0 and step % every == 0


def leave(run: Run) -> None:
    """Stop when everything is on disk."""
    run.checkpoints.close()
    raise Preempted(f"stopped and saved at step {run.step}; the same command goes on from there")


def evaluate(run: Run, out: writers.Writer, shown: Progress | None = None) -> list[Score]:
    """Score the held-out documents, and record it; not again where that is done for this step."""
    held_out = run.parts.eval_rows
    known = report.read(run.workdir, run.step, held_out.fingerprint) if is_first() else None
    if agreed(lambda: known is not None):
        return known or []
    params = averaged(run.state.params, run.state.opt_state)
    scores = run.parts.score(params, run.step)
    if not is_first():
        return scores
    report.write(run.workdir, run.step, scores, held_out.document_names, held_out.fingerprint)
    out.write(run.step, perplexity.metrics(scores))
    if shown is not None:
        shown.note(
            f"held out at step {run.step}: perplexity {scores[0].perplexity:.3f}, "
            f"{scores[0].bits_per_byte:.3f} bits per byte"
        )
    return scores


def finish(run: Run, out: writers.Writer) -> None:
    """The evaluation at the end, beside that of the first step."""
    scores = evaluate(run, out)
    if is_first():
        show(scores, report.read(run.workdir, FIRST, run.parts.eval_rows.fingerprint), run.step)


def show(scores: list[Score], first: list[Score] | None, step: int) -> None:
    """The table of held-out perplexity."""
    header = ["positions", "targets", "perplexity", "bits/byte"]
    if first is not None:
        header += [f"perplexity at step {FIRST}", f"bits/byte at step {FIRST}"]
    title = f"held-out documents at step {step}"
    table(title, report.rows(scores, first), header=header)
