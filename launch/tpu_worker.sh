#!/usr/bin/env bash
# The worker's side of launch/tpu_vm.sh, which copies it to the home of every worker and calls it there by ssh.
#
#   bash tpu_worker.sh install | ready | mount BUCKET FOLDER | start ID COMMAND... | log LINE | tell | stop | kill
#
# An answer is a line `ringflash@WORKER WORDS`; lines `ringflash@WORKER | TEXT` explain it. gcloud runs a command
# again when its connection broke, so each of them may come twice: start knows its ID, stop signals only once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
run=ringflash-run
mkdir -p "$run"
number=http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number
worker=$(curl -sf -m 5 -H 'Metadata-Flavor: Google' "$number") || worker=${HOSTNAME##*-w-}

say() { echo "ringflash@$worker $*"; }
explain() { sed "s/^/ringflash@$worker | /"; }
running() { [ -s "$run/keeper" ] && kill -0 "$(<"$run/keeper")" 2>/dev/null; }

unpack() { # all but the virtual environment is replaced
    mkdir -p ringflash
    find ringflash -mindepth 1 -maxdepth 1 ! -name '.venv*' -exec rm -rf {} +
    tar -xzf ringflash.tgz -C ringflash
}

newer_python() { # the images of Ubuntu 22.04 have Python 3.10 only
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return
    python3 -m pip install -q --user uv
    python3 -m uv python install 3.12
    PYTHON=$(python3 -m uv python find 3.12)
    export PYTHON
}

install_all() { unpack && newer_python && bash ringflash/launch/install.sh tpu; }

install() {
    if running; then say "a run is going on here: stop it first" && exit 1; fi
    if install_all >"$run/install.log" 2>&1; then say installed && return; fi
    tail -n 8 "$run/install.log" | explain
    say "the installation failed" && exit 1
}

ready() {
    if cmp -s ringflash/pyproject.toml ringflash/.venv/installed-tpu.toml; then say ready; else
        say "not installed: run the verb install"; fi
}

mount() { # mount BUCKET FOLDER: as FOLDER/BUCKET; all workers must soon see what one of them writes
    local at=$2/$1
    if mountpoint -q "$at"; then say mounted && return; fi
    if ! command -v gcsfuse >/dev/null; then
        say "no gcsfuse: install it, see https://cloud.google.com/storage/docs/cloud-storage-fuse/install" && exit 1
    fi
    mkdir -p "$at"
    if gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0 "$1" "$at" >"$run/mount.log" 2>&1; then say mounted && return; fi
    tail -n 8 "$run/mount.log" | explain
    say "the bucket was not mounted" && exit 1
}

start() { # start ID COMMAND...: detached, so that it outlives this connection
    local id=$1
    if [ "$(cat "$run/id" 2>/dev/null)" != "$id" ]; then
        if running; then say "a run is going on here already" && exit 1; fi
        [ ! -e "$run/log" ] || mv "$run/log" "$run/log.before"
        rm -f "$run/exit" "$run/keeper" "$run/pid" "$run/stopping"
        echo "$id" >"$run/id"
        setsid nohup bash "$PWD/tpu_worker.sh" keep "${@:2}" >"$run/log" 2>&1 </dev/null &
        until [ -s "$run/pid" ]; do sleep 0.02; done
    fi
    say started
}

keep() { # run the command in the checkout; `pid` is its process, `exit` its code, there before the keeper ends
    local code=0
    echo $$ >"$run/keeper"
    (cd ringflash && PYTHONUNBUFFERED=1 exec "$@") &
    echo $! >"$run/pid"
    wait $! || code=$?
    echo "$code" >"$run/exit.new"
    mv "$run/exit.new" "$run/exit"
}

log() { # log LINE: from this line on, numbered, until the run ends
    [ -e "$run/log" ] || return 0
    tail -s 0.1 -n "+$1" --pid="$(<"$run/keeper")" -F "$run/log" 2>/dev/null | grep -an --line-buffered '' || true
}

tell() {
    if running; then say running; elif [ -e "$run/exit" ]; then say "exit $(<"$run/exit")"
    elif [ -e "$run/id" ]; then say "lost"; else say "no run"; fi
    [ ! -e "$run/log" ] || tail -n 1 "$run/log" | explain
}

stop() {
    if running && [ ! -e "$run/stopping" ]; then
        touch "$run/stopping"
        kill -TERM "$(<"$run/pid")" || true
    fi
    say told
}

kill_it() {
    ! running || kill -KILL "$(<"$run/pid")" || true
    for _ in {1..100}; do running || break; sleep 0.1; done
    say told
}

case $1 in kill) kill_it ;; *) "$@" ;; esac
