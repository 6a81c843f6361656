"""The messages of monitored_barrier, a barrier that names the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["wait_for_ranks"]

#: Tags. Other messages on this communicator use tag 0.
_ARRIVED, _REPLY = 1, 2
#: Time beyond the timeout that a rank waits for the reply of rank 0.
_GRACE_S = 2.0

Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def wait_for_ranks(group: ProcessGroup, limit: float, wait_all: bool) -> None:
    """Return once all ranks of the group have called, or raise CollectiveTimeoutError.

    Each rank sends a message to rank 0, which replies with the number of missing ranks. A late rank
    receives the reply when it calls.

    limit: seconds that rank 0 waits. wait_all: name every missing rank, not only the first.
    """
    group.monitored += 1
    if group.rank() == 0:
        _wait_as_leader(group, limit, wait_all)
    else:
        _wait_for_leader(group, limit)


class _Inbox:
    """The messages of barrier ``number``. Messages of earlier, failed barriers are dropped."""

    def __init__(self, comm: MPI.Intracomm, sources: Iterable[int], tag: int, number: int) -> None:
        self.comm, self.tag, self.number = comm, tag, number
        self.buffers = {source: np.zeros(2, np.int64) for source in sources}
        self.pending = {source: self._receive(source) for source in self.buffers}

    def _receive(self, source: int) -> MPI.Request:
        return self.comm.Irecv(self.buffers[source], source, self.tag)

    def wait(self, end: float) -> list[int]:
        """Wait until ``end`` at most; return the ranks whose message is missing."""
        pause = 1e-5
        while True:
            late = time.monotonic() > end
            for source, request in list(self.pending.items()):
                if not request.Test():
                    continue
                if self.buffers[source][0] == self.number:
                    del self.pending[source]
                else:
                    self.pending[source] = self._receive(source)
            if late or not self.pending:
                break
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        missing = sorted(self.pending)
        for request in self.pending.values():
            request.Cancel()
            request.Wait()
        return missing


#: Sends that are not complete, with their buffers.
_pending_sends: list[tuple[MPI.Request, Numbers]] = []


def _send(comm: MPI.Intracomm, target: int, tag: int, number: int, value: int) -> None:
    """Send two numbers without waiting for the receiver."""
    buffer = np.array([number, value], np.int64)
    _pending_sends.append((comm.Isend(buffer, target, tag), buffer))
    _pending_sends[:] = [(request, kept) for request, kept in _pending_sends if not request.Test()]


def _wait_as_leader(group: ProcessGroup, limit: float, wait_all: bool) -> None:
    others = range(1, group.size())
    inbox = _Inbox(group.inner, others, _ARRIVED, group.monitored)
    missing = inbox.wait(time.monotonic() + limit)
    for other in others:
        _send(group.inner, other, _REPLY, group.monitored, len(missing))
    if missing:
        named = [group.ranks[r] for r in (missing if wait_all else missing[:1])]
        # The text includes that of torch's message, because programs search logs for it.
        raise CollectiveTimeoutError(
            f"monitored_barrier on rank 0 of group {group.group_name}: "
            f"{'Ranks' if len(named) > 1 else 'Rank'} {', '.join(map(str, named))} failed to pass "
            f"monitoredBarrier: did not arrive within {limit:g} s"
            + ("" if wait_all else "; wait_all_ranks=True names every missing rank")
            + ("" if limit > 0 else "; Rank 0 timed out in monitoredBarrier before it could look")
        )


def _wait_for_leader(group: ProcessGroup, limit: float) -> None:
    _send(group.inner, 0, _ARRIVED, group.monitored, 0)
    inbox = _Inbox(group.inner, [0], _REPLY, group.monitored)
    where = f"monitored_barrier on rank {group.rank()} of group {group.group_name}"
    if inbox.wait(time.monotonic() + limit + _GRACE_S):
        raise CollectiveTimeoutError(
            f"{where}: rank 0 (global rank {group.ranks[0]}) did not arrive within {limit:g} s"
        )
    missing = int(inbox.buffers[0][1])
    if missing:
        raise CollectiveTimeoutError(
            f"{where}: Rank {group.ranks[group.rank()]} successfully reached monitoredBarrier, but "
            f"received errors while waiting for send/recv from rank 0: {missing} rank(s) did not "
            "arrive in time; rank 0's error names them"
        )
