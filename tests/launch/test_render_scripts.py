"""The scripts: for bash and shellcheck, for SLURM with a false `srun`, and what they call."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringflash.launch import local, slurm, tpu_vm, xpk
from ringflash.launch.options import parse

ROOT = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
LLAMA, QUICKSTART = "--config=configs/llama3_8b_128k.py", "--config=configs/quickstart.py"
ODD = '--config.data.source=files:it\'s $HOME `x`; "*"/*.txt'
SLURM = ("--target=slurm", QUICKSTART, "--workdir=runs/it's", "--nodes=2", "--devices=4")
LOCAL = ("--target=local", QUICKSTART, "--workdir=runs/it's", "--nodes=2", "--devices=4")
XPK = (
    *("--target=xpk", LLAMA, "--workdir=/w/it's", "--image=gcr.io/p/i:1", "--cluster=c"),
    *("--topology=v5p:4x4x4", "--spot"),
)
TPU_VM = (
    *("--target=tpu-vm", LLAMA, "--workdir=gs://b/it's", "--project=p", "--zone=us-east5-a"),
    *(
        "--topology=v5p:4x4x4",
        "--slices=2",
        "--config.mesh.data=2",
        "--config.global_batch_size=16",
    ),
)
# Long options of sbatch that we know, and what each takes.
SBATCH = {
    "job-name": r"[a-z][-a-z0-9]*",
    "nodes": r"\d+",
    "ntasks-per-node": "1",
    "gpus-per-node": r"\d+",
    "exclusive": None,
    "mem": "0",
    "time": r"(\d+-)?\d+(:\d\d){1,2}",
    "partition": r"\S+",
    "account": r"\S+",
    "signal": r"B:USR1@\d+",
    "requeue": None,
    "open-mode": "append|truncate",
    "output": r"\S+",
}
FAKES = {
    # Waits if asked to, says what srun would, and ends with the code that is asked for.
    "srun": """#!/usr/bin/env bash
printf '%s\\n' "$@" > srun.arguments
echo $$ > srun.pid
trap 'exit 42' TERM
if [ -n "${WAIT:-}" ]; then touch waiting; for _ in {1..200}; do sleep 0.05; done; fi
[ -z "${SAID:-}" ] || echo "$SAID" >&2
exit "$CODE"
""",
    "scontrol": '#!/usr/bin/env bash\necho "$@" >> scontrol.calls\n',
    "scancel": '#!/usr/bin/env bash\necho "$@" >> scancel.calls\nkill -TERM "$(cat srun.pid)"\n',
    "ringflash": "#!/usr/bin/env bash\n",
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(ROOT)


def text_of(module, *flags):
    options = parse(["render", *flags, "--out=x"])
    (text,) = module.files(options, options.shape).values()
    return text


@pytest.fixture
def node(tmp_path):
    """A machine with false commands, and the committed script; `start(CODE=42)` runs it."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, text in FAKES.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)

    def start(**variables):
        environment = {
            "PATH": f"{bin_}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_NAME": "quickstart",
            "SLURM_JOB_ID": "7",
            "RINGFLASH": "ringflash",
            **{name: str(value) for name, value in variables.items()},
        }
        return subprocess.Popen(
            ["bash", ROOT / "launch" / "slurm.sbatch"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(process):
    """Its code and what it said."""
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def calls(tmp_path, name):
    file = tmp_path / f"{name}.calls"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize("code", [0, 42, 124, 127, 137, 255, 1, 3, 4, 5, 2, 126])
def test_slurm_queues_again_what_may_go_further(node, tmp_path, code):
    assert ended(node(CODE=code))[0] == code
    again = code in (42, 124) or code >= 127
    assert calls(tmp_path, "scontrol") == (["requeue 7"] if again else [])


def test_slurm_starts_ringflash_train(node, tmp_path):
    assert ended(node(CODE=0)) == (0, "")
    arguments = (tmp_path / "srun.arguments").read_text().splitlines()
    at = arguments.index("ringflash")
    assert arguments[at:] == [
        *("ringflash", "train", "--config=configs/quickstart.py", "--workdir=runs/quickstart"),
    ]
    assert "--kill-on-bad-exit=1" in arguments[:at]
    assert f"--output={tmp_path}/quickstart-7.log" in arguments[:at]


def test_slurm_counts_restarts(node, tmp_path):
    assert "restart 100 of 100" in ended(node(CODE=137, SLURM_RESTART_COUNT=99))[1]
    code, said = ended(node(CODE=137, SLURM_RESTART_COUNT=100))
    assert code == 137
    assert "after 100 restarts: no more" in said
    assert "no more" in ended(node(CODE=42, SLURM_RESTART_COUNT=2, MAX_RESTARTS=2))[1]
    assert len(calls(tmp_path, "scontrol")) == 1


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (
            "srun: error: n1: task 1: Exited with exit code 4\nsrun: error: n2: tasks 0,2-3: Killed",
            4,
        ),
        (
            "srun: error: n1: tasks 0-7: Exited with exit code 42\nsrun: error: n2: task 9: Killed",
            42,
        ),
        ("srun: error: n1: task 1: Killed\nsrun: error: n2: task 0: Exited with exit code 1", 137),
        ("srun: Job step aborted: Waiting up to 32 seconds", 137),
    ],
)
def test_the_rank_that_ended_first_has_its_say(node, tmp_path, said, code):
    assert ended(node(CODE=137, SAID=said))[0] == code
    assert len(calls(tmp_path, "scontrol")) == (code != 4)


def asked_to_end(process, tmp_path, signum):
    deadline = time.monotonic() + 30
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signum)
    return ended(process)


def test_the_time_limit_saves_and_queues_again(node, tmp_path):
    assert asked_to_end(node(CODE=0, WAIT=1), tmp_path, signal.SIGUSR1)[0] == 42
    assert calls(tmp_path, "scancel") == ["--signal=TERM 7"]
    assert calls(tmp_path, "scontrol") == ["requeue 7"]


def test_who_asks_it_to_end_for_good_is_obeyed(node, tmp_path):
    assert asked_to_end(node(CODE=0, WAIT=1), tmp_path, signal.SIGUSR2)[0] == 42
    assert calls(tmp_path, "scancel") == ["--signal=TERM 7"]
    assert calls(tmp_path, "scontrol") == []


def test_a_term_is_not_passed_on_a_second_time(node, tmp_path):
    """SLURM sends it to the ranks too. Here nobody does: the false srun waits to its end."""
    process = node(CODE=42, WAIT=1)
    code, said = asked_to_end(process, tmp_path, signal.SIGTERM)
    assert code == 42
    assert "asked to end, so not queued again" in said
    assert calls(tmp_path, "scancel") == calls(tmp_path, "scontrol") == []


def test_slurm_without_ringflash(node):
    code, said = ended(node(CODE=0, RINGFLASH="nowhere"))
    assert code == 3
    assert "no nowhere in" in said


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--platform=cpu", "--queue=long", "--project=me"),
        ("--time=2-12:00:00", "--grace=60", "--name=a-b"),
    ],
)
def test_sbatch_lines(flags):
    lines = text_of(slurm, *SLURM, *flags).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    asked = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : len(asked) + 1] == asked  # after the first command SLURM reads no more
    for line in asked:
        found = re.fullmatch(r"#SBATCH --([-a-z]+)(?:=(\S+))?", line)
        assert found, line
        name, value = found.groups()
        wanted = SBATCH[name]
        assert (value is None) if wanted is None else re.fullmatch(wanted, value), line
    names = [re.search(r"--([-a-z]+)", line)[1] for line in asked]
    assert len(set(names)) == len(names)
    assert ("gpus-per-node" in names) == ("--platform=cpu" not in flags)


SCRIPTS = {
    "slurm": (slurm, SLURM),
    "slurm on CPUs": (slurm, (*SLURM, "--platform=cpu")),
    "local": (local, LOCAL),
    "tpu-vm": (tpu_vm, TPU_VM),
    "xpk": (xpk, XPK),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck(tmp_path, name):
    module, flags = SCRIPTS[name]
    file = tmp_path / "script.sh"
    # Without $ and `: that they stand in quotes is what shellcheck would ask about.
    file.write_text(text_of(module, *flags, ODD.replace("$", "").replace("`", "")))
    subprocess.run([SHELLCHECK, file], check=True)


def run_with_false(tmp_path, command, module, flags):
    """What `command` is given by the script, which runs where launch/ has false scripts."""
    (tmp_path / "launch").mkdir()
    for file in (tmp_path / command, tmp_path / "launch" / command):
        file.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@"\n')
        file.chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(text_of(module, *flags))
    done = subprocess.run(
        ["bash", script],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


def test_local(tmp_path):
    assert run_with_false(tmp_path, "local.sh", local, (*LOCAL, ODD)) == [
        *("-n", "2", "-d", "4", "--restarts=10"),
        *("configs/quickstart.py", "runs/it's", ODD),
    ]


def test_tpu_vm(tmp_path):
    found = run_with_false(tmp_path, "tpu_vm.sh", tpu_vm, (*TPU_VM, "--spot", ODD))
    at = found.index("--")
    assert found[0] == "up"
    assert set(found[1:at]) == {
        *("--name=llama3-8b-128k", "--project=p", "--zone=us-east5-a", "--accelerator=v5p-128"),
        *("--slices=2", "--config=configs/llama3_8b_128k.py", "--workdir=gs://b/it's"),
        *("--restarts=10", "--spot", "--queued"),
    }
    assert found[at + 1 :] == ["--config.mesh.data=2", "--config.global_batch_size=16", ODD]


def test_a_script_away_from_the_checkout_says_so(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(text_of(local, *LOCAL))
    done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert "run this in a checkout" in done.stderr


def test_xpk(tmp_path):
    found = run_with_false(tmp_path, "xpk", xpk, (*XPK, ODD))
    assert found[:2] == ["workload", "create"]
    command = found[-1].removeprefix("--command=")
    assert shlex.split(command) == [
        *("exec", "ringflash", "train", "--config=/app/configs/llama3_8b_128k.py"),
        *("--workdir=/w/it's", ODD),
    ]
    assert set(found[2:-1]) == {
        *("--workload=llama3-8b-128k", "--cluster=c", "--tpu-type=v5p-4x4x4", "--num-slices=1"),
        *("--docker-image=gcr.io/p/i:1", "--max-restarts=100", "--restart-on-exit-codes=124"),
        *("--termination-grace-period-seconds=600", "--spot"),
    }
    seven = (*XPK, "--topology=7x:4x4x4", "--config.mesh.context=16")
    assert "--no-use-parallel-containers" in text_of(xpk, *seven)
