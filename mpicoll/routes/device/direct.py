"""Device memory in MPI's own sends and receives, where MPI takes it; kernels combine."""

from __future__ import annotations

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.core.reproducible import ORDER
from mpicoll.cuda.capabilities import CudaSupport
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes import algorithms
from mpicoll.routes.device.space import for_mpi
from mpicoll.routes.device.state import Agreed
from mpicoll.routes.route import EXCHANGES, MOVES, PREFIXES, REDUCTIONS, MemoryKind, Route

__all__ = ["ROUTE"]


def _build(kind: CallKind, agreed: Agreed) -> Implementation:
    inner = algorithms.build(kind, agreed.space)
    return inner if agreed.space.alone else for_mpi(agreed.space, kind, inner)


ROUTE = Route(
    "direct",
    "MPI's messages of device memory",
    MemoryKind.DEVICE,
    (*MOVES, *REDUCTIONS, *PREFIXES, *EXCHANGES),
    _build,
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    reproducible=(ORDER,),
    scales=True,
    uneven=("all_gather", "reduce_scatter", *EXCHANGES),
    needs="MPI that sends and receives device memory",
    blocks=(
        "until the device has done what the call comes after, and MPI has moved everything; not "
        "for the last kernel. Alone in its group a rank waits for nothing"
    ),
    lacks=lambda own: own.lacks_mpi(CudaSupport.TRANSFER),
)
