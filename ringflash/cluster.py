"""The processes of a run, as launchers tell of them: `detect` knows each, and all in this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ringflash.exits import ConfigFault
from ringflash.hostlists import expand, tasks
from ringflash.machine import attribute

PORT = 8476
HIGH_PORT, HIGH_PORTS = 61440, 4096  # of jobs that share a machine: each its own, by its number
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
