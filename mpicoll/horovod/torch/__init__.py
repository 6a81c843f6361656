"""Horovod's functions for PyTorch; docs/horovod.md lists missing functions."""

from __future__ import annotations

from typing import NoReturn

from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch import elastic, functions, mpi_ops
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.functions import *  # noqa: F403
from mpicoll.horovod.torch.mpi_ops import *  # noqa: F403
from mpicoll.horovod.torch.optimizer import DistributedOptimizer

__all__ = ["Compression", "DistributedOptimizer", "HorovodInternalError", "elastic"]
__all__ += functions.__all__
__all__ += mpi_ops.__all__

#: Names of Horovod that mpicoll does not have, and what to use instead.
_MISSING = {
    "Adasum": "use hvd.Average",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm (GPUs only) and torch.distributed over mpicoll",
    "ProcessSet add_process_set remove_process_set global_process_set": (
        "all operations run on all ranks; use mpicoll.new_group for a subset"
    ),
    "grouped_allgather grouped_allgather_async grouped_reducescatter grouped_reducescatter_async": (
        "call the operation for each tensor"
    ),
    "sparse_allreduce_async": "use allreduce_async of tensor.to_dense()",
    "cross_rank cross_size is_homogeneous": "use rank, size, local_rank and local_size",
}


def __getattr__(name: str) -> NoReturn:
    for names, remedy in _MISSING.items():
        if name in names.split():
            raise AttributeError(f"mpicoll.horovod.torch has no {name}: {remedy}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
