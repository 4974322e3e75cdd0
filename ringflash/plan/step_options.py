"""The arguments of `ringflash plan --config=FILE.py`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringflash import checks, config_file
from ringflash.bench import flags
from ringflash.config import Config, MeshConfig, override, resolve
from ringflash.exits import ConfigFault
from ringflash.plan.generations import Generation, topology
from ringflash.plan.where import CPU, Where

SWITCHES = ("json", "search")
NAMES = ("config", "topology", "slices", "price", *SWITCHES)
HELP = """usage: ringflash plan --config=FILE.py[:ARG] --topology=v5p:4x4x4 [--slices=2] [--price=4.2]
         [--search] [--json] [--config.KEY=VALUE ...]

Compiles the training step of the configuration, the very function that a run jits, for a slice that need not
be there, and tells whether it fits, where the memory goes, and how long a step takes, as a sum of parts.
`pip install 'ringflash[plan]'` installs the compiler. --topology=cpu:8 compiles for simulated devices: memory
alone.
--price is of a chip for an hour, in any currency. --slices: that many of the topology, `mesh.data` over them.
--search compiles other meshes, remat policies, batches and strategies too: the fastest that fits, and the
longest sequence that does.
Exit codes: 0 it fits, 1 it does not, 3 wrong configuration or arguments.
"""


@dataclass(frozen=True)
class StepOptions:
    """What to compile, and what to tell."""

    path: str
    config: Config
    where: Where
    price: float | None = None
    search: bool = False
    json: bool = False

    @property
    def generation(self) -> Generation | None:
        """None for simulated devices."""
        return self.where.generation


def parse(arguments: Sequence[str]) -> StepOptions:
    """`--name=value ...` as StepOptions. Raises ConfigFault with all that is wrong."""
    overrides = [one for one in arguments if one.startswith("--config.")]
    taken, faults = flags.gather([one for one in arguments if one not in overrides], value)
    if "config" not in taken and not any("--config" in fault for fault in faults):
        faults.append("--config is missing: wanted --config=FILE.py")
    if "topology" not in taken and not any("--topology" in fault for fault in faults):
        faults.append("--topology is missing: wanted --topology=v5p:4x4x4, say")
    where = Where(taken["topology"], taken.get("slices", 1)) if "topology" in taken else None
    config, told = read(taken["config"], overrides, where) if "config" in taken else (None, [])
    faults += told
    if where is not None and where.simulated and where.slices > 1:
        faults.append(f"--slices={where.slices}: simulated devices are one slice")
    if config is not None and where is not None and not faults:
        faults += mesh_faults(config.mesh, where)
    if faults or config is None or where is None:
        raise ConfigFault(*faults)
    others = {name: taken[name] for name in ("price", *SWITCHES) if name in taken}
    return StepOptions(taken["config"], config, where, **others)


def read(
    path: str, overrides: Sequence[str], where: Where | None
) -> tuple[Config | None, list[str]]:
    """The configuration, or all that is wrong with it; where: None for what is not known yet."""
    simulated = where is not None and where.simulated
    try:
        file = config_file.read(path)
    except ConfigFault as fault:
        return None, fault.lines()
    if where is not None and simulated:
        overrides = [*overrides, f"--config.cpu_devices={where.devices}"]
    platform = CPU if simulated else "tpu"
    judge = partial(checks.faults, file.values, path=file.path, platform=platform)
    faults = judge(overrides=overrides)
    if not faults and where is not None:
        left = left_over(resolve(override(file.values, overrides)).mesh, where)
        overrides = [*overrides, *left]
        faults = judge(overrides=overrides) if left else []
    return (None, faults) if faults else (resolve(override(file.values, overrides)), [])


def left_over(mesh: MeshConfig, where: Where) -> list[str]:
    """The flag for an axis of -1 that says what is left for it: only then can all be checked."""
    sizes = dataclasses.asdict(mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    return [
        f"--config.mesh.{axis}={where.devices // known}"
        for axis, size in sizes.items()
        if size == -1 and where.devices % known == 0
    ]


def value(argument: str) -> dict[str, Any]:
    """One argument. Raises ConfigFault."""
    name, text = flags.split(argument, NAMES, SWITCHES)
    if name in SWITCHES:
        return {name: True}
    if name == "topology":
        return {name: place(argument, text)}
    if name == "slices":
        return {name: flags.positive(argument, text)}
    if name == "price":
        return {name: above_zero(argument, text)}
    return {name: text}


def place(argument: str, text: str) -> str:
    """A topology in the compiler's words, or cpu:COUNT. Raises ConfigFault."""
    if text.partition(":")[0] == CPU:
        if not re.fullmatch(r"cpu:[1-9]\d*", text, re.ASCII):
            raise ConfigFault(f"{argument}: wanted cpu:8, say")
        return text
    try:
        return topology(text).name
    except ConfigFault as fault:
        raise ConfigFault(f"{argument}: {fault}") from None


def above_zero(argument: str, text: str) -> float:
    """A number. Raises ConfigFault."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ConfigFault(f"{argument}: wanted a number above 0")
    return found


def mesh_faults(mesh: MeshConfig, where: Where) -> list[str]:
    """Why the mesh does not lie on these devices, and one that would."""
    sizes, devices = dataclasses.asdict(mesh), where.devices
    known = math.prod(size for size in sizes.values() if size != -1)
    faults = []
    if devices % known if -1 in sizes.values() else devices != known:
        shape = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        fit = that_fits(mesh, where)
        faults.append(f"the mesh {shape} takes {known} devices, {where} has {devices}{fit}")
    data = devices // known if sizes["data"] == -1 else sizes["data"]
    if data % where.slices:
        faults.append(
            f"mesh.data = {data} over {where.slices} slices: wanted a multiple of {where.slices},"
            " since only `data` may reach from slice to slice"
        )
    return faults


def that_fits(mesh: MeshConfig, where: Where) -> str:
    """What to say of a mesh with other `context`, and with `data` for the slices, where there is one."""
    data = math.ceil(max(mesh.data, 1) / where.slices) * where.slices
    context, left = divmod(where.devices, data * max(mesh.fsdp, 1) * max(mesh.tensor, 1))
    if left:
        return ""
    first = f"mesh.data = {data}, " if mesh.data not in (-1, data) else ""
    return f"; one that fits: {first}mesh.context = {context}"
