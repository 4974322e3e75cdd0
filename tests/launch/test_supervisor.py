"""The supervisor of one machine, over small programs that end as they are told to."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringflash import supervisor
from ringflash.exits import ConfigFault, restarts
from ringflash.supervisor import Job, parse

# A rank: argument 1 is a folder with what each start of each rank does, such as `0: 42` in 1.txt of rank 1.
RANK = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["JAX_PROCESS_ID"]
count = folder / f"count{rank}"
start = int(count.read_text()) if count.exists() else 0
count.write_text(str(start + 1))
print("start", start, "of", os.environ["JAX_NUM_PROCESSES"], os.environ["JAX_COORDINATOR_ADDRESS"])
print("[Gloo] Rank 0 is connected to 3 peer ranks")
print("to the terminal", file=sys.stderr)
plan = (folder / f"{rank}.txt").read_text().split()
does = plan[min(start, len(plan) - 1)]
if does == "saves":
    signal.signal(signal.SIGTERM, lambda *_: (print("saving"), time.sleep(0.2), sys.exit(42)))
    print("ready")
if does in ("waits", "saves"):
    time.sleep(60)
if does == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if does.startswith("late"):
    time.sleep(0.5)
    does = does[4:]
sys.exit(int(does))
"""
DRIVER = """
import sys
from ringflash import supervisor
supervisor.COMMAND = (sys.executable, sys.argv[1])
supervisor.SAVING_SECONDS = float(sys.argv[5])
sys.exit(supervisor.Supervisor(supervisor.Job(int(sys.argv[3]), 2, int(sys.argv[4]), (sys.argv[2],))).run())
"""


@pytest.fixture
def start(tmp_path):
    """start(what each rank does at each start, restarts): the supervisor of them, in a process of its own."""
    (tmp_path / "rank.py").write_text(RANK)

    def start(*plans, restarts=5, saving=20.0):
        for rank, plan in enumerate(plans):
            (tmp_path / f"{rank}.txt").write_text(plan)
        script, folder = str(tmp_path / "rank.py"), str(tmp_path)
        arguments = [script, folder, str(len(plans)), str(restarts), str(saving)]
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    return start


def ended(process):
    said, warned = process.communicate(timeout=60)
    return process.returncode, said, warned


def starts(tmp_path):
    return [
        int((tmp_path / f"count{n}").read_text()) for n in range(len(list(tmp_path.glob("count*"))))
    ]


def test_all_well(start, tmp_path):
    code, said, warned = ended(start("0", "0", "late0"))
    assert (code, starts(tmp_path)) == (0, [1, 1, 1])
    assert said.startswith("3 processes\n  rank")
    for rank in range(3):
        assert re.search(rf"^\[{rank}\] start 0 of 3 localhost:\d+$", said, re.M)
        assert f"[{rank}] to the terminal\n" in warned
    assert "Gloo" not in said


@pytest.mark.parametrize("code", [1, 3, 4, 5])
def test_ends_that_no_start_would_mend(start, tmp_path, code):
    found, _, warned = ended(start(f"{code}", f"late{code}"))
    assert (found, starts(tmp_path)) == (code, [1, 1])
    assert f"rank 0 (pid {pid_of(warned)}) ended with code {code}" in warned


def pid_of(warned):
    return re.search(r"pid (\d+)", warned)[1]


def test_preempted_and_saved_is_started_again_and_not_counted(start, tmp_path):
    code, _, warned = ended(start("42 42 42 0", "late42 42 42 0", restarts=0))
    assert (code, starts(tmp_path)) == (0, [4, 4])
    assert warned.count("exit code 42: all 2 processes start again") == 3


def test_when_one_crashes_the_others_do_not_wait_for_it(start, tmp_path):
    begun = time.monotonic()
    code, _, warned = ended(start("waits 0", "dies 0", "waits 0"))
    assert (code, starts(tmp_path)) == (0, [2, 2, 2])
    assert "rank 1 (pid" in warned
    assert "ended with code 137" in warned
    assert time.monotonic() - begun < 30


def test_crashes_are_counted(start, tmp_path):
    code, _, warned = ended(start("waits", "dies", restarts=2))
    assert (code, starts(tmp_path)) == (137, [3, 3])
    assert "2 restarts after crashes: no more" in warned


def test_a_hung_run_is_started_again(start, tmp_path):
    code, *_ = ended(start("124 0", "waits 0", saving=0.1))
    assert (code, starts(tmp_path)) == (0, [2, 2])


def test_those_that_do_not_end_alike_are_given_up(start, tmp_path):
    code, *_ = ended(start("5", "waits", saving=0.5))
    assert (code, starts(tmp_path)) == (5, [1, 1])


def test_of_two_that_ended_at_once_the_fault_counts(monkeypatch):
    """And not what it made the other end with."""
    made = supervisor.Supervisor(Job(2, 1))
    made.ranks.children = [subprocess.Popen([sys.executable, "-c", f"exit({n})"]) for n in (124, 4)]
    for child in made.ranks.children:
        child.wait()
    assert made._wait() == 4


def until_ready(process, count):
    """What was said until so many ranks are ready."""
    lines = []
    while sum("ready" in line for line in lines) < count:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return lines


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_supervisor_told_to_stop_lets_all_save_and_starts_none_again(start, tmp_path, signum):
    process = start("saves", "saves")
    until_ready(process, 2)
    process.send_signal(signum)
    code, said, warned = ended(process)
    assert (code, starts(tmp_path)) == (42, [1, 1])
    assert said.count("saving") == 2
    assert "once more ends them at once" in warned


def test_a_second_signal_ends_all_at_once(start):
    process = start("waits", "saves")
    until_ready(process, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    code, *_ = ended(process)
    assert code in (137, 143)


def test_arguments():
    job = parse(["-n", "4", "-d=2", "c.py", "runs/a", "--config.steps=3", "--restarts", "1"])
    wanted = ("--config=c.py", "--workdir=runs/a", "--config.cpu_devices=8", "--config.steps=3")
    assert job == Job(4, 2, 1, wanted)


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigFault) as fault:
        parse(["-n", "0", "--what", "c.py"])
    lines = fault.value.lines()
    assert [line.partition(":")[0] for line in lines] == [
        "--what",
        "-n",
        "-d",
        "wanted CONFIG and WORKDIR, found c.py",
    ]


def test_codes():
    assert [code for code in range(256) if restarts(code)] == [42, 124, *range(127, 256)]
    assert supervisor.shell_code(-9) == 137
    assert supervisor.shell_code(5) == 5


def test_the_command_refuses_and_says_why():
    done = subprocess.run(
        [sys.executable, "-m", "ringflash.supervisor", "-n", "2"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 3
    assert "local: -d: wanted a whole number" in done.stderr
