"""What Horovod was built with, and runs on: scripts choose by it, and tests are skipped.

``verbose`` is ignored.
"""

from __future__ import annotations

import torch

from mpicoll.horovod.torch.process_sets import current

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built(verbose: bool = False) -> bool:
    """Return True: MPI carries all operations."""
    return True


def mpi_enabled() -> bool:
    """Return True."""
    return True


def mpi_threads_supported() -> bool:
    """Return whether several threads may use MPI at a time.

    Raises NotInitializedError (a ValueError) before init.
    """
    current("mpi_threads_supported")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def cuda_built(verbose: bool = False) -> bool:
    """Return whether torch knows CUDA tensors: operations take them, over any MPI."""
    return torch.version.cuda is not None


def rocm_built(verbose: bool = False) -> bool:
    """Return False: ROCm is not supported."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return 0: no operation goes over NCCL. Scripts choose the learning rate for Adasum by it."""
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
