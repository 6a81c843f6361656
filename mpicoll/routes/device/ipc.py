"""The users' device arrays, which the processes of a node map by CUDA IPC: nothing is staged.

Every rank exports the memory of its arrays, and the ranks that work on them, the *workers*, map it.
No host waits for a device:

  1. Every rank records its event READY after the work in its stream. The hosts exchange their
     call's signature, and base, size, buffer id, address and handle of their arrays.
  2. Each worker maps new memory, makes its stream wait for READY of the ranks whose arrays it uses,
     enqueues its work, and records its event DONE. The hosts exchange again. A rank whose arrays
     were used makes its stream wait for the workers' DONE.

Data is copied once, from array to array, to the rank that receives it. A rank that receives a
reduction combines the arrays of all ranks in one kernel; in an all_reduce or reduce, each rank
combines its share and writes it to the arrays of all ranks or the root. If all ranks share a GPU,
rank 0 is the only worker, because kernels of different processes on a GPU are time-sliced. Elements
are combined in rank order, once: the same bits on all ranks and on the host.

Events are reused in each call. A wait for another process's event waits for its latest record at
the time of the wait. READY is recorded before the first exchange and waited for before the second,
DONE before the second and waited for before the first of the next call, so no record is overtaken.
Work that a rank enqueues after the call runs after all work on its arrays, so the rank may
overwrite the memory, or free it in stream order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import reads, writes
from mpicoll.core.plan import Blocks, CallKind, Extent, Run
from mpicoll.core.signature import describe, encode_task
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.runtime import HANDLE_BYTES, Allocation, Memory
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import DistBackendError
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.device import direct
from mpicoll.routes.device.jobs import RECV, SEND, Job, Part, jobs_of
from mpicoll.routes.device.mappings import BLOCK, Mappings, open_memory
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.device.state import (
    RELEASE_TIMEOUT_S,
    RouteState,
    Unavailable,
    exception_of,
    on_all_ranks,
    share_pages,
    signature_of,
    timed_barrier,
)
from mpicoll.routes.route import Needs, Policy, Route
from mpicoll.routes.transfers import misfit

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Number of allocations of each rank that stay mapped, and of own handles that a rank keeps.
OPEN = 64
#: Alignment of the shares of a reduction, in elements.
LINE = 256

#: Layout of the message of an exchange, in words of 8 bytes: the call, and whether the rank has
#: failed. Then for each array base, size, buffer id, address (0: no array) and handle. Then the
#: element counts to and from each rank.
KIND, NUMBER, CALL, FAILED, _HEAD = range(5)
BASE, NBYTES, BUFFER, ADDRESS, _HANDLE = range(5)
_SIDE = _HANDLE + HANDLE_BYTES // 8
_SIZES = _HEAD + 2 * _SIDE
#: Signature of an exchange through shared host memory.
_EXCHANGE = encode_task("an exchange of ranks that map each other's arrays")
#: The events of a rank in a call.
READY, DONE = range(2)


class MappedArrays(RouteState):
    """The mapped memory and the events of a group's ranks."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        #: Whether all ranks use one GPU.
        self.shares_gpu = len({own.used for own in agreement.capabilities}) == 1
        #: By READY or DONE, then rank: this rank's event and the opened events of the other ranks.
        self._events: list[list[Any]] = [[None] * self.n for _ in (READY, DONE)]
        self._words: Any = None  # shared host memory, by half and rank
        self._turn = 0  # number of exchanges; they alternate between the halves
        self._own = np.zeros(_SIZES + 2 * self.n, np.int64)
        self._rows = np.zeros((self.n, len(self._own)), np.int64)
        self._handles: dict[Allocation, bytes] = {}
        self._shown = False  # other ranks may use this rank's arrays in the call
        self._mappings = Mappings(self.context, OPEN * self.n)
        try:
            self._connect()
        except Unavailable:
            self._release_events(RELEASE_TIMEOUT_S)
            raise

    # ---- The work of the ranks -------------------------------------------------------------------

    def _shows(self, kind: CallKind, side: int, root: int) -> bool:
        """Return whether other ranks use this rank's array of a side, if it has one."""
        primitive, is_root = kind.primitive, self.me == root
        if self.shares_gpu:
            return self.me != 0
        if side != (SEND if primitive.input else RECV):
            return False
        return primitive.reduces or not primitive.root or is_root is not primitive.many_out

    def _workers(self, kind: CallKind, root: int) -> Iterable[int]:
        """Return the ranks that work on the arrays of other ranks."""
        if self.shares_gpu:
            return [0]
        gathers = kind.primitive.root and kind.primitive.many_out
        return [root] if gathers else range(self.n)

    def _jobs(self, kind: CallKind, extent: Extent, root: int) -> Iterable[Job]:
        sent = self._rows[:, _SIZES : _SIZES + self.n]
        if self.shares_gpu:
            return jobs_of(kind, extent, root, sent)
        primitive, me = kind.primitive, self.me
        if not primitive.input and primitive.reduces:
            (whole,) = jobs_of(kind, extent, root)
            return [_share(whole, me, self.n)]
        jobs = jobs_of(kind, extent, root, sent, [me])
        # Each rank starts with the next one, so that no GPU is read by all at once.
        return sorted(jobs, key=lambda job: (job.sources[0].rank - me - 1) % self.n)

    def _load(self, kind: CallKind) -> None:
        if kind.op is not None and not (self.shares_gpu and self.me):
            by = find_loop(kind.op, kind.dtype)
            assert by is not None
            self.context.runtime.load(self.context.index, by, 2 * self.n)

    def _enqueue(self, kind: CallKind, job: Job, sources: list[int], outs: list[int]) -> None:
        context, op, dtype = self.context, kind.op, kind.dtype
        if op is None:
            for out in outs:
                context.copy(out, sources[0], job.elements * dtype.itemsize)
            return
        by, divisor = find_loop(op, dtype), len(sources) if op is ReduceOp.AVG else 1
        assert by is not None
        context.runtime.combine(
            context.index, by, sources, outs, job.elements, divisor, context.work
        )

    # ---- Calls -----------------------------------------------------------------------------------

    def run(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: Extent,
        root: int,
    ) -> None:  # fmt: skip
        """Run a call on the users' arrays; see the module.

        A rank that fails before an exchange reports it there: it raises its error, and all other
        ranks raise DistBackendError. After the second exchange no rank depends on another.
        """
        views: list[DeviceView | None] = [send, recv]
        with self._mappings.in_use():
            try:
                self._run(kind, views, extent, root)
            except BaseException:
                if self.group.error is not None and self._shown:  # a worker may still start
                    _in_use.append([send, recv, *views])
                raise
        copied = views[RECV]
        if recv is None or copied is None or copied is recv:
            return
        if writes(kind.primitive, self.group, root):
            self.context.copy(recv.address, copied.address, recv.nbytes)

    def _run(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Run a call. Views that cannot be exported are replaced by copies."""
        signature, workers = signature_of(kind, extent, root), self._workers(kind, root)
        failure = exception_of(partial(self._get_ready, kind, views, extent, root))
        self.compare(*signature, failure)
        self._compare_sizes(kind)
        if self.me in workers:
            failure = exception_of(partial(self._work, kind, views, extent, root))
        try:
            self.compare(*signature, failure)
        finally:  # after a failure, enqueued work still runs
            if self._shown:
                self._wait_for(set(workers) - {self.me}, DONE)

    def compare(self, signature: int, number: int, failure: Exception | None) -> None:
        """Exchange the descriptions of calls and arrays; see RouteState."""
        mine, self.met = self._own, self.group.sequence
        mine[:_HEAD] = signature, number, self.met, failure is not None
        if self.group.agree is None or self._words is None:
            self.group.inner.Allgather(mine, self._rows)
        else:  # faster than MPI
            words = self._words[self._turn % 2]
            words[self.me] = mine
            self.group.agree(*_EXCHANGE)
            self._rows[:] = words
        self._turn += 1
        heads = self._rows[:, :_HEAD]
        if heads[:, FAILED].any():
            raise failure or self.failed_elsewhere(signature)
        if (heads != mine[:_HEAD]).any():
            raise self.mismatch(signature, (describe(*head[:2]) for head in heads.tolist()))

    def _get_ready(
        self, kind: CallKind, views: list[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Describe this rank's arrays, or copies of them, for the exchange; record READY."""
        primitive = kind.primitive
        self._shown = False
        for side, view in enumerate(views):
            words = self._own[_HEAD + side * _SIDE :][:_SIDE]
            words[ADDRESS] = 0
            if view is None or not view.nbytes or not self._shows(kind, side, root):
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
        self._load(kind)
        self._record(READY)

    def _export(self, address: int) -> tuple[Allocation, bytes] | None:
        """Return the allocation of an array and its handle; None if it cannot be exported."""
        context, kept = self.context, self._handles
        found = context.runtime.find_allocation(address)
        if found is None:
            return None
        handle = kept.get(found)
        if handle is None:
            try:
                handle = context.runtime.export_allocation(context.index, found)
            except Exception:  # any error of the driver
                return None
            kept[found] = handle
            if len(kept) > OPEN:
                del kept[next(iter(kept))]
        return found, handle

    def _scratch(self, nbytes: int) -> tuple[Memory, tuple[Allocation, bytes]]:
        """Return scratch memory that other ranks can map, for the rest of the call, and the result
        of ``_export``. It is a multiple of BLOCK, so it shares no block with user memory.
        """
        context, nbytes = self.context, -(-nbytes // BLOCK) * BLOCK
        memory = context.scratch(nbytes)
        exported = self._export(memory.address)
        if exported is None or memory.nbytes % BLOCK:
            memory = context.replace_scratch(-(-max(nbytes, memory.nbytes) // BLOCK) * BLOCK)
            exported = self._export(memory.address)
        if exported is None:
            raise DistBackendError(
                "CUDA gives no IPC handle for memory that mpicoll has allocated on the GPU; set "
                "MPICOLL_DEVICE_ROUTE=staged on all ranks"
            )
        return memory, exported

    def _copied(
        self, view: DeviceView, filled: bool
    ) -> tuple[DeviceView, tuple[Allocation, bytes]]:
        """Return aligned memory (modulo PIECE) for a copy, and the result of ``_export``."""
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
        self, kind: CallKind, views: Sequence[DeviceView | None], extent: Extent, root: int
    ) -> None:
        """Enqueue this rank's work and record DONE. Map memory and check the group before that."""
        self._mappings.close_retired()
        try:
            jobs = [job for job in self._jobs(kind, extent, root) if job.elements]
            parts = [part for job in jobs for part in (*job.sources, *job.outs)]
            starts = dict.fromkeys([(rank, side) for rank, side, _ in parts], 0)
            for rank, side in starts:
                view = views[side] if rank == self.me else None
                starts[rank, side] = self._open(rank, side) if view is None else view.address
            self._wait_for({rank for rank, _ in starts} - {self.me}, READY)
            if self.group.error is not None:  # other ranks' arrays may be gone
                raise self.group.failure()
            for job in jobs:
                sources, outs = (
                    [starts[r, side] + start * kind.dtype.itemsize for r, side, start in parts]
                    for parts in (job.sources, job.outs)
                )
                self._enqueue(kind, job, sources, outs)
        finally:
            self._record(DONE)

    def _open(self, rank: int, side: int) -> int:
        """Return the address of another rank's array in this process."""
        words = self._rows[rank, _HEAD + side * _SIDE :][:_SIDE]
        base, nbytes, buffer, address = words[:_HANDLE].tolist()
        try:
            mapped = self._mappings.get(
                rank, Allocation(base, nbytes, buffer), words[_HANDLE:].tobytes()
            )
        except Exception as error:
            raise DistBackendError(
                f"{self.name_of(int(self._own[KIND]))}: cannot map rank {rank}'s device memory "
                f"(CUDA IPC): {error}; use another route (MPICOLL_DEVICE_ROUTE)"
            ) from error
        return int(mapped + address - base)

    def _record(self, event: int) -> None:
        context = self.context
        context.runtime.record_again(context.index, context.work, self._events[event][self.me])

    def _wait_for(self, ranks: Iterable[int], event: int) -> None:
        context = self.context
        for rank in ranks:
            context.runtime.wait(context.index, context.work, self._events[event][rank])

    # ---- Beginning and end -----------------------------------------------------------------------

    def bind(self, kind: CallKind, space: DeviceSpace) -> Run:
        return partial(self.run, kind)

    def _connect(self) -> None:
        """Open the other ranks' events and, as a test, some memory of each. All ranks call."""
        group, runtime, index = self.group, self.context.runtime, self.context.index

        def export() -> tuple[list[bytes], bytes]:
            for events in self._events:
                events[self.me] = runtime.create_shared_event(index)
            _, (_, memory) = self._scratch(PIECE)
            return [runtime.export_event(events[self.me]) for events in self._events], memory

        def open_all() -> None:
            for rank, (handles, memory) in enumerate(received):
                if rank != self.me:
                    for events, handle in zip(self._events, handles, strict=True):
                        events[rank] = runtime.open_event(index, handle)
                    open_memory(self.context, memory)

        exported = on_all_ranks(group, "cannot export events and memory (CUDA IPC): ", export)
        received = control_messages.allgather(group.inner, exported, tuple[list[bytes], bytes])
        on_all_ranks(
            group, "cannot map another rank's events and device memory (CUDA IPC): ", open_all
        )
        segment = share_pages(group, 2 * self._own.nbytes)
        if segment is not None:
            self._words = segment.view(np.int64).reshape(self.n, 2, -1).swapaxes(0, 1)

    def close(self, limit: float) -> None:
        """Close all mappings and events. All ranks call. Events stay allocated for good if a rank
        does not call within ``limit`` seconds.
        """
        self.context.synchronize(self.context.work)
        self._mappings.clear()
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
_left_behind: list[MappedArrays] = []
_in_use: list[list[DeviceView | None]] = []


def _share(whole: Job, rank: int, n: int) -> Job:
    """Return a rank's share of a reduction in place: whole lines of elements."""
    each = -(-whole.elements // (n * LINE)) * LINE
    start = min(whole.elements, rank * each)
    sources, outs = ([Part(r, side, start) for r, side, _ in parts] for parts in whole[:2])
    return Job(sources, outs, min(each, whole.elements - start))


ROUTE = Route(
    __name__,
    "the arrays of the ranks of a node, mapped by CUDA IPC",
    direct.ROUTE.serves,
    MappedArrays.build,
    Needs("node", "all ranks on one node, and CUDA IPC between them", Capabilities.lacks_gpu),
    Policy(host_waits_for="for the other ranks' hosts, twice, and not for the device"),
    negotiate=MappedArrays,
)
