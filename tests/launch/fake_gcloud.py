"""A `gcloud` for tests: records each call, keeps slices as folders, runs remote commands in them.

The folder FAKE_GCLOUD holds all of it. `calls.jsonl`: every call. `scenario.json`: what happens.

    workers       how many a slice has
    node_states   for each slice that is made, the states that describe tells, one after another
    queue_states  the same for queued resources
    rules         [{when, code, stderr, times, state, after, log_lines}]: a call whose arguments contain
                  `when` fails, the first `times` (1) times after `after` (0) others; `state`: all
                  slices are in it from then on; `log_lines`: so many come before the connection drops;
                  `again`: gcloud then connects again by itself and runs the command once more
    dead          workers that do not answer

A worker is the folder NODE/N, its home. Remote commands see `curl` tell their number.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ["FAKE_GCLOUD"])


def main(argv):
    with (HOME / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(argv) + "\n")
    scenario = json.loads((HOME / "scenario.json").read_text())
    flags = dict(arg[2:].split("=", 1) for arg in argv if arg.startswith("--") and "=" in arg)
    names = [arg for arg in argv if not arg.startswith("--")]
    _compute, _tpus, kind, verb, *names = names
    rule = find_rule(scenario, " ".join(argv))
    if rule and "state" in rule:
        for node in (HOME / "tpu-vm").iterdir():
            node.write_text(json.dumps([rule["state"]]))
        for queued in (HOME / "queued-resources").iterdir():
            queued.write_text(json.dumps(["SUSPENDED"]))
    if rule and "log_lines" not in rule:
        sys.exit(fail(rule))
    call = {"create": create, "describe": describe, "delete": delete, "ssh": ssh, "scp": scp}[verb]
    call(kind, names, flags, scenario, rule)


def find_rule(scenario, call):
    for number, rule in enumerate(scenario.get("rules", [])):
        if rule["when"] in call:
            seen = HOME / f"rule-{number}"
            before = seen.stat().st_size if seen.exists() else 0
            with seen.open("a") as file:
                file.write(".")
            if 0 <= before - rule.get("after", 0) < rule.get("times", 1):
                return rule
    return None


def fail(rule):
    print(rule.get("stderr", "ERROR: (gcloud) scripted"), file=sys.stderr)
    return rule.get("code", 1)


def create(kind, names, flags, scenario, _rule):
    (name,) = names
    key = "node_states" if kind == "tpu-vm" else "queue_states"
    made = HOME / f"made-{kind}"
    count = made.stat().st_size if made.exists() else 0
    made.open("a").write(".")
    told = scenario.get(key, [])
    states = told[count] if count < len(told) else ["READY" if kind == "tpu-vm" else "ACTIVE"]
    keep(kind, name, states)
    if kind == "queued-resources":
        count = int(flags.get("node-count", 0))
        for node in [f"{flags['node-prefix']}-{i}" for i in range(count)] or [flags["node-id"]]:
            keep("tpu-vm", node, ["READY"])


def keep(kind, name, states):
    (HOME / kind / name).write_text(json.dumps(states))


def describe(kind, names, flags, scenario, _rule):
    place = HOME / kind / names[0]
    if not place.exists():
        print(f"ERROR: (gcloud) NOT_FOUND: Resource '{names[0]}' was not found", file=sys.stderr)
        sys.exit(1)
    if "yaml" in flags["format"]:
        print("state:\n  failedData:\n    error:\n      message: no capacity in the zone")
    elif "networkEndpoints" in flags["format"]:
        print(";".join(f"10.0.0.{i}" for i in range(scenario["workers"])))
    else:
        first, *rest = json.loads(place.read_text())
        print(first)
        keep(kind, names[0], rest or [first])


def delete(kind, names, _flags, _scenario, _rule):
    (HOME / kind / names[0]).unlink()
    for node in (HOME / "tpu-vm").glob(f"{names[0]}*"):
        node.unlink()
    for home in (HOME / "homes").glob(f"{names[0]}*"):
        shutil.rmtree(home)


def homes(node, flags, scenario):
    wanted = flags.get("worker", "0")
    for worker in range(scenario["workers"]) if wanted == "all" else [int(wanted)]:
        home = HOME / "homes" / node / str(worker)
        home.mkdir(parents=True, exist_ok=True)
        yield str(worker), home


def scp(_kind, names, flags, scenario, _rule):
    *sources, target = names
    for _, home in homes(target.partition(":")[0], flags, scenario):
        for source in sources:
            shutil.copy(source, home)


def ssh(_kind, names, flags, scenario, rule):
    runs = []
    for worker, home in homes(names[0], flags, scenario):
        if worker in scenario.get("dead", []):
            print("ssh: connect to host port 22: Connection timed out", file=sys.stderr)
            runs.append(None)
            continue
        env = dict(os.environ, HOME=str(home), WORKER=worker, NODE=names[0])
        command = " ".join(flags["command"].split(" "))  # as gcloud does
        shell = {"cwd": home, "env": env, "stdout": subprocess.PIPE, "start_new_session": True}
        runs.append(subprocess.Popen(["bash", "-c", command], **shell))
    codes = [255 if run is None else finish(run, rule) for run in runs]
    if rule and rule.get("again"):  # as gcloud does by itself when a connection broke
        ssh(_kind, names, flags, scenario, None)
    sys.exit(next((code for code in codes if code), 0))


def finish(run, rule):
    if rule:
        for _ in range(rule["log_lines"]):
            sys.stdout.buffer.write(run.stdout.readline())
        sys.stdout.flush()
        run.stdout.close()
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        return fail(rule)
    for line in run.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
    return run.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
