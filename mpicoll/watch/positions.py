"""Where a rank is among a group's calls, told to those who may be waiting for it.

A rank tells its position when it ends, when it destroys the default group, and when it has been
waiting in a call for a while. Who hears it may find that the other will not come, for it has ended
before this call, or that the two have made different calls: then both may wait for ever, each in
another call, and no comparison will ever be reached.
"""

from __future__ import annotations

import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll import communicators
from mpicoll.watch.consistency import digest, words

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "DESTROYS", "ENDS", "GOES_ON", "PATIENCE", "Position", "differing", "end_together", "left",
    "lock", "look", "missing", "tell",
]  # fmt: skip


class Position(NamedTuple):
    """What a rank says of itself. Numbers of 64 bits, for they travel as such.

    group:   stands for the group's name: a message may be left over from a group that is gone.
    leaving: GOES ON, ENDS or DESTROYS, see ``tell``.
    begun, formed: collectives that it has begun, and those of them that are not compared.
    since:   the number of the call before which the ranks' calls were last compared.
    number, kind, sizes, root: of its last call that is compared.
    calls:   the digest of its calls from ``since`` to ``number``.
    """

    group: int
    leaving: int
    begun: int
    formed: int
    since: int
    number: int
    kind: int
    sizes: int
    root: int
    calls: int


#: Messages that nobody may ever receive, with what they hold.
_loose: list[tuple[MPI.Request, Any]] = []
#: Held while a group's messages are looked for, and while its communicators are freed.
lock = threading.Lock()
#: Seconds that a rank which destroys the default group waits for the others' positions in all of
#: its groups. Who comes later finds this one's.
PATIENCE = 1.0


#: A rank makes more calls in a group; it makes no more, because it ends without a destroy; it makes
#: no more, because it destroys its groups.
GOES_ON, ENDS, DESTROYS = range(3)


def tell(group: ProcessGroup, leaving: int = GOES_ON) -> None:
    """Tells some members where this rank is.

    The ranks at distances of powers of two, both ways: few messages in a large group, all others
    in a small one. One rank that waits and hears of it is enough to end the job.
    """
    mine = np.array(_position(group, leaving), np.int64)
    with lock:
        if group.closed is not None:
            return
        for other in _neighbours(group):
            _loose.append((group.messages.Isend(mine, other, group.leave_tag), mine))
        _loose[:] = [(request, kept) for request, kept in _loose if not request.Test()]


def _neighbours(group: ProcessGroup) -> set[int]:
    n, me = group.size(), group.rank()
    reach = [2**k for k in range(n.bit_length()) if 2**k < n]
    return {(me + sign * distance) % n for distance in reach for sign in (1, -1)}


def _position(group: ProcessGroup, leaving: int) -> Position:
    calls = tuple(group.recent)  # whole, whatever the thread that makes calls does meanwhile
    counted = group.begun, group.formed
    return Position(_mark(group), leaving, *counted, calls[0][0], *calls[-1], digest(calls))


def _mark(group: ProcessGroup) -> int:
    return zlib.crc32(group.group_name.encode())


def look(group: ProcessGroup) -> None:
    """Takes in what ranks have told."""
    from mpi4py import MPI

    status = MPI.Status()
    try:
        with lock:
            while group.closed is None and group.messages.Iprobe(
                MPI.ANY_SOURCE, group.leave_tag, status
            ):
                box = np.zeros(len(Position._fields), np.int64)
                source = status.Get_source()
                group.messages.Irecv(box, source, group.leave_tag).Wait()
                found = Position(*box.tolist())
                if found.group == _mark(group):
                    group.positions[source] = found
    except MPI.Exception as error:
        if not communicators.reports_lost_rank(error):  # that is for losses.look
            raise


def left(group: ProcessGroup, how: tuple[int, ...] = (ENDS, DESTROYS)) -> set[int]:
    """The ranks, in the group, that make no more calls, as far as ``look`` has heard."""
    return {rank for rank, position in list(group.positions.items()) if position.leaving in how}


def missing(group: ProcessGroup, catches: bool) -> list[int]:
    """Global ranks that have left before the collective that this rank is in.

    catches: the program may be waiting with a timeout, and go on after it: then only ranks that
    have ended count.
    """
    gone = left(group, (ENDS,) if catches else (ENDS, DESTROYS))
    return [group.ranks[rank] for rank in gone if group.positions[rank].begun < group.begun]


def differing(group: ProcessGroup) -> str:
    """Which rank has made other calls than this one since the last comparison, in words; "" where
    none has, as far as ``look`` has heard.
    """
    formed, calls = group.formed, tuple(group.recent)
    if formed != group.formed:  # this rank goes on just now
        return ""
    for rank, position in list(group.positions.items()):
        if position.since != calls[0][0]:
            continue
        ahead = position.number - calls[-1][0]
        if ahead * (position.formed - formed) < 0:
            other, here = _call(*position[5:9]), _call(*calls[-1])
            if ahead < 0:
                other = f"making another group after {other}"
            else:
                here = f"making another group after {here}"
            return (
                f"the calls of group {group.group_name} do not belong together: rank "
                f"{group.ranks[rank]}: {other}; here: {here}"
            )
        if ahead > 0:  # this rank may yet make the same
            continue
        before = tuple(call for call in calls if call[0] <= position.number)
        if digest(before) != position.calls:
            return _words(group, rank, position, before)
    return ""


def _words(group: ProcessGroup, rank: int, position: Position, calls: tuple[Any, ...]) -> str:
    theirs = _call(*position[5:9])
    here = _call(*calls[-1])
    other = group.ranks[rank]
    if here == theirs:
        return (
            f"rank {other} of group {group.group_name} has made other calls than this rank between "
            f"call {position.since} and call {position.number}, {here}"
        )
    return (
        f"the calls of group {group.group_name} do not belong together: rank {other}: {theirs}; "
        f"here: {here}"
    )


def _call(number: int, kind: int, sizes: int, root: int) -> str:
    return f"call {number}, {words((number, kind, sizes, root))}"


def end_together(group: ProcessGroup, end: float) -> tuple[bool, str]:
    """The last comparison, of ranks that destroy all groups: without it nobody would find that one
    has made a call more than the others in the end.

    Waits for others until the time ``end``, by time.monotonic, and no longer. Returns whether all
    were there whose positions this rank gets, so that no message is under way any more, and what is
    wrong, "" for nothing.
    """
    tell(group, DESTROYS)
    expected = _neighbours(group)
    pause = 1e-6
    while True:
        look(group)
        if expected <= left(group) or time.monotonic() > end:
            break
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    mine = _position(group, DESTROYS)
    for rank in sorted(left(group)):
        theirs = group.positions[rank]
        if theirs.since == mine.since and theirs[5:] != mine[5:]:
            return False, (
                f"rank {group.rank()} of group {group.group_name}: the ranks made different calls "
                f"after call {mine.since}: the last of rank {rank} is {_call(*theirs[5:9])}; here "
                f"it is {_call(*mine[5:9])}. What these calls gave may be wrong. "
                "MPICOLL_DEBUG=DETAIL compares every call before it is carried out"
            )
    return expected <= left(group), ""
