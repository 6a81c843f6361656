#!/bin/bash
# flux: --job-name=digits
# flux: --nodes=2
# flux: --nslots=8
# flux: --cores-per-slot=1
# flux: --time-limit=5m
# flux: --output=digits-{{id}}.out

# jobs/train_digits.py on two nodes under Flux. From the repository, after `make demo`:
#
#     flux batch jobs/digits.flux [options of the job]
#
# VENV is the environment with mpicoll, an MPI and scikit-learn. MPI=simple is Flux's own process
# manager, for the MPICH family; MPI=pmix is for Open MPI, with Flux's plug-in for PMIx. The wrong one
# raises an error.

set -euo pipefail

VENV=${VENV:-$PWD/.venv} # Flux starts the script where flux batch was called
MPI=${MPI:-simple}
export OMP_NUM_THREADS=1
job=$(flux getattr jobid)

# Each rank is bound to one core. A rank that fails ends all ranks.
start=(flux run --nodes=2 --ntasks=8 --cores-per-task=1 -o "pmi=$MPI" -o cpu-affinity=per-task
    -o exit-on-error)

"${start[@]}" "$VENV/bin/python" -m mpicoll hello # prints the node and processors of each rank
"${start[@]}" "$VENV/bin/python" jobs/train_digits.py --save "digits-$job.npz" "$@"
