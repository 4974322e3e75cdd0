"""TPU VMs: a script for launch/tpu_vm.sh, which makes them, runs on them and removes them."""

from __future__ import annotations

import shlex

from ringflash.launch.local import script
from ringflash.launch.options import Options
from ringflash.launch.shape import Shape

FILE = "run_tpu_vm.sh"


def files(options: Options, shape: Shape) -> dict[str, str]:
    """The script, by its name. Several slices can only be had from the queue."""
    flags = [
        f"--name={options.name}",
        f"--project={options.project}",
        f"--zone={options.zone}",
        f"--accelerator={shape.accelerator_type}",
        f"--slices={shape.slices}",
        f"--config={options.config_path}",
        f"--workdir={options.workdir}",
        f"--restarts={options.restarts}",
        *(["--spot"] if options.spot else []),
        *(["--queued"] if options.queued or shape.slices > 1 else []),
    ]
    rest = ["--", *map(shlex.quote, options.overrides)] if options.overrides else []
    arguments = ["up", *map(shlex.quote, flags), *rest]
    return {FILE: script(options, FILE, "tpu_vm.sh", arguments)}


def submit(options: Options) -> str:
    """The command that makes the slices and starts the run."""
    return shlex.join(["bash", f"{options.out}/{FILE}"])
