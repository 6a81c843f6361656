"""Exchange and combine: every dtype and operation, rounded once, over any MPI.

Uses the algorithms of routes/algorithms.py. Reductions of one chunk, whose cost is mostly Python,
have a faster version for NumPy arrays here, with the same steps and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

__all__ = ["ROUTE", "build", "get_space"]


def build(kind: CallKind) -> Implementation:
    """Return the implementation of a kind of call."""
    space = get_space(kind.group)
    general = algorithms.build(kind, space)
    build_one_chunk = _ONE_CHUNK.get(kind.primitive.name)
    if build_one_chunk is None or kind.dtype is None:
        return Implementation(general)
    one_chunk, n = build_one_chunk(_OneChunk(kind, space)), kind.group.size()
    limit = chunk_of(space, n, kind.dtype) * (1 if kind.primitive.many_in else n)

    def run(send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int) -> None:
        if isinstance(extent, int) and extent <= limit:
            one_chunk(send, recv, extent, root)
        else:
            general(send, recv, extent, root)

    return Implementation(run)


def get_space(group: ProcessGroup) -> Host:
    """Return the host's memory for algorithms in a group."""
    return group.resources.get_or_create("exchange", Host)


class _OneChunk:
    """The common part of the reductions of one chunk."""

    def __init__(self, kind: CallKind, space: Host) -> None:
        assert kind.dtype is not None and kind.op is not None
        self.group, self.dtype, self.op = kind.group, kind.dtype, kind.op
        self.comm, self.n, self.me = kind.group.inner, kind.group.size(), kind.group.rank()
        self.exact = kind.exact
        self.divisor = self.n if kind.op is ReduceOp.AVG else 1
        self.small, self.stack, self.tag = space.small, space.stack, kind.primitive.code

    def array(self, buffer: Buffer, count: int) -> Array:
        """Return the elements of a buffer."""
        return np.frombuffer(buffer, self.dtype.numpy, count)

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

    def combine_own(self, buffer: Buffer, whole: Array, cut: Sequence[Span], out: Array) -> None:
        """Send each rank its share of a buffer, and combine this rank's of all into ``out``."""
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
            stack = memory.view(dtype.numpy)
            sources = [stack[r * mine : (r + 1) * mine] for r in range(self.n)]
            sources[me] = whole[start : start + mine]
            self.combine(sources, out)


def _all_reduce(chunk: _OneChunk) -> Run:
    n, me, dtype = chunk.n, chunk.me, chunk.dtype

    def all_reduce(send: None, recv: Buffer, count: int, root: int) -> None:
        if not count:
            return
        whole, nbytes = chunk.array(recv, count), n * count * dtype.itemsize
        if nbytes <= chunk.small or (count < n and nbytes <= chunk.stack):
            chunk.combine(chunk.everything(recv, count), whole)
            return
        cut = shares_of(count, n)
        start, mine = cut[me]
        chunk.combine_own(recv, whole, cut, whole[start : start + mine])
        going = chunk.messages(recv, [(start, mine)] * n)
        exchange(chunk.comm, going, chunk.messages(recv, cut), chunk.tag)

    return all_reduce


def _reduce(chunk: _OneChunk) -> Run:
    n, me, dtype = chunk.n, chunk.me, chunk.dtype

    def reduce(send: None, recv: Buffer, count: int, root: int) -> None:
        if not count:
            return
        whole = chunk.array(recv, count)
        if n * count * dtype.itemsize <= chunk.small:
            cut = [(0, count if r == root else 0) for r in range(n)]
            chunk.combine_own(recv, whole, cut, whole[: cut[me][1]])
            return
        cut = shares_of(count, n)
        start, mine = cut[me]
        if me == root:
            chunk.combine_own(recv, whole, cut, whole[start : start + mine])
            exchange(chunk.comm, [None] * n, chunk.messages(recv, cut), chunk.tag)
        else:
            out = np.empty(mine, dtype.numpy)
            chunk.combine_own(recv, whole, cut, out)
            own = message(out.view(np.uint8), mine, dtype) if mine else None
            going = [own if r == root else None for r in range(n)]
            exchange(chunk.comm, going, [None] * n, chunk.tag)

    return reduce


def _reduce_scatter(chunk: _OneChunk) -> Run:
    n = chunk.n

    def reduce_scatter(send: Buffer, recv: Buffer, count: int, root: int) -> None:
        if count:
            cut = [(r * count, count) for r in range(n)]
            whole = chunk.array(send, n * count)
            chunk.combine_own(send, whole, cut, chunk.array(recv, count))

    return reduce_scatter


#: By the name of the primitive.
_ONE_CHUNK: dict[str, Callable[[_OneChunk], Run]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
}

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
