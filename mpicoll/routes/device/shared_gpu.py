"""Ranks that share a GPU: the first of them works for all, on their arrays where these are.

The first rank maps the memory that the others' arrays are in (``user_buffers.py``). So one kernel
reads the n inputs of a reduction and writes its n outputs: of an all_reduce of S bytes n S bytes
are read and n S written, once, where slots would take each in and out again. What is only moved is
copied once, from array to array. One rank works for all as kernels of several processes do not run
on a GPU at the same time, but in slices of time.

Up to SMALL bytes it takes longer to order processes on a GPU than to move the data: such calls go
through pinned memory of the host that the ranks share. Each rank copies its data there and waits
for that, the ranks meet, and each combines its result there and copies it to its device. The halves
of this memory take turns. A half is written again two meetings later, and no rank comes to the one
between before it has read.

Sums are in rank order: the same bits on all ranks, and as kernels and hosts have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import reads
from mpicoll.core.plan import CallKind, Extent, Implementation, Run
from mpicoll.core.reproducible import ORDER
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.runtime import Event
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.kernels import reduction
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.device.jobs import Job, Placed, jobs_of
from mpicoll.routes.device.state import build_on_home_device, exception_of
from mpicoll.routes.device.user_buffers import UserBuffers, share_pages, signature_of
from mpicoll.routes.route import EXCHANGES, Needs, Policy, Route, Serves, has_loop
from mpicoll.routes.transfers import TRANSFER_PRIMITIVES

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE", "Sharers"]

#: Bytes of the largest array of a call up to which it goes through the host's memory.
SMALL = 64 * 1024


class Sharers(UserBuffers):
    """What a group has whose ranks share a GPU, as one rank sees it.

    halves: the host's memory that the ranks share, as bytes: by half, rank, and whether they are
            the rank's data or its result. None if they cannot share memory.
    """

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement, readers=[0], steps=1)
        self.halves: Any = None
        self.pinned: object = None  # their registration
        self._taken: list[Event | None] = [None, None]  # by half: the result is on the device

    # ---- Large calls -----------------------------------------------------------------------------

    def shows(self, kind: CallKind, side: int, extent: Extent, root: int) -> bool:
        """Return whether another rank works on this one's: the first works on all."""
        return self.me != 0

    def steps_of(
        self, kind: CallKind, extent: Extent, root: int, sent: Any
    ) -> Sequence[Iterable[Job]]:
        """Return the work of all ranks, for the first."""
        return [jobs_of(kind, extent, root, sent)]

    def readers_of(self, kind: CallKind, root: int) -> Iterable[int]:
        """Return the first rank."""
        return self.readers

    def prepare(self, kind: CallKind) -> None:
        """Compile a kernel, on the first rank."""
        if self.me == 0 and kind.op is not None:
            assert kind.dtype is not None
            by = find_loop(kind.op, kind.dtype)
            assert by is not None
            self.context.runtime.load_for_all(self.context.index, by, 2 * self.n)

    def enqueue(self, kind: CallKind, jobs: Sequence[Placed]) -> None:
        """Enqueue kernels, or copies."""
        context, op, dtype = self.context, kind.op, kind.dtype
        assert dtype is not None
        by = None if op is None else find_loop(op, dtype)
        for job, sources, outs in jobs:
            if by is None:
                for out in outs:
                    self.copy(out, sources[0], job.elements * dtype.itemsize)
                continue
            divisor = len(sources) if op is ReduceOp.AVG else 1
            context.runtime.combine_for_all(
                context.index, by, sources, outs, job.elements, divisor, context.work
            )

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
        context, turn = self.context, self._turn % 2
        half = self.halves[turn]
        data, result = half[self.me]
        given = recv if send is None and not kind.primitive.input else send

        def fetch() -> None:
            if given is not None and reads(kind.primitive, self.group, root):
                self.copy(data.ctypes.data, given.address, given.nbytes)
                context.synchronize(context.work)
                self._taken = [None, None]
            taken = self._taken[turn]
            if taken is not None:  # a rank that only receives has not waited since
                context.runtime.synchronize(taken)

        failure = exception_of(fetch)
        self._meet(*signature_of(kind, extent, root), failure)
        if recv is not None and _on_host(kind, half[:, 0], result, extent, root, self.me):
            self.copy(recv.address, result.ctypes.data, recv.nbytes)
            self._taken[turn] = context.record()

    def close(self, limit: float) -> None:
        """See there."""
        super().close(limit)
        if not self._events:
            self.pinned = self.halves = None


def _on_host(kind: CallKind, given: Any, result: Any, extent: int, root: int, me: int) -> bool:
    """Do a rank's part of a call in the host's memory; return whether there was one.

    given: the bytes of all ranks' arrays; result: where to put those of this rank's result.
    """
    dtype, some = kind.dtype, False
    assert dtype is not None
    for job in jobs_of(kind, extent, root, outs=[me]):
        for _, _, start in job.outs:
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


def _negotiate(agreement: Agreement) -> Sharers | str:
    made = Sharers(agreement)
    group, context, why = made.group, made.context, made.connect()
    if why:
        return why
    pages = share_pages(group, 4 * SMALL)
    if pages is not None:
        made.halves = pages.reshape(group.size(), 2, 2, SMALL).swapaxes(0, 1)
        with suppress(Exception):  # copies are slower then
            made.pinned = context.runtime.register(context.index, pages.ctypes.data, pages.nbytes)
    return made


def _make(sharers: Sharers, kind: CallKind) -> Run:
    def shared_gpu(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        if isinstance(extent, int) and sharers.is_small(kind, extent):
            sharers.meet_on_host(kind, send, recv, extent, root)
        else:
            sharers.work_together(kind, send, recv, extent, root)

    return shared_gpu


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    return build_on_home_device(kind, agreement, agreement.state(Sharers), _make)


ROUTE = Route(
    __name__,
    "the GPU that all ranks share",
    Serves(
        ("all_reduce", *TRANSFER_PRIMITIVES),
        combines=has_loop,
        reproducible=(ORDER,),
        premultiplies=True,
        uneven=("all_gather", "reduce_scatter", *EXCHANGES),
    ),
    _build,
    Needs("gpu", "all ranks on one GPU, and CUDA IPC between them", Capabilities.lacks_gpu),
    Policy(
        host_waits_for=(
            "for the other ranks' hosts, twice, and not for the device; up to 64 KiB once, and "
            "until the device has done what the call comes after"
        ),
    ),
    negotiate=_negotiate,
)
