"""Streams and memory that a group has of a device, and the order of calls in streams."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from mpicoll.cuda.runtime import LEGACY, UNKNOWN, Event, Memory, Runtime, allocate
from mpicoll.cuda.threads import announce

__all__ = ["DeviceContext", "StreamOrder"]


class DeviceContext:
    """What a group has of one device: streams, and memory that its calls use in turn.

    work: the stream in which calls work.
    """

    #: Bytes of a piece of scratch from which on it is given back when it has not been used for
    #: some calls: giving memory back, and getting it again, waits for the device.
    LARGE, UNUSED = 64 * 1024 * 1024, 100

    def __init__(self, runtime: Runtime, index: int) -> None:
        self.runtime = runtime
        self.index = index
        announce(runtime, index)
        self._streams = [runtime.create_stream(index)]
        self.work = self._streams[0]
        self._blocks: list[Memory] = []
        self._since: list[int] = []  # for how many calls each has not been used
        self._taken = 0
        self._pinned: Memory | None = None

    @cached_property
    def to_host(self) -> int:
        """A stream for copies to the host."""
        return self._create_stream()

    @cached_property
    def to_device(self) -> int:
        """A stream for copies to the device."""
        return self._create_stream()

    def _create_stream(self) -> int:
        self._streams.append(self.runtime.create_stream(self.index))
        return self._streams[-1]

    def begin(self) -> None:
        """Begin a call: the scratch of the one before is free again."""
        self._since = [0 if k < self._taken else n + 1 for k, n in enumerate(self._since)]
        self._taken = 0
        for place in range(len(self._blocks)):
            if self._since[place] >= self.UNUSED and self._blocks[place].nbytes > self.LARGE:
                self._blocks[place] = _NOTHING

    def scratch(self, nbytes: int) -> Memory:
        """Return device memory for the rest of the call, for use in the work stream."""
        place = self._taken
        self._taken += 1
        if place == len(self._blocks):
            self._blocks.append(allocate(self.runtime, self.index, max(nbytes, 1)))
            self._since.append(0)
        elif self._blocks[place].nbytes < nbytes:
            # Freeing memory waits until nothing uses it any more.
            self._blocks[place] = allocate(self.runtime, self.index, nbytes)
        return self._blocks[place]

    def pinned(self, nbytes: int) -> Memory:
        """Return pinned memory for the rest of the call; there is one such piece."""
        if self._pinned is None or self._pinned.nbytes < nbytes:
            if self._pinned is not None:
                self._synchronize_all()
            self._pinned = None  # freed before another is allocated
            self._pinned = self.runtime.allocate_pinned(self.index, max(nbytes, 1))
        return self._pinned

    def after(self, later: int, earlier: int) -> None:
        """Order what one stream gets from now on after what another holds so far."""
        self.runtime.wait(self.index, later, self.runtime.record(self.index, earlier))

    def follow(self, other: DeviceContext) -> None:
        """Order work here from now on after what the other's work stream holds so far."""
        event = self.runtime.record(other.index, other.work)
        self.runtime.wait(self.index, self.work, event)

    def record(self) -> Event:
        """Return the event of all being done that the work stream holds so far."""
        return self.runtime.record(self.index, self.work)

    def synchronize(self, stream: int) -> None:
        """Wait for all that a stream of this context holds so far."""
        self.runtime.synchronize(self.runtime.record(self.index, stream))

    def _synchronize_all(self) -> None:
        for stream in self._streams:
            self.synchronize(stream)

    def leave_behind(self) -> None:
        """After an error, never use or free again the memory that MPI or copies may still use."""
        _left_behind.append((self._blocks, self._pinned))
        self._blocks, self._since, self._pinned = [], [], None

    def close(self, limit: float = 0) -> None:
        """Free everything, once nothing uses it any more."""
        self._synchronize_all()
        self._blocks, self._pinned = [], None
        for stream in self._streams:
            self.runtime.destroy_stream(stream)


#: In the place of a piece of scratch that was given back.
_NOTHING = Memory(0, 0, None)

_left_behind: list[tuple[list[Memory], Memory | None]] = []


class StreamOrder:
    """The place of one call in the caller's streams.

    The call comes after what they hold when this is created, on the caller's thread, and before
    what they get once the call has ended. `enter` and `leave` may be called on another thread.

    asynchronous: the call ends when all is done, because the streams that will use its result are
                  not known.
    """

    def __init__(
        self, runtime: Runtime, index: int, streams: Iterable[int], asynchronous: bool = False
    ) -> None:
        self._runtime = runtime
        self.index = index
        self._streams = tuple(streams)
        self.asynchronous = asynchronous or UNKNOWN in self._streams
        self._before = [runtime.record(index, one or LEGACY) for one in self._streams]

    def is_due(self) -> bool:
        """Return whether all is done that the caller's streams held."""
        return all(map(self._runtime.is_done, self._before))

    def enter(self, context: DeviceContext) -> None:
        """Let the context begin after what the caller's streams held."""
        for event in self._before:
            self._runtime.wait(context.index, context.work, event)

    def leave(self, context: DeviceContext) -> None:
        """Let the caller's streams go on after what the context has done."""
        if self.asynchronous:
            context.synchronize(context.work)
            return
        done = self._runtime.record(context.index, context.work)
        for stream in self._streams:
            self._runtime.wait(self.index, stream, done)
