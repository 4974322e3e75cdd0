#!/usr/bin/env bash
# Make a virtual environment and install ringflash in it, where that is not done yet.
#
#   bash launch/install.sh [EXTRA] [VENV]      EXTRA: test, cuda, tpu, plan, or '' for none
#
# PYTHON names the interpreter (default: python3). Called again, it does nothing until pyproject.toml changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-}
venv=${2:-.venv}
python=${PYTHON:-python3}
installed=$venv/installed-${extra:-plain}.toml

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! command -v "$python" >/dev/null; then
        echo "ringflash needs Python 3.11 or newer; there is no '$python' (set PYTHON to name another)" >&2
        exit 3
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "ringflash needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1) (set PYTHON to name another)" >&2
        exit 3
    fi
    echo "making $venv with $("$python" --version)"
    if ! "$python" -m venv --clear "$venv"; then
        echo "'$python -m venv' failed; on Debian and Ubuntu it needs the package python3-venv" >&2
        exit 3
    fi
fi

if ! cmp -s pyproject.toml "$installed"; then
    echo "installing ringflash${extra:+[$extra]} in $venv: the first time takes a minute or two"
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -e ".${extra:+[$extra]}"
    cp pyproject.toml "$installed"
fi
