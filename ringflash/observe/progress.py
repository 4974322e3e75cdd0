"""How far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Mapping
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress

WINDOW = 20  # updates whose step seconds the time left is estimated from


class Progress(Protocol):
    """The contract. The caller decides how often to update."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done; shows `train/loss` and `perf/tokens_per_second` where given."""

    def note(self, text: str) -> None:
        """Print a line of its own."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class TimeLeft:
    """Seconds until the last step, from the median `perf/step_seconds` of recent updates.

    What is done between two steps, such as an evaluation, is not a step's and is not counted.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def after(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Seconds left when `step` is done, or None while unknown."""
        if "perf/step_seconds" in metrics:
            self._seconds.append(metrics["perf/step_seconds"])
        if not self._seconds:
            return None
        return statistics.median(self._seconds) * (self._total - step)


class _Lines:
    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._stream, self._left = total, stream, TimeLeft(total)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._left.after(step, metrics)
        self.note("  ".join([f"step {step}/{self._total}", *_figures(metrics), _left(left)]))

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class _Bar:
    def __init__(self, total: int, start: int, stream: TextIO) -> None:
        self._left = TimeLeft(total)
        shown = TextColumn("{task.fields[figures]}", markup=False)
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), shown)
        console = Console(file=stream, highlight=False)
        self._bar = RichProgress(*columns, console=console)
        self._task: TaskID = self._bar.add_task(
            "", total=total, completed=start, figures="compiling"
        )
        self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        figures = [*_figures(metrics), _left(self._left.after(step, metrics))]
        self._bar.update(self._task, completed=step, figures="  ".join(figures))

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False)

    def close(self) -> None:
        self._bar.stop()


def progress(total: int, start: int, stream: TextIO | None = None) -> Progress:
    """Progress of a run of `total` steps of which `start` are done, on `stream` (stdout)."""
    out = sys.stdout if stream is None else stream
    return _Bar(total, start, out) if out.isatty() else _Lines(total, out)


def _figures(metrics: Mapping[str, float]) -> list[str]:
    wanted = {
        "train/loss": "loss {:.3f}",
        "perf/tokens_per_second": "tokens/s {:,.0f}",
    }
    return [shape.format(metrics[name]) for name, shape in wanted.items() if name in metrics]


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "left ?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"left {hours}:{minute:02}:{second:02}" if hours else f"left {minute}:{second:02}"
