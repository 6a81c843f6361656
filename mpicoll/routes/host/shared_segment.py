"""Memory that all ranks of a group share, where they are on one node."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import sys
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll.core.pickles import Bytes
from mpicoll.routes.wire import all_gather_bytes, broadcast_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Segment", "allocate", "attach", "exchange_words", "place", "share"]


class Segment(NamedTuple):
    """Shared memory: n regions, one a rank, how many processors the ranks may run on, and which of
    them this one may.
    """

    memory: mmap.mmap
    processors: int
    own: set[int]


def share(comm: MPI.Intracomm, region: int, able: bool) -> Segment | None:
    """Return memory of ``region`` bytes, a multiple of the page size, for each rank of ``comm``;
    zeros.

    None on every rank if one cannot have it: they are not on one node, not of one user, in
    different containers, out of memory, one is not ``able`` to use it, or has regions of another
    size, as its C library is another. All ranks call.

    Rank 0 makes a file that is nothing but memory and has no name in any file system (memfd_create,
    Linux); the others open it through /proc. So a killed rank leaves nothing behind, there is no
    limit but memory itself, and nothing to free together: the memory goes when the last rank lets
    go of it, whatever became of the others and of their forked children, which map it without using
    it. (If unmapped, other memory would get its addresses, and be lost with the rest of the
    mapping.) (A window of MPI is freed by all together, and MPI does not say which ranks can share
    one.)
    """
    me, n = comm.Get_rank(), comm.Get_size()
    name = f"mpicoll-{secrets.token_hex(16)}"
    file = _made(name, n * region) if me == 0 and able else None
    where = None if file is None else f"/proc/{os.getpid()}/fd/{file}"
    name, where = _words(broadcast_bytes(comm, _bytes([name, where]), 0))
    if me != 0 and able and where is not None:
        file = _opened(name, where)
    memory = None
    if file is not None:
        with suppress(OSError):
            # Each its own part, which so comes to lie near it; a lack of memory shows now.
            os.posix_fallocate(file, me * region, region)
            memory = _mapped(file, n * region)
    processors = _processors()
    everybody = exchange_words(comm, [memory is not None, region, sorted(processors)])
    if file is not None:  # not before all have opened it
        os.close(file)
    if memory is None or not all(has and theirs == region for has, theirs, _ in everybody):
        return None
    return Segment(memory, len(set().union(*(each for *_, each in everybody))), processors)


def exchange_words(comm: MPI.Intracomm, own: list[Any]) -> list[list[Any]]:
    """Return every rank's words: what JSON knows. All ranks call."""
    return [_words(each) for each in all_gather_bytes(comm, _bytes(own))]


# --- memory of one rank that others may map -----------------------------------------------------

#: By address, the memory that ``allocate`` has given: its size, and its file's name and descriptor.
_allocated: dict[int, tuple[int, str, int]] = {}


def allocate(nbytes: int) -> mmap.mmap | None:
    """Return zeroed memory of this process that others of this node can map; None if there is none.

    It is a file like that of ``share``, kept open as long as the memory is used, for others to
    find.
    """
    name, size = f"mpicoll-{secrets.token_hex(16)}", max(nbytes, 1)
    file = _made(name, size)
    if file is None:
        return None
    try:
        os.posix_fallocate(file, 0, size)
        memory = _mapped(file, size)
    except OSError:
        os.close(file)
        return None
    start = np.frombuffer(memory, np.uint8).ctypes.data
    _allocated[start] = (size, name, file)
    weakref.finalize(memory, _forget, start, file).atexit = False
    return memory


def _forget(start: int, file: int) -> None:
    del _allocated[start]
    os.close(file)


def place(start: int, nbytes: int) -> list[Any] | None:
    """Return where other processes find memory of ``allocate``: name, path, and where in it
    ``start`` is; None for other memory.
    """
    for begin, (size, name, file) in list(_allocated.items()):
        if begin <= start and start + nbytes <= begin + size:
            return [name, f"/proc/{os.getpid()}/fd/{file}", start - begin]
    return None


def attach(name: str, where: str) -> mmap.mmap | None:
    """Map what another process has allocated; return None if it is not on this node."""
    file = _opened(name, where)
    if file is None:
        return None
    try:
        return _mapped(file, os.fstat(file).st_size)
    except OSError:
        return None
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> mmap.mmap:
    """Map a file; the mapping keeps no descriptor of it open. Raises OSError.

    Before Python 3.13 a mapping of a file does, so it takes the place of one that has none.
    """
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, size, trackfd=False)
    memory = mmap.mmap(-1, size)
    place = np.frombuffer(memory, np.uint8).ctypes.data
    shared = mmap.MAP_SHARED | _MAP_FIXED
    if _libc().mmap(place, size, mmap.PROT_READ | mmap.PROT_WRITE, shared, file, 0) != place:
        raise OSError(ctypes.get_errno(), "mmap")
    return memory


#: Of Linux, on every architecture that mpicoll knows.
_MAP_FIXED = 0x10


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    return libc


def _bytes(words: list[Any]) -> Bytes:
    return np.frombuffer(json.dumps(words).encode(), np.uint8)


def _words(words: Bytes) -> list[Any]:
    found: list[Any] = json.loads(words.tobytes())
    return found


def _made(name: str, size: int) -> int | None:
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not Linux, or not allowed
        return None
    with suppress(OSError):
        os.ftruncate(file, size)
        return file
    os.close(file)
    return None


def _opened(name: str, where: str) -> int | None:
    """Open rank 0's file, and no other that may be found there: this may be another machine."""
    with suppress(OSError):
        if str(Path(where).readlink()).startswith(f"/memfd:{name}"):
            return os.open(where, os.O_RDWR)
    return None


def _processors() -> set[int]:
    """Return the processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return set(range(os.cpu_count() or 1)) if affinity is None else affinity(0)
