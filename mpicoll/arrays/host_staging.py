"""Copies of whole messages between the arrays of a device and host memory."""

from __future__ import annotations

import threading

import numpy as np

from mpicoll.arrays.views import Array, DeviceView, View, from_numpy
from mpicoll.cuda import runtime
from mpicoll.cuda.streams import DeviceContext, StreamOrder

#: Maximum number of bytes in pinned memory.
CHUNK = 8 * 1024 * 1024


class HostStaging:
    """Copies whole messages between arrays of one device and host memory."""

    def __init__(self, index: int) -> None:
        self._lock = threading.Lock()
        self._context = DeviceContext(runtime.get_runtime(), index)

    def close(self) -> None:
        """Free its device resources."""
        self._context.close()

    def place(self, view: DeviceView) -> View:
        """Allocate host memory for an array's elements; pinned if they have at most CHUNK bytes."""
        runtime, nbytes = self._context.runtime, view.nbytes
        if nbytes <= CHUNK:
            memory = runtime.allocate_pinned(self._context.index, nbytes).on_host()
        else:
            memory = np.empty(nbytes, np.uint8)
        return from_numpy(memory[:nbytes].view(view.dtype.numpy), view.dtype)

    def stream_order(self, view: DeviceView) -> StreamOrder:
        """Record the present work of the array's stream, which ``move`` then waits for."""
        return StreamOrder(self._context.runtime, self._context.index, {view.stream})

    def move(self, view: DeviceView, host: View, order: StreamOrder, inward: bool) -> None:
        """Copy an array to host memory, or back (``inward``), and wait for it.

        order: result of ``stream_order``; the copy runs after the recorded work.
        """
        with self._lock, self._context.runtime.on(self._context.index):
            context = view.context = self._context
            context.begin()
            order.enter(context)
            packed = view if view.buffer is not None else view.empty_like()
            assert isinstance(packed, DeviceView)
            if not inward and packed is not view:
                view.copy_to(packed)
            self._copy(packed.address, host.array.reshape(-1).view(np.uint8), inward)
            if inward and packed is not view:
                view.copy_from(packed)
            context.synchronize(context.work)

    def _copy(self, address: int, host: Array, inward: bool) -> None:
        """Copy between the device and the host. Host memory larger than a chunk is not pinned, so
        it is copied through two halves of a pinned chunk in turn.
        """
        context, nbytes = self._context, host.nbytes
        if nbytes <= CHUNK:
            ends = address, host.ctypes.data
            context.copy(*(ends if inward else ends[::-1]), nbytes)
            return
        half = CHUNK // 2
        pinned, done = context.pinned(2 * half).on_host(), [context.record(), context.record()]
        parts = [slice(at, min(at + half, nbytes)) for at in range(0, nbytes, half)]
        rooms = [pinned[k % 2 * half :][: part.stop - part.start] for k, part in enumerate(parts)]

        def begin(k: int) -> None:
            ends = address + parts[k].start, rooms[k].ctypes.data
            context.copy(*(ends if inward else ends[::-1]), rooms[k].nbytes)
            done[k % 2] = context.record()

        if not inward:
            begin(0)
        for k, part in enumerate(parts):
            if not inward and k + 1 < len(parts):
                begin(k + 1)
            context.runtime.synchronize(done[k % 2])  # the buffer is ready, or free
            if inward:
                rooms[k][:] = host[part]
                begin(k)
            else:
                host[part] = rooms[k]
