"""Ranks that are lost where MPI outlives them: Open MPI under ``mpirun --with-ft ulfm``.

User-level failure mitigation (W. Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 27, 2013): a call that needs a lost rank ends with an error. Whoever gets one
revokes the communicator, so that nobody waits for a rank that has given up. The survivors can go
on: ``mpicoll.api.reconfigure`` makes a group of them. Everywhere else a lost rank ends the job.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpicoll import launch
from mpicoll.errors import LostRankError
from mpicoll.watch import positions

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["look", "survives"]

_SAYS_SO = "OMPI_MCA_mpi_ft_enable"


def survives() -> bool:
    """MPI goes on where a rank is lost. The launcher says so, to all ranks alike."""
    return os.environ.get(_SAYS_SO, "").lower() in ("1", "true", "yes")


def look(group: ProcessGroup) -> bool:
    """Ends the group's calls, pending ones too, where one of its ranks is lost, and tells so."""
    positions.look(group)  # MPI hears of losses inside its calls
    with positions.lock:
        if isinstance(group.broken, LostRankError):
            return True
        if group.closed is not None:
            return False
        failed, everybody = group.messages.Get_failed(), group.messages.Get_group()
        gone = failed.Translate_ranks(None, everybody)
        failed.Free()
        everybody.Free()
        revoked = group.inner.Is_revoked() or group.messages.Is_revoked()
        if not gone and not revoked:
            return False
        lost = sorted(group.ranks[rank] for rank in gone)
        group.broken = LostRankError(_words(group, lost), lost)
        group.next_check = 0
        for comm in (group.inner, group.messages):
            comm.Revoke()
        if shared := group.resources.find("shared"):
            shared.leave()
        launch.skip_finalize()  # MPI_Finalize may wait for the one that is lost
    return True


def _words(group: ProcessGroup, ranks: list[int]) -> str:
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else "a rank"
    return (
        f"group {group.group_name} has lost {who}, whose process has ended; it cannot be used any "
        "more. torch's reconfigure makes a group of those that live"
    )
