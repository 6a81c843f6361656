"""One rank's part of a call through memory that all ranks see: its puts and its gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mpi4py import MPI

from mpicoll.core.plan import CallKind
from mpicoll.errors import MismatchError
from mpicoll.output import format_count


class Put(NamedTuple):
    """A block that a rank puts into its slot."""

    address: int
    elements: int


class Get(NamedTuple):
    """A block that a rank gets: from which rank, its index in that rank's slot, and to where."""

    rank: int
    place: int
    address: int
    elements: int


class Transfer(NamedTuple):
    """One rank's part of a call. A round carries a piece of every block."""

    places: int  # maximum number of blocks in the slot of a rank
    most: int  # elements of the largest block of all ranks
    total: int  # the sizes that must be equal on all ranks, as a number; see mpicoll.core.signature
    #: Blocks. If there is a reduce operation, the blocks of ``gets`` are combined at the address of
    #: the first.
    puts: Sequence[Put]
    gets: Sequence[Get]


def misfit(kind: CallKind, rank: int | None, expected: int = 0, sent: int = 0) -> MismatchError:
    """Return the error of a block whose size differs on sender (``rank``, or None) and receiver."""
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
