"""Lost ranks in jobs that survive them: survivors create a group that replaces the failed one.

With Open MPI under ``mpirun --with-ft ulfm``, MPI has user-level failure mitigation (W. Bland et
al., "Post-failure recovery of MPI communication capability", IJHPCA 27, 2013). A call that needs a
lost rank returns an error, and the rank then revokes the communicator, so that other ranks do not
wait for it. The ULFM calls of MPICH 5 hang, so they are not used.

In all other jobs a lost rank ends the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from mpicoll import communicators
from mpicoll.core.groups import ProcessGroup, return_errors
from mpicoll.errors import ArgumentError, LostRankError
from mpicoll.failures import rank_status
from mpicoll.failures.report import format_ranks
from mpicoll.launch.world import skip_finalize

if TYPE_CHECKING:
    from mpi4py import MPI

_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"
#: Time for MPI to find the lost rank after another rank has revoked a communicator.
_DETECT_TIMEOUT_S, _POLL_INTERVAL_S = 1.0, 2e-3
#: MPI detects losses in about one of a hundred calls: number of calls to make, and the minimum time
#: until they are made again.
_PROBE_COUNT, _PROBE_INTERVAL_S = 2000, 0.1

_next_probes = 0.0  # by time.monotonic


def is_fault_tolerant() -> bool:
    """Return whether MPI continues when a rank is lost and can revoke communicators (ULFM)."""
    return os.environ.get(_FT_VARIABLE, "").lower() in ("1", "true", "yes")


def revoke(group: ProcessGroup) -> None:
    """Make pending MPI calls of a failed group return on all ranks, if MPI has ULFM."""
    if is_fault_tolerant():
        for comm in (group.inner, group.messages):
            comm.Revoke()


def check(group: ProcessGroup) -> bool:
    """Return whether a rank of the group is lost; if so, fail the group. Each survivor does so."""
    rank_status.receive(group)  # MPI detects losses inside its calls
    with rank_status.lock:
        if isinstance(group.error, LostRankError):
            return True
        if group.closed is not None or rank_status.is_suspended.is_set():
            return False
        revoked = group.inner.Is_revoked() or group.messages.Is_revoked()
        lost = _find(group, _DETECT_TIMEOUT_S if revoked else 0.0)
        if not lost and not revoked:
            return False
        revoke(group)
    group.fail(LostRankError(_describe(group, lost), lost))
    group.resources.leave(alone=True)
    skip_finalize()  # MPI_Finalize may wait for the lost rank
    return True


def _find(group: ProcessGroup, seconds: float, expected: Collection[int] = ()) -> list[int]:
    """Return the lost global ranks of a group that this rank has detected.

    seconds: time to wait for a lost rank, or for all that are expected.
    """
    from mpi4py import MPI

    global _next_probes
    end = time.monotonic() + seconds
    while True:
        if (now := time.monotonic()) > _next_probes:
            _next_probes = now + _PROBE_INTERVAL_S
            for _ in range(_PROBE_COUNT):
                MPI.COMM_SELF.Iprobe()
        failed, members = group.messages.Get_failed(), group.messages.Get_group()
        lost = sorted(group.ranks[rank] for rank in failed.Translate_ranks(None, members))
        failed.Free()
        members.Free()
        if (lost and set(expected) <= set(lost)) or time.monotonic() > end:
            return lost
        MPI.COMM_SELF.Iprobe()
        time.sleep(_POLL_INTERVAL_S)


def shrink(group: ProcessGroup, excluded: Collection[int], where: str) -> MPI.Intracomm:
    """Create the communicator of a failed group's survivors, in their order. All survivors call.

    excluded: the group ranks that the caller knows to be lost.

    Raises ArgumentError if one of them is alive, and LostRankError on all survivors if another rank
    is also lost.
    """
    named = sorted(group.ranks[rank] for rank in excluded)
    lost = _find(group, _DETECT_TIMEOUT_S, named)
    if not set(named) <= set(lost):
        raise ArgumentError(
            f"{where}: ranks_to_exclude: group {group.group_name} has lost global ranks {lost}, "
            f"got global ranks {named}; exclude group ranks "
            f"{[group.group_rank(rank) for rank in lost]}, and shrink the new group to exclude more"
        )
    # MPI_Comm_shrink agrees on the survivors, and works on a revoked communicator.
    made = cast("MPI.Intracomm", group.inner.Shrink())
    return_errors(made)
    found = communicators.translate_ranks(group.inner, made)
    gone = [group.ranks[rank] for rank, other in enumerate(found) if other is None]
    if gone != named:
        made.Free()
        raise LostRankError(_describe(group, gone), gone)
    return made


def _describe(group: ProcessGroup, ranks: list[int]) -> str:
    """Describe the loss. Without ranks, another rank has revoked the communicator."""
    why = (
        f"has lost {format_ranks(ranks)}, whose process has ended"
        if ranks
        else "has lost a rank, or another rank has closed it after an error; see that error"
    )
    return (
        f"group {group.group_name} {why}; it cannot be used any more. Create a group of the "
        "survivors with shrink_group, or reconfigure of torch"
    )
