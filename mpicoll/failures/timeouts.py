"""Timeouts: a group whose call outlasts its timeout is closed, and the ranks that wait in it raise.

A rank that waits in shared memory, or tests requests of MPI (``ProcessGroup.wait_for``), can leave.
So the watchdog of the first rank whose time is over closes the group for all: it marks it as broken
with a CollectiveTimeoutError, lets this rank's call leave, and tells the others, by the memory that
they share and by messages. Each of them that waits, or will, gets an error of its own.

A blocking call of MPI cannot be left. It has a grace period, in which late ranks may come after
all; then the job ends.

A rank that fails alone in a call, where no meeting of the ranks follows in which it could say so,
closes the group likewise (``give_up``), and so does one that finds results missing on its device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpicoll import launch, settings
from mpicoll.errors import CollectiveTimeoutError, DistBackendError, MismatchError, MPIError
from mpicoll.failures import consistency, flight_record, lost_ranks, monitor_client, rank_status
from mpicoll.failures.consistency import describe_call
from mpicoll.launch.exit_hooks import exit_code, keep_exit_code

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["check", "expire", "give_up", "grace", "hear", "receive"]

#: Seconds that a call of MPI has after its group is closed, unless MPICOLL_TIMEOUT_GRACE says.
_GRACE = 10.0

#: How often a rank asks MPI for messages that have come before it: one look does not find all.
_LOOKS = 3

_COMPARES = "MPICOLL_DEBUG=DETAIL compares every call before it is carried out"
_CLOSED = "The group takes no more calls; other groups do"


def grace() -> float:
    """Return the seconds that a call of MPI has after its group is closed."""
    return float(settings.TIMEOUT_GRACE.value() or _GRACE)


def check(group: ProcessGroup) -> None:
    """Compare calls, see ``consistency.check``, in a group that is not closed.

    What ranks sent before they gave up lets one that is late pass the comparison: so it looks
    whether they have, before it waits for them where it could not leave.
    """
    if group.broken is not None:
        raise group.failure()
    consistency.check(group, _look)


def _look(group: ProcessGroup) -> None:
    if not group.resources.find("shared"):
        for _ in range(_LOOKS):
            rank_status.receive(group)
        receive(group)
        if group.broken is not None:
            raise group.failure()


def expire(group: ProcessGroup, number: int | None = None) -> None:
    """Close a group, of which a call outlasts the timeout; its calls raise why from now on.

    number: of that call, as ``begun`` counts: nothing is done if it has ended meanwhile; None for
        the latest.
    """
    if group.timeout is None:
        return
    rank_status.receive(group)
    if number is None:
        number = group.begun
    elif group.begun != number or not group.lock.locked():
        return
    _close(
        group,
        f"the other ranks of group {group.group_name} did not all come within its timeout of "
        f"{group.timeout:g} s",
        flight_record.PATIENCE,
        number,
    )


def give_up(group: ProcessGroup, error: Exception) -> None:
    """Close a group on all its ranks because a call has failed on this one, and others may wait for
    it there. Whoever waits raises a DistBackendError that names this rank, or will.

    error: why, unless the group is broken already, and this rank alone may know it.
    """
    name = f"rank {group.ranks[group.rank()]} of group {group.group_name}"
    words = f"{name} failed in call {group.sequence}, and the group takes no more calls: {error}"
    _shut(group, group.broken or DistBackendError(words), rank_status.FAILED)


def compare_after(error: Exception, group: ProcessGroup) -> Exception:
    """Return a MismatchError in place of an error of MPI if the ranks have made different calls.

    The group is then broken, because MPI has carried out a part of the call. The caller holds the
    group's lock, and closes the group on the other ranks.
    """
    if not isinstance(error, MPIError) or group.size() == 1 or launch.is_serialized():
        return error
    if lost_ranks.is_fault_tolerant():  # the error may be of a lost rank, which does not answer
        return error
    text = rank_status.compare_after_error(group)
    if not text:
        return error
    found = MismatchError(
        f"{text}. MPI reported an error in this call, and the group cannot be used any more. "
        f"{_COMPARES}"
    )
    group.break_with(found)
    return found


def hear(group: ProcessGroup, rank: int) -> None:
    """Close a group that another rank of it has closed: a rank in the group, or in its part."""
    if group.whole is not None:
        whole = group.whole
        hear(whole, whole.ranks.index(group.ranks[rank]))
        if whole.broken is not None:
            group.break_with(whole.broken)
        return
    if lost_ranks.is_fault_tolerant() and lost_ranks.check(group):
        return
    for _ in range(_LOOKS):
        rank_status.receive(group)
    theirs = group.statuses.get(rank)
    if theirs is not None and theirs.state == rank_status.FAILED:
        number = theirs.begun - theirs.formed
        error = DistBackendError(
            f"rank {group.ranks[group.rank()]} of group {group.group_name}: rank "
            f"{group.ranks[rank]} has closed the group, in or after call {number}, "
            f"{describe_call(theirs.last_call)}: a call has failed on it, or on a rank that it has "
            "heard of, which says why. What that and later calls gave may be incomplete on any "
            f"rank. {_CLOSED}"
        )
        _shut(group, error, rank_status.FAILED, group.ask_devices is not None)
        return
    limit = "" if group.timeout is None else f" of {group.timeout:g} s"
    _close(
        group,
        f"rank {group.ranks[rank]} has closed group {group.group_name}: others did not come within "
        f"its timeout{limit}",
        closer=rank,
    )


def receive(group: ProcessGroup) -> None:
    """Hear of ranks that have closed the group, as far as ``rank_status.receive`` knows."""
    for rank, status in list(group.statuses.items()):
        if status.state in (rank_status.CLOSED, rank_status.FAILED):
            hear(group, rank)


def _close(
    group: ProcessGroup,
    why: str,
    patience: float = 0.0,
    number: int | None = None,
    closer: int | None = None,
) -> None:
    """Close a group.

    patience: seconds to wait for the other ranks' flight records.
    number: of the call that the group is closed for, if only while that lasts.
    closer: group rank that closed the group first, if not this one.
    """
    call = f"call {group.sequence}, {describe_call(group.recent[-1])}"
    recorded, kind, *_ = group.recent[-1]
    known = recorded and kind >= 0
    name = group.doing or (call.split()[2] if known else "a call")
    where = f"after {call}" if group.doing else f"in {call}"
    text = (
        f"{name} on rank {group.ranks[group.rank()]}, {where}: {why}: "
        f"{_describe_ranks(group, closer)}. {_CLOSED}{'' if group.compared else f'. {_COMPARES}'}"
    )
    if group.broken is not None or group.closed is not None:
        return
    # Before calls raise: what raises may end the job, and ranks that could still write theirs.
    flight_record.dump_for(group, "closed", text, patience)
    if number is not None and (group.begun != number or not group.lock.locked()):
        return  # the others have come meanwhile
    _shut(group, CollectiveTimeoutError(text), rank_status.CLOSED)


def _shut(
    group: ProcessGroup, error: DistBackendError, state: int, of_devices: bool = False
) -> None:
    """Break a group, unless it is broken by another error, and tell its other ranks.

    of_devices: it is not in a call that waits for this; see ProcessGroup.unheard.
    """
    # The one who is missing may never end, and MPI_Finalize waits for all. (Said first: what raises
    # in another thread as soon as the group is broken may end the program.)
    keep_exit_code()
    launch.finalize_within(grace(), exit_code)
    with rank_status.lock:  # lost_ranks.check may find why it ends, or the group may be destroyed
        if group.broken not in (None, error) or group.closed is not None:
            return
        if of_devices:
            group.unheard = error  # first: as soon as it is broken, calls raise that
        group.break_with(error)
    if not lost_ranks.is_ulfm():
        rank_status.send(group, state)  # before those that share memory with this rank ask why
    group.resources.leave()
    lost_ranks.revoke(group)


# --- in words -----------------------------------------------------------------------------------


def _describe_ranks(group: ProcessGroup, closer: int | None = None) -> str:
    """Describe the last known call of each other rank.

    closer: group rank that closed the group. It has continued since, so that the node monitor does
        not know where it waited.
    """
    known: dict[int, tuple[int, str]] = {}
    for name in ("shared", "hierarchical"):
        memory = group.resources.find(name)
        if memory:
            known |= memory.last_calls()
    texts = {}
    for rank, status in list(group.statuses.items()):
        call = describe_call(status.last_call)
        texts[rank] = f"waits in call {status.begun - status.formed} or after it, {call}"
    for rank, (number, call) in known.items():
        here = number - group.sequence & 0xFFFFFFFF < 1 << 31
        if number and not here:
            texts[rank] = f"not here, last in call {number}, {call}"
        elif not number:
            texts.setdefault(rank, "not here, and in no call before")
        else:
            texts[rank] = "here"
    # The monitor watches all ranks of a node; a hang report has the same text.
    for rank, text in monitor_client.ask_about(group).items():
        if group.ranks.index(rank) != closer:
            texts[group.ranks.index(rank)] = text
    ranks_of: dict[str, list[int]] = {}
    for rank in range(group.size()):
        if rank != group.rank():
            ranks_of.setdefault(texts.get(rank, "no status received"), []).append(group.ranks[rank])
    if set(ranks_of) == {"here"}:
        return "all have come to it, and one does not go on"
    return "; ".join(
        f"rank{'s' * (len(ranks) > 1)} {_runs(ranks)}: {text}" for text, ranks in ranks_of.items()
    )


def _runs(numbers: Iterable[int]) -> str:
    """Return numbers with those in a row as "first-last"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
