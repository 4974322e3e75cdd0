"""One machine: a script for launch/local.sh."""

from __future__ import annotations

import shlex

from ringflash.launch.options import Options
from ringflash.launch.shape import Shape

FILE = "run_local.sh"
SCRIPT = """#!/usr/bin/env bash
# Written by: {rendered_by}
# Runs in a checkout of ringflash: bash {file}
set -euo pipefail
if [ ! -f launch/{called} ]; then
    echo "there is no launch/{called} here: run this in a checkout of ringflash" >&2
    exit 3
fi
exec bash launch/{called} \\
    {arguments}
"""


def files(options: Options, shape: Shape) -> dict[str, str]:
    """The script, by its name."""
    arguments = [
        *(f"-n {shape.hosts}", f"-d {shape.chips}", f"--restarts={options.restarts}"),
        *map(shlex.quote, (options.config_path, options.workdir, *options.overrides)),
    ]
    return {FILE: script(options, FILE, "local.sh", arguments)}


def script(options: Options, file: str, called: str, arguments: list[str]) -> str:
    """One that calls a script of launch/ with arguments that are quoted, one a line."""
    return SCRIPT.format(
        rendered_by=options.rendered_by,
        file=file,
        called=called,
        arguments=" \\\n    ".join(arguments),
    )


def submit(options: Options) -> str:
    """The command that starts the run."""
    return shlex.join(["bash", f"{options.out}/{FILE}"])
