"""Failure of a group: the function that fails it on all ranks, and most of its callers.

**Timeouts.** A rank that waits in shared memory, or tests MPI requests (``ProcessGroup.wait_for``),
can return early. So the watchdog of the first rank whose timeout is over fails the group for all:
calls on this rank raise a CollectiveTimeoutError, and the other ranks are notified through shared
memory and by status messages. Each rank raises an error with the states of the ranks that it knows.
A blocking call of MPI cannot be interrupted. It has a grace period, in which late ranks may still
come; then the job ends.

A collective mismatch that every rank finds in the same comparison, a lost rank, and a signal
handler that raises an exception in a call need no message to other ranks. They change the state by
``ProcessGroup.fail``.
"""

from __future__ import annotations

import time

from mpicoll import settings
from mpicoll.core.groups import ProcessGroup
from mpicoll.errors import CollectiveTimeoutError, DistBackendError, MismatchError, MPIError
from mpicoll.failures import consistency, lost_ranks, monitor_client, rank_status
from mpicoll.failures.consistency import describe_call
from mpicoll.failures.report import DETAIL_HINT, describe_by_rank
from mpicoll.launch.world import finalize_within, is_serialized

#: Seconds that a blocking call of MPI has to return after its group has failed.
_GRACE_S = 10.0
#: Time that a rank waits for the calls of other ranks after MPI has reported an error. Their
#: watchdogs answer within a second.
_ANSWER_TIMEOUT_S = 4.0

_CLOSED = "The group takes no more calls; other groups do"


def grace() -> float:
    """Return the seconds that a blocking call of MPI has to return after its group has failed."""
    return float(settings.TIMEOUT_GRACE.value() or _GRACE_S)


def fail(group: ProcessGroup, error: DistBackendError, pending: bool = False) -> None:
    """Fail a group on all its ranks. On this rank, present and later calls raise ``error``.

    pending: ``error`` is a device error that no waiting call will raise.

    Does nothing if the group has failed with another error, or is closed. If it has failed with
    this error, only the other ranks are notified.
    """
    if group.closed is not None or group.error not in (None, error):
        return
    # MPI_Finalize waits for all ranks, and a missing one may never end. This comes first because
    # the program may end as soon as another thread raises the error.
    finalize_within(grace())
    group.fail(error, pending)
    if group.closed is not None or group.error is not error:
        return
    if not lost_ranks.is_fault_tolerant():  # before ranks that share memory look for the reason
        is_timeout = isinstance(error, CollectiveTimeoutError)
        rank_status.send(group, rank_status.TIMED_OUT if is_timeout else rank_status.FAILED)
    group.resources.leave()
    lost_ranks.revoke(group)


def fail_all_ranks(group: ProcessGroup, error: Exception) -> None:
    """Fail a group on all its ranks because a call has failed on this rank.

    The other ranks may wait for this one in that call. They raise a DistBackendError that names
    this rank. error: the reason, unless the group has failed before.
    """
    name = f"rank {group.ranks[group.rank()]} of group {group.group_name}"
    words = f"{name} failed in call {group.sequence}, and the group takes no more calls: {error}"
    fail(group, group.error or DistBackendError(words))


def fail_late_call(group: ProcessGroup, number: int | None = None) -> None:
    """Fail a group whose current call exceeds the timeout.

    number: of that call, as ``begun`` counts; nothing happens if it has ended meanwhile. None: the
        latest call.
    """
    if group.timeout is None:
        return
    number = group.begun if number is None else number
    rank_status.receive(group)
    error = _timeout(group, f"not all ranks of group {group.group_name} called within its timeout")
    if group.begun == number and group.lock.locked():
        fail(group, error)


def fail_with_peer(group: ProcessGroup, rank: int) -> None:
    """Fail a group that another rank has failed. rank: in the group."""
    if group.whole is not None:
        whole = group.whole
        fail_with_peer(whole, whole.ranks.index(group.ranks[rank]))
        if whole.error is not None:
            group.fail(whole.error)
        return
    if lost_ranks.is_fault_tolerant() and lost_ranks.check(group):
        return
    rank_status.receive(group)
    theirs, name = group.statuses.get(rank), f"rank {group.ranks[rank]} has closed"
    if theirs is None or theirs.state != rank_status.FAILED:
        why = f"{name} group {group.group_name}, because not all ranks called within its timeout"
        fail(group, _timeout(group, why, closer=rank))
        return
    group.check_device_errors()  # the rank stored the reason for the devices first, if for any
    known = group.error or find_mismatch(group)
    error = known or DistBackendError(
        f"rank {group.ranks[group.rank()]} of group {group.group_name}: {name} the group, in "
        f"or after call {theirs.number}, {describe_call(theirs.last_call)}: a call has failed "
        "on that rank, or on a rank that has notified it; see the error of the rank where the call "
        "failed. The results of that call and later ones may be incomplete on any rank. "
        f"{_CLOSED}"
    )
    fail(group, error, pending=group.device_error is not None)


def receive_failures(group: ProcessGroup) -> None:
    """Receive status messages, and fail the group if another rank has failed it."""
    rank_status.receive(group)
    for rank, status in list(group.statuses.items()):
        if status.state in rank_status.FAILURES:
            fail_with_peer(group, rank)


def _timeout(group: ProcessGroup, why: str, closer: int | None = None) -> CollectiveTimeoutError:
    """Return the error of a group whose call is late.

    closer: group rank that has failed the group first, if not this one.
    """
    recorded, kind, *_ = group.recent[-1]
    words = describe_call(group.recent[-1])
    name = group.task.name or (words.split()[0] if recorded and kind >= 0 else "a call")
    where = f"{'after' if group.task.name else 'in'} call {group.sequence}, {words}"
    limit = "" if group.timeout is None else f" of {group.timeout:g} s"
    return CollectiveTimeoutError(
        f"{name} on rank {group.ranks[group.rank()]}, {where}: timed out: {why}{limit}: "
        f"{_describe_ranks(group, closer)}. "
        f"{_CLOSED}{'' if group.compared else f'. {DETAIL_HINT}'}"
    )


def _describe_ranks(group: ProcessGroup, closer: int | None) -> str:
    """Describe the last known call of each other rank.

    closer: group rank that failed the group. It has continued since, so that the node monitor
        does not know where it waited.
    """
    texts = dict.fromkeys(group.ranks, "no status received")
    for rank, status in list(group.statuses.items()):
        call = describe_call(status.last_call)
        texts[group.ranks[rank]] = f"waits in call {status.number} or after it, {call}"
    known = monitor_client.ask_about(group)  # all ranks of the node
    if closer is not None:
        known.pop(group.ranks[closer], None)
    texts |= known
    del texts[group.ranks[group.rank()]]
    if {*texts.values()} == {"in this call"}:
        return "all ranks are in this call, and one of them does not progress"
    return describe_by_rank(texts.values(), texts)


# --- collective mismatches ------------------------------------------------------------------------


def check(group: ProcessGroup) -> None:
    """Compare the latest calls of an OPEN group, see ``consistency.check``.

    A late rank would pass the comparison by messages that ranks sent before they timed out. So it
    checks for their status messages before it enters a call in which it could not return early.
    """
    consistency.check(group)
    if group.size() > 1 and not group.resources.find("shared"):
        receive_failures(group)
        if group.error is not None:
            raise group.failure()


def fail_after_mpi_error(group: ProcessGroup, error: MPIError) -> DistBackendError:
    """Fail a group because MPI has reported an error in a call; return the error to raise.

    The other ranks then also fail the group, and send their last calls. If these differ, the error
    is a MismatchError.
    """
    # The error may be of a lost rank, which does not answer.
    if group.size() == 1 or lost_ranks.is_fault_tolerant():
        return error
    fail(group, error)
    rank_status.wait_for_neighbours(
        group, rank_status.FINAL, time.monotonic() + _ANSWER_TIMEOUT_S,
        until=lambda: is_serialized() or rank_status.describe_mismatch(group),
    )  # fmt: skip
    why = ". MPI reported an error in this call; the group has failed"
    return find_mismatch(group, why) or error


def find_mismatch(group: ProcessGroup, consequence: str = "") -> MismatchError | None:
    """Return the error about different calls that status messages show, None for none."""
    text = rank_status.describe_mismatch(group)
    return MismatchError(f"{text}{consequence}. {DETAIL_HINT}") if text else None
