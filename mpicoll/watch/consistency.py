"""Comparing the ranks' calls, so that a mismatch is an error on every rank and no silent garbage.

MPI does not check that ranks agree on primitive, dtype, operation, root and count: some libraries
abort, some reduce integers as floats, some deliver one call's message to another call. So every
rank keeps a record of its calls, and now and then all ranks compare a digest of those since the
last comparison: a loop that goes wrong is found within a stride of calls, wherever in it the first
wrong call was, and a loop that is right pays next to nothing (docs/performance.md has the figures).

Which calls begin with a comparison depends only on what all ranks know: the number of the call in
the group, and the level that they agreed on in the comparison before. Comparisons have a context of
their own, the collectives of the communicator that otherwise carries the user's messages, so that
they meet no data of ranks that are a call ahead or behind.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpicoll.core.signature import compared, rooted_kind, told
from mpicoll.errors import MismatchError
from mpicoll.watch.levels import DebugLevel, get_debug_level

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["FIRST", "STRIDE", "check", "digest", "drop", "listed", "words"]

#: The first calls of a group, each of which is compared, and the stride after them.
FIRST, STRIDE = 64, 64


_DETAIL = int(DebugLevel.DETAIL)

#: One call: its number in the group, its kind without the root, the number of its sizes, the root.
#: The first of a record is the last call before it, and stands for all before.
Call = tuple[int, int, int, int]


def digest(calls: tuple[Call, ...]) -> int:
    """62 bits that differ, as good as always, where calls do; the same on every rank.

    Python's hash of a tuple of ints depends neither on the process nor, from 3.8 on, the version.
    """
    return hash(calls) & (1 << 62) - 1


def check(group: ProcessGroup) -> None:
    """Compares the calls since the last comparison with the other ranks'.

    All ranks call it with the group's lock held, before the call that is last in their records.
    Raises MismatchError on all of them alike.
    """
    if group.broken is not None:
        raise group.failure()
    calls = tuple(group.recent)
    number = calls[-1][0]
    level = int(get_debug_level())
    agreed = True
    if group.size() > 1:
        agreed, level = _compare(group, calls, level)
    every = number < FIRST or level == _DETAIL
    group.next_check = number + (1 if every else STRIDE)
    group.recent = [calls[-1] if agreed else (number, -1, 0, 0)]
    if not agreed:
        raise MismatchError(_difference(group, calls))


def drop(group: ProcessGroup) -> None:
    """Takes the call at hand off the record: the ranks' calls differed, and all of them have an
    error for it. The calls before it are still to be compared.
    """
    *calls, (number, *_) = group.recent
    if calls:  # else it is a comparison that has found it, and begun a new record
        group.recent = [(number, -1, digest(tuple(calls)), 0)]


def _compare(group: ProcessGroup, calls: tuple[Call, ...], level: int) -> tuple[bool, int]:
    """Whether all ranks have the same calls, and the highest of their levels."""
    mine = digest(calls)
    if shared := group.resources.find("shared"):  # it takes a third of the time of MPI
        _, kind, _, root = calls[-1]
        if shared.compare(compared(kind, root, level), mine):
            return True, level
    MPI = sys.modules["mpi4py.MPI"]  # an import statement takes as long as the rest
    # One reduction: where all are alike the greatest is also the least.
    both = array("q", (mine, -mine, level))  # NumPy takes three times as long
    group.messages.Allreduce(MPI.IN_PLACE, [both, 3, MPI.INT64_T], MPI.MAX)
    return both[0] == -both[1], both[2]


def _difference(group: ProcessGroup, calls: tuple[Call, ...]) -> str:
    """The first call that the ranks do not have alike, and what each has in its place.

    If others came after it, their results are wrong, and messages may be left in the group's
    communicator: the group is of no more use.
    """
    everybody = group.messages.allgather([digest(calls[: n + 1]) for n in range(len(calls))])
    alike = 0
    while len({each[alike] if alike < len(each) else None for each in everybody}) == 1:
        alike += 1
    mine = (calls[alike][0], words(calls[alike])) if alike < len(calls) else (0, words(_NOTHING))
    said = group.messages.allgather(mine)
    number = max(number for number, _ in said)
    text = (
        f"rank {group.rank()} of group {group.group_name}: the ranks made calls that do not belong "
        f"together as call {number} of the group: {listed(text for _, text in said)}"
    )
    later = max(map(len, everybody)) - alike - 1
    if later > 0:
        text += (
            f". This was found {later} calls later, and what the group's calls gave since then may "
            "be wrong on any rank; the group cannot be used any more. MPICOLL_DEBUG=DETAIL "
            "compares every call before it is carried out"
        )
        group.broken = MismatchError(text)
        group.next_check = 0
    return text


def words(call: Call) -> str:
    """A call in words."""
    number, kind, sizes, root = call
    if number == 0:
        return "no call"
    return "a call that differed" if kind < 0 else told(rooted_kind(kind, root), sizes)


#: What stands for the calls before the first.
_NOTHING: Call = (0, 0, 0, 0)


def listed(texts: Iterable[str]) -> str:
    """What each rank, in the order of the ranks, says of its call; the same words once."""
    where: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        where.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in where.items()
    )
