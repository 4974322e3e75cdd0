"""XPK: the command that has it make a JobSet of its own. Flags as of XPK 1.13."""

from __future__ import annotations

import shlex

from ringflash.launch.options import Options
from ringflash.launch.shape import Shape

FILE = "xpk.sh"
SCRIPT = """#!/usr/bin/env bash
# Written by: {rendered_by}
#
# XPK starts a workload again, up to --max-restarts times in all, where it ended with 42 (preempted and saved)
# or 127 to 255 (crashed): preemptions are counted too. Of itself not after 124 (a host hangs or never
# came): --restart-on-exit-codes adds it. All other codes (1, 3, 4, 5) end the workload.
#
# `exec`: XPK starts the command in a shell of its own and passes SIGTERM on to that; ringflash must be in its
# place to save. The default of 30 s to do so is too short for a large checkpoint.
{notes}exec xpk workload create \\
    {arguments} \\
    "$@"
"""
# XPK would start two containers on each host of 7x, each with half of its chips.
ONE_CONTAINER = "--no-use-parallel-containers"
STORAGE = """#
# The workdir {workdir} must be on a storage that all pods mount: xpk storage attach, then give this
# script --storage=NAME.
"""


def files(options: Options, shape: Shape) -> dict[str, str]:
    """The command, as a script, by its name."""
    command = shlex.join(["exec", "ringflash", *options.train])
    flags = [
        f"--workload={options.name}",
        f"--cluster={options.cluster}",
        *([f"--project={options.project}"] if options.project else []),
        *([f"--zone={options.zone}"] if options.zone else []),
        f"--tpu-type={shape.xpk_type}",
        f"--num-slices={shape.slices}",
        f"--docker-image={options.image}",
        f"--max-restarts={options.restarts}",
        "--restart-on-exit-codes=124",
        f"--termination-grace-period-seconds={options.grace}",
        *(["--spot"] if options.spot else []),
        *([ONE_CONTAINER] if options.where.topology.startswith("tpu7x") else []),
        f"--command={command}",
    ]
    text = SCRIPT.format(
        rendered_by=options.rendered_by,
        notes=STORAGE.format(workdir=shlex.quote(options.workdir)),
        arguments=" \\\n    ".join(map(shlex.quote, flags)),
    )
    return {FILE: text}


def submit(options: Options) -> str:
    """The command that submits it."""
    return shlex.join(["bash", f"{options.out}/{FILE}"])
