"""`ringflash launch render`: judged, compiled, written, told."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringflash.bench.report import tell
from ringflash.exits import ConfigFault
from ringflash.launch import gke, local, slurm, tpu_vm, xpk
from ringflash.launch.options import Options, parse
from ringflash.launch.shape import Shape, usual
from ringflash.plan import step_rows, step_run
from ringflash.plan.step_options import StepOptions

Files = dict[str, str]


@dataclass(frozen=True)
class Target:
    """How a run is started somewhere. files: their texts by name. submit: the command, for a person."""

    files: Callable[[Options, Shape], Files]
    submit: Callable[[Options], str]


TARGETS = {
    "gke": Target(gke.files, gke.submit),
    "slurm": Target(slurm.files, slurm.submit),
    "tpu-vm": Target(tpu_vm.files, tpu_vm.submit),
    "xpk": Target(xpk.files, xpk.submit),
    "local": Target(local.files, local.submit),
}


def run(arguments: Sequence[str], show: Callable[..., Any]) -> None:
    """Write what the arguments ask for; `show(title, rows, header=...)` prints a table for a person.

    Raises ConfigFault for what is wrong, and DoesNotFit; nothing is written then.
    """
    options = parse(arguments)
    target = TARGETS[options.target]
    texts = target.files(options, options.shape)
    out = Path(options.out)
    require_free(out, texts, force=options.force)
    if options.where.generation is not None and not options.unchecked:
        print(f"compiling a step for {options.where}, as ringflash plan does", flush=True)
        require_fit(options, show)
    write(out, texts)
    show(f"ringflash launch render, {options.target}", rows(options, texts))
    for note in notes(options):
        print(f"note: {note}")
    print(f"submit it with: {target.submit(options)}")


def require_free(out: Path, texts: Mapping[str, str], *, force: bool) -> None:
    """Raises ConfigFault where files are there that say something else, or where none can be."""
    if out.exists() and not out.is_dir():
        raise ConfigFault(f"--out={out}: no folder")
    found = [out / name for name in texts if (out / name).exists()]
    other = [str(file) for file in found if file.read_text() != texts[file.name]]
    if other and not force:
        raise ConfigFault(f"{', '.join(other)}: there, and different: --force overwrites")


def require_fit(options: Options, show: Callable[..., Any]) -> None:
    """Compile the step as `ringflash plan` does. Raises DoesNotFit, after what would fit is told."""
    asked = StepOptions(options.config_path, options.config, options.where)
    facts = step_run.facts_of(asked)
    if step_run.fits(asked, facts):
        return
    tell(step_run.advised(asked, facts), show, as_json=False)
    raise step_run.DoesNotFit(step_rows.shortage(asked, facts))


def write(out: Path, texts: Mapping[str, str]) -> None:
    """Raises ConfigFault where it cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text)
    except OSError as error:
        raise ConfigFault(f"--out={out}: cannot be written: {error}") from error


def rows(options: Options, texts: Mapping[str, str]) -> list[list[str]]:
    """What was filled in."""
    shape = options.shape
    slices = f"{shape.slices} x " if shape.slices > 1 else ""
    found = {
        "name": options.name,
        "hosts": f"{slices}{shape.hosts}",
        "chips a host" if shape.topology else "devices a host": str(shape.chips),
        "devices": str(shape.devices),
        "topology": shape.topology,
        "node selector": f"{shape.accelerator}, {shape.topology}" if options.target == "gke" else "",
        "machine type": shape.machine if options.target == "gke" else "",
        "accelerator": {"tpu-vm": shape.accelerator_type, "xpk": shape.xpk_type}.get(options.target, ""),
        "image": options.image,
        "command": shlex.join(["ringflash", *options.train]),
        "fits": fits(options),
        "written": ", ".join(f"{options.out}/{name}" for name in texts),
    }  # fmt: skip
    return [[name, text] for name, text in found.items() if text]


def fits(options: Options) -> str:
    """What is known of it; nothing where there is no slice to compile for."""
    if options.where.generation is None:
        return ""
    return "not checked: --unchecked" if options.unchecked else "yes, by ringflash plan"


def notes(options: Options) -> list[str]:
    """What a person must know and no check can find."""
    found = []
    if options.target == "gke" and not options.bucket:
        found.append(
            f"without --bucket the workdir {options.workdir} is lost with the pods, unless you mount a disk"
        )
    if options.target == "tpu-vm" and not usual(options.shape):
        kind, shape = options.shape.accelerator_type, options.shape.topology
        found.append(
            f"{kind} names a number of chips; of what shape is for the API to say, and may not be {shape}"
        )
    if options.where.topology.startswith("v4:"):
        found.append("a v4 chip counts as two devices here; JAX on v4 may join them into one")
    return found
