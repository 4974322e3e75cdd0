"""The processes of a run: how they are found, joined and left. Everything of several hosts starts here.

`detect` reads what the launcher left in the environment; `join` calls the roll, refuses hosts that differ,
and starts JAX's service; `leave` ends all of them alike. Only the first process (`is_first`) writes and
speaks.
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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import ringflash
from ringflash import rollcall
from ringflash.exits import ConfigFault
from ringflash.hostlists import expand, tasks
from ringflash.machine import attribute
from ringflash.rollcall import Hello, short

PORT = 8476
HIGH_PORT, HIGH_PORTS = 61440, 4096  # of jobs that share a machine: each its own, by its number
JOIN_SECONDS = 300  # images are pulled and nodes start at their own pace
HEARTBEAT_SECONDS = 60  # after which a process that died without a word is missed
SEEN_SECONDS = 10.0  # until what one host writes is seen on another, on slow network storage
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
ADDRESS, COUNT, RANK = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
Variables = Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """Of one process, what it knows of all.

    coordinator: HOST:PORT of the first.  hosts: of each rank, as far as the launcher names them.
    local_rank: of this one among those of its machine, where each is to take one device of it.
    start: how a run is started on all.  notice: what looked like a cluster and is none.
    """

    launcher: str = "one process"
    coordinator: str = ""
    count: int = 1
    rank: int = 0
    hosts: tuple[str, ...] = ()
    local_rank: int | None = None
    start: str = ""
    notice: str = ""


def detect(variables: Variables, device: str) -> Cluster:
    """The cluster that the environment tells of; one process where it tells of none, or of half of one.

    Raises ConfigFault for values that are no numbers or do not fit together.
    """
    finders: tuple[Callable[[Variables], Cluster | None], ...] = (by_jax, by_gke, by_mpi, by_slurm)
    try:
        found = [one for one in (find(variables) for find in finders) if one is not None]
    except ValueError as error:
        raise ConfigFault(f"the launcher's variables cannot be understood: {error}") from error
    if not found and device == "tpu":
        found = [by_metadata(variables)]
    whole = next((one for one in found if one.count > 1), Cluster())
    if not 0 <= whole.rank < whole.count:
        raise ConfigFault(f"{whole.launcher}: rank {whole.rank} of {whole.count} processes")
    if whole.count > 1:
        return replace(whole, coordinator=variables.get(ADDRESS, whole.coordinator), notice="")
    return Cluster(notice="; ".join(one.notice for one in found if one.notice))


def by_jax(given: Variables) -> Cluster | None:
    """JAX's own variables, which `launch/local.sh` and whoever has a launcher of his own set."""
    names = (ADDRESS, COUNT, RANK)
    there = [name for name in names if given.get(name)]
    if COUNT not in there and RANK not in there:
        return None  # an address alone serves the other finders
    if len(there) < len(names):
        absent = ", ".join(name for name in names if name not in there)
        return Cluster(notice=f"{', '.join(there)} set without {absent}")
    return Cluster(
        "JAX_* variables",
        given[ADDRESS],
        number(given, COUNT),
        number(given, RANK),
        start=f"the same command in {given[COUNT]} processes, {RANK}=0 to {number(given, COUNT) - 1}",
    )


def by_gke(given: Variables) -> Cluster | None:
    """A pod with a part of a TPU slice, or of one of several slices; GKE sets these variables."""
    names = given.get("TPU_WORKER_HOSTNAMES", "")
    if not names:
        return None
    if not given.get("TPU_WORKER_ID"):
        return Cluster(notice="TPU_WORKER_HOSTNAMES set without TPU_WORKER_ID")
    hosts = tuple(names.split(","))
    found = of_slices(given, hosts, number(given, "TPU_WORKER_ID"))
    start = "the JobSet anew: a pod is started by nothing else"
    return replace(found, launcher="GKE", start=start)


def by_metadata(given: Variables) -> Cluster:
    """A TPU VM, whose peers the machine's metadata server names."""
    try:
        # Of each worker: two fields that say nothing, and its address.
        ends = attribute("worker-network-endpoints").split(",")
        hosts = tuple(end.split(":")[-1] for end in ends)
        worker = int(attribute("agent-worker-number"))
    except (OSError, ValueError) as error:
        return Cluster(notice=f"a TPU, and no metadata of its slice: {error}")
    start = (
        "gcloud compute tpus tpu-vm ssh NAME --worker=all --command=...: launch/tpu_vm.sh does it"
    )
    return replace(of_slices(given, hosts, worker), launcher="TPU VM", start=start)


def of_slices(given: Variables, hosts: tuple[str, ...], worker: int) -> Cluster:
    """The processes of all slices: those of the first slice first."""
    slices = number(given, "MEGASCALE_NUM_SLICES", 1)
    at = number(given, "MEGASCALE_SLICE_ID", 0)
    first = hosts[0]
    if slices > 1:
        first = given.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
        if not first:
            raise ValueError("MEGASCALE_NUM_SLICES without MEGASCALE_COORDINATOR_ADDRESS")
    return Cluster(
        coordinator=f"{first}:{PORT}",
        count=slices * len(hosts),
        rank=at * len(hosts) + worker,
        hosts=("",) * (at * len(hosts)) + hosts,
    )


def by_mpi(given: Variables) -> Cluster | None:
    """Open MPI's `mpirun`."""
    if "OMPI_COMM_WORLD_SIZE" not in given:
        return None
    count, here = number(given, "OMPI_COMM_WORLD_SIZE"), number(given, "OMPI_COMM_WORLD_LOCAL_SIZE")
    # PRRTE of Open MPI 5 does not say where rank 0 is; Open MPI 4 names the machine of mpirun.
    uri = given.get("OMPI_MCA_orte_hnp_uri", "")
    first = uri.partition("://")[2].split(":")[0].split(",")[0]
    if not first and here < count and ADDRESS not in given:
        raise ValueError(f"mpirun names no coordinator: set {ADDRESS}=HOST:PORT of rank 0 (-x)")
    job = sum(map(ord, given.get("OMPI_MCA_ess_base_jobid", "")))
    return Cluster(
        "Open MPI",
        f"{'localhost' if here == count else first}:{HIGH_PORT + job % HIGH_PORTS}",
        count,
        number(given, "OMPI_COMM_WORLD_RANK"),
        local_rank=number(given, "OMPI_COMM_WORLD_LOCAL_RANK") if here > 1 else None,
        start=f"mpirun -n {count} with the same command",
    )


def by_slurm(given: Variables) -> Cluster | None:
    """A task of `srun`. A shell in an allocation, or a batch script, is none."""
    if "SLURM_JOB_ID" not in given:
        return None
    needed = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_PROCID")
    absent = [name for name in needed if not given.get(name)]
    if absent:
        return Cluster(notice=f"in a job of SLURM, but not started by srun: no {', '.join(absent)}")
    nodes, count = expand(given["SLURM_STEP_NODELIST"]), number(given, "SLURM_STEP_NUM_TASKS")
    shares = tasks(given.get("SLURM_STEP_TASKS_PER_NODE", ""), len(nodes))
    crowded = max(shares, default=1) > 1
    return Cluster(
        "SLURM",
        f"{nodes[0]}:{HIGH_PORT + int(given['SLURM_JOB_ID']) % HIGH_PORTS}",
        count,
        number(given, "SLURM_PROCID"),
        hosts=tuple(node for node, n in zip(nodes, shares, strict=False) for _ in range(n)),
        local_rank=number(given, "SLURM_LOCALID") if crowded else None,
        start=f"srun -N {len(nodes)} -n {count} with the same command",
    )


def number(given: Variables, name: str, default: int | None = None) -> int:
    """A variable's. Raises ValueError where it has none."""
    text = given.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ValueError(f"{name}: wanted a whole number, found {text!r}")
    return int(text)


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
