"""Lost ranks where MPI survives them: Open MPI under ``mpirun --with-ft ulfm``.

User-level failure mitigation (W. Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 27, 2013): a call that needs a lost rank ends with an error. A rank that gets
one revokes the communicator, so that no rank waits for one that has given up. The survivors can go
on: ``mpicoll.api.reconfigure`` makes a group of them. Everywhere else a lost rank ends the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from mpicoll import communicators, launch
from mpicoll.core import groups
from mpicoll.errors import ArgumentError, LostRankError
from mpicoll.watch import rank_status

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = ["check", "is_fault_tolerant", "shrink"]

_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"
#: Seconds in which MPI learns which rank is lost, once another rank has said that one is.
_NEWS, _PAUSE = 1.0, 2e-3


def is_fault_tolerant() -> bool:
    """Return whether MPI goes on when a rank is lost, by what the launcher tells all ranks."""
    return os.environ.get(_FT_VARIABLE, "").lower() in ("1", "true", "yes")


def check(group: ProcessGroup) -> bool:
    """Return whether a rank of the group is lost; if so, end its calls, pending ones too."""
    rank_status.receive(group)  # MPI learns of losses inside its calls
    with rank_status.lock:
        if isinstance(group.broken, LostRankError):
            return True
        if group.closed is not None:
            return False
        revoked = group.inner.Is_revoked() or group.messages.Is_revoked()
        lost = _find(group, _NEWS if revoked else 0.0)
        if not lost and not revoked:
            return False
        group.broken = LostRankError(_describe(group, lost), lost)
        group.next_check = 0
        for comm in (group.inner, group.messages):
            comm.Revoke()
        if shared := group.resources.find("shared"):
            shared.leave()
        launch.skip_finalize()  # MPI_Finalize may wait for the one that is lost
    return True


def _find(group: ProcessGroup, seconds: float, expected: Collection[int] = ()) -> list[int]:
    """Return the lost global ranks of a group, as far as MPI knows.

    seconds: how long to wait until it knows of one, or of all that are expected.
    """
    from mpi4py import MPI

    end = time.monotonic() + seconds
    while True:
        failed, members = group.messages.Get_failed(), group.messages.Get_group()
        lost = sorted(group.ranks[rank] for rank in failed.Translate_ranks(None, members))
        failed.Free()
        members.Free()
        if (lost and set(expected) <= set(lost)) or time.monotonic() > end:
            return lost
        MPI.COMM_SELF.Iprobe()  # MPI hears of losses inside its calls
        time.sleep(_PAUSE)


def shrink(group: ProcessGroup, excluded: Collection[int], where: str) -> MPI.Intracomm:
    """Create the communicator of a broken group's survivors, in their order; all of them call.

    excluded: the ranks in the group that the caller knows to be lost.

    Raises ArgumentError where they are not the lost ones: on all survivors if it is only found out
    when they meet that another is lost.
    """
    named = sorted(group.ranks[rank] for rank in excluded)
    lost = _find(group, _NEWS, named)
    if lost != named:
        raise ArgumentError(_not_the_lost(group, named, lost, where))
    # MPI_Comm_shrink agrees on who is there, and works on a revoked communicator.
    made = group.inner.Shrink()
    groups.return_errors(made)
    found = communicators.translate_ranks(group.inner, made)
    gone = [group.ranks[rank] for rank, other in enumerate(found) if other is None]
    if gone != named:
        made.Free()
        raise ArgumentError(_not_the_lost(group, named, gone, where))
    return made


def _not_the_lost(group: ProcessGroup, named: list[int], lost: list[int], where: str) -> str:
    ranks = [group.group_rank(rank) for rank in lost]
    return (
        f"{where}: ranks_to_exclude: group {group.group_name} has lost global ranks {lost}, got "
        f"global ranks {named}; exclude the lost ones, {ranks} in the group, and shrink the result "
        "again to leave out others"
    )


def _describe(group: ProcessGroup, ranks: list[int]) -> str:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
    return (
        f"group {group.group_name} has lost {who}, whose process has ended; it cannot be used any "
        "more. shrink_group makes a group of those that live, and torch's reconfigure does"
    )
