"""monitored_barrier: a barrier that says who is missing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["monitored_barrier"]

# Collectives have a context of their own, and the group's exchanges use tag 0.
_ARRIVED, _VERDICT = 1, 2
#: Seconds beyond the timeout that the others give rank 0 to tell them its verdict.
_GRACE = 2.0


def monitored_barrier(group: ProcessGroup, limit: float, wait_all: bool) -> None:
    """Returns once all ranks of the group have called, or raises CollectiveTimeoutError.

    limit: seconds that rank 0 waits for the others. wait_all: name every missing rank, not only
    the first. Rank 0 tells the others the verdict; a rank that comes too late learns it then.
    """
    group.monitored += 1
    if group.rank() == 0:
        _lead(group, limit, wait_all)
    else:
        _follow(group, limit)


class _Inbox:
    """The messages of call ``number`` from some ranks; older ones are of calls that failed."""

    def __init__(self, comm: MPI.Intracomm, sources: Iterable[int], tag: int, number: int) -> None:
        self.comm, self.tag, self.number = comm, tag, number
        self.boxes = {source: np.zeros(2, np.int64) for source in sources}
        self.pending = {source: self._post(source) for source in self.boxes}

    def _post(self, source: int) -> MPI.Request:
        return self.comm.Irecv(self.boxes[source], source, self.tag)

    def wait(self, moment: float) -> list[int]:
        """Waits until ``moment``; the ranks that no message came from."""
        pause = 1e-5
        while True:
            late = time.monotonic() > moment
            for source, request in list(self.pending.items()):
                if not request.Test():
                    continue
                if self.boxes[source][0] == self.number:
                    del self.pending[source]
                else:
                    self.pending[source] = self._post(source)
            if late or not self.pending:
                break
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        missing = sorted(self.pending)
        for request in self.pending.values():
            request.Cancel()
            request.Wait()
        return missing


#: Sends that were not complete at once, with what they send.
_loose: list[tuple[MPI.Request, Any]] = []


def _post(comm: MPI.Intracomm, target: int, tag: int, number: int, value: int) -> None:
    """Sends two numbers without waiting for whoever gets them."""
    box = np.array([number, value], np.int64)
    _loose.append((comm.Isend(box, target, tag), box))
    _loose[:] = [(request, kept) for request, kept in _loose if not request.Test()]


def _lead(group: ProcessGroup, limit: float, wait_all: bool) -> None:
    others = range(1, group.size())
    inbox = _Inbox(group.inner, others, _ARRIVED, group.monitored)
    missing = inbox.wait(time.monotonic() + limit)
    for other in others:  # a rank that is missing gets its message when it comes
        _post(group.inner, other, _VERDICT, group.monitored, len(missing))
    if missing:
        named = [group.ranks[r] for r in (missing if wait_all else missing[:1])]
        # The words of torch's own function are among these, for those who look for them in logs.
        raise CollectiveTimeoutError(
            f"monitored_barrier on rank 0 of group {group.group_name}: "
            f"{'Ranks' if len(named) > 1 else 'Rank'} {', '.join(map(str, named))} failed to pass "
            f"monitoredBarrier: did not arrive within {limit:g} s"
            + ("" if wait_all else "; wait_all_ranks=True names every missing rank")
            + ("" if limit > 0 else "; Rank 0 timed out in monitoredBarrier before it could look")
        )


def _follow(group: ProcessGroup, limit: float) -> None:
    _post(group.inner, 0, _ARRIVED, group.monitored, 0)
    inbox = _Inbox(group.inner, [0], _VERDICT, group.monitored)
    where = f"monitored_barrier on rank {group.rank()} of group {group.group_name}"
    if inbox.wait(time.monotonic() + limit + _GRACE):
        raise CollectiveTimeoutError(
            f"{where}: rank 0 (global rank {group.ranks[0]}) did not arrive within {limit:g} s"
        )
    missing = int(inbox.boxes[0][1])
    if missing:
        raise CollectiveTimeoutError(
            f"{where}: Rank {group.ranks[group.rank()]} successfully reached monitoredBarrier, but "
            f"received errors while waiting for send/recv from rank 0: {missing} rank(s) did not "
            "arrive in time; rank 0's error names them"
        )
