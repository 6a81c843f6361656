"""Status messages: each rank sends its position in a group's sequence of calls to other ranks.

A rank sends its status when it ends, when it destroys the default group, when it has waited in a
call for a while, and when the group has failed on it. The receiver may find that the sender has
ended before this call, or that the two ranks have made different calls. Without the message both
would wait for ever, because neither reaches the comparison of their calls.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import communicators
from mpicoll.core.groups import ProcessGroup
from mpicoll.failures.consistency import describe_call, digest
from mpicoll.failures.report import DETAIL_HINT, format_ranks
from mpicoll.kernels.calls import RecordEntry

if TYPE_CHECKING:
    from mpi4py import MPI


class RankStatus(NamedTuple):
    """The position of a rank in a group's sequence of calls. Each field is sent as 64 bits."""

    group: int  # hash of the group's name, because a message may be left over from another group
    state: int  # RUNNING or another state below
    begun: int  # number of collectives that the rank has begun
    formed: int  # number of these that are not compared
    since: int  # number of the call at which the ranks' calls were last compared
    number: int  # number, kind, sizes and root: call record of the rank's last compared call
    kind: int
    sizes: int
    root: int
    calls: int  # digest of its calls from ``since`` to ``number``

    @property
    def last_call(self) -> RecordEntry:
        """The call record of the rank's last compared call."""
        return self[5:9]


#: Sends that may never complete, with their buffers.
_pending_sends: list[tuple[MPI.Request, array[int]]] = []
#: Held while a group's status messages are probed for, and while its communicators are freed.
lock = threading.Lock()
#: Set while the watchdog thread must make no calls to MPI; see ``suspended``.
is_suspended = threading.Event()
#: Number of probes for a message that was sent before: a single one does not find all of them.
_PROBE_COUNT = 3
#: Time that a rank in destroy_process_group waits for status messages, in total for all groups.
DESTROY_TIMEOUT_S = 1.0
#: State of a rank: it makes more calls in the group; it ends without destroying its groups; it
#: destroys them; it has written its flight record because of a failure; it has failed the group
#: because of a timeout, or because of another error.
RUNNING, EXITING, DESTROYING, RECORDED, TIMED_OUT, FAILED = range(6)
DEPARTED, FAILURES = (EXITING, DESTROYING), (TIMED_OUT, FAILED)
FINAL = DEPARTED + FAILURES  # it makes no more calls in the group
#: When RECORDED was received from global ranks, by time.monotonic; see flight_record.py.
recorded: dict[int, float] = {}


def send(group: ProcessGroup, state: int = RUNNING) -> None:
    """Send this rank's status to its neighbours, which are few in a large group.

    One waiting rank that receives the status is enough to end the job.
    """
    calls = tuple(group.recent)  # a copy, because another thread may make calls
    counts = group.begun, group.formed
    found = RankStatus(_hash_name(group), state, *counts, calls[0][0], *calls[-1], digest(calls))
    status = array("q", found)
    with lock:
        if group.closed is not None or (is_suspended.is_set() and state == RUNNING):
            return
        for other in neighbours(group):
            _pending_sends.append((group.messages.Isend(status, other, group.status_tag), status))
        _pending_sends[:] = [(one, kept) for one, kept in _pending_sends if not one.Test()]


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Context in which the watchdog thread makes no MPI calls for status messages and losses. A
    status other than RUNNING, such as FAILED, is still sent.

    Open MPI's MPI_Comm_create_from_group may hang on all ranks if another thread makes progress in
    MPI meanwhile. The group's timeout still ends a call that hangs for another reason.
    """
    with lock:  # no thread is in MPI under this lock from here on
        is_suspended.set()
    try:
        yield
    finally:
        is_suspended.clear()


def neighbours(group: ProcessGroup) -> set[int]:
    """Return the group ranks at distances of powers of two in both directions."""
    n, me = group.size(), group.rank()
    distances = [2**k for k in range(n.bit_length()) if 2**k < n]
    return {(me + sign * distance) % n for distance in distances for sign in (1, -1)}


def _hash_name(group: ProcessGroup) -> int:
    return zlib.crc32(group.group_name.encode())


def receive(group: ProcessGroup) -> None:
    """Receive the status messages that have arrived."""
    from mpi4py import MPI

    envelope = MPI.Status()
    buffer = array("q", bytes(8 * len(RankStatus._fields)))
    try:
        with lock:
            misses = 0
            while misses < _PROBE_COUNT and not (group.closed or is_suspended.is_set()):
                if not group.messages.Iprobe(MPI.ANY_SOURCE, group.status_tag, envelope):
                    misses += 1
                    continue
                source = envelope.Get_source()
                group.messages.Irecv(buffer, source, group.status_tag).Wait()
                status = RankStatus(*buffer.tolist())
                if status.group != _hash_name(group):
                    continue
                if status.state == RECORDED:
                    recorded[group.ranks[source]] = time.monotonic()
                elif (known := group.statuses.get(source)) is None or known.state not in FAILURES:
                    group.statuses[source] = status  # a failure is final
    except MPI.Exception as error:
        if not communicators.reports_lost_rank(error):  # lost_ranks.check handles losses
            raise


def find_departed(group: ProcessGroup, states: tuple[int, ...] = DEPARTED) -> set[int]:
    """Return the group ranks whose last status has one of these states."""
    return {rank for rank, status in list(group.statuses.items()) if status.state in states}


def wait_for_neighbours(
    group: ProcessGroup,
    states: tuple[int, ...],
    end: float,
    until: Callable[[], object] = lambda: False,
) -> bool:
    """Wait until all neighbours have sent one of these states; return whether they have.

    Returns False at ``end`` (time.monotonic), and once ``until()`` returns a true value.
    """
    expected, pause = neighbours(group), 1e-6
    while True:
        receive(group)
        if expected <= find_departed(group, states):
            return True
        if until() or time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def find_missing(group: ProcessGroup, may_time_out: bool) -> str:
    """Name the global ranks that have departed before this rank's current collective; "" for none.

    may_time_out: the program may wait with a timeout and continue after it, so that only ranks that
    end count.
    """
    departed = find_departed(group, (EXITING,) if may_time_out else DEPARTED)
    missing = [rank for rank in departed if group.statuses[rank].begun < group.begun]
    return format_ranks(group.ranks[rank] for rank in missing) if missing else ""


def describe_mismatch(group: ProcessGroup, ends: bool = False) -> str:
    """Describe how another rank's calls since the last comparison differ from this rank's.

    ends: check only ranks that make no more calls; their last calls must be the same.

    Returns "" if no difference is known.
    """
    formed, calls, name = group.formed, tuple(group.recent), group.group_name
    if formed != group.formed:  # another thread makes calls just now
        return ""
    for rank, status in list(group.statuses.items()):
        if status.since != calls[0][0]:
            continue
        if ends and status.state not in DEPARTED:
            continue
        other, theirs = group.ranks[rank], _describe_call(status.last_call)
        here, ahead = _describe_call(calls[-1]), status.number - calls[-1][0]
        if ahead * (status.formed - formed) < 0:
            if ahead < 0:
                theirs = f"making another group after {theirs}"
            else:
                here = f"making another group after {here}"
        elif not ends and (ahead > 0 or (ahead < 0 and group.compared)):
            continue  # this rank may still make the same calls; those before the last were alike
        else:
            same_calls = tuple(call for call in calls if ends or call[0] <= status.number)
            if digest(same_calls) == status.calls:
                continue
            here = _describe_call(same_calls[-1])
            if here == theirs:
                return (
                    f"rank {other} of group {name} has made other calls than this rank between "
                    f"call {status.since} and call {status.number}, {here}"
                )
        return f"collective mismatch in group {name}: rank {other}: {theirs}; here: {here}"
    return ""


def _describe_call(call: RecordEntry) -> str:
    return f"call {call[0]}, {describe_call(call)}"


def compare_at_destroy(group: ProcessGroup, end: float) -> tuple[bool, str]:
    """Compare the calls of ranks that destroy all groups, by their status messages.

    This finds a rank that has made more calls at the end. Waits until ``end`` (time.monotonic).

    Returns whether the calls are equal and no message is in transit, because those of all
    neighbours have arrived; and the description of a mismatch, "" for none.
    """
    send(group, DESTROYING)
    has_all = wait_for_neighbours(group, DEPARTED, end)
    if text := describe_mismatch(group, ends=True):
        text += f". The results of these calls may be wrong. {DETAIL_HINT}"
    return has_all and not text, text
