"""Narrow floats reduced as float32 by MPI's own all_reduce and rounded once: for nodes with many
ranks, as `exchange` sends the elements of each of them over the node's link.
"""

from __future__ import annotations

import numpy as np

from mpicoll.arrays.views import Buffer
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.kernels.reduction import narrow, scale
from mpicoll.routes.host import mpi
from mpicoll.routes.route import Route, Serves
from mpicoll.routes.wire import scratch

#: Size in bytes of a chunk in float32, which stays in the caches between the steps.
CHUNK_BYTES = 2 * 1024 * 1024

_FLOAT32 = by_name["float32"]


def _combines(op: ReduceOp, dtype: DType) -> bool:
    """Return whether to widen: narrow floats, if MPI combines them as float32."""
    return dtype.kind is Kind.NARROW_FLOAT and mpi.reducible(op, _FLOAT32)


def _build(kind: CallKind) -> Implementation:
    """Build MPI_Allreduce of float32, a chunk at a time."""
    group, dtype = kind.group, kind.dtype
    wide_sum = mpi.Collective(kind._replace(dtype=_FLOAT32)).run
    step = CHUNK_BYTES // _FLOAT32.itemsize

    def widened(send: None, recv: Buffer, count: int, root: int) -> None:
        if not count:
            return
        elements = np.frombuffer(recv, dtype.numpy, count)
        wide = scratch(group, min(step, count) * _FLOAT32.itemsize).view(np.float32)
        for start in range(0, count, step):
            chunk = elements[start : start + step]
            sums = wide[: chunk.size]
            scale(dtype, chunk, 1, sums)
            wide_sum(None, sums, chunk.size, root)
            narrow(sums, chunk)

    return Implementation(widened)


ROUTE = Route(__name__, "MPI in float32", Serves(("all_reduce",), combines=_combines), _build)
