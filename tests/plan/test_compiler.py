"""The child: what it is given, how it fails, and that nothing is left of it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ringflash.exits import ConfigFault
from ringflash.plan import compiler

SECONDS = 60


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Pretend that libtpu is here: no test below loads it. All temporary files go to one folder."""
    monkeypatch.setattr(compiler, "require", lambda: None)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def eventually(condition):
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.1)
    return False


def test_json_in_and_out(home):
    found = compiler.in_child("chores:echo", {"a": [1, None]}, seconds=SECONDS)
    assert found["argument"] == {"a": [1, None]}
    assert found["there"]
    assert Path(found["dump"]).parent.parent == home
    assert not Path(found["dump"]).exists()


def test_the_settings_are_ours_whatever_the_user_has(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/cache")
    monkeypatch.setenv("XLA_FLAGS", "--a")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--b")
    monkeypatch.setenv("PLAN_TEST", "kept")
    names = [*compiler.SETTINGS, "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "PLAN_TEST"]
    found = compiler.in_child("chores:settings", [*names, "LIBTPU_INIT_ARGS"], seconds=SECONDS)
    flags = found.pop("LIBTPU_INIT_ARGS")
    absent = {"JAX_COMPILATION_CACHE_DIR": None, "XLA_FLAGS": None}
    assert found == {**compiler.SETTINGS, **absent, "PLAN_TEST": "kept"}
    assert flags.startswith("--xla_jf_dump_to=/")
    assert flags.endswith("/dump --xla_jf_dump_llo_text=true")


def test_further_flags():
    found = compiler.in_child(
        "chores:settings", ["LIBTPU_INIT_ARGS"], seconds=SECONDS, flags="--xla_more=1"
    )
    assert found["LIBTPU_INIT_ARGS"].endswith("=true --xla_more=1")


def test_an_exception_is_told():
    with pytest.raises(compiler.CompilerFailed, match=r"ended with code 1; .*ValueError: no such"):
        compiler.in_child("chores:fail", "no such", seconds=SECONDS)


def test_an_abort_is_told():
    with pytest.raises(compiler.CompilerFailed, match="code -6; it said: out of registers"):
        compiler.in_child("chores:die", None, seconds=SECONDS)


def test_time_is_up(tmp_path):
    note = tmp_path / "note"
    with pytest.raises(compiler.CompilerFailed, match="killed after 3 seconds; it said nothing"):
        compiler.in_child("chores:sleep", str(note), seconds=3)
    assert not alive(int(note.read_text().split()[0]))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_from_outside(tmp_path, home, sent):
    """However the parent ends, the child and its folder go with it."""
    note = tmp_path / "note"
    script = (
        "import signal\n"
        "from ringflash.plan import compiler\n"
        # Who runs the tests in the background may have had it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "compiler.require = lambda: None\n"
        f"compiler.in_child('chores:sleep', {str(note)!r}, seconds={SECONDS})\n"
    )
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(home)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.DEVNULL)
    assert eventually(lambda: note.exists() and " " in note.read_text())
    pid, folder = note.read_text().split()
    assert Path(folder).parent == home
    assert alive(int(pid))
    parent.send_signal(sent)
    assert parent.wait(SECONDS) != 0
    assert eventually(lambda: not alive(int(pid)))
    assert eventually(lambda: not Path(folder).exists())


def test_the_compiler_is_absent(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigFault) as told:
        compiler.in_child("chores:echo", None, seconds=SECONDS)
    assert told.value.lines() == [
        "libtpu, the TPU compiler, is not installed: pip install 'ringflash[plan]'"
    ]
