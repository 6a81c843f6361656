"""Hierarchical collectives for groups on several nodes: shared memory inside a node, MPI between.

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

Sums and products of narrow floats are computed and sent as float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Array, Buffer, memory_at
from mpicoll.core.plan import CallKind, Implementation, Run
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.dtypes import by_name as dtypes
from mpicoll.kernels.reduction import combine, narrow, scale
from mpicoll.routes.host import exchange, mpi
from mpicoll.routes.host.hierarchy import Hierarchy, get_or_create
from mpicoll.routes.route import Needs, Route, Serves, has_loop
from mpicoll.routes.transfers import Get, Put
from mpicoll.routes.wire import INT_MAX, datatype

__all__ = ["ROUTE"]

#: Size in bytes of a rail's chunk, which stays in the cache between the steps.
CHUNK = 1024 * 1024
#: Maximum size in bytes of a node's chunk, and of its scratch memory for widened floats.
TOGETHER = 8 * 1024 * 1024

_FLOAT32 = dtypes["float32"]


def _build(kind: CallKind) -> Implementation | None:
    """Return the implementation for calls of this kind. All ranks call.

    None if the group has no hierarchy, or the operation needs equally many ranks on every node.
    """
    hierarchy = get_or_create(kind.group)
    run = None if hierarchy is None else _BUILDERS[kind.primitive.name](hierarchy, kind)
    return None if run is None else Implementation(run)


class _Arithmetic:
    """The arithmetic of a dtype on both levels.

    wide: the dtype that is sent.
    op:   the operation that combines it.
    """

    def __init__(self, hierarchy: Hierarchy, dtype: DType, op: ReduceOp) -> None:
        self._n = hierarchy.group.size()
        self._dtype = dtype
        self._averages = op is ReduceOp.AVG
        exact = op in (ReduceOp.MIN, ReduceOp.MAX)
        self.wide = _FLOAT32 if dtype.kind is Kind.NARROW_FLOAT and not exact else dtype
        self.op = ReduceOp.SUM if op is ReduceOp.AVG else op

    @property
    def widens(self) -> bool:
        return self.wide is not self._dtype

    def widen(self, source: int, into: int, count: int) -> None:
        """Convert elements at an address to the wide dtype at another."""
        out = _array(into, self.wide, count)
        scale(self._dtype, _array(source, self._dtype, count), 1, out)

    def finish(self, source: int, into: int, count: int) -> None:
        """Convert a combination of all ranks to results; without widening, in place."""
        combined = _array(source, self.wide, count)
        if self._averages:
            combine(ReduceOp.AVG, self.wide, [combined], combined, self._n)
        if self.widens:
            narrow(combined, _array(into, self._dtype, count))


def _array(at: int, dtype: DType, count: int) -> Array:
    return np.frombuffer(memory_at(at, count * dtype.itemsize), dtype.numpy, count)


def _reduction(hierarchy: Hierarchy, kind: CallKind) -> Run:
    """Build all_reduce and reduce."""
    primitive, _, op, dtype = kind
    assert op is not None and dtype is not None
    by, everywhere = _Arithmetic(hierarchy, dtype, op), not primitive.root
    wide, n, mine = by.wide, len(hierarchy.here), hierarchy.me.place
    along = None
    if hierarchy.rail is not None:
        build = mpi.build if mpi.reducible(by.op, wide) else exchange.build
        along = build(CallKind(primitive, hierarchy.rail, by.op, wide)).run
    step = max(1, min(hierarchy.rails * CHUNK, TOGETHER) // wide.itemsize)

    def places(at: int, size: int, begin: int, own: int) -> tuple[int, int, int]:
        """Return where a chunk of the array is wide, where this rank's share is combined, and where
        the result of that is: in the array, or in scratch.
        """
        whole = size * wide.itemsize if by.widens else 0
        scratch = hierarchy.scratch(whole + (0 if everywhere else own * wide.itemsize))
        source = scratch if by.widens else at
        result = at + begin * dtype.itemsize if everywhere else scratch + whole
        return source, source + begin * wide.itemsize if by.widens else result, result

    def carry_out(send: None, recv: Buffer, count: int, root: int) -> None:
        home, place = hierarchy.places[root]
        gathers = everywhere or hierarchy.me.node == home
        with hierarchy.call(kind, root, count) as call:
            for start in range(0, max(count, 1), step):
                at = MPI.Get_address(recv) + start * dtype.itemsize
                size = min(step, count - start)
                shares = hierarchy.shares(size, wide.itemsize)
                begin, own = (0, 0) if along is None else shares[mine]
                source, into, result = places(at, size, begin, own)
                if by.widens:
                    by.widen(at, source, size)
                puts = [Put(source + s * wide.itemsize, some) for s, some in shares]
                gets = [Get(r, mine, into, own) for r in range(n)] if along else []
                most = shares[0][1]
                call.exchange(call.transfer(hierarchy.rails, most, puts, gets), wide, by.op)
                call.agree()
                if along is not None and own:
                    along(None, memory_at(into, own * wide.itemsize), own, home)
                    if gathers:
                        by.finish(into, result, own)
                most = most if gathers else 0
                puts = [Put(result, own)] if gathers and along else []
                gets = [
                    Get(r, 0, at + s * dtype.itemsize, some)
                    for r, (s, some) in enumerate(shares)
                    if (r != mine if everywhere else hierarchy.me == (home, place))
                ]
                call.exchange(call.transfer(1, most, puts, gets), dtype)

    return carry_out


def _broadcast(hierarchy: Hierarchy, kind: CallKind) -> Run:
    """Scatter shares on the root's node, broadcast them along the rails, gather them on all."""
    dtype = kind.dtype
    assert dtype is not None
    rail, mine, width = hierarchy.rail, hierarchy.me.place, dtype.itemsize
    step = max(1, min(hierarchy.rails * CHUNK, TOGETHER) // width)

    def carry_out(send: None, recv: Buffer, count: int, root: int) -> None:
        home, place = hierarchy.places[root]
        rooted = hierarchy.group.rank() == root
        with hierarchy.call(kind, root, count) as call:
            for start in range(0, max(count, 1), step):
                at, size = MPI.Get_address(recv) + start * width, min(step, count - start)
                shares = hierarchy.shares(size, width)
                spans = [Put(at + s * width, some) for s, some in shares]
                own = spans[mine] if rail is not None else None
                most = shares[0][1]
                transfer = call.transfer()
                if hierarchy.me.node == home:
                    gets = [Get(place, mine, *own)] if own is not None and not rooted else []
                    transfer = call.transfer(hierarchy.rails, most, spans if rooted else (), gets)
                call.exchange(transfer, dtype)
                call.agree()
                if rail is not None and own is not None and own.elements:
                    whole = memory_at(own.address, own.elements * width)
                    rail.inner.Bcast([whole, own.elements, datatype(dtype)], home)
                puts = () if own is None else (own,)
                gets = [Get(r, 0, *span) for r, span in enumerate(spans) if r != mine]
                call.exchange(call.transfer(1, most, puts, () if rooted else gets), dtype)

    return carry_out


def _reduce_scatter(hierarchy: Hierarchy, kind: CallKind) -> Run | None:
    """Combine on each node the blocks of each rank's rail, then reduce_scatter along the rails."""
    rail, nodes, mine = hierarchy.rail, hierarchy.nodes, hierarchy.me.place
    primitive, _, op, dtype = kind
    if not hierarchy.even:
        return None
    assert rail is not None and op is not None and dtype is not None
    by = _Arithmetic(hierarchy, dtype, op)
    wide, n, itemsize = by.wide, len(hierarchy.here), dtype.itemsize
    along = exchange.build(CallKind(primitive, rail, by.op, wide)).run
    step = _of_a_block(hierarchy, wide)

    def carry_out(send: Buffer, recv: Buffer, count: int, root: int) -> None:
        with hierarchy.call(kind, 0, count) as call:
            for start in range(0, max(count, 1), step):
                size = min(step, count - start)
                width = size * wide.itemsize
                # A block for each node; this rank's result and a block of each here, if widened.
                rows = hierarchy.scratch((len(nodes) + (1 + n if by.widens else 0)) * width)
                result = out = MPI.Get_address(recv) + start * itemsize
                if by.widens:
                    out = rows + len(nodes) * width
                for row, ranks in enumerate(nodes):
                    first = MPI.Get_address(send) + start * itemsize
                    places = [first + rank * count * itemsize for rank in ranks]
                    if by.widens:
                        for place, at in enumerate(places):
                            places[place] = out + (1 + place) * width
                            by.widen(at, places[place], size)
                    puts = [Put(at, size) for at in places]
                    gets = [Get(r, mine, rows + row * width, size) for r in range(n)]
                    call.exchange(call.transfer(n, size, puts, gets), wide, by.op)
                call.agree()
                if size:
                    blocks = memory_at(rows, len(nodes) * width)
                    along(blocks, memory_at(out, width), size, 0)
                    by.finish(out, result, size)

    return carry_out


def _all_gather(hierarchy: Hierarchy, kind: CallKind) -> Run | None:
    """Gather the blocks of each rail along it; then all blocks on each node."""
    dtype = kind.dtype
    assert dtype is not None
    rail, nodes, mine = hierarchy.rail, hierarchy.nodes, hierarchy.me.place
    if not hierarchy.even:
        return None
    assert rail is not None
    element, width = datatype(dtype), dtype.itemsize
    step = _of_a_block(hierarchy, dtype)
    fits = INT_MAX // hierarchy.group.size()
    rest = mpi.build(kind).run

    def carry_out(send: Buffer, recv: Buffer, count: int, root: int) -> None:
        if count > fits:  # displacements are C ints in most MPIs
            rest(send, recv, count, root)
            return
        with hierarchy.call(kind, 0, count) as call:
            for start in range(0, max(count, 1), step):
                size = min(step, count - start)
                call.exchange(call.transfer(), dtype)
                call.agree()
                own = [send, size, start, element]
                places = [ranks[mine] * count + start for ranks in nodes]
                rail.inner.Allgatherv(own, [recv, ([size] * len(nodes), places), element])
                for ranks in nodes:
                    first = MPI.Get_address(recv) + start * width
                    spans = [Put(first + rank * count * width, size) for rank in ranks]
                    gets = [Get(r, 0, *span) for r, span in enumerate(spans) if r != mine]
                    call.exchange(call.transfer(1, size, [spans[mine]], gets), dtype)

    return carry_out


def _of_a_block(hierarchy: Hierarchy, dtype: DType) -> int:
    """Return the elements of each block that are carried at a time."""
    blocks = max(len(hierarchy.nodes), len(hierarchy.here))
    return max(1, min(CHUNK, TOGETHER // blocks) // dtype.itemsize)


_BUILDERS: dict[str, Callable[[Hierarchy, CallKind], Run | None]] = {
    "all_reduce": _reduction,
    "reduce": _reduction,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
}

ROUTE = Route(
    __name__,
    "node by node, then between them",
    Serves(tuple(_BUILDERS), combines=has_loop),
    _build,
    Needs("nodes", "several nodes, at least one with several ranks, and the C library"),
)
