"""What is only moved between the GPUs of a node: copies from array to array, by the copy engines.

Every rank copies from the other ranks' arrays (``user_buffers.py``) into its own output. Between
GPUs no multiprocessor works on that, as one does in a kernel, and no data goes through slots: each
byte is read once by each rank that gets it. (NCCL 2.28 calls such collectives CE collectives,
PyTorch's symmetric memory likewise.) Ranks may share GPUs: a copy within one is a copy.

A broadcast to several ranks has two steps, as one GPU sends no faster to many than to one: of n
shares each rank copies one from the root, and then the others from the ranks that have them (a
scatter and an all-gather: Barnett, Gupta, Payne, Shuler, van de Geijn, Watts, Interprocessor
collective communication library (InterCom), Scalable High Performance Computing Conference, 1994).

The ranks begin with different sources, each with the next rank, so that no GPU has all readers at a
time. The copies of a large call are in several streams: where each pair of GPUs has links of its
own, all of them work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mpicoll.arrays.views import DeviceView
from mpicoll.core.plan import CallKind, Extent, Implementation, Run
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.primitives import PRIMITIVES, Layout
from mpicoll.routes.device.jobs import RECV, SEND, Job, Part, Placed, jobs_of
from mpicoll.routes.device.state import build_on_home_device
from mpicoll.routes.device.user_buffers import UserBuffers
from mpicoll.routes.route import EXCHANGES, Needs, Policy, Route, Serves

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE", "Copiers"]

#: Bytes of the larger array from which on it is taken where a kernel of `peer` serves smaller calls
#: without a meeting of the hosts; and those that a rank gets from which on it takes several
#: streams. Not measured.
MIN_BYTES = 1024 * 1024
#: The most streams of a rank's copies: as many as GPUs of most nodes.
LANES = 8
#: Bytes at multiples of which the shares of a broadcast begin.
LINE = 256


class Copiers(UserBuffers):
    """What a group has for copies between its ranks' arrays, as one rank sees it."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement, readers=range(agreement.group.size()), steps=2)

    def shows(self, kind: CallKind, side: int, extent: Extent, root: int) -> bool:
        """Return whether another rank copies from this rank's array of a side."""
        primitive, is_root = kind.primitive, self.me == root
        if side != (SEND if primitive.input else RECV):
            return False
        if primitive.input:
            return not primitive.root or is_root is not primitive.many_out
        return is_root or self.n > 2  # of a broadcast's shares

    def readers_of(self, kind: CallKind, root: int) -> Iterable[int]:
        """Return the ranks that get something from this one."""
        gathers = kind.primitive.root and kind.primitive.many_out
        return [root] if gathers else self.readers

    def steps_of(
        self, kind: CallKind, extent: Extent, root: int, sent: Any
    ) -> Sequence[Iterable[Job]]:
        """Return the copies into this rank's array."""
        if kind.primitive.layout is Layout.IN_PLACE and self.n > 2:
            assert kind.dtype is not None and isinstance(extent, int)
            return self._broadcast(extent, kind.dtype.itemsize, root)
        jobs = jobs_of(kind, extent, root, sent, [self.me])
        return [sorted(jobs, key=lambda job: self._distance(job.sources[0].rank))]

    def _distance(self, rank: int) -> int:
        """Return how many ranks on a rank is, from 1 for the next one to n for this one."""
        return (rank - self.me - 1) % self.n + 1

    def _broadcast(self, count: int, itemsize: int, root: int) -> Sequence[Iterable[Job]]:
        if self.me == root:
            return [], []
        each = -(-count * itemsize // (self.n * LINE)) * LINE // itemsize

        def share(rank: int, source: int) -> Job:
            start = min(count, rank * each)
            parts = [Part(source, RECV, start)], [Part(self.me, RECV, start)]
            return Job(*parts, min(each, count - start))

        others = sorted(set(self.readers) - {self.me}, key=self._distance)
        return [share(self.me, root)], [share(rank, rank) for rank in others]

    def enqueue(self, kind: CallKind, jobs: Sequence[Placed]) -> None:
        """Enqueue copies; large ones side by side."""
        assert kind.dtype is not None
        context, size = self.context, kind.dtype.itemsize
        large = sum(job.elements for job, _, _ in jobs) * size >= MIN_BYTES
        lanes = context.lanes(min(len(jobs), LANES) - 1) if large else []
        streams = [*lanes, context.work]
        for lane in lanes:
            context.after(lane, context.work)
        try:
            for place, (job, (source,), (out,)) in enumerate(jobs):
                self.copy(out, source, job.elements * size, streams[place % len(streams)])
        finally:
            for lane in lanes:
                context.after(context.work, lane)


def _negotiate(agreement: Agreement) -> Copiers | str:
    made = Copiers(agreement)
    return made.connect() or made


def _make(copiers: Copiers, kind: CallKind) -> Run:
    def copy_engine(
        send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int
    ) -> None:
        copiers.work_together(kind, send, recv, extent, root)

    return copy_engine


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    return build_on_home_device(kind, agreement, agreement.state(Copiers), _make)


ROUTE = Route(
    __name__,
    "copies between the GPUs of a node, by their copy engines",
    Serves(
        tuple(row.name for row in PRIMITIVES if row.output and not row.reduces),
        uneven=("all_gather", *EXCHANGES),
    ),
    _build,
    Needs("node", "all ranks on one node, and CUDA IPC between them", Capabilities.lacks_gpu),
    Policy(
        superseded_by=("shared_gpu",),
        min_bytes=dict.fromkeys(("broadcast", "all_gather", "all_gather_single"), MIN_BYTES),
        host_waits_for=(
            "for the other ranks' hosts, twice, in a broadcast to several ranks three times, and "
            "not for the device"
        ),
    ),
    negotiate=_negotiate,
)
