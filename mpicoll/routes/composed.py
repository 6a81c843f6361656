"""Exchange and local reduction: every dtype and operation, rounded once, over any MPI.

The elements are cut into one block a rank. Each rank gets its block of everybody, combines them in
the order of the ranks, and hands the result on: to all (all_reduce), to the root (reduce), to
nobody (reduce_scatter). This is Rabenseifner's decomposition of all_reduce (Thakur, Rabenseifner,
Gropp, Int. J. High Performance Computing Applications 19(1), 2005, section 4.5) with the
reduce-scatter done by pairwise exchange, so that each element is combined in one place, once, and
all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpicoll import arrays
from mpicoll.arrays import View
from mpicoll.calls import Blocks, Route
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.reduction import combine, narrow, scale
from mpicoll.routes.wire import datatype, exchange, message

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["all_reduce", "premultiplied", "reduce", "reduce_scatter"]

#: Bytes of the whole message up to which everybody gets everything and combines it alone: one
#: latency instead of two.
SMALL = 8 * 1024
#: Bytes that one rank gets from one other at a time: what combining reads is still in the cache.
BLOCK = 512 * 1024
#: Bytes of the blocks of all ranks together, the most scratch that a group keeps.
STACK = 32 * 1024 * 1024


class _Reducer:
    """What the three primitives share: one group's blocks of one dtype, combined by one op."""

    def __init__(self, group: ProcessGroup, dtype: DType, op: ReduceOp) -> None:
        self.group = group
        self.comm = group.comm
        self.n = group.size()
        self.me = group.rank()
        self.dtype = dtype
        self.op = op
        self.element = datatype(dtype)
        self.divisor = self.n if op is ReduceOp.AVG else 1
        self.block = max(1, min(BLOCK, STACK // self.n) // dtype.itemsize)

    def stack(self, count: int) -> View:
        """Room for ``count`` elements of every rank: the group's scratch, which grows as needed."""
        nbytes = self.n * count * self.dtype.itemsize
        if self.group.scratch.nbytes < nbytes:
            self.group.scratch = np.empty(nbytes, np.uint8)
        return arrays.of_numpy(self.group.scratch[:nbytes].view(self.dtype.numpy), self.dtype)

    def combine(self, stack: View, count: int, out: View, start: int = 0) -> None:
        """Combines ``count`` elements of every rank into ``out`` from ``start`` on."""
        flat = stack.flat
        sources = [flat[r * count : (r + 1) * count] for r in range(self.n)]
        combine(self.op, self.dtype, sources, out.flat[start : start + count], self.divisor)

    def pieces(self, view: View) -> list[tuple[View, list[int], list[int]]]:
        """The view in pieces of one block a rank: piece, counts, first elements."""
        found = []
        step = self.n * self.block
        for start in range(0, view.count, step):
            size = min(step, view.count - start)
            share = -(-size // self.n)
            counts = [max(0, min(share, size - r * share)) for r in range(self.n)]
            starts = [min(size, r * share) for r in range(self.n)]
            piece = view if size == view.count else view.part(start, size)
            found.append((piece, counts, starts))
        return found

    def reduce_own(self, piece: View, counts: list[int], starts: list[int], out: View) -> None:
        """Exchanges a piece; this rank's block of it goes, combined, to its place in ``out``."""
        mine = counts[self.me]
        stack = self.stack(mine)
        self.comm.Alltoallv(
            [piece.buffer, (counts, starts), self.element],
            [stack.buffer, ([mine] * self.n, [r * mine for r in range(self.n)]), self.element],
        )
        if mine:
            self.combine(stack, mine, out, starts[self.me])


def all_reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Route:
    """Exchange, combine, MPI_Allgatherv; small messages: MPI_Allgather, combine."""
    reducer = _Reducer(group, dtype, op)
    comm, element, n = group.comm, reducer.element, group.size()

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        count = recv.count
        if recv.nbytes * n <= SMALL or count < n:
            stack = reducer.stack(count)
            comm.Allgather([recv.buffer, count, element], [stack.buffer, count, element])
            reducer.combine(stack, count, recv)
            return
        for piece, counts, starts in reducer.pieces(recv):
            reducer.reduce_own(piece, counts, starts, piece)
            comm.Allgatherv(MPI.IN_PLACE, [piece.buffer, (counts, starts), element])

    return route


def reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Route:
    """Exchange, combine, MPI_Gatherv; only the root's array is written."""
    reducer = _Reducer(group, dtype, op)
    comm, element, me = group.comm, reducer.element, group.rank()

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        for piece, counts, starts in reducer.pieces(recv):
            out = piece if me == root else arrays.scratch(dtype, piece.count)
            reducer.reduce_own(piece, counts, starts, out)
            if me == root:
                comm.Gatherv(MPI.IN_PLACE, [piece.buffer, (counts, starts), element], root)
            else:
                comm.Gatherv([out.buffer, counts[me], starts[me], element], None, root)

    return route


def reduce_scatter(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Route:
    """Exchange and combine."""
    reducer = _Reducer(group, dtype, op)
    n, me = group.size(), group.rank()

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None
        count = recv.count
        for start in range(0, count, reducer.block):
            size = min(reducer.block, count - start)
            stack = reducer.stack(size)
            own = me * count + start
            stack.flat[me * size : (me + 1) * size] = send.flat[own : own + size]
            exchange(
                group.comm,
                [
                    message(send.buffer, size, dtype, r * count + start) if r != me else None
                    for r in range(n)
                ],
                [
                    message(stack.buffer, size, dtype, r * size) if r != me else None
                    for r in range(n)
                ],
            )
            reducer.combine(stack, size, recv, start)

    return route


def premultiplied(
    group: ProcessGroup,
    dtype: DType,
    factor: object,
    everywhere: bool,
    make: Callable[[DType], Route],
) -> Route:
    """PREMUL_SUM: each rank's elements times its factor, then ``make(dtype)``'s sum.

    everywhere: the result goes to all ranks, not to the root alone. Narrow floats are scaled and
    summed in float32 and rounded once at the end.
    """
    me = group.rank()
    wide = by_name["float32"] if dtype.kind is Kind.NARROW_FLOAT else dtype
    summed = make(wide)

    def scaled(view: View) -> View:
        product = arrays.scratch(wide, view.count)
        scale(dtype, view.flat, factor, product.flat)
        return product

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        if send is None:
            out = scaled(recv)
            summed(None, out, root, None)
        else:
            out = recv if wide is dtype else arrays.scratch(wide, recv.count)
            summed(scaled(send), out, root, blocks)
        if out is recv or not (everywhere or root == me):
            return
        if wide is dtype:
            recv.flat[...] = out.flat
        else:
            narrow(out.flat, recv.flat)

    return route
