"""MPI's own collectives: all data movement, and the reductions that MPI computes correctly.

The native fast path calls them without Python (``kernels/src/mpi_calls.c``).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Buffer
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation, NativeCall, Run
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.kernels.calls import LISTS
from mpicoll.kernels.library import address_of, kernels
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.host.lists import count_per_chunk
from mpicoll.routes.route import Route, Serves
from mpicoll.routes.wire import INT_MAX, datatype, message

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

_COMBINED = (
    ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND,
    ReduceOp.BOR, ReduceOp.BXOR,
)  # fmt: skip

#: Maximum number of elements of one MPI reduction. A C int holds the count, and MPI libraries may
#: compute sizes in bytes from it.
MAX_COUNT = 2**28


def reducible(op: ReduceOp, dtype: DType) -> bool:
    """Return whether MPI combines elements of a dtype correctly, with the same bits on every rank.

    Not narrow floats: MPI has no such types, or rounds at every step. Not sums of 8 and 16-bit
    integers: Open MPI's vector code saturates instead of wrapping around (open-mpi/ompi#8045). Not
    the minimum and maximum of floats: MPI does not define the result for NaN, and libraries compare
    in an order that differs between ranks, so results may differ.
    """
    if op not in _COMBINED or dtype.kind is Kind.NARROW_FLOAT:
        return False
    if dtype.kind is Kind.INTEGER and dtype.itemsize < 4 and op is ReduceOp.SUM:
        return False
    return not (dtype.kind is Kind.FLOAT and op in (ReduceOp.MIN, ReduceOp.MAX))


class Collective(Implementation):
    """A collective of MPI; natively one call of MPI's function."""

    def __init__(self, kind: CallKind) -> None:
        super().__init__(_BUILDERS[kind.primitive.name](kind))
        self._kind = kind
        self._plan: Any = None  # the C library has its address

    def native_calls(self) -> Sequence[NativeCall]:
        """Return MPI's function, for counts that ``run`` also passes to MPI as a whole."""
        primitive, group, op, _ = self._kind
        if not can_call(group) or kernels is None:
            return ()
        if group.compared or group.device_error is not None:
            return ()  # Python compares the calls, or checks the devices, first
        self._plan = plan = self._plan or describe(self._kind)
        if plan is None:
            return ()
        max_count = INT_MAX
        if op is not None:
            max_count = MAX_COUNT // (group.size() if primitive.many_in else 1)
        if primitive.listed:
            max_count = min(max_count, count_per_chunk(self._kind))
        address = address_of(kernels.mpi_call), ctypes.addressof(plan)
        return (NativeCall(self, LISTS, *address, end_count=max_count + 1),)

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Raise the error of a failed native call."""
        raise MPI.Exception(-result) if result else MemoryError("no memory for a list of arrays")


def can_call(group: ProcessGroup) -> bool:
    """Return whether the C library may call MPI for a group."""
    is_plain = isinstance(group.inner, MPI.Comm)  # neither serialized nor tested
    return kernels is not None and is_plain and bool(_find_function("MPI_Allreduce"))


def describe(kind: CallKind) -> Any:
    """Return the C library's description of MPI's call; None if it cannot divide the result."""
    assert kernels is not None
    primitive, group, op, dtype = kind
    plan = kernels.MpiPlan(
        function=_find_function(f"MPI_{primitive.mpi}"),
        comm=_encode_handle(group.inner),
        type=_TYPES.get(primitive.mpi, _COMBINE),
        n=group.size(),
        me=group.rank(),
        many_in=primitive.many_in,
        many_out=primitive.many_out,
        lists_in=primitive.listed and primitive.many_in,
        lists_out=primitive.listed and primitive.many_out,
        divisor=1,
    )
    if dtype is not None:
        plan.datatype, plan.size = _encode_handle(datatype(dtype)), dtype.itemsize
    if op is not None:
        plan.op = _encode_handle(_mpi_operation(op, dtype))
        plan.in_place = None if primitive.input else int(MPI.IN_PLACE)
        plan.discards = not kind.combined
        if op is ReduceOp.AVG:
            loop = find_loop(op, dtype)
            if loop is None:
                return None
            plan.format = kernels.format(loop.format.encode())
            plan.numbers_per_element = loop.elements
            plan.divisor = max(1, len(kind.combined))
    return plan


#: The types of functions in mpi_calls.c by their names in mpi4py; other functions combine.
_COMBINE = 2
_TYPES = {"Barrier": 0, "Bcast": 1, "Reduce": 3, "Allgather": 4, "Gather": 5, "Scatter": 5}


def _encode_handle(handle: MPI.Comm | MPI.Datatype | MPI.Op) -> int:
    """Return an MPI handle, a C int or a pointer, as a signed integer."""
    raw = ctypes.string_at(MPI._addressof(handle), MPI._sizeof(handle))
    return int.from_bytes(raw, sys.byteorder, signed=True)


@cache
def _find_function(name: str) -> int:
    """Return the address of a function of MPI, as the dynamic linker finds it for mpi4py: in the
    program's own libraries, such as a profiler, then in those of mpi4py; 0 if there is none.
    """
    for path in (None, MPI.__file__):
        with suppress(OSError, AttributeError):
            return address_of(getattr(ctypes.CDLL(path), name))
    return 0


# --- moves --------------------------------------------------------------------------------------


def _broadcast(kind: CallKind) -> Run:
    """Build MPI_Bcast (MPI-4.1 section 6.4)."""
    dtype = kind.dtype
    bcast, element = kind.group.inner.Bcast, datatype(dtype)

    def broadcast(send: None, recv: Buffer, count: int, root: int) -> None:
        if count <= INT_MAX:
            bcast([recv, count, element], root)
        else:
            bcast(message(recv, count, dtype), root)

    return broadcast


def _all_gather(kind: CallKind) -> Run:
    """Build MPI_Allgather, or MPI_Allgatherv for blocks that differ (MPI-4.1 section 6.7)."""
    dtype, comm, me = kind.dtype, kind.group.inner, kind.group.rank()
    allgather, element = comm.Allgather, datatype(dtype)

    def all_gather(send: Buffer, recv: Buffer, count: int, root: int) -> None:
        if count <= INT_MAX:
            allgather([send, count, element], [recv, count, element])
        else:
            allgather(message(send, count, dtype), message(recv, count, dtype))

    def all_gather_any(send: Buffer, recv: Buffer, extent: Extent, root: int) -> None:
        if not isinstance(extent, Blocks):
            all_gather(send, recv, extent, root)
            return
        counts = list(extent.receives)
        *starts, total = accumulate(counts, initial=0)
        own = message(send, counts[me], dtype)
        if total <= INT_MAX:
            comm.Allgatherv(own, [recv, (counts, starts), element])
            return
        into = message(recv, counts[me], dtype, starts[me])
        MPI.COMM_SELF.Sendrecv(own, 0, 0, into, 0, 0)
        for r, start in enumerate(starts):  # displacements are C ints in most MPIs: block by block
            comm.Bcast(message(recv, counts[r], dtype, start), r)

    return all_gather_any if kind.primitive.listed else all_gather


def _rooted(kind: CallKind) -> Run:
    """Build MPI_Gather or MPI_Scatter (MPI-4.1 sections 6.5 and 6.6)."""
    dtype, comm = kind.dtype, kind.group.inner
    call = comm.Gather if kind.primitive.name == "gather" else comm.Scatter

    def rooted(send: Buffer | None, recv: Buffer | None, count: int, root: int) -> None:
        out, into = (None if one is None else message(one, count, dtype) for one in (send, recv))
        call(out, into, root)

    return rooted


def _barrier(kind: CallKind) -> Run:
    """Build MPI_Barrier (MPI-4.1 section 6.3)."""
    group, comm_barrier = kind.group, kind.group.inner.Barrier

    def barrier(send: None, recv: None, extent: Extent, root: int) -> None:
        if not group.compared:  # else the comparison has waited for all ranks
            comm_barrier()

    return barrier


# --- reductions ---------------------------------------------------------------------------------


def _all_reduce(kind: CallKind) -> Run:
    """Build MPI_Allreduce in place (MPI-4.1 section 6.9.6)."""
    dtype, op = kind.dtype, _op(kind)
    reduce_all, n = kind.group.inner.Allreduce, kind.group.size()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)
    in_place, averages = MPI.IN_PLACE, op is ReduceOp.AVG

    def all_reduce(send: None, recv: Buffer, count: int, root: int) -> None:
        if count <= MAX_COUNT:
            reduce_all(in_place, [recv, count, element], combined)
        else:
            for start in range(0, count, MAX_COUNT):
                size = min(MAX_COUNT, count - start)
                reduce_all(in_place, [recv, size, start, element], combined)
        if averages:
            _divide(recv, count, dtype, n)

    return all_reduce


def _reduce(kind: CallKind) -> Run:
    """Build MPI_Reduce, in place on the root (MPI-4.1 section 6.9.1)."""
    dtype, op, group = kind.dtype, _op(kind), kind.group
    comm, n, me = group.inner, group.size(), group.rank()
    element, combined = datatype(dtype), _mpi_operation(op, dtype)

    def reduce(send: None, recv: Buffer, count: int, root: int) -> None:
        for start in range(0, max(count, 1), MAX_COUNT):
            part = [recv, min(MAX_COUNT, count - start), start, element]
            if me == root:
                comm.Reduce(MPI.IN_PLACE, part, combined, root)
            else:
                comm.Reduce(part, None, combined, root)
        if me == root and op is ReduceOp.AVG:
            _divide(recv, count, dtype, n)

    return reduce


def _reduce_scatter(kind: CallKind) -> Run:
    """Build MPI_Reduce_scatter_block (MPI-4.1 section 6.10.1), or MPI_Reduce above MAX_COUNT."""
    dtype, op, group = kind.dtype, _op(kind), kind.group
    comm, n, me = group.inner, group.size(), group.rank()
    reduce_scatter_block = comm.Reduce_scatter_block
    element, combined = datatype(dtype), _mpi_operation(op, dtype)
    fits = MAX_COUNT // n

    def reduce_scatter(send: Buffer, recv: Buffer, count: int, root: int) -> None:
        if count <= fits:
            # mpi4py wants a block's count on either side.
            reduce_scatter_block([send, count, element], [recv, count, element], combined)
        else:
            for start in range(0, count, MAX_COUNT):
                size = min(MAX_COUNT, count - start)
                for r in range(n):
                    into = [recv, size, start, element] if r == me else None
                    comm.Reduce(message(send, size, dtype, r * count + start), into, combined, r)
        if op is ReduceOp.AVG:
            _divide(recv, count, dtype, n)

    return reduce_scatter


def _prefix(kind: CallKind) -> Run:
    """Build MPI_Scan or MPI_Exscan (MPI-4.1 section 6.11)."""
    dtype, op, comm, before = kind.dtype, _op(kind), kind.group.inner, kind.combined
    call = comm.Scan if kind.primitive.name == "scan" else comm.Exscan
    element, combined = datatype(dtype), _mpi_operation(op, dtype)

    def prefix(send: Buffer, recv: Buffer, count: int, root: int) -> None:
        if not before:  # MPI may write undefined values
            recv = np.empty(min(MAX_COUNT, count) * dtype.itemsize, np.uint8)
        for start in range(0, max(count, 1), MAX_COUNT):
            size = min(MAX_COUNT, count - start)
            into = [recv, size, start if before else 0, element]
            call([send, size, start, element], into, combined)
        if op is ReduceOp.AVG and before:
            _divide(recv, count, dtype, len(before))

    return prefix


def _mpi_operation(op: ReduceOp, dtype: DType) -> MPI.Op:
    name = op.mpi_logical if dtype.kind is Kind.BOOL else op.mpi
    assert name is not None
    found: MPI.Op = getattr(MPI, name)
    return found


def _divide(buffer: Buffer, count: int, dtype: DType, n: int) -> None:
    if count:
        flat = np.frombuffer(buffer, dtype.numpy, count)
        if dtype.kind is Kind.COMPLEX:  # by parts: a complex division makes nan of infinity
            flat = flat.view(flat.real.dtype)
        with np.errstate(all="ignore"):
            np.divide(flat, n, out=flat)


def _op(kind: CallKind) -> ReduceOp:
    assert kind.op is not None
    return kind.op


_BUILDERS: dict[str, Callable[[CallKind], Run]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "gather": _rooted,
    "scatter": _rooted,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "scan": _prefix,
    "exscan": _prefix,
    "barrier": _barrier,
}

ROUTE = Route(
    __name__,
    "MPI",
    Serves(tuple(_BUILDERS), combines=reducible, uneven=("all_gather",)),
    Collective,
)
