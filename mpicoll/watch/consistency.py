"""Comparing the ranks' calls, so that a mismatch is an error on every rank and no silent garbage.

MPI does not check that ranks agree on primitive, dtype, operation and count: some libraries abort,
some reduce integers as floats. The first calls of a group are compared, and then one in a stride:
a loop that goes wrong is found and a loop that is right pays next to nothing. With
DebugLevel.DETAIL every call is compared. Which calls are compared depends on their number in the
group alone, so that all ranks compare at the same moment.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import neg
from typing import TYPE_CHECKING

from mpicoll.errors import MismatchError
from mpicoll.watch.levels import DebugLevel, get_debug_level

if TYPE_CHECKING:
    from mpicoll.calls import Plan
    from mpicoll.groups import ProcessGroup

__all__ = ["FIRST", "STRIDE", "check", "listed", "of_call", "of_task"]

#: The first calls of a group that are compared, and the stride after them.
FIRST, STRIDE = 64, 64


#: What is compared, and how it is told.
Record = tuple[int, int, int, int, int]


def check(group: ProcessGroup, record: Record, tell: Callable[[], str]) -> None:
    """Compares this call with the other ranks'; raises MismatchError on all of them alike.

    Called by all ranks for the same number of call, when it is due, or besides. ``tell()`` puts
    this rank's call in words.
    """
    number = group.sequence
    if number >= group.next_check:
        every = number < FIRST or get_debug_level() is DebugLevel.DETAIL
        group.next_check = number + (1 if every else STRIDE)
    if group.size() == 1 or _agreed(group, record):
        return
    raise MismatchError(
        f"rank {group.rank()} of group {group.group_name}: the ranks made calls that do not belong "
        f"together as call {number} of the group: {listed(group.comm.allgather(tell()))}"
    )


def listed(texts: Iterable[str]) -> str:
    """What each rank, in the order of the ranks, says of its call; the same words once."""
    where: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        where.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in where.items()
    )


def _agreed(group: ProcessGroup, record: Record) -> bool:
    """All ranks have the same record. One reduction tells: the greatest is also the least."""
    from mpi4py import MPI

    both = array("q", (*record, *map(neg, record)))  # NumPy takes three times as long
    group.comm.Allreduce(MPI.IN_PLACE, [both, MPI.INT64_T], MPI.MAX)
    half = len(record)
    return all(most == -least for most, least in zip(both[:half], both[half:], strict=True))


def of_call(plan: Plan, root: int, counts: Sequence[int]) -> tuple[Record, Callable[[], str]]:
    """The record of a primitive's call; counts are what all ranks must agree on of the sizes."""
    primitive, dtype, op = plan.primitive, plan.dtype, plan.op
    record = (
        primitive.code,
        -1 if dtype is None else dtype.code | plan.on_device << 8,
        -1 if op is None else op.code,
        root,
        zlib.crc32(repr(list(counts)).encode()),
    )
    return record, lambda: _text(plan, root, counts)


def _text(plan: Plan, root: int, counts: Sequence[int]) -> str:
    words = [plan.primitive.name]
    if plan.dtype is not None:
        words.append(f"of {plan.dtype}")
    if plan.on_device:
        words.append("on a device")
    if counts:
        words.append(f"with {' + '.join(map(str, counts))} elements")
    if plan.op is not None:
        words.append(plan.op.name)
    if plan.primitive.root:
        words.append(f"{plan.primitive.root} {root}")
    return " ".join(words)


def of_task(name: str, root: int) -> tuple[Record, Callable[[], str]]:
    """The record of a call that is no primitive."""
    text = name if root < 0 else f"{name} with root {root}"
    return (-2, -1, -1, root, zlib.crc32(name.encode())), lambda: text
