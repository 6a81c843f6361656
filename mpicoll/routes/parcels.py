"""What each rank puts up for the others in a call, and what it takes of theirs: for routes through
memory that all ranks see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import View, address
from mpicoll.core.calls import Blocks
from mpicoll.core.signature import number_of
from mpicoll.errors import MismatchError
from mpicoll.primitives import Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Given", "Parcel", "Taken", "parcel_of"]


class Given(NamedTuple):
    """A block that a rank puts into its slot: where it is, and how many elements it has."""

    address: int
    elements: int


class Taken(NamedTuple):
    """A block that a rank gets: whose, at which place in his slot, where to, how many elements."""

    rank: int
    place: int
    address: int
    elements: int


class Parcel(NamedTuple):
    """One rank's part of a call. A round carries a piece of every block.

    places: blocks in the slot of a rank that has most of them.
    most:   elements of the largest block of all ranks.
    total:  what all ranks must have alike of the sizes, as a number; see mpicoll.core.signature.
    gives, takes: blocks. Where there is an operation, the blocks taken are combined into the place
            of the first.
    """

    places: int
    most: int
    total: int
    gives: Sequence[Given]
    takes: Sequence[Taken]


def parcel_of(
    primitive: Primitive,
    group: ProcessGroup,
    send: View | None,
    recv: View | None,
    root: int,
    blocks: Blocks | None,
) -> Parcel:
    """This rank's part of a call, on contiguous arrays; every rank calls.

    Raises MismatchError, on all ranks, where blocks of all_to_all do not fit together.
    """
    return _PARCELS[primitive.name](group, send, recv, root, blocks)


def _broadcast(group: Any, send: Any, recv: Any, root: int, blocks: Any) -> Parcel:
    at, count = address(recv), recv.count
    mine = group.rank() == root
    gives = [Given(at, count)] if mine else []
    takes = [] if mine else [Taken(root, 0, at, count)]
    return Parcel(1, count, count, gives, takes)


def _reduce(group: Any, send: Any, recv: Any, root: int, blocks: Any) -> Parcel:
    at, count = address(recv), recv.count
    ranks = range(group.size()) if group.rank() == root else ()
    takes = [Taken(rank, 0, at, count) for rank in ranks]
    return Parcel(1, count, count, [Given(at, count)], takes)


def _gather(group: Any, send: Any, recv: Any, root: int, blocks: Any) -> Parcel:
    counts = [send.count] * group.size() if blocks is None else list(blocks.receives)
    total = sum(counts) if blocks is None else number_of(counts)
    takes = []
    if recv is not None:
        starts = accumulate(counts[:-1], initial=0)
        takes = [
            Taken(rank, 0, address(recv) + start * recv.dtype.itemsize, count)
            for rank, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
    return Parcel(1, max(counts), total, [Given(address(send), send.count)], takes)


def _scatter(group: Any, send: Any, recv: Any, root: int, blocks: Any) -> Parcel:
    count = recv.count
    takes = [Taken(root, group.rank(), address(recv), count)]
    return Parcel(group.size(), count, count, _blocks(send, [count] * group.size()), takes)


def _reduce_scatter(group: Any, send: Any, recv: Any, root: int, blocks: Any) -> Parcel:
    count = recv.count
    counts = [count] * group.size() if blocks is None else list(blocks.sends)
    total = count if blocks is None else number_of(counts)
    takes = [Taken(rank, group.rank(), address(recv), count) for rank in range(group.size())]
    return Parcel(group.size(), max(counts), total, _blocks(send, counts), takes)


def _all_to_all(group: Any, send: Any, recv: Any, root: int, blocks: Any) -> Parcel:
    """No rank knows the others' sizes: they are exchanged first."""
    sends, theirs = np.array(blocks.sends, np.int64), np.empty(group.size(), np.int64)
    group.inner.Alltoall(sends, theirs)
    wrong = np.flatnonzero(theirs != blocks.receives)
    most = np.array([max(blocks.sends), len(wrong)], np.int64)
    group.inner.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    if most[1]:
        rank = int(wrong[0]) if len(wrong) else -1
        raise MismatchError(
            f"all_to_all on rank {group.rank()} of group {group.group_name}: "
            + (
                f"expected {blocks.receives[rank]} elements from rank {rank}, which sends "
                f"{theirs[rank]}"
                if len(wrong)
                else "other ranks' block sizes do not fit together"
            )
        )
    starts = accumulate(blocks.receives[:-1], initial=0)
    takes = [
        Taken(rank, group.rank(), address(recv) + start * recv.dtype.itemsize, count)
        for rank, (start, count) in enumerate(zip(starts, blocks.receives, strict=True))
    ]
    return Parcel(group.size(), int(most[0]), 0, _blocks(send, blocks.sends), takes)


def _blocks(send: Any, counts: Sequence[int]) -> list[Given]:
    """The blocks of an input that lie one after another; none of none."""
    if send is None:
        return []
    starts = accumulate(counts[:-1], initial=0)
    size = send.dtype.itemsize
    return [
        Given(address(send) + start * size, count)
        for start, count in zip(starts, counts, strict=True)
    ]


_PARCELS: dict[str, Callable[..., Parcel]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _gather,
    "all_gather_single": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
}
