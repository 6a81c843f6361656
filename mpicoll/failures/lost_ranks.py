"""Lost ranks that the others survive: a group of those that live takes the place of their group.

Either MPI knows what to do: Open MPI under ``mpirun --with-ft ulfm``, user-level failure mitigation
(W. Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 27, 2013). A call
that needs a lost rank ends with an error. A rank that gets one revokes the communicator, so that no
rank waits for one that has given up.

Or, where MPICOLL_SURVIVE asks for it, MPI is not told: the ranks of a node notice by their pidfds
that one is lost, and leave the calls that they are in by themselves. The launcher must not end the
job (MPICH: docs/reliability.md). Messages between survivors still go, and so MPI_Comm_create_group
makes communicators of them; MPICH 5 has ULFM's calls, which hang.

Everywhere else a lost rank ends the job.
"""

from __future__ import annotations

import os
import select
import time
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from mpicoll import communicators, control_messages, launch, settings
from mpicoll.core import groups
from mpicoll.core.work import deadline
from mpicoll.errors import ArgumentError, CollectiveTimeoutError, LostRankError
from mpicoll.failures import rank_status
from mpicoll.failures.group_failure import fail_lost, is_ulfm, revoke
from mpicoll.launch import host_identity
from mpicoll.launch.serialized_mpi import dissemination_barrier
from mpicoll.output import warn

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["check", "is_fault_tolerant", "is_watching", "revoke", "shrink", "start", "stop"]

#: Seconds in which MPI learns which rank is lost, once another rank has said that one is.
_NEWS, _PAUSE = 1.0, 2e-3
#: MPI hears of losses in its calls, but only one in some hundred looks: how many to make, and how
#: many seconds may pass until they are made again, for all groups.
_CALLS, _INTERVAL = 2000, 0.1
#: Greatest tag of a meeting, within what every MPI has.
_TAGS = 0x7FFF


class _Processes:
    """The processes of a job on one node. All ranks create it, at the same point.

    comm: a communicator of all of them, for meetings of survivors.
    """

    def __init__(self, world: MPI.Intracomm, pids: Collection[int]) -> None:
        self.comm = communicators.create_private(world)
        groups.return_errors(self.comm)
        self._ends = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        world.Barrier()  # until then all of them live, so these are theirs

    def find_gone(self) -> set[int]:
        """Return the ranks in ``comm`` whose processes have ended."""
        poll = select.poll()
        for end in self._ends:
            poll.register(end, select.POLLIN)
        return {self._ends[end] for end, _ in poll.poll(0)}

    def close(self) -> None:
        """Close the descriptors. The communicator stays, if a rank that is lost was in it."""
        if not self.find_gone():
            self.comm.Free()
        for end in self._ends:
            os.close(end)


_processes: _Processes | None = None
_next_calls = 0.0  # by time.monotonic


def start(world: MPI.Intracomm) -> None:
    """Watch the ranks' processes, if rank 0's MPICOLL_SURVIVE asks for it. All ranks call.

    Warns, on rank 0, where a lost rank is not survived all the same.
    """
    global _processes
    asked = control_messages.bcast(world, settings.SURVIVE.is_set_to("1"), 0, bool)
    if not asked or is_ulfm():
        return
    everybody = control_messages.allgather(
        world,
        (host_identity.node(), os.getpid(), hasattr(os, "pidfd_open")),
        tuple[str, int, bool],
    )
    nodes, pids, able = zip(*everybody, strict=True)
    if problem := _why_not(len(set(nodes)), all(able)):
        if world.Get_rank() == 0:
            warn(f"{settings.SURVIVE.name} is set, but a lost rank ends the job: {problem}")
        return
    _processes = _Processes(world, pids)


def _why_not(nodes: int, able: bool) -> str:
    from mpi4py import MPI

    if MPI.get_vendor()[0] == "Open MPI":
        return "with Open MPI start it by `mpirun --with-ft ulfm`"
    if launch.is_serialized():
        return "MPI lets one thread in at a time"
    if launch.current() is not None:
        return "the ranks were not started by MPI; torchrun starts them again (--max-restarts)"
    if nodes > 1:
        return f"its ranks are on {nodes} nodes, and this works on one"
    return "" if able else "Linux 5.3 and Python 3.9 are the first to have pidfd_open"


def stop() -> None:
    """End what ``start`` began."""
    global _processes
    if _processes is not None:
        _processes.close()
        _processes = None


def is_watching() -> bool:
    """Return whether lost ranks are survived without MPI's knowledge: the same on all ranks."""
    return _processes is not None


def is_fault_tolerant() -> bool:
    """Return whether the job goes on when a rank is lost: the same on all ranks."""
    return _processes is not None or is_ulfm()


def check(group: ProcessGroup) -> bool:
    """Return whether a rank of the group is lost; if so, end its calls, pending ones too."""
    rank_status.receive(group)  # MPI learns of losses inside its calls
    with rank_status.lock:
        if isinstance(group.error, LostRankError):
            return True
        if group.closed is not None:
            return False
        revoked = is_ulfm() and (group.inner.Is_revoked() or group.messages.Is_revoked())
        lost = _find(group, _NEWS if revoked else 0.0)
        if not lost and not revoked:
            return False
        fail_lost(group, LostRankError(_describe(group, lost), lost))
    if _processes is not None:  # MPI would never end them
        for work in [*group.in_flight, *group.pending]:
            work.abandon(group.failure())
    return True


def _find(group: ProcessGroup, seconds: float = 0.0, expected: Collection[int] = ()) -> list[int]:
    """Return the lost global ranks of a group, as far as this rank knows.

    seconds: how long to wait until it knows of one, or of all that are expected.
    """
    from mpi4py import MPI

    end = time.monotonic() + seconds
    while True:
        lost = sorted(group.ranks[rank] for rank in _find_failed(group))
        if (lost and set(expected) <= set(lost)) or time.monotonic() > end:
            return lost
        MPI.COMM_SELF.Iprobe()
        time.sleep(_PAUSE)


def _find_failed(group: ProcessGroup) -> list[int]:
    """Return the lost ranks in a group."""
    if _processes is not None:
        gone = _processes.find_gone()
        if not gone:
            return []
        places = communicators.translate_ranks(group.messages, _processes.comm)
        return [rank for rank, place in enumerate(places) if place in gone]
    from mpi4py import MPI

    global _next_calls
    if (now := time.monotonic()) > _next_calls:
        _next_calls = now + _INTERVAL
        for _ in range(_CALLS):
            MPI.COMM_SELF.Iprobe()
    failed, members = group.messages.Get_failed(), group.messages.Get_group()
    found = list(failed.Translate_ranks(None, members))
    failed.Free()
    members.Free()
    return found


def shrink(group: ProcessGroup, excluded: Collection[int], where: str) -> MPI.Intracomm:
    """Create the communicator of a broken group's survivors, in their order; all of them call.

    excluded: the ranks in the group that the caller knows to be lost.

    Raises ArgumentError where one of them lives, LostRankError on all survivors where another one
    is lost, too, and CollectiveTimeoutError where not all of them call.
    """
    named = sorted(group.ranks[rank] for rank in excluded)
    lost = _find(group, _NEWS, named)
    if not set(named) <= set(lost):
        raise ArgumentError(
            f"{where}: ranks_to_exclude: group {group.group_name} has lost global ranks {lost}, "
            f"got global ranks {named}; exclude the lost ones, "
            f"{[group.group_rank(rank) for rank in lost]} in the group, and shrink the result "
            "again to leave out others"
        )
    if _processes is not None:
        return _meet_and_create(_processes.comm, group, named, where)
    # MPI_Comm_shrink agrees on who is there, and works on a revoked communicator.
    made = cast("MPI.Intracomm", group.inner.Shrink())
    groups.return_errors(made)
    found = communicators.translate_ranks(group.inner, made)
    gone = [group.ranks[rank] for rank, other in enumerate(found) if other is None]
    if gone != named:
        made.Free()
        raise LostRankError(_describe(group, gone), gone)
    return made


def _meet_and_create(
    comm: MPI.Intracomm, group: ProcessGroup, named: list[int], where: str
) -> MPI.Intracomm:
    """Create the communicator once all survivors have called, because MPI would wait for ever.

    Raises LostRankError if another rank is lost meanwhile.
    """
    places = communicators.translate_ranks(group.messages, comm)
    members = [
        place
        for place, rank in zip(places, group.ranks, strict=True)
        if place is not None and rank not in named
    ]
    name = f"mpicoll:{group.group_name}:{members}"
    tag = zlib.crc32(name.encode()) & _TAGS
    end = deadline(group.timeout)

    def wait(request: MPI.Request, status: MPI.Status | None) -> None:
        while not request.Test():
            lost = _find(group)
            if lost != named:
                raise LostRankError(_describe(group, lost), lost)
            if time.monotonic() > end:
                raise CollectiveTimeoutError(
                    f"{where}: timed out: not all survivors of group {group.group_name} called "
                    f"within {group.timeout:g} s"
                )
            time.sleep(_PAUSE)

    dissemination_barrier(comm, members, tag, wait)
    with communicators.subset(comm, members) as chosen:
        made = comm.Create_group(chosen, tag)
    groups.return_errors(made)
    return made


def _describe(group: ProcessGroup, ranks: list[int]) -> str:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
    return (
        f"group {group.group_name} has lost {who}, whose process has ended; it cannot be used any "
        "more. shrink_group makes a group of those that live, and torch's reconfigure does"
    )
