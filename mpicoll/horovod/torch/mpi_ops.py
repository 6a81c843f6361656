"""The module of operations in Horovod, from which scripts also import, and functions that report
build options. ``verbose`` is ignored.
"""

from __future__ import annotations

import torch

from mpicoll.horovod.torch.implementations import Adasum, Average, Max, Min, Product, Sum  # noqa: F401
from mpicoll.horovod.torch.operations import *  # noqa: F403
from mpicoll.horovod.torch.process_sets import (  # noqa: F401
    ProcessSet,
    cross_rank,
    cross_size,
    current,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)


def mpi_built(verbose: bool = False) -> bool:
    """Return True: all operations run over MPI."""
    return True


def mpi_enabled() -> bool:
    """Return True."""
    return True


def mpi_threads_supported() -> bool:
    """Return whether MPI provides MPI_THREAD_MULTIPLE.

    Raises NotInitializedError (a ValueError) before init.
    """
    current("mpi_threads_supported")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def cuda_built(verbose: bool = False) -> bool:
    """Return whether torch supports CUDA tensors, which operations accept with any MPI."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Return False: ROCm is not supported."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return 0: operations do not use NCCL. Scripts choose Adasum's learning rate by it."""
    return 0


def gloo_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def gloo_enabled() -> bool:
    """Return False."""
    return False


def ddl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False."""
    return False
