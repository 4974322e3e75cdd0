"""launch/slurm.sbatch: its lines are those of SLURM, and each end of srun is obeyed by its exit code."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm.sbatch"
KNOWN = {
    *("account", "exclusive", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node"),
    *("open-mode", "output", "partition", "requeue", "signal", "time"),
}
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>calls
plan=$(cat plan)
if [ "$plan" = waits ]; then
    trap 'exit 42' TERM
    echo $$ >pid
    while :; do sleep 0.02; done
fi
if [ "$plan" = killed ]; then
    echo "srun: error: node2: task 1: Exited with exit code 4" >&2
    echo "srun: error: node1: task 0: Killed" >&2
    exit 137
fi
exit "$plan"
"""
SCANCEL = """#!/usr/bin/env bash
echo "scancel $*" >>calls
kill -TERM "$(cat pid)"
"""


def test_its_lines_are_slurms():
    lines = [x for x in SCRIPT.read_text().splitlines() if x.startswith("#SBATCH")]
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line) for line in lines]
    assert all(found), lines
    options = {one[1]: one[2] for one in found}
    assert options.keys() <= KNOWN
    assert len(options) == len(lines)
    assert options["signal"] == "B:USR1@600"
    assert re.fullmatch(r"\d+:\d\d:\d\d", options["time"])
    assert {"requeue", "exclusive"} <= options.keys()


@pytest.fixture
def job(tmp_path):
    """job(plan of srun, restarts so far): the script under way, in a folder of its own."""
    for name, text in {"srun": SRUN, "scancel": SCANCEL, "ringflash": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "scontrol $*" >>calls\n')
    (tmp_path / "scontrol").chmod(0o755)

    def job(plan, restarts=0, **more):
        (tmp_path / "plan").write_text(str(plan))
        own = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RINGFLASH": str(tmp_path / "ringflash"),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NAME": "run",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_SUBMIT_DIR": str(tmp_path),
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT)],
            env={**os.environ, **own, **more},
            stderr=subprocess.PIPE,
            text=True,
        )

    return job


def ended(process, folder):
    """The exit code, what was said, what was called."""
    _, said = process.communicate(timeout=30)
    return process.returncode, said, (folder / "calls").read_text()


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5])
def test_these_are_not_queued_again(job, tmp_path, code):
    found, said, calls = ended(job(code), tmp_path)
    assert found == code
    assert "scontrol" not in calls
    assert ("not queued again" in said) == (code != 0)
    assert "--kill-on-bad-exit=1" in calls
    assert "train --config=configs/quickstart.py --workdir=runs/quickstart" in calls


@pytest.mark.parametrize("code", [42, 124, 137])
def test_these_are_queued_again(job, tmp_path, code):
    found, said, calls = ended(job(code, restarts=2), tmp_path)
    assert found == code
    assert "scontrol requeue 77" in calls
    assert "restart 3 of 100" in said


def test_but_not_for_ever(job, tmp_path):
    found, said, calls = ended(job(137, restarts=2, MAX_RESTARTS="2"), tmp_path)
    assert found == 137
    assert "scontrol" not in calls
    assert "no more" in said


def test_the_rank_that_ended_first_has_its_say(job, tmp_path):
    found, _, calls = ended(job("killed"), tmp_path)
    assert found == 4
    assert "scontrol" not in calls


@pytest.mark.parametrize(("signum", "again"), [(signal.SIGUSR1, True), (signal.SIGUSR2, False)])
def test_before_the_time_limit_the_ranks_save(job, tmp_path, signum, again):
    process = job("waits")
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
    process.send_signal(signum)
    found, _, calls = ended(process, tmp_path)
    assert found == 42
    assert "scancel --signal=TERM 77" in calls
    assert ("scontrol requeue 77" in calls) == again


def test_without_an_installation(job, tmp_path):
    process = job(0, RINGFLASH="nowhere/ringflash")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3
    assert "install it there" in said
