"""MPI's own collectives on device memory, where MPI takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import writes
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.cuda.capabilities import CudaSupport
from mpicoll.dtypes import ReduceOp
from mpicoll.routes.device.space import for_mpi
from mpicoll.routes.host import mpi
from mpicoll.routes.route import MOVES, Needs, Policy, Route, Serves

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    averages = kind.op is ReduceOp.AVG  # which the host divides by NumPy
    inner = mpi.build(kind._replace(op=ReduceOp.SUM) if averages else kind).run
    space, n = agreement.space, kind.group.size()

    def run(send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int) -> None:
        inner(
            None if send is None else send.buffer, None if recv is None else recv.buffer,
            extent, root,
        )  # fmt: skip
        if averages and recv is not None and writes(kind.primitive, kind.group, root):
            space.combine(ReduceOp.AVG, [recv], recv, n)

    return Implementation(for_mpi(space, kind, run))


ROUTE = Route(
    __name__,
    "MPI",
    Serves((*MOVES, "all_reduce", "reduce"), combines=mpi.reducible, uneven=("all_gather",)),
    _build,
    Needs(
        description="MPI that sends, receives and reduces device memory",
        missing_reason=lambda own: own.lacks_mpi(CudaSupport.FULL),
    ),
    Policy(host_waits_for="until the device has done all earlier work, and MPI has done the call"),
)
