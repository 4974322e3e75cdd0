"""SLURM: a batch script, one task on each node with all devices of that node."""

from __future__ import annotations

import shlex

from ringflash.launch.options import Options
from ringflash.launch.shape import Shape
from ringflash.plan.where import CPU

FILE = "slurm.sbatch"
SCRIPT = """#!/usr/bin/env bash
{header}
#
# Written by: {rendered_by}
# Submit it where .venv is (or set RINGFLASH): sbatch {file}
#
# Signals. USR1 comes from SLURM to this script, {grace} s before the limit: the ranks are sent TERM, save,
# and end with 42, and the job is queued again. USR2 does the same without queueing again:
#     scancel --batch --signal=USR2 JOB
# TERM comes from scancel, or from a preemption, and to the ranks too: it is not passed on, for a second one
# ends a run of one process unsaved; nor is the job queued again: SLURM does that where it preempts.
set -euo pipefail

ringflash=${{RINGFLASH:-.venv/bin/ringflash}}
max_restarts=${{MAX_RESTARTS:-{restarts}}} # of all kinds: SLURM counts no other way
log=$SLURM_SUBMIT_DIR/$SLURM_JOB_NAME-$SLURM_JOB_ID.log # as --output says
train=(
    {train}
)
{platform}
cd "$SLURM_SUBMIT_DIR"
if ! command -v "$ringflash" >/dev/null; then
    echo "no $ringflash in $PWD: install it there, or set RINGFLASH" >&2
    exit 3
fi

again=yes interrupted=''
# shellcheck disable=SC2329 # the traps call it
pass_on() {{
    interrupted=yes
    scancel --signal=TERM "$SLURM_JOB_ID" || true # to the ranks; not to this script, without --batch
}}
trap pass_on USR1
trap 'again=""; pass_on' USR2
trap 'again=""; interrupted=yes' TERM

# srun ends with the highest code of all ranks. Where one ends with 4, and others are killed for it, that is
# 137, which would queue the job again; so the rank that ended first has its say, in the lines of srun.
ends=$(mktemp)
srun --kill-on-bad-exit=1 --cpu-bind=none --open-mode=append --output="$log" --error="$log" \\
    "$ringflash" "${{train[@]}}" 2>"$ends" &
ranks=$!
code=0
while
    interrupted='' code=0
    wait "$ranks" || code=$?
    [ -n "$interrupted" ] # a trap ended the waiting, not the ranks
do :; done
cat "$ends" >&2
if [ "$code" != 0 ]; then
    line=$(grep -E -m 1 'error: .*: tasks? [0-9,-]+: ' "$ends" || true)
    if [[ $line =~ 'Exited with exit code '([0-9]+) ]]; then code=${{BASH_REMATCH[1]}}; fi
fi
rm -f "$ends"

restarts=${{SLURM_RESTART_COUNT:-0}}
if ! ((code == 42 || code == 124 || code >= 127)); then
    ((code == 0)) || echo "exit code $code: not queued again (launch/README.md has what it means)" >&2
elif [ -z "$again" ]; then
    echo "exit code $code: asked to end, so not queued again" >&2
elif ((restarts >= max_restarts)); then
    echo "exit code $code after $restarts restarts: no more (MAX_RESTARTS=$max_restarts)" >&2
else
    echo "exit code $code: queued again, restart $((restarts + 1)) of $max_restarts" >&2
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
CPUS = "export JAX_PLATFORMS=cpu # the devices are simulated, a share of them on each node\n"


def files(options: Options, shape: Shape) -> dict[str, str]:
    """The script, by its name."""
    text = SCRIPT.format(
        header="\n".join(f"#SBATCH {line}" for line in header(options, shape)),
        rendered_by=options.rendered_by,
        file=FILE,
        grace=options.grace,
        restarts=options.restarts,
        train="\n    ".join(map(shlex.quote, options.train)),
        platform=CPUS if options.platform == CPU else "",
    )
    return {FILE: text}


def header(options: Options, shape: Shape) -> list[str]:
    """What SLURM is asked for. Every node is the job's own: one task takes all its cores and its memory."""
    return [
        f"--job-name={options.name}",
        f"--nodes={shape.hosts}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={shape.chips}"] if options.platform == "gpu" else []),
        "--exclusive",
        "--mem=0",
        f"--time={options.time}",
        *([f"--partition={options.queue}"] if options.queue else []),
        *([f"--account={options.project}"] if options.project else []),
        f"--signal=B:USR1@{options.grace}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]


def submit(options: Options) -> str:
    """The command that submits it."""
    return shlex.join(["sbatch", f"{options.out}/{FILE}"])
