"""One path for failures: ``fail`` changes a group's state from OPEN to FAILED.

These sources call it:

- timeouts.py: a call has exceeded the group's timeout on this rank
- rank_status.py: a status message says that another rank has failed the group
- lost_ranks.py: the process of another rank has ended (ULFM or pidfds)
- routes and dispatch: a call has failed on this rank, so that other ranks may wait for it
- the watchdog: device work has ended without results

Observers (``core/observers.py``) run first: the flight recorder waits for the records of other
ranks, because the job may end as soon as a call raises the error. Two sources need no message to
other ranks and change the state by ``ProcessGroup.fail``: a collective mismatch, which every rank
finds in the same comparison, and a signal handler that raises an exception in a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpicoll import settings
from mpicoll.core.observers import observers
from mpicoll.errors import DistBackendError, LostRankError
from mpicoll.failures import rank_status
from mpicoll.launch.world import finalize_within, skip_finalize

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["fail", "fail_all_ranks", "fail_lost", "grace", "is_ulfm", "revoke"]

#: Seconds that a blocking call of MPI has to return after its group has failed.
_GRACE_S = 10.0
_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"


def grace() -> float:
    """Return the seconds that a blocking call of MPI has to return after its group has failed."""
    return float(settings.TIMEOUT_GRACE.value() or _GRACE_S)


def is_ulfm() -> bool:
    """Return whether MPI continues when a rank is lost and can revoke communicators (ULFM)."""
    return os.environ.get(_FT_VARIABLE, "").lower() in ("1", "true", "yes")


def revoke(group: ProcessGroup) -> None:
    """Make pending MPI calls of a failed group return on all ranks, if MPI has ULFM."""
    if is_ulfm():
        for comm in (group.inner, group.messages):
            comm.Revoke()


def fail(
    group: ProcessGroup,
    error: DistBackendError,
    *,
    status: int = rank_status.FAILED,
    wait_s: float = 0.0,
    pending: bool = False,
    is_current: Callable[[], bool] | None = None,
) -> bool:
    """Fail a group on all its ranks. On this rank, present and later calls raise ``error``.

    status: FAILED or TIMED_OUT, for the status message to the other ranks.
    wait_s: seconds that the flight recorder waits for the records of other ranks.
    pending: the error is of devices, and no call waits that would raise it.
    is_current: whether the reason is still valid once the observers have returned.

    Does nothing if the group has failed with another error, or is closed. If it has failed with
    this error, only the other ranks are notified. Returns whether they were.
    """
    if group.closed is not None or group.error not in (None, error):
        return False
    if group.error is None:
        for observer in observers:
            observer.group_failing(group, error, wait_s)
        if is_current is not None and not is_current():
            return False
    # MPI_Finalize waits for all ranks, and a missing one may never end. This comes first because
    # the program may end as soon as another thread raises the error.
    finalize_within(grace())
    group.fail(error, pending)
    if group.closed is not None or group.error is not error:
        return False
    if not is_ulfm():
        rank_status.send(group, status)  # before ranks that share memory look for the reason
    group.resources.leave()
    revoke(group)
    return True


def fail_all_ranks(group: ProcessGroup, error: Exception) -> None:
    """Fail a group on all its ranks because a call has failed on this rank.

    The other ranks may wait for this one in that call. They raise a DistBackendError that names
    this rank. error: the reason, unless the group has failed before.
    """
    name = f"rank {group.ranks[group.rank()]} of group {group.group_name}"
    words = f"{name} failed in call {group.sequence}, and the group takes no more calls: {error}"
    fail(group, group.error or DistBackendError(words))


def fail_lost(group: ProcessGroup, error: LostRankError) -> None:
    """Fail a group on this rank because a rank is lost. Each survivor does so.

    The caller holds ``rank_status.lock``.
    """
    group.fail(error)
    revoke(group)
    group.resources.leave(alone=True)
    skip_finalize()  # MPI_Finalize may wait for the lost rank
