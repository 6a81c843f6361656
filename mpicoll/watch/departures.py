"""Ranks that ended without destroy_process_group, told to those who may be waiting for them.

Python does not tell anybody with what exit code it ends: ``raise SystemExit(1)`` looks like the
end of a script. A rank that ends says how many collectives it has begun in each group. Who waits in
a later one waits in vain, and knows it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.groups import ProcessGroup

__all__ = ["announce", "lock", "look", "missing"]

#: Messages that nobody may ever receive, with what they hold.
_loose: list[tuple[MPI.Request, Any]] = []
#: Held while a group's announcements are looked for, and while its communicators are freed.
lock = threading.Lock()


def announce(group: ProcessGroup) -> None:
    """Tells some members that this rank ends.

    The ranks at distances of powers of two, both ways: few messages in a large group, all others
    in a small one. One rank that waits and hears of it is enough to end the job.
    """
    n, me = group.size(), group.rank()
    reach = [2**k for k in range(n.bit_length()) if 2**k < n]
    begun = np.array([group.begun], np.int64)
    for other in {(me + sign * distance) % n for distance in reach for sign in (1, -1)}:
        request = group.messages.Isend(begun, other, group.leave_tag)
        request.Test()
        _loose.append((request, begun))


def look(group: ProcessGroup) -> None:
    """Takes in what ranks have announced: their group rank and the collectives they began."""
    from mpi4py import MPI

    status = MPI.Status()
    with lock:
        while group.closed is None and group.messages.Iprobe(
            MPI.ANY_SOURCE, group.leave_tag, status
        ):
            begun = np.zeros(1, np.int64)
            source = status.Get_source()
            group.messages.Irecv(begun, source, group.leave_tag).Wait()
            group.departed[source] = int(begun[0])


def missing(group: ProcessGroup) -> list[int]:
    """Global ranks that ended before the collective that this rank is in."""
    look(group)
    return [group.ranks[r] for r, begun in group.departed.items() if begun < group.begun]
