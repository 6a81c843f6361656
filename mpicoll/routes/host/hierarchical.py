"""Hierarchical collectives for groups on several nodes: shared memory inside a node, MPI between.

A *rail* is a communicator of one rank per node: rail i joins the i-th ranks of all nodes. There are
as many rails as the smallest node has ranks, and each sends a share of the message. Every chunk of
an all_reduce

1. is reduced and scattered in each node: each rail's rank gets its share;
2. is reduced along the rails, on all rails at once;
3. is gathered in each node.

So a node sends and receives as much as a single rank would, and all its ranks combine, copy and
send. Ranks may be on nodes in any order, and nodes may have different numbers of ranks. With a
single rail this is the usual scheme with a leader per node. (Träff, Hunold, Decomposing MPI
collectives for exploiting multi-lane communication, IEEE Cluster 2020; their lane is a rail.)

Data movement uses the same rails: broadcast sends a share along each, all_gather the block of each
rank, and all_to_all one message per node with the blocks of a node's ranks for the ranks of a rail
(arXiv 2601.17606).

The ranks' calls are compared inside a node in step 1, without cost, and between nodes by an MPI
reduction of 32 bytes before step 2.

Sums and products of narrow floats are computed and sent as float32 and rounded once; the results of
all_reduce are sent as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Array, memory_at
from mpicoll.core.plan import CallKind, Contiguous, Extent, Implementation, Run
from mpicoll.dtypes import DType, ReduceOp, by_name
from mpicoll.kernels.library import kernels
from mpicoll.kernels.reduction import combine, narrow, scale
from mpicoll.routes.host import exchange, mpi
from mpicoll.routes.host.hierarchy import (
    ApartError,
    Hierarchy,
    HierarchyCall,
    get_or_create,
    level_arithmetic,
)  # fmt: skip
from mpicoll.routes.messages import Span
from mpicoll.routes.route import EXCHANGES, Needs, Route, Serves, has_loop
from mpicoll.routes.transfers import Get, Put, addresses, cut
from mpicoll.routes.wire import datatype, scratch

#: Size in bytes of a rail's chunk, which stays in the cache between the steps.
CHUNK = 1024 * 1024
#: Maximum size in bytes of a node's chunk, and of its scratch memory for widened floats.
TOGETHER = 8 * 1024 * 1024

#: Runs a chunk of a call, given the addresses of input (None: in place) and output, the chunk's
#: first element and its count.
_Work = Callable[[HierarchyCall, Any, Any, int, int], None]
#: Builds the calls along the rails; None: MPI, or `exchange`.
_Along = Callable[[CallKind], Implementation] | None


def build(kind: CallKind, along: _Along = None) -> Implementation | None:
    """Return the implementation for calls of this kind. All ranks call.

    None if the group has no hierarchy, or if the operation would need equally many ranks on every
    node.
    """
    hierarchy, name = get_or_create(kind.group), kind.primitive.name.removesuffix("_single")
    if hierarchy is None or not (hierarchy.even or name in ("all_reduce", "broadcast")):
        return None
    reduces = [along] if kind.primitive.reduces else []
    step, work = _BUILDERS[name](hierarchy, kind, *reduces)

    def run(send: Contiguous | None, recv: Contiguous, count: int, root: int) -> None:
        call = HierarchyCall(hierarchy, kind, count, root)
        source, into = addresses(send), addresses(recv)
        try:
            for start in range(0, max(count, 1), step):
                work(call, source, into, start, min(step, count - start))
        except ApartError:
            raise call.mismatch() from None
        except (KeyboardInterrupt, SystemExit) as error:  # of a signal handler, between two steps
            kind.group.fail_after_signal(error)
            raise

    return AllToAll(hierarchy, kind, run) if name == "all_to_all" else Implementation(run)


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
    assert op is not None
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
        _gather(call, hierarchy, dtype, at, shares)

    nbytes = min(hierarchy.rails * CHUNK, TOGETHER)
    return max(1, nbytes // wide.itemsize), work


def _gather(
    call: HierarchyCall, hierarchy: Hierarchy, dtype: DType, at: int, shares: Sequence[Span]
) -> None:
    """Copy the shares of a chunk from the rails' ranks of this node to all its ranks."""
    mine = hierarchy.me.place
    blocks = [Put(at + start * dtype.itemsize, count) for start, count in shares]
    puts = [] if hierarchy.rail is None else [blocks[mine]]
    gets = [Get(r, 0, *block) for r, block in enumerate(blocks) if r != mine]
    call.exchange(dtype, 1, shares[0][1], puts, gets)


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
    assert rail is not None and op is not None
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


# --- moves --------------------------------------------------------------------------------------


def _broadcast(hierarchy: Hierarchy, kind: CallKind) -> tuple[int, _Work]:
    """Copy a chunk on the root's node, send a share along each rail, and gather on other nodes."""
    dtype, rail, me = kind.dtype, hierarchy.rail, hierarchy.me

    def work(call: HierarchyCall, send: int, recv: int, start: int, size: int) -> None:
        at, root = recv + start * dtype.itemsize, hierarchy.places[call.root]
        if start == 0:
            call.exchange(dtype)  # only compares the calls
            call.agree()
        if me.node == root.node:
            is_root = me == root
            puts, gets = [Put(at, size)] * is_root, [Get(root.place, 0, at, size)] * (not is_root)
            call.exchange(dtype, 1, size, puts, gets)
        shares = hierarchy.shares(size, dtype.itemsize)
        begin, own = (0, 0) if rail is None else shares[me.place]
        if rail is not None and own:
            part = memory_at(at + begin * dtype.itemsize, own * dtype.itemsize)
            rail.inner.Bcast([part, own, datatype(dtype)], root.node)
        if me.node != root.node:
            _gather(call, hierarchy, dtype, at, shares)

    return max(1, min(hierarchy.rails * CHUNK, TOGETHER) // dtype.itemsize), work


def _all_gather(hierarchy: Hierarchy, kind: CallKind) -> tuple[int, _Work]:
    """Copy the blocks of this node, gather along the rails, and copy the blocks of other nodes."""
    dtype, rail, nodes, me = kind.dtype, hierarchy.rail, hierarchy.nodes, hierarchy.me
    assert rail is not None
    itemsize, element = dtype.itemsize, datatype(dtype)

    def work(call: HierarchyCall, send: int, recv: int, start: int, size: int) -> None:
        def copy(node: int, at: int) -> None:
            """Copy the blocks of a node's ranks; this rank has the one of its rail."""
            places = (recv + (rank * call.count + start) * itemsize for rank in nodes[node])
            gets = [Get(r, 0, place, size) for r, place in enumerate(places)]
            call.exchange(dtype, 1, size, [Put(at, size)], gets)

        width, own = size * itemsize, send + start * itemsize
        rows = hierarchy.scratch(len(nodes) * width)
        copy(me.node, own)
        call.agree()
        whole = memory_at(rows, len(nodes) * width)
        rail.inner.Allgather([memory_at(own, width), size, element], [whole, size, element])
        for node in range(len(nodes)):
            if node != me.node:
                copy(node, rows + node * width)

    return max(1, min(CHUNK, TOGETHER // len(nodes)) // itemsize), work


def _all_to_all(hierarchy: Hierarchy, kind: CallKind) -> tuple[int, _Work]:
    """Collect the blocks of this node for the ranks of this rail, and exchange them along it."""
    dtype, rail, nodes, q = kind.dtype, hierarchy.rail, hierarchy.nodes, hierarchy.rails
    assert rail is not None and kernels is not None
    unpack, n, itemsize, element = kernels.unpack, q * len(nodes), dtype.itemsize, datatype(dtype)

    def work(call: HierarchyCall, send: Any, recv: Any, start: int, size: int) -> None:
        out, into = (
            [at + start * itemsize for at, _ in cut(side, [call.count] * n, itemsize)]
            for side in (send, recv)
        )
        width = size * itemsize
        rows = hierarchy.scratch(2 * n * width)
        for row, ranks in enumerate(nodes):
            at = (rows + (row * q + r) * width for r in range(q))
            gets = [Get(r, hierarchy.me.place, place, size) for r, place in enumerate(at)]
            call.exchange(dtype, q, size, [Put(out[rank], size) for rank in ranks], gets)
        sent, received = (memory_at(rows + part * n * width, n * width) for part in (0, 1))
        rail.inner.Alltoall([sent, q * size, element], [received, q * size, element])
        parts = np.array([into[rank] for ranks in nodes for rank in ranks], np.uintp)
        sizes = np.array([size], np.uintp)
        unpack(parts.ctypes.data, sizes.ctypes.data, 1, n, 1, itemsize, rows + n * width)

    return max(1, min(CHUNK, TOGETHER // 2) // (n * itemsize)), work


class AllToAll(Implementation):
    """all_to_all of equal blocks, by one message per node; ``other`` runs calls of other blocks.

    move: runs a call of blocks on whose count the ranks have agreed.
    """

    def __init__(self, hierarchy: Hierarchy, kind: CallKind, move: Run) -> None:
        self._hierarchy, self._kind, self.move = hierarchy, kind, move
        self.other = exchange.build(kind)

    def run(self, send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        """Run one call."""
        count = self.agree(extent)
        if count < 0:
            self.other.run(send, recv, extent, root)
        else:
            self.move(send, recv, count, root)

    def agree(self, extent: Extent) -> int:
        """Return the count of the blocks of all ranks; -1 if they differ. Raises MismatchError on
        all ranks if their calls differ. All ranks call, because none knows all sizes.
        """
        call = HierarchyCall(self._hierarchy, self._kind, 0)
        counts = {extent} if isinstance(extent, int) else {*extent.sends, *extent.receives}
        own = counts.pop() if len(counts) == 1 else -1
        numbers = np.full(1 + len(self._hierarchy.here), own, np.int64)
        first, *places = (numbers.ctypes.data + 8 * i for i in range(len(numbers)))
        gets = [Get(r, 0, at, 1) for r, at in enumerate(places)]
        try:
            call.exchange(by_name["int64"], 1, 1, [Put(first, 1)], gets)
            value = own if (numbers == own).all() else -1
            return value if call.agree(value) else -1
        except ApartError:
            raise call.mismatch() from None


_BUILDERS: dict[str, Callable[..., tuple[int, _Work]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}

MOVED = ("broadcast", "all_gather", "all_gather_single", *EXCHANGES)

ROUTE = Route(
    __name__,
    "node by node, then between them",
    Serves(
        ("all_reduce", "reduce_scatter", "reduce_scatter_single", *MOVED),
        combines=has_loop,
        uneven=EXCHANGES,
    ),
    build,
    Needs("nodes", "several nodes, at least one with several ranks, and the C library"),
)
