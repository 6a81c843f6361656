"""MPI's own collectives: everything that is moved, and what MPI reduces rightly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.calls import Blocks, Direct, Route
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.routes.wire import INT_MAX, datatype, message, operation
from mpicoll.views import View

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["MOVES", "all_reduce", "broadcast", "reduce", "reduce_scatter", "reducible"]

#: Elements of one MPI reduction; more are reduced in as many pieces.
PIECE = 2**28


def broadcast(group: ProcessGroup, dtype: DType) -> Direct:
    """MPI_Bcast (MPI-4.1 section 6.4)."""
    bcast = group.comm.Bcast

    def direct(buffer: Any, count: int, root: int) -> None:
        bcast(message(buffer, count, dtype), root)

    return direct


def all_gather(group: ProcessGroup, dtype: DType) -> Route:
    """MPI_Allgather; where blocks differ, MPI_Allgatherv (MPI-4.1 section 6.7)."""
    comm, n, me = group.comm, group.size(), group.rank()

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None
        if blocks is None:
            comm.Allgather(
                message(send.buffer, send.count, dtype), message(recv.buffer, send.count, dtype)
            )
            return
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


def gather(group: ProcessGroup, dtype: DType) -> Route:
    """MPI_Gather (MPI-4.1 section 6.5)."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None
        into = None if recv is None else message(recv.buffer, send.count, dtype)
        group.comm.Gather(message(send.buffer, send.count, dtype), into, root)

    return route


def scatter(group: ProcessGroup, dtype: DType) -> Route:
    """MPI_Scatter (MPI-4.1 section 6.6)."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        out_of = None if send is None else message(send.buffer, recv.count, dtype)
        group.comm.Scatter(out_of, message(recv.buffer, recv.count, dtype), root)

    return route


def barrier(group: ProcessGroup, dtype: DType | None) -> Route:
    """MPI_Barrier (MPI-4.1 section 6.3)."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        group.comm.Barrier()

    return route


#: What only moves and MPI does, by the name of the primitive.
MOVES: dict[str, Callable[[ProcessGroup, Any], Route]] = {
    "all_gather": all_gather,
    "all_gather_single": all_gather,
    "gather": gather,
    "scatter": scatter,
    "barrier": barrier,
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


def all_reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """MPI_Allreduce in place (MPI-4.1 section 6.9.6)."""
    reduce_all, n = group.comm.Allreduce, group.size()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)
    in_place, averaged = MPI.IN_PLACE, op is ReduceOp.AVG

    def direct(buffer: Any, count: int, root: int) -> None:
        if count <= PIECE:
            reduce_all(in_place, [buffer, count, element], combined)
        else:
            for start in range(0, count, PIECE):
                piece = [buffer, min(PIECE, count - start), start, element]
                reduce_all(in_place, piece, combined)
        if averaged:
            _divide(buffer, count, dtype, n)

    return direct


def reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """MPI_Reduce, in place on the root (MPI-4.1 section 6.9.1)."""
    comm, n, me = group.comm, group.size(), group.rank()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)

    def direct(buffer: Any, count: int, root: int) -> None:
        for start in range(0, max(count, 1), PIECE):
            piece = [buffer, min(PIECE, count - start), start, element]
            if me == root:
                comm.Reduce(MPI.IN_PLACE, piece, combined, root)
            else:
                comm.Reduce(piece, None, combined, root)
        if me == root and op is ReduceOp.AVG:
            _divide(buffer, count, dtype, n)

    return direct


#: Bytes of all blocks together up to which MPI's reduce_scatter is the fastest.
FEW = 16 * 1024


def reduce_scatter(group: ProcessGroup, dtype: DType, op: ReduceOp, otherwise: Route) -> Route:
    """MPI_Reduce_scatter_block (MPI-4.1 section 6.10.1); of more than FEW bytes ``otherwise``."""
    comm, n = group.comm, group.size()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None
        if send.nbytes > FEW:
            otherwise(send, recv, root, blocks)
            return
        block = recv.count  # mpi4py wants a block's count on either side
        comm.Reduce_scatter_block(
            [send.buffer, block, element], [recv.buffer, block, element], combined
        )
        if op is ReduceOp.AVG:
            _divide(recv.buffer, recv.count, dtype, n)

    return route


def _divide(buffer: Any, count: int, dtype: DType, n: int) -> None:
    if count:
        flat = np.frombuffer(buffer, dtype.numpy, count)
        if dtype.kind is Kind.COMPLEX:  # by parts: a complex division makes nan of infinity
            flat = flat.view(flat.real.dtype)
        with np.errstate(all="ignore"):
            np.divide(flat, n, out=flat)
