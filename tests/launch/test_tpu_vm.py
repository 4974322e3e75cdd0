"""launch/tpu_vm.sh against a gcloud that plays each failure; its remote commands run for real."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE.parents[1] / "launch" / "tpu_vm.sh"
PLACE = ("--name=ring", "--project=p", "--zone=z")
MAKE = ("--accelerator=v5p-16",)
RUN = ("--config=configs/a.py", "--workdir=gs://bucket/run")
TRAIN = ["train", "--config=configs/a.py", "--workdir=/tmp/ringflash-buckets/bucket/run"]
UP = (*PLACE, *MAKE, *RUN)

INSTALL = """#!/usr/bin/env bash
cd "$(dirname "$0")/.."
echo "installing on $WORKER"
if [ -e "$FAKE_GCLOUD/broken.$WORKER" ]; then echo "no space left on device"; exit 9; fi
mkdir -p .venv/bin
cp ringflash-for-tests .venv/bin/ringflash
cp pyproject.toml ".venv/installed-$1.toml"
"""

MOUNTED = """#!/usr/bin/env bash
grep -qs " $2\\$" "$FAKE_GCLOUD/mounted.$NODE.$WORKER"
"""
GCSFUSE = """#!/usr/bin/env bash
if [ -e "$FAKE_GCLOUD/no-access" ]; then echo "403: no access to bucket" >&2; exit 1; fi
echo "${*: -2}" >>"$FAKE_GCLOUD/mounted.$NODE.$WORKER"
"""

# What a run does: the n-th line of codes.WORKER, else of codes, is the exit code of the n-th start.
RINGFLASH = """#!/usr/bin/env bash
starts=$FAKE_GCLOUD/starts.$NODE.$WORKER
echo start >>"$starts"
n=$(wc -l <"$starts")
printf '%s\\0' "$@" >"$FAKE_GCLOUD/argv.$NODE.$WORKER"
env | grep ^MEGASCALE_ | sort >"$FAKE_GCLOUD/env.$NODE.$WORKER"
codes=$FAKE_GCLOUD/codes.$WORKER
[ -e "$codes" ] || codes=$FAKE_GCLOUD/codes
code=$(sed -n "${n}p" "$codes")
for i in 1 2 3 4; do echo "start $n line $i: of 4:"; done
if [ "$code" = waits ]; then
    trap 'echo saved; exit 42' TERM
    while :; do sleep 0.02; done
fi
exit "${code:-0}"
"""


class Cloud:
    def __init__(self, home):
        self.home, self.checkout = home, home / "checkout"
        for folder in ("bin", "tpu-vm", "queued-resources", "homes"):
            (home / folder).mkdir()
        fake = shlex.join([sys.executable, "-S", "-E", str(HERE / "fake_gcloud.py")])
        self.write("bin/gcloud", f'#!/bin/sh\nexec {fake} "$@"\n', mode=0o755)
        self.write("bin/curl", '#!/bin/sh\necho "$WORKER"\n', mode=0o755)
        python = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E "$@"\n'
        self.write("bin/python3", python, mode=0o755)
        self.write("bin/mountpoint", MOUNTED, mode=0o755)
        self.write("bin/gcsfuse", GCSFUSE, mode=0o755)
        self.write("checkout/launch/install.sh", INSTALL)
        self.write("checkout/ringflash-for-tests", RINGFLASH, mode=0o755)
        self.write("checkout/pyproject.toml", "[project]\n")
        self.scenario()
        self.codes(0)

    def write(self, name, text, mode=0o644):
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def scenario(self, workers=2, **rest):
        self.write("scenario.json", json.dumps({"workers": workers, **rest}))

    def codes(self, *codes, worker=None):
        name = "codes" if worker is None else f"codes.{worker}"
        self.write(name, "".join(f"{code}\n" for code in codes))

    def __call__(self, verb, *flags, patience=1000):
        source = [] if any(f.startswith("--ref") for f in flags) else [f"--source={self.checkout}"]
        env = dict(os.environ, FAKE_GCLOUD=str(self.home), RINGFLASH_POLL_SECONDS="0.01")
        env |= {"RINGFLASH_PATIENCE": str(patience), "PATH": f"{self.home}/bin:{env['PATH']}"}
        return subprocess.run(
            ["bash", str(SCRIPT), verb, *source, *flags],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, *words):
        """The calls that have each of these words somewhere in their arguments."""
        file = self.home / "calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [c for c in map(json.loads, lines) if all(w in " ".join(c) for w in words)]

    def starts(self, node="ring", worker=0):
        file = self.home / f"starts.{node}.{worker}"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def argv(self, node="ring", worker=0):
        return (self.home / f"argv.{node}.{worker}").read_text().split("\0")[:-1]

    def end_runs(self):
        """Also those whose worker is no more."""
        homes = str(self.home / "homes").encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if homes in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.end_runs()


def test_up_runs_on_all_workers_and_shows_the_log(cloud):
    done = cloud("up", *UP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"start 1 line {i}: of 4:" for i in (1, 2, 3, 4)]
    assert [cloud.starts(worker=w) for w in (0, 1)] == [1, 1]
    (create,) = cloud.calls("tpu-vm create")
    assert "--accelerator-type=v5p-16" in create
    assert "--version=v2-alpha-tpuv5" in create
    assert "--spot" not in create
    assert cloud.argv() == TRAIN
    for call in cloud.calls("--command=bash tpu_worker.sh start"):
        assert "--worker=all" in call
    assert (cloud.home / "env.ring.0").read_text() == ""  # one slice finds its peers by itself


def test_the_bucket_is_mounted_on_all_workers_and_only_once(cloud):
    cloud.codes(42, 0)
    assert cloud("up", *UP).returncode == 0
    for worker in (0, 1):
        mounted = (cloud.home / f"mounted.ring.{worker}").read_text()
        assert mounted == "bucket /tmp/ringflash-buckets/bucket\n"


def test_a_bucket_that_cannot_be_mounted(cloud):
    (cloud.home / "no-access").touch()
    done = cloud("up", *UP)
    assert done.returncode == 1
    assert "the bucket was not mounted" in done.stderr
    assert "403: no access to bucket" in done.stderr
    assert cloud.starts() == 0


def test_a_shared_disk_is_not_mounted(cloud):
    done = cloud("up", *PLACE, *MAKE, RUN[0], "--workdir=/mnt/disk/run")
    assert done.returncode == 0, done.stderr
    assert cloud.argv()[2] == "--workdir=/mnt/disk/run"
    assert not cloud.calls("mount")


def test_overrides_arrive_exactly(cloud):
    overrides = [
        "--config.data.source=files:my books/**/*.txt",
        '--config.a=it\'s "so"; touch $HOME/x & $(date) `date` \\ | * ~ !!  two  spaces',
        "--config.b=a\nb\t#c",
        "--config.c=",
    ]
    done = cloud("up", *UP, "--", *overrides)
    assert done.returncode == 0, done.stderr
    assert cloud.argv() == [*TRAIN, *overrides]
    assert cloud.argv(worker=1) == [*TRAIN, *overrides]


def test_several_slices_know_each_other(cloud):
    done = cloud("up", *UP, "--slices=2", "--queued", "--spot")
    assert done.returncode == 0, done.stderr
    (create,) = cloud.calls("create")
    for flag in ("queued-resources", "--node-count=2", "--node-prefix=ring", "--spot"):
        assert flag in create
    assert "--runtime-version=v2-alpha-tpuv5" in create
    for node, number in (("ring-0", 0), ("ring-1", 1)):
        for worker in (0, 1):
            assert (cloud.home / f"env.{node}.{worker}").read_text().splitlines() == [
                "MEGASCALE_COORDINATOR_ADDRESS=10.0.0.0:8081",
                "MEGASCALE_NUM_SLICES=2",
                "MEGASCALE_PORT=8081",
                f"MEGASCALE_SLICE_ID={number}",
            ]


def test_stopped_and_saved_is_started_again(cloud):
    cloud.codes(42, 137, 0)
    done = cloud("up", *UP)
    assert done.returncode == 0, done.stderr
    assert cloud.starts() == cloud.starts(worker=1) == 3
    assert "exit code 42: restart 1 of 10" in done.stderr
    assert "exit code 137: restart 2 of 10" in done.stderr
    assert len(cloud.calls("tpu-vm create")) == 1


@pytest.mark.parametrize("code", [1, 3, 4, 5, 126])
def test_what_needs_a_person_is_not_started_again(cloud, code):
    cloud.codes(code)
    done = cloud("up", *UP)
    assert done.returncode == code, done.stderr
    assert cloud.starts() == 1
    assert f"exit code {code} (" in done.stderr
    assert "not started again" in done.stderr


def test_a_lost_worker_outdoes_its_peers_faults(cloud):
    cloud.codes(1, 0, worker=0)
    cloud.codes(137, 0, worker=1)
    assert cloud("up", *UP).returncode == 0
    assert cloud.starts() == 2


def test_a_verdict_outdoes_a_lost_worker(cloud):
    cloud.codes(137, worker=0)
    cloud.codes(5, worker=1)
    assert cloud("up", *UP).returncode == 5
    assert cloud.starts() == 1


def test_too_many_restarts(cloud):
    cloud.codes(42, 42, 42, 42)
    done = cloud("up", *UP, "--restarts=2")
    assert done.returncode == 42
    assert cloud.starts() == 3
    assert "no more than 2 restarts" in done.stderr


def test_hosts_that_never_end_are_killed_and_the_run_started_again(cloud):
    cloud.codes(0, 0, worker=0)
    cloud.codes("waits", 0, worker=1)
    done = cloud("up", *UP, patience=10)
    assert done.returncode == 0, done.stderr
    assert "still running: ring:1" in done.stderr
    assert "exit code 124: restart 1" in done.stderr
    assert cloud.starts(worker=1) >= 2


def test_quota_exceeded(cloud):
    cloud.scenario(rules=[{"when": "tpu-vm create", "stderr": "ERROR: Quota limit exceeded"}])
    done = cloud("up", *UP)
    assert done.returncode == 1
    assert "Quota limit exceeded" in done.stderr
    assert "not created" in done.stderr
    assert not cloud.calls("ssh")


def test_a_slice_that_is_there_is_used(cloud):
    assert cloud("create", *PLACE, *MAKE).returncode == 0
    assert cloud("create", *PLACE, *MAKE).returncode == 0
    assert len(cloud.calls("tpu-vm create")) == 1


def test_a_preempted_slice_is_made_anew(cloud):
    cloud.codes("waits", 0)
    preempted = {"when": "tpu_worker.sh log", "code": 255, "state": "PREEMPTED"}
    cloud.scenario(rules=[preempted])
    done = cloud("up", *UP)
    assert done.returncode == 0, done.stderr
    verbs = [call[3] for call in cloud.calls("tpu-vm") if call[3] in ("create", "delete")]
    assert verbs == ["create", "delete", "create"]
    assert "ring is PREEMPTED" in done.stderr


def test_preempted_while_installing(cloud):
    preempted = {"when": "tpu-vm scp", "code": 255, "state": "PREEMPTED"}
    cloud.scenario(rules=[preempted])
    done = cloud("up", *UP)
    assert done.returncode == 0, done.stderr
    assert len(cloud.calls("tpu-vm create")) == 2


def test_preempted_while_being_created(cloud):
    cloud.scenario(node_states=[["CREATING", "PREEMPTED"], ["READY"]])
    done = cloud("create", *PLACE, *MAKE)
    assert done.returncode == 255
    assert "preempted while it was being created" in done.stderr
    cloud.scenario(node_states=[[], ["READY"]])
    assert cloud("up", *UP).returncode == 0
    assert len(cloud.calls("tpu-vm delete")) == 1


def test_waits_in_the_queue(cloud):
    waiting = ["ACCEPTED", "WAITING_FOR_RESOURCES", "WAITING_FOR_RESOURCES", "PROVISIONING"]
    cloud.scenario(queue_states=[[*waiting, "ACTIVE"]])
    done = cloud("create", *PLACE, *MAKE, "--queued")
    assert done.returncode == 0, done.stderr
    (create,) = cloud.calls("create")
    assert "--node-id=ring" in create
    told = [line.removeprefix("tpu_vm: ring is ") for line in done.stderr.splitlines()]
    assert told == ["ABSENT", *dict.fromkeys(waiting), "READY"]


def test_the_queue_fails_with_why(cloud):
    cloud.scenario(queue_states=[["PROVISIONING", "FAILED"]])
    done = cloud("up", *UP, "--queued")
    assert done.returncode == 1
    assert "ring is FAILED" in done.stderr
    assert "no capacity in the zone" in done.stderr
    assert len(cloud.calls("create")) == 1


def test_suspended_in_the_queue_is_asked_for_again(cloud):
    cloud.scenario(queue_states=[["PROVISIONING", "SUSPENDED"], ["ACTIVE"]])
    done = cloud("up", *UP, "--queued")
    assert done.returncode == 0, done.stderr
    assert "ring is SUSPENDED" in done.stderr
    assert ["--force" in call for call in cloud.calls("delete")] == [True]


def test_gcloud_that_cannot_tell_creates_nothing(cloud):
    cloud.scenario(rules=[{"when": "describe", "stderr": "ERROR: you are not logged in"}])
    done = cloud("up", *UP)
    assert done.returncode == 1
    assert "you are not logged in" in done.stderr
    assert not cloud.calls("create")


def test_logs_attach_again_when_ssh_drops(cloud):
    drop = {"when": "tpu_worker.sh log", "code": 255, "log_lines": 2}
    cloud.scenario(rules=[drop, {"when": "tpu_worker.sh log 3", "code": 255}])
    done = cloud("up", *UP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"start 1 line {i}: of 4:" for i in (1, 2, 3, 4)]
    assert done.stderr.count("attaching again") == 2
    assert cloud.starts() == 1


def test_lines_that_gcloud_repeats_are_shown_once(cloud):
    cloud.scenario(rules=[{"when": "tpu_worker.sh log", "log_lines": 3, "again": True}])
    done = cloud("up", *UP)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"start 1 line {i}: of 4:" for i in (1, 2, 3, 4)]
    assert len(cloud.calls("tpu_worker.sh log")) == 1


def test_logs_give_up_on_a_dead_connection(cloud):
    assert cloud("up", *UP).returncode == 0
    cloud.scenario(rules=[{"when": "tpu_worker.sh log", "code": 255, "times": 99}])
    done = cloud("logs", *PLACE, patience=2)
    assert done.returncode == 255
    assert "the run may go on" in done.stderr
    assert done.stderr.count("attaching again") == 2


def test_logs_of_another_worker(cloud):
    cloud.codes(5)
    cloud("up", *UP)
    done = cloud("logs", *PLACE, "--worker=1")
    assert done.returncode == 5
    assert len(cloud.calls("--worker=1", "tpu_worker.sh log")) == 1
    assert "line 4" in done.stdout


def test_one_worker_fails_to_install(cloud):
    cloud.write("broken.1", "")
    done = cloud("up", *UP)
    assert done.returncode == 1
    assert "ring worker 1: the installation failed" in done.stderr
    assert "    no space left on device" in done.stderr
    assert "worker 0" not in done.stderr
    assert not cloud.calls("tpu_worker.sh start")


def test_a_worker_that_does_not_answer_stops_the_start(cloud):
    assert cloud("create", *PLACE, *MAKE).returncode == 0
    assert cloud("install", *PLACE).returncode == 0
    cloud.scenario(dead=["1"])
    done = cloud("start", *PLACE, *RUN)
    assert done.returncode == 1
    assert "ring worker 1: no answer" in done.stderr
    assert "Connection timed out" in done.stderr
    assert "nothing was started" in done.stderr
    assert cloud.starts() == 0


def test_start_without_an_installation(cloud):
    assert cloud("create", *PLACE, *MAKE).returncode == 0
    assert cloud("install", *PLACE).returncode == 0
    (cloud.home / "homes/ring/0/ringflash/.venv/installed-tpu.toml").unlink()
    done = cloud("start", *PLACE, *RUN)
    assert done.returncode == 1
    assert "ring worker 0: not installed" in done.stderr
    assert cloud.starts() == cloud.starts(worker=1) == 0


def test_a_run_outlives_the_connection_and_is_stopped(cloud):
    cloud.codes("waits")
    assert cloud("create", *PLACE, *MAKE).returncode == 0
    assert cloud("install", *PLACE).returncode == 0
    assert cloud("start", *PLACE, *RUN).returncode == 0
    again = cloud("start", *PLACE, *RUN)
    assert again.returncode == 1
    assert "a run is going on here already" in again.stderr
    assert "stop it first" in cloud("install", *PLACE).stderr
    assert "ring worker 1: running" in cloud("status", *PLACE).stdout
    done = cloud("stop", *PLACE, patience=999)
    assert done.returncode == 0, done.stderr
    assert "ended with exit code 42" in done.stderr
    status = cloud("status", *PLACE)
    assert status.stdout.splitlines()[:2] == ["ring worker 0: exit 42", "    saved"]
    assert "ring is READY" in status.stderr
    assert cloud.starts() == 1


def test_up_follows_a_run_that_is_going_on(cloud):
    cloud.codes("waits")
    cloud("create", *PLACE, *MAKE)
    cloud("install", *PLACE)
    cloud("start", *PLACE, *RUN)
    cloud.scenario(rules=[{"when": "log", "code": 255, "state": "TERMINATED", "log_lines": 4}])
    done = cloud("up", *UP, "--restarts=0")
    assert done.returncode == 255
    assert "a run is going on: following it" in done.stderr
    assert "ring is TERMINATED" in done.stderr
    assert "line 4" in done.stdout
    assert cloud.starts() == 1


def test_a_start_that_gcloud_repeats_starts_once(cloud):
    cloud("create", *PLACE, *MAKE)
    cloud("install", *PLACE)
    cloud("start", *PLACE, *RUN)
    (start,) = cloud.calls("tpu_worker.sh start")
    env = dict(os.environ, FAKE_GCLOUD=str(cloud.home))
    subprocess.run([str(cloud.home / "bin/gcloud"), *start], env=env, check=True)
    cloud("logs", *PLACE)
    assert cloud.starts() == 1


def test_delete(cloud):
    cloud("create", *PLACE, *MAKE, "--queued")
    done = cloud("delete", *PLACE, "--queued")
    assert done.returncode == 0, done.stderr
    (call,) = cloud.calls("delete")
    assert call[2:6] == ["queued-resources", "delete", "ring", "--force"]


def test_a_git_ref_is_installed(cloud, tmp_path):
    git = ["git", "-C", str(cloud.checkout), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    cloud.write("checkout/new", "")
    cloud("create", *PLACE, *MAKE)
    assert cloud("install", *PLACE).returncode == 0
    home = cloud.home / "homes/ring/0/ringflash"
    assert (home / "new").exists()
    assert not (home / ".git").exists()
    script = cloud.checkout / "launch/tpu_vm.sh"
    script.write_bytes(SCRIPT.read_bytes())
    (script.parent / "tpu_worker.sh").write_bytes((SCRIPT.parent / "tpu_worker.sh").read_bytes())
    env = dict(os.environ, FAKE_GCLOUD=str(cloud.home), PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    subprocess.run(["bash", script, "install", *PLACE, "--ref=HEAD"], env=env, check=True)
    assert not (home / "new").exists()
    assert (home / "launch/install.sh").exists()


VERBS = {
    "create": ["describe", "create", "describe"],
    "install": ["describe", "scp", "ssh"],
    "start": ["describe", "ssh", "ssh", "ssh"],
    "logs": ["describe", "ssh", "ssh"],
    "status": ["describe", "ssh", "describe"],
    "stop": ["describe", "ssh", "ssh"],
    "delete": ["delete"],
}
VERBS["up"] = [
    *VERBS["create"],
    *VERBS["install"],
    *[call for verb in ("start", "logs") for call in VERBS[verb][1:]],
]


@pytest.mark.parametrize("verb", VERBS)
def test_dry_run_prints_each_command_and_calls_nothing(cloud, verb):
    flags = UP if verb == "up" else (*PLACE, *MAKE, *RUN)
    done = cloud(verb, *flags, "--dry-run", "--", "--config.a=it's b")
    assert done.returncode == 0, done.stderr
    assert not cloud.calls()
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [command[4] for command in commands] == VERBS[verb]
    for command in commands:
        assert command[:3] == ["gcloud", "compute", "tpus"]
        assert command[-3:] == ["--project=p", "--zone=z", "--quiet"]
    if verb in ("start", "up"):
        (start,) = [c for c in done.stdout.splitlines() if "tpu_worker.sh\\ start" in c]
        (command,) = [word for word in shlex.split(start) if word.startswith("--command=")]
        assert shlex.split(command)[-1] == "--config.a=it's b"


def test_dry_run_of_several_slices_shows_what_it_would_read(cloud):
    done = cloud("start", *PLACE, *RUN, "--slices=2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not cloud.calls()
    starts = [shlex.split(c) for c in done.stdout.splitlines() if "tpu_worker.sh\\ start" in c]
    assert [command[5] for command in starts] == ["ring-0", "ring-1"]
    for number, command in enumerate(starts):
        text = " ".join(command)
        assert "MEGASCALE_COORDINATOR_ADDRESS=ADDRESS-OF-ring-0-WORKER-0:8081" in text
        assert f"MEGASCALE_SLICE_ID={number} " in text


@pytest.mark.parametrize("verb", ["start", "up"])
def test_one_host_alone_is_refused(cloud, verb):
    done = cloud(verb, *UP, "--worker=0")
    assert done.returncode == 3
    assert f"so {verb} takes all of them" in done.stderr
    assert not cloud.calls()


def test_all_faults_are_told_at_once(cloud):
    wrong = ["--name=Ring", "--slices=two", "--restarts=-1", "--spot=yes", "--accelerator=v9-8"]
    done = cloud("up", *wrong, "--config=/a.py", "--workdir=runs/a", "--", "steps=3")
    assert done.returncode == 3
    told = done.stderr.splitlines()
    assert all(line.startswith("tpu_vm: ") for line in told)
    for fault in (*wrong, "--project=", "--zone=", "--config=", "--workdir=", "steps=3"):
        assert sum(fault in line for line in told) == 1, fault
    assert len(told) == 10
    assert not cloud.calls()


@pytest.mark.parametrize("flags", [("--slices=2",), ("--accelerator=",)])
def test_what_create_cannot_make(cloud, flags):
    done = cloud("create", *PLACE, *MAKE, *flags)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    assert not cloud.calls()


@pytest.mark.parametrize(
    ("accelerator", "version"),
    [
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_the_runtime_goes_by_generation(cloud, accelerator, version):
    done = cloud("create", *PLACE, f"--accelerator={accelerator}", "--dry-run")
    assert f" --version={version} " in done.stdout


def test_help_is_the_header(cloud):
    done = cloud("--help")
    assert done.returncode == 0
    assert "VERB --name=N" in done.stdout
    assert "Exit codes:" in done.stdout
    assert "set -euo" not in done.stdout
