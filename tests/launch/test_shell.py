"""Every shell script passes shellcheck, which the test extra installs beside Python."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
SCRIPTS = [
    *sorted((ROOT / "launch").glob("*.sh")),
    *sorted((ROOT / "launch").glob("*.sbatch")),
    ROOT / "tests/run.sh",
    ROOT / ".ci/run",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shellcheck_finds_nothing(script):
    found = subprocess.run([SHELLCHECK, script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
