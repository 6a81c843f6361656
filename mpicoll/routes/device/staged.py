"""Device memory over any MPI, through staging buffers in pinned host memory.

A call is split into chunks, the same on every rank. While MPI processes a chunk, the next one is
copied to the host and the previous one to the device, on separate streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.arrays.views import DeviceView, View, from_numpy
from mpicoll.core.checks import reads, writes
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.core.reproducible import LEVELS
from mpicoll.cuda.runtime import Event
from mpicoll.primitives import PRIMITIVES, Layout
from mpicoll.routes.host import select
from mpicoll.routes.route import Policy, Route, Serves

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

#: Size of a chunk in bytes, with both sides and all ranks' blocks. Two chunks are in flight.
CHUNK = 8 * 1024 * 1024
_LINE = 64


def _build(kind: CallKind, agreement: Agreement) -> Implementation:
    primitive, group = kind.primitive, kind.group
    host, n = select.choose(kind).run, group.size()
    sent = n if primitive.layout is Layout.SCATTERED else 1
    received = n if primitive.layout is Layout.GATHERED else 1
    # Only the root's chunks have blocks of all ranks, but all ranks use the same chunks.
    blocks = received + (sent if primitive.input else 0)

    def staged(send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int) -> None:
        # Blocks of different sizes are one chunk, because no rank knows all sizes.
        whole = not isinstance(extent, int)
        out = None if send is None else _Side(send, 1 if whole else sent)
        into = None if recv is None else _Side(recv, 1 if whole else received)
        sides = [one for one in (out, into) if one is not None]
        context, count = sides[0].view.context, max(one.count for one in sides)
        step = max(1, count if whole else CHUNK // blocks // sides[0].itemsize)
        chunks = [(at, min(step, count - at)) for at in range(0, max(count, 1), step)]
        half = sum(one.room(chunks[0]) for one in sides)
        pinned = context.pinned(half * min(2, len(chunks))).on_host()
        coming_in = [
            one for one in sides if one is out or (out is None and reads(primitive, group, root))
        ]
        going_back = into is not None and writes(primitive, group, root)

        def places(k: int) -> list[View]:
            """Return the staging buffers of chunk k."""
            found, at = [], k % 2 * half
            for one in sides:
                memory = pinned[at : at + one.nbytes(chunks[k])].view(one.view.dtype.numpy)
                found.append(from_numpy(memory, one.view.dtype))
                at += one.room(chunks[0])
            return found

        def fetch(k: int) -> Event:
            context.after(context.to_host, context.to_device)  # chunk k - 2 has left the buffer
            for one, place in zip(sides, places(k), strict=True):
                if one in coming_in:
                    one.copy(chunks[k], place, context.to_host, inward=False)
            return context.runtime.record(context.index, context.to_host)

        context.after(context.to_host, context.work)
        coming = fetch(0)
        try:
            for k, chunk in enumerate(chunks):
                here = coming
                if k + 1 < len(chunks):
                    coming = fetch(k + 1)
                context.runtime.synchronize(here)
                found = places(k)
                host(
                    None if out is None else found[0].buffer,
                    None if into is None else found[-1].buffer,
                    extent if whole else chunk[1],
                    root,
                )
                if into is not None and going_back:
                    into.copy(chunk, found[-1], context.to_device, inward=True)
        finally:  # also after an error, later work waits for the copies
            context.after(context.work, context.to_host)
            context.after(context.work, context.to_device)

    return Implementation(staged)


class _Side:
    """One side of a call: consecutive blocks of ``count`` elements each."""

    def __init__(self, view: View, blocks: int) -> None:
        assert isinstance(view, DeviceView)
        self.view, self.blocks = view, blocks
        self.itemsize = view.dtype.itemsize
        self.count = view.count // blocks

    def nbytes(self, chunk: tuple[int, int]) -> int:
        """Return the size in bytes of a chunk, which has a part of every block."""
        return self.blocks * self._of_block(chunk)

    def _of_block(self, chunk: tuple[int, int]) -> int:
        return min(chunk[1], self.count) * self.itemsize

    def room(self, chunk: tuple[int, int]) -> int:
        """Return the size in bytes of a chunk's staging buffer, a multiple of _LINE."""
        return -(-self.nbytes(chunk) // _LINE) * _LINE

    def copy(self, chunk: tuple[int, int], place: View, stream: int, inward: bool) -> None:
        """Enqueue copies of a chunk to its staging buffer, or back to the device (``inward``)."""
        nbytes = self._of_block(chunk)
        host = place.array.ctypes.data
        for block in range(self.blocks):
            on_device = self.view.address + (block * self.count + chunk[0]) * self.itemsize
            ends = on_device, host + block * nbytes
            self.view.context.copy(*(ends if inward else ends[::-1]), nbytes, stream)


ROUTE = Route(
    __name__,
    "pinned memory of the host",
    Serves(
        tuple(row.name for row in PRIMITIVES if row.layout is not Layout.EMPTY),
        reproducible=LEVELS,  # kept by the host routes
        premultiplies=True,
        uneven=tuple(row.name for row in PRIMITIVES if row.listed or not row.even),
    ),
    _build,
    policy=Policy(
        host_waits_for=(
            "until the device has done all earlier work and copied the last chunk to the host, and "
            "MPI has processed it; not for the last copy to the device"
        ),
    ),
)
