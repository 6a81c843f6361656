"""Communicators for MPI libraries that provide less than MPI_THREAD_MULTIPLE.

One lock per process serializes all MPI calls. A thread that blocked inside MPI would hold the lock
while it waits for messages of other threads. So blocking calls become non-blocking calls, which are
tested under the lock and waited for without it.

Calls that create communicators and windows have no non-blocking form. ``call_together`` makes them
when all ranks are ready, so that no thread holds the lock while it waits for a late rank.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partialmethod
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mpicoll.communicators import subset

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_lock = threading.RLock()
#: Held by the thread that makes a blocking call with other ranks, or is about to, see
#: ``call_together``. Other threads may call MPI meanwhile.
_turn = threading.Lock()
#: The tag of the messages before a blocking call of all ranks of a communicator.
_TAG = (1 << 14) - 2
#: Maximum interval in seconds between attempts to start a blocking call on all ranks.
_MAX_RETRY_INTERVAL_S = 2e-3
#: Waits for a request by calling its ``Test``.
Wait = Callable[["MPI.Request", "MPI.Status | None"], None]
#: Maximum interval in seconds between two tests of a request.
_MAX_TEST_INTERVAL_S = 200e-6
#: Maximum size of a broadcast in bytes.
_MAX_BCAST_BYTES = 2**30


def serialize(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the communicator with every call under the process-wide lock."""
    return cast("MPI.Intracomm", _Communicator(comm))


def unwrap(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return mpi4py's communicator."""
    return cast("MPI.Intracomm", comm._inner) if isinstance(comm, _Communicator) else comm


def call_together(
    comm: MPI.Intracomm,
    call: Callable[[], T],
    members: Sequence[int] | None = None,
    tag: int = _TAG,
    wait: Wait | None = None,
) -> T:
    """Make a blocking collective MPI call when all members are ready; return its result.

    comm: the communicator of the messages before the call.
    call: the blocking call. It returns as soon as all members are in it.
    members: ranks in ``comm``, including this rank; None: all ranks.
    tag: of the messages. Two threads that call concurrently on ``comm`` need different tags.
    wait: waits for a request and may raise; None: the wait function of ``comm``.

    A rank in a blocking call holds the lock until all members are in the call. If another thread of
    a member were in a blocking call with other ranks, both calls would deadlock. So each thread
    acquires its process's turn after a barrier, and the call begins only if all members have it.
    Otherwise all release it and retry after a random interval.
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
        time.sleep(random.uniform(0, _MAX_RETRY_INTERVAL_S))


def dissemination_barrier(
    comm: MPI.Intracomm, ranks: Sequence[int], tag: int, wait: Wait, ready: bool = True
) -> bool:
    """Wait until all ``ranks`` of ``comm`` have called; return whether all of them are ``ready``.

    wait: waits for a request by tests. It may raise; then this rank leaves the barrier.

    Hensgen, Finkel, Manber, International J. of Parallel Programming 17(1), 1988.
    """
    n, me = len(ranks), ranks.index(comm.Get_rank())
    own = int(ready)
    distance = 1
    while distance < n:
        theirs = bytearray(1)
        receive = comm.Irecv(theirs, ranks[(me - distance) % n], tag)
        send = comm.Isend(bytearray([own]), ranks[(me + distance) % n], tag)
        try:
            wait(receive, None)
            wait(send, None)
        except BaseException:
            _abandoned.append((receive, send))
            raise
        own &= theirs[0]
        distance *= 2
    return bool(own)


#: Requests of abandoned barriers. MPI may still use their buffers.
_abandoned: list[tuple[MPI.Request, MPI.Request]] = []


def create_group(
    comm: MPI.Intracomm, members: Sequence[int], tag: int, wait: Wait | None = None
) -> MPI.Intracomm:
    """Create a communicator of the given ranks of ``comm``, in that order. Only members call.

    tag: 0 to 2**14 - 1. Threads that call concurrently on ``comm`` need different tags.
    wait: waits for a request and may raise; None: the wait function of ``comm``.
    """
    with subset(comm, members) as chosen:
        made = call_together(
            comm, lambda: unwrap(comm).Create_group(chosen, tag), members, 1 << 14 | tag, wait
        )
    return _like(comm, made)


def create_window(memory: Any, comm: MPI.Intracomm) -> MPI.Win:
    """Create a window of ``memory``, in bytes, whose calls are under the lock of ``comm``.

    A flush may block under the lock, because it also progresses messages of other threads.
    """
    from mpi4py import MPI

    made = call_together(comm, lambda: MPI.Win.Create(memory, 1, MPI.INFO_NULL, unwrap(comm)))
    return cast("MPI.Win", _Window(made, comm)) if isinstance(comm, _Communicator) else made


def _like(comm: MPI.Intracomm, made: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator derived from ``comm``, with every call under the same lock."""
    if not isinstance(comm, _Communicator):
        return made
    return cast("MPI.Intracomm", _Communicator(made, comm._lock))


def with_wait(comm: MPI.Intracomm, wait: Wait) -> MPI.Intracomm:
    """Return the communicator with another wait function for its blocking calls.

    wait: waits for a request by tests, and may raise.
    """
    return cast("MPI.Intracomm", _Communicator(unwrap(comm), _lock_of(comm), wait))


def _lock_of(comm: MPI.Intracomm) -> AbstractContextManager[Any]:
    return comm._lock if isinstance(comm, _Communicator) else nullcontext()


def _wait(request: MPI.Request, status: MPI.Status | None) -> None:
    pause = 1e-6
    while not request.Test(status):
        time.sleep(pause)
        pause = min(2 * pause, _MAX_TEST_INTERVAL_S)


def _pieces(message: object) -> Iterator[object]:
    """Split a message of contiguous elements into messages of at most 1 GiB.

    With Intel MPI 2021.18, Ibcast of more than 2 GiB fails with "Invalid communicator" on the
    receiving ranks, with any datatype. Other calls are not affected.
    """
    if not isinstance(message, list):
        yield message
        return
    buffer, count, *start, datatype = message
    size = datatype.Get_size()
    if count * size <= _MAX_BCAST_BYTES:
        yield message
        return
    from mpi4py import MPI

    first = MPI.Get_address(buffer) + (start[0] * size if start else 0)
    for at in range(0, count * size, _MAX_BCAST_BYTES):
        length = min(_MAX_BCAST_BYTES, count * size - at)
        yield [MPI.buffer.fromaddress(first + at, length), length, MPI.BYTE]


class _Request:
    """A request with every call under the lock."""

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
    """An MPI object with its local calls under the lock.

    local: names of the methods that do not wait for other ranks. Any other method of the object
           raises AttributeError, unless the class defines it.
    """

    local: frozenset[str]

    def __init__(self, inner: Any, lock: AbstractContextManager[Any]) -> None:
        self._inner, self._lock = inner, lock

    def __getattr__(self, name: str) -> Any:
        if name not in self.local:
            raise AttributeError(
                f"{name}: not supported with less than MPI_THREAD_MULTIPLE, because it would block "
                f"under the lock. Add it to {type(self).__name__}"
            )
        method = getattr(self._inner, name)

        def locked(*args: object, **kwargs: object) -> Any:
            with self._lock:
                return method(*args, **kwargs)

        return locked


class _Window(_Locked):
    """The window calls that mpicoll uses."""

    local = frozenset({"Flush", "Get_attr", "Lock_all", "Put", "Sync", "Unlock_all"})

    def __init__(self, inner: MPI.Win, comm: _Communicator) -> None:
        super().__init__(inner, comm._lock)
        self._comm = cast("MPI.Intracomm", comm)

    def Free(self) -> None:
        call_together(self._comm, self._inner.Free)


class _Communicator(_Locked):
    """The communicator calls that mpicoll uses. MPI_Comm_free is local in MPICH and Open MPI.

    The calls with a non-blocking form, and most calls that create communicators, are defined below.
    """

    local = frozenset({
        "Free", "Get_attr", "Get_failed", "Get_group", "Get_info", "Get_rank", "Get_size", "Iprobe",
        "Is_revoked", "Revoke", "Set_attr", "Set_errhandler", "Shrink",
    })  # fmt: skip

    def __init__(
        self, inner: MPI.Intracomm, lock: AbstractContextManager[Any] = _lock, wait: Wait = _wait
    ) -> None:
        super().__init__(inner, lock)
        self._wait = wait

    def _start(self, name: str, *args: object) -> _Request:
        with self._lock:
            return _Request(getattr(self._inner, name)(*args), self._lock, self._wait)

    def _call(self, name: str, *args: object) -> None:
        self._start(name, *args).Wait()

    def _create(self: Any, name: str, *args: object) -> MPI.Intracomm:
        return _like(self, call_together(self, lambda: getattr(self._inner, name)(*args)))

    def Spawn(self, *args: object) -> Any:
        return call_together(cast("MPI.Intracomm", self), lambda: self._inner.Spawn(*args))

    def Recv(self, recv: object, source: int, tag: int, status: MPI.Status) -> None:
        self._start("Irecv", recv, source, tag).Wait(status)

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
        receive = self._start("Irecv", recv, source, recvtag)
        self._start("Isend", send, dest, sendtag).Wait()
        receive.Wait(status)

    def Bcast(self, message: object, root: int) -> None:
        for piece in _pieces(message):
            self._call("Ibcast", piece, root)


for _name in ("Iallgather", "Iallreduce", "Ibarrier", "Irecv", "Isend"):
    setattr(_Communicator, _name, partialmethod(_Communicator._start, _name))
for _name in (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Barrier", "Exscan", "Gather", "Reduce",
    "Reduce_scatter_block", "Scan", "Scatter", "Send",
):  # fmt: skip
    setattr(_Communicator, _name, partialmethod(_Communicator._call, f"I{_name.lower()}"))
for _name in ("Create", "Dup", "Split", "Split_type"):
    setattr(_Communicator, _name, partialmethod(_Communicator._create, _name))
