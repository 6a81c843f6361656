"""Device memory of this rank that other ranks map, and how a group lets go of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpicoll.core.work import deadline
from mpicoll.cuda.runtime import Memory

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["BLOCK", "free_when_unmapped", "mapped"]

#: Bytes of the blocks that the driver shares out to small allocations: who opens one has them all.
BLOCK = 2 * 1024 * 1024
#: Workspaces that other ranks may map: freeing such memory would pull it away under them.
mapped: list[Memory] = []


def free_when_unmapped(group: ProcessGroup, own: Memory, limit: float) -> None:
    """Free this rank's workspace once no other rank maps it any more, or never, if that takes
    longer than ``limit`` seconds. All ranks call, when they have let go of the others'.
    """
    request, moment = group.inner.Ibarrier(), deadline(limit)
    while not request.Test():
        if time.monotonic() > moment:
            return
        time.sleep(1e-4)
    mapped.remove(own)
