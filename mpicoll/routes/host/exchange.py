"""Exchange and combine: every dtype and operation, rounded once, over any MPI.

The algorithms are those of routes/algorithms.py; here is what of them serves host memory.
"""

from __future__ import annotations

from mpicoll.core.plan import CallKind, Implementation
from mpicoll.routes import algorithms
from mpicoll.routes.route import EXCHANGES, PREFIXES, REDUCTIONS, MemoryKind, Route
from mpicoll.routes.space import HOST

__all__ = ["ROUTE", "build"]


def build(kind: CallKind) -> Implementation:
    """Return what carries calls of a kind out."""
    return algorithms.build(kind, HOST)


ROUTE = Route(
    "exchange",
    "messages over MPI",
    MemoryKind.HOST,
    (*REDUCTIONS, *PREFIXES, *EXCHANGES),
    build,
    uneven=("reduce_scatter", *EXCHANGES),
)
