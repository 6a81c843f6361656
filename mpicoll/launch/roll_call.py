"""Local steps of initialization: a failure on one rank raises on all ranks.

A rank that raises alone would leave the other ranks inside a collective call of MPI. So each rank
catches the error of its local steps and the ranks exchange one record. Then a failed rank raises
its own error, and every other rank raises an error that quotes the lowest failed rank.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

_WHERE = "init_process_group"
#: A record: whether the rank failed, its requested rank, and the beginning of its error.
_RECORD = struct.Struct("<qq496s")
#: Maximum size of an error message that is sent to the other ranks, in bytes.
_TEXT_BYTES = 496
#: Seconds that a failed rank waits until all ranks have its error, before it raises.
_NOTIFY_TIMEOUT_S = 5.0
#: Seconds for which a waiting rank yields the processor between tests, and its later test interval.
_YIELD_S, _TEST_INTERVAL_S = 0.01, 1e-3

T = TypeVar("T")


#: Exchanges that a failed rank has abandoned before all ranks had called, oldest first. MPI uses
#: their buffers until the request has completed.
_abandoned: list[tuple[MPI.Intracomm, MPI.Request, bytes, bytearray]] = []


def agree_or_raise(
    comm: MPI.Intracomm, requested: int | None = None, error: Exception | None = None
) -> list[int]:
    """Exchange the results of the ranks' local steps; raise if one failed. All ranks call.

    requested: the rank that this process was given; None for its rank in ``comm``.
    error: of this rank's local steps, None if they have succeeded.

    Returns the ranks in ``comm`` in the order of the requested ranks. Raises ``error`` on a failed
    rank, within _NOTIFY_TIMEOUT_S even if other ranks have not called, and LaunchError on every
    other rank, or on all ranks if two requested the same.
    """
    size = comm.Get_size()
    wanted = comm.Get_rank() if requested is None else requested
    text = "" if error is None else f"{type(error).__name__}: {error}"
    mine = _RECORD.pack(error is not None, wanted, text.encode("utf-8", "replace")[:_TEXT_BYTES])
    records = _exchange(comm, mine, error is not None) if size > 1 else [_RECORD.unpack(mine)]
    if error is not None:
        raise error
    for failed, place, quoted in records or ():
        if failed:
            words = quoted.rstrip(b"\0").decode("utf-8", "ignore")
            raise LaunchError(f"{_WHERE}: rank {place} failed: {words}")
    places = [place for _, place, _ in records or ()]
    if sorted(places) != list(range(size)):
        raise LaunchError(
            f"{_WHERE}: MPI's ranks 0 to {size - 1} were given the ranks {places}: expected each "
            f"rank from 0 to {size - 1} once; correct rank= or RANK"
        )
    return sorted(range(size), key=places.__getitem__)


def _exchange(
    comm: MPI.Intracomm, mine: bytes, failed: bool
) -> Sequence[tuple[int, int, bytes]] | None:
    """Return all ranks' records; None if this rank has failed and not all ranks call in time."""
    from mpi4py import MPI

    while _abandoned:  # completed by the first calls of other ranks
        _wait(_abandoned[0][1], None)
        del _abandoned[0]
    recv = bytearray(_RECORD.size * comm.Get_size())
    request = comm.Iallgather([mine, MPI.BYTE], [recv, _RECORD.size, MPI.BYTE])
    if not _wait(request, _NOTIFY_TIMEOUT_S if failed else None):
        _abandoned.append((comm, request, mine, recv))
        return None
    return list(_RECORD.iter_unpack(recv))


def has_abandoned(comm: MPI.Intracomm) -> bool:
    """Return whether this rank has abandoned an exchange over ``comm``, whose buffers MPI uses."""
    return any(abandoned == comm for abandoned, *_ in _abandoned)


def _wait(request: MPI.Request, limit: float | None) -> bool:
    """Wait for a request by tests, so that Python handles signals and runs other threads."""
    start = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - start
        if limit is not None and waited > limit:
            return False
        os.sched_yield() if waited < _YIELD_S else time.sleep(_TEST_INTERVAL_S)
    return True


def run_on_each(comm: MPI.Intracomm, step: Callable[[], T]) -> T:
    """Run a local step, which must not wait for other ranks; return its result. All ranks call.

    Raises its exception on a rank where it failed, and LaunchError on every other rank.
    """
    result, error = None, None
    try:
        result = step()
    except Exception as failure:
        error = failure
    agree_or_raise(comm, None, error)
    return result  # type: ignore[return-value]
