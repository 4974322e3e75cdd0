"""Which machines the arguments name, and the configuration on them; all that is wrong with either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringflash import checks, config_file
from ringflash.config import Config, override, resolve
from ringflash.exits import ConfigFault
from ringflash.launch.shape import Shape, of_nodes, of_slice
from ringflash.plan import step_options
from ringflash.plan.where import CPU, Where

ON_SLICES, ON_GKE, ON_NODES = ("gke", "tpu-vm", "xpk"), ("gke", "xpk"), ("slurm", "local")
PLATFORM = {"slurm": "gpu", "local": CPU}


@dataclass(frozen=True)
class Place:
    """Machines, of which `where` counts the devices of a mesh."""

    where: Where
    shape: Shape
    platform: str = "tpu"

    def overrides(self, target: str) -> tuple[str, ...]:
        """What a run must be told of simulated devices; launch/local.sh does it itself."""
        told = target == "local" or self.platform != CPU
        return () if told else (f"--config.cpu_devices={self.shape.devices}",)


def placed(taken: Mapping[str, Any]) -> tuple[Place | None, list[str]]:
    """The machines, or why there are none: neither where their flags are missing."""
    target = taken.get("target", "")
    if target in ON_SLICES and "topology" in taken:
        where = Where(taken["topology"], taken.get("slices", 1))
        try:
            shape = of_slice(where, tpu_vm=target == "tpu-vm")
        except ConfigFault as fault:
            return None, fault.lines()
        if target in ON_GKE and where.slices > 1 and shape.hosts == 1:
            told = f"{where.topology} is one host, and GKE joins slices of several hosts only"
            return None, [f"--slices={where.slices}: {told}"]
        return Place(where, shape), []
    if target in ON_NODES and "nodes" in taken and "devices" in taken:
        shape = of_nodes(taken["nodes"], taken["devices"])
        platform = taken.get("platform", PLATFORM[target])
        return Place(Where(f"{CPU}:{shape.devices}"), shape, platform), []
    return None, []


def read(
    path: str, overrides: Sequence[str], place: Place | None
) -> tuple[Config | None, list[str]]:
    """The configuration on these machines, or all that is wrong with it; None: on whatever is asked for."""
    if place is None or place.platform != "gpu":
        config, faults = step_options.read(path, overrides, place.where if place else None)
    else:
        config, faults = on_gpus(path, overrides)
    if config is not None and place is not None:
        faults = step_options.mesh_faults(config.mesh, place.where)
    if place is not None and place.platform == "gpu":
        machines = f"{place.shape.hosts} nodes of {place.shape.chips}"
        faults = [fault.replace(str(place.where), machines) for fault in faults]
    return config, faults


def on_gpus(path: str, overrides: Sequence[str]) -> tuple[Config | None, list[str]]:
    """The configuration for GPUs, or all that is wrong with it."""
    try:
        file = config_file.read(path)
    except ConfigFault as fault:
        return None, fault.lines()
    faults = checks.faults(file.values, path=file.path, overrides=overrides, platform="gpu")
    return (None, faults) if faults else (resolve(override(file.values, overrides)), [])
