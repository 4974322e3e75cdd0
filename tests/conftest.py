"""Every test runs on eight simulated CPU devices; without them the session fails."""

import gc
import os
from importlib.metadata import version
from pathlib import Path

# Thousands of tiny programs are compiled here and run once: let LLVM try less hard on each, and the
# older of XLA's two emitters write the loops, which takes a third less time (newer jaxlib has dropped it).
# The passes over the program (fusions, collectives, buffers) are the same. Set before JAX reads it,
# here and in the processes that tests start.
FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if int(version("jaxlib").split(".")[1]) < 11:
    FAST_COMPILES += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILES}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from ringflash.startup import simulate  # noqa: E402

DEVICES = 8
simulate(DEVICES)
# Tracing makes millions of small objects that are in no cycle: to look through them less often saves 7 %.
gc.set_threshold(200_000, 20, 50)

# Compiled programs outlive the session; the folder is ignored by git.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_sessionstart(session: pytest.Session) -> None:
    found = len(jax.devices())
    if found != DEVICES:
        pytest.exit(f"the tests need {DEVICES} simulated CPU devices, found {found}", returncode=3)
