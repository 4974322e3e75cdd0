"""The arguments of `ringflash launch render`: taken apart and judged, all faults at once."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringflash.bench import flags
from ringflash.config import Config
from ringflash.exits import ConfigFault
from ringflash.launch import words
from ringflash.launch.place import Place, placed, read
from ringflash.launch.shape import Shape
from ringflash.plan.where import CPU, Where

VERB = "render"
SLICES, NODES = ("topology", "slices"), ("nodes", "devices", "platform")
COMMON = ("target", "config", "workdir", "out", "force", "unchecked")
IMAGE = ("image", "image_config")
USED = {  # by each target, beside COMMON
    "gke": (*SLICES, *IMAGE, "name", "queue", "bucket", "spot", "grace", "restarts"),
    "slurm": (*NODES, "name", "project", "queue", "time", "grace", "restarts"),
    "tpu-vm": (*SLICES, "name", "project", "zone", "spot", "queued", "restarts"),
    "xpk": (*SLICES, *IMAGE, "name", "project", "zone", "cluster", "spot", "grace", "restarts"),
    "local": (*NODES, "restarts"),
}
NEEDED = {
    "gke": ("topology", "image"),
    "slurm": ("nodes", "devices"),
    "tpu-vm": ("topology", "project", "zone"),
    "xpk": ("topology", "image", "cluster"),
    "local": ("nodes", "devices"),
}
SWITCHES = ("spot", "queued", "force", "unchecked")
NAMES = tuple(dict.fromkeys([*COMMON, *(name for used in USED.values() for name in used)]))
RESTARTS = {"slurm": 100, "xpk": 100}  # where preemptions are counted with the crashes
IN_IMAGE = "/app"  # where the image has the folder that its Dockerfile is built from
MOUNT = "/gcs"  # where a pod has the bucket
HELP = """usage: ringflash launch render --target=gke|slurm|tpu-vm|xpk|local --config=FILE.py[:ARG]
         --workdir=DIR --out=DIR [--topology=v5p:4x4x4 --slices=N] [--nodes=N --devices=PER_NODE]
         [FLAGS] [--config.KEY=VALUE ...]

Writes the files that start a run, into --out, and prints the command that submits them. First it checks
what a run would find out on rented machines: the configuration, the mesh on the topology, and, by compiling
the step as `ringflash plan` does (two minutes), whether it fits. --unchecked leaves the compiling out.

  target   what is written                                 flags, beside --name and --restarts
  gke      a JobSet and the Kueue objects that queue it    --topology --image, --slices --queue --bucket
                                                           --spot --grace --image-config
  xpk      the command that has XPK make a JobSet          --topology --image --cluster, --slices --project
                                                           --zone --spot --grace --image-config
  tpu-vm   a script for launch/tpu_vm.sh                   --topology --project --zone, --slices --spot
                                                           --queued
  slurm    a batch script                                  --nodes --devices, --platform=gpu|cpu --queue
                                                           --project --time --grace
  local    a script for launch/local.sh                    --nodes --devices, --platform=gpu|cpu

  --name=...           of the run (default: that of the config file)
  --project=...        Google Cloud's, or SLURM's account
  --queue=...          Kueue's LocalQueue (default: ringflash), or SLURM's partition
  --image-config=...   the config file as the image has it (default: its path from here, under /app)
  --bucket=...         is mounted at /gcs; the workdir lies below that
  --grace=600          seconds to save in, when a run is asked to stop
  --restarts=10        after crashes; slurm and xpk count preemptions too (default: 100)
  --time=24:00:00      SLURM's limit
  --force              overwrite files that are there and differ
Exit codes: 0 written, 1 it does not fit, 3 wrong configuration or arguments.
"""


@dataclass(frozen=True)
class Options:
    """What to write, and for what; `given` are the arguments that say so, as they came."""

    target: str
    config_path: str
    config: Config
    workdir: str
    out: str
    where: Where
    shape: Shape
    overrides: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    name: str = ""
    image: str = ""
    image_config: str = ""
    platform: str = "tpu"
    project: str = ""
    zone: str = ""
    cluster: str = ""
    queue: str = ""
    bucket: str = ""
    time: str = "24:00:00"
    grace: int = 600
    restarts: int = 10
    spot: bool = False
    queued: bool = False
    force: bool = False
    unchecked: bool = False

    @property
    def train(self) -> tuple[str, ...]:
        """The command of every process, as the machine that runs it has its files."""
        path = self.image_config or self.config_path
        return ("train", f"--config={path}", f"--workdir={self.workdir}", *self.overrides)

    @property
    def rendered_by(self) -> str:
        """The command that writes the same again."""
        return shlex.join(["ringflash", "launch", VERB, *self.given])


def parse(arguments: Sequence[str]) -> Options:
    """`render --name=value ...` as Options. Raises ConfigFault with all that is wrong."""
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if verb != VERB:
        found = (
            f"launch {verb}: unknown" if verb and not verb.startswith("-") else "launch: no verb"
        )
        raise ConfigFault(f"{found}: wanted ringflash launch {VERB}, as in --help")
    overrides = [one for one in rest if one.startswith("--config.")]
    plain = [one for one in rest if one not in overrides]
    taken, faults = flags.gather(plain, value)
    faults += [fault for one in overrides for fault in words.control_faults(one)]
    faults += lacking(taken, " ".join(faults))
    faults += [
        f"--{dashed(name)}: --target={taken['target']} has no use for it"
        for name in taken
        if "target" in taken and name not in (*COMMON, *USED[taken["target"]])
    ]
    place, told = placed(taken)
    faults += told
    config, told = read(taken["config"], overrides, place) if "config" in taken else (None, [])
    faults += told
    if "target" in taken and "workdir" in taken:
        told = words.workdir_faults(taken["target"], taken["workdir"], taken.get("bucket"), MOUNT)
        faults += told
    if faults or config is None or place is None:
        raise ConfigFault(*faults)
    return finished(taken, config, place, overrides, plain)


def finished(
    taken: dict[str, Any],
    config: Config,
    place: Place,
    overrides: Sequence[str],
    plain: Sequence[str],
) -> Options:
    """What was taken, with what follows from it. Raises ConfigFault."""
    target, path = taken["target"], taken["config"]
    quiet = ("--out=", "--force", "--unchecked")  # they say where and how, and not what
    given = [one for one in plain if not one.startswith(quiet)] + list(overrides)
    usual: dict[str, Any] = {
        "name": words.name_of(path),
        "queue": "ringflash" if target == "gke" else "",
        "restarts": RESTARTS.get(target, 10),
        "platform": place.platform,
    }
    if "image" in taken:
        usual["image_config"] = taken.get("image_config") or words.in_image(path, IN_IMAGE)
    others = {key: one for key, one in taken.items() if key not in ("config", *SLICES, *NODES)}
    made = Options(
        config_path=path,
        config=config,
        where=place.where,
        shape=place.shape,
        overrides=(*overrides, *place.overrides(target)),
        given=tuple(given),
        **(usual | others),
    )
    words.check_name("--name", made.name)
    if target == "slurm":
        words.check_time(made.time, made.grace)
    return made


def lacking(taken: dict[str, Any], told: str) -> list[str]:
    """What is missing, but for what was there and wrong."""
    needed = ["target", "config", "workdir", "out", *NEEDED.get(taken.get("target", ""), ())]
    return [
        f"--{name} is missing: wanted --{name}={words.EXAMPLES[name]}"
        for name in needed
        if name not in taken and f"--{name}" not in told
    ]


def value(argument: str) -> dict[str, Any]:
    """One argument. Raises ConfigFault."""
    name, equals, text = argument.partition("=")
    known = [dashed(one) for one in NAMES]
    name, text = flags.split(f"{name}{equals}{text}", known, SWITCHES)
    name = name.replace("-", "_")
    if name in SWITCHES:
        return {name: True}
    take = TAKE.get(name)
    if take is None:
        words.check_word(argument, name, text)
        return {name: text}
    return {name: take(argument, text)}


def dashed(name: str) -> str:
    """As a flag has it."""
    return name.replace("_", "-")


TAKE: dict[str, Callable[[str, str], Any]] = {
    "target": partial(flags.one_of, known=tuple(USED)),
    "platform": partial(flags.one_of, known=("gpu", CPU)),
    "topology": words.topology,
    **dict.fromkeys(("slices", "nodes", "devices", "grace"), flags.positive),
    "restarts": flags.counted,
}
