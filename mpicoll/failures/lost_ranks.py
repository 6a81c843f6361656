"""Lost ranks in jobs that survive them: survivors create a group that replaces the failed one.

With Open MPI under ``mpirun --with-ft ulfm``, MPI has user-level failure mitigation (W. Bland et
al., "Post-failure recovery of MPI communication capability", IJHPCA 27, 2013). A call that needs a
lost rank returns an error, and the rank then revokes the communicator, so that other ranks do not
wait for it.

With MPICOLL_SURVIVE=1, MPI is not involved: the ranks of a node notice a lost rank by its pidfd,
and return early from their calls. The launcher must not end the job (MPICH: docs/reliability.md).
Messages between survivors still work, and so does MPI_Comm_create_group. The ULFM calls of MPICH 5
hang, so they are not used.

In all other jobs a lost rank ends the job.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from mpicoll import communicators, control_messages, settings
from mpicoll.core import groups
from mpicoll.core.work import deadline
from mpicoll.errors import ArgumentError, CollectiveTimeoutError, LostRankError
from mpicoll.failures import rank_status
from mpicoll.failures.group_failure import fail_lost, is_ulfm, revoke
from mpicoll.launch import host_identity
from mpicoll.launch.session import current_session
from mpicoll.launch.world import is_serialized
from mpicoll.output import warn
from mpicoll.serialized_mpi import dissemination_barrier

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["check", "is_fault_tolerant", "is_watching", "revoke", "shrink", "start", "stop"]

#: Time for MPI to find the lost rank after another rank has revoked a communicator.
_DETECT_TIMEOUT_S, _POLL_INTERVAL_S = 1.0, 2e-3
#: MPI detects losses in about one of a hundred calls: number of calls to make, and the minimum time
#: until they are made again.
_PROBE_COUNT, _PROBE_INTERVAL_S = 2000, 0.1
#: Maximum tag of barriers of survivors, which every MPI supports.
_MAX_TAG = 0x7FFF


class _Processes:
    """The processes of a job on one node. All ranks create it.

    comm: a communicator of all ranks, by which survivors create groups.
    """

    def __init__(self, world: MPI.Intracomm, pids: Collection[int]) -> None:
        self.comm = communicators.create_private(world)
        groups.return_errors(self.comm)
        self._ends = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        world.Barrier()  # all processes were alive until now, so no pid was reused

    def find_gone(self) -> set[int]:
        """Return the ranks in ``comm`` whose processes have ended."""
        poll = select.poll()
        for end in self._ends:
            poll.register(end, select.POLLIN)
        return {self._ends[end] for end, _ in poll.poll(0)}

    def close(self) -> None:
        """Close the descriptors, and free the communicator unless a rank of it is lost."""
        if not self.find_gone():
            self.comm.Free()
        for end in self._ends:
            os.close(end)


_processes: _Processes | None = None
_next_probes = 0.0  # by time.monotonic


def start(world: MPI.Intracomm) -> None:
    """Watch the ranks' processes if MPICOLL_SURVIVE is 1 on rank 0. All ranks call.

    Warns on rank 0 if the job cannot survive a lost rank.
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
    # Hydra sends it to the survivors.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _why_not(nodes: int, able: bool) -> str:
    from mpi4py import MPI

    if MPI.get_vendor()[0] == "Open MPI":
        return "with Open MPI start it by `mpirun --with-ft ulfm`"
    if is_serialized():
        return "MPI provides less than MPI_THREAD_MULTIPLE"
    if current_session() is not None:
        return "the ranks were not started by MPI; torchrun starts them again (--max-restarts)"
    if nodes > 1:
        return f"its ranks are on {nodes} nodes, and this works on one"
    return "" if able else "Linux 5.3 and Python 3.9 are the first to have pidfd_open"


def stop() -> None:
    """Stop watching the processes."""
    global _processes
    if _processes is not None:
        _processes.close()
        _processes = None


def is_watching() -> bool:
    """Return whether the job survives lost ranks by MPICOLL_SURVIVE. The same on all ranks."""
    return _processes is not None


def is_fault_tolerant() -> bool:
    """Return whether the job survives a lost rank. The same on all ranks."""
    return _processes is not None or is_ulfm()


def check(group: ProcessGroup) -> bool:
    """Return whether a rank of the group is lost; if so, fail the group and its pending works."""
    rank_status.receive(group)  # MPI detects losses inside its calls
    with rank_status.lock:
        if isinstance(group.error, LostRankError):
            return True
        if group.closed is not None or rank_status.is_suspended():
            return False
        revoked = is_ulfm() and (group.inner.Is_revoked() or group.messages.Is_revoked())
        lost = _find(group, _DETECT_TIMEOUT_S if revoked else 0.0)
        if not lost and not revoked:
            return False
        fail_lost(group, LostRankError(_describe(group, lost), lost))
    if _processes is not None:  # MPI would never end them
        for work in [*group.in_flight, *group.pending]:
            work.abandon(group.failure())
    return True


def _find(group: ProcessGroup, seconds: float = 0.0, expected: Collection[int] = ()) -> list[int]:
    """Return the lost global ranks of a group that this rank has detected.

    seconds: time to wait for a lost rank, or for all that are expected.
    """
    from mpi4py import MPI

    end = time.monotonic() + seconds
    while True:
        lost = sorted(group.ranks[rank] for rank in _find_failed(group))
        if (lost and set(expected) <= set(lost)) or time.monotonic() > end:
            return lost
        MPI.COMM_SELF.Iprobe()
        time.sleep(_POLL_INTERVAL_S)


def _find_failed(group: ProcessGroup) -> list[int]:
    """Return the lost group ranks."""
    if _processes is not None:
        gone = _processes.find_gone()
        if not gone:
            return []
        places = communicators.translate_ranks(group.messages, _processes.comm)
        return [rank for rank, place in enumerate(places) if place in gone]
    from mpi4py import MPI

    global _next_probes
    if (now := time.monotonic()) > _next_probes:
        _next_probes = now + _PROBE_INTERVAL_S
        for _ in range(_PROBE_COUNT):
            MPI.COMM_SELF.Iprobe()
    failed, members = group.messages.Get_failed(), group.messages.Get_group()
    found = list(failed.Translate_ranks(None, members))
    failed.Free()
    members.Free()
    return found


def shrink(group: ProcessGroup, excluded: Collection[int], where: str) -> MPI.Intracomm:
    """Create the communicator of a failed group's survivors, in their order. All survivors call.

    excluded: the group ranks that the caller knows to be lost.

    Raises ArgumentError if one of them is alive, LostRankError on all survivors if another rank is
    also lost, and CollectiveTimeoutError if not all survivors call.
    """
    named = sorted(group.ranks[rank] for rank in excluded)
    lost = _find(group, _DETECT_TIMEOUT_S, named)
    if not set(named) <= set(lost):
        raise ArgumentError(
            f"{where}: ranks_to_exclude: group {group.group_name} has lost global ranks {lost}, "
            f"got global ranks {named}; exclude group ranks "
            f"{[group.group_rank(rank) for rank in lost]}, and shrink the new group to exclude more"
        )
    if _processes is not None:
        return _create_from_survivors(_processes.comm, group, named, where)
    # MPI_Comm_shrink agrees on the survivors, and works on a revoked communicator.
    made = cast("MPI.Intracomm", group.inner.Shrink())
    groups.return_errors(made)
    found = communicators.translate_ranks(group.inner, made)
    gone = [group.ranks[rank] for rank, other in enumerate(found) if other is None]
    if gone != named:
        made.Free()
        raise LostRankError(_describe(group, gone), gone)
    return made


def _create_from_survivors(
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
    tag = zlib.crc32(name.encode()) & _MAX_TAG
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
            time.sleep(_POLL_INTERVAL_S)

    dissemination_barrier(comm, members, tag, wait)
    with communicators.subset(comm, members) as chosen:
        made = comm.Create_group(chosen, tag)
    groups.return_errors(made)
    return made


def _describe(group: ProcessGroup, ranks: list[int]) -> str:
    """Describe the loss. Without ranks, another rank has revoked the communicator."""
    name = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    why = (
        f"has lost {name}, whose process has ended"
        if ranks
        else "has lost a rank, or another rank has failed it, whose error has the reason"
    )
    return (
        f"group {group.group_name} {why}; it cannot be used any more. Create a group of the "
        "survivors with shrink_group, or reconfigure of torch"
    )
