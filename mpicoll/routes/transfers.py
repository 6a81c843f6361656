"""One rank's part of a call through memory that all ranks see: its puts and its gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.core.plan import Blocks, CallKind, Extent, agreed_sizes
from mpicoll.core.signature import encode_sizes
from mpicoll.errors import MismatchError
from mpicoll.output import format_count
from mpicoll.routes.route import EXCHANGES, MOVES, PREFIXES, REDUCTIONS

__all__ = [
    "TRANSFER_PRIMITIVES", "Get", "Put", "Transfer", "addresses", "cut", "misfit", "transfer_of",
]  # fmt: skip


class Put(NamedTuple):
    """A block that a rank puts into its slot."""

    address: int
    elements: int


class Get(NamedTuple):
    """A block that a rank gets: its rank, its place in that rank's slot, and its destination."""

    rank: int
    place: int
    address: int
    elements: int


class Transfer(NamedTuple):
    """One rank's part of a call. A round carries a piece of every block.

    places: maximum number of blocks in the slot of a rank.
    most:   elements of the largest block of all ranks.
    total:  the sizes that must be equal on all ranks, as a number; see mpicoll.core.signature.
    puts, gets: blocks. If there is an operation, the blocks got are combined into the place of
            the first.
    """

    places: int
    most: int
    total: int
    puts: Sequence[Put]
    gets: Sequence[Get]


#: Operations that ``transfer_of`` supports.
TRANSFER_PRIMITIVES = (*MOVES, *REDUCTIONS[1:], *PREFIXES, *EXCHANGES)


def transfer_of(
    kind: CallKind, send: int | None, recv: int | None, extent: Extent, root: int
) -> Transfer:
    """Return this rank's part of a call on contiguous buffers. All ranks call.

    send, recv: addresses; None if this rank sends or receives nothing, and send of calls in place.

    Raises MismatchError, on all ranks, if a block of all_to_all has two sizes.
    """
    primitive, group, op, dtype = kind
    assert dtype is not None
    n, me, itemsize = group.size(), group.rank(), dtype.itemsize
    blocks = Blocks([extent] * n, [extent] * n) if isinstance(extent, int) else extent
    counts = blocks.sends if primitive.many_in else blocks.receives
    places, place = (n, me) if primitive.many_in else (1, 0)
    most = max(counts) if primitive.even else _compare_sizes(kind, blocks)
    puts: list[Put] = []
    if primitive.root != "src" or me == root:
        source = recv if send is None else send
        assert source is not None
        puts = [*cut(source, counts if primitive.many_in else [counts[me]], itemsize)]
    gets: list[Get] = []
    if recv is not None and (primitive.root != "dst" or me == root):
        if op is not None:
            gets = [Get(rank, place, recv, counts[me]) for rank in kind.combined]
        elif primitive.root != "src":
            received = enumerate(cut(recv, blocks.receives, itemsize))
            gets = [Get(rank, place, *put) for rank, put in received]
        elif me != root or send is not None:
            gets = [Get(root, place, recv, counts[me])]
    return Transfer(places, most, encode_sizes(agreed_sizes(primitive, extent)), puts, gets)


def _compare_sizes(kind: CallKind, blocks: Blocks) -> int:
    """Exchange the sizes of all_to_all, which only their senders know; return the maximum."""
    sends, receives = (np.array(side, np.int64) for side in blocks)
    theirs, comm = np.empty_like(sends), kind.group.tested
    comm.Alltoall(sends, theirs)
    most = np.array([sends.max(), (theirs != receives).any()], np.int64)
    comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    if most[1]:
        wrong = np.flatnonzero(theirs != receives)
        rank = int(wrong[0]) if len(wrong) else None
        raise misfit(kind, rank, *(() if rank is None else (receives[rank], theirs[rank])))
    return int(most[0])


def misfit(kind: CallKind, rank: int | None, expected: int = 0, sent: int = 0) -> MismatchError:
    """Return the error for a block from ``rank``, or between other ranks (None), with two sizes."""
    words = (
        "collective mismatch: other ranks' block sizes differ from the sizes sent"
        if rank is None
        else f"expected {format_count(expected, 'element')} from rank {rank}, which sends {sent}"
    )
    group = kind.group
    return MismatchError(
        f"{kind.primitive} on rank {group.rank()} of group {group.group_name}: {words}"
    )


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
