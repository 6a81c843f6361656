"""One-sided communication: memory of each rank that the other ranks of a group write into.

This is the Window of ``torch.distributed``. ``put`` writes into the memory of a rank without a call
on that rank. ``signal`` notifies a rank, and ``wait_signal`` waits for a signal. Puts use MPI RMA
(MPI-4.1 chapter 12) in a passive-target epoch that lasts as long as memory is registered. A put
returns when it is complete at the target, so all earlier puts are visible when a signal (an empty
message) arrives.

tensor: array in host memory, of any shape.
dst, peer, rank: rank in the group.
async_op: if True, return a Work immediately. The array must not change until it completes.
limit: timeout in seconds. None: no timeout for a synchronous call, the timeout of the group for an
    async one.

Raises ArgumentError for a rank out of range and if no memory is registered, UnsupportedError for
device memory, and CollectiveTimeoutError if the call timed out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import AnyArray
from mpicoll.arrays.views import View, memory_at
from mpicoll.core.groups import ProcessGroup, check_group_rank, windows
from mpicoll.core.indices import check_index
from mpicoll.core.work import Work
from mpicoll.dispatch import execute
from mpicoll.dispatch.point_to_point import Message, MessageWork, in_background, keep_polling
from mpicoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DistBackendError,
    MpicollError,
    UnsupportedError,
)
from mpicoll.output import format_count

if TYPE_CHECKING:
    from mpi4py import MPI

#: Tag of signals, on a communicator without other messages.
_SIGNAL_TAG = 0
#: Progress calls to MPI per poll. Each moves one fragment, and MPICH splits a put of 4 MiB into 500
#: fragments. One poll takes about 30 µs.
_PROGRESS_COUNT = 32
#: Additional time of an async wait, so that it can report the rank that did not signal.
_GRACE_S = 1.0


class Window:
    """Memory of each rank of a group that the other ranks write into. All members create it.

    group: the process group. Ranks are ranks in it.

    Async calls run in order, together with the collectives of the group. A synchronous put or
    signal runs after earlier puts and signals of the window, but does not wait for async waits: a
    rank can start a wait and then signal.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._comm: MPI.Intracomm = execute.run_in_order(group, "new_window", group.inner.Dup)
        self._lock = threading.Lock()  # held during progress of MPI, and while _comm is freed
        self._is_polled = False
        self._memory: _Memory | None = None
        self._last: Work | None = None  # the last asynchronous put or signal
        self._waits: Work | None = None  # the last asynchronous wait
        self._sent = np.zeros(group.size(), np.int64)  # signals to each rank
        self._received = np.zeros(group.size(), np.int64)  # signals from each rank
        windows.append(self)

    def register(self, tensor: AnyArray, owning: bool = True) -> None:
        """Let other ranks write into an array. Every member calls it, with its own array.

        tensor: a writable contiguous array. Shape and dtype may differ between ranks.
        owning: if True, the window keeps the array alive until it is deregistered. If False, the
            caller does.

        Raises ArgumentError for a read-only array and if one is registered already.
        """
        where = "tensor_register"
        self.group.check_open()
        if self._memory is not None:
            raise ArgumentError(
                f"{where}: tensor: the window has a tensor already; call tensor_deregister first, "
                "or create another window"
            )
        view = _check_host(adapters.build_view(tensor, True, f"{where}: tensor"), where)
        if view.buffer is None:
            raise UnsupportedError(
                f"{where}: tensor: expected a contiguous array, got one of shape "
                f"{list(view.shape)} that is not contiguous; register a contiguous copy"
            )
        self._memory = execute.run_in_order(
            self.group, where, lambda: _Memory(self._comm, view, owning)
        )
        with self._lock:
            was_polled, self._is_polled = self._is_polled, True
        if not was_polled:
            keep_polling(self.group, self.poll)

    def deregister(self) -> None:
        """End registration; every member calls it. Signals without a wait are dropped."""
        where = "tensor_deregister"
        self._registered(where)
        execute.run_in_order(self.group, where, self._release)

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        assert memory is not None
        expected = np.empty_like(self._sent)
        self._comm.Alltoall(self._sent, expected)
        for rank, number in enumerate(expected - self._received):
            for _ in range(number):
                self._signal(rank, receives=True).finish_now()
        self._sent[:] = self._received[:] = 0
        memory.free()

    def free(self) -> None:
        """Free all resources; every member calls it."""
        if self._memory is not None:
            self._release()
        with self._lock:
            self._comm.Free()
        windows.remove(self)

    def poll(self) -> bool:
        """Progress incoming puts in MPI. Returns True when no memory is registered."""
        with self._lock:
            if self._memory is None or self.group.closed is not None:
                self._is_polled = False
                return True
            from mpi4py import MPI

            for _ in range(_PROGRESS_COUNT):
                self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        return False

    def put(
        self, tensor: AnyArray, dst: int, offset: int, async_op: bool, limit: float | None = None
    ) -> Work | None:
        """Write an array into the memory of a rank. Returns when it is complete there.

        tensor: array of the dtype that ``dst`` has registered.
        offset: position of the first element in the target, in elements.

        Raises ArgumentError if the array does not fit, and UnsupportedError for another dtype.
        """
        where = "put"
        memory = self._registered(where)
        dst = check_group_rank(self.group, dst, f"{where}: dst_rank")
        view = _check_host(adapters.build_view(tensor, False, f"{where}: tensor"), where)
        theirs = memory.of[dst]
        if view.dtype.name != theirs.dtype:
            raise UnsupportedError(
                f"{where}: tensor: expected {theirs.dtype}, which rank {dst} has registered, got "
                f"{view.dtype}; convert it first"
            )
        offset = check_index(offset, f"{where}: target_offset_nelems")
        if not 0 <= offset <= theirs.size - view.count:
            raise ArgumentError(
                f"{where}: target_offset_nelems: cannot write "
                f"{format_count(view.count, 'element')} at element {offset} of the {theirs.size} "
                f"that rank {dst} has registered"
            )
        if view.buffer is None:
            view = view.contiguous()
        return self._call(where, partial(memory.put, view, dst, offset), async_op, limit)

    def signal(self, peer: int, async_op: bool, limit: float | None = None) -> Work | None:
        """Notify a rank that all earlier puts are complete. Each signal is for one wait."""
        where = "signal"
        self._registered(where)
        peer = check_group_rank(self.group, peer, f"{where}: peer_rank")

        def send() -> None:
            in_background(self._signal(peer, receives=False))  # MPI may wait for the receiver
            self._sent[peer] += 1

        return self._call(where, send, async_op, limit)

    def wait_signal(self, peer: int, async_op: bool, limit: float | None = None) -> Work | None:
        """Wait for the next signal of a rank. Its earlier puts are visible afterwards.

        limit: timeout in seconds; None is the timeout of the group.

        After a CollectiveTimeoutError, the signal can be waited for again. Raises DistBackendError
        if the rank has exited.
        """
        where = "wait_signal"
        memory = self._registered(where)
        peer = check_group_rank(self.group, peer, f"{where}: peer_rank")
        limit = self.group.timeout if limit is None else limit

        def wait() -> None:
            work = self._signal(peer, receives=True)
            work.set_limit(limit)
            self.group.in_flight.add(work)  # an abort ends it
            if self.group.closed is not None:
                work.abandon(DistBackendError(f"{work.description}: the group was destroyed"))
            try:
                work.finish_now()
            except CollectiveTimeoutError as error:
                raise CollectiveTimeoutError(
                    f"{where}: timed out: rank {peer} of group {self.group.group_name} has not "
                    f"signalled within {limit:g} s"
                ) from error
            self._received[peer] += 1
            memory.window.Sync()

        is_pending = self._waits is not None and not self._waits.is_completed()
        if not async_op and not is_pending:
            wait()
            return None
        work = self._waits = execute.submit(self.group, wait, where, ())
        work.set_limit(None if limit is None else limit + _GRACE_S)
        return execute.wait_unless(async_op, work)

    def _call(
        self, name: str, task: Callable[[], None], async_op: bool, limit: float | None
    ) -> Work | None:
        """Run a put or a signal after earlier ones. Does not run it if one of them failed."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.wait()
            try:
                task()
            except MpicollError:
                raise
            except Exception as error:
                raise execute.to_mpi_error(error, name, self.group) from error

        if not async_op and limit is None:
            run()
            self._last = None
            return None
        work = self._last = execute.submit(self.group, run, name, ())
        if limit is not None:
            work.set_limit(limit)
        return execute.wait_unless(async_op, work)

    def _signal(self, peer: int, receives: bool) -> MessageWork:
        begin = self._comm.Irecv if receives else self._comm.Isend
        name = "wait_signal" if receives else "signal"
        empty = adapters.build_view(np.empty(0, np.uint8), receives, name)
        return MessageWork(
            self.group, name, Message(empty, empty), receives, peer,
            lambda buffer: begin(buffer, peer, _SIGNAL_TAG),
        )  # fmt: skip

    def unified(self, rank: int) -> bool:
        """Return whether puts are visible on a rank without another call: MPI_WIN_UNIFIED."""
        memory = self._registered("get_attr")
        return memory.of[check_group_rank(self.group, rank, "get_attr: peer_rank")].unified

    def _registered(self, where: str) -> _Memory:
        self.group.check_open()
        if self._memory is None:
            raise ArgumentError(
                f"{where}: the window has no tensor; call tensor_register on every rank first"
            )
        return self._memory


def _check_host(view: View, where: str) -> View:
    if view.device is not None:
        raise UnsupportedError(
            f"{where}: tensor: expected host memory, got CUDA device {view.device}; copy it to the "
            "host first"
        )
    return view


class _Registration(NamedTuple):
    """Registered memory of a rank: dtype, number of elements, and the memory model of MPI."""

    dtype: str
    size: int
    unified: bool


class _Memory:
    """The registered array of this rank, and the registrations of all ranks."""

    def __init__(self, comm: MPI.Intracomm, view: View, owning: bool) -> None:
        from mpi4py import MPI

        from mpicoll.serialized_mpi import create_window

        self.owner = view if owning else None
        block = memory_at(MPI.Get_address(view.buffer), view.nbytes) if view.nbytes else None
        self.window = create_window(block, comm)
        self.window.Lock_all(MPI.MODE_NOCHECK)
        unified = self.window.Get_attr(MPI.WIN_MODEL) == MPI.WIN_UNIFIED
        own = _Registration(view.dtype.name, view.count, unified)
        self.of = control_messages.allgather(comm, own, _Registration)

    def put(self, view: View, dst: int, offset: int) -> None:
        from mpicoll.routes.wire import message

        if view.count:
            source = message(view.buffer, view.count, view.dtype)
            self.window.Put(source, dst, [offset * view.dtype.itemsize, source[1], source[-1]])
            self.window.Flush(dst)

    def free(self) -> None:
        self.window.Unlock_all()
        self.window.Free()
