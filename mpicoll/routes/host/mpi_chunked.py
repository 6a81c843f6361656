"""MPI's reductions in chunks that stay in the processor's caches, for large messages."""

from __future__ import annotations

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.routes.host import mpi
from mpicoll.routes.route import Route, Serves


def _build(kind: CallKind) -> Implementation:
    return mpi.build(kind, mpi.CHUNK_BYTES)


ROUTE = Route(
    __name__,
    "MPI in chunks",
    Serves(("all_reduce", "reduce"), combines=mpi.reducible),
    _build,
)
