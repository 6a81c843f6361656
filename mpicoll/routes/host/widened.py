"""all_reduce of narrow floats by MPI: as float32 there and back, rounded once.

Twice or four times the bytes, and as few messages as MPI takes for float32: where ranks are many
and far from each other, what `composed` does in their place is n - 1 messages twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.core.calls import Direct
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.kernels.reduction import narrow, scale
from mpicoll.routes.host import composed, native
from mpicoll.routes.wire import scratch

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["all_reduce"]

_FLOAT32 = by_name["float32"]


def all_reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """MPI_Allreduce of float32, in pieces; what is exact in ``dtype`` or no float: by exchange."""
    if dtype.kind is not Kind.NARROW_FLOAT or not native.reducible(op, _FLOAT32):
        return composed.all_reduce(group, dtype, op)
    along = native.all_reduce(group, _FLOAT32, op)
    step = native.PIECE // _FLOAT32.itemsize

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        elements = np.frombuffer(recv, dtype.numpy, count)
        wide = scratch(group, min(step, count) * _FLOAT32.itemsize).view(np.float32)
        for start in range(0, count, step):
            piece = elements[start : start + step]
            sums = wide[: piece.size]
            scale(dtype, piece, 1, sums)
            along(None, sums, piece.size, root)
            narrow(sums, piece)

    return direct
