"""Every test runs on eight simulated CPU devices; without them the session fails."""

from pathlib import Path

import jax
import pytest

DEVICES = 8

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
# Compiled programs outlive the session; the folder is ignored by git.
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "jax"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_sessionstart(session: pytest.Session) -> None:
    found = len(jax.devices())
    if found != DEVICES:
        pytest.exit(f"the tests need {DEVICES} simulated CPU devices, found {found}", returncode=3)
