"""What a word of a launch file may be: names, paths and images, so that none of them needs care later.

Whatever goes into a shell is quoted all the same.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from ringflash.checks import UNSAFE_IN_WORKDIR
from ringflash.exits import ConfigFault
from ringflash.plan import generations

# GKE adds "-slice-1-15-abcde" to a name, and all of it is one label of DNS: 63 characters. XPK allows 40.
LONGEST_NAME = 40
EXAMPLES = {
    "target": "gke",
    "config": "FILE.py",
    "workdir": "DIR",
    "out": "DIR",
    "topology": "v5p:4x4x4",
    "image": "REGION-docker.pkg.dev/PROJECT/REPOSITORY/ringflash:TAG",
    "project": "PROJECT",
    "zone": "us-east5-a",
    "cluster": "CLUSTER",
    "nodes": "4",
    "devices": "8",
}
LABEL = (
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    "small letters, digits and dashes, a letter first (RFC 1123)",
)
WORD = (r"[A-Za-z0-9][A-Za-z0-9_.:-]*", "letters, digits and _.:-")
PATH = (r"[^\x00-\x1f\x7f]+", "a path without control characters")
TEXTS = {
    "name": LABEL,
    "cluster": LABEL,
    "queue": WORD,  # of SLURM a partition
    "project": WORD,
    "zone": (r"[a-z]+-[a-z]+\d+-[a-z]", "a zone such as us-east5-a"),
    "bucket": (r"[a-z0-9][a-z0-9_.-]{1,61}[a-z0-9]", "a bucket's name, without gs://"),
    "image": (r"[a-z0-9][A-Za-z0-9_./:@-]*", "an image such as " + EXAMPLES["image"]),
    "image_config": (r"/[^\x00-\x1f\x7f]+", "a whole path, as the image has it"),
    "time": (r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}", "SLURM's D-HH:MM:SS, HH:MM:SS or minutes"),
    "config": PATH,
    "workdir": PATH,
    "out": PATH,
}


def check_word(argument: str, name: str, text: str) -> None:
    """Raises ConfigFault where the text is none for a flag of this name."""
    pattern, wanted = TEXTS[name]
    if not re.fullmatch(pattern, text, re.ASCII if name not in ("config", "workdir", "out") else 0):
        raise ConfigFault(f"{argument!r}: wanted {wanted}")
    if name in ("name", "cluster"):
        check_name(f"--{name}", text)


def check_name(flag: str, text: str) -> None:
    """Raises ConfigFault where it cannot be a label of DNS, with what is added to it."""
    if not re.fullmatch(LABEL[0], text, re.ASCII):
        raise ConfigFault(f"{flag}={text}: wanted {LABEL[1]}")
    if len(text) > LONGEST_NAME:
        raise ConfigFault(f"{flag}={text}: {len(text)} characters: wanted {LONGEST_NAME} at most")


def check_time(limit: str, grace: int) -> None:
    """Raises ConfigFault where a job would be asked to save as soon as it starts."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    # Hours come first after days, and in three parts; else minutes do.
    first = 3600 if dash or len(parts) == 3 else 60
    seconds = sum(part * first // 60**at for at, part in enumerate(parts))
    seconds += int(days or 0) * 86400
    if grace >= seconds:
        raise ConfigFault(
            f"--time={limit} is {seconds} s, and --grace={grace}: wanted more time than it takes to save"
        )


def topology(argument: str, text: str) -> str:
    """In the compiler's words. Raises ConfigFault."""
    try:
        return generations.topology(text).name
    except ConfigFault as fault:
        raise ConfigFault(f"{argument}: {fault}") from None


def control_faults(flag: str) -> list[str]:
    """A line break in a value would be one in a script of somebody else's making too."""
    return (
        [f"{flag!r}: wanted no control characters"] if re.search(r"[\x00-\x1f\x7f]", flag) else []
    )


def workdir_faults(target: str, workdir: str, bucket: str | None, mount: str) -> list[str]:
    """Why a run could not keep its files there; the folder itself is another machine's."""
    unsafe = sorted(set(workdir) & set(UNSAFE_IN_WORKDIR))
    if unsafe:
        return [f"--workdir={workdir}: has {' '.join(unsafe)}: checkpoints would be lost there"]
    if target == "tpu-vm" and workdir.startswith("gs://"):
        return []  # launch/tpu_vm.sh mounts it
    if "://" in workdir:
        return [f"--workdir={workdir}: wanted a folder; with --bucket=NAME one below {mount}"]
    if target in ("gke", "xpk", "tpu-vm") and not workdir.startswith("/"):
        return [f"--workdir={workdir}: wanted a whole path, as all hosts have it"]
    if bucket and mount not in map(str, PurePosixPath(os.path.normpath(workdir)).parents):
        return [f"--workdir={workdir}: wanted a folder below {mount}, where the bucket is mounted"]
    return []


def name_of(config: str) -> str:
    """A run's name, from its config file's."""
    stem = Path(config.partition(":")[0]).stem.lower()
    return re.sub(r"[^a-z0-9]+", "-", stem).strip("-")[:LONGEST_NAME].rstrip("-")


def in_image(config: str, root: str) -> str:
    """The config file as the image has it: the folder that is built from here lies at `root` there."""
    path, colon, argument = config.partition(":")
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        raise ConfigFault(
            f"--config={config}: not below this folder, so its place in the image is not known:"
            f" wanted --image-config={root}/configs/{os.path.basename(path)}, say"
        )
    return f"{PurePosixPath(root, *Path(relative).parts)}{colon}{argument}"
