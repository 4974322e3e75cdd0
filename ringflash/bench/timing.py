"""Programs compiled once and timed in turns, so that what else the machine does hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    """Something to time: `run` returns when the result is there. None where it cannot be known."""

    run: Callable[[], Any]
    compile_seconds: float | None = None
    temp_bytes: int | None = None  # on each device, by the compiler's own account


class Times(NamedTuple):
    """Seconds of each round: of the clock, and of all threads of the process."""

    wall: list[float]
    cpu: list[float]


def program(f: Callable[..., Any], *args: Any) -> Program:
    """f compiled for these arguments. A compilation cache, where one is on, shows in `compile_seconds`."""
    start = time.perf_counter()
    compiled = jax.jit(f).lower(*args).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp = None if memory is None else int(memory.temp_size_in_bytes)
    return Program(lambda: jax.block_until_ready(compiled(*args)), seconds, temp)


def interleaved(programs: Mapping[str, Program], repeats: int) -> dict[str, Times]:
    """Each program once to warm it, then `repeats` rounds of all of them, forth and back."""
    for each in programs.values():
        each.run()
    times = {name: Times([], []) for name in programs}
    turns = list(programs.items())
    for _ in range(repeats):
        for name, each in turns:
            cpu, wall = time.process_time(), time.perf_counter()
            each.run()
            times[name].wall.append(time.perf_counter() - wall)
            times[name].cpu.append(time.process_time() - cpu)
        turns.reverse()
    return times


def ratio(of: list[float], to: list[float]) -> float:
    """The median of the ratios round by round: of two medians, each may come from another moment."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))
