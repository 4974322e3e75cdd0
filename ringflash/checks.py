"""What is wrong with a configuration: all of it at once, one line per fault, no device touched.

A line names the file, the key, the value, what is allowed, and the nearest key where the key is not
known. What a leaf may be alone stands in `ringflash.rules`, what leaves must be to one another in
`ringflash.combinations`.
"""

from __future__ import annotations

import difflib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from ringflash import combinations, rules
from ringflash.config import SIZES, get, leaves, override, override_key, sections
from ringflash.model.presets import PRESETS

LEAVES = leaves()
SECTIONS = sections()
# orbax and tensorstore read these as patterns: what is saved there cannot be read back.
UNSAFE_IN_WORKDIR = "[]*?\\"

# The parsers that config_flags uses, so that what passes here passes there.
_PARSERS: Mapping[type, Callable[[str], object]] = {
    int: flags.IntegerParser().parse,
    float: flags.FloatParser().parse,
    bool: flags.BooleanParser().parse,
    str: str,
}


def faults(
    values: ConfigDict, *, path: str, overrides: Sequence[str] = (), platform: str = "cpu"
) -> list[str]:
    """All faults of a file's `values` and of the `--config.KEY=VALUE` flags, one line each."""
    good = [flag for flag in overrides if not _override_fault(flag) and _fits(flag, values)]
    values = override(values, good)
    given = set(map(override_key, good))
    right = {key: get(values, key) for key in LEAVES if _is_right(values, key)}
    alone = [*_unknown_faults(values), *_value_faults(values, given)]
    together = _combination_faults(_with_preset(right), given, platform)
    told = [f"{path}: {fault}" for fault in [*alone, *together]]
    return [*override_faults(overrides, path=path), *told]


def override_faults(overrides: Sequence[str], *, path: str) -> list[str]:
    """What is wrong with the `--config.KEY=VALUE` flags by themselves, one line each."""
    return [f"{path}: {fault}" for fault in map(_override_fault, overrides) if fault]


def workdir_fault(workdir: str) -> str | None:
    """Why a run cannot keep its files there, as far as can be seen without touching it."""
    unsafe = sorted(set(workdir) & set(UNSAFE_IN_WORKDIR))
    if unsafe:
        return f"--workdir={workdir}: has {' '.join(unsafe)}: checkpoints would be lost there"
    if "://" in workdir:
        return f"--workdir={workdir}: wanted a folder of this machine, or one that is mounted"
    path = Path(os.path.abspath(workdir))
    nearest_there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest_there.is_dir():
        return f"--workdir={workdir}: {nearest_there} is no folder"
    if not os.access(nearest_there, os.W_OK | os.X_OK):
        return f"--workdir={workdir}: {nearest_there} cannot be written"
    # What an earlier run left there may belong to another user.
    locked = next((left for left in path.glob("*") if not os.access(left, os.W_OK)), None)
    return f"--workdir={workdir}: {locked} cannot be written" if locked else None


def probe_workdir(workdir: Path) -> str | None:
    """Make the folder and do in it once what a run will do; why that failed, or None."""
    part = workdir / f".probe-{socket.gethostname()}-{os.getpid()}.part"  # hosts share the folder
    whole = part.with_suffix("")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with part.open("w") as file:
            file.write("ringflash")
            file.flush()
            os.fsync(file.fileno())
        part.rename(whole)
        whole.unlink()
    except OSError as error:
        return f"--workdir={workdir}: cannot be written: {error}"
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """The known key most like `name`, in whole or in its last part."""

    def likeness(candidate: str) -> tuple[float, float]:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        last = difflib.SequenceMatcher(None, _last(name), _last(candidate)).ratio()
        return max(whole, last), whole

    return max(known, key=likeness)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _override_fault(flag: str) -> str | None:
    key, text = override_key(flag), flag.partition("=")[2]
    if key in SECTIONS:
        return f"{key} = {text!r} (command line): a section: set its leaves, {_leaves_of(key)}"
    if key not in LEAVES:
        return f"{key} = {text!r} (command line): {_unknown(key)}"
    try:
        _PARSERS[LEAVES[key]](text)
    except (TypeError, ValueError):
        return f"{key} = {text!r} (command line): wanted {rules.wanted(key, LEAVES[key])}"
    return None


def _fits(flag: str, values: ConfigDict) -> bool:
    """Whether the file has a section for the flag; where it has not, that is told instead."""
    section = override_key(flag).rpartition(".")[0]
    return not section or isinstance(values.get(section), ConfigDict)


def _unknown(key: str) -> str:
    near = nearest(key, LEAVES)
    return f"unknown key; nearest: {near} ({rules.wanted(near, LEAVES[near])})"


def _leaves_of(section: str) -> str:
    return ", ".join(key for key in LEAVES if key.startswith(f"{section}."))


def _unknown_faults(values: ConfigDict, prefix: str = "") -> Iterator[str]:
    """Keys that no component has, and leaves that stand where a section should."""
    for name in values:
        key, value = f"{prefix}{name}", values[name]
        if key in SECTIONS and isinstance(value, ConfigDict):
            yield from _unknown_faults(value, f"{key}.")
        elif key in SECTIONS:
            yield f"{key} = {value!r}: wanted a section with {_leaves_of(key)}"
        elif key not in LEAVES and isinstance(value, ConfigDict):
            yield f"{key}: unknown section; nearest: {nearest(key, SECTIONS)}"
        elif key not in LEAVES:
            yield f"{key} = {value!r}: {_unknown(key)}"


def _value_faults(values: ConfigDict, given: set[str]) -> Iterator[str]:
    """Leaves that are missing, of another type, or out of their range."""
    for key, kind in LEAVES.items():
        section = key.rpartition(".")[0]
        if section and not isinstance(values.get(section, ConfigDict()), ConfigDict):
            continue
        if _is_right(values, key):
            continue
        try:
            shown = _shown(key, get(values, key), given)
        except KeyError:
            shown = f"{key} is missing"
        yield f"{shown}: wanted {rules.wanted(key, kind)}"


def _is_right(values: ConfigDict, key: str) -> bool:
    try:
        return rules.allows(key, LEAVES[key], get(values, key))
    except KeyError:
        return False


def _with_preset(right: dict[str, Any]) -> dict[str, Any]:
    """Right leaves with sizes of 0 filled from the preset, or left out where it is not known."""
    preset = PRESETS.get(right.get("model.preset", ""), {})
    zeros = [size for size in SIZES if right.get(f"model.{size}") == 0]
    filled = {f"model.{size}": preset[size] for size in zeros if size in preset}
    kept = {key: value for key, value in right.items() if _last(key) not in zeros}
    return kept | filled


def _combination_faults(right: Mapping[str, Any], given: set[str], platform: str) -> Iterator[str]:
    for keys, fault in combinations.faults(right, platform=platform):
        yield f"{', '.join(_shown(key, right[key], given) for key in keys)}: {fault}"


def _shown(key: str, value: object, given: set[str]) -> str:
    text = "a section" if isinstance(value, ConfigDict) else " ".join(repr(value).split())
    return f"{key} = {text}" + (" (command line)" if key in given else "")
