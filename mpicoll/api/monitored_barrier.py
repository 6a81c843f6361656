"""The messages of monitored_barrier, a barrier that names the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpicoll.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["wait_for_ranks"]

#: Tags. Other messages on this communicator use tag 0.
_ARRIVED, _REPLY = 1, 2
#: Time beyond the timeout that a rank waits for the reply of rank 0.
_GRACE_S = 2.0


def wait_for_ranks(group: ProcessGroup, limit: float, wait_all: bool) -> None:
    """Return once all ranks of the group have called, or raise CollectiveTimeoutError.

    Each rank sends a message to rank 0, which replies with the number of missing ranks. A late rank
    receives the reply when it calls.

    limit: seconds that rank 0 waits. wait_all: name every missing rank, not only the first.
    """
    group.monitored += 1
    where = f"monitored_barrier on rank {group.rank()} of group {group.group_name}"
    if group.rank() == 0:
        others = range(1, group.size())
        arrived = _receive(group, others, _ARRIVED, limit)
        missing = [rank for rank in others if rank not in arrived]
        for rank in others:
            _send(group, rank, _REPLY, len(missing))
        if missing:
            named = [group.ranks[rank] for rank in (missing if wait_all else missing[:1])]
            # The text includes torch's message, because programs search logs for it.
            early = "; Rank 0 timed out in monitoredBarrier before it could look"
            raise CollectiveTimeoutError(
                f"{where}: {'Ranks' if len(named) > 1 else 'Rank'} {', '.join(map(str, named))} "
                f"failed to pass monitoredBarrier: did not arrive within {limit:g} s"
                + ("" if wait_all else "; wait_all_ranks=True names every missing rank")
                + ("" if limit > 0 else early)
            )
        return
    _send(group, 0, _ARRIVED, 0)
    reply = _receive(group, [0], _REPLY, limit + _GRACE_S)
    if not reply:
        raise CollectiveTimeoutError(
            f"{where}: rank 0 (global rank {group.ranks[0]}) did not arrive within {limit:g} s"
        )
    if reply[0]:
        raise CollectiveTimeoutError(
            f"{where}: Rank {group.ranks[group.rank()]} successfully reached monitoredBarrier, but "
            f"received errors while waiting for send/recv from rank 0: {reply[0]} rank(s) did not "
            "arrive in time; rank 0's error names them"
        )


def _receive(group: ProcessGroup, sources: Sequence[int], tag: int, limit: float) -> dict[int, int]:
    """Return the values that arrive within ``limit`` seconds, by rank.

    Drops messages of earlier, failed barriers.
    """
    buffers = {source: np.zeros(2, np.int64) for source in sources}
    pending = {source: group.inner.Irecv(buffers[source], source, tag) for source in sources}
    end, pause = time.monotonic() + limit, 1e-5
    while True:
        late = time.monotonic() > end
        for source, request in list(pending.items()):
            if not request.Test():
                continue
            if buffers[source][0] == group.monitored:
                del pending[source]
            else:
                pending[source] = group.inner.Irecv(buffers[source], source, tag)
        if late or not pending:
            break
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    for request in pending.values():
        request.Cancel()
        request.Wait()
    return {rank: int(buffers[rank][1]) for rank in sources if rank not in pending}


#: Sends that are not complete, with their buffers.
_pending_sends: list[tuple[MPI.Request, npt.NDArray[np.int64]]] = []


def _send(group: ProcessGroup, target: int, tag: int, value: int) -> None:
    """Send the number of the barrier and a value without waiting for the receiver."""
    buffer = np.array([group.monitored, value], np.int64)
    _pending_sends.append((group.inner.Isend(buffer, target, tag), buffer))
    _pending_sends[:] = [(request, kept) for request, kept in _pending_sends if not request.Test()]
