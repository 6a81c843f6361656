"""Single-copy data movement between the ranks of a node, by the Linux kernel (process_vm_readv).

A process may read and write the memory of another process of its user, unless a container filters
the system call or Yama (kernel.yama.ptrace_scope) restricts it. So each rank tries it with every
other rank before a group uses it. mpicoll does not call prctl(PR_SET_PTRACER), which would admit
any process of the user.

The ranks exchange the addresses of their arrays through shared memory; the algorithm is in
``kernels/src/single_copy.c``. If memory cannot be copied this way, such as mapped device memory,
all ranks move the data through the slots of the shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import settings
from mpicoll.core.groups import ProcessGroup
from mpicoll.kernels.library import kernels


class Peers(NamedTuple):
    """By rank: process ids, random words and their addresses; this process's copy of the words."""

    pids: Any
    words: Any
    tokens: Any
    own: Any


def find_peers(group: ProcessGroup, slot: int) -> tuple[Peers | None, str]:
    """Try to copy from and to every other rank. Returns their processes, None on all ranks if one
    of them cannot, and the reason why this rank cannot, or "". All ranks call.

    slot: bytes of shared memory for a descriptor.
    """
    n, me = group.size(), group.rank()
    own = np.zeros(n, np.uint64)
    own[me] = int.from_bytes(os.urandom(8), "little")
    mine = np.array([os.getpid(), own.ctypes.data + 8 * me, own[me]], np.uint64)
    everybody = np.empty((n, 3), np.uint64)
    group.tested.Allgather(mine, everybody)
    pids, tokens, words = (np.ascontiguousarray(column) for column in everybody.T)
    peers = Peers(pids, words, tokens, own)
    assert kernels is not None
    for why in _try(kernels.single_copy_descriptor_size(n) <= slot, me, peers):
        able = np.array([not why], np.uint8)
        group.tested.Allreduce(MPI.IN_PLACE, able, MPI.MIN)
        if not able[0]:
            return None, why
    return peers, ""


def _try(has_room: bool, me: int, peers: Peers) -> Iterator[str]:
    """Yield after each step why this rank failed, or "". If one rank fails, no rank continues."""
    why = ""
    others = [rank for rank in range(len(peers.pids)) if rank != me]
    if settings.SINGLE_COPY.is_set_to("0"):
        why = f"{settings.SINGLE_COPY.name}=0"
    elif not has_room:
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
