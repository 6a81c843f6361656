"""Device memory of this rank that other ranks map, and how a group lets go of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpicoll import control_messages
from mpicoll.core.work import deadline
from mpicoll.cuda.runtime import Memory, allocate
from mpicoll.cuda.streams import DeviceContext
from mpicoll.launch.serialized_mpi import dissemination_barrier
from mpicoll.routes.device.mappings import open_memory
from mpicoll.routes.device.state import first_problem

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "BLOCK",
    "TOGETHER",
    "Workspaces",
    "all_come",
    "map_each_other",
    "mapped",
]

T = TypeVar("T")

#: Bytes of the blocks that the driver shares out to small allocations: who opens one has them all.
BLOCK = 2 * 1024 * 1024
#: Workspaces that other ranks may map: freeing such memory would pull it away under them.
mapped: list[Memory] = []
#: Seconds to wait for the others to let go of what was mapped in vain: all have just met.
TOGETHER = 60.0
#: The tag of the messages by which ranks meet: above those of routes, below those of new groups.
_TAG = (1 << 14) - 1


class Workspaces(Generic[T]):
    """A workspace of each rank of a group, which all ranks map.

    all:  the workspaces as this process has them, by rank.
    said: what each rank has said of its own.
    """

    def __init__(
        self, group: ProcessGroup, own: Memory, everybody: list[Memory], said: Sequence[T]
    ) -> None:
        self._group, self._own = group, own
        self.all, self.said = everybody, said

    def close(self, limit: float = TOGETHER) -> None:
        """Let go of the others' workspaces; all ranks call. This rank's is freed once no other rank
        maps it any more, or never, if that takes longer than ``limit`` seconds.
        """
        self.all.clear()
        _free_when_unmapped(self._group, self._own, limit)


def map_each_other(
    group: ProcessGroup,
    context: DeviceContext,
    nbytes: int,
    prepare: Callable[[Memory], T],
    kind: type[T],
) -> Workspaces[T] | str:
    """Return workspaces of all ranks, or, on all, why there are none. All ranks call.

    nbytes:  of each, rounded up to whole blocks.
    prepare: fills this rank's workspace, and returns the data that the other ranks need; called
             before they map it.
    kind:    the type of the value that ``prepare`` returns.
    """
    runtime, index, me = context.runtime, context.index, group.rank()
    own, handle, mine, problem = None, b"", None, ""
    everybody: list[Memory] = []
    try:
        own = allocate(runtime, index, -(-nbytes // BLOCK) * BLOCK)
        mine = prepare(own)
        handle = runtime.export(index, own)
        mapped.append(own)
    except Exception as error:  # whatever the driver says: all ranks take another route then
        own, problem = None, f"no workspace: {error}"
    what: Any = tuple[bytes, kind | None, str]  # type: ignore[valid-type]
    said = control_messages.allgather(group.inner, (handle, mine, problem), what)
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
            return Workspaces(group, own, everybody, [words for _, words, _ in said])
    everybody.clear()
    if own is None:
        all_come(group, TOGETHER)  # the others wait until nothing is mapped any more
    else:
        _free_when_unmapped(group, own, TOGETHER)
    return why


def _free_when_unmapped(group: ProcessGroup, own: Memory, limit: float) -> None:
    """Free this rank's workspace once no other rank maps it any more, or never, if that takes
    longer than ``limit`` seconds. All ranks call, when they have let go of the others'.
    """
    if all_come(group, limit):
        mapped.remove(own)


def all_come(group: ProcessGroup, limit: float) -> bool:
    """Return whether all ranks call within ``limit`` seconds.

    Uses messages, because in a failed group a collective of MPI would match one that ranks have
    left.
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
