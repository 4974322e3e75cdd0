"""The roll of a run's processes, called before any device is touched: who is missing, and who differs.

Rank 0 listens where JAX's service will; the others come, say what they are, and get its answer. So a host
with other code, other versions or another configuration is refused by name, and one that never came is
missed by name, where JAX by itself would wait in silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ringflash.exits import ConfigFault, Missing

LARGEST = 2**22  # bytes of what one says
PATIENCE = 10.0  # seconds for one that has come to say its line, beside the answer
JOINED_LATER = 600.0  # seconds by which rank 0's deadline may be behind that of another
PAUSE = 0.2  # seconds until another try to reach rank 0
TOLD = 4  # differences told of a host


@dataclass(frozen=True)
class Hello:
    """What one process says of itself.

    code: a digest of each file.  config: each leaf's value, as text.  versions: of Python and libraries.
    """

    host: str
    rank: int = 0
    workdir: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)

    @property
    def same(self) -> dict[str, str]:
        """What must be the same on all."""
        parts = {"version of ": self.versions, "code of ": self.code, "--config.": self.config}
        flat = {
            prefix + name: value for prefix, part in parts.items() for name, value in part.items()
        }
        return flat | {"--workdir": self.workdir}


def call(
    address: str,
    count: int,
    rank: int,
    mine: Hello,
    *,
    hosts: tuple[str, ...],
    start: str,
    seconds: float,
) -> list[Hello]:
    """What all processes say, by rank, when all have come and are alike.

    hosts: of the ranks, as far as known.  start: how a run is started on all.
    Raises Missing where they have not come within these seconds, ConfigFault where one differs.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigFault(f"the coordinator's address: wanted HOST:PORT, found {address!r}")
    mine = replace(mine, rank=rank)
    deadline = time.monotonic() + seconds

    def names(ranks: list[int]) -> str:
        known = dict(enumerate(hosts))
        return ", ".join(f"rank {at}{f' ({known[at]})' if known.get(at) else ''}" for at in ranks)

    if rank == 0:
        return _hold(int(port), count, mine, deadline, names, start)
    answer = _come(host, int(port), mine, deadline)
    if answer is None:
        first = f"rank 0 was not reached at {address} within {seconds:g} s"
        raise Missing(f"{first}: it is not started, or a firewall is between. Start {start}")
    if answer["missing"]:
        raise Missing(answer["missing"])
    if answer["faults"]:
        raise ConfigFault(*answer["faults"])
    return [replace(mine, rank=at, host=name) for at, name in enumerate(answer["hosts"])]


def differences(roll: list[Hello]) -> list[str]:
    """A line for each process that is not as most are; where as many are one way as another, as rank 0 is."""
    names = dict.fromkeys(name for hello in roll for name in hello.same)
    usual = {name: _usual([hello.same.get(name, "absent") for hello in roll]) for name in names}
    lines = []
    for hello in roll:
        odd = [name for name in names if hello.same.get(name, "absent") != usual[name]]
        if not odd:
            continue
        told = ", ".join(
            f"{name}: {hello.same.get(name, 'absent')}, elsewhere {usual[name]}"
            for name in odd[:TOLD]
        )
        more = f" and {len(odd) - TOLD} more" if len(odd) > TOLD else ""
        lines.append(
            f"rank {hello.rank} (host {hello.host}) is not as the others are: {told}{more}"
        )
    return lines


def code_of(package: Path) -> dict[str, str]:
    """A digest of each of the package's own files."""
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".json"))
    return {
        str(path.relative_to(package.parent)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in files
    }


def short(digests: Mapping[str, str]) -> str:
    """One digest of many."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()[:12]


def _usual(values: list[str]) -> str:
    counts = Counter(values)
    most = max(counts.values())
    return next(value for value in values if counts[value] == most)


def _hold(
    port: int,
    count: int,
    mine: Hello,
    deadline: float,
    names: Callable[[list[int]], str],
    start: str,
) -> list[Hello]:
    """Rank 0: hear all, answer all."""
    here, doors = {0: mine}, []
    faults: list[str] = []
    with _listener(port, deadline) as listener:
        for door, hello in _arrivals(listener, deadline):
            before = here.get(hello.rank)
            if not 0 < hello.rank < count:
                faults.append(f"host {hello.host} came as rank {hello.rank} of {count}")
            elif before is not None and before.host != hello.host:
                faults.append(
                    f"hosts {before.host} and {hello.host} both came as rank {hello.rank}"
                )
            here[hello.rank] = hello
            doors.append(door)
            if faults or len(here) == count:
                break
        absent = [at for at in range(count) if at not in here]
        missing = ""
        if absent and not faults:
            missing = (
                f"{len(absent)} of {count} processes did not come: {names(absent)}. Start {start}"
            )
        roll = [here[at] for at in sorted(here)]
        faults += [] if missing else differences(roll)
        # All else is alike, or told in faults.
        answer = {"missing": missing, "faults": faults, "hosts": [one.host for one in roll]}
        line = json.dumps(answer).encode() + b"\n"
        for door in doors:
            _say(door, line)
    if missing:
        raise Missing(missing)
    if faults:
        raise ConfigFault(*faults)
    return roll


def _listener(port: int, deadline: float) -> socket.socket:
    """On all of the host's addresses; waits for a port that an earlier start still holds."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    while True:
        try:
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=both, backlog=1024
            )
        except OSError as error:
            if time.monotonic() > deadline:
                told = f"port {port}, at which rank 0 is to be found, cannot be had: {error}"
                raise ConfigFault(f"{told}; JAX_COORDINATOR_ADDRESS names another") from error
        time.sleep(PAUSE)


def _arrivals(listener: socket.socket, deadline: float) -> Iterator[tuple[socket.socket, Hello]]:
    """Who comes until the deadline. Each is heard in a thread: a stranger must not hold up the rest."""
    heard: queue.Queue[tuple[socket.socket, Hello]] = queue.Queue()

    def hear(door: socket.socket) -> None:
        try:
            heard.put((door, Hello(**_line(door))))
        except (OSError, ValueError, TypeError):
            door.close()  # none of ours

    try:
        while time.monotonic() < deadline:
            listener.settimeout(PAUSE)
            with contextlib.suppress(TimeoutError):
                door, _ = listener.accept()
                threading.Thread(target=hear, args=(door,), daemon=True).start()
            while not heard.empty():
                yield heard.get()
    finally:
        while not heard.empty():
            heard.get()[0].close()


def _come(host: str, port: int, mine: Hello, deadline: float) -> dict[str, Any] | None:
    """Another rank: what rank 0 answers, or None where it cannot be reached in time."""
    line = json.dumps(asdict(mine)).encode() + b"\n"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=PATIENCE) as door:
                door.sendall(line)
                # Rank 0 may have started later than we: it answers by its own deadline.
                return _line(door, deadline - time.monotonic() + JOINED_LATER)
        except (OSError, ValueError):
            time.sleep(PAUSE)
    return None


def _line(door: socket.socket, seconds: float = PATIENCE) -> dict[str, Any]:
    """The one line that the other end says. Raises OSError or ValueError where it says none."""
    deadline, told = time.monotonic() + seconds, bytearray()
    while not told.endswith(b"\n"):
        door.settimeout(max(0.001, deadline - time.monotonic()))
        part = door.recv(2**16)
        if not part or len(told) > LARGEST:
            raise ValueError("no line")
        told += part
    found = json.loads(told)
    if not isinstance(found, dict):
        raise ValueError("no record")
    return found


def _say(door: socket.socket, line: bytes) -> None:
    """Answer one that waits; it may be gone, which JAX's service will then tell."""
    try:
        with door:
            door.settimeout(PATIENCE)
            door.sendall(line)
    except OSError:
        pass
