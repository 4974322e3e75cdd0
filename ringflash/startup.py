"""What must be settled before the first device is touched: platform, devices, compilation cache.

`platform` only looks; `prepare` sets JAX's configuration and may be called once, at the start.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path

import jax

from ringflash.config import Config, device_count
from ringflash.exits import ConfigFault

CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
ONE_ORDER = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
THREADS = 2
TPU_DEVICES = ("accel*", "vfio/[0-9]*")


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what JAX_PLATFORMS names first, else what driver and plugin serve."""
    named = os.environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if named:
        return "gpu" if named in ("cuda", "rocm") else named
    if _installed("libtpu") and any(map(_has_device, TPU_DEVICES)):
        return "tpu"
    if any(map(_installed, CUDA_PLUGINS)) and _has_device("nvidia0"):
        return "gpu"
    return "cpu"


def prepare(config: Config, processes: int = 1) -> None:
    """Choose the platform, simulate this process's share of the mesh on a CPU, keep compiled programs.

    Raises ConfigFault for devices that cannot be shared out evenly among the processes.
    """
    # Orbax and grain speak through absl's logger: leave standard error to their errors.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if platform() == "cpu":
        devices = device_count(config.mesh, config.cpu_devices)
        if devices % processes:
            raise ConfigFault(
                f"cpu_devices: {devices} devices cannot be shared out evenly among {processes} processes"
            )
        simulate(devices // processes)
    _cache_compilations()


def simulate(devices: int) -> None:
    """Have this process's CPU stand for so many devices; before the first one is touched.

    A simulated device waits in a thread, and XLA has as many threads as devices. One that waits in two
    collectives at once leaves another without a thread; then all hang until XLA aborts. So there are
    `THREADS` for each, and a schedule for the least memory, which has one order for all. docs/log.md has
    what was measured.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_scheduler_type" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {ONE_ORDER}".strip()
    os.environ.setdefault("NPROC", str(max(THREADS * devices, os.cpu_count() or 1)))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _has_device(pattern: str) -> bool:
    return any(Path("/dev").glob(pattern))


def _cache_compilations() -> None:
    """Keep compiled programs for the next start. The user's own JAX_COMPILATION_CACHE_DIR wins."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = Path(os.environ.get("RINGFLASH_CACHE_DIR") or Path.home() / ".cache/ringflash/jax")
        reason = _make_private(folder)
        if reason:
            print(f"ringflash: no compilation cache: {reason}", file=sys.stderr)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _make_private(folder: Path) -> str | None:
    """Make the folder for this user alone; why it is not, or None. Its files are run as code."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        return str(error)
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        return f"others can write to {folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written"
    return None
