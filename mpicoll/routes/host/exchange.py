"""Exchange and combine: every dtype and operation, rounded once, over any MPI.

Uses the algorithms of routes/algorithms.py. Reductions of one chunk have a version for NumPy arrays
here, with the same steps and the same bits. MPI's own all-to-all, all-gather and gather send the
elements as they are: in few steps if they are short, and without Python for each message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Array, Buffer, Bytes
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind, Contiguous, Extent, Implementation, Run
from mpicoll.core.reproducible import BFLOAT16, LEVELS
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels.reduction import combine
from mpicoll.routes import algorithms
from mpicoll.routes.reductions import chunk_of
from mpicoll.routes.route import EXCHANGES, MOVES, REDUCTIONS, Route, Serves
from mpicoll.routes.space import Host
from mpicoll.routes.wire import datatype, scratch


def build(kind: CallKind) -> Implementation:
    """Return the implementation of a kind of call."""
    space = get_space(kind.group)
    general = algorithms.build(kind, space)
    name, n = kind.primitive.name.removesuffix("_single"), kind.group.size()
    if name not in ("all_reduce", "reduce", "reduce_scatter") or kind.dtype is None:
        return Implementation(general)
    one_chunk: Run = getattr(OneChunk(kind), name)
    limit = chunk_of(space, n, kind.dtype) * (1 if kind.primitive.many_in else n)

    def run(send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int) -> None:
        if isinstance(extent, int) and extent <= limit:
            one_chunk(send, recv, extent, root)
        else:
            general(send, recv, extent, root)

    return Implementation(run)


def narrows(kind: CallKind) -> bool:
    """Return whether calls of this kind send bfloat16 between nodes."""
    is_sum = kind.op in (ReduceOp.SUM, ReduceOp.AVG) and kind.primitive.name in REDUCTIONS
    is_wanted = kind.group.wire == BFLOAT16 and kind.group.size() > 1
    return is_wanted and is_sum and kind.dtype is by_name["float32"]


def build_narrowed(kind: CallKind) -> Implementation:
    """Return the implementation of sums of float32 that are sent as bfloat16."""
    space, narrow = get_space(kind.group), by_name[BFLOAT16]
    add = build(kind._replace(dtype=narrow)).run
    run = algorithms.converted(
        kind, space, narrow, space.narrow, add, lambda view, to: space.scale(view, 1, to)
    )
    return Implementation(run)


def get_space(group: ProcessGroup) -> Host:
    """Return the host memory space of a group."""
    return group.resources.get_or_create("exchange", Host)


class OneChunk:
    """The reductions of one chunk, by the names of their primitives."""

    def __init__(self, kind: CallKind) -> None:
        assert kind.op is not None
        self.group, self.dtype, self.op = kind.group, kind.dtype, kind.op
        self.comm, self.n, self.me = kind.group.inner, kind.group.size(), kind.group.rank()
        self.exact = kind.exact
        self.divisor = self.n if kind.op is ReduceOp.AVG else 1
        self.small = Host.small

    def array(self, buffer: Buffer, start: int, count: int) -> Array:
        """Return ``count`` elements of a buffer from element ``start`` on."""
        return np.frombuffer(buffer, self.dtype.numpy, count, start * self.dtype.itemsize)

    def everything(self, buffer: Buffer, count: int) -> list[Array]:
        """Return the elements of all ranks, on every rank."""
        element, n = datatype(self.dtype), self.n
        memory = scratch(self.group, n * count * self.dtype.itemsize)
        self.comm.Allgather([buffer, count, element], [memory, count, element])
        return self.rows(memory, count)

    def rows(self, memory: Bytes, count: int) -> list[Array]:
        """Return the elements of all ranks in scratch memory."""
        stack = memory.view(self.dtype.numpy)
        return [stack[r * count : (r + 1) * count] for r in range(self.n)]

    def combine(self, sources: Sequence[Array], out: Array) -> None:
        """Combine the elements of all ranks, in rank order."""
        combine(self.op, self.dtype, sources, out, self.divisor, self.exact)

    def share(self, buffer: Buffer, count: int, out: Array | None = None) -> None:
        """Send each rank its block of a buffer, and combine this rank's, by default in place."""
        element = datatype(self.dtype)
        memory = scratch(self.group, self.n * count * self.dtype.itemsize)
        self.comm.Alltoall([buffer, count, element], [memory, count, element])
        if out is None:
            out = self.array(buffer, self.me * count, count)
        self.combine(self.rows(memory, count), out)

    def padded(self, buffer: Buffer, count: int) -> tuple[Buffer, int]:
        """Return a buffer of equal blocks, a copy if needed, and the size of a block."""
        block = -(-count // self.n)
        nbytes = self.n * block * self.dtype.itemsize
        if count % self.n == 0:
            return buffer, block
        copy = scratch(self.group, 2 * nbytes)[nbytes:]  # behind the memory of ``share``
        self.array(copy, 0, count)[:] = self.array(buffer, 0, count)
        return copy, block

    def all_reduce(self, send: None, recv: Buffer, count: int, root: int) -> None:
        """Combine the elements of all ranks, in place: of everything, or of a share."""
        if not count:
            return
        if self.n * count * self.dtype.itemsize <= self.small:
            self.combine(self.everything(recv, count), self.array(recv, 0, count))
            return
        whole, block = self.padded(recv, count)
        self.share(whole, block)
        self.comm.Allgather(MPI.IN_PLACE, [whole, block, datatype(self.dtype)])
        if whole is not recv:
            self.array(recv, 0, count)[:] = self.array(whole, 0, count)

    def reduce(self, send: None, recv: Buffer, count: int, root: int) -> None:
        """Combine the elements of all ranks, in place on the root."""
        if not count:
            return
        n, is_root, element = self.n, self.me == root, datatype(self.dtype)
        if n * count * self.dtype.itemsize <= self.small:
            memory = scratch(self.group, n * count * self.dtype.itemsize)
            into = [memory, count, element] if is_root else None
            self.comm.Gather([recv, count, element], into, root)
            if is_root:
                self.combine(self.rows(memory, count), self.array(recv, 0, count))
            return
        whole, block = self.padded(recv, count)
        if not is_root:
            out = np.empty(block, self.dtype.numpy)
            self.share(whole, block, out)
            self.comm.Gather([out, block, element], None, root)
            return
        self.share(whole, block)
        self.comm.Gather(MPI.IN_PLACE, [whole, block, element], root)
        if whole is not recv:
            self.array(recv, 0, count)[:] = self.array(whole, 0, count)

    def reduce_scatter(self, send: Buffer, recv: Buffer, count: int, root: int) -> None:
        """Combine one block of the elements of all ranks."""
        if count:
            self.share(send, count, self.array(recv, 0, count))


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
