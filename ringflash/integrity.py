"""Which steps of a checkpoints directory can be trusted, by a manifest of SHA-256 in each.

Orbax keeps no checksum over array bytes, and takes any directory with a number for a step. The
manifest is written before orbax commits the step, so a step without one is a stray directory or a
copy cut short. Files directly in the step's directory are left out: orbax still writes them while
it commits, and nothing restores from them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

log = logging.getLogger(__name__)

MANIFEST = "integrity.json"
STEP_NAME = re.compile("0|[1-9][0-9]*")


def steps(directory: Path) -> list[int]:
    """What has a step's name in `directory`, newest first, whole or not."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted((int(name) for name in names if STEP_NAME.fullmatch(name)), reverse=True)


def seal(step_dir: Path) -> None:
    """Write the manifest of the files below `step_dir`; durable when this returns."""
    files = {
        path.relative_to(step_dir).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
        for path in sorted(step_dir.glob("*/**/*"))
        if path.is_file()
    }
    draft = step_dir / (MANIFEST + ".tmp")
    with draft.open("w", encoding="utf-8") as out:
        json.dump(files, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(step_dir / MANIFEST)


def incomplete(step_dir: Path) -> str | None:
    """Why this is not a whole step (no manifest, a file absent or of another size), or None."""
    if not (step_dir / MANIFEST).is_file():
        return f"{step_dir / MANIFEST} is not there"
    try:
        files = _files(step_dir)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{step_dir / MANIFEST} cannot be read: {error!r}"
    for path, (size, _) in files.items():
        if not path.is_file():
            return f"{path} is not there"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, its manifest says {size}"
    return None


def damage(step_dir: Path) -> str | None:
    """As `incomplete`, and reads every byte: the first file whose SHA-256 differs is named."""
    reason = incomplete(step_dir)
    if reason is not None:
        return reason
    for path, (_, wanted) in _files(step_dir).items():
        found = _sha256(path)
        if found != wanted:
            return f"{path} has SHA-256 {found[:12]}..., its manifest says {wanted[:12]}..."
    return None


def clear(directory: Path, *, damaged: Collection[int]) -> None:
    """Rename what orbax would take for a step and is none, and `damaged` steps.

    Saves that did not finish are removed.
    """
    for step in steps(directory):
        path = directory / str(step)
        if step in damaged or incomplete(path):
            aside = _unused(directory / f"{step}.set-aside")
            path.rename(aside)
            log.warning("%s is no usable checkpoint: renamed to %s", path, aside.name)
    for path in directory.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path)
        log.warning("%s was a save that did not finish: removed", path)


def _files(step_dir: Path) -> dict[Path, tuple[int, str]]:
    manifest = json.loads((step_dir / MANIFEST).read_text(encoding="utf-8"))
    return {step_dir / name: (row["bytes"], row["sha256"]) for name, row in manifest.items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unused(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{n}") for n in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())
