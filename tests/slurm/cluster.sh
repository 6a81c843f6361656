#!/bin/bash
# Runs a command on the head node of a temporary Slurm cluster:
#
#     tests/slurm/cluster.sh NODES CPUS COMMAND [ARGUMENT...]
#
# The exit code is the command's. Needs root and Debian's slurmctld, slurmd, slurm-client, munge,
# libpmix2 and iproute2 (tests/slurm/run.py installs them).
#
# The head and the nodes node1, node2, ... are namespaces: network, processes, mounts, IPC and host
# name. They share files, but not memory (/dev/shm) and processes.
#
# The environment of the command has, in addition to SLURM_CONF:
#
#     CLUSTER         a folder with the logs of Slurm's daemons, removed at the end
#     CLUSTER_FAIL    a command: "$CLUSTER_FAIL" 2 simulates a power failure of node2

set -euo pipefail
shopt -s nullglob

self=$(realpath "$0")
folder=$(dirname "$self")
subnet=10.77.0
isolate=(unshare --net --uts --ipc --mount --pid --fork --mount-proc --kill-child)

# --- inside a node ------------------------------------------------------------------------------

run_node() { # NUMBER
    local name=node$1
    hostname "$name"
    mount -t tmpfs tmpfs /dev/shm
    # UCX finds network devices in /sys, so /sys must belong to this network namespace. Slurm needs
    # the cgroups, which a new /sys does not have.
    mkdir -p "$CLUSTER/cgroup.$1"
    mount --rbind /sys/fs/cgroup "$CLUSTER/cgroup.$1"
    mount -t sysfs sysfs /sys
    mount --rbind "$CLUSTER/cgroup.$1" /sys/fs/cgroup
    until ip link show "$name" &> /dev/null; do sleep 0.02; done # the head moves it here
    ip link set lo up
    ip address add "$subnet.$1/24" dev "$name"
    ip link set "$name" up
    slurmd -N "$name"
    while true; do sleep 1000; done # process 1: also reaps orphans
}

fail_node() { # NUMBER: the link first, so that no daemon reports the end
    ip link set "port$1" down
    kill -KILL "$(cat "$CLUSTER/node$1.pid")"
}

# --- the head -----------------------------------------------------------------------------------

# Slurm's plug-in opens libpmix.so, a link that only libpmix-dev installs. Only this cluster sees the
# link, because other clusters may run at the same time.
link_pmix() {
    local pmix
    for pmix in /usr/lib/*-linux-gnu/pmix2/lib; do
        [ ! -e "$pmix/libpmix.so" ] || continue
        cp -a "$pmix" "$CLUSTER/pmix"
        mount --bind "$CLUSTER/pmix" "$pmix"
        ln -s libpmix.so.2 "$pmix/libpmix.so"
    done
}

start_network() {
    hostname head
    ip link set lo up
    ip link add switch type bridge
    ip address add "$subnet.100/24" dev switch
    ip link set switch up
    mount --bind "$CLUSTER/hosts" /etc/hosts
    mkdir -p /run/munge
    mount --bind "$CLUSTER/munge" /run/munge
}

start_node() { # NUMBER
    ip link add "port$1" type veth peer name "node$1"
    ip link set "port$1" master switch up
    "${isolate[@]}" "$self" --node "$1" &
    local outside=$! inside=
    echo "$outside" > "$CLUSTER/node$1.pid"
    until [ -n "$inside" ]; do
        sleep 0.02
        inside=$(< "/proc/$outside/task/$outside/children")
        inside=${inside%% *}
    done
    ip link set "node$1" netns "$inside"
}

configure() { # NODES CPUS
    local name address i nodes=
    printf '127.0.0.1 localhost\n::1 localhost\n%s.100 head\n' "$subnet" > "$CLUSTER/hosts"
    for ((i = 1; i <= $1; i++)); do
        name=node$i address=$subnet.$i
        echo "$address $name" >> "$CLUSTER/hosts"
        mkdir -p "$CLUSTER/spool.$name"
        mkdir -m 1777 "$CLUSTER/tmp.$name"
        nodes+="NodeName=$name NodeAddr=$address CPUs=$2 CoresPerSocket=$2 RealMemory=4000"$'\n'
    done
    local text
    text=$(< "$folder/slurm.conf")
    text=${text//@HEAD@/head($subnet.100)}
    text=${text//@STATE@/$CLUSTER}
    printf '%s\n' "${text//@NODES@/$nodes}" > "$SLURM_CONF"
    (umask 077 && head -c 1024 /dev/urandom > "$CLUSTER/munge.key")
}

wait_for_nodes() { # NODES
    local i
    for ((i = 0; i < 300; i++)); do
        [ "$(sinfo -h -N -p main -t idle -o %N 2> /dev/null | wc -l)" != "$1" ] || return 0
        sleep 0.1
    done
    echo "cluster.sh: timed out waiting for the nodes:" >&2
    sinfo >&2 || true
    return 1
}

stop() {
    local status=$? file process
    [ "$status" = 0 ] || for file in "$CLUSTER"/slurm*.log; do
        echo "--- $file" >&2
        tail -n 15 "$file" >&2
    done
    for file in "$CLUSTER"/slurm*.pid "$CLUSTER/munged.pid"; do
        process=$(cat "$file" 2> /dev/null) || continue
        kill "$process" 2> /dev/null || continue
        # Wait, because the daemon writes its state into the folder that is removed next.
        for _ in {1..50}; do
            [ -n "$(tr -d '\0' 2> /dev/null < "/proc/$process/cmdline")" ] || break # ended, or a zombie
            sleep 0.1
        done
    done
    umount -R "$CLUSTER"/cgroup.* 2> /dev/null || true
    rm -rf --one-file-system "$CLUSTER" || true
    exit "$status"
}

run_head() { # NODES CPUS COMMAND...
    local count=$1 cpus=$2 i
    shift 2

    CLUSTER=$(mktemp -d /tmp/slurm-cluster.XXXXXX)
    trap stop EXIT
    export CLUSTER SLURM_CONF=$CLUSTER/slurm.conf CLUSTER_FAIL=$CLUSTER/fail
    chmod 755 "$CLUSTER"
    mkdir "$CLUSTER"/{ctld,munge}
    configure "$count" "$cpus"

    link_pmix
    start_network
    # One munged for all nodes: its socket is a shared file.
    munged --force --key-file="$CLUSTER/munge.key" --log-file="$CLUSTER/munged.log" \
        --pid-file="$CLUSTER/munged.pid" --seed-file="$CLUSTER/munge.seed"
    slurmctld -c
    printf '#!/bin/sh\nexec "%s" --fail "$1"\n' "$self" > "$CLUSTER_FAIL"
    chmod +x "$CLUSTER_FAIL"
    for ((i = 1; i <= count; i++)); do start_node "$i"; done
    wait_for_nodes "$count"
    "$@"
}

case ${1-} in
    --node)
        run_node "$2"
        ;;
    --fail)
        fail_node "$2"
        ;;
    --head)
        run_head "${@:2}"
        ;;
    *)
        if [ $# -lt 3 ]; then
            echo "usage: cluster.sh NODES CPUS COMMAND [ARGUMENT...]" >&2
            exit 2
        fi
        if ! "${isolate[@]}" mount -t sysfs sysfs /sys 2> /dev/null; then
            echo "cluster.sh: nodes need namespaces, which are not permitted here" >&2
            exit 2
        fi
        exec "${isolate[@]}" "$self" --head "$@"
        ;;
esac
