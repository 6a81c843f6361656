"""Device memory in MPI's own sends and receives, where MPI takes it; kernels combine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.core.reproducible import ORDER
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.routes import algorithms
from mpicoll.routes.device.space import for_mpi
from mpicoll.routes.route import EXCHANGES, Needs, Policy, Route, Serves, has_loop

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    run = algorithms.build(kind, agreement.space)
    return Implementation(run if agreement.space.alone else for_mpi(agreement.space, kind, run))


ROUTE = Route(
    __name__,
    "MPI's messages of device memory",
    Serves(
        tuple(algorithms.ALGORITHMS),
        combines=has_loop,
        reproducible=(ORDER,),
        premultiplies=True,
        uneven=("all_gather", "reduce_scatter", *EXCHANGES),
    ),
    _build,
    Needs("", "MPI that sends and receives device memory", Capabilities.lacks_mpi),
    Policy(
        host_waits_for=(
            "until the device has done all earlier work, and MPI has moved all data; not for the "
            "last kernel. In a group of one rank the host does not wait"
        ),
    ),
)
