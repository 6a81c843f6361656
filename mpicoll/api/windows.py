"""Windows: memory of each rank of a group that the others write into, one-sidedly.

This is ``torch.distributed``'s Window: ``put`` writes into a rank's memory without a call of that
rank, ``signal`` notifies it, ``wait_signal`` waits for a signal. Puts are MPI's own (MPI-4.1
chapter 12), in a passive-target epoch that lasts as long as memory is registered. A put
returns when it is complete at its target, so that a signal, an empty message, finds all that was
put before it in place.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import AnyArray
from mpicoll.arrays.views import Array, View
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.indices import check_index
from mpicoll.core.work import Work
from mpicoll.dispatch import execute
from mpicoll.dispatch.point_to_point import MessageWork, in_background, look_after
from mpicoll.dtypes import by_name
from mpicoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DistBackendError,
    MpicollError,
    UnsupportedError,
)
from mpicoll.output import format_count

if TYPE_CHECKING:
    import mmap

    from mpi4py import MPI

__all__ = ["Window", "allocate", "free_all"]

#: The tag of signals, on a communicator that carries nothing else.
_SIGNAL = 0
#: How often one poll of a window lets MPI make progress. One fragment moves each time, and MPICH
#: cuts a put of 4 MiB into 500; so a poll takes some 30 µs.
_MOVES = 32
#: Seconds that an asynchronous wait has, beyond its timeout, to tell who did not signal.
_GRACE = 1.0
#: Windows with memory that others may still write into, kept alive here.
_registered: set[Window] = set()


class Window:
    """Memory of each rank of a group for the others to write into. All members create it together.

    group: the process group. Ranks are ranks in it.

    Asynchronous calls are carried out in order, with the group's collectives. A synchronous put or
    signal comes after the window's puts and signals before it, and does not wait for waits: so a
    rank can begin to wait, and then signal.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._comm: MPI.Intracomm = execute.run_in_order(group, "new_window", group.inner.Dup)
        self._guard = threading.Lock()  # held while MPI is let move, and while _comm is freed
        self._watched = False  # MPI is let move
        self._memory: _Memory | None = None
        self._last: Work | None = None  # the last asynchronous put or signal
        self._waits: Work | None = None  # the last asynchronous wait
        self._sent = np.zeros(group.size(), np.int64)  # signals to each rank
        self._got = np.zeros(group.size(), np.int64)  # and waited for from each
        group.windows.append(self)

    # --- memory -----------------------------------------------------------------------------------

    def register(self, tensor: AnyArray, owning: bool = True) -> None:
        """Let the others write into an array. Every member calls, with an array of its own.

        tensor: a writable contiguous array in host memory of any shape and dtype; the ranks' may
            differ.
        owning: the window holds the array until it is deregistered; else the caller does.

        Raises ArgumentTypeError for what is no array, ArgumentError for a read-only array and where
        one is registered, UnsupportedError for one on a device or with gaps, and MPIError.
        """
        where = "tensor_register"
        self._check_open()
        if self._memory is not None:
            raise ArgumentError(
                f"{where}: tensor: the window has one already; tensor_deregister first, or make "
                "another window"
            )
        view = _check_host(adapters.build_view(tensor, True, f"{where}: tensor"), where)
        if view.buffer is None:
            raise UnsupportedError(
                f"{where}: tensor: expected a contiguous array, got one of shape "
                f"{list(view.shape)} with gaps; register a contiguous copy"
            )
        self._memory = execute.run_in_order(
            self.group, where, lambda: _Memory(self._comm, view, owning)
        )
        _registered.add(self)
        with self._guard:
            watched, self._watched = self._watched, True
        if not watched:
            look_after(self)

    def deregister(self) -> None:
        """End the others' writing; every member calls. Signals that nobody waited for are dropped.

        Raises ArgumentError where nothing is registered.
        """
        where = "tensor_deregister"
        self._registered(where)
        execute.run_in_order(self.group, where, self._release)

    def _release(self) -> None:
        memory, self._memory = self._memory, None
        assert memory is not None
        expected = np.empty_like(self._sent)
        self._comm.Alltoall(self._sent, expected)
        for rank, number in enumerate(expected - self._got):
            for _ in range(number):
                self._signal(rank, receives=True).finish_now()
        self._sent[:] = self._got[:] = 0
        memory.free()
        _registered.discard(self)

    def free(self) -> None:
        """Give everything back; every member calls."""
        if self._memory is not None:
            self._release()
        with self._guard:
            self._comm.Free()

    def poll(self) -> bool:
        """Let MPI move what others put, as this rank may be busy; True once memory is gone."""
        with self._guard:
            if self._memory is None or self.group.closed is not None:
                self._watched = False
                return True
            from mpi4py import MPI

            for _ in range(_MOVES):
                self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        return False

    # --- calls ------------------------------------------------------------------------------------

    def put(
        self, tensor: AnyArray, dst: int, offset: int, async_op: bool, limit: float | None = None
    ) -> Work | None:
        """Write an array into the memory of a rank; return when it is there.

        tensor: an array in host memory of any shape, of the dtype that ``dst`` has registered.
        dst: the rank in the group, this one too.
        offset: where to begin, in elements of the target.
        async_op: return a Work at once; the array must not change until it is done.
        limit: seconds until CollectiveTimeoutError, after which the put goes on; None: with
            ``async_op`` the group's timeout, else as long as it takes.

        Raises ArgumentError for a rank out of range, for what does not fit into the target and
        where nothing is registered, UnsupportedError for another dtype, and what
        ``register`` raises of an array.
        """
        where = "put"
        memory = self._registered(where)
        dst = self._rank(where, "dst_rank", dst)
        view = _check_host(adapters.build_view(tensor, False, f"{where}: tensor"), where)
        theirs = memory.of[dst]
        if view.dtype.name != theirs.dtype:
            raise UnsupportedError(
                f"{where}: tensor: expected {theirs.dtype}, which rank {dst} has registered, got "
                f"{view.dtype}; convert it"
            )
        offset = check_index(offset, f"{where}: target_offset_nelems")
        if not 0 <= offset <= theirs.count - view.count:
            raise ArgumentError(
                f"{where}: target_offset_nelems: {format_count(view.count, 'element')} cannot be "
                f"put at element {offset} of the {theirs.count} that rank {dst} has registered"
            )
        if view.buffer is None:
            view = view.contiguous()
        return self._call(where, partial(memory.put, view, dst, offset), async_op, limit)

    def signal(self, peer: int, async_op: bool, limit: float | None = None) -> Work | None:
        """Tell a rank that everything put before is complete; each signal is waited for once.

        peer: the rank in the group. async_op, limit: as of ``put``.

        Raises ArgumentError for a rank out of range and where nothing is registered.
        """
        where = "signal"
        self._registered(where)
        peer = self._rank(where, "peer_rank", peer)

        def tell() -> None:
            in_background(self._signal(peer, receives=False))  # MPI may wait for the receiver
            self._sent[peer] += 1

        return self._call(where, tell, async_op, limit)

    def wait_signal(self, peer: int, async_op: bool, limit: float | None = None) -> Work | None:
        """Wait for the next signal of a rank; what it put before can be seen then.

        peer: the rank in the group. async_op: return a Work at once.
        limit: seconds until CollectiveTimeoutError; None is the group's timeout.

        Raises ArgumentError for a rank out of range and where nothing is registered,
        CollectiveTimeoutError when the time is over, after which the signal can be waited for
        again, and DistBackendError where the rank has ended.
        """
        where = "wait_signal"
        memory = self._registered(where)
        peer = self._rank(where, "peer_rank", peer)
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
                    f"{where}: rank {peer} of group {self.group.group_name} has not signalled "
                    f"within {limit:g} s"
                ) from error
            self._got[peer] += 1
            memory.window.Sync()

        behind = self._waits is not None and not self._waits.is_completed()
        if not async_op and not behind:
            wait()
            return None
        work = self._waits = execute.submit(self.group, wait, where, ())
        work.set_limit(None if limit is None else limit + _GRACE)
        if async_op:
            return work
        work.wait()
        return None

    def _call(
        self, name: str, task: Callable[[], None], async_op: bool, limit: float | None
    ) -> Work | None:
        """Run a put or a signal after those before it, and not if one of them failed."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.wait()
            try:
                task()
            except MpicollError:
                raise
            except Exception as error:
                from mpicoll.routes.wire import translate_error

                raise translate_error(error, name, self.group) from error

        if not async_op and limit is None:
            run()
            self._last = None
            return None
        work = self._last = execute.submit(self.group, run, name, ())
        if limit is not None:
            work.set_limit(limit)
        if async_op:
            return work
        work.wait()
        return None

    def _signal(self, peer: int, receives: bool) -> MessageWork:
        begin = self._comm.Irecv if receives else self._comm.Isend
        name = "wait_signal" if receives else "signal"
        empty = adapters.build_view(np.empty(0, np.uint8), receives, name)
        return MessageWork(
            self.group, name, empty, empty, None, receives, peer,
            lambda what: begin(what, peer, _SIGNAL),
        )  # fmt: skip

    # --- what others have -------------------------------------------------------------------------

    def mapped(self, rank: int) -> tuple[Array, str, tuple[int, ...]]:
        """Map the memory of another rank of this node, which must come from ``allocate``.

        Returns its bytes as a uint8 array, the name of its dtype, and its shape.

        Raises ArgumentError for a rank out of range and where nothing is registered, and
        UnsupportedError where this rank cannot have that memory in its address space.
        """
        where = "map_remote_tensor"
        memory = self._registered(where)
        rank = self._rank(where, "rank", rank)
        return memory.mapped(where, rank)

    def unified(self, rank: int) -> bool:
        """Return whether puts to ``rank`` are visible there without another call: MPI_WIN_UNIFIED.

        Raises ArgumentError for a rank out of range and where nothing is registered.
        """
        memory = self._registered("get_attr")
        return memory.of[self._rank("get_attr", "peer_rank", rank)].unified

    # --- checks -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        self.group.check_open()

    def _registered(self, where: str) -> _Memory:
        self._check_open()
        if self._memory is None:
            raise ArgumentError(
                f"{where}: the window has no tensor; call tensor_register on every rank first"
            )
        return self._memory

    def _rank(self, where: str, argument: str, rank: SupportsIndex) -> int:
        number, size = check_index(rank, f"{where}: {argument}"), self.group.size()
        if not 0 <= number < size:
            raise ArgumentError(
                f"{where}: {argument}: rank {number} is not in the group of "
                f"{format_count(size, 'rank')}"
            )
        return number


def _check_host(view: View, where: str) -> View:
    if view.device is not None:
        raise UnsupportedError(
            f"{where}: tensor: expected host memory, got CUDA device {view.device}; windows are of "
            "host memory, copy it there"
        )
    return view


class _Registration:
    """What a rank has registered.

    dtype, shape, count: of the array. place: where another process finds its memory (name, path,
    start in bytes), None if it cannot. unified: MPI's memory model on that rank.
    """

    def __init__(
        self, dtype: str, shape: list[int], place: tuple[str, str, int] | None, unified: bool
    ):
        self.dtype = dtype
        self.shape = tuple(shape)
        self.count = int(np.prod(shape, dtype=np.int64))
        self.place = place
        self.unified = unified


class _Memory:
    """The registered array of this rank, and what is known of the others'."""

    def __init__(self, comm: MPI.Intracomm, view: View, owning: bool) -> None:
        from mpi4py import MPI

        from mpicoll.launch.serialized_mpi import create_window
        from mpicoll.routes import wire
        from mpicoll.routes.host import shared_segment as segment

        start = MPI.Get_address(view.buffer) if view.nbytes else 0
        self.rank = comm.Get_rank()
        self.owner = view if owning else None
        block = MPI.buffer.fromaddress(start, view.nbytes) if view.nbytes else None
        self.window = create_window(block, comm)
        self.window.Lock_all(MPI.MODE_NOCHECK)
        unified = self.window.Get_attr(MPI.WIN_MODEL) == MPI.WIN_UNIFIED
        place = segment.place(start, view.nbytes)
        own = json.dumps([view.dtype.name, list(view.shape), place, unified]).encode()
        everybody = wire.all_gather_bytes(comm, np.frombuffer(own, np.uint8))
        self.of = [_Registration(*json.loads(one.tobytes())) for one in everybody]
        self._maps: dict[int, mmap.mmap] = {}

    def put(self, view: View, dst: int, offset: int) -> None:
        from mpicoll.routes.wire import message

        if view.count:
            what = message(view.buffer, view.count, view.dtype)
            self.window.Put(what, dst, [offset * view.dtype.itemsize, what[1], what[-1]])
            self.window.Flush(dst)

    def mapped(self, where: str, rank: int) -> tuple[Array, str, tuple[int, ...]]:
        from mpicoll.routes.host import shared_segment as segment

        theirs = self.of[rank]
        if rank not in self._maps:
            found = None if theirs.place is None else segment.attach(*theirs.place[:2])
            if found is None:
                why = (
                    "it is on another node"
                    if theirs.place is not None
                    else "its memory is its process's own; register a tensor of allocate_tensor"
                )
                raise UnsupportedError(
                    f"{where}: rank {rank}: its tensor cannot be mapped here: {why}, or use put"
                )
            self._maps[rank] = found
        start = theirs.place[2]  # type: ignore[index]
        nbytes = theirs.count * by_name[theirs.dtype].itemsize
        whole = np.frombuffer(self._maps[rank], np.uint8)
        return whole[start : start + nbytes], theirs.dtype, theirs.shape

    def free(self) -> None:
        self.window.Unlock_all()
        self.window.Free()


def allocate(nbytes: int) -> Array:
    """Allocate zeroed memory that other processes of this node can map once it is registered.

    Returns a uint8 array of ``nbytes`` bytes, aligned to a page. Raises UnsupportedError
    if the system has none.
    """
    from mpicoll.routes.host import shared_segment as segment

    memory = segment.allocate(nbytes)
    if memory is None:
        raise UnsupportedError(
            f"allocate_tensor: the system gives no {nbytes} bytes of memory that processes share "
            "(memfd_create, Linux); use torch.empty, and put in place of map_remote_tensor"
        )
    return np.frombuffer(memory, np.uint8)[:nbytes]


def free_all(group: ProcessGroup) -> None:
    """Free the windows of a group that ends; every member calls and waits for the others."""

    def free() -> None:
        while group.windows:
            group.windows.pop(0).free()

    if group.windows:
        execute.run_in_order(group, "destroy_process_group", free)
