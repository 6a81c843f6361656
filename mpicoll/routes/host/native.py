"""MPI's own collectives: everything that is moved, and what MPI reduces rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import View
from mpicoll.core.calls import Blocks, Direct, Route
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.routes.host import composed
from mpicoll.routes.wire import INT_MAX, datatype, message, operation

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "MOVES",
    "PIECE",
    "REDUCTIONS",
    "all_gather_uneven",
    "all_reduce",
    "barrier",
    "reduce",
    "reducible",
]

#: Elements of one MPI reduction at most: a C int counts them, and bytes of 16 times as many.
MOST = 2**28
#: Bytes of a piece where a large reduction is cut: what one step leaves in the processor's caches
#: is there for the next.
PIECE = 2 * 1024 * 1024


def broadcast(group: ProcessGroup, dtype: DType) -> Direct:
    """MPI_Bcast (MPI-4.1 section 6.4)."""
    bcast, element = group.inner.Bcast, datatype(dtype)

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        if count <= INT_MAX:
            bcast([recv, count, element], root)
        else:
            bcast(message(recv, count, dtype), root)

    return direct


def all_gather(group: ProcessGroup, dtype: DType) -> Direct:
    """MPI_Allgather (MPI-4.1 section 6.7)."""
    allgather, element = group.inner.Allgather, datatype(dtype)

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        if count <= INT_MAX:
            allgather([send, count, element], [recv, count, element])
        else:
            allgather(message(send, count, dtype), message(recv, count, dtype))

    return direct


def all_gather_uneven(group: ProcessGroup, dtype: DType) -> Route:
    """MPI_Allgatherv, for blocks that differ (MPI-4.1 section 6.7)."""
    comm, n, me = group.inner, group.size(), group.rank()

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None and blocks is not None
        counts = blocks.receives
        starts = [sum(counts[:r]) for r in range(n)]
        if recv.count <= INT_MAX:
            comm.Allgatherv(
                message(send.buffer, send.count, dtype),
                [recv.buffer, (counts, starts), datatype(dtype)],
            )
            return
        recv.part(starts[me], counts[me]).flat[...] = send.flat
        for r in range(n):  # displacements are C ints in most MPIs: one rank's block at a time
            comm.Bcast(message(recv.buffer, counts[r], dtype, starts[r]), r)

    return route


def gather(group: ProcessGroup, dtype: DType) -> Direct:
    """MPI_Gather (MPI-4.1 section 6.5)."""

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        into = None if recv is None else message(recv, count, dtype)
        group.inner.Gather(message(send, count, dtype), into, root)

    return direct


def scatter(group: ProcessGroup, dtype: DType) -> Direct:
    """MPI_Scatter (MPI-4.1 section 6.6)."""

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        out_of = None if send is None else message(send, count, dtype)
        group.inner.Scatter(out_of, message(recv, count, dtype), root)

    return direct


def barrier(group: ProcessGroup) -> Route:
    """MPI_Barrier (MPI-4.1 section 6.3)."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        group.inner.Barrier()

    return route


#: What only moves, by the name of the primitive.
MOVES: dict[str, Callable[[ProcessGroup, DType], Direct]] = {
    "broadcast": broadcast,
    "all_gather": all_gather,
    "all_gather_single": all_gather,
    "gather": gather,
    "scatter": scatter,
}


def reducible(op: ReduceOp, dtype: DType) -> bool:
    """MPI reduces this rightly, and to the same bits on every rank.

    Not narrow floats: MPI has no such types, or rounds at every step. Not sums of 8 and 16-bit
    integers: Open MPI's vector code saturates instead of wrapping around (open-mpi/ompi#8045). Not
    the minimum and maximum of floats: MPI leaves open what becomes of NaN, and libraries compare in
    an order that differs from rank to rank, so that ranks end with different results.
    """
    if dtype.kind is Kind.NARROW_FLOAT:
        return False
    if dtype.kind is Kind.INTEGER and dtype.itemsize < 4 and op is ReduceOp.SUM:
        return False
    return not (dtype.kind is Kind.FLOAT and op in (ReduceOp.MIN, ReduceOp.MAX))


def _mpi_operation(op: ReduceOp, dtype: DType) -> MPI.Op:
    name = op.mpi_logical if dtype.kind is Kind.BOOL else op.mpi
    assert name is not None
    return operation(name)


def all_reduce(group: ProcessGroup, dtype: DType, op: ReduceOp, piece: int = MOST * 16) -> Direct:
    """MPI_Allreduce in place (MPI-4.1 section 6.9.6), of ``piece`` bytes at a time."""
    reduce_all, n = group.inner.Allreduce, group.size()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)
    in_place, averaged = MPI.IN_PLACE, op is ReduceOp.AVG
    step = min(MOST, piece // dtype.itemsize)

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        if count <= step:
            reduce_all(in_place, [recv, count, element], combined)
        else:
            for start in range(0, count, step):
                reduce_all(in_place, [recv, min(step, count - start), start, element], combined)
        if averaged:
            _divide(recv, count, dtype, n)

    return direct


def reduce(group: ProcessGroup, dtype: DType, op: ReduceOp, piece: int = MOST * 16) -> Direct:
    """MPI_Reduce, in place on the root (MPI-4.1 section 6.9.1), of ``piece`` bytes at a time."""
    comm, n, me = group.inner, group.size(), group.rank()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)
    step = min(MOST, piece // dtype.itemsize)

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        for start in range(0, max(count, 1), step):
            part = [recv, min(step, count - start), start, element]
            if me == root:
                comm.Reduce(MPI.IN_PLACE, part, combined, root)
            else:
                comm.Reduce(part, None, combined, root)
        if me == root and op is ReduceOp.AVG:
            _divide(recv, count, dtype, n)

    return direct


def reduce_scatter(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """MPI_Reduce_scatter_block (MPI-4.1 section 6.10.1)."""
    reduce_scatter_block, n = group.inner.Reduce_scatter_block, group.size()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)
    averaged = op is ReduceOp.AVG
    fits = MOST // n
    rest = composed.reduce_scatter(group, dtype, op)

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        if count > fits:
            rest(send, recv, count, root)
            return
        # mpi4py wants a block's count on either side.
        reduce_scatter_block([send, count, element], [recv, count, element], combined)
        if averaged:
            _divide(recv, count, dtype, n)

    return direct


#: What combines, by the name of the primitive.
REDUCTIONS: dict[str, Callable[[ProcessGroup, DType, ReduceOp], Direct]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
}


def _divide(buffer: Any, count: int, dtype: DType, n: int) -> None:
    if count:
        flat = np.frombuffer(buffer, dtype.numpy, count)
        if dtype.kind is Kind.COMPLEX:  # by parts: a complex division makes nan of infinity
            flat = flat.view(flat.real.dtype)
        with np.errstate(all="ignore"):
            np.divide(flat, n, out=flat)
