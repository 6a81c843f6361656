#!/bin/bash
# Runs a command on the head of a Slurm cluster that lives as long as the command:
#
#     tests/slurm/cluster.sh NODES CPUS COMMAND [ARGUMENT...]
#
# The exit code is the command's. Needs root and Debian's slurmctld, slurmd, slurm-client, munge,
# libpmix2 and iproute2 (tests/slurm/run.py installs them).
#
# The head and each node, node1 and so on, are namespaces: network, processes, mounts, IPC and host
# name. MPI and mpicoll see machines that share files, but no memory (/dev/shm) and no processes.
# Where namespaces are forbidden, as in a container without privileges, and with CLUSTER_PLAIN=1,
# this machine is the one node that there can be.
#
# The command finds in its environment, beside SLURM_CONF:
#
#     CLUSTER         a folder with the logs of Slurm's daemons, which is removed at the end
#     CLUSTER_NODES   the number of nodes
#     CLUSTER_FAIL    a command: "$CLUSTER_FAIL" 2 is a power failure of node2, "" where there is one

set -euo pipefail
shopt -s nullglob

self=$(realpath "$0")
folder=$(dirname "$self")
subnet=10.77.0
linked=() # what this has made in the system's folders
isolate=(unshare --net --uts --ipc --mount --pid --fork --mount-proc --kill-child)

# --- a node, from inside ------------------------------------------------------------------------

run_node() { # NUMBER
    local name=node$1
    hostname "$name"
    mount -t tmpfs tmpfs /dev/shm
    # UCX looks for network devices in /sys, which has to be that of this network namespace. Slurm
    # wants the cgroups, which a new /sys lacks.
    mkdir -p "$CLUSTER/cgroup.$1"
    mount --rbind /sys/fs/cgroup "$CLUSTER/cgroup.$1"
    mount -t sysfs sysfs /sys
    mount --rbind "$CLUSTER/cgroup.$1" /sys/fs/cgroup
    until ip link show "$name" &> /dev/null; do sleep 0.02; done # the head moves it here
    ip link set lo up
    ip address add "$subnet.$1/24" dev "$name"
    ip link set "$name" up
    slurmd -N "$name"
    while true; do sleep 1000; done # as process 1 bash also reaps orphans
}

fail_node() { # NUMBER: first its cable, so that nobody hears a goodbye
    ip link set "port$1" down
    kill -KILL "$(cat "$CLUSTER/node$1.pid")"
}

# --- the head -----------------------------------------------------------------------------------

# Slurm's plug-in opens libpmix.so, a link that only libpmix-dev brings. Where there are namespaces,
# the link is seen in those of this cluster alone; other clusters come and go beside it.
link_pmix() {
    local pmix
    for pmix in /usr/lib/*-linux-gnu/pmix2/lib; do
        [ ! -e "$pmix/libpmix.so" ] || continue
        if [ -z "$CLUSTER_PLAIN" ]; then
            cp -a "$pmix" "$CLUSTER/pmix"
            mount --bind "$CLUSTER/pmix" "$pmix"
        else
            linked+=("$pmix/libpmix.so")
        fi
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
    local head name address i nodes=
    printf '127.0.0.1 localhost\n::1 localhost\n%s.100 head\n' "$subnet" > "$CLUSTER/hosts"
    for ((i = 1; i <= $1; i++)); do
        name=node$i address=$subnet.$i
        # Open MPI under PMIx fails on a node that Slurm calls by another name than the host's.
        [ -z "$CLUSTER_PLAIN" ] || name=$(hostname) address=127.0.0.1
        echo "$address $name" >> "$CLUSTER/hosts"
        mkdir -p "$CLUSTER/spool.$name"
        mkdir -m 1777 "$CLUSTER/tmp.$name"
        nodes+="NodeName=$name NodeAddr=$address CPUs=$2 CoresPerSocket=$2 RealMemory=4000"$'\n'
    done
    head="head($subnet.100)"
    [ -z "$CLUSTER_PLAIN" ] || head="$(hostname)(127.0.0.1)"
    local text
    text=$(< "$folder/slurm.conf")
    text=${text//@HEAD@/$head}
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
    echo "cluster.sh: the nodes do not come up:" >&2
    sinfo >&2 || true
    return 1
}

stop() {
    local status=$? file process
    # The namespaces end with their first process. Without them: what has a pid file of ours.
    if [ -n "$CLUSTER_PLAIN" ] && [ -e "$CLUSTER/slurmctld.pid" ]; then
        scancel --me 2> /dev/null || true
        sleep 1
    fi
    [ "$status" = 0 ] || for file in "$CLUSTER"/slurm*.log; do
        echo "--- $file" >&2
        tail -n 15 "$file" >&2
    done
    for file in "$CLUSTER"/slurm*.pid "$CLUSTER/munged.pid"; do
        process=$(cat "$file" 2> /dev/null) || continue
        kill "$process" 2> /dev/null || continue
        # Until then it writes its state into what is removed next.
        for _ in {1..50}; do
            [ -n "$(tr -d '\0' 2> /dev/null < "/proc/$process/cmdline")" ] || break # or a zombie
            sleep 0.1
        done
    done
    rm -f "${linked[@]}"
    umount -R "$CLUSTER"/cgroup.* 2> /dev/null || true
    rm -rf --one-file-system "$CLUSTER" || true
    exit "$status"
}

run_head() { # NODES CPUS COMMAND...
    local count=$1 cpus=$2 i
    shift 2

    CLUSTER=$(mktemp -d /tmp/slurm-cluster.XXXXXX)
    trap stop EXIT
    export CLUSTER SLURM_CONF=$CLUSTER/slurm.conf CLUSTER_NODES=$count CLUSTER_FAIL=
    chmod 755 "$CLUSTER"
    mkdir "$CLUSTER"/{ctld,munge}
    configure "$count" "$cpus"

    link_pmix
    [ -n "$CLUSTER_PLAIN" ] || start_network
    mkdir -p /run/munge
    # One for all: its socket is a file, which all nodes see.
    munged --force --key-file="$CLUSTER/munge.key" --log-file="$CLUSTER/munged.log" \
        --pid-file="$CLUSTER/munged.pid" --seed-file="$CLUSTER/munge.seed"
    slurmctld -c
    if [ -n "$CLUSTER_PLAIN" ]; then
        slurmd -N "$(hostname)"
    else
        printf '#!/bin/sh\nexec "%s" --fail "$1"\n' "$self" > "$CLUSTER/fail"
        chmod +x "$CLUSTER/fail"
        CLUSTER_FAIL=$CLUSTER/fail
        for ((i = 1; i <= count; i++)); do start_node "$i"; done
    fi
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
        export CLUSTER_PLAIN=
        run_head "${@:2}"
        ;;
    *)
        if [ $# -lt 3 ]; then
            echo "usage: cluster.sh NODES CPUS COMMAND [ARGUMENT...]" >&2
            exit 2
        fi
        if [ -z "${CLUSTER_PLAIN-}" ] && "${isolate[@]}" mount -t sysfs sysfs /sys 2> /dev/null; then
            exec "${isolate[@]}" "$self" --head "$@"
        fi
        if [ "$1" != 1 ]; then
            echo "cluster.sh: $1 nodes need namespaces, which are forbidden here: ask for 1" >&2
            exit 2
        fi
        export CLUSTER_PLAIN=1
        run_head "$@"
        ;;
esac
