"""Data movement between the GPUs of a node by copy engines, from array to array.

Every rank copies from the other ranks' arrays (``user_buffers.py``) into its output. No
multiprocessor is used, and no slots: each byte is read once by each rank that receives it. (NCCL
2.28 and PyTorch's symmetric memory call these CE collectives.) Ranks may share GPUs.

A broadcast to several ranks is a scatter and an all_gather, because the root's link is the
bottleneck: each rank copies one of n shares from the root, then the remaining shares from the other
ranks (Barnett, Gupta, Payne, Shuler, van de Geijn, Watts, Interprocessor collective communication
library (InterCom), Scalable High Performance Computing Conference, 1994).

Each rank starts with the next rank as its source, so that no GPU is read by all at once. A large
call uses several streams, to use all links where each pair of GPUs has a separate one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.cuda.capabilities import Capabilities
from mpicoll.primitives import PRIMITIVES, Layout
from mpicoll.routes.device.jobs import RECV, SEND, Job, Part, Placed, jobs_of
from mpicoll.routes.device.state import build_on_home_device
from mpicoll.routes.device.user_buffers import UserBuffers
from mpicoll.routes.route import EXCHANGES, Needs, Policy, Route, Serves

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Minimum size of a call in bytes for this route, if `peer` serves smaller calls without
#: synchronizing the hosts; and minimum size in bytes of the data that a rank receives by several
#: streams. Not measured.
MIN_BYTES = 1024 * 1024
#: Maximum number of streams of a rank's copies.
LANES = 8
#: Alignment in bytes of the shares of a broadcast.
LINE = 256


class Copiers(UserBuffers):
    """State of a group for copies between its ranks' arrays."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement, readers=range(agreement.group.size()), steps=2)

    def shows(self, kind: CallKind, side: int, extent: Extent, root: int) -> bool:
        """Return whether another rank copies from this rank's array of a side."""
        primitive, is_root = kind.primitive, self.me == root
        if side != (SEND if primitive.input else RECV):
            return False
        if primitive.input:
            return not primitive.root or is_root is not primitive.many_out
        return is_root or self.n > 2  # a share of the broadcast

    def readers_of(self, kind: CallKind, root: int) -> Iterable[int]:
        gathers = kind.primitive.root and kind.primitive.many_out
        return [root] if gathers else self.readers

    def steps_of(
        self, kind: CallKind, extent: Extent, root: int, sent: Any
    ) -> Sequence[Iterable[Job]]:
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
        assert kind.dtype is not None
        context, size = self.context, kind.dtype.itemsize
        large = sum(job.elements for job, _, _ in jobs) * size >= MIN_BYTES
        lanes = context.lanes(min(len(jobs), LANES) - 1) if large else []
        streams = [*lanes, context.work]
        for lane in lanes:
            context.after(lane, context.work)
        try:
            for place, (job, (source,), (out,)) in enumerate(jobs):
                stream = streams[place % len(streams)]
                context.copy(out, source, job.elements * size, stream)
        finally:
            for lane in lanes:
                context.after(context.work, lane)


def _negotiate(agreement: Agreement) -> Copiers | str:
    made = Copiers(agreement)
    return made.connect() or made


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    return build_on_home_device(
        kind,
        agreement,
        agreement.state(Copiers),
        lambda state, kind: partial(state.work_together, kind),
    )


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
