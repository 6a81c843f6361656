#!/bin/bash
# Measure all_reduce on two nodes with two ranks each, by MPI and by each route:
#
#     [RATE=10gbit] benchmarks/nodes.sh ENVIRONMENT pmi2|pmix [OPTION OF BENCH ...]
#
# The nodes are network namespaces of this machine, with their own Slurm (tests/slurm/cluster.sh,
# which needs root and Debian's packages of Slurm). tc limits the bandwidth of a node to RATE. On two
# processors the four ranks share processors, so the times include Linux's scheduler. Use only the
# ratios, with their spread.

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
# Ranks compare each of the first 64 calls of a group. 100 warm-up calls exclude them.
srun "--mpi=$mpi" --nodes=2 --ntasks-per-node=2 "$environment/bin/python" -m mpicoll bench \
    all_reduce -b 4 -e 16M -f 8 -w 100 --repetitions 21 --compare mpi4py \
    --routes mpi,hierarchical "$@"
