"""Several processes of one run on one machine: started together, watched, started again together.

    python -m ringflash.supervisor -n 4 -d 2 [--restarts=10] CONFIG WORKDIR [--config.KEY=VALUE ...]

`launch/local.sh` calls it. Each process is `ringflash train` with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
and JAX_PROCESS_ID, and simulates its share of the devices where there are only CPUs. When one ends the others
end with it; the run starts again after 42, 124 and crashes (`exits.restarts`), and not after other codes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from ringflash import exits
from ringflash.exits import ConfigFault, Stop
from ringflash.observe.table import table

USAGE = "launch/local.sh -n PROCESSES -d DEVICES_EACH [--restarts=10] CONFIG WORKDIR [--config.KEY=VALUE ...]"
RESTARTS = (
    10  # after crashes; a run that was preempted and saved has gone further, and is not counted
)
COMMAND = (sys.executable, "-m", "ringflash.cli", "train")
SAVING_SECONDS = 600.0  # for the others to end alike once one has ended in a known way
POLL_SECONDS = 0.1
# Gloo greets its peers on standard output, from many threads at once.
NOISE = ("[Gloo] Rank", "connected peer ranks")


@dataclass(frozen=True)
class Job:
    """What to start: so many processes, with so many devices each."""

    processes: int = 0
    devices: int = 0
    restarts: int = RESTARTS
    arguments: tuple[str, ...] = ()


@dataclass
class Ranks:
    """The processes of one start."""

    children: list[subprocess.Popen[str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def codes(self) -> list[int | None]:
        """Of each its exit code, as a shell has it; None while it runs."""
        return [None if c.poll() is None else shell_code(c.returncode) for c in self.children]

    def send(self, signum: signal.Signals) -> None:
        """To all that run."""
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signum)


class Supervisor:
    """Starts the ranks until they are done; a SIGTERM or Ctrl-C to it stops them for good."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = Ranks()
        self.asked = 0

    def run(self) -> int:
        """The exit code of the run."""
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._stop)
        crashes = 0
        while True:
            code = self._once()
            if self.asked or not exits.restarts(code):
                return code
            crashes += code != exits.PREEMPTED
            if crashes > self.job.restarts:
                say(f"{crashes - 1} restarts after crashes: no more (--restarts)")
                return code
            say(f"exit code {code}: all {self.job.processes} processes start again")

    def _once(self) -> int:
        """Start all, wait for all; the code of the first that ended other than well."""
        port = free_port()
        self.ranks = Ranks([spawn(self.job, rank, port) for rank in range(self.job.processes)])
        for rank, child in enumerate(self.ranks.children):
            for source, sink in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                assert source is not None
                reader = threading.Thread(target=relay, args=(rank, source, sink), daemon=True)
                reader.start()
                self.ranks.readers.append(reader)
        pids = [
            [str(rank), str(c.pid), str(self.job.devices)]
            for rank, c in enumerate(self.ranks.children)
        ]
        table(f"{self.job.processes} processes", pids, header=["rank", "pid", "devices"])
        try:
            code = self._wait()
        finally:
            self.ranks.send(signal.SIGKILL)
            for child in self.ranks.children:
                child.wait()
            for reader in self.ranks.readers:
                reader.join(5.0)
        return code

    def _wait(self) -> int:
        """Until all have ended, or one has failed and the others had their time."""
        deadline, first = None, 0
        while True:
            codes = self.ranks.codes()
            ended = [code for code in codes if code]
            if ended and deadline is None:
                # Of several at once: what the others end with for want of one is worth another start.
                first = next((code for code in ended if not exits.restarts(code)), ended[0])
                at = codes.index(first)
                say(f"rank {at} (pid {self.ranks.children[at].pid}) ended with code {first}")
                # After a crash the others wait for it in a collective: there is nothing they could save.
                known = first in (
                    exits.PREEMPTED,
                    exits.CONFIG_FAULT,
                    exits.DATA_FAULT,
                    exits.DIVERGED,
                )
                deadline = time.monotonic() + (SAVING_SECONDS if known else 0.0)
            if None not in codes:
                return first
            if deadline is not None and time.monotonic() > deadline:
                return first
            time.sleep(POLL_SECONDS)

    def _stop(self, signum: int, _: FrameType | None) -> None:
        self.asked += 1
        if self.asked == 1:
            say(
                f"{signal.Signals(signum).name}: the processes save and end; once more ends them at once"
            )
            # One is enough: JAX tells the others. A terminal's Ctrl-C has not reached them.
            self.ranks.send(signal.SIGTERM)
        else:
            self.ranks.send(signal.SIGKILL)


def spawn(job: Job, rank: int, port: int) -> subprocess.Popen[str]:
    """One process of the run, in a session of its own."""
    count = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(job.processes),
    }
    own = {"JAX_PROCESS_ID": str(rank), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*COMMAND, *job.arguments],
        env={**os.environ, **count, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def relay(rank: int, source: IO[str], sink: IO[str]) -> None:
    """Each line, with the rank before it."""
    for line in source:
        if not any(noise in line for noise in NOISE):
            sink.write(f"[{rank}] {line}" if line.endswith("\n") else f"[{rank}] {line}\n")
            sink.flush()


def shell_code(code: int) -> int:
    """Of a process that a signal ended, 128 and its number."""
    return 128 - code if code < 0 else code


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def parse(arguments: Sequence[str]) -> Job:
    """Raises ConfigFault with all that is wrong."""
    values, rest, faults = {"-n": "", "-d": "", "--restarts": str(RESTARTS)}, list(arguments), []
    plain: list[str] = []
    overrides: list[str] = []
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in values:
            values[name] = value if equals else (rest.pop(0) if rest else "")
        elif name.startswith("--config."):
            overrides.append(name + equals + value)
        elif name.startswith("-"):
            faults.append(f"{name}: unknown flag: wanted {USAGE}")
        else:
            plain.append(name + equals + value)
    numbers = {name: int(text) if text.isdecimal() else -1 for name, text in values.items()}
    for name, number in numbers.items():
        if number < (0 if name == "--restarts" else 1):
            faults.append(f"{name}: wanted a whole number, found {values[name]!r}: {USAGE}")
    if len(plain) != 2:
        faults.append(f"wanted CONFIG and WORKDIR, found {' '.join(plain) or 'none'}: {USAGE}")
    if faults:
        raise ConfigFault(*faults)
    processes, devices = numbers["-n"], numbers["-d"]
    total = f"--config.cpu_devices={processes * devices}"
    given = (f"--config={plain[0]}", f"--workdir={plain[1]}", total, *overrides)
    return Job(processes, devices, numbers["--restarts"], given)


def say(text: str) -> None:
    """Of the supervisor itself."""
    print(f"local: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """The command."""
    try:
        return Supervisor(parse(sys.argv[1:])).run()
    except Stop as stop:
        for line in stop.lines():
            say(line)
        return stop.code


if __name__ == "__main__":
    sys.exit(main())
