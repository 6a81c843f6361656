"""Communicators for MPI libraries that admit one thread at a time.

Where MPI gives less than MPI_THREAD_MULTIPLE, one lock serves the whole process. A thread that
blocked inside MPI would keep the lock from others whose messages it may be waiting for. So
blocking calls become their non-blocking twins: tested under the lock, waited for outside of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.arrays.views import Buffer

__all__ = ["create_window", "plain", "serialize", "tested"]

_lock = threading.RLock()
#: Waits for a request, of which it calls ``Test``.
Wait = Callable[["MPI.Request", "MPI.Status | None"], None]
#: Most seconds between two tests of a request.
_LONGEST_PAUSE = 200e-6
#: Bytes of the largest broadcast.
_PIECE = 2**30


def serialize(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator with every call under the process's one lock."""
    return cast("MPI.Intracomm", _Communicator(comm))


def plain(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator as mpi4py made it."""
    return comm._comm if isinstance(comm, _Communicator) else comm


def create_window(memory: Buffer, comm: MPI.Intracomm) -> MPI.Win:
    """Create a window of ``memory``, in bytes, under the lock if the communicator is.

    A flush moves the messages that others wait for, so blocking in it holds no rank up for good.
    """
    from mpi4py import MPI

    if isinstance(comm, _Communicator):
        with _lock:
            return cast("MPI.Win", _Locked(MPI.Win.Create(memory, 1, MPI.INFO_NULL, comm._comm)))
    return MPI.Win.Create(memory, 1, MPI.INFO_NULL, comm)


def tested(comm: MPI.Intracomm, wait: Wait) -> MPI.Intracomm:
    """Return the communicator with blocking calls that become tested ones, too.

    wait: waits for a request by tests, and may raise instead.
    """
    return cast("MPI.Intracomm", _Communicator(plain(comm), _lock_of(comm), wait))


def _lock_of(comm: MPI.Intracomm) -> AbstractContextManager[Any]:
    return comm._lock if isinstance(comm, _Communicator) else nullcontext()


def _wait(request: MPI.Request, status: MPI.Status | None) -> None:
    pause = 1e-6
    while not request.Test(status):
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _pieces(message: object) -> Iterator[object]:
    """Return a message of contiguous elements as messages of at most 1 GiB.

    With Intel MPI 2021.18, Ibcast of more than 2 GiB ends with "Invalid communicator" on the ranks
    that receive, whatever its datatype; no other call does.
    """
    if not isinstance(message, list):
        yield message
        return
    buffer, count, *start, datatype = message
    size = datatype.Get_size()
    if count * size <= _PIECE:
        yield message
        return
    from mpi4py import MPI

    first = MPI.Get_address(buffer) + (start[0] * size if start else 0)
    for at in range(0, count * size, _PIECE):
        length = min(_PIECE, count * size - at)
        yield [MPI.buffer.fromaddress(first + at, length), length, MPI.BYTE]


class _Request:
    """A request whose every call is under the lock."""

    def __init__(
        self, request: MPI.Request, lock: AbstractContextManager[Any] = _lock, wait: Wait = _wait
    ) -> None:
        self._request, self._lock, self._wait = request, lock, wait

    def Test(self, status: MPI.Status | None = None) -> bool:
        with self._lock:
            return self._request.Test(status)

    def Wait(self, status: MPI.Status | None = None) -> None:
        self._wait(self, status)  # type: ignore[arg-type]

    def Cancel(self) -> None:
        with self._lock:
            self._request.Cancel()


class _Locked:
    """An object of MPI whose every call is under the lock, and blocks with it held."""

    def __init__(self, inner: object, lock: AbstractContextManager[Any] = _lock) -> None:
        self._inner, self._lock = inner, lock

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def locked(*args: object, **kwargs: object) -> Any:
            with self._lock:
                return method(*args, **kwargs)

        return locked


class _Communicator(_Locked):
    """The calls of a communicator that mpicoll makes.

    A call without a twin below, such as creating a communicator, blocks with the lock held.
    """

    def __init__(
        self,
        inner: MPI.Intracomm,
        lock: AbstractContextManager[Any] = _lock,
        wait: Wait = _wait,
    ) -> None:
        super().__init__(inner, lock)
        self._wait = wait

    @property
    def _comm(self) -> MPI.Intracomm:
        return self._inner  # type: ignore[return-value]

    def _start(self, call: Callable[..., MPI.Request], *args: object) -> _Request:
        with self._lock:
            return _Request(call(*args), self._lock, self._wait)

    def Create(self, group: MPI.Group) -> _Communicator:
        with _lock:
            return _Communicator(cast("MPI.Intracomm", self._comm.Create(group)))

    def Create_group(self, group: MPI.Group, tag: int) -> _Communicator:
        with _lock:
            return _Communicator(self._comm.Create_group(group, tag))

    def Dup(self) -> _Communicator:
        with _lock:
            return _Communicator(self._comm.Dup())

    def Isend(self, *args: object) -> _Request:
        return self._start(self._comm.Isend, *args)

    def Irecv(self, *args: object) -> _Request:
        return self._start(self._comm.Irecv, *args)

    def Send(self, *args: object) -> None:
        self._start(self._comm.Isend, *args).Wait()

    def Recv(self, recv: object, source: int, tag: int, status: MPI.Status) -> None:
        self._start(self._comm.Irecv, recv, source, tag).Wait(status)

    def Sendrecv(
        self,
        send: object,
        dest: int,
        sendtag: int,
        recv: object,
        source: int,
        recvtag: int,
        status: MPI.Status | None,
    ) -> None:
        receive = self._start(self._comm.Irecv, recv, source, recvtag)
        self._start(self._comm.Isend, send, dest, sendtag).Wait()
        receive.Wait(status)

    def Ibarrier(self) -> _Request:
        return self._start(self._comm.Ibarrier)

    def Barrier(self) -> None:
        self.Ibarrier().Wait()

    def Bcast(self, message: object, root: int) -> None:
        for piece in _pieces(message):
            self._start(self._comm.Ibcast, piece, root).Wait()

    def Reduce(self, *args: object) -> None:
        self._start(self._comm.Ireduce, *args).Wait()

    def Iallreduce(self, *args: object) -> _Request:
        return self._start(self._comm.Iallreduce, *args)

    def Allreduce(self, *args: object) -> None:
        self.Iallreduce(*args).Wait()

    def Reduce_scatter_block(self, *args: object) -> None:
        self._start(self._comm.Ireduce_scatter_block, *args).Wait()

    def Scan(self, *args: object) -> None:
        self._start(self._comm.Iscan, *args).Wait()

    def Exscan(self, *args: object) -> None:
        self._start(self._comm.Iexscan, *args).Wait()

    def Alltoall(self, *args: object) -> None:
        self._start(self._comm.Ialltoall, *args).Wait()

    def Gather(self, *args: object) -> None:
        self._start(self._comm.Igather, *args).Wait()

    def Scatter(self, *args: object) -> None:
        self._start(self._comm.Iscatter, *args).Wait()

    def Allgather(self, *args: object) -> None:
        self._start(self._comm.Iallgather, *args).Wait()

    def Allgatherv(self, *args: object) -> None:
        self._start(self._comm.Iallgatherv, *args).Wait()
