"""The module of operations in Horovod, from which scripts also import, and functions that report
build options. ``verbose`` is ignored.
"""

from __future__ import annotations

import torch

from mpicoll.horovod.torch import operations, process_sets
from mpicoll.horovod.torch.implementations import Average, Max, Min, Product, Sum
from mpicoll.horovod.torch.operations import *  # noqa: F403
from mpicoll.horovod.torch.process_sets import *  # noqa: F403
from mpicoll.horovod.torch.process_sets import current

__all__ = [
    "Average", "Max", "Min", "Product", "Sum", "ccl_built", "cuda_built", "ddl_built",
    "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "rocm_built",
]  # fmt: skip
__all__ += operations.__all__
__all__ += process_sets.__all__


def mpi_built(verbose: bool = False) -> bool:
    """Return True: all operations run over MPI."""
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


def nccl_built(verbose: bool = False) -> int:
    """Return 0: operations do not use NCCL."""
    return 0


def rocm_built(verbose: bool = False) -> bool:
    """Return False: not supported."""
    return False


mpi_enabled = mpi_built
gloo_built = gloo_enabled = ddl_built = ccl_built = rocm_built
