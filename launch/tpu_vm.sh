#!/usr/bin/env bash
# Run `ringflash train` on Cloud TPU VMs, through gcloud.
#
#   launch/tpu_vm.sh VERB --name=N --project=P --zone=Z [FLAGS] [-- --config.KEY=VALUE ...]
#
#   create   make the slices, or use those that are there; what was preempted is deleted and made anew
#   install  copy the checkout to all workers and run `launch/install.sh tpu` on them
#   start    start the run on all workers of all slices; it goes on when this machine is away
#   logs     follow the run's log to its end; attaches again when ssh drops
#   status   the state of the slices, and of the run on each worker
#   stop     SIGTERM on all workers: the run saves and exits with 42; waits for that
#   delete   delete the slices, and with them what they cost
#   up       create, install, start, logs, again and again until done; follows a run that is going on
#
#   --accelerator=v5p-128    create, up: as gcloud names it (v4-, v5litepod-, v5p-, v6e-)
#   --version=RUNTIME        the VMs' software (default: by generation)
#   --slices=N --queued      several slices, over the network; --queued waits in the queue: several need it
#   --spot                   cheaper, and may be preempted
#   --ref=REF, --source=DIR  what to install: a git ref, or a directory (default: this checkout, as it is)
#   --config=FILE.py         start, up: relative to the checkout
#   --workdir=gs://B/PATH    start, up: the bucket is mounted on all workers; or an absolute path of a shared disk
#   --worker=N               logs: of which worker of the first slice (default 0)
#   --restarts=10            up: how often to start again
#   --dry-run                print each gcloud command, one a line, and run none
#
# Exit codes: 0 done; 3 wrong arguments; 1 gcloud or a worker failed, with its words. logs, up: that of the run
# (1, 3, 4, 5 need a person; 42, 124 some hosts never ended, 127-255 start again). stop: 124 still running.
# RINGFLASH_POLL_SECONDS (10): the time between two looks. RINGFLASH_PATIENCE (30): how many looks in vain.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
poll=${RINGFLASH_POLL_SECONDS:-10} patience=${RINGFLASH_PATIENCE:-30}
verb=${1:-help} name='' project='' zone='' accelerator='' version='' slices=1 spot='' queued='' ref='' source=''
mounts=/tmp/ringflash-buckets
config='' workdir='' restarts=10 worker='' dry='' overrides=() faults=() nodes=() workers='' coordinator='' launches=0

say() { echo "tpu_vm: $*" >&2; }
fault() { faults+=("$*"); }
pause() { sleep "$poll"; }

parse() {
    while (($#)); do
        if [[ $1 =~ ^--(name|project|zone|accelerator|version|slices|ref|source|config|workdir|restarts|worker)= ]]; then
            printf -v "${BASH_REMATCH[1]}" %s "${1#*=}"
        elif [[ $1 =~ ^--(spot|queued|dry-run)$ ]]; then printf -v "${BASH_REMATCH[1]%-run}" yes
        elif [ "$1" = -- ]; then overrides=("${@:2}") && return
        else fault "$1: no such flag"; fi
        shift
    done
}

check() {
    local item
    for item in name project zone; do [ -n "${!item}" ] || fault "--$item=... is missing"; done
    [[ -z $name || $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fault "--name=$name: lower-case letters, digits and -"
    [[ $slices =~ ^[1-9][0-9]*$ ]] || { fault "--slices=$slices: a number from 1 on" && slices=1; }
    [[ $restarts =~ ^[0-9]+$ ]] || fault "--restarts=$restarts: a number"
    [[ -z $worker || ($verb = logs && $worker =~ ^[0-9]+$) ]] || fault "--worker=$worker: only logs takes a worker's" \
        "number; a run started on one host waits for the others for ever, so $verb takes all of them"
    [ -z "$ref" ] || [ -z "$source" ] || fault "--ref and --source: one of them"
    [ -f "${source:=$here}/launch/install.sh" ] || fault "--source=$source: no launch/install.sh there"
    for item in "${overrides[@]}"; do [[ $item == --config.?*=* ]] || fault "$item: after -- come --config.KEY=VALUE"; done
    case $verb in create | up) check_create ;; delete) check_queued ;; install | start | logs | status | stop) ;;
        *) fault "verb '$verb': it is one of create, install, start, logs, status, stop, delete, up" ;; esac
    case $verb in start | up) check_run ;; esac
    [ -n "$dry" ] || command -v gcloud >/dev/null || fault "no gcloud on PATH: see https://cloud.google.com/sdk/docs/install"
    ((${#faults[@]} == 0)) || { printf 'tpu_vm: %s\n' "${faults[@]}" >&2 && exit 3; }
}

check_queued() { ((slices == 1)) || [ -n "$queued" ] || fault "--slices=$slices needs --queued"; }
check_create() {
    check_queued
    [ -z "$version" ] || return 0
    case $accelerator in
        v2-* | v3-* | v4-*) version=tpu-ubuntu2204-base ;;
        v5litepod-*) version=v2-alpha-tpuv5-lite ;;
        v5p-*) version=v2-alpha-tpuv5 ;;
        v6e-*) version=v2-alpha-tpuv6e ;;
        *) fault "--accelerator=$accelerator: v4-N, v5litepod-N, v5p-N or v6e-N; of another, name the --version too" ;;
    esac
}
check_run() {
    [[ $config == ?*.py && $config != /* ]] || fault "--config=$config: a .py file, relative to the checkout"
    [[ $workdir =~ ^(gs:/)?/. ]] || fault "--workdir=$workdir: gs://BUCKET/PATH, or an absolute path of a shared disk"
}

gc() { # gc ARGS: gcloud compute tpus ARGS, run or printed
    local command=(gcloud compute tpus "$@" --project="$project" --zone="$zone" --quiet)
    if [ -z "$dry" ]; then "${command[@]}" </dev/null; return; fi
    { printf gcloud && printf ' %q' "${command[@]:1}" && echo; } >&3
}

look() { # look DRY_ANSWER KIND NAME FIELD: a field of what gcloud describes, ABSENT, or UNKNOWN if it cannot tell
    local told
    if ! told=$(gc "$2" describe "$3" --format="value($4)" 2>"$scratch/errors"); then
        if grep -qi 'not.found' "$scratch/errors"; then told=ABSENT; else cat "$scratch/errors" >&2; fi
    fi
    [ -z "$dry" ] || told=$1
    echo "${told:-UNKNOWN}"
}

overall() { # overall DRY_ANSWER: READY, ABSENT, or what the slices are instead
    local state node
    if [ -n "$queued" ]; then
        state=$(look "${1/READY/ACTIVE}" queued-resources "$name" state.state)
        [ "$state" = ACTIVE ] || { echo "$state" && return; }
    fi
    for node in "${nodes[@]}"; do
        state=$(look "$1" tpu-vm "$node" state)
        [ "$state" = READY ] || break
    done
    if [ -n "$queued" ]; then echo "${state/ABSENT/TERMINATED}"; else echo "$state"; fi
}
gone() { [[ $1 =~ ^(PREEMPTED|TERMINATED|SUSPENDED)$ ]]; }

request() {
    local shape=(--node-id="$name")
    ((slices == 1)) || shape=(--node-count="$slices" --node-prefix="$name")
    if [ -z "$queued" ]; then gc tpu-vm create "$name" --accelerator-type="$accelerator" --version="$version" ${spot:+--spot}; else
        gc queued-resources create "$name" "${shape[@]}" --accelerator-type="$accelerator" --runtime-version="$version" ${spot:+--spot}
    fi
}
delete() { if [ -n "$queued" ]; then gc queued-resources delete "$name" --force; else gc tpu-vm delete "$name"; fi; }

create() {
    local state before='' asked=''
    while :; do
        state=$(overall "${asked:-ABSENT}")
        [ "$state" = "$before" ] || say "$name is $state"
        before=$state
        case $state in
            READY) return ;;
            ABSENT) [ -z "$asked" ] && request || { say "not created" && return 1; } && asked=READY ;;
            PREEMPTED | TERMINATED | SUSPENDED | FAILED)
                [ -z "$queued" ] || gc queued-resources describe "$name" --format='yaml(state)' >&2 || true
                [ -z "$asked" ] || [ "$state" != FAILED ] || return 1
                [ -z "$asked" ] || { say "preempted while it was being created" && return 255; }
                delete || return 1 ;;
            UNKNOWN | STOPPED | HIDDEN) return 1 ;;
            *) pause ;;
        esac
    done
}

find_workers() { # workers: a line "SLICE WORKER" of each; coordinator: the address of the first
    local i w told
    workers=''
    for i in "${!nodes[@]}"; do
        told=$(look "ADDRESS-OF-${nodes[i]}-WORKER-0" tpu-vm "${nodes[i]}" 'networkEndpoints[].ipAddress')
        [[ ! $told =~ ^(ABSENT|UNKNOWN)$ ]] || { say "${nodes[i]} is $told" && return 1; }
        IFS=';, ' read -ra told <<<"$told"
        ((i > 0)) || coordinator=${told[0]}:8081
        for w in "${!told[@]}"; do workers+="$i $w"$'\n'; done
    done
}

everywhere() { # everywhere COMMAND: of tpu_worker.sh, on all workers of all slices at once
    local i
    for i in "${!nodes[@]}"; do
        gc tpu-vm ssh "${nodes[i]}" --worker=all --command="${environment[i]:-}bash tpu_worker.sh $1" \
            >"$scratch/$i" 2>"$scratch/$i.errors" &
        [ -z "$dry" ] || wait
    done
    wait
}
answer() { sed -n "s/^ringflash@$2 \([^|].*\)/\1/p" "$scratch/$1" | tail -n 1; }
words() { sed -n "s/^ringflash@$2 | /    /p" "$scratch/$1"; }

all_answer() { # all_answer WANTED COMMAND: do all workers say that? tells of those that do not
    local i w told code=0
    everywhere "$2"
    [ -z "$dry" ] || return 0
    while read -r i w; do
        told=$(answer "$i" "$w")
        [ "$told" != "$1" ] || continue
        code=1 && say "${nodes[i]} worker $w: ${told:-no answer}"
        if [ -n "$told" ]; then words "$i" "$w" >&2; else tail -n 5 "$scratch/$i.errors" >&2; fi
    done <<<"${workers%?}"
    return $code
}

pack() {
    local tgz=$scratch/ringflash.tgz
    if [ -n "$ref" ]; then git -C "$source" archive --format=tar.gz -o "$tgz" "$ref"; else
        tar -czf "$tgz" --exclude=./.git --exclude='./.venv*' --exclude=./runs --exclude=__pycache__ -C "$source" .; fi
}

install() {
    local node from=$scratch
    if [ -n "$dry" ]; then from=.; else pack || return; fi
    for node in "${nodes[@]}"; do
        gc tpu-vm scp "$from/ringflash.tgz" "$here/launch/tpu_worker.sh" "$node:" --worker=all ||
            { say "not copied to all workers of $node" && return 1; }
    done
    all_answer installed install || { say "not installed everywhere" && return 1; }
}

start() {
    local i id=ID environment=() folder=$workdir bucket train
    if [[ $workdir == gs://* ]]; then # ringflash writes into folders only
        bucket=${workdir#gs://} && bucket=${bucket%%/*} folder=$mounts/${workdir#gs://}
    fi
    train=(.venv/bin/ringflash train --config="$config" --workdir="$folder" "${overrides[@]}")
    [ -n "$dry" ] || id=$(date +%s)-$$-$((++launches)) # gcloud may run a command twice: see tpu_worker.sh
    all_answer ready ready || { say "nothing was started" && return 1; }
    [ -z "${bucket:-}" ] || all_answer mounted "mount $(printf %q "$bucket") $mounts" ||
        { say "gs://$bucket is not mounted everywhere: nothing was started" && return 1; }
    for ((i = 0; slices > 1 && i < slices; i++)); do
        environment[i]="MEGASCALE_COORDINATOR_ADDRESS=$coordinator MEGASCALE_PORT=${coordinator##*:} "
        environment[i]+="MEGASCALE_NUM_SLICES=$slices MEGASCALE_SLICE_ID=$i "
    done
    all_answer started "start $id$(printf ' %q' "${train[@]}")" ||
        { say "not started everywhere: run the verb stop" && return 1; }
}

follow() { # print the log of one worker until its run ends
    local seen=0 misses=0 from text state
    while :; do
        from=$seen
        while IFS= read -r text; do
            [[ $text =~ ^([0-9]+):(.*)$ ]] || continue
            ((from + BASH_REMATCH[1] > seen)) || continue # gcloud connected again by itself, and began again
            seen=$((from + BASH_REMATCH[1])) && printf '%s\n' "${BASH_REMATCH[2]}"
        done < <(gc tpu-vm ssh "${nodes[0]}" --worker="${worker:-0}" --ssh-flag=-oServerAliveInterval=30 \
            --command="bash tpu_worker.sh log $((from + 1))")
        if wait $!; then return; fi
        state=$(overall READY)
        if gone "$state" || [ "$state" = ABSENT ]; then say "$name is $state" && return 255; fi
        ((seen == from)) || misses=0
        ((misses++ < patience)) || { say "no connection; the run may go on: call logs or up again" && return 255; }
        say "the connection dropped: attaching again"
        pause
    done
}

rank() { # a lost host makes its peers end with 1, so what may be started again says more than 1
    case $1 in 0) echo 0 ;; 3 | 4 | 5) echo 3 ;; 42 | 124 | 12[7-9] | 1[3-9]? | 2??) echo 2 ;; *) echo 1 ;; esac
}

settle() { # wait until all workers have ended; returns the code that says most
    local i w told code looks running
    for ((looks = 0; ; looks++)); do
        code=0 running=''
        everywhere tell
        [ -z "$dry" ] || return 0
        while read -r i w; do
            told=$(answer "$i" "$w")
            if [ "$told" = running ]; then running+=" ${nodes[i]}:$w" && continue; fi
            [[ $told =~ ^exit\ [0-9]+$ ]] || { say "${nodes[i]} worker $w: ${told:-no answer}" && told='exit 255'; }
            (($(rank "${told#exit }") <= $(rank "$code"))) || code=${told#exit }
        done <<<"${workers%?}"
        [ -n "$running" ] || return "$code"
        ((looks < patience)) || { say "still running:$running" && return 124; }
        pause
    done
}

logs() { follow && settle; }
stop() {
    local code=0
    all_answer told stop || return 1
    settle || code=$?
    say "ended with exit code $code" && ((code != 124)) || return 124
}

status() {
    local i w
    everywhere tell
    say "$name is $(overall READY)"
    while [ -z "$dry" ] && read -r i w; do
        echo "${nodes[i]} worker $w: $(answer "$i" "$w")" && words "$i" "$w"
    done <<<"${workers%?}"
}

attempt() {
    create && find_workers || return
    if [ -z "$dry" ] && all_answer running tell 2>/dev/null; then say "a run is going on: following it"
    elif ! { install && start; }; then
        if gone "$(overall READY)"; then return 255; else return 1; fi
    fi
    logs
}

up() {
    local tries code
    for ((tries = 1; ; tries++)); do
        code=0 && attempt || code=$?
        ((code)) || return 0
        (($(rank "$code") == 2)) || { say "exit code $code (${why[code]:-see above}): not started again" && return "$code"; }
        ((tries <= restarts)) || { say "exit code $code, and no more than $restarts restarts" && return "$code"; }
        say "exit code $code: restart $tries of $restarts"
        ((code != 124)) || everywhere kill
        pause
    done
}
why=([1]='gcloud or a worker failed, see above' [3]='wrong configuration' [4]='data exhausted or broken' [5]='diverged')

if [[ $verb =~ ^(-h|--help|help)$ ]]; then sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit; fi
parse "${@:2}"
check
if ((slices == 1)); then nodes=("$name"); else for ((i = 0; i < slices; i++)); do nodes+=("$name-$i"); done; fi
scratch=$(mktemp -d) && trap 'rm -rf "$scratch"' EXIT
exec 3>&1
case $verb in install | start | logs | status | stop) find_workers ;; esac
"$verb"
