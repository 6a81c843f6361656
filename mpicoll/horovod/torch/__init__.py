"""Horovod's functions for PyTorch; docs/horovod.md lists missing functions."""

from __future__ import annotations

from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch import elastic, functions, mpi_ops
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.functions import *  # noqa: F403
from mpicoll.horovod.torch.mpi_ops import *  # noqa: F403
from mpicoll.horovod.torch.optimizer import DistributedOptimizer
from mpicoll.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "SyncBatchNorm",
    "elastic",
]
__all__ += functions.__all__
__all__ += mpi_ops.__all__
