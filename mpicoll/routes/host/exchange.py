"""Exchange and combine: every dtype and operation, rounded once, over any MPI.

Uses the algorithms of routes/algorithms.py. Reductions of one chunk, whose cost is mostly Python,
have a faster version for NumPy arrays here, with the same steps and the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.arrays.views import Array, Buffer
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind, Contiguous, Extent, Implementation, Run
from mpicoll.core.reproducible import LEVELS
from mpicoll.dtypes import ReduceOp
from mpicoll.kernels.reduction import combine
from mpicoll.routes import algorithms
from mpicoll.routes.messages import Span, shares_of
from mpicoll.routes.reductions import chunk_of
from mpicoll.routes.route import EXCHANGES, MOVES, Route, Serves
from mpicoll.routes.space import Host
from mpicoll.routes.wire import Message, datatype, exchange, message, scratch


def build(kind: CallKind) -> Implementation:
    """Return the implementation of a kind of call."""
    space = get_space(kind.group)
    general = algorithms.build(kind, space)
    name, n = kind.primitive.name.removesuffix("_single"), kind.group.size()
    if name not in ("all_reduce", "reduce", "reduce_scatter") or kind.dtype is None:
        return Implementation(general)
    one_chunk: Run = getattr(_OneChunk(kind, space), name)
    limit = chunk_of(space, n, kind.dtype) * (1 if kind.primitive.many_in else n)

    def run(send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int) -> None:
        if isinstance(extent, int) and extent <= limit:
            one_chunk(send, recv, extent, root)
        else:
            general(send, recv, extent, root)

    return Implementation(run)


def get_space(group: ProcessGroup) -> Host:
    """Return the host memory space of a group."""
    return group.resources.get_or_create("exchange", Host)


class _OneChunk:
    """The reductions of one chunk, by the names of their primitives."""

    def __init__(self, kind: CallKind, space: Host) -> None:
        assert kind.dtype is not None and kind.op is not None
        self.group, self.dtype, self.op = kind.group, kind.dtype, kind.op
        self.comm, self.n, self.me = kind.group.inner, kind.group.size(), kind.group.rank()
        self.exact = kind.exact
        self.divisor = self.n if kind.op is ReduceOp.AVG else 1
        self.small, self.stack, self.tag = space.small, space.stack, kind.primitive.code

    def array(self, buffer: Buffer, start: int, count: int) -> Array:
        """Return ``count`` elements of a buffer from element ``start`` on."""
        return np.frombuffer(buffer, self.dtype.numpy, count, start * self.dtype.itemsize)

    def everything(self, buffer: Buffer, count: int) -> list[Array]:
        """Return the elements of all ranks, on every rank."""
        element, n = datatype(self.dtype), self.n
        memory = scratch(self.group, n * count * self.dtype.itemsize)
        self.comm.Allgather([buffer, count, element], [memory, count, element])
        stack = memory.view(self.dtype.numpy)
        return [stack[r * count : (r + 1) * count] for r in range(n)]

    def combine(self, sources: Sequence[Array], out: Array) -> None:
        """Combine the elements of all ranks, in rank order."""
        combine(self.op, self.dtype, sources, out, self.divisor, self.exact)

    def messages(self, buffer: Buffer, cut: Sequence[Span]) -> list[Message | None]:
        """Return each other rank's share of a buffer as a message; None if it is empty."""
        return [
            message(buffer, count, self.dtype, start) if count and r != self.me else None
            for r, (start, count) in enumerate(cut)
        ]

    def share(self, buffer: Buffer, cut: Sequence[Span], out: Array | None = None) -> None:
        """Send each rank its share of a buffer, and combine this rank's, by default in place."""
        me, dtype = self.me, self.dtype
        start, mine = cut[me]
        memory = scratch(self.group, self.n * mine * dtype.itemsize)
        exchange(
            self.comm,
            self.messages(buffer, cut),
            self.messages(memory, [(r * mine, mine) for r in range(self.n)]),
            self.tag,
        )
        if mine:
            stack, own = memory.view(dtype.numpy), self.array(buffer, start, mine)
            sources = [stack[r * mine : (r + 1) * mine] for r in range(self.n)]
            sources[me] = own
            self.combine(sources, own if out is None else out)

    def all_reduce(self, send: None, recv: Buffer, count: int, root: int) -> None:
        n, nbytes = self.n, self.n * count * self.dtype.itemsize
        if not count:
            return
        if nbytes <= self.small or (count < n and nbytes <= self.stack):
            self.combine(self.everything(recv, count), self.array(recv, 0, count))
            return
        cut = shares_of(count, n)
        self.share(recv, cut)
        own = self.messages(recv, [cut[self.me]] * n)
        exchange(self.comm, own, self.messages(recv, cut), self.tag)

    def reduce(self, send: None, recv: Buffer, count: int, root: int) -> None:
        n, me, dtype = self.n, self.me, self.dtype
        if not count:
            return
        if n * count * dtype.itemsize <= self.small:
            self.share(recv, [(0, count if r == root else 0) for r in range(n)])
            return
        cut = shares_of(count, n)
        going: list[Message | None] = [None] * n
        coming: list[Message | None] = [None] * n
        if me == root:
            self.share(recv, cut)
            coming = self.messages(recv, cut)
        else:
            out = np.empty(cut[me][1], dtype.numpy)
            self.share(recv, cut, out)
            if out.size:
                going[root] = message(out.view(np.uint8), out.size, dtype)
        exchange(self.comm, going, coming, self.tag)

    def reduce_scatter(self, send: Buffer, recv: Buffer, count: int, root: int) -> None:
        if count:
            cut = [(r * count, count) for r in range(self.n)]
            self.share(send, cut, self.array(recv, 0, count))


ROUTE = Route(
    __name__,
    "messages over MPI",
    Serves(
        # Data movement by MPI's own collectives is faster: see the route mpi.
        tuple(name for name in algorithms.ALGORITHMS if name not in MOVES),
        reproducible=LEVELS,
        uneven=("reduce_scatter", *EXCHANGES),
    ),
    build,
)
