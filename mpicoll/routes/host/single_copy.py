"""Single-copy data movement between the ranks of a node, by the Linux kernel (process_vm_readv).

A process may read and write the memory of another process of its user, unless a container filters
the system call or Yama (kernel.yama.ptrace_scope) restricts it. So each rank tries it with every
other rank before a group uses this route. The route does not call prctl(PR_SET_PTRACER), which
would admit any process of the user.

The ranks exchange the addresses of their arrays through shared memory; the algorithm is in
``kernels/src/single_copy.c``. If memory cannot be copied this way, such as mapped device memory,
all ranks move the data through the slots of the shared memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import settings
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind, Contiguous, Extent, Implementation
from mpicoll.core.signature import encode_kind
from mpicoll.kernels.calls import LISTS
from mpicoll.kernels.library import kernels
from mpicoll.routes.host import shared
from mpicoll.routes.route import EXCHANGES, MOVES, Needs, Policy, Route, Serves


class SingleCopy:
    """A group whose ranks can read and write each other's memory."""

    def __init__(self, group: ProcessGroup, memory: shared.Shared, peers: _Peers) -> None:
        self.memory = memory
        self.processes = memory.kernels.Processes(
            memory.pointer, peers.pids.ctypes.data, peers.tokens.ctypes.data, group.size(),
            group.rank(),
        )  # fmt: skip
        self._kept: list[Any] = [peers]  # the C library has the addresses of their memory

    def build(self, kind: CallKind) -> Implementation:
        """Return the implementation, which raises MismatchError on all ranks if primitive, count,
        dtype or root differ, or if a block of all_to_all has two sizes.
        """
        primitive, _, _, dtype = kind
        assert dtype is not None
        library = self.memory.kernels
        plan = library.Copies(
            ctypes.addressof(self.processes), encode_kind(primitive, dtype, None, 0),
            dtype.itemsize, primitive.many_in, primitive.root == "src", primitive.root == "dst",
            ctypes.addressof(self.memory.described(kind)),
        )  # fmt: skip
        self._kept.append(plan)
        at = ctypes.addressof(plan)
        if not primitive.even:
            function = library.single_copy_all_to_all
            return shared.Exchange(self.memory, kind, None, function, at, owner=self)
        function = library.single_copy_lists

        def run(
            send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int
        ) -> None:
            out, into = shared.blocks_of_call(kind, recv if send is None else send, recv, extent)
            self.memory.call(function, at, out.ctypes.data, into.ctypes.data, extent, root)

        return shared.Native(run, [self.memory.native_call(self, LISTS, function, at)])

    def finish(self, result: int, send: Any, recv: Any, extent: Extent) -> None:
        """Raise the error of a failed native call."""
        raise self.memory.failure(result)


# --- whether it is allowed ----------------------------------------------------------------------


class _Peers(NamedTuple):
    """The processes of a group's ranks: by rank, process ids, random words and their addresses;
    and this process's copy of the words.
    """

    pids: Any
    words: Any
    tokens: Any
    own: Any


class _Attempt(NamedTuple):
    """The result of ``_create``: ``copies`` is None on all ranks or on none; ``why`` is the reason
    why this rank cannot copy, or "".
    """

    copies: SingleCopy | None
    why: str


def find_obstacle(group: ProcessGroup) -> str:
    """Return the reason why this rank cannot use single copies; "" if it can or has not tried."""
    attempt = group.resources.find("single_copy")
    return "" if attempt is None else attempt.why


def _create(group: ProcessGroup) -> _Attempt:
    """Try to copy from and to every other rank. All ranks call."""
    memory = shared.get_or_create(group)
    if memory is None:
        return _Attempt(None, "the ranks share no memory")
    peers = _find_peers(group)
    for why in _try(memory, group.rank(), peers):
        able = np.array([not why], np.uint8)
        group.tested.Allreduce(MPI.IN_PLACE, able, MPI.MIN)
        if not able[0]:
            return _Attempt(None, why)
    return _Attempt(SingleCopy(group, memory, peers), "")


def _find_peers(group: ProcessGroup) -> _Peers:
    n, me = group.size(), group.rank()
    own = np.zeros(n, np.uint64)
    own[me] = int.from_bytes(os.urandom(8), "little")
    mine = np.array([os.getpid(), own.ctypes.data + 8 * me, own[me]], np.uint64)
    everybody = np.empty((n, 3), np.uint64)
    group.tested.Allgather(mine, everybody)
    pids, tokens, words = (np.ascontiguousarray(column) for column in everybody.T)
    return _Peers(pids, words, tokens, own)


def _try(memory: shared.Shared, me: int, peers: _Peers) -> Iterator[str]:
    """Yield after each step why this rank failed, or "". If one rank fails, no rank continues."""
    why, n = "", len(peers.pids)
    others = [rank for rank in range(n) if rank != me]
    if settings.SINGLE_COPY.is_set_to("0"):
        why = f"{settings.SINGLE_COPY.name}=0"
    elif memory.kernels.single_copy_descriptor_size(n) > memory.slot:
        why = "the shared memory has no room for the addresses of all ranks"
    yield why
    # Reads first, because a process id may belong to another process in another namespace.
    word = np.zeros(1, np.uint64)
    for rank in others:
        error = _copy(peers.pids[rank], False, word, peers.tokens[rank])
        if error:
            why = f"rank {rank}'s memory cannot be read: {os.strerror(error)}"
        elif word[0] != peers.words[rank]:
            why = f"rank {rank} has another process ID here, because it is in another container"
    yield why
    for rank in others:
        place = peers.tokens[rank] + np.uint64(8 * me) - np.uint64(8 * rank)
        error = _copy(peers.pids[rank], True, peers.own[me : me + 1], place)
        if error:
            why = f"rank {rank}'s memory cannot be written: {os.strerror(error)}"
    yield why
    for rank in others:
        if peers.own[rank] != peers.words[rank]:
            why = f"rank {rank} wrote to this rank's memory, but the data did not arrive"
    yield why


def _copy(pid: Any, writes: bool, word: Any, there: Any) -> int:
    """Copy a word from or to another process; return 0, or the number of the system's error."""
    assert kernels is not None
    copy, address = kernels.single_copy_bytes, word.ctypes.data
    error: int = copy(int(pid), writes, address, int(there), word.nbytes)
    return error


def get_or_create(group: ProcessGroup) -> SingleCopy | None:
    """Return the ``SingleCopy`` of a group, or None on all its ranks. All ranks call."""
    attempt = group.resources.get_or_create(
        "single_copy", lambda: _create(group), abandon=lambda _: None
    )
    return attempt.copies


def _build(kind: CallKind) -> Implementation | None:
    copies = get_or_create(kind.group)
    return None if copies is None else copies.build(kind)


ROUTE = Route(
    __name__,
    "one copy by the kernel",
    Serves((*MOVES, *EXCHANGES), uneven=EXCHANGES, buffer_lists=True),
    _build,
    Needs(
        "node",
        "all ranks on one node, allowed to read and write each other's memory, and the C library",
    ),
    Policy(compares_calls=True, fallback="shared"),
)
