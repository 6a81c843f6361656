"""Users' arrays on devices, which the processes of a node open (CUDA IPC): work on them, in order.

Every rank exports the memory that its arrays are in, and ranks that read or write it map it: the
*readers*. So data goes from array to array once, without slots between. A call is one step or
several, and no host waits for the device:

  1. Every rank records its first event behind what its stream holds: its arrays are ready. The
     hosts meet and tell each other what they call, and base, size, buffer id, address and handle of
     their arrays.
  2. Each reader opens what it has not opened, lets its stream wait for the events of the ranks
     whose arrays it reads or writes, enqueues its work, and records its next event. The hosts meet
     again. Those whose arrays others have read or written let their streams wait for these.
  3. Further steps go as the second, each with an event of its own, for work that needs what other
     ranks have done in the step before.

Why the order is right: a stream that waits for an event of another process waits for the latest
record before the call that makes it wait. The events of one place in a call are recorded before a
meeting, and waited for between that meeting and the next, or, the last ones, before the rank comes
to the first meeting of the next call. They are recorded again in the next call: the first ones
after the last meeting of this call, the others after the first meeting of the next, which no rank
comes to before it has made its stream wait. What a rank's stream gets after the call comes after
all work on its arrays: memory that the rank writes, or frees in its stream's order and uses again,
is not disturbed.

Opened memory is kept, by rank and base. A buffer id names an allocation for good, so memory at the
same address with another id is opened anew, and what has been there is closed once the reader's
stream has done all that may use it. (Memory that its owner has freed stays mapped until then, as
with the caches of UCX's cuda_ipc.) An array that cannot be exported, or not be opened, is copied to
memory of the group's that can, and back if it is an output; that is its own rank's affair.
"""

from __future__ import annotations

import mmap
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
from mpicoll.core.plan import Blocks, CallKind, Extent, agreed_sizes
from mpicoll.core.signature import (
    decode_primitive,
    describe,
    encode_kind,
    encode_sizes,
    encode_task,
    with_root,
)
from mpicoll.cuda.runtime import HANDLE, Allocation, Event, Memory
from mpicoll.cuda.streams import look_until
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.failures.consistency import describe_by_rank
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.routes.device.jobs import RECV, SEND, Job, Placed
from mpicoll.routes.device.mappings import keep_in_mind, open_memory
from mpicoll.routes.device.state import Agreed, RouteState, failure_of, first_problem
from mpicoll.routes.device.workspaces import BLOCK, TOGETHER, all_come
from mpicoll.routes.host.shared_segment import share
from mpicoll.routes.transfers import misfit

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["UserBuffers", "share_pages", "signature_of"]

#: Allocations that a reader keeps open for each rank, at least the two of a call; and handles of
#: its own that a rank keeps.
OPEN = 64

#: A rank's words at a meeting, of 8 bytes: what it calls, and how it goes; if it cannot open a
#: buffer, whose and which. Then of each array base, size, buffer id, address (0 for none), handle;
#: then elements to and from each rank.
KIND, NUMBER, CALL, STATE, WHOSE, WHICH, _HEAD = range(7)
BASE, NBYTES, BUFFER, ADDRESS, _HANDLE = range(5)
_SIDE = _HANDLE + HANDLE // 8
_SIZES = _HEAD + 2 * _SIDE
#: States of a rank.
_ABLE, _REFUSED, _FAILED = range(3)
#: What the ranks compare to meet in the host's memory.
_MEETING = encode_task("a meeting of ranks that map each other's arrays")
#: Seconds to wait for a stream that may use memory which is in the way of other memory.
_A_MOMENT = 1.0


class _Opened(NamedTuple):
    """An allocation of another rank's that this one has opened."""

    nbytes: int
    buffer: int
    memory: Memory


class _CannotOpenError(DistBackendError):
    """This rank cannot open another's buffer."""

    def __init__(self, name: str, rank: int, buffer: int, why: Exception) -> None:
        super().__init__(f"{name}: cannot map rank {rank}'s device memory (CUDA IPC): {why}")
        self.rank, self.buffer = rank, buffer


class UserBuffers(RouteState):
    """What a group has for work on its ranks' arrays. Routes say what the work is, in the methods
    that raise NotImplementedError here.

    readers: the ranks that work on the arrays of others.
    """

    def __init__(self, agreed: Agreed, readers: Sequence[int], steps: int) -> None:
        """readers: of the group; steps: the most of a call."""
        super().__init__(agreed.group, agreed.context)
        self.readers = readers
        #: By place in a call, and by rank: this rank's events, and those that it has opened.
        self._events: list[list[Event | None]] = [[None] * self.n for _ in range(steps + 1)]
        self._words: Any = None  # host memory that the ranks share, by half and rank
        self._turn = 0  # meetings so far; the halves take turns
        self._met = -1  # the number of the call that the latest was of
        self._own = np.zeros(_SIZES + 2 * self.n, np.int64)
        self._rows = np.zeros((self.n, len(self._own)), np.int64)
        self._handles: dict[Allocation, bytes] = {}
        self._shown = False  # others may work on this rank's arrays in the call
        self._refused: set[int] = set()  # buffers of this rank that cannot be opened
        self._opened: dict[tuple[int, int], _Opened] = {}  # by rank and base, the latest used last
        self._retired: deque[tuple[Event, Memory]] = deque()
        self._lock = threading.RLock()  # held in a call that opens memory
        self._in_call = False
        keep_in_mind(self)

    # ---- What routes say -------------------------------------------------------------------------

    def shows(self, kind: CallKind, side: int, extent: Extent, root: int) -> bool:
        """Return whether other ranks work on this rank's array of a side, if it has one."""
        raise NotImplementedError

    def steps_of(
        self, kind: CallKind, extent: Extent, root: int, sent: Any
    ) -> Sequence[Iterable[Job]]:
        """Return this rank's work in each step; as many steps on all ranks.

        sent: elements that each rank sends to each, of primitives whose extent says only this
              rank's: an array.
        """
        raise NotImplementedError

    def readers_of(self, kind: CallKind, root: int) -> Iterable[int]:
        """Return the ranks that work on this rank's arrays, if it shows any."""
        raise NotImplementedError

    def prepare(self, kind: CallKind) -> None:
        """Compile and allocate what this rank's work needs."""

    def enqueue(self, kind: CallKind, jobs: Sequence[Placed]) -> None:
        """Enqueue the work of a step on arrays of this rank and others, in the work stream or
        between what that holds now and what it gets later.
        """
        raise NotImplementedError

    # ---- Meetings --------------------------------------------------------------------------------

    def _meet(self, kind: int, number: int, failure: Exception | None, again: bool = False) -> bool:
        """Meet the other ranks, and exchange their words. Return whether the call has to be made
        once more, as a buffer cannot be opened, and will be copied; ``again``: it may be.

        Raises on all ranks if their calls differ, or one has failed.
        """
        mine = self._own
        mine[:_HEAD] = kind, number, self.group.sequence, _ABLE, 0, 0
        if again and isinstance(failure, _CannotOpenError):
            mine[STATE:_HEAD] = _REFUSED, failure.rank, failure.buffer
        elif failure is not None:
            mine[STATE] = _FAILED
        self._met = self.group.sequence
        if self.group.agree is None or self._words is None:
            self.group.inner.Allgather(mine, self._rows)
        else:  # the ranks' calls have been compared, and the memory takes less time than MPI
            words = self._words[self._turn % 2]
            words[self.me] = mine
            self.group.agree(*_MEETING)
            self._rows[:] = words
        self._turn += 1
        if failure is None and (self._rows[:, :_HEAD] == mine[:_HEAD]).all():
            return False
        heads = self._rows[:, :_HEAD].tolist()
        if any(head[STATE] == _FAILED for head in heads):
            raise failure or self._failed(kind)
        if any(head[:STATE] != heads[self.me][:STATE] for head in heads):
            raise MismatchError(
                f"{self._name(kind)}: collective mismatch: the ranks made different calls: "
                f"{describe_by_rank(describe(*head[:2]) for head in heads)}"
            )
        refused = [head[WHOSE:] for head in heads if head[STATE] == _REFUSED]
        self._refused.update(which for whose, which in refused if whose == self.me)
        return bool(refused)

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """Tell the others, unless they know, that this rank has failed on its way to a call."""
        if self._met != self.group.sequence:
            with suppress(type(error)):
                self._meet(signature_of(kind, 0, 0)[0], 0, error)

    def _failed(self, kind: int) -> DistBackendError:
        return DistBackendError(
            f"{self._name(kind)}: another rank failed in this call, and says why; its result is "
            "incomplete on all ranks"
        )

    def _name(self, kind: int) -> str:
        return f"{decode_primitive(kind)} on rank {self.me} of group {self.group.group_name}"

    # ---- Calls -----------------------------------------------------------------------------------

    def work_together(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: Extent,
        root: int,
    ) -> None:  # fmt: skip
        """Carry out a call on the arrays where they are; see above.

        A rank that fails on its way to a meeting says so there: it raises its error, the others
        DistBackendError, and all leave the call together. After the last meeting no rank depends on
        another.
        """
        views: list[DeviceView | None] = [send, recv]
        with self._lock:
            self._in_call = True
            try:
                self._carry_out(kind, views, extent, root)
            except BaseException:
                if self.group.error is not None and self._shown:  # who reads may yet begin
                    _in_use.append([send, recv, *views])
                raise
            finally:
                self._in_call = False
        copied = views[RECV]
        if recv is None or copied is None or copied is recv:
            return
        if writes(kind.primitive, self.group, root):
            self.copy(recv.address, copied.address, recv.nbytes)

    def _carry_out(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Do so in the meetings, with copies in the place of views that cannot be exported."""
        signature, number = signature_of(kind, extent, root)
        attempts = 2 * self.n  # each array may have to be copied
        for attempt in range(attempts + 1):
            failure = failure_of(partial(self._get_ready, kind, views, extent, root))
            self._meet(signature, number, failure)
            self._compare_sizes(kind)
            readers = [rank for rank in self.readers_of(kind, root) if rank != self.me]
            readers = readers if self._shown else []
            sent = self._rows[:, _SIZES : _SIZES + self.n]
            for step, jobs in enumerate(self.steps_of(kind, extent, root, sent)):
                if self.me in self.readers:
                    failure = failure_of(partial(self._work, kind, views, jobs, step))
                try:
                    again = self._meet(signature, number, failure, attempt < attempts)
                finally:  # what was enqueued before a failure goes on for a while
                    self._wait_for(readers, step + 1)
                if again:
                    break
            else:
                break

    def _get_ready(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Say where this rank's arrays are, or copies of them, and let them be ready."""
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
        """Return the allocation of an array, and its handle; None if it has none that the readers
        can open.
        """
        found = self.context.runtime.find_allocation(address)
        if found is None or found.buffer in self._refused:
            return None
        try:
            return found, self._handle_of(found)
        except Exception:  # whatever the driver says, who has said that it would
            self._refused.add(found.buffer)
            return None

    def _handle_of(self, found: Allocation) -> bytes:
        handle, context = self._handles.get(found), self.context
        if handle is None:
            handle = context.runtime.export_allocation(context.index, found)
            _keep(self._handles, found, handle, OPEN)
        return handle

    def _scratch(self, nbytes: int) -> tuple[Memory, tuple[Allocation, bytes]]:
        """Return scratch for the rest of the call that the readers can open, with its handle: whole
        blocks, of which no memory of the program is a part.
        """
        context = self.context
        memory = context.scratch(_in_blocks(nbytes))
        exported = self._export(memory.address)
        if exported is None or memory.nbytes % BLOCK:  # others have refused it, or it is not whole
            memory = context.scratch_anew(_in_blocks(max(nbytes, memory.nbytes)))
            found = context.runtime.find_allocation(memory.address)
            if found is None:
                raise DistBackendError("the driver does not know the memory that it has allocated")
            exported = found, self._handle_of(found)
        return memory, exported

    def _copied(
        self, view: DeviceView, filled: bool
    ) -> tuple[DeviceView, tuple[Allocation, bytes]]:
        """Return memory like that of an array, at the same address modulo a piece; and what
        ``_export`` does of it.
        """
        memory, exported = self._scratch(view.nbytes + PIECE)
        address = memory.address + (view.address - memory.address) % PIECE
        made = DeviceView(memory, view.dtype, view.device, address, (view.count,), None, 0)
        if filled:
            self.copy(address, view.address, view.nbytes)
        return made, exported

    def _compare_sizes(self, kind: CallKind) -> None:
        """Raise MismatchError, on all ranks, if blocks whose sizes only two ranks know differ."""
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
        """Enqueue this rank's work of a step; raises _CannotOpenError before it begins."""
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
                        starts[rank, side] = self._start(views, rank, side)
                    addresses.append(starts[rank, side] + start * kind.dtype.itemsize)
                split = len(job.sources)
                placed.append(Placed(job, addresses[:split], addresses[split:]))
            self._wait_for({rank for rank, _ in starts if rank != self.me}, step)
            if self.group.error is not None:  # the others have left the call, with their arrays
                raise self.group.failure()
            self.enqueue(kind, placed)
        finally:
            self._record(step + 1)

    def _start(self, views: Sequence[DeviceView | None], rank: int, side: int) -> int:
        """Return where an array begins in this process."""
        if rank != self.me:
            return self._open(rank, side)
        view = views[side]
        assert view is not None
        return view.address

    def copy(self, into: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Enqueue a copy, in the work stream or another."""
        context = self.context
        if into != source:
            context.runtime.copy(context.index, into, source, nbytes, stream or context.work)

    def _record(self, place: int) -> None:
        """Let this rank's event at a place of the call be that of all that its stream holds."""
        event, context = self._events[place][self.me], self.context
        assert event is not None
        context.runtime.record_again(context.index, context.work, event)

    def _wait_for(self, ranks: Iterable[int], place: int) -> None:
        """Let this rank's stream wait for the events of others at a place of the call."""
        for rank in ranks:
            event, context = self._events[place][rank], self.context
            assert event is not None
            context.runtime.wait(context.index, context.work, event)

    # ---- Other ranks' memory ---------------------------------------------------------------------

    def _open(self, rank: int, side: int) -> int:
        """Return where another rank's array is in this process."""
        words = self._rows[rank, _HEAD + side * _SIDE :][:_SIDE]
        base, nbytes, buffer, address = words[:_HANDLE].tolist()
        found = self._opened.pop((rank, base), None)
        if found is None or found.buffer != buffer:
            if found is not None:
                self._retire(found.memory)
                found = None  # or it would stay open
            for other in self._overlapping(rank, base, nbytes):
                self._retire(self._opened.pop(other).memory)
            try:
                memory = open_memory(self.context, words[_HANDLE:].tobytes())
            except Exception as error:  # whatever the driver says
                name = self._name(int(self._own[KIND]))
                raise _CannotOpenError(name, rank, buffer, error) from error
            found = _Opened(nbytes, buffer, memory)
        for _, old in _keep(self._opened, (rank, base), found, OPEN * self.n):
            self._retire(old.memory)
        opened: int = found.memory.address + address - base
        return opened

    def _overlapping(self, rank: int, base: int, nbytes: int) -> list[tuple[int, int]]:
        """Return what is kept of a rank's memory that cannot be there any more."""
        return [
            (whose, start)
            for (whose, start), kept in self._opened.items()
            if whose == rank and start < base + nbytes and base < start + kept.nbytes
        ]

    def _retire(self, memory: Memory) -> None:
        """Close memory when the stream has done what it holds now."""
        self._retired.append((self.context.record(), memory))

    def _close_retired(self, moment: float = 0.0) -> None:
        """Close what the stream is done with, by a moment (monotonic)."""
        while self._retired and look_until(
            partial(self.context.runtime.is_done, self._retired[0][0]), moment
        ):
            self._retired.popleft()

    def close_unused(self) -> bool:
        """Close what no call uses, unless another thread is in one; return whether there was any.

        In this thread's call that is what is retired.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._opened and not self._in_call:
                self._retire(self._opened.popitem()[1].memory)
            before = len(self._retired)
            self._close_retired(time.monotonic() + _A_MOMENT)
            return len(self._retired) < before
        finally:
            self._lock.release()

    # ---- Beginning and end -----------------------------------------------------------------------

    def connect(self) -> str:
        """Open the other ranks' events and, of each whose arrays this one may work on, some memory,
        which shows whether it can be. Return, on all ranks, why it cannot be; "" for nothing. All
        ranks call.
        """
        runtime, index, me = self.context.runtime, self.context.index, self.me
        reads = me in self.readers
        others = [rank for rank in range(self.n) if rank != me and (reads or rank in self.readers)]
        problem, exported, memory = "", [], b""
        try:
            for events in self._events:
                events[me] = runtime.create_shared_event(index)
                exported.append(runtime.export_event(events[me]))
            _, (_, memory) = self._scratch(PIECE)
        except Exception as error:  # whatever the driver says: all ranks take another route then
            problem = f"cannot export events and memory (CUDA IPC): {error}"
        said = control_messages.allgather(
            self.group.inner, (problem, exported, memory), tuple[str, list[bytes], bytes]
        )
        why = first_problem([problem for problem, *_ in said])
        if not why:
            try:
                for rank in others:
                    _, handles, memory = said[rank]
                    for events, handle in zip(self._events, handles, strict=True):
                        events[rank] = runtime.open_event(index, handle)
                    if reads:
                        open_memory(self.context, memory)
            except Exception as error:
                problem = f"cannot map another rank's events and device memory (CUDA IPC): {error}"
            why = first_problem(control_messages.allgather(self.group.inner, problem, str))
        if why:
            self._let_go_of_events(TOGETHER)
            return why
        segment = share_pages(self.group, 2 * self._own.nbytes)
        if segment is not None:
            self._words = segment.view(np.int64).reshape(self.n, 2, -1).swapaxes(0, 1)
        return ""

    def close(self, limit: float) -> None:
        """Close what is open, and let go of the events, or never, if the others do not do so within
        ``limit`` seconds. All ranks call.
        """
        self.context.synchronize(self.context.work)
        with self._lock:
            self._opened.clear()
            self._retired.clear()
        self._let_go_of_events(limit)

    def _let_go_of_events(self, limit: float) -> None:
        """Destroy the others' events, and this rank's once no other rank has them any more."""
        for events in self._events:
            events[:] = [one if rank == self.me else None for rank, one in enumerate(events)]
        if all_come(self.group, limit):
            self._events, self._words = [], None
        else:
            _left_behind.append(self)


#: What other ranks may still use: of groups that have ended, and arrays of calls that were left.
_left_behind: list[UserBuffers] = []
_in_use: list[list[DeviceView | None]] = []


def _in_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def share_pages(group: ProcessGroup, nbytes: int) -> Any:
    """Return memory of the host that all ranks see, as bytes by rank, ``nbytes`` each; None if they
    cannot share it. All ranks call.
    """
    segment = share(group.inner, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, True)
    if segment is None:
        return None
    return np.frombuffer(segment.memory, np.uint8).reshape(group.size(), -1)[:, :nbytes]


def _keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> list[tuple[Any, Any]]:
    """Put an entry last; return the first ones, which are taken out, if there are more than so
    many.
    """
    kept[key] = value
    over = list(kept)[: len(kept) - most] if len(kept) > most else []
    return [(each, kept.pop(each)) for each in over]


def signature_of(kind: CallKind, extent: Extent, root: int) -> tuple[int, int]:
    """Return what all ranks must have alike of a call."""
    primitive, _, op, dtype = kind
    number = encode_sizes(agreed_sizes(primitive, extent))
    return with_root(encode_kind(primitive, dtype, op, 0, True), root), number
