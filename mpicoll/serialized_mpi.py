"""Communicators for MPI libraries that admit one thread at a time.

Where MPI gives less than MPI_THREAD_MULTIPLE, one lock serves the whole process. A thread that
blocked inside MPI would keep the lock from others whose messages it may be waiting for. So
blocking calls become their non-blocking twins: tested under the lock, waited for outside of it.

Calls that create communicators and windows have no such twin. ``call_together`` makes them when all
ranks are ready, so that no thread holds the lock for longer than the call's own messages take.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpicoll.communicators import subset

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "call_together",
    "create_group",
    "create_window",
    "dissemination_barrier",
    "plain",
    "serialize",
    "tested",
]  # fmt: skip

T = TypeVar("T")

_lock = threading.RLock()
#: Held by the thread that makes a blocking call with other ranks, or is about to: see
#: ``call_together``. Unlike the lock it does not keep other threads out of MPI.
_turn = threading.Lock()
#: The tag of the messages before a blocking call of all ranks of a communicator.
_TAG = (1 << 14) - 2
#: Most seconds until a rank asks again whether all ranks are ready for a blocking call.
_LONGEST_RETRY = 2e-3
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


def call_together(
    comm: MPI.Intracomm,
    call: Callable[[], T],
    members: Sequence[int] | None = None,
    tag: int = _TAG,
    wait: Wait | None = None,
) -> T:
    """Return ``call()``, a blocking call of MPI, made once all its members are ready for it.

    comm: the communicator that carries the messages before the call.
    call: what all members call; it needs no other rank and no other thread to return.
    members: ranks in ``comm``, this rank included; None: all of them.
    tag: of the messages; differs between calls that two threads make at once on ``comm``.
    wait: waits for a request, and may raise instead; None: the wait of ``comm``.

    A rank in a blocking call keeps its other threads out of MPI, and leaves the call when all
    members are in it. A member that cannot come, because another of its threads is in a blocking
    call of other ranks, would make both calls wait for ever. So, once all members are here, each
    thread takes its process's turn, and the call begins only when all of them have it. If one has
    not, all give it back and try again, after pauses that differ at random.
    """
    lock = _lock_of(comm)
    wait = wait or (comm._wait if isinstance(comm, _Communicator) else _wait)
    ranks = range(comm.Get_size()) if members is None else members
    dissemination_barrier(comm, ranks, tag, wait, True)
    if lock is not _lock:
        return call()
    while True:
        ready = _turn.acquire(blocking=False)
        try:
            if dissemination_barrier(comm, ranks, tag, wait, ready):
                with lock:
                    return call()
        finally:
            if ready:
                _turn.release()
        time.sleep(random.uniform(0, _LONGEST_RETRY))


def dissemination_barrier(
    comm: MPI.Intracomm, ranks: Sequence[int], tag: int, wait: Wait, ready: bool = True
) -> bool:
    """Return, once all ``ranks`` of ``comm`` have called, whether each of them is ``ready``.

    wait: waits for a request by tests, and may raise instead: then this rank returns early.

    Hensgen, Finkel, Manber, International J. of Parallel Programming 17(1), 1988.
    """
    n, me = len(ranks), ranks.index(comm.Get_rank())
    own = int(ready)
    distance = 1
    while distance < n:
        theirs = bytearray(1)
        came = comm.Irecv(theirs, ranks[(me - distance) % n], tag)
        told = comm.Isend(bytearray([own]), ranks[(me + distance) % n], tag)
        try:
            wait(came, None)
            wait(told, None)
        except BaseException:
            _unfinished.append((came, told))
            raise
        own &= theirs[0]
        distance *= 2
    return bool(own)


#: Requests of barriers that this rank has left. MPI may still use their buffers.
_unfinished: list[tuple[MPI.Request, MPI.Request]] = []


def create_group(
    comm: MPI.Intracomm, members: Sequence[int], tag: int, wait: Wait | None = None
) -> MPI.Intracomm:
    """Create the communicator of some ranks of ``comm``, in that order. Only they call.

    tag: 0 to 2**14 - 1, another one in each thread that creates a group of ``comm`` now.
    wait: waits for a request, and may raise instead; None: the wait of ``comm``.
    """
    with subset(comm, members) as chosen:
        made = call_together(
            comm, lambda: plain(comm).Create_group(chosen, tag), members, 1 << 14 | tag, wait
        )
    return _like(comm, made)


def create_window(memory: Any, comm: MPI.Intracomm) -> MPI.Win:
    """Create a window of ``memory``, in bytes, whose calls are under the lock of ``comm``.

    A flush moves the messages that others wait for, so blocking in it holds no rank up for good.
    """
    from mpi4py import MPI

    made = call_together(comm, lambda: MPI.Win.Create(memory, 1, MPI.INFO_NULL, plain(comm)))
    return cast("MPI.Win", _Window(made, comm)) if isinstance(comm, _Communicator) else made


def _like(comm: MPI.Intracomm, made: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator derived from ``comm``, with every call under the same lock."""
    if not isinstance(comm, _Communicator):
        return made
    return cast("MPI.Intracomm", _Communicator(made, comm._lock))


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

    def __init__(self, request: MPI.Request, lock: AbstractContextManager[Any], wait: Wait) -> None:
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
    """An object of MPI whose local calls are under the lock.

    local: names of the methods that return without another rank. Any other method of the object
           raises AttributeError, unless the class defines it.
    """

    local: frozenset[str]

    def __init__(self, inner: object, lock: AbstractContextManager[Any]) -> None:
        self._inner, self._lock = inner, lock

    def __getattr__(self, name: str) -> Any:
        if name not in self.local:
            raise AttributeError(
                f"{name}: mpicoll makes no such call where MPI lets one thread in at a time: it "
                f"would block with the lock held. Add it to {type(self).__name__}"
            )
        method = getattr(self._inner, name)

        def locked(*args: object, **kwargs: object) -> Any:
            with self._lock:
                return method(*args, **kwargs)

        return locked


class _Window(_Locked):
    """The calls of a window that mpicoll makes."""

    local = frozenset({"Flush", "Get_attr", "Lock_all", "Put", "Sync", "Unlock_all"})

    def __init__(self, inner: MPI.Win, comm: _Communicator) -> None:
        super().__init__(inner, comm._lock)
        self._comm = cast("MPI.Intracomm", comm)

    def Free(self) -> None:
        call_together(self._comm, self._inner.Free)  # type: ignore[attr-defined]


class _Communicator(_Locked):
    """The calls of a communicator that mpicoll makes.

    MPI_Comm_free is local in MPICH and Open MPI: it sends nothing.
    """

    local = frozenset({
        "Free", "Get_attr", "Get_failed", "Get_group", "Get_info", "Get_rank", "Get_size", "Iprobe",
        "Is_revoked", "Revoke", "Set_attr", "Set_errhandler", "Shrink",
    })  # fmt: skip

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

    def _together(self, call: Callable[..., MPI.Intracomm], *args: object) -> MPI.Intracomm:
        own = cast("MPI.Intracomm", self)
        return _like(own, call_together(own, lambda: call(*args)))

    def Create(self, group: MPI.Group) -> MPI.Intracomm:
        return self._together(cast("Callable[..., MPI.Intracomm]", self._comm.Create), group)

    def Dup(self) -> MPI.Intracomm:
        return self._together(self._comm.Dup)

    def Split(self, color: int) -> MPI.Intracomm:
        return self._together(cast("Callable[..., MPI.Intracomm]", self._comm.Split), color)

    def Split_type(self, kind: int) -> MPI.Intracomm:
        return self._together(cast("Callable[..., MPI.Intracomm]", self._comm.Split_type), kind)

    def Spawn(self, *args: Any) -> MPI.Intercomm:
        return call_together(cast("MPI.Intracomm", self), lambda: self._comm.Spawn(*args))

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

    def Iallgather(self, *args: object) -> _Request:
        return self._start(self._comm.Iallgather, *args)

    def Allgather(self, *args: object) -> None:
        self.Iallgather(*args).Wait()

    def Allgatherv(self, *args: object) -> None:
        self._start(self._comm.Iallgatherv, *args).Wait()
