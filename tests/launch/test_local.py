"""Real runs in several processes on this machine, as `launch/local.sh` starts them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ringflash.supervisor import free_port

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
SMALL = ["--config.seq_len=512", "--config.model.layers=1", "--config.eval.documents=1"]
STEPS = 6
pytestmark = pytest.mark.slow


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **more}


def losses(workdir):
    """By step, in the order written; a step that was made twice is there as made last."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {one["step"]: one["train/loss"] for one in records if "train/loss" in one}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process with eight devices."""
    workdir = tmp_path_factory.mktemp("alone")
    command = ["train", f"--config={QUICKSTART}", f"--workdir={workdir}", *SMALL, *every(1)]
    done = subprocess.run(
        [sys.executable, "-m", "ringflash.cli", *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return losses(workdir)


def every(steps):
    return [f"--config.checkpoint.every={steps}", "--config.log_every=1", f"--config.steps={STEPS}"]


def started(workdir, *arguments, n=4, d=2):
    command = ["-n", str(n), "-d", str(d), QUICKSTART, str(workdir), *SMALL, *arguments]
    process = subprocess.Popen(
        [sys.executable, "-m", "ringflash.supervisor", *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()
    return process, said, reader


def ended(process, said, reader, seconds=300):
    try:
        process.wait(seconds)
    finally:
        process.kill()
        reader.join(10)
        process.stdout.close()
    return process.returncode, "".join(said)


def until(said, text, seconds=200):
    deadline = time.monotonic() + seconds
    while not any(text in line for line in said):
        assert time.monotonic() < deadline, "".join(said)
        time.sleep(0.05)


def pids(said):
    """Of the ranks of the last start."""
    rows = [re.match(r"  (\d+)\s+(\d+)\s+2$", line.rstrip()) for line in said]
    return {int(row[1]): int(row[2]) for row in rows if row}


def test_four_processes_train_as_one_and_a_killed_one_changes_nothing(tmp_path, alone):
    run = started(tmp_path / "run", *every(1))
    until(run[1], "step 3/")
    os.kill(pids(run[1])[2], signal.SIGKILL)
    code, said = ended(*run)
    assert code == 0, said
    assert "rank 2 (pid" in said
    assert "exit code 137: all 4 processes start again" in said
    assert "[0] resuming from step" in said
    assert "[1] resuming" not in said, "only the first process speaks"
    assert re.search(r"\[0\]   3 +\S+ +2 x cpu", said), "the table of hosts"
    found = losses(tmp_path / "run")
    assert list(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(alone, rel=1e-6)
    assert [p.name for p in sorted((tmp_path / "run" / "eval").iterdir())] == ["1.json", "6.json"]
    assert (tmp_path / "run" / "logs" / "3.txt").exists()


def test_a_signal_to_one_rank_saves_on_all_and_they_go_on(tmp_path, alone):
    run = started(tmp_path / "run", *every(0), n=2, d=4)
    until(run[1], "step 2/")
    rows = [re.match(r"  1\s+(\d+)\s+4$", line.rstrip()) for line in run[1]]
    (pid,) = [int(row[1]) for row in rows if row]
    os.kill(pid, signal.SIGTERM)
    code, said = ended(*run)
    assert code == 0, said
    assert "exit code 42: all 2 processes start again" in said
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-6)


def test_stages_go_from_mesh_to_mesh_over_processes(tmp_path):
    stages = "--config.stages=until=2 seq_len=256 context=2 theta=1000"
    mesh = ["--config.mesh.context=4", "--config.global_batch_size=2"]
    run = started(tmp_path / "run", *every(2), stages, *mesh, n=2, d=2)
    code, said = ended(*run)
    assert code == 0, said
    assert len(losses(tmp_path / "run")) == STEPS


def test_a_wrong_config_is_told_and_nothing_starts_again(tmp_path):
    code, said = ended(*started(tmp_path / "run", "--config.mesh.context=3", n=2, d=2))
    assert code == 3, said
    assert "start again" not in said
    assert "mesh" in said


def test_a_host_with_other_code_is_refused_within_30_seconds(tmp_path):
    """Two processes, one of which runs a copy of the package in which a file is not the same."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "ringflash", other / "ringflash")
    with (other / "ringflash" / "loss.py").open("a") as file:
        file.write("# not as elsewhere\n")
    begun = time.monotonic()
    codes, said = of_two(tmp_path / "run", [(ROOT, ROOT), (other, other)])
    assert time.monotonic() - begun < 30
    assert codes == [3, 3]
    for told in said:
        assert "rank 1 (host" in told
        assert "code of ringflash/loss.py" in told


def test_a_folder_that_is_another_on_each_host_is_refused(tmp_path):
    """The same path, by the folder that a process is in."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    codes, said = of_two("/proc/self/cwd/run", [(ROOT, place) for place in places])
    assert codes == [3, 3]
    assert "rank 1 (" in said[0]
    assert "does not see what rank 0 writes there" in said[0]
    assert not list((places[0] / "run").iterdir())


def of_two(workdir, places):
    """Exit codes and standard errors of `train` in two processes; places: of each its package and folder."""
    address, children = f"localhost:{free_port()}", []
    for rank, (package, where) in enumerate(places):
        own = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank)}
        path = os.pathsep.join([str(package), *sys.path])
        command = ["train", f"--config={QUICKSTART}", f"--workdir={workdir}"]
        child = subprocess.Popen(
            [sys.executable, "-m", "ringflash.cli", *command],
            env=environment(JAX_COORDINATOR_ADDRESS=address, PYTHONPATH=path, **own),
            cwd=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
    said = [child.communicate(timeout=60)[1] for child in children]
    return [child.returncode for child in children], said
