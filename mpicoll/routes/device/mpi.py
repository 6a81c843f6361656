"""MPI's own collectives on device memory, where MPI takes it."""

from __future__ import annotations

from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import writes
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.cuda.capabilities import CudaSupport
from mpicoll.dtypes import ReduceOp
from mpicoll.routes.device.space import for_mpi
from mpicoll.routes.device.state import Agreed
from mpicoll.routes.host import mpi
from mpicoll.routes.route import MOVES, MemoryKind, Route

__all__ = ["ROUTE"]


def _build(kind: CallKind, agreed: Agreed) -> Implementation:
    averages = kind.op is ReduceOp.AVG  # which the host divides by NumPy
    inner = mpi.build(kind._replace(op=ReduceOp.SUM) if averages else kind)
    space, n = agreed.space, kind.group.size()

    def carry_out(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        inner(
            None if send is None else send.buffer, None if recv is None else recv.buffer,
            extent, root,
        )  # fmt: skip
        if averages and recv is not None and writes(kind.primitive, kind.group, root):
            space.combine(ReduceOp.AVG, [recv], recv, n)

    return for_mpi(space, kind, carry_out)


ROUTE = Route(
    "mpi",
    "MPI",
    MemoryKind.DEVICE,
    (*MOVES, "all_reduce", "reduce"),
    _build,
    combines=mpi.reducible,
    uneven=("all_gather",),
    needs="MPI that sends, receives and reduces device memory",
    blocks="until the device has done what the call comes after, and MPI has done the call",
    lacks=lambda own: own.lacks_mpi(CudaSupport.FULL),
)
