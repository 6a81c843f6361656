"""Ranks that share a GPU: the first of them works for all, on their arrays where these are.

Every rank exports the memory that its arrays are in (CUDA IPC), and the first rank maps it. So one
kernel reads the n inputs of a reduction and writes its n outputs: of an all_reduce of S bytes n S
bytes are read and n S written, once, where slots would take each in and out again. What is only
moved is copied once, from array to array. One rank works for all as kernels of several processes
do not run on a GPU at the same time, but in slices of time.

A call takes two meetings of the hosts, and no host waits for the device:

  1. Every rank records its event behind what its stream holds: its arrays are ready. The ranks
     meet and tell each other what they call, and base, size, buffer id, address and handle of
     their arrays.
  2. The first rank opens what it has not opened, lets its stream wait for the others' events,
     enqueues the work, records its own event, and tells the others. They let their streams wait for
     it.

Why the order is right: a stream that waits for an event of another process waits for the latest
record before the call that makes it wait. The others' records come before the first meeting and
their next ones after the second, and the first rank's waits are between; its record is before the
second meeting and its next one after the first meeting of the next call, which no rank comes to
before it has made its stream wait. What a rank's stream gets after the call comes after the work;
so memory that the rank frees in its stream's order, and uses again, is not disturbed.

Opened memory is kept, by rank and base. A buffer id names an allocation for good, so memory at the
same address with another id is opened anew, and what has been there is closed once the first rank's
stream has done all that may use it. (Memory that its owner has freed stays mapped until then, as
with the caches of UCX's cuda_ipc.) An array that cannot be exported, or not be opened, is copied to
memory of the group's that can, and back.

Up to SMALL bytes it takes longer to order processes on a GPU than to move the data: such calls go
through pinned memory of the host that the ranks share. Each rank copies its data there and waits
for that, the ranks meet, and each combines its result there and copies it to its device. The halves
of this memory take turns. A half is written again two meetings later, and no rank comes to the one
between before it has read.

Sums are in rank order: the same bits on all ranks, and as kernels and hosts have them.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import reads, writes
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation, agreed_sizes
from mpicoll.core.reproducible import ORDER
from mpicoll.core.signature import (
    decode_primitive,
    describe,
    encode_kind,
    encode_sizes,
    encode_task,
    with_root,
)
from mpicoll.core.work import deadline
from mpicoll.cuda.runtime import HANDLE, Allocation, Event, Memory
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.kernels import reduction
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.device.space import at_home
from mpicoll.routes.host.shared_segment import share
from mpicoll.routes.route import MemoryKind, Route
from mpicoll.routes.transfers import CARRIED, misfit
from mpicoll.watch.consistency import describe_by_rank

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.routes.device.select import Agreed

__all__ = ["ROUTE", "Sharers", "meet", "signature_of"]

#: Bytes of the largest array of a call up to which it goes through the host's memory.
SMALL = 64 * 1024
#: Allocations that the first rank keeps open for each rank, at least the two of a call; and handles
#: of its own that a rank keeps.
OPEN = 64

#: The arrays of a rank: what it sends, and what it receives; in place it has the latter alone.
SEND, RECV = 0, 1
#: A rank's words at the first meeting, of 8 bytes: what it calls, and whether it can; then of each
#: array base, size, buffer id, address (0 for none), handle; then elements to and from each rank.
KIND, NUMBER, CALL, ABLE, _HEAD = range(5)
BASE, NBYTES, BUFFER, ADDRESS, _HANDLE = range(5)
_SIDE = _HANDLE + HANDLE // 8
_SIZES = _HEAD + 2 * _SIDE
#: The first rank's words at the second meeting: all is enqueued; it has failed; a rank's buffer
#: cannot be opened.
_DONE, _FAILED, _REFUSED = range(3)
#: What the ranks compare to meet in the host's memory.
_MEETING = encode_task("a meeting of ranks that share a GPU")


class Part(NamedTuple):
    """A part of an array, from an element on: which rank's, and which of its two."""

    rank: int
    side: int
    start: int


class Job(NamedTuple):
    """Sources that are combined into each output, or the one source that is copied there."""

    sources: Sequence[Part]
    outs: Sequence[Part]
    elements: int


class _Opened(NamedTuple):
    """An allocation of another rank's that the first rank has opened."""

    nbytes: int
    buffer: int
    memory: Memory


class _CannotOpenError(DistBackendError):
    """The first rank cannot open a rank's buffer."""

    def __init__(self, name: str, rank: int, buffer: int, why: Exception) -> None:
        super().__init__(f"{name}: cannot map rank {rank}'s device memory (CUDA IPC): {why}")
        self.rank, self.buffer = rank, buffer


class Sharers:
    """What a group has whose ranks share a GPU, as one rank sees it.

    context: this rank's device context.
    ready:   this rank's event, in other ranks the first rank's opened ones, by rank.
    done:    the first rank's event.
    halves:  the host's memory that the ranks share, as bytes: by half, rank, and whether they are
             the rank's data or its result. None if they cannot share memory.
    words:   the same for the ranks' words at meetings, by half and rank.
    """

    def __init__(self, group: ProcessGroup, context: DeviceContext) -> None:
        self.group = group
        self.n, self.me = group.size(), group.rank()
        self.context = context
        self.ready: list[Event] = []
        self.done: Event | None = None
        self.halves: Any = None
        self.words: Any = None
        self.pinned: object = None  # their registration
        self._turn = 0  # meetings so far
        self._met = -1  # the number of the call that the latest was of
        self.own_words = np.zeros(_SIZES + 2 * self.n, np.int64)
        self._rows = np.zeros((self.n, len(self.own_words)), np.int64)
        self._handles: dict[Allocation, bytes] = {}
        self._refused: set[int] = set()  # buffers of this rank that cannot be opened
        self._opened: dict[tuple[int, int], _Opened] = {}  # by rank and base, the latest used last
        self._retired: deque[tuple[Event, Memory]] = deque()

    # ---- Meetings --------------------------------------------------------------------------------

    def _compare(self, kind: int, number: int, failure: Exception | None) -> None:
        """Meet the other ranks, and exchange what is in ``own_words``. Raise on all ranks if their
        calls differ, or one has failed.
        """
        mine = self.own_words
        mine[:_HEAD] = kind, number, self.group.sequence, failure is None
        self._met = self.group.sequence
        if self.group.agree is None or self.words is None:
            self.group.inner.Allgather(mine, self._rows)
        else:  # the ranks' calls have been compared, and the memory takes less time than MPI
            words = self.words[self._turn % 2]
            words[self.me] = mine
            self.group.agree(*_MEETING)
            self._rows[:] = words
        self._turn += 1
        heads = self._rows[:, :_HEAD]
        if not heads[:, ABLE].all():
            raise failure or self._failed(kind)
        if (heads != heads[self.me]).any():
            raise MismatchError(
                f"{self._name(kind)}: the ranks' calls do not belong together: "
                f"{describe_by_rank(describe(*row[:2]) for row in heads.tolist())}"
            )

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """Tell the others, unless they know, that this rank has failed on its way to a call."""
        if self._met != self.group.sequence:
            with suppress(type(error)):
                self._compare(signature_of(kind, 0, 0)[0], 0, error)

    def _failed(self, kind: int) -> DistBackendError:
        return DistBackendError(
            f"{self._name(kind)}: another rank failed in this call, and says why; its result is "
            "incomplete on all ranks"
        )

    def _name(self, kind: int) -> str:
        return f"{decode_primitive(kind)} on rank {self.me} of group {self.group.group_name}"

    # ---- Large calls -----------------------------------------------------------------------------

    def work_together(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: Extent,
        root: int,
    ) -> None:  # fmt: skip
        """Carry out a call on the arrays where they are; see above.

        A rank that fails before the first meeting, or the first rank before the second, says so
        there: it raises its error, the others DistBackendError, and all leave the call together.
        After the second meeting no rank depends on another.
        """
        signature, number = signature_of(kind, extent, root)
        context, runtime = self.context, self.context.runtime
        views: list[DeviceView | None] = [send, recv]
        for attempt in range(2 * self.n + 1):  # each array may have to be copied
            failure = _failure_of(partial(self._get_ready, kind, views, extent, root))
            self._compare(signature, number, failure)
            self._compare_sizes(kind)
            verdict = np.zeros(3, np.int64)
            if self.me == 0:
                failure = _failure_of(partial(self._work, kind, views, extent, root))
                if isinstance(failure, _CannotOpenError) and attempt < 2 * self.n:
                    verdict[:] = _REFUSED, failure.rank, failure.buffer
                elif failure is not None:
                    verdict[0] = _FAILED
            self.group.inner.Bcast(verdict, 0)
            if self.me != 0:  # what was enqueued before a failure goes on for a while
                assert self.done is not None
                runtime.wait(context.index, context.work, self.done)
            if verdict[0] == _FAILED:
                raise failure or self._failed(signature)
            if verdict[0] == _DONE:
                break
            if verdict[1] == self.me:
                self._refused.add(int(verdict[2]))
        copied = views[RECV]
        if recv is None or copied is None or copied is recv:
            return
        if writes(kind.primitive, self.group, root):
            self._copy(recv.address, copied.address, recv.nbytes)

    def _get_ready(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Say where this rank's arrays are, or copies of them, and let them be ready."""
        context, primitive = self.context, kind.primitive
        for side, view in enumerate(views):
            words = self.own_words[_HEAD + side * _SIDE :][:_SIDE]
            words[ADDRESS] = 0
            if view is None or not view.nbytes:
                continue
            found = self._find(view.address)
            if found is None:
                in_place = side == RECV and not primitive.input
                filled = side == SEND or (in_place and reads(primitive, self.group, root))
                views[side] = view = self._copied(view, filled)
                found = self._find(view.address)
                assert found is not None, "what the runtime allocates can be exported"
            handle = self._handles.get(found)
            if handle is None:
                handle = context.runtime.export_allocation(context.index, found)
                _keep(self._handles, found, handle, OPEN)
            words[:_HANDLE] = (*found, view.address)
            words[_HANDLE:].view(np.uint8)[:] = np.frombuffer(handle, np.uint8)
        if not primitive.even:
            alike = [extent] * self.n if isinstance(extent, int) else []
            blocks = Blocks(alike, alike) if isinstance(extent, int) else extent
            self.own_words[_SIZES:] = (*blocks.sends, *blocks.receives)
        if self.me == 0 and kind.op is not None:
            assert kind.dtype is not None
            by = find_loop(kind.op, kind.dtype)
            assert by is not None
            context.runtime.load_for_all(context.index, by, 2 * self.n)
        elif self.me != 0:
            context.runtime.record_again(context.index, context.work, self.ready[self.me])

    def _find(self, address: int) -> Allocation | None:
        """Return the allocation of an array if the first rank can open it."""
        found = self.context.runtime.find_allocation(address)
        return None if found is None or found.buffer in self._refused else found

    def _copied(self, view: DeviceView, filled: bool) -> DeviceView:
        """Return memory like that of an array, at the same address modulo a piece."""
        memory = self.context.scratch(view.nbytes + PIECE)
        address = memory.address + (view.address - memory.address) % PIECE
        made = DeviceView(memory, view.dtype, view.device, address, (view.count,), None, 0)
        if filled:
            self._copy(address, view.address, view.nbytes)
        return made

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
        self, kind: CallKind, views: Sequence[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Enqueue the work of all ranks, on the first; raises _CannotOpenError before it begins."""
        context, runtime, dtype = self.context, self.context.runtime, kind.dtype
        assert dtype is not None and self.done is not None
        self._close_retired()
        starts = [
            [0 if view is None else view.address for view in views],
            *([self._open(rank, side) for side in (SEND, RECV)] for rank in range(1, self.n)),
        ]
        by = None if kind.op is None else find_loop(kind.op, dtype)
        sent = self._rows[:, _SIZES : _SIZES + self.n].tolist()
        try:
            for event in self.ready[1:]:
                runtime.wait(context.index, context.work, event)
            for job in _jobs(kind, extent, root, sent):
                sources, outs = (
                    [starts[rank][side] + start * dtype.itemsize for rank, side, start in parts]
                    for parts in (job.sources, job.outs)
                )
                if by is None:
                    for out in outs:
                        self._copy(out, sources[0], job.elements * dtype.itemsize)
                    continue
                divisor = len(sources) if kind.op is ReduceOp.AVG else 1
                runtime.combine_for_all(
                    context.index, by, sources, outs, job.elements, divisor, context.work
                )
        finally:
            runtime.record_again(context.index, context.work, self.done)

    def _copy(self, into: int, source: int, nbytes: int) -> None:
        self.context.runtime.copy(self.context.index, into, source, nbytes, self.context.work)

    # ---- Other ranks' memory ---------------------------------------------------------------------

    def _open(self, rank: int, side: int) -> int:
        """Return where another rank's array is in this process; 0 if it has none."""
        words = self._rows[rank, _HEAD + side * _SIDE :][:_SIDE]
        base, nbytes, buffer, address = map(int, words[:_HANDLE])
        if not address:
            return 0
        found = self._opened.pop((rank, base), None)
        if found is None or found.buffer != buffer:
            if found is not None:
                self._retire(found.memory)
            for other in self._overlapping(rank, base, nbytes):
                self._retire(self._opened.pop(other).memory)
            try:
                memory = self.context.runtime.open(self.context.index, words[_HANDLE:].tobytes())
            except Exception as error:  # whatever the driver says
                name = self._name(int(self._rows[0, KIND]))
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

    def _close_retired(self) -> None:
        while self._retired and self.context.runtime.is_done(self._retired[0][0]):
            self._retired.popleft()

    # ---- Small calls -----------------------------------------------------------------------------

    def is_small(self, kind: CallKind, extent: int) -> bool:
        """Return whether a call goes through the host's memory: the same on all ranks."""
        primitive, dtype = kind.primitive, kind.dtype
        assert dtype is not None
        if self.halves is None or not primitive.even:
            return False
        blocks = self.n if primitive.many_in or primitive.many_out else 1
        return extent * blocks * dtype.itemsize <= SMALL

    def meet_on_host(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: int,
        root: int,
    ) -> None:  # fmt: skip
        """Carry out a small call through the host's memory; one meeting. Errors as above."""
        context, half = self.context, self.halves[self._turn % 2]
        data, result = half[self.me]
        given = recv if send is None and not kind.primitive.input else send

        def fetch() -> None:
            if given is not None and reads(kind.primitive, self.group, root):
                self._copy(data.ctypes.data, given.address, given.nbytes)
                context.synchronize(context.work)

        failure = _failure_of(fetch)
        self._compare(*signature_of(kind, extent, root), failure)
        if recv is not None and _on_host(kind, half[:, 0], result, extent, root, self.me):
            self._copy(recv.address, result.ctypes.data, recv.nbytes)

    # ---- The end ---------------------------------------------------------------------------------

    def close(self, limit: float) -> None:
        """Close what is open, and let go of the events once no rank waits for them any more, or
        never, if that takes longer than ``limit`` seconds. All ranks call.
        """
        self.context.synchronize(self.context.work)
        self._opened.clear()
        self._retired.clear()
        request, moment = self.group.inner.Ibarrier(), deadline(limit)
        while not request.Test():
            if time.monotonic() > moment:
                _left_behind.append(self)
                return
            time.sleep(1e-4)
        self.ready, self.done = [], None
        self.pinned = self.halves = self.words = None


#: What other ranks may still use.
_left_behind: list[Sharers] = []


def _failure_of(task: Callable[[], None]) -> Exception | None:
    """Return the exception that a task raises; None if it does its work."""
    try:
        task()
    except Exception as error:
        return error
    return None


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


# ---- What there is to do -------------------------------------------------------------------------


def _jobs(
    kind: CallKind, extent: Extent, root: int, sent: Sequence[Sequence[int]] = ()
) -> Iterator[Job]:
    """Yield the work of a call, of all its ranks.

    sent: elements that each rank sends to each, of primitives whose extent says only this rank's.
    """
    primitive, n = kind.primitive, kind.group.size()
    ranks = range(n)
    if not primitive.even:
        from_start = [[0, *accumulate(row)] for row in sent]
        to_start = [[0, *accumulate(row[rank] for row in sent)] for rank in ranks]
        for source, out in product(ranks, ranks):
            block, place = from_start[source][out], to_start[out][source]
            yield Job([Part(source, SEND, block)], [Part(out, RECV, place)], sent[source][out])
        return
    if isinstance(extent, int):
        counts = [extent] * n
    else:
        counts = list(extent.sends if primitive.many_in else extent.receives)
    starts = [0, *accumulate(counts)]
    if primitive.many_out:  # gather and all_gather
        outs: Sequence[int] = [root] if primitive.root else ranks
        for source in ranks:
            into = [Part(out, RECV, starts[source]) for out in outs]
            yield Job([Part(source, SEND, 0)], into, counts[source])
    elif primitive.many_in:  # scatter and reduce_scatter
        sources: Sequence[int] = [root] if primitive.root else ranks
        for out in ranks:
            parts = [Part(source, SEND, starts[out]) for source in sources]
            yield Job(parts, [Part(out, RECV, 0)], counts[out])
    elif primitive.input:  # scan and exscan
        for out in ranks:
            parts = [Part(source, SEND, 0) for source in primitive.combined(out, n)]
            if parts:
                yield Job(parts, [Part(out, RECV, 0)], counts[0])
    else:  # in place
        sources = ranks if primitive.reduces else [root]
        outs = ranks if not primitive.root else [root] if primitive.reduces else ranks
        into = [Part(out, RECV, 0) for out in outs if primitive.reduces or out != root]
        if into:
            yield Job([Part(source, RECV, 0) for source in sources], into, counts[0])


def _on_host(kind: CallKind, given: Any, result: Any, extent: int, root: int, me: int) -> bool:
    """Do a rank's part of a call in the host's memory; return whether there was one.

    given: the bytes of all ranks' arrays; result: where to put those of this rank's result.
    """
    dtype, some = kind.dtype, False
    assert dtype is not None
    for job in _jobs(kind, extent, root):
        for _, _, start in (out for out in job.outs if out.rank == me):
            sources = [
                _elements(given[source.rank], dtype, source.start, job.elements)
                for source in job.sources
            ]
            out, some = _elements(result, dtype, start, job.elements), True
            if kind.op is None:
                out[...] = sources[0]
            else:
                divisor = len(sources) if kind.op is ReduceOp.AVG else 1
                reduction.combine(kind.op, dtype, sources, out, divisor)
    return some


def _elements(memory: Any, dtype: DType, start: int, count: int) -> Any:
    size = dtype.itemsize
    return memory[start * size : (start + count) * size].view(dtype.numpy)


# ---- How it begins -------------------------------------------------------------------------------


def meet(group: ProcessGroup, context: DeviceContext) -> Sharers | str:
    """Return what the group has for calls on the GPU that its ranks share, or, on all, why there is
    nothing. All ranks call.

    The events are opened, and of each rank some memory, which shows whether it can be.
    """
    runtime, index, me = context.runtime, context.index, group.rank()
    made, problem = Sharers(group, context), ""
    own: tuple[bytes, bytes] = b"", b""
    try:
        event = runtime.create_shared_event(index)
        found = runtime.find_allocation(context.scratch(PIECE).address)
        assert found is not None, "the runtime's memory has no buffer id"
        own = runtime.export_event(event), runtime.export_allocation(index, found)
    except Exception as error:  # whatever the driver says: all ranks take another route then
        problem = f"cannot export events and memory (CUDA IPC): {error}"
    said: list[tuple[str, tuple[bytes, bytes]]] = group.inner.allgather((problem, own))
    why = _first_problem([problem for problem, _ in said])
    if not why:
        try:
            opened = [0] if me else range(group.size())
            handles = {rank: said[rank][1] for rank in opened if rank != me}
            events = {rank: runtime.open_event(index, one) for rank, (one, _) in handles.items()}
            made.ready = [event if rank == me else events.get(rank) for rank in range(group.size())]
            made.done = made.ready[0]
            for _, memory in handles.values() if me == 0 else ():
                runtime.open(index, memory)
        except Exception as error:
            problem = f"cannot map another rank's events and device memory (CUDA IPC): {error}"
        why = _first_problem(group.inner.allgather(problem))
    if why:
        made.ready, made.done = [], None
        group.inner.Barrier()  # no rank has anything open any more
        return why
    words = len(made.own_words)
    region = 4 * SMALL + 2 * 8 * words
    segment = share(group.inner, -(-region // mmap.PAGESIZE) * mmap.PAGESIZE, True)
    if segment is not None:
        whole = np.frombuffer(segment.memory, np.uint8).reshape(group.size(), -1)
        data, rows = whole[:, : 4 * SMALL], whole[:, 4 * SMALL : region].view(np.int64)
        made.halves = data.reshape(group.size(), 2, 2, SMALL).swapaxes(0, 1)
        made.words = rows.reshape(group.size(), 2, words).swapaxes(0, 1)
        with suppress(Exception):  # copies are slower then
            made.pinned = runtime.register(index, whole.ctypes.data, whole.nbytes)
    return made


def _first_problem(said: Sequence[str]) -> str:
    """Return the first problem of a rank; "" for none."""
    return next((f"rank {rank}: {words}" for rank, words in enumerate(said) if words), "")


def _build(kind: CallKind, agreed: Agreed) -> Implementation | None:
    """Return the implementation for calls of this kind; None if the ranks share no GPU."""
    sharers = agreed.shared_gpu
    if sharers is None:
        return None

    def build(kind: CallKind) -> Implementation:
        def shared_gpu(
            send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
        ) -> None:
            if isinstance(extent, int) and sharers.is_small(kind, extent):
                sharers.meet_on_host(kind, send, recv, extent, root)
            else:
                sharers.work_together(kind, send, recv, extent, root)

        return at_home(sharers.context, shared_gpu)

    if kind.op is not None and kind.op.factor is not None:
        return premultiplied(kind, agreed.space, build)
    return build(kind)


ROUTE = Route(
    "shared_gpu",
    "the GPU that all ranks share",
    MemoryKind.DEVICE,
    ("all_reduce", *CARRIED),
    _build,
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    reproducible=(ORDER,),
    scales=True,
    uneven=("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"),
    place="gpu",
    needs="all ranks on one GPU, and CUDA IPC between them",
    blocks=(
        "for the other ranks' hosts, twice, and not for the device; up to 64 KiB once, and until "
        "the device has done what the call comes after"
    ),
    lacks=lambda own: "" if own.gpus else f"a GPU ({own.no_gpu})",
)
