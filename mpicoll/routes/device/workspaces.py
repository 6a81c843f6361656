"""Memory that all ranks of a group map: device memory by CUDA IPC, and pages of the host."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll import control_messages
from mpicoll.core.work import deadline
from mpicoll.cuda.runtime import Memory, allocate
from mpicoll.cuda.streams import DeviceContext
from mpicoll.routes.device.mappings import BLOCK, open_memory
from mpicoll.routes.device.state import first_problem
from mpicoll.routes.host.shared_segment import share
from mpicoll.serialized_mpi import dissemination_barrier

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "RELEASE_TIMEOUT_S", "Workspaces", "map_each_other", "mapped", "share_pages", "timed_barrier",
]  # fmt: skip

#: Workspaces that other ranks may have mapped, which must not be freed.
mapped: list[Memory] = []
#: Seconds to wait for the other ranks to close their mappings when negotiation fails.
RELEASE_TIMEOUT_S = 60.0
#: Tag of the barrier's messages: above the tags of routes, below those of new groups.
_TAG = (1 << 14) - 1


def share_pages(group: ProcessGroup, nbytes: int) -> Any:
    """Return shared host memory, ``nbytes`` bytes by rank; None if the ranks cannot share memory.
    All ranks call.
    """
    segment = share(group.inner, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, True)
    if segment is None:
        return None
    return np.frombuffer(segment.memory, np.uint8).reshape(group.size(), -1)[:, :nbytes]


class Workspaces:
    """The workspaces of all ranks of a group, which each rank maps.

    all:  the workspaces in this process, by rank.
    said: the numbers that ``prepare`` returned, by rank.
    """

    def __init__(
        self, group: ProcessGroup, own: Memory, everybody: list[Memory], said: Sequence[int]
    ) -> None:
        self._group, self._own = group, own
        self.all, self.said = everybody, said

    def close(self, limit: float = RELEASE_TIMEOUT_S) -> None:
        """Unmap the other ranks' workspaces; all ranks call. See ``_free_when_unmapped``."""
        self.all.clear()
        _free_when_unmapped(self._group, self._own, limit)


def map_each_other(
    group: ProcessGroup, context: DeviceContext, nbytes: int, prepare: Callable[[Memory], int]
) -> Workspaces | str:
    """Return workspaces of all ranks or, on all of them, the reason why there are none. All ranks
    call.

    nbytes:  size of each in bytes, rounded up to whole blocks.
    prepare: fills this rank's workspace, and returns a number that the other ranks need; called
             before they map it.
    """
    runtime, index, me = context.runtime, context.index, group.rank()
    own, handle, mine, problem = None, b"", 0, ""
    everybody: list[Memory] = []
    try:
        own = allocate(runtime, index, -(-nbytes // BLOCK) * BLOCK)
        mine = prepare(own)
        handle = runtime.export(index, own)
        mapped.append(own)
    except Exception as error:
        own, problem = None, f"no workspace: {error}"
    said = control_messages.allgather(group.inner, (handle, mine, problem), tuple[bytes, int, str])
    why = first_problem([words for *_, words in said])
    if own is not None and not why:
        try:
            everybody += (
                own if rank == me else open_memory(context, theirs)
                for rank, (theirs, *_) in enumerate(said)
            )
        except Exception as error:
            problem = f"cannot map another rank's device memory (CUDA IPC): {error}"
        why = first_problem(control_messages.allgather(group.inner, problem, str))
        if not why:
            return Workspaces(group, own, everybody, [number for _, number, _ in said])
    everybody.clear()
    if own is None:
        timed_barrier(group, RELEASE_TIMEOUT_S)
    else:
        _free_when_unmapped(group, own, RELEASE_TIMEOUT_S)
    return why


def _free_when_unmapped(group: ProcessGroup, own: Memory, limit: float) -> None:
    """Free this rank's workspace once no rank maps it. All ranks call after they have unmapped the
    other ranks' workspaces. If one does not within ``limit`` seconds, it is never freed.
    """
    if timed_barrier(group, limit):
        mapped.remove(own)


def timed_barrier(group: ProcessGroup, limit: float) -> bool:
    """Run a barrier; return False if it timed out after ``limit`` seconds.

    It uses messages, because ranks of a failed group may have left MPI collectives that MPI_Barrier
    would be matched with.
    """
    moment = deadline(limit)

    def wait(request: MPI.Request, status: MPI.Status | None) -> None:
        while not request.Test():
            if time.monotonic() > moment:
                raise TimeoutError
            time.sleep(1e-4)

    try:
        dissemination_barrier(group.inner, range(group.size()), _TAG, wait)
    except TimeoutError:
        return False
    return True
