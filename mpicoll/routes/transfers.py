"""One rank's part of a call through memory that all ranks see: its puts and its gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.core.plan import Blocks, CallKind, Extent
from mpicoll.core.signature import encode_sizes
from mpicoll.errors import MismatchError
from mpicoll.output import format_count

__all__ = [
    "TRANSFER_PRIMITIVES",
    "Get",
    "Put",
    "Transfer",
    "addresses",
    "cut",
    "misfit",
    "transfer_of",
]


#: Of a buffer, or of each in a list.
Address = int | Sequence[int] | None


class Put(NamedTuple):
    """A block that a rank puts into its slot: where it is, and how many elements it has."""

    address: int
    elements: int


class Get(NamedTuple):
    """A block that a rank gets: from which rank, at which place of its slot, where to, how many
    elements.
    """

    rank: int
    place: int
    address: int
    elements: int


class Transfer(NamedTuple):
    """One rank's part of a call. A round carries a piece of every block.

    places: blocks in the slot of a rank that has most of them.
    most:   elements of the largest block of all ranks.
    total:  what all ranks must have alike of the sizes, as a number; see mpicoll.core.signature.
    puts, gets: blocks. If there is an operation, the blocks got are combined into the place of
            the first.
    """

    places: int
    most: int
    total: int
    puts: Sequence[Put]
    gets: Sequence[Get]


def transfer_of(
    kind: CallKind, send: Address, recv: Address, extent: Extent, root: int
) -> Transfer:
    """Return this rank's part of a call on contiguous buffers; every rank calls.

    send, recv: the addresses of the buffers, of all_to_all perhaps of a list of them; None if this
                rank sends or receives nothing, and send of calls in place.

    Raises MismatchError, on all ranks, if a block of all_to_all has two sizes.
    """
    return _TRANSFERS[kind.primitive.name](kind, send, recv, extent, root)


def _broadcast(kind: CallKind, send: None, recv: int, count: int, root: int) -> Transfer:
    mine = kind.group.rank() == root
    puts = [Put(recv, count)] if mine else []
    gets = [] if mine else [Get(root, 0, recv, count)]
    return Transfer(1, count, count, puts, gets)


def _reduce(kind: CallKind, send: None, recv: int, count: int, root: int) -> Transfer:
    ranks = range(kind.group.size()) if kind.group.rank() == root else ()
    gets = [Get(rank, 0, recv, count) for rank in ranks]
    return Transfer(1, count, count, [Put(recv, count)], gets)


def _prefix(kind: CallKind, send: int, recv: int, count: int, root: int) -> Transfer:
    gets = [Get(rank, 0, recv, count) for rank in kind.combined]
    return Transfer(1, count, count, [Put(send, count)], gets)


def _gather(kind: CallKind, send: int, recv: int | None, extent: Extent, root: int) -> Transfer:
    n, me = kind.group.size(), kind.group.rank()
    if isinstance(extent, int):
        counts, total = [extent] * n, n * extent
    else:
        counts, total = list(extent.receives), encode_sizes(extent.receives)
    gets = [] if recv is None else [Get(rank, 0, *put) for rank, put in _cut(kind, recv, counts)]
    return Transfer(1, max(counts), total, [Put(send, counts[me])], gets)


def _scatter(kind: CallKind, send: int | None, recv: int, count: int, root: int) -> Transfer:
    n, me = kind.group.size(), kind.group.rank()
    puts = [] if send is None else [put for _, put in _cut(kind, send, [count] * n)]
    return Transfer(n, count, count, puts, [Get(root, me, recv, count)])


def _reduce_scatter(kind: CallKind, send: int, recv: int, extent: Extent, root: int) -> Transfer:
    n, me = kind.group.size(), kind.group.rank()
    if isinstance(extent, int):
        counts, total = [extent] * n, extent
    else:
        counts, total = list(extent.sends), encode_sizes(extent.sends)
    puts = [put for _, put in _cut(kind, send, counts)]
    gets = [Get(rank, me, recv, counts[me]) for rank in range(n)]
    return Transfer(n, max(counts), total, puts, gets)


def _all_to_all(kind: CallKind, send: int, recv: int, extent: Extent, root: int) -> Transfer:
    """Exchange the sizes, which only their senders know, and return this rank's part."""
    n, me = kind.group.size(), kind.group.rank()
    blocks = Blocks([extent] * n, [extent] * n) if isinstance(extent, int) else extent
    sends, receives = (np.array(side, np.int64) for side in blocks)
    theirs, comm = np.empty_like(sends), kind.group.tested
    comm.Alltoall(sends, theirs)
    most = np.array([sends.max(), (theirs != receives).any()], np.int64)
    comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    if most[1]:
        wrong = np.flatnonzero(theirs != receives)
        rank = int(wrong[0]) if len(wrong) else None
        raise misfit(kind, rank, *(() if rank is None else (receives[rank], theirs[rank])))
    puts = [put for _, put in _cut(kind, send, blocks.sends)]
    gets = [Get(rank, me, *put) for rank, put in _cut(kind, recv, blocks.receives)]
    return Transfer(n, int(most[0]), 0, puts, gets)


def misfit(kind: CallKind, rank: int | None, expected: int = 0, sent: int = 0) -> MismatchError:
    """Return the error for a block from ``rank`` to this rank, or between other ranks (None), whose
    sizes differ on its sender and receiver.
    """
    words = (
        "collective mismatch: other ranks' block sizes differ from the sizes sent"
        if rank is None
        else f"expected {format_count(expected, 'element')} from rank {rank}, which sends {sent}"
    )
    group = kind.group
    return MismatchError(
        f"{kind.primitive} on rank {group.rank()} of group {group.group_name}: {words}"
    )


def _cut(kind: CallKind, start: Any, counts: Sequence[int]) -> Iterator[tuple[int, Put]]:
    """Yield the blocks of a buffer, each with its rank."""
    assert kind.dtype is not None
    return enumerate(cut(start, counts, kind.dtype.itemsize))


def cut(start: int | Sequence[int], counts: Sequence[int], itemsize: int) -> Iterator[Put]:
    """Yield the blocks of one buffer at an address, or of several buffers."""
    if isinstance(start, int):
        start = [start + before * itemsize for before in accumulate(counts[:-1], initial=0)]
    return map(Put, start, counts)


def addresses(buffer: Any) -> Any:
    """Return the address of a buffer, or the addresses of a list of buffers. None returns None."""
    if isinstance(buffer, list):
        return [MPI.Get_address(each) for each in buffer]
    return None if buffer is None else MPI.Get_address(buffer)


_TRANSFERS: dict[str, Callable[[CallKind, Any, Any, Any, int], Transfer]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _gather,
    "all_gather_single": _gather,
    "gather": _gather,
    "scan": _prefix,
    "exscan": _prefix,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
}

#: Operations that this module supports.
TRANSFER_PRIMITIVES = tuple(_TRANSFERS)
