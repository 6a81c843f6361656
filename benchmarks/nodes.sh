#!/bin/bash
# all_reduce on two nodes of two ranks, beside MPI's own and by each route:
#
#     [RATE=10gbit] benchmarks/nodes.sh ENVIRONMENT pmi2|pmix [OPTION OF BENCH ...]
#
# The nodes are namespaces of this machine under a Slurm of their own (tests/slurm/cluster.sh, which
# needs root and Debian's packages of Slurm). RATE is what a node receives, shaped by tc; a delay
# needs a kernel with netem. On two processors the four ranks take turns, and Linux is measured as
# much as MPI: read the ratios, and those with their spread.

set -euo pipefail

if [ "${1-}" != --head ]; then
    exec "$(dirname "$0")/../tests/slurm/cluster.sh" 2 2 "$(realpath "$0")" --head "$@"
fi

environment=$2 mpi=$3
shift 3
for port in port1 port2; do
    tc qdisc add dev "$port" root tbf rate "${RATE:-10gbit}" burst 1mb latency 50ms
done
export OMP_NUM_THREADS=1 MPICOLL_TABLE=0 PMIX_MCA_psec=native OMPI_MCA_mpi_yield_when_idle=1
# A group's first 64 calls are compared between the ranks one by one: 100 go before what is timed.
srun "--mpi=$mpi" --nodes=2 --ntasks-per-node=2 "$environment/bin/python" -m mpicoll bench \
    all_reduce -b 4 -e 16M -f 8 -w 100 --repetitions 21 --short --compare mpi4py \
    --routes mpi,hierarchical "$@"
