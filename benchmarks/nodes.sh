#!/bin/bash
# Measure on several nodes of this machine, by MPI and by mpicoll's routes:
#
#     [NODES=2] [RANKS=1] [RATE=10gbit] benchmarks/nodes.sh ENVIRONMENT PRIMITIVE [OPTION OF BENCH ...]
#
# The nodes are namespaces of network, processes and memory (/dev/shm) with RANKS ranks each, joined
# by a bridge. tc limits the bandwidth of a node to RATE; by default it is not limited. Needs root,
# iproute2 and an MPI of the MPICH family: the ranks inherit their connections to its launcher. If
# ranks share processors, the times include Linux's scheduler. Use only the ratios, with their spread.

set -euo pipefail

isolate=(unshare --net --ipc --mount --pid --fork --mount-proc --kill-child)

run_node() { # NUMBER
    mount -t tmpfs tmpfs /dev/shm
    mount -t sysfs sysfs /sys # where UCX finds network devices
    until ip link show "node$1" &> /dev/null; do sleep 0.02; done # the head moves it here
    ip link set lo up
    ip address add "10.77.0.$1/24" dev "node$1"
    ip link set "node$1" up
    while true; do sleep 1000; done
}

start_node() { # NUMBER
    ip link add "port$1" type veth peer name "node$1"
    ip link set "port$1" master switch up
    "${isolate[@]}" "$0" --node "$1" &
    local outside=$! inside=
    until [ -n "$inside" ]; do
        sleep 0.02
        inside=$(< "/proc/$outside/task/$outside/children")
        inside=${inside%% *}
    done
    ip link set "node$1" netns "$inside"
    [ -z "${RATE-}" ] || tc qdisc add dev "port$1" root tbf rate "$RATE" burst 1mb latency 50ms
    until ip address show "port$1" | grep -q LOWER_UP; do sleep 0.02; done # node1 is up
    NODES_INSIDE+=" $inside"
}

run_head() { # ENVIRONMENT PRIMITIVE [OPTION ...]
    local environment=$1 nodes=${NODES:-2} i hosts=
    shift
    export RANKS=${RANKS:-1} NODES_INSIDE= OMP_NUM_THREADS=1 MPICOLL_TABLE=0
    ip link set lo up
    ip link add switch type bridge
    ip link set switch up
    for ((i = 1; i <= nodes; i++)); do
        start_node "$i"
        hosts+=${hosts:+,}node$i
    done
    # Ranks compare each of the first 64 calls of a group. 100 warm-up calls exclude them.
    "$environment/bin/mpiexec" -launcher fork -hosts "$hosts" -ppn "$RANKS" -n $((nodes * RANKS)) \
        "$0" --rank "$environment/bin/python" -m mpicoll bench -w 100 --repetitions 21 \
        --compare mpi4py "$@"
}

run_rank() { # COMMAND...
    local -a inside
    read -ra inside <<< "$NODES_INSIDE"
    exec nsenter -t "${inside[PMI_RANK / RANKS]}" --net --ipc --mount --pid "$@"
}

case ${1-} in
    --node) run_node "$2" ;;
    --head) run_head "${@:2}" ;;
    --rank) run_rank "${@:2}" ;;
    *) exec "${isolate[@]}" "$(realpath "$0")" --head "$@" ;;
esac
