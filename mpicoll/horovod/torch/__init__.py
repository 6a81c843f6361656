"""Horovod's functions for PyTorch; docs/horovod.md lists missing functions."""

from __future__ import annotations

from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch import elastic
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.functions import *  # noqa: F403
from mpicoll.horovod.torch.functions import __all__ as _functions
from mpicoll.horovod.torch.implementations import Adasum, Average, Max, Min, Product, Sum
from mpicoll.horovod.torch.mpi_ops import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from mpicoll.horovod.torch.operations import *  # noqa: F403
from mpicoll.horovod.torch.operations import __all__ as _operations
from mpicoll.horovod.torch.optimizer import DistributedOptimizer
from mpicoll.horovod.torch.process_sets import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from mpicoll.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
__all__ += _functions
__all__ += _operations
