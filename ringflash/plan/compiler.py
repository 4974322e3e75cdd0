"""Work in a child process that has the TPU compiler, with no TPU and nothing asked of the user's shell.

libtpu reads its settings once, when it is loaded, and an abort in it ends the process: hence a child.
What the compiler dumps lies in a temporary directory, which is gone when the child is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringflash.exits import UNEQUAL, ConfigFault, Stop

EXTRA = "pip install 'ringflash[plan]'"
LAST_LINES = 8
# Of the user's variables these change what is compiled, or have a cache answer without a dump.
DROPPED = ("JAX_", "XLA_", "TPU_", "LIBTPU_")
SETTINGS = {
    "JAX_PLATFORMS": "cpu",  # of the child: the TPU is only compiled for
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second compiler dies of the first one's lock file
    "TPU_SKIP_MDS_QUERY": "1",  # else it waits for a metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # must be something; the topology decides
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


class CompilerFailed(Stop):
    """The child ended without a result, or took too long."""

    code = UNEQUAL


def require() -> None:
    """Raises ConfigFault unless the compiler is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigFault(f"libtpu, the TPU compiler, is not installed: {EXTRA}")


def in_child(
    work: str, argument: Any, *, seconds: float, flags: str = "", needs_libtpu: bool = True
) -> Any:
    """What `work`, "package.module:function", returns for (argument, dump), called in a child.

    argument, result: whatever JSON can hold.  dump: the directory into which the compiler writes its
    schedules meanwhile.  seconds: after that many the child is killed.  flags: further LIBTPU_INIT_ARGS.
    needs_libtpu: not where it compiles for simulated devices.
    Raises ConfigFault where libtpu is absent, CompilerFailed with the child's last lines.
    """
    if needs_libtpu:
        require()
    with tempfile.TemporaryDirectory(prefix="ringflash-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        (home / "dump").mkdir()
        (home / "request.json").write_text(json.dumps({"work": work, "argument": argument}))
        code = _run(home, environment(home / "dump", flags), seconds)
        result = home / "result.json"
        if code is None:
            raise CompilerFailed(
                f"the TPU compiler was killed after {seconds:g} seconds; {_last(home)}"
            )
        if code or not result.exists():
            raise CompilerFailed(f"the TPU compiler ended with code {code}; {_last(home)}")
        return json.loads(result.read_text())


def slice_devices(topology: str, slices: int) -> Sequence[Any]:
    """In the child: the devices of slices that need not be there. Loads the compiler: never in the parent."""
    # As its docstring says.
    from jax.experimental import topologies

    more = {"num_slices": slices} if slices > 1 else {}
    found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more)
    return found.devices


def environment(dump: Path, flags: str = "") -> dict[str, str]:
    """The child's: ours but for `DROPPED`, the settings of the compiler, the same modules in reach."""
    wanted = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true {flags}".strip()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return {**kept, **SETTINGS, "LIBTPU_INIT_ARGS": wanted, "PYTHONPATH": path}


def _run(home: Path, env: dict[str, str], seconds: float) -> int | None:
    """The child's exit code; None where it was killed for taking too long."""
    command = [sys.executable, "-m", "ringflash.plan.child", str(home)]
    with (home / "said.txt").open("wb") as said:
        # A session of its own, so that Ctrl-C reaches it through us. It ends when its stdin does.
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            assert child.stdin is not None
            child.stdin.close()


def _last(home: Path) -> str:
    """What the child said last, on one line."""
    lines = (home / "said.txt").read_text(errors="replace").split("\n")
    told = [line.strip() for line in lines if line.strip()]
    return f"it said: {' | '.join(told[-LAST_LINES:])}" if told else "it said nothing"
