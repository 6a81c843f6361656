"""Zero-copy calls on the users' device arrays, which the processes of a node map by CUDA IPC.

Every rank exports the memory of its arrays. The ranks that read or write it, the *readers*, map it,
so data is copied once, from array to array. A call has one or more steps, and no host waits for a
device:

  1. Every rank records its first event after the work in its stream: its arrays are ready. The
     hosts exchange their call's signature, and base, size, buffer id, address and handle of their
     arrays (an *exchange*).
  2. Each reader opens new memory, makes its stream wait for the events of the ranks whose arrays it
     uses, enqueues its work, and records its next event. The hosts exchange again. A rank whose
     arrays were used makes its stream wait for the readers' events.
  3. Further steps repeat step 2, each with its own event, if work depends on the previous step.

Events are reused in each call. A wait for another process's event waits for its latest record at
the time of the wait. The event of step k is recorded before an exchange and waited for before the
next one (the last event: before the first exchange of the next call). It is recorded again only
after that, so no record is overtaken. Work that a rank enqueues after the call runs after all work
on its arrays, so the rank may overwrite the memory, or free it in stream order.

Opened memory stays mapped, by rank and base. A buffer id is never reused, so memory at the same
address with another id is opened again, and the old mapping is closed once the reader's stream no
longer uses it. (UCX's cuda_ipc cache also keeps freed memory mapped until then.) If an array cannot
be exported or opened, its rank uses a copy in memory of the group.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import reads, writes
from mpicoll.core.plan import Blocks, CallKind, Extent
from mpicoll.core.signature import describe, encode_task
from mpicoll.cuda.runtime import HANDLE_BYTES, Allocation, Event, Memory
from mpicoll.cuda.streams import poll_until
from mpicoll.errors import DistBackendError
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.routes.device.jobs import RECV, SEND, Job, Placed
from mpicoll.routes.device.state import RouteState, exception_of, first_problem, signature_of
from mpicoll.routes.device.workspaces import (
    BLOCK,
    RELEASE_TIMEOUT_S,
    open_memory,
    register_cache,
    share_pages,
    timed_barrier,
)
from mpicoll.routes.transfers import misfit

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["UserBuffers"]

#: Number of allocations that a reader keeps open for each rank, at least the two of a call; also
#: the number of own handles that a rank keeps.
OPEN = 64

#: Layout of the message of an exchange, in words of 8 bytes: the call, the rank's state and, if it
#: cannot open a buffer, the owner and the buffer. Then for each array base, size, buffer id,
#: address (0: no array) and handle. Then the element counts to and from each rank.
KIND, NUMBER, CALL, STATE, WHOSE, WHICH, _HEAD = range(7)
BASE, NBYTES, BUFFER, ADDRESS, _HANDLE = range(5)
_SIDE = _HANDLE + HANDLE_BYTES // 8
_SIZES = _HEAD + 2 * _SIDE
#: States of a rank.
_ABLE, _REFUSED, _FAILED = range(3)
#: Signature of an exchange through shared host memory.
_EXCHANGE = encode_task("an exchange of ranks that map each other's arrays")
#: Seconds to wait for a stream to finish with a mapping that blocks another one.
_CLOSE_TIMEOUT_S = 1.0


class _Opened(NamedTuple):
    """A mapped allocation of another rank."""

    nbytes: int
    buffer: int
    memory: Memory


class _CannotOpenError(DistBackendError):
    """This rank cannot open another rank's buffer."""

    def __init__(self, name: str, rank: int, buffer: int, why: Exception) -> None:
        super().__init__(f"{name}: cannot map rank {rank}'s device memory (CUDA IPC): {why}")
        self.rank, self.buffer = rank, buffer


class UserBuffers(RouteState):
    """State of a route that works on the ranks' arrays. Subclasses define the work, in the methods
    that raise NotImplementedError here.

    readers: the ranks that use other ranks' arrays.
    """

    def __init__(self, agreement: Agreement, readers: Sequence[int], steps: int) -> None:
        """steps: the maximum number of steps of a call."""
        super().__init__(agreement)
        self.readers = readers
        #: By step and rank: this rank's events and the opened events of the other ranks.
        self._events: list[list[Any]] = [[None] * self.n for _ in range(steps + 1)]
        self._words: Any = None  # shared host memory, by half and rank
        self._turn = 0  # number of exchanges; they alternate between the halves
        self._met = -1  # call number of the latest exchange
        self._own = np.zeros(_SIZES + 2 * self.n, np.int64)
        self._rows = np.zeros((self.n, len(self._own)), np.int64)
        self._handles: dict[Allocation, bytes] = {}
        self._shown = False  # other ranks may use this rank's arrays in the call
        self._refused: set[int] = set()  # this rank's buffers that a reader could not open
        self._opened: dict[tuple[int, int], _Opened] = {}  # by rank and base, in LRU order
        self._retired: deque[tuple[Event, Memory]] = deque()
        self._lock = threading.RLock()  # held in a call that opens memory
        self._in_call = False
        register_cache(self)

    # ---- The work of a route ---------------------------------------------------------------------

    def shows(self, kind: CallKind, side: int, extent: Extent, root: int) -> bool:
        """Return whether other ranks use this rank's array of a side, if it has one."""
        raise NotImplementedError

    def steps_of(
        self, kind: CallKind, extent: Extent, root: int, sent: Any
    ) -> Sequence[Iterable[Job]]:
        """Return this rank's work in each step. The number of steps is the same on all ranks.

        sent: for all_to_all, the matrix of element counts, by sender and receiver.
        """
        raise NotImplementedError

    def readers_of(self, kind: CallKind, root: int) -> Iterable[int]:
        """Return the ranks that read or write this rank's arrays through peer memory."""
        raise NotImplementedError

    def prepare(self, kind: CallKind) -> None:
        """Compile the kernels and allocate the memory of this rank's work."""

    def enqueue(self, kind: CallKind, jobs: Sequence[Placed]) -> None:
        """Enqueue the work of a step in the order of the work stream."""
        raise NotImplementedError

    # ---- Exchanges -------------------------------------------------------------------------------

    def _exchange(
        self, kind: int, number: int, failure: Exception | None, may_retry: bool = False
    ) -> bool:
        """Exchange the ranks' words. Return True if the call must be retried with a copy, because a
        rank cannot open a buffer and ``may_retry``.

        Raises on all ranks if their calls differ or one of them has failed.
        """
        mine = self._own
        mine[:_HEAD] = kind, number, self.group.sequence, _ABLE, 0, 0
        if may_retry and isinstance(failure, _CannotOpenError):
            mine[STATE:_HEAD] = _REFUSED, failure.rank, failure.buffer
        elif failure is not None:
            mine[STATE] = _FAILED
        self._met = self.group.sequence
        if self.group.agree is None or self._words is None:
            self.group.inner.Allgather(mine, self._rows)
        else:  # faster than MPI
            words = self._words[self._turn % 2]
            words[self.me] = mine
            self.group.agree(*_EXCHANGE)
            self._rows[:] = words
        self._turn += 1
        if failure is None and (self._rows[:, :_HEAD] == mine[:_HEAD]).all():
            return False
        heads = self._rows[:, :_HEAD].tolist()
        if any(head[STATE] == _FAILED for head in heads):
            raise failure or self.failed_elsewhere(kind)
        if any(head[:STATE] != heads[self.me][:STATE] for head in heads):
            raise self.mismatch(kind, (describe(*head[:2]) for head in heads))
        refused = [head[WHOSE:] for head in heads if head[STATE] == _REFUSED]
        self._refused.update(which for whose, which in refused if whose == self.me)
        return bool(refused)

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        """Notify the other ranks, unless they know, that this rank failed before a call."""
        if self._met != self.group.sequence:
            with suppress(type(error)):
                self._exchange(signature_of(kind, 0, 0)[0], 0, error)

    # ---- Calls -----------------------------------------------------------------------------------

    def work_together(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: Extent,
        root: int,
    ) -> None:  # fmt: skip
        """Run a call on the users' arrays; see the module.

        A rank that fails before an exchange reports it there: it raises its error, and all other
        ranks raise DistBackendError. After the last exchange no rank depends on another.
        """
        views: list[DeviceView | None] = [send, recv]
        with self._lock:
            self._in_call = True
            try:
                self._run(kind, views, extent, root)
            except BaseException:
                if self.group.error is not None and self._shown:  # a reader may still start
                    _in_use.append([send, recv, *views])
                raise
            finally:
                self._in_call = False
        copied = views[RECV]
        if recv is None or copied is None or copied is recv:
            return
        if writes(kind.primitive, self.group, root):
            self.context.copy(recv.address, copied.address, recv.nbytes)

    def _run(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Run the steps. Views that cannot be exported or opened are replaced by copies."""
        signature, number = signature_of(kind, extent, root)
        attempts = 2 * self.n  # each array may have to be copied
        for attempt in range(attempts + 1):
            failure = exception_of(partial(self._get_ready, kind, views, extent, root))
            self._exchange(signature, number, failure)
            self._compare_sizes(kind)
            readers = [rank for rank in self.readers_of(kind, root) if rank != self.me]
            readers = readers if self._shown else []
            sent = self._rows[:, _SIZES : _SIZES + self.n]
            for step, jobs in enumerate(self.steps_of(kind, extent, root, sent)):
                if self.me in self.readers:
                    failure = exception_of(partial(self._work, kind, views, jobs, step))
                try:
                    retry = self._exchange(signature, number, failure, attempt < attempts)
                finally:  # after a failure, enqueued work still runs
                    self._wait_for(readers, step + 1)
                if retry:
                    break
            else:
                break

    def _get_ready(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Describe this rank's arrays, or copies of them, for the exchange; record its event."""
        primitive = kind.primitive
        self._shown = False
        for side, view in enumerate(views):
            words = self._own[_HEAD + side * _SIDE :][:_SIDE]
            words[ADDRESS] = 0
            if view is None or not view.nbytes or not self.shows(kind, side, extent, root):
                continue
            exported = self._export(view.address)
            if exported is None:
                in_place = side == RECV and not primitive.input
                filled = side == SEND or (in_place and reads(primitive, self.group, root))
                view, exported = self._copied(view, filled)
                views[side] = view
            found, handle = exported
            words[:_HANDLE] = (*found, view.address)
            words[_HANDLE:].view(np.uint8)[:] = np.frombuffer(handle, np.uint8)
            self._shown = True
        if not primitive.even:
            alike = [extent] * self.n if isinstance(extent, int) else []
            blocks = Blocks(alike, alike) if isinstance(extent, int) else extent
            self._own[_SIZES:] = (*blocks.sends, *blocks.receives)
        self.prepare(kind)
        if self._shown and self.readers != [self.me]:
            self._record(0)

    def _export(self, address: int) -> tuple[Allocation, bytes] | None:
        """Return the allocation of an array and its handle; None if readers cannot open it."""
        found = self.context.runtime.find_allocation(address)
        if found is None or found.buffer in self._refused:
            return None
        try:
            return found, self._handle_of(found)
        except Exception:  # any error of the driver
            self._refused.add(found.buffer)
            return None

    def _handle_of(self, found: Allocation) -> bytes:
        handle, context = self._handles.get(found), self.context
        if handle is None:
            handle = context.runtime.export_allocation(context.index, found)
            _keep(self._handles, found, handle, OPEN)
        return handle

    def _scratch(self, nbytes: int) -> tuple[Memory, tuple[Allocation, bytes]]:
        """Return scratch memory that the readers can open, for the rest of the call, with its
        allocation and handle. It is a multiple of BLOCK, so it shares no block with user memory.
        """
        context = self.context
        memory = context.scratch(_in_blocks(nbytes))
        exported = self._export(memory.address)
        if exported is None or memory.nbytes % BLOCK:
            memory = context.replace_scratch(_in_blocks(max(nbytes, memory.nbytes)))
            found = context.runtime.find_allocation(memory.address)
            if found is None:
                raise DistBackendError("the driver does not know the memory that it has allocated")
            exported = found, self._handle_of(found)
        return memory, exported

    def _copied(
        self, view: DeviceView, filled: bool
    ) -> tuple[DeviceView, tuple[Allocation, bytes]]:
        """Return memory for a copy of an array, with its alignment (modulo PIECE), and the result
        of ``_export``.
        """
        memory, exported = self._scratch(view.nbytes + PIECE)
        address = memory.address + (view.address - memory.address) % PIECE
        made = DeviceView(memory, view.dtype, view.device, address, (view.count,), None, 0)
        if filled:
            self.context.copy(address, view.address, view.nbytes)
        return made, exported

    def _compare_sizes(self, kind: CallKind) -> None:
        """Raise MismatchError on all ranks if a block's sizes differ on its sender and receiver."""
        if kind.primitive.even:
            return
        n, me = self.n, self.me
        sent, received = self._rows[:, _SIZES : _SIZES + n], self._rows[:, _SIZES + n :]
        if (received == sent.T).all():
            return
        wrong = np.flatnonzero(sent[:, me] != received[me])
        rank = int(wrong[0]) if len(wrong) else None
        raise misfit(kind, rank, *(() if rank is None else (received[me][rank], sent[rank][me])))

    def _work(
        self, kind: CallKind, views: Sequence[DeviceView | None], jobs: Iterable[Job], step: int
    ) -> None:
        """Enqueue this rank's work of a step. Raises _CannotOpenError before any of it."""
        assert kind.dtype is not None
        self._close_retired()
        starts: dict[tuple[int, int], int] = {}
        placed = []
        try:
            for job in jobs:
                if not job.elements:
                    continue
                addresses = []
                for rank, side, start in (*job.sources, *job.outs):
                    if (rank, side) not in starts:
                        view = views[side] if rank == self.me else None
                        starts[rank, side] = (
                            self._open(rank, side) if view is None else view.address
                        )
                    addresses.append(starts[rank, side] + start * kind.dtype.itemsize)
                split = len(job.sources)
                placed.append(Placed(job, addresses[:split], addresses[split:]))
            self._wait_for({rank for rank, _ in starts if rank != self.me}, step)
            if self.group.error is not None:  # other ranks' arrays may be gone
                raise self.group.failure()
            self.enqueue(kind, placed)
        finally:
            self._record(step + 1)

    def _record(self, place: int) -> None:
        """Record this rank's event of a step in its work stream."""
        context = self.context
        context.runtime.record_again(context.index, context.work, self._events[place][self.me])

    def _wait_for(self, ranks: Iterable[int], place: int) -> None:
        """Make this rank's stream wait for the events of other ranks in a step."""
        for rank in ranks:
            context = self.context
            context.runtime.wait(context.index, context.work, self._events[place][rank])

    # ---- Other ranks' memory ---------------------------------------------------------------------

    def _open(self, rank: int, side: int) -> int:
        """Return the address of another rank's array in this process."""
        words = self._rows[rank, _HEAD + side * _SIDE :][:_SIDE]
        base, nbytes, buffer, address = words[:_HANDLE].tolist()
        found = self._opened.pop((rank, base), None)
        if found is None or found.buffer != buffer:
            if found is not None:
                self._retire(found.memory)
                found = None  # drop the reference
            stale = [
                (whose, start)
                for (whose, start), kept in self._opened.items()
                if whose == rank and start < base + nbytes and base < start + kept.nbytes
            ]
            for key in stale:  # they overlap the new allocation
                self._retire(self._opened.pop(key).memory)
            try:
                memory = open_memory(self.context, words[_HANDLE:].tobytes())
            except Exception as error:
                name = self.name_of(int(self._own[KIND]))
                raise _CannotOpenError(name, rank, buffer, error) from error
            found = _Opened(nbytes, buffer, memory)
        for _, old in _keep(self._opened, (rank, base), found, OPEN * self.n):
            self._retire(old.memory)
        opened: int = found.memory.address + address - base
        return opened

    def _retire(self, memory: Memory) -> None:
        """Close memory once the work in the stream is done."""
        self._retired.append((self.context.record(), memory))

    def _close_retired(self, moment: float = 0.0) -> None:
        """Close the retired memory that the stream no longer uses, waiting until ``moment``
        (monotonic).
        """
        while self._retired and poll_until(
            partial(self.context.runtime.is_done, self._retired[0][0]), moment
        ):
            self._retired.popleft()

    def close_unused(self) -> bool:
        """Close memory that no call uses, unless another thread is in a call; return whether any
        was closed. In a call of this thread, close only retired memory.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._opened and not self._in_call:
                self._retire(self._opened.popitem()[1].memory)
            before = len(self._retired)
            self._close_retired(time.monotonic() + _CLOSE_TIMEOUT_S)
            return len(self._retired) < before
        finally:
            self._lock.release()

    # ---- Beginning and end -----------------------------------------------------------------------

    def connect(self) -> str:
        """Open the other ranks' events and, as a test, some memory of each rank whose arrays this
        one may use. Return "" or, on all ranks, the reason why that failed. All ranks call.
        """
        runtime, index, me = self.context.runtime, self.context.index, self.me
        reads = me in self.readers
        others = [rank for rank in range(self.n) if rank != me and (reads or rank in self.readers)]
        problem, exported, memory = "", [], b""
        try:
            for events in self._events:
                events[me] = own = runtime.create_shared_event(index)
                exported.append(runtime.export_event(own))
            _, (_, memory) = self._scratch(PIECE)
        except Exception as error:
            problem = f"cannot export events and memory (CUDA IPC): {error}"
        received = control_messages.allgather(
            self.group.inner, (problem, exported, memory), tuple[str, list[bytes], bytes]
        )
        why = first_problem([problem for problem, *_ in received])
        if not why:
            try:
                for rank in others:
                    _, handles, memory = received[rank]
                    for events, handle in zip(self._events, handles, strict=True):
                        events[rank] = runtime.open_event(index, handle)
                    if reads:
                        open_memory(self.context, memory)
            except Exception as error:
                problem = f"cannot map another rank's events and device memory (CUDA IPC): {error}"
            why = first_problem(control_messages.allgather(self.group.inner, problem, str))
        if why:
            self._release_events(RELEASE_TIMEOUT_S)
            return why
        segment = share_pages(self.group, 2 * self._own.nbytes)
        if segment is not None:
            self._words = segment.view(np.int64).reshape(self.n, 2, -1).swapaxes(0, 1)
        return ""

    def close(self, limit: float) -> None:
        """Close all mappings and events. All ranks call. Events stay allocated for good if a rank
        does not call within ``limit`` seconds.
        """
        self.context.synchronize(self.context.work)
        with self._lock:
            self._opened.clear()
            self._retired.clear()
        self._release_events(limit)

    def _release_events(self, limit: float) -> None:
        """Close the other ranks' events, then destroy this rank's once no rank has them open."""
        for events in self._events:
            events[:] = [one if rank == self.me else None for rank, one in enumerate(events)]
        if timed_barrier(self.group, limit):
            self._events, self._words = [], None
        else:
            _left_behind.append(self)


#: Objects that other ranks may still use: states of closed groups, arrays of aborted calls.
_left_behind: list[UserBuffers] = []
_in_use: list[list[DeviceView | None]] = []


def _in_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> list[tuple[Any, Any]]:
    """Append an entry; remove and return the oldest entries beyond ``most``."""
    kept[key] = value
    over = list(kept)[: len(kept) - most] if len(kept) > most else []
    return [(each, kept.pop(each)) for each in over]
