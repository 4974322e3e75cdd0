"""Where documents come from: by index, each with a name, the whole with a fingerprint.

A source reads bytes and knows nothing of tokens. Which documents are held out is a rule of their
names alone, so it is the same on every machine and does not move when documents are added.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

# Left out by some distributions, or filled by the user, so not the same on each machine.
STDLIB_WITHOUT = {
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "distutils"),
    *("site-packages", "dist-packages", "__pycache__"),
}


class DataError(ValueError):
    """The data are missing, broken, or not those that a run began with."""


class Source(Protocol):
    """Documents by index. `part` says in words which part of a larger source this is."""

    @property
    def names(self) -> Sequence[str]:
        """The documents' names, unique and in the order of their indices."""

    @property
    def part(self) -> str:
        """All documents, or the training or held-out ones and the percentage held out."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, sizes and contents."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes: ...


class FileSource:
    """The files `names` under the folder `root`; a file is a document."""

    part = "all documents"

    def __init__(self, root: Path, names: Sequence[str]):
        self.root = root
        self.names = tuple(names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> bytes:
        path = self.root / self.names[index]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read document {path}: {error.strerror}") from error

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, sizes and contents; reads every file once."""
        return hash_documents(self)


class PartSource:
    """The documents of `whole` at `indices`."""

    def __init__(self, whole: Source, indices: Sequence[int], *, part: str):
        self.whole = whole
        self.indices = tuple(indices)
        self.part = part
        self.names = tuple(whole.names[index] for index in self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> bytes:
        return self.whole[self.indices[index]]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, sizes and contents; reads every document once."""
        return hash_documents(self)


def hash_documents(source: Source) -> str:
    """SHA-256, in hex, over the names, sizes and contents of all documents in order."""
    digest = hashlib.sha256()
    for index, name in enumerate(source.names):
        document = source[index]
        encoded_name = os.fsencode(name)
        digest.update(f"{len(encoded_name)} {len(document)} ".encode())
        digest.update(encoded_name)
        digest.update(document)
    return digest.hexdigest()


def hash_name(name: str) -> int:
    """The number that decides on a document by its name alone."""
    return int(hashlib.sha256(os.fsencode(name)).hexdigest(), 16)


def split(source: Source, held_out_percent: int) -> tuple[Source, Source]:
    """Training and held-out documents: held out where hash_name % 100 < held_out_percent.

    Raises DataError if either part would be empty.
    """
    train: list[int] = []
    held_out: list[int] = []
    for index, name in enumerate(source.names):
        (held_out if hash_name(name) % 100 < held_out_percent else train).append(index)
    if not train or not held_out:
        raise DataError(
            f"of {len(source)} documents, {len(train)} are for training and {len(held_out)} are "
            f"held out at held_out_percent={held_out_percent}; each part needs at least one"
        )
    return (
        PartSource(source, train, part=f"training, {held_out_percent}% held out"),
        PartSource(source, held_out, part=f"held out, {held_out_percent}%"),
    )


def stdlib(argument: str) -> Source:
    """The running Python's own standard library: its .py files, without tests and GUI parts."""
    if argument:
        raise ValueError(f"source 'stdlib' takes no argument, got {argument!r}")
    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in STDLIB_WITHOUT and f[:7] != "config-"]
        names += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    kept = sorted(name.as_posix() for name in names if _holds_data(root / name))
    if not kept:
        raise DataError(f"the standard library at {root} has no .py files")
    return FileSource(root, kept)


def files(argument: str) -> Source:
    """The files that match a glob, `**` allowed, named by their path below its fixed part."""
    found = [Path(path) for path in glob.glob(argument, recursive=True)]
    matches = sorted({path for path in found if _holds_data(path)})
    if not matches:
        raise DataError(f"no file that holds data matches {argument!r} ({len(found)} paths match)")
    root = _fixed_folder(argument)
    return FileSource(root, sorted(path.relative_to(root).as_posix() for path in matches))


SOURCES: dict[str, Callable[[str], Source]] = {"stdlib": stdlib, "files": files}


def make_source(spec: str) -> Source:
    """The source that `NAME` or `NAME:ARGUMENT` asks for; NAME is a key of SOURCES."""
    name, _, argument = spec.partition(":")
    if name not in SOURCES:
        raise ValueError(f"no source {spec!r}; known: {', '.join(sorted(SOURCES))}")
    return SOURCES[name](argument)


def _holds_data(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _fixed_folder(pattern: str) -> Path:
    """The folder of `pattern` above its first part with a wildcard."""
    parts = Path(pattern).parent.parts
    wild = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return Path(*parts[:wild])
