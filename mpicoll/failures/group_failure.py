"""One path for failures: ``fail`` changes a group's state from OPEN to FAILED.

docs/architecture.md lists its sources. After a timeout it writes the flight record and waits for
the records of other ranks first, because the job may end as soon as a call raises the error. Three
sources need no message to other ranks and change the state by ``ProcessGroup.fail``: a collective
mismatch, which every rank finds in the same comparison, a lost rank, and a signal handler that
raises an exception in a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpicoll import settings
from mpicoll.errors import CollectiveTimeoutError, DistBackendError
from mpicoll.failures import flight_record, rank_status
from mpicoll.failures.lost_ranks import is_fault_tolerant, revoke
from mpicoll.launch.world import finalize_within

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

#: Seconds that a blocking call of MPI has to return after its group has failed.
_GRACE_S = 10.0


def grace() -> float:
    """Return the seconds that a blocking call of MPI has to return after its group has failed."""
    return float(settings.TIMEOUT_GRACE.value() or _GRACE_S)


def fail(
    group: ProcessGroup,
    error: DistBackendError,
    *,
    status: int = rank_status.FAILED,
    wait_s: float = 0.0,
    pending: bool = False,
    is_current: Callable[[], bool] | None = None,
) -> None:
    """Fail a group on all its ranks. On this rank, present and later calls raise ``error``.

    status: FAILED or TIMED_OUT, for the status message to the other ranks.
    wait_s: seconds to wait for the flight records of other ranks.
    pending: the error is of devices, and no call waits that would raise it.
    is_current: whether the reason is still valid once the records are written.

    Does nothing if the group has failed with another error, or is closed. If it has failed with
    this error, only the other ranks are notified.
    """
    if group.closed is not None or group.error not in (None, error):
        return
    if group.error is None:
        if isinstance(error, CollectiveTimeoutError):  # calls dump other errors themselves
            flight_record.dump(str(error), wait_s)
        if is_current is not None and not is_current():
            return
    # MPI_Finalize waits for all ranks, and a missing one may never end. This comes first because
    # the program may end as soon as another thread raises the error.
    finalize_within(grace())
    group.fail(error, pending)
    if group.closed is not None or group.error is not error:
        return
    if not is_fault_tolerant():
        rank_status.send(group, status)  # before ranks that share memory look for the reason
    group.resources.leave()
    revoke(group)


def fail_all_ranks(group: ProcessGroup, error: Exception) -> None:
    """Fail a group on all its ranks because a call has failed on this rank.

    The other ranks may wait for this one in that call. They raise a DistBackendError that names
    this rank. error: the reason, unless the group has failed before.
    """
    name = f"rank {group.ranks[group.rank()]} of group {group.group_name}"
    words = f"{name} failed in call {group.sequence}, and the group takes no more calls: {error}"
    fail(group, group.error or DistBackendError(words))
