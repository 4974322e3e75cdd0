"""The training step of a configuration, compiled for a slice that is not there, and what is in it.

It is the very function that a run jits (`build`), on a mesh made as a run makes it. `compiled` is the
parent's side, `compile_all` the child's. Arrays are abstract: nothing is computed, no data is read.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ringflash import config as configs
from ringflash.attention import compiler_options
from ringflash.build import Built, abstract_batch, build, strategy_of
from ringflash.config import Config
from ringflash.mesh import make_mesh
from ringflash.plan import memory, program
from ringflash.plan.compiler import in_child, slice_devices
from ringflash.plan.memory import Buffer
from ringflash.plan.program import Program
from ringflash.plan.where import CPU, Where
from ringflash.ring_order import ring_hops
from ringflash.startup import simulate

SECONDS_A_STEP = 1800
FLAGS = "--xla_jf_dump_to="  # no schedules: they would take several times as long as the compiler
FULL = "RESOURCE_EXHAUSTED"
HOST = "pinned_host"


@dataclass(frozen=True)
class StepFacts:
    """Of one compiled step; sizes in bytes of one device.

    total_bytes: what it needs at its peak, arguments included; temporaries: that less the state and the
    batch.  fits: whether the compiler found room.  program: None where it did not: then there is no code.
    """

    mesh: dict[str, int]
    strategy: str
    fits: bool
    total_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    code_bytes: int
    host_bytes: int
    buffers: tuple[Buffer, ...]
    compile_seconds: float
    hop_links: int | None
    program: Program | None

    @property
    def needed_bytes(self) -> int:
        """The program's code lies in the same memory."""
        return self.total_bytes + self.code_bytes

    @property
    def temporary_bytes(self) -> int:
        """Gradients, activations, and all else that is not there between two steps."""
        return self.total_bytes - self.parameter_bytes - self.optimizer_bytes - self.batch_bytes


def compiled(asked: Sequence[tuple[Config, Where]]) -> list[StepFacts | str]:
    """The facts of each step, or why there are none. Raises what `in_child` does."""
    values = [[dataclasses.asdict(config), dataclasses.asdict(where)] for config, where in asked]
    told = in_child(
        f"{__name__}:compile_all",
        values,
        seconds=SECONDS_A_STEP * len(asked),
        flags=FLAGS,
        needs_libtpu=not all(where.simulated for _, where in asked),
    )
    return [one if isinstance(one, str) else from_json(one) for one in told]


def compile_all(asked: list[list[dict[str, Any]]], dump: Path) -> list[dict[str, Any] | str]:
    """In the child: facts as JSON has them, or what assembly or the compiler raised."""
    told: list[dict[str, Any] | str] = []
    for config, where in asked:
        try:
            facts = compile_one(configs.from_json(config), Where(**where), dump)
            told.append(dataclasses.asdict(facts))
        except Exception as refusal:  # whatever it is, it is the answer
            told.append(f"{type(refusal).__name__}: {refusal}"[:2000])
    return told


def compile_one(config: Config, where: Where, dump: Path) -> StepFacts:
    """In the child: one step. Raises ValueError for what cannot be put together."""
    shutil.rmtree(dump)
    dump.mkdir()
    mesh = make_mesh(config.mesh, found_devices(where))
    built = build(config, mesh)
    lowered = built.step.lower(built.abstract_state, abstract_batch(config, mesh))
    # The compiler writes the program itself: a newer libtpu's is not always one that jaxlib can read.
    wanted: dict[str, str | bool] = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
    wanted |= compiler_options(mesh)
    start = time.process_time()
    try:
        used = lowered.compile(compiler_options=wanted).memory_analysis()
        assert used is not None
    except jax.errors.JaxRuntimeError as refusal:
        if FULL not in str(refusal):
            raise
        used = None
    seconds = time.process_time() - start
    sizes = argument_bytes(built, config, mesh, away=None if where.simulated else HOST)
    return StepFacts(
        mesh=dict(mesh.shape),
        strategy=strategy_of(config, mesh).strategy,
        fits=used is not None,
        total_bytes=total_of(used, dump),
        code_bytes=0 if used is None else used.generated_code_size_in_bytes,
        host_bytes=host_of(used),
        buffers=tuple(buffers(built, dump)),
        compile_seconds=seconds,
        hop_links=ring_hops(mesh),
        program=None if used is None else program.read(written(dump, program_file(where))),
        **sizes,
    )


def found_devices(where: Where) -> Sequence[Any]:
    """Those of a slice that need not be there, or simulated ones."""
    if where.simulated:
        simulate(where.devices)  # as a run does: another schedule takes other memory
        return jax.devices(CPU)
    return slice_devices(where.topology, where.slices)


def program_file(where: Where) -> str:
    """The file with the scheduled program."""
    return "after_optimizations.txt" if where.simulated else "after_codegen.txt"


def argument_bytes(built: Built, config: Config, mesh: Mesh, away: str | None) -> dict[str, int]:
    """What the state and the batch take of one device.

    away: the kind of memory that is not the device's; None where it has no other, as a simulated one.
    """
    state, batch = built.abstract_state, abstract_batch(config, mesh)

    def held(tree: Any) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
            if away is None or x.sharding.memory_kind != away
        )

    return {
        "parameter_bytes": held(state.params),
        "optimizer_bytes": held((state.opt_state, state.step)),
        "batch_bytes": held(batch),
    }


def total_of(used: Any, dump: Path) -> int:
    """The compiler's figure; of what does not fit, the sum of its assignment."""
    if used is None:
        return memory.total_of(written(dump, "buffer-assignment.txt"))
    own = used.output_size_in_bytes - used.alias_size_in_bytes
    return int(used.argument_size_in_bytes + own + used.temp_size_in_bytes)


def host_of(used: Any) -> int:
    """Of the host's memory, for one device: what was offloaded, and what is on its way."""
    return 0 if used is None else used.host_argument_size_in_bytes + used.host_temp_size_in_bytes


def buffers(built: Built, dump: Path) -> list[Buffer]:
    """The largest, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(built.abstract_state)
    names = {
        number: jax.tree_util.keystr(path, simple=True, separator=".")
        for number, (path, _) in enumerate(leaves)
    }
    found = memory.slots(written(dump, "buffer-assignment.txt"))
    origins = memory.Origins(written(dump, "after_optimizations.txt"))
    return memory.largest(found, origins, names)


def written(dump: Path, ending: str) -> str:
    """What the compiler wrote of the step in the file that ends so; its own small programs are no step."""
    found = [file for file in dump.glob(f"*{ending}") if "jit_step" in file.name]
    if len(found) != 1:
        raise ValueError(
            f"wanted one file *jit_step*{ending} from the compiler, found {len(found)}"
        )
    return found[0].read_text()


def from_json(values: dict[str, Any]) -> StepFacts:
    """The inverse of `dataclasses.asdict`."""
    found = values["program"] and program.from_json(values["program"])
    parts = {"buffers": tuple(Buffer(**each) for each in values["buffers"]), "program": found}
    return StepFacts(**{**values, **parts})
