"""MPI helpers that the routes share: datatypes, messages, exchanges, and texts of errors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Buffer, Bytes
from mpicoll.core.groups import ProcessGroup, state
from mpicoll.dtypes import DType, by_name
from mpicoll.errors import MismatchError, MPIError
from mpicoll.failures import lost_ranks
from mpicoll.output import format_count

#: The largest count that every MPI takes (MPI-3 counts are C ints).
INT_MAX = 2**31 - 1

Message = list[Any]

_derived: dict[tuple[str, int], MPI.Datatype] = {}


def scratch(group: ProcessGroup, nbytes: int) -> Bytes:
    """Return ``nbytes`` bytes of the memory that a group's routes share, which grows as needed."""
    found: Bytes | None = group.resources.find("scratch")
    if found is None or found.nbytes < nbytes:
        found = group.resources.replace("scratch", np.empty(nbytes, np.uint8))
    return found[:nbytes]


def datatype(dtype: DType) -> MPI.Datatype:
    """Return the MPI datatype with which elements of ``dtype`` are sent."""
    found: MPI.Datatype = getattr(MPI, dtype.mpi)
    return found


def message(buffer: Buffer, count: int, dtype: DType, start: int = 0) -> Message:
    """Return ``count`` elements of ``buffer`` from element ``start`` on, as mpi4py takes them. A
    count beyond a C int becomes one element of a derived datatype, which every MPI moves.
    """
    if count <= INT_MAX:
        return [buffer, count, start, datatype(dtype)]
    begin = MPI.Get_address(buffer) + start * dtype.itemsize
    return [MPI.buffer.fromaddress(begin, count * dtype.itemsize), 1, _many(dtype, count)]


def _many(dtype: DType, count: int) -> MPI.Datatype:
    """Return a committed datatype of ``count`` elements: whole blocks, and the rest behind them."""
    key = (dtype.mpi, count)
    found = _derived.get(key)
    if found is None:
        element, block = datatype(dtype), 2**30
        whole, rest = divmod(count, block)
        blocks = element.Create_contiguous(block)
        found = MPI.Datatype.Create_struct(
            [whole, rest], [0, whole * block * dtype.itemsize], [blocks, element]
        ).Commit()
        blocks.Free()
        # Freed with the last message that has it: others may be made before that one is through.
        weakref.finalize(found, MPI.Datatype.fromhandle(found.handle).Free).atexit = False
        if len(_derived) >= 16:
            _derived.pop(next(iter(_derived)))
        _derived[key] = found
    return found


def exchange(
    comm: MPI.Intracomm,
    sends: Sequence[Message | None],
    receives: Sequence[Message | None],
    tag: int = 0,
) -> None:
    """Send ``sends[r]`` to each other rank r and receive ``receives[r]``; None is nothing.

    Raises MismatchError, after all messages, if a sender has sent fewer elements. Pairwise: in step
    k rank i sends to rank i + k and receives from rank i - k, so that not all ranks start with the
    same (Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005,
    section 4.4). A step sends and receives at once, so nothing deadlocks.
    """
    n, me = len(sends), comm.Get_rank()
    status = MPI.Status()
    short = None
    for step in range(1, n):
        target, source = (me + step) % n, (me - step) % n
        out, into = sends[target], receives[source]
        if into is None:
            if out is not None:
                comm.Send(out, target, tag)
            continue
        if out is None:
            comm.Recv(into, source, tag, status)
        else:
            comm.Sendrecv(out, target, tag, into, source, tag, status)
        if short is None and status.Get_count(into[-1]) != into[1]:
            short = source, status.Get_count(into[-1]), into[1]
    if short is not None:  # raised after all messages of this rank are sent
        raise MismatchError(
            f"exchange: rank {me} of the group expected {format_count(short[2], 'element')} from "
            f"rank {short[0]}, which sent {short[1]}"
        )


# --- bytes of sizes that only their sender knows ------------------------------------------------

_BYTE = by_name["uint8"]
_NOTHING = np.empty(0, np.uint8)


def broadcast_bytes(comm: MPI.Intracomm, own: Bytes, root: int) -> Bytes:
    """Return the root's bytes, on every rank."""
    size = np.array([own.nbytes], np.int64)
    comm.Bcast(size, root)
    whole = own if comm.Get_rank() == root else np.empty(int(size[0]), np.uint8)
    comm.Bcast(message(whole, whole.nbytes, _BYTE), root)
    return whole


def all_gather_bytes(comm: MPI.Intracomm, own: Bytes) -> list[Bytes]:
    """Return the bytes of every rank, on every rank."""
    sizes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([own.nbytes], np.int64), sizes)
    return _exchange_bytes(comm, [own] * len(sizes), sizes)


def gather_bytes(comm: MPI.Intracomm, own: Bytes, root: int) -> list[Bytes]:
    """Return the bytes of every rank on the root; an empty list on other ranks."""
    n, is_root = comm.Get_size(), comm.Get_rank() == root
    sizes = np.zeros(n, np.int64)
    comm.Gather(np.array([own.nbytes], np.int64), sizes if is_root else None, root)
    found = _exchange_bytes(comm, [own if r == root else _NOTHING for r in range(n)], sizes)
    return found if is_root else []


def scatter_bytes(comm: MPI.Intracomm, wholes: Sequence[Bytes] | None, root: int) -> Bytes:
    """Return this rank's entry of the root's list of bytes."""
    n, size = comm.Get_size(), np.empty(1, np.int64)
    sizes = None if wholes is None else np.array([one.nbytes for one in wholes], np.int64)
    comm.Scatter(sizes, size, root)
    outs = [_NOTHING] * n if wholes is None else wholes
    return _exchange_bytes(comm, outs, [size[0] if r == root else 0 for r in range(n)])[root]


def _exchange_bytes(comm: MPI.Intracomm, outs: Sequence[Bytes], sizes: Any) -> list[Bytes]:
    """Send ``outs[r]`` to each rank r; return the ``sizes[r]`` bytes that it sends to this rank."""
    me = comm.Get_rank()
    found = [outs[r] if r == me else np.empty(size, np.uint8) for r, size in enumerate(sizes)]
    sends, receives = (
        [
            message(one, one.nbytes, _BYTE) if one.nbytes and r != me else None
            for r, one in enumerate(side)
        ]
        for side in (outs, found)
    )
    exchange(comm, sends, receives)
    return found


def translate_error(error: Exception, name: str, group: ProcessGroup) -> Exception:
    """Convert an exception of MPI to MPIError, or to the group's error if a rank is lost. Return
    any other exception unchanged.
    """
    if not isinstance(error, MPI.Exception):
        return error
    if lost_ranks.is_fault_tolerant() and lost_ranks.check(group):
        return group.failure()
    text = error.Get_error_string()
    cause = (
        "usual cause: a rank called with other sizes or has exited; "
        "set_debug_level(DebugLevel.DETAIL) compares every call"
    )
    if any(message in text for message in _NO_COMMUNICATORS):
        cause = (
            "each group uses two communicators, and libraries of the MPICH family have 2,048: "
            f"this process has {len(state.groups)} groups; destroy unused groups with "
            "destroy_process_group(group)"
        )
    return MPIError(
        f"{name} on rank {group.rank()} of group {group.group_name}: MPI: {text} ({cause})",
        error.Get_error_class(),
    )


#: Messages of the MPICH family without context ids that are free on all ranks.
_NO_COMMUNICATORS = "Too many communicators", "Cannot allocate context ID"
