"""Shared-memory segments of the ranks of a node."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll import control_messages

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Segment", "share"]


class Segment(NamedTuple):
    """The memory of a segment, with one region per rank, and the number of processors that the
    ranks may run on.
    """

    memory: mmap.mmap
    processors: int


def share(comm: MPI.Intracomm, region: int, able: bool) -> Segment | None:
    """Return a zeroed segment with ``region`` bytes, a multiple of the page size, for each rank of
    ``comm``. All ranks call.

    None on all ranks if one of them cannot use it: not ``able``, on another node, of another user,
    in another container, out of memory, or with another ``region`` (another C library).

    Rank 0 creates an anonymous file (memfd_create, Linux), which the other ranks open through
    /proc. The kernel frees the memory when no process maps it, so killed ranks leave nothing
    behind. Forked children keep the mapping without using it. (An MPI window must be freed
    collectively, and MPI does not report which ranks can share one.)
    """
    me, n = comm.Get_rank(), comm.Get_size()
    name = f"mpicoll-{os.urandom(16).hex()}"
    file = _made(name, n * region) if me == 0 and able else None
    where = None if file is None else f"/proc/{os.getpid()}/fd/{file}"
    name, where = control_messages.bcast(comm, (name, where), 0, tuple[str, str | None])
    if me != 0 and able and where is not None:
        file = _opened(name, where)
    memory = None
    if file is not None:
        with suppress(OSError):
            # Each rank allocates its own region, on its NUMA node. A lack of memory fails here.
            os.posix_fallocate(file, me * region, region)
            memory = _mapped(file, n * region)
    own = memory is not None, region, _processors()
    everybody = control_messages.allgather(comm, own, tuple[bool, int, set[int]])
    if file is not None:  # all ranks have opened it
        os.close(file)
    if memory is None or not all(has and theirs == region for has, theirs, _ in everybody):
        return None
    return Segment(memory, len(set().union(*(each for *_, each in everybody))))


def _mapped(file: int, size: int) -> mmap.mmap:
    """Map a file without keeping its descriptor open. Raises OSError."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, size, trackfd=False)
    # Before Python 3.13, mmap keeps it open: map the file over anonymous memory.
    memory = mmap.mmap(-1, size)
    place = np.frombuffer(memory, np.uint8).ctypes.data
    shared = mmap.MAP_SHARED | _MAP_FIXED
    if _libc().mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, shared, file, 0) != place:
        raise OSError(ctypes.get_errno(), "mmap")
    return memory


#: The value of Linux, on every supported architecture.
_MAP_FIXED = 0x10


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    return libc


def _made(name: str, size: int) -> int | None:
    try:
        file = os.memfd_create(name)
    except OSError:
        return None
    with suppress(OSError):
        os.ftruncate(file, size)
        return file
    os.close(file)
    return None


def _opened(name: str, where: str) -> int | None:
    """Open rank 0's file. Check its name, because the path may exist on another machine."""
    with suppress(OSError):
        if str(Path(where).readlink()).startswith(f"/memfd:{name}"):
            return os.open(where, os.O_RDWR)
    return None


def _processors() -> set[int]:
    return os.sched_getaffinity(0)
