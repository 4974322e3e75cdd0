"""Jobs compiled in a child, and the schedules that come back."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from ringflash.bench import ours_tpu, splash
from ringflash.bench.candidates import Candidate, Job, Shape
from ringflash.bench.cycles import Cycles, cycles
from ringflash.plan import schedule
from ringflash.plan.compiler import in_child
from ringflash.plan.generations import Topology
from ringflash.plan.schedule import Schedule

SECONDS_A_JOB = 300
CANDIDATES: dict[str, Candidate] = {ours_tpu.TPU.name: ours_tpu.TPU, **splash.PEERS}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The schedules of a job, one for each part; or why there are none."""

    job: Job
    schedules: tuple[Schedule, ...] = ()
    error: str = ""


def measure(jobs: Sequence[Job], topology: Topology, flags: str = "") -> list[Compiled]:
    """Compile each for one device of the slice, in one child. Raises what `in_child` does.

    A job that the compiler refuses, for VMEM perhaps, has an error and does not stop the others.
    """
    asked = {"topology": topology.name, "jobs": [dataclasses.asdict(job) for job in jobs]}
    work = f"{__name__}:compile_all"
    told = in_child(
        work, asked, seconds=SECONDS_A_JOB * len(jobs), flags=f"{schedule.ONLY} {flags}"
    )
    return [
        Compiled(job, tuple(map(schedule.from_json, one["schedules"])), one["error"])
        for job, one in zip(jobs, told, strict=True)
    ]


def weigh(one: Compiled, topology: Topology) -> Cycles:
    """The cycles of a job that compiled."""
    parts = CANDIDATES[one.job.candidate].parts(one.job)
    return cycles(one.job, parts, one.schedules, topology.generation)


def compile_all(asked: dict[str, Any], dump: Path) -> list[dict[str, Any]]:
    """In the child: the schedules of all jobs, as JSON has them."""
    # Loads the compiler: never in the parent.
    from jax.experimental import topologies

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=asked["topology"])
    told = []
    for values in asked["jobs"]:
        job = job_of(values)
        try:
            found, error = compile_one(job, slice_.devices[0], dump), ""
        except Exception as refusal:  # whatever a candidate or the compiler raises is its answer
            found, error = [], f"{type(refusal).__name__}: {refusal}"[:2000]
        told.append({"schedules": [dataclasses.asdict(x) for x in found], "error": error})
    return told


def compile_one(job: Job, device: Any, dump: Path) -> list[Schedule]:
    """In the child: the schedule of each part of one job."""
    shutil.rmtree(dump)
    dump.mkdir()
    candidate = CANDIDATES[job.candidate]
    function, arguments = candidate.build(job, device)
    compile_in_own_layouts(function, arguments)
    found = []
    for part in candidate.parts(job):
        named = schedule.read(dump, part.kernel)
        if len(named) != 1:
            raise ValueError(f"{job.candidate}: wanted one kernel {part.kernel}, found {named}")
        found += named
    return found


def compile_in_own_layouts(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Compile for the layouts of arrays in HBM that suit the function.

    Else XLA turns arrays before and after the kernel, and of that code the dump takes minutes.
    """
    where = jax.tree.leaves(arguments)[0].sharding
    auto = Format(Layout.AUTO, where)
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    jax.jit(function, in_shardings=auto, out_shardings=auto).lower(*bare).compile()


def job_of(values: dict[str, Any]) -> Job:
    """The inverse of `dataclasses.asdict`."""
    tiles = values["tiles"]
    fresh = {"shape": Shape(**values["shape"]), "tiles": tiles and tuple(tiles)}
    return Job(**{**values, **fresh})
