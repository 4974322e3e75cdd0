"""The processes of a run, once they are found: how they join, agree and leave.

`join` calls the roll, refuses hosts that differ, and starts JAX's service; `leave` ends all of them alike.
Only the first process (`is_first`) writes and speaks.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import ringflash
from ringflash import rollcall
from ringflash.cluster import Cluster
from ringflash.rollcall import Hello, short

JOIN_SECONDS = 300  # images are pulled and nodes start at their own pace
HEARTBEAT_SECONDS = 60  # after which a process that died without a word is missed
SEEN_SECONDS = 10.0  # until what one host writes is seen on another, on slow network storage
LOST = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED")
LOST_CONNECTION = ("Gloo", "Connection reset", "Connection closed", "heartbeat")
SHOWN = 16  # hosts in the table
VERSIONS = ("python", "jax")  # shown of each; others are compared too
COLUMNS = ("rank", "host", "devices", *VERSIONS, "code")
LIBRARIES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "qwix",
)


def join(cluster: Cluster, mine: Hello, device: str) -> list[Hello]:
    """Call the roll, then start JAX's service for all; who is there, by rank. For one process: nobody.

    From then on only the first writes to standard output.
    Raises Missing where a process does not come, ConfigFault where one differs. No device is touched before.
    """
    if cluster.notice:
        print(f"ringflash: {cluster.notice}: run as one process", file=sys.stderr)
    if cluster.count == 1:
        return []
    seconds = float(os.environ.get("RINGFLASH_JOIN_SECONDS") or JOIN_SECONDS)
    roll = rollcall.call(
        cluster.coordinator,
        cluster.count,
        cluster.rank,
        mine,
        hosts=cluster.hosts,
        start=cluster.start,
        seconds=seconds,
    )
    one_each = device == "gpu" and cluster.local_rank is not None
    jax.distributed.initialize(
        cluster.coordinator,
        cluster.count,
        cluster.rank,
        local_device_ids=cluster.local_rank if one_each else None,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return roll


def hosts(roll: Sequence[Hello]) -> list[list[str]]:
    """Rows under `COLUMNS`: of each host devices, versions, and a digest of the code."""
    kinds: dict[int, list[str]] = {}
    for device in jax.devices():
        kinds.setdefault(device.process_index, []).append(device.device_kind)
    return [
        [
            str(one.rank),
            one.host,
            f"{len(kinds[one.rank])} x {kinds[one.rank][0]}",
            *(one.versions[name] for name in VERSIONS),
            short(one.code),
        ]
        for one in roll[:SHOWN]
    ]


def leave(seconds: float) -> bool:
    """Wait for the others to end too; whether they did within that time. True for one process."""
    if not many():
        return True
    ended = threading.Thread(target=jax.distributed.shutdown, daemon=True)
    ended.start()
    ended.join(seconds)
    return not ended.is_alive()


def is_lost_peer(error: Exception) -> bool:
    """Whether it is what a process sees of another that died: no fault of the program, so start again."""
    told = str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and (
        told.startswith(LOST) or any(word in told for word in LOST_CONNECTION)
    )


def many() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this process writes and speaks for all."""
    return jax.process_index() == 0


def agreed(choose: Callable[[], int]) -> int:
    """What `choose` answers on the first process, told to all, so that all do the same. Call it on all."""
    answer = np.int32(choose() if is_first() else 0)
    return int(multihost_utils.broadcast_one_to_all(answer))


def hello(leaves: Mapping[str, Any], workdir: Path) -> Hello:
    """What this process says of itself when the roll is called; leaves: of its configuration."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        # One that is on no host is the same on all.
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return Hello(
        host=socket.gethostname(),
        workdir=str(workdir),
        versions=versions,
        code=rollcall.code_of(Path(ringflash.__file__).parent),
        config={key: repr(value) for key, value in leaves.items()},
    )


def odd_ones(text: str) -> list[int]:
    """The ranks whose text is not that of the first process. Call it on all."""
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint32)
    digests = np.atleast_2d(multihost_utils.process_allgather(digest))
    return [at for at, one in enumerate(digests) if not np.array_equal(one, digests[0])]


def blind(workdir: Path) -> list[int]:
    """The ranks that do not see what the first writes into the workdir, which all share. Call it on all."""
    mark = workdir / f".seen-{agreed(lambda: secrets.randbelow(2**31))}"
    if is_first():
        mark.touch()
    multihost_utils.sync_global_devices("ringflash: the workdir is marked")
    deadline = time.monotonic() + SEEN_SECONDS
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = np.atleast_1d(multihost_utils.process_allgather(np.int32(mark.exists())))
    if is_first():
        mark.unlink()
    return [at for at, one in enumerate(seen) if not one]
