"""What a group has of a device, and the order of its calls among what the caller's streams hold."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from mpicoll.cuda.runtime import LEGACY, UNKNOWN, Memory, Runtime

__all__ = ["DeviceContext", "StreamOrder"]


class DeviceContext:
    """What a group has of one device: streams, and memory that calls use one after another.

    work: the stream in which things happen.
    """

    #: Bytes of a piece of scratch that is kept for later calls.
    KEPT = 64 * 1024 * 1024

    def __init__(self, cuda: Runtime, index: int) -> None:
        self.runtime = cuda
        self.index = index
        self._streams = [cuda.create_stream(index)]
        self.work = self._streams[0]
        self._blocks: list[Memory] = []
        self._taken = 0
        self._pinned: Memory | None = None

    @cached_property
    def to_host(self) -> int:
        """A stream for copies to the host."""
        return self._another()

    @cached_property
    def to_device(self) -> int:
        """A stream for copies to the device."""
        return self._another()

    def _another(self) -> int:
        self._streams.append(self.runtime.create_stream(self.index))
        return self._streams[-1]

    def begin(self) -> None:
        """A new call: the scratch of the one before is free again."""
        self._taken = 0
        self._blocks = [one for one in self._blocks if one.nbytes <= self.KEPT]

    def scratch(self, nbytes: int) -> Memory:
        """Memory of the device for the rest of the call; the work stream may use it at once."""
        place = self._taken
        self._taken += 1
        if place == len(self._blocks):
            self._blocks.append(self.runtime.allocate(self.index, max(nbytes, 1)))
        elif self._blocks[place].nbytes < nbytes:
            # Giving memory back waits until nothing uses it any more.
            self._blocks[place] = self.runtime.allocate(self.index, nbytes)
        return self._blocks[place]

    def pinned(self, nbytes: int) -> Memory:
        """Pinned memory for the rest of the call; there is one such piece."""
        if self._pinned is None or self._pinned.nbytes < nbytes:
            if self._pinned is not None:
                self._synchronize_all()
            self._pinned = None  # before there is another
            self._pinned = self.runtime.allocate_pinned(self.index, max(nbytes, 1))
        return self._pinned

    def after(self, later: int, earlier: int) -> None:
        """What one stream of the device gets from now on comes after what another holds so far."""
        self.runtime.wait(self.index, later, self.runtime.record(self.index, earlier))

    def follow(self, other: DeviceContext) -> None:
        """Work here, from now on, comes after what the other context's work stream holds so far."""
        event = self.runtime.record(other.index, other.work)
        self.runtime.wait(self.index, self.work, event)

    def synchronize(self, stream: int) -> None:
        """Returns when all is done that a stream of this context holds so far."""
        self.runtime.synchronize(self.runtime.record(self.index, stream))

    def _synchronize_all(self) -> None:
        for stream in self._streams:
            self.synchronize(stream)

    def leave_behind(self) -> None:
        """After an error: memory that MPI or copies may still use is not used for anything else."""
        _left_behind.append((self._blocks, self._pinned))
        self._blocks, self._pinned = [], None

    def close(self) -> None:
        """Gives everything back, when nothing uses it any more."""
        self._synchronize_all()
        self._blocks, self._pinned = [], None
        for stream in self._streams:
            self.runtime.destroy_stream(stream)


_left_behind: list[Any] = []


class StreamOrder:
    """The order of one call among what the caller's streams hold.

    The call comes after what they hold when it is made, and before what they get once it has
    ended. Made on the caller's thread; the rest may happen on another.

    asynchronous: the call ends when all is done, for nobody knows the streams that are to see it.
    """

    def __init__(
        self, cuda: Runtime, index: int, streams: Iterable[int], asynchronous: bool = False
    ) -> None:
        self._runtime = cuda
        self.index = index
        self._streams = tuple(streams)
        self.asynchronous = asynchronous or UNKNOWN in self._streams
        self._before = [cuda.record(index, one or LEGACY) for one in self._streams]

    def enter(self, context: DeviceContext) -> None:
        """From here on the context may work."""
        for event in self._before:
            self._runtime.wait(context.index, context.work, event)

    def leave(self, context: DeviceContext) -> None:
        """What the caller's streams get from now on finds the result."""
        if self.asynchronous:
            context.synchronize(context.work)
            return
        done = self._runtime.record(context.index, context.work)
        for stream in self._streams:
            self._runtime.wait(self.index, stream, done)
