"""Where metrics go. A writer takes a step and named numbers; what they mean is the caller's.

A run that was killed may have written metrics of steps after its last checkpoint. Given
`resume_step`, a writer forgets those first, so that what it holds is the history of one run.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import SummaryWriter

FLUSH_SECONDS = 10  # how old TensorBoard's picture may be; its own thread writes


class Writer(Protocol):
    """The contract."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`."""

    def close(self) -> None:
        """Put everything on disk; nothing may be written after it."""


class _Jsonl:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps(_record(step, metrics), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    def __init__(self, directory: Path, purge_step: int | None) -> None:
        self._events = SummaryWriter(
            str(directory), purge_step=purge_step, flush_secs=FLUSH_SECONDS
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._events.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._events.close()


class _FanOut:
    def __init__(self, writers: tuple[Writer, ...]) -> None:
        self._writers = writers

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def jsonl(path: Path, *, resume_step: int | None = None) -> Writer:
    """One JSON object a line: {"step": 3, "time": seconds since 1970, name: value, ...}.

    A line can be read as soon as `write` returns.
    JSON has no NaN or infinity: such a value is null, and "non_finite" tells which it was. With
    `resume_step`, lines of later steps are dropped; a line cut short by a kill always is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _keep_until(path, math.inf if resume_step is None else resume_step)
    return _Jsonl(path)


def tensorboard(directory: Path, *, resume_step: int | None = None) -> Writer:
    """TensorBoard scalars; `resume_step` makes TensorBoard hide what later steps had written."""
    return _TensorBoard(directory, None if resume_step is None else resume_step + 1)


def fan_out(*writers: Writer) -> Writer:
    """A writer that passes everything on to each of `writers`."""
    return _FanOut(writers)


def _record(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    assert not {"step", "time", "non_finite"} & metrics.keys(), metrics
    values = {name: float(value) for name, value in metrics.items()}
    odd = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    clean = {name: None if name in odd else value for name, value in values.items()}
    record: dict[str, Any] = {"step": step, "time": time.time(), **clean}
    return record | ({"non_finite": odd} if odd else {})


def _keep_until(path: Path, step: float) -> None:
    if not path.exists():
        return
    draft = path.with_name(path.name + ".tmp")
    with (
        path.open(encoding="utf-8", errors="replace") as lines,
        draft.open("w", encoding="utf-8") as out,
    ):
        out.writelines(line for line in lines if _step_of(line) <= step)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(path)


def _step_of(line: str) -> float:
    """The step a line is of; NaN, which no step reaches, for a line cut short."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.nan
    except (ValueError, KeyError, TypeError):
        return math.nan
