#!/usr/bin/env bash
# Install if need be, then run the whole suite on two workers, on eight simulated CPU devices each.
# Arguments go to pytest: bash tests/run.sh tests/test_cli.py -k steps
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh test
exec .venv/bin/python -m pytest -n 2 --dist=worksteal "$@"
