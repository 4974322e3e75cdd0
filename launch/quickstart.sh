#!/usr/bin/env bash
# Install if need be, then train and evaluate a small model on this machine: configs/quickstart.py.
# Arguments go to ringflash: bash launch/quickstart.sh --config.steps=120
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/install.sh
exec .venv/bin/ringflash train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
