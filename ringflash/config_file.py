"""Read a configuration file: a Python file whose `get_config()` returns a ConfigDict.

The file's own folder stands first on `sys.path` while it runs, so a config builds on a sibling by
`from base import get_config as base`, whatever the current folder is. What goes wrong in the file
is a ConfigFault of one line. What the values mean is not judged here.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from ringflash.exits import ConfigFault

MODULE = "ringflash_config_file"


@dataclass(frozen=True)
class ConfigFile:
    """What a file says (`values`), and what the `base.py` that it built on says, if any."""

    path: str
    values: ConfigDict
    base: ConfigDict


def read(spec: str) -> ConfigFile:
    """Run the file of `FILE.py[:ARG]`; ARG is handed to its `get_config`."""
    path, *argument = spec.split(":", 1)
    if not Path(path).is_file():
        raise ConfigFault(f"{path}: no such config file{_nearest_file(Path(path))}")
    with _importable(Path(path).resolve().parent) as siblings:
        try:
            values = _run(path).get_config(*argument)
            on_base = "base" in siblings and "base" in sys.modules
            base = sys.modules["base"].get_config() if on_base else ConfigDict()
        # A config file is the user's program: whatever it raises is told as a fault of the file.
        except (Exception, SystemExit) as error:
            raise ConfigFault(_where(path, error)) from error
    for returned in (values, base):
        if not isinstance(returned, ConfigDict):
            kind = type(returned).__name__
            raise ConfigFault(f"{path}: get_config() returned {kind}: wanted a ConfigDict")
    return ConfigFile(path, values, base)


def _run(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ValueError("not a Python file: wanted a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError("no get_config(): wanted a function of that name")
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[set[str]]:
    """Let a folder's modules be imported, and forget them after: another has its own `base`."""
    siblings = {file.stem for file in folder.glob("*.py")}
    names = {MODULE, *siblings}
    hidden = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    path, dont_write = list(sys.path), sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    # A .pyc is looked up by the second of its change: an edit within that second would be missed.
    sys.dont_write_bytecode = True
    try:
        yield siblings
    finally:
        sys.path[:], sys.dont_write_bytecode = path, dont_write
        for name in names & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(hidden)


def _where(path: str, error: BaseException) -> str:
    """`FILE:LINE: what was raised`, at the deepest line of the file or of one of its siblings."""
    folder = Path(path).resolve().parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().parent == folder]
    place = f"{path}:{own[-1].lineno}" if own else path
    if own and Path(own[-1].filename).name != Path(path).name:
        place = f"{Path(path).parent / Path(own[-1].filename).name}:{own[-1].lineno}"
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{Path(path).parent / Path(error.filename).name}:{error.lineno}"
    return f"{place}: {type(error).__name__}: {error}"


def _nearest_file(path: Path) -> str:
    names = [found.name for found in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; nearest: {path.parent / near[0]}" if near else ""
