"""Hierarchical reductions for groups on several nodes: shared memory inside a node, MPI between.

A *rail* is a communicator of one rank per node: rail i joins the i-th ranks of all nodes. There are
as many rails as the smallest node has ranks, and each sends a share of the message. Every chunk

1. is reduced and scattered in each node: each rail's rank gets its share;
2. is reduced along the rails, on all rails at once;
3. is gathered in each node.

So a node sends and receives as much as a single rank would, and all its ranks combine, copy and
send. Ranks may be on nodes in any order, and nodes may have different numbers of ranks. With a
single rail this is the usual scheme with a leader per node. (Träff, Hunold, Decomposing MPI
collectives for exploiting multi-lane communication, IEEE Cluster 2020; their lane is a rail.)

The ranks' calls are compared inside a node in step 1, without cost, and between nodes by an MPI
reduction of 16 bytes before step 2.

Sums and products of narrow floats are computed and sent as float32 and rounded once; the results of
all_reduce are sent as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Array, Buffer, memory_at
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.kernels.reduction import combine, narrow, scale
from mpicoll.routes.host import exchange, mpi
from mpicoll.routes.host.hierarchy import (
    ApartError,
    Hierarchy,
    HierarchyCall,
    get_or_create,
    level_arithmetic,
)  # fmt: skip
from mpicoll.routes.route import Needs, Route, Serves, has_loop
from mpicoll.routes.transfers import Get, Put
from mpicoll.routes.wire import datatype, scratch

#: Size in bytes of a rail's chunk, which stays in the cache between the steps.
CHUNK = 1024 * 1024
#: Maximum size in bytes of a node's chunk, and of its scratch memory for widened floats.
TOGETHER = 8 * 1024 * 1024

#: Runs a chunk of a call, given the addresses of input and output, the chunk's first element and
#: its count.
_Work = Callable[[HierarchyCall, int, int, int, int], None]
#: Builds the calls along the rails; None: MPI, or `exchange`.
_Along = Callable[[CallKind], Implementation] | None


def build(kind: CallKind, along: _Along = None) -> Implementation | None:
    """Return the implementation for calls of this kind. All ranks call.

    None if the group has no hierarchy, or if reduce_scatter would need equally many ranks on every
    node.
    """
    hierarchy = get_or_create(kind.group)
    build = _all_reduce if kind.primitive.name == "all_reduce" else _reduce_scatter
    if hierarchy is None or not (hierarchy.even or build is _all_reduce):
        return None
    step, work = build(hierarchy, kind, along)

    def run(send: Buffer | None, recv: Buffer, count: int, root: int) -> None:
        call = HierarchyCall(hierarchy, kind, count)
        source, into = 0 if send is None else MPI.Get_address(send), MPI.Get_address(recv)
        try:
            for start in range(0, max(count, 1), step):
                work(call, source, into, start, min(step, count - start))
        except ApartError:
            raise call.mismatch() from None

    return Implementation(run)


class _Arithmetic:
    """The arithmetic of a dtype on both levels; see ``level_arithmetic``."""

    def __init__(self, hierarchy: Hierarchy, dtype: DType, op: ReduceOp) -> None:
        self._n, self.dtype = hierarchy.group.size(), dtype
        self._averages = op is ReduceOp.AVG
        self.wide, self.op = level_arithmetic(dtype, op)
        self.widens = self.wide is not dtype

    def widen(self, source: int, into: int, count: int) -> None:
        """Convert elements at an address to the wide dtype at another."""
        out = _array(into, self.wide, count)
        scale(self.dtype, _array(source, self.dtype, count), 1, out)

    def finish(self, source: int, into: int, count: int) -> None:
        """Convert a combination of all ranks to results; without widening, in place."""
        combined = _array(source, self.wide, count)
        if self._averages:
            combine(ReduceOp.AVG, self.wide, [combined], combined, self._n)
        if self.widens:
            narrow(combined, _array(into, self.dtype, count))


def _array(at: int, dtype: DType, count: int) -> Array:
    return np.frombuffer(memory_at(at, count * dtype.itemsize), dtype.numpy, count)


def _all_reduce(hierarchy: Hierarchy, kind: CallKind, build: _Along) -> tuple[int, _Work]:
    primitive, _, op, dtype = kind
    assert op is not None and dtype is not None
    by = _Arithmetic(hierarchy, dtype, op)
    wide, n, mine = by.wide, len(hierarchy.here), hierarchy.me.place
    along = None
    if hierarchy.rail is not None:
        along = _along(CallKind(primitive, hierarchy.rail, by.op, wide), by, build)

    def work(call: HierarchyCall, send: int, recv: int, start: int, size: int) -> None:
        at = recv + start * dtype.itemsize
        shares = hierarchy.shares(size, wide.itemsize)
        begin, own = (0, 0) if along is None else shares[mine]
        # The chunk is widened to scratch. This rank's share is combined there, else in the array.
        source, result = at, at + begin * dtype.itemsize
        if by.widens:
            source = hierarchy.scratch((size + len(hierarchy.nodes)) * wide.itemsize)
            by.widen(at, source, size)
        into = source + begin * wide.itemsize
        puts = [Put(source + s * wide.itemsize, some) for s, some in shares]
        gets = [Get(r, mine, into, own) for r in range(n)] if along else []
        most = shares[0][1]
        call.exchange(wide, hierarchy.rails, most, puts, gets, by.op)
        call.agree()
        if along is not None and own:
            along(into, result, own)
        gets = [
            Get(r, 0, at + s * dtype.itemsize, some)
            for r, (s, some) in enumerate(shares)
            if r != mine
        ]
        call.exchange(dtype, 1, most, [Put(result, own)] if along else [], gets)

    nbytes = min(hierarchy.rails * CHUNK, TOGETHER)
    return max(1, nbytes // wide.itemsize), work


def _along(kind: CallKind, by: _Arithmetic, build: _Along) -> Callable[[int, int, int], None]:
    """Return an all_reduce along a rail, given the addresses of its input and output and its count.

    Of sums that were widened each rank combines and rounds a share, so that results travel narrow.
    """
    wide, dtype = by.wide, by.dtype
    if by.widens:
        chunk = exchange.OneChunk(kind)

        def run(source: int, into: int, count: int) -> None:
            block = -(-count // chunk.n)  # the last ones may end in the spare scratch memory
            own = chunk.me * block
            chunk.share(memory_at(source, chunk.n * block * wide.itemsize), block)
            results = scratch(kind.group, chunk.n * block * dtype.itemsize)
            at = results.ctypes.data
            by.finish(source + own * wide.itemsize, at + own * dtype.itemsize, block)
            chunk.comm.Allgather(MPI.IN_PLACE, [results, block, datatype(dtype)])
            ctypes.memmove(into, at, count * dtype.itemsize)

        return run
    build = build or (mpi.Collective if mpi.reducible(by.op, wide) else exchange.build)
    reduce = build(kind).run

    def run_plain(source: int, into: int, count: int) -> None:
        reduce(None, memory_at(source, count * wide.itemsize), count, 0)
        by.finish(source, into, count)

    return run_plain


def _reduce_scatter(hierarchy: Hierarchy, kind: CallKind, build: _Along) -> tuple[int, _Work]:
    """Combine on each node the blocks of each rank's rail, then reduce_scatter along the rails."""
    rail, nodes, mine = hierarchy.rail, hierarchy.nodes, hierarchy.me.place
    primitive, _, op, dtype = kind
    assert rail is not None and op is not None and dtype is not None
    by = _Arithmetic(hierarchy, dtype, op)
    wide, n, itemsize = by.wide, len(hierarchy.here), dtype.itemsize
    along = (build or exchange.build)(CallKind(primitive, rail, by.op, wide)).run

    def work(call: HierarchyCall, send: int, recv: int, start: int, size: int) -> None:
        width = size * wide.itemsize
        # A block for each node; this rank's result and a block of each rank here, if widened.
        rows = hierarchy.scratch((len(nodes) + (1 + n if by.widens else 0)) * width)
        result = out = recv + start * itemsize
        if by.widens:
            out = rows + len(nodes) * width
        for row, ranks in enumerate(nodes):
            places = [send + (rank * call.count + start) * itemsize for rank in ranks]
            if by.widens:
                for place, at in enumerate(places):
                    places[place] = out + (1 + place) * width
                    by.widen(at, places[place], size)
            puts = [Put(at, size) for at in places]
            gets = [Get(r, mine, rows + row * width, size) for r in range(n)]
            call.exchange(wide, n, size, puts, gets, by.op)
        call.agree()
        if size:
            along(memory_at(rows, len(nodes) * width), memory_at(out, width), size, 0)
            by.finish(out, result, size)

    blocks = max(len(nodes), n)
    return max(1, min(CHUNK, TOGETHER // blocks) // wide.itemsize), work


ROUTE = Route(
    __name__,
    "node by node, then between them",
    Serves(("all_reduce", "reduce_scatter", "reduce_scatter_single"), combines=has_loop),
    build,
    Needs("nodes", "several nodes, at least one with several ranks, and the C library"),
)
