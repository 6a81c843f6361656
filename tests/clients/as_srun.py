"""Execute a Python program under mpiexec with the variables that `srun --mpi=pmi2` sets.

The variables of PMI are the same.
"""

import os
import sys

rank, size = os.environ["PMI_RANK"], os.environ["PMI_SIZE"]
for name in ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
    os.environ.pop(name, None)
os.environ |= {
    "SLURM_JOB_ID": "4711", "SLURM_JOBID": "4711", "SLURM_JOB_NAME": "training",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": size, "SLURM_NTASKS": size,
    "SLURM_NPROCS": size, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0",
    "SLURM_NNODES": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": size,
    "SLURM_NODELIST": "localhost", "SLURM_JOB_NODELIST": "localhost",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": size,
}  # fmt: skip
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
