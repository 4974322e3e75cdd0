#!/usr/bin/env bash
# Train in several processes on this machine, each with its own simulated devices (or GPUs, where there are any):
#
#   bash launch/local.sh -n 4 -d 2 configs/quickstart.py runs/local [--restarts=10] [--config.steps=120 ...]
#
# -n processes of -d devices each. When one ends all end; after 42 (preempted and saved), 124 (hung) and crashes all
# start again and go on from the last checkpoint; after 1, 3, 4 and 5 they do not. Ctrl-C saves and ends with 42.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/install.sh"
exec "$root/.venv/bin/python" -m ringflash.supervisor "$@"
