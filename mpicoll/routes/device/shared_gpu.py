"""Ranks that share a GPU: rank 0 runs the kernels on the arrays of all ranks.

Rank 0 maps the memory of all arrays (``user_buffers.py``). One kernel reads the n inputs of a
reduction and writes its n outputs, and moved data is copied once, from array to array. One rank
does the work because kernels of different processes on a GPU are time-sliced.

Up to SMALL bytes, synchronizing processes on a GPU takes longer than moving the data. Such calls
use pinned, shared host memory: each rank copies its data there and waits, the hosts synchronize,
and each rank combines its result there and copies it to its device. The two halves of this memory
alternate: a half is written again two calls later, and a rank that enters the call between has
finished reading it.

Sums are in rank order: the same bits on all ranks and on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.arrays.views import DeviceView
from mpicoll.core.checks import reads
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.core.reproducible import ORDER
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.cuda.runtime import Event
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.kernels import reduction
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes.device.jobs import Job, Placed, jobs_of
from mpicoll.routes.device.state import build_on_home_device, exception_of, signature_of
from mpicoll.routes.device.user_buffers import UserBuffers
from mpicoll.routes.device.workspaces import share_pages
from mpicoll.routes.route import EXCHANGES, Needs, Policy, Route, Serves, has_loop
from mpicoll.routes.transfers import TRANSFER_PRIMITIVES

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Maximum size in bytes of a call's largest array for which it uses host memory.
SMALL = 64 * 1024


class Sharers(UserBuffers):
    """State of a group whose ranks share a GPU.

    halves: shared host memory as bytes, indexed by half, rank, and 0 for the rank's data or 1 for
            its result; None if the ranks cannot share memory.
    """

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement, readers=[0], steps=1)
        self.halves: Any = None
        self.pinned: object = None  # their registration
        self._taken: list[Event | None] = [None, None]  # by half: the result is on the device

    # ---- Large calls -----------------------------------------------------------------------------

    def shows(self, kind: CallKind, side: int, extent: Extent, root: int) -> bool:
        return self.me != 0

    def steps_of(
        self, kind: CallKind, extent: Extent, root: int, sent: Any
    ) -> Sequence[Iterable[Job]]:
        return [jobs_of(kind, extent, root, sent)]

    def readers_of(self, kind: CallKind, root: int) -> Iterable[int]:
        return self.readers

    def prepare(self, kind: CallKind) -> None:
        if self.me == 0 and kind.op is not None:
            assert kind.dtype is not None
            by = find_loop(kind.op, kind.dtype)
            assert by is not None
            self.context.runtime.load(self.context.index, by, 2 * self.n)

    def enqueue(self, kind: CallKind, jobs: Sequence[Placed]) -> None:
        context, op, dtype = self.context, kind.op, kind.dtype
        assert dtype is not None
        by = None if op is None else find_loop(op, dtype)
        for job, sources, outs in jobs:
            if by is None:
                for out in outs:
                    context.copy(out, sources[0], job.elements * dtype.itemsize)
                continue
            divisor = len(sources) if op is ReduceOp.AVG else 1
            context.runtime.combine(
                context.index, by, sources, outs, job.elements, divisor, context.work
            )

    def run(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: Extent,
        root: int,
    ) -> None:  # fmt: skip
        if isinstance(extent, int) and self.is_small(kind, extent):
            self.run_on_host(kind, send, recv, extent, root)
        else:
            self.work_together(kind, send, recv, extent, root)

    # ---- Small calls -----------------------------------------------------------------------------

    def is_small(self, kind: CallKind, extent: int) -> bool:
        """Return whether a call is small enough to run in host memory. Equal on all ranks."""
        primitive, dtype = kind.primitive, kind.dtype
        assert dtype is not None
        if self.halves is None or not primitive.even:
            return False
        blocks = self.n if primitive.many_in or primitive.many_out else 1
        return extent * blocks * dtype.itemsize <= SMALL

    def run_on_host(
        self, kind: CallKind, send: DeviceView | None, recv: DeviceView | None, extent: int,
        root: int,
    ) -> None:  # fmt: skip
        """Run a small call through host memory, with one exchange. Errors as ``work_together``."""
        context, turn = self.context, self._turn % 2
        half = self.halves[turn]
        data, result = half[self.me]
        given = recv if send is None and not kind.primitive.input else send

        def fetch() -> None:
            if given is not None and reads(kind.primitive, self.group, root):
                context.copy(data.ctypes.data, given.address, given.nbytes)
                context.synchronize(context.work)
                self._taken = [None, None]
            taken = self._taken[turn]
            if taken is not None:  # a rank that only receives does not wait above
                context.runtime.synchronize(taken)

        failure = exception_of(fetch)
        self._exchange(*signature_of(kind, extent, root), failure)
        if recv is not None and _on_host(kind, half[:, 0], result, extent, root, self.me):
            context.copy(recv.address, result.ctypes.data, recv.nbytes)
            self._taken[turn] = context.record()

    def close(self, limit: float) -> None:
        super().close(limit)
        if not self._events:
            self.pinned = self.halves = None


def _on_host(kind: CallKind, given: Any, result: Any, extent: int, root: int, me: int) -> bool:
    """Compute a rank's result in host memory; return False if it has none.

    given: the bytes of all ranks' arrays; result: memory for the bytes of this rank's result.
    """
    dtype, has_result = kind.dtype, False
    assert dtype is not None
    for job in jobs_of(kind, extent, root, outs=[me]):
        for _, _, start in job.outs:
            sources = [
                _elements(given[source.rank], dtype, source.start, job.elements)
                for source in job.sources
            ]
            out, has_result = _elements(result, dtype, start, job.elements), True
            if kind.op is None:
                out[...] = sources[0]
            else:
                divisor = len(sources) if kind.op is ReduceOp.AVG else 1
                reduction.combine(kind.op, dtype, sources, out, divisor)
    return has_result


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
        with suppress(Exception):  # only makes copies faster
            made.pinned = context.runtime.register(context.index, pages.ctypes.data, pages.nbytes)
    return made


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    sharers = agreement.state(Sharers)
    return build_on_home_device(kind, agreement, sharers, lambda s, kind: partial(s.run, kind))


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
            "until the device has done all earlier work"
        ),
    ),
    negotiate=_negotiate,
)
