"""Lost ranks where MPI survives them: Open MPI under ``mpirun --with-ft ulfm``.

User-level failure mitigation (W. Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 27, 2013): a call that needs a lost rank ends with an error. A rank that gets
one revokes the communicator, so that no rank waits for one that has given up. The survivors can go
on: ``mpicoll.api.reconfigure`` makes a group of them. Everywhere else a lost rank ends the job.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpicoll import launch
from mpicoll.errors import LostRankError
from mpicoll.watch import rank_status

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["check", "is_fault_tolerant"]

_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"


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
        failed, members = group.messages.Get_failed(), group.messages.Get_group()
        failed_ranks = failed.Translate_ranks(None, members)
        failed.Free()
        members.Free()
        revoked = group.inner.Is_revoked() or group.messages.Is_revoked()
        if not failed_ranks and not revoked:
            return False
        lost = sorted(group.ranks[rank] for rank in failed_ranks)
        group.broken = LostRankError(_describe(group, lost), lost)
        group.next_check = 0
        for comm in (group.inner, group.messages):
            comm.Revoke()
        if shared := group.resources.find("shared"):
            shared.leave()
        launch.skip_finalize()  # MPI_Finalize may wait for the one that is lost
    return True


def _describe(group: ProcessGroup, ranks: list[int]) -> str:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
    return (
        f"group {group.group_name} has lost {who}, whose process has ended; it cannot be used any "
        "more. torch's reconfigure makes a group of those that live"
    )
