"""Exchange and local reduction: every dtype and operation, rounded once, over any MPI.

The elements are cut into one block a rank. Each rank gets its block of everybody, combines them in
the order of the ranks, and hands the result on: to all (all_reduce), to the root (reduce), to
nobody (reduce_scatter). This is Rabenseifner's decomposition of all_reduce (Thakur, Rabenseifner,
Gropp, Int. J. High Performance Computing Applications 19(1), 2005, section 4.5) with the
reduce-scatter done by pairwise exchange, so that each element is combined in one place, once, and
all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.arrays import views
from mpicoll.arrays.views import View
from mpicoll.core.calls import Blocks, Direct, Route
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.kernels.reduction import combine
from mpicoll.routes.algorithms import Space
from mpicoll.routes.wire import datatype, exchange, message, scratch

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "REDUCTIONS",
    "all_reduce",
    "premultiplied",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_uneven",
]

#: Bytes of the whole message up to which everybody gets everything and combines it alone: one
#: latency instead of two.
SMALL = 8 * 1024
#: Bytes that one rank gets from one other at a time: what combining reads is still in the cache.
BLOCK = 1024 * 1024
#: Bytes of the blocks of all ranks together, the most scratch that a group keeps.
STACK = 32 * 1024 * 1024


class _Reducer:
    """What the three primitives share: one group's blocks of one dtype, combined by one op."""

    def __init__(self, group: ProcessGroup, dtype: DType, op: ReduceOp) -> None:
        self.group = group
        self.comm = group.inner
        self.n = group.size()
        self.me = group.rank()
        self.dtype = dtype
        self.op = op
        self.divisor = self.n if op is ReduceOp.AVG else 1
        self.block = max(1, min(BLOCK, STACK // self.n) // dtype.itemsize)

    def stack(self, count: int) -> View:
        """Room for ``count`` elements of every rank: the group's scratch, which grows as needed."""
        memory = scratch(self.group, self.n * count * self.dtype.itemsize)
        return views.from_numpy(memory.view(self.dtype.numpy), self.dtype)

    def view(self, buffer: Any, count: int) -> View:
        """The view of ``count`` elements of a buffer."""
        return views.from_numpy(np.frombuffer(buffer, self.dtype.numpy, count), self.dtype)

    def exchange(self, out: Sides, into: Sides) -> None:
        """Sends and receives: for each rank a view, the first element and the count, or None."""
        exchange(
            self.comm,
            [message(v.buffer, count, self.dtype, start) if v else None for v, start, count in out],
            [
                message(v.buffer, count, self.dtype, start) if v else None
                for v, start, count in into
            ],
        )

    def pieces(self, count: int) -> Iterator[list[tuple[int, int]]]:
        """``count`` elements in pieces of one block a rank: first element and count of each."""
        step = self.n * self.block
        for begin in range(0, count, step):
            size = min(step, count - begin)
            share = -(-size // self.n)
            shares = [min(size, r * share) for r in range(self.n + 1)]
            yield [(begin + start, end - start) for start, end in pairwise(shares)]

    def combine_own(self, source: View, blocks: list[tuple[int, int]], out: View, at: int) -> None:
        """Sends each rank its block of ``source`` and combines this rank's of all into ``out``.

        blocks: first element and count of each rank's block. The result goes to ``out`` from
        element ``at`` on, which may be this rank's block of ``source``.
        """
        start, mine = blocks[self.me]
        stack = self.stack(mine)
        self.exchange(
            [self.others(r, source, *block) for r, block in enumerate(blocks)],
            [self.others(r, stack, r * mine, mine) for r in range(self.n)],
        )
        if mine:
            flat = stack.flat
            sources = [flat[r * mine : (r + 1) * mine] for r in range(self.n)]
            sources[self.me] = source.flat[start : start + mine]
            combine(self.op, self.dtype, sources, out.flat[at : at + mine], self.divisor)

    def scatter(self, source: View, counts: Sequence[int], out: View) -> None:
        """Combines each rank's block of ``source``, which has so many elements, on that rank."""
        starts = list(accumulate(counts[:-1], initial=0))
        for done in range(0, max(counts), self.block):
            piece = [
                (start + min(done, count), min(self.block, max(0, count - done)))
                for start, count in zip(starts, counts, strict=True)
            ]
            self.combine_own(source, piece, out, min(done, out.count))

    def others(self, rank: int, view: View, start: int, count: int) -> Side:
        """A block for or from another rank; nothing where that is this one, or it is empty."""
        return (view if rank != self.me and count else None), start, count


Side = tuple["View | None", int, int]
Sides = Sequence[Side]


def all_reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """Exchange, combine, exchange; small messages: MPI_Allgather, combine."""
    reducer = _Reducer(group, dtype, op)
    comm, element, n, me = group.inner, datatype(dtype), group.size(), group.rank()

    def direct(send: Any, buffer: Any, count: int, root: int) -> None:
        recv = reducer.view(buffer, count)
        whole = recv.nbytes * n
        if whole <= SMALL or (count < n and whole <= STACK):
            stack = reducer.stack(count)
            comm.Allgather([buffer, count, element], [stack.buffer, count, element])
            flat = stack.flat
            sources = [flat[r * count : (r + 1) * count] for r in range(n)]
            combine(op, dtype, sources, recv.flat, reducer.divisor)
            return
        for piece in reducer.pieces(count):
            own = piece[me]
            reducer.combine_own(recv, piece, recv, own[0])
            reducer.exchange(
                [reducer.others(r, recv, *own) for r in range(n)],
                [reducer.others(r, recv, *block) for r, block in enumerate(piece)],
            )

    return direct


def reduce(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """Exchange, combine, send to the root; only the root's array is written."""
    reducer = _Reducer(group, dtype, op)
    n, me = group.size(), group.rank()

    def direct(send: Any, buffer: Any, count: int, root: int) -> None:
        recv = reducer.view(buffer, count)
        nothing: Side = (None, 0, 0)
        for piece in reducer.pieces(count):
            start, mine = piece[me]
            if me == root:
                reducer.combine_own(recv, piece, recv, start)
                incoming = [reducer.others(r, recv, *block) for r, block in enumerate(piece)]
                reducer.exchange([nothing] * n, incoming)
            else:
                own = views.empty(dtype, mine)
                reducer.combine_own(recv, piece, own, 0)
                outgoing = [(own, 0, mine) if r == root and mine else nothing for r in range(n)]
                reducer.exchange(outgoing, [nothing] * n)

    return direct


def reduce_scatter(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Direct:
    """Exchange and combine."""
    reducer = _Reducer(group, dtype, op)
    n = group.size()

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        reducer.scatter(reducer.view(send, n * count), [count] * n, reducer.view(recv, count))

    return direct


def reduce_scatter_uneven(group: ProcessGroup, dtype: DType, op: ReduceOp) -> Route:
    """The same of blocks that differ."""
    reducer = _Reducer(group, dtype, op)

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None and blocks is not None
        reducer.scatter(send, blocks.sends, recv)

    return route


#: By the name of the primitive.
REDUCTIONS: dict[str, Callable[[ProcessGroup, DType, ReduceOp], Direct]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
}


def premultiplied(
    group: ProcessGroup,
    space: Space,
    dtype: DType,
    factor: object,
    everywhere: bool,
    make: Callable[[DType], Route],
) -> Route:
    """PREMUL_SUM: each rank's elements times its factor, then ``make(dtype)``'s sum.

    everywhere: the result goes to all ranks, not to the root alone. make: gets float32 for narrow
    floats, which are scaled and summed in it, in rank order, and rounded once at the end.
    """
    me = group.rank()
    wide = by_name["float32"] if dtype.kind is Kind.NARROW_FLOAT else dtype
    summed = make(wide)

    def scaled(view: View) -> View:
        product = space.blank(wide, view.count)
        space.scale(view, factor, product)
        return product

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        if send is None:
            out = scaled(recv)
            summed(None, out, root, None)
        else:
            out = recv if wide is dtype else space.blank(wide, recv.count)
            summed(scaled(send), out, root, blocks)
        if out is recv or not (everywhere or root == me):
            return
        if wide is dtype:
            space.copy(out, recv)
        else:
            space.narrow(out, recv)

    return route
