"""Shared-memory segments of the ranks of a node."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import control_messages
from mpicoll.machine import format_ranges

#: Maximum number of threads per rank: a few processors saturate the memory's bandwidth.
MAX_THREADS = 8


class Segment(NamedTuple):
    """The memory of a segment, with a region per rank and thread, the number of processors that
    the ranks may run on, the number of threads per rank, the processors of each rank, and whether
    all ranks may call MPI from C.
    """

    memory: mmap.mmap
    processors: int
    threads: int
    placement: str
    calls_mpi: bool


def share(comm: MPI.Intracomm, region: int, able: bool, calls_mpi: bool = False) -> Segment | None:
    """Return a zeroed segment with ``region`` bytes, a multiple of the page size, for each thread
    of each rank of ``comm``. All ranks call.

    None on all ranks if one of them cannot use it: not ``able``, on another node, of another user,
    in another container, out of memory, or with another ``region`` (another C library).

    Rank 0 creates an anonymous file (memfd_create, Linux), which the other ranks open through
    /proc. The kernel frees the memory when no process maps it, so killed ranks leave nothing
    behind. Forked children keep the mapping without using it. (An MPI window must be freed
    collectively, and MPI does not report which ranks can share one.)
    """
    me, n = comm.Get_rank(), comm.Get_size()
    name = f"mpicoll-{os.urandom(16).hex()}"
    file = _made(name) if me == 0 and able else None
    where = None if file is None else f"/proc/{os.getpid()}/fd/{file}"
    name, where = control_messages.bcast(comm, (name, where), 0, tuple[str, str | None])
    if me != 0 and able and where is not None:
        file = _opened(name, where)
    own = file is not None, region, _processors(), _thread_limit(), calls_mpi
    everybody = control_messages.allgather(comm, own, tuple[bool, int, set[int], int, bool])
    had, regions, places, limits, calling = zip(*everybody, strict=True)
    processors = len(set().union(*places))
    threads = max(1, min(processors // n, *limits))
    able = all(had) and set(regions) == {region}
    memory, size = None, threads * region
    if file is not None:
        with suppress(OSError):
            if able:
                # Each rank allocates its own memory, on its NUMA node. A lack of it fails here.
                os.posix_fallocate(file, me * size, size)
                memory = _mapped(file, n * size)
        os.close(file)
    mapped = np.array([memory is not None], np.uint8)
    comm.Allreduce(MPI.IN_PLACE, mapped, MPI.MIN)
    if not mapped[0] or memory is None:
        return None
    placement = " ".join(map(format_ranges, places))
    return Segment(memory, processors, threads, placement, all(calling))


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


def _made(name: str) -> int | None:
    with suppress(OSError):
        return os.memfd_create(name)
    return None


def _opened(name: str, where: str) -> int | None:
    """Open rank 0's file. Check its name, because the path may exist on another machine."""
    with suppress(OSError):
        if str(Path(where).readlink()).startswith(f"/memfd:{name}"):
            return os.open(where, os.O_RDWR)
    return None


def _processors() -> set[int]:
    return os.sched_getaffinity(0)


def _thread_limit() -> int:
    """Return the maximum number of threads that this rank's calls may use."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(first), MAX_THREADS) if first.isdecimal() and int(first) else MAX_THREADS
