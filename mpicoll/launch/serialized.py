"""Communicators for MPI libraries that let one thread in at a time.

Where MPI gives less than MPI_THREAD_MULTIPLE, one lock serves the whole process. A thread that
blocked inside MPI would keep the lock from others whose messages it may be waiting for, so
blocking calls become their non-blocking twins, tested under the lock and waited for outside of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["plain", "serialize", "window"]

_lock = threading.RLock()
#: Seconds between two tests of what is not complete yet, at the longest.
_LONGEST = 200e-6


def serialize(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The communicator, with every call under the process's one lock."""
    return cast("MPI.Intracomm", _Communicator(comm))


def plain(comm: MPI.Intracomm) -> MPI.Intracomm:
    """The communicator as mpi4py made it."""
    return comm._comm if isinstance(comm, _Communicator) else comm


def window(memory: Any, comm: MPI.Intracomm) -> MPI.Win:
    """A window of ``memory``, in bytes, as the communicator is: under the lock or not. A flush
    moves what the others wait for, so the one that blocks in it holds up nobody for good.
    """
    from mpi4py import MPI

    if isinstance(comm, _Communicator):
        with _lock:
            return cast("MPI.Win", _Locked(MPI.Win.Create(memory, 1, MPI.INFO_NULL, comm._comm)))
    return MPI.Win.Create(memory, 1, MPI.INFO_NULL, comm)


class _Request:
    """A request whose every call is under the lock."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def Test(self, status: MPI.Status | None = None) -> bool:
        with _lock:
            return self._request.Test(status)

    def Wait(self, status: MPI.Status | None = None) -> None:
        pause = 1e-6
        while not self.Test(status):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def Cancel(self) -> None:
        with _lock:
            self._request.Cancel()


class _Locked:
    """Something of MPI's, whose every call is under the lock, and blocks with it held."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def locked(*args: Any, **kwargs: Any) -> Any:
            with _lock:
                return method(*args, **kwargs)

        return locked


class _Communicator(_Locked):
    """The calls of a communicator that mpicoll makes.

    What has no twin below, creating communicators above all, blocks with the lock held.
    """

    @property
    def _comm(self) -> MPI.Intracomm:
        return self._inner  # type: ignore[no-any-return]

    def _begin(self, start: Callable[..., MPI.Request], *args: Any) -> _Request:
        with _lock:
            return _Request(start(*args))

    def Create(self, *args: Any) -> _Communicator:
        with _lock:
            return _Communicator(cast("MPI.Intracomm", self._comm.Create(*args)))

    def Create_group(self, *args: Any) -> _Communicator:
        with _lock:
            return _Communicator(self._comm.Create_group(*args))

    def Dup(self) -> _Communicator:
        with _lock:
            return _Communicator(self._comm.Dup())

    def Isend(self, *args: Any) -> _Request:
        return self._begin(self._comm.Isend, *args)

    def Irecv(self, *args: Any) -> _Request:
        return self._begin(self._comm.Irecv, *args)

    def Send(self, *args: Any) -> None:
        self._begin(self._comm.Isend, *args).Wait()

    def Recv(self, into: Any, source: int, tag: int, status: MPI.Status) -> None:
        self._begin(self._comm.Irecv, into, source, tag).Wait(status)

    def Sendrecv(
        self, out: Any, target: int, tag: int, into: Any, source: int, recvtag: int, status: Any
    ) -> None:
        receive = self._begin(self._comm.Irecv, into, source, recvtag)
        self._begin(self._comm.Isend, out, target, tag).Wait()
        receive.Wait(status)

    def Ibarrier(self) -> _Request:
        return self._begin(self._comm.Ibarrier)

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    def Bcast(self, *args: Any) -> None:
        self._begin(self._comm.Ibcast, *args).Wait()

    def Reduce(self, *args: Any) -> None:
        self._begin(self._comm.Ireduce, *args).Wait()

    def Allreduce(self, *args: Any) -> None:
        self._begin(self._comm.Iallreduce, *args).Wait()

    def Reduce_scatter_block(self, *args: Any) -> None:
        self._begin(self._comm.Ireduce_scatter_block, *args).Wait()

    def Alltoall(self, *args: Any) -> None:
        self._begin(self._comm.Ialltoall, *args).Wait()

    def Gather(self, *args: Any) -> None:
        self._begin(self._comm.Igather, *args).Wait()

    def Scatter(self, *args: Any) -> None:
        self._begin(self._comm.Iscatter, *args).Wait()

    def Allgather(self, *args: Any) -> None:
        self._begin(self._comm.Iallgather, *args).Wait()

    def Allgatherv(self, *args: Any) -> None:
        self._begin(self._comm.Iallgatherv, *args).Wait()
