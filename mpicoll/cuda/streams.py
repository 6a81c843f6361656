"""Streams and memory that a group has of a device, and the order of calls in streams."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

from mpicoll.cuda.runtime import LEGACY, PER_THREAD, UNKNOWN, Event, Memory, Runtime, allocate
from mpicoll.cuda.threads import announce
from mpicoll.errors import UnsupportedError

__all__ = ["CapturedOrder", "CurrentStreams", "DeviceContext", "Point", "StreamOrder", "look_until"]


class DeviceContext:
    """What a group has of one device: streams, and memory that its calls use in turn.

    work: the stream in which calls work.
    captured: that stream is one of the caller's, which is being captured into a graph.
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
        self._lanes: list[int] = []
        self._blocks: list[Memory] = []
        self._since: list[int] = []  # for how many calls each has not been used
        self._taken = 0
        self._pinned: Memory | None = None
        self._left: list[tuple[list[Memory], Memory | None]] = []
        self.captured = False

    @cached_property
    def to_host(self) -> int:
        """A stream for copies to the host."""
        return self._create_stream()

    @cached_property
    def to_device(self) -> int:
        """A stream for copies to the device."""
        return self._create_stream()

    @cached_property
    def callbacks(self) -> int:
        """A stream in which users' callbacks work."""
        return self._create_stream()

    def lanes(self, count: int) -> list[int]:
        """Return streams for what is done beside the work stream, and side by side."""
        while len(self._lanes) < count:
            self._lanes.append(self._create_stream())
        return self._lanes[:count]

    def _create_stream(self) -> int:
        self._streams.append(self.runtime.create_stream(self.index))
        return self._streams[-1]

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        """In here calls work in a stream that is being captured into a graph."""
        work, self.work, self.captured = self.work, stream, True
        try:
            yield
        finally:
            self.work, self.captured = work, False

    def _check_captured(self) -> None:
        """Raise UnsupportedError in a capture: a graph's memory has to stay."""
        if self.captured:
            raise UnsupportedError(
                "a call on device memory that is being captured into a CUDA graph can have no "
                "memory beside its arrays: give contiguous arrays, each one's own, and all of the "
                "device of the group's first call; no lists and no PREMUL_SUM"
            )

    def begin(self) -> None:
        """Begin a call: the scratch of the one before is free again."""
        if self.captured:
            return
        self._since = [0 if k < self._taken else n + 1 for k, n in enumerate(self._since)]
        self._taken = 0
        for place in range(len(self._blocks)):
            if self._since[place] >= self.UNUSED and self._blocks[place].nbytes > self.LARGE:
                self._blocks[place] = _NOTHING

    def scratch(self, nbytes: int) -> Memory:
        """Return device memory for the rest of the call, for use in the work stream.

        Raises UnsupportedError in a capture.
        """
        self._check_captured()
        place = self._taken
        if place == len(self._blocks):
            self._blocks.append(allocate(self.runtime, self.index, max(nbytes, 1)))
            self._since.append(0)
        elif self._blocks[place].nbytes < nbytes:
            # Freeing memory waits until nothing uses it any more.
            self._blocks[place] = allocate(self.runtime, self.index, nbytes)
        self._taken += 1
        return self._blocks[place]

    def scratch_anew(self, nbytes: int) -> Memory:
        """Return other memory in place of what ``scratch`` has returned last, which goes."""
        self._taken -= 1
        self._blocks[self._taken] = _NOTHING
        return self.scratch(nbytes)

    def mark(self) -> int:
        """Return a mark for ``release``."""
        return self._taken

    def release(self, mark: int) -> None:
        """Let scratch that was taken since then be taken again, in the order of the work stream."""
        self._taken = mark

    def pinned(self, nbytes: int) -> Memory:
        """Return pinned memory for the rest of the call; there is one such piece.

        Raises UnsupportedError in a capture.
        """
        self._check_captured()
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
        """After an error, do not use again the memory that MPI or copies may still use."""
        self._left.append((self._blocks, self._pinned))
        self._blocks, self._since, self._pinned = [], [], None

    def abandon(self) -> None:
        """Never free the memory that MPI or copies may still use."""
        self.leave_behind()
        _left_behind.extend(self._left)

    def close(self, limit: float = 0, keep: bool = False) -> None:
        """Free everything, once nothing uses it any more.

        keep: but what calls with errors have left behind: MPI may still be in one.
        """
        self._synchronize_all()
        if keep:
            _left_behind.extend(self._left)
        self._left = []
        let_go_of_arrays()
        self._blocks, self._pinned = [], None
        for stream in self._streams:
            self.runtime.destroy_stream(stream)


def look_until(is_done: Callable[[], bool], moment: float) -> bool:
    """Wait until something is done, or until a moment (monotonic); return whether it is.

    By looking: to wait for an event has no timeout in CUDA.
    """
    pause = 10e-6
    while not is_done():
        if time.monotonic() > moment:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def _find_none() -> None:
    return None


#: In the place of a piece of scratch that was given back.
_NOTHING = Memory(0, 0, None)

_left_behind: list[tuple[list[Memory], Memory | None]] = []


class CurrentStreams(NamedTuple):
    """How a library of arrays knows the calling thread's current streams.

    current: returns the number of that of a device.
    using:   returns a context in which a device has a stream of that number.
    """

    current: Callable[[int], int]
    using: Callable[[int, int], AbstractContextManager[object]]


class Point:
    """What callers wait for: events of a device, after which the results of a call are there.

    streams:   those that callers of no library work in, which cannot tell their current ones.
    libraries: of the others.
    find_failure: returns why the results are not there though the events have come, as far as is
               known; None if they are.
    """

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        streams: Iterable[int],
        libraries: Iterable[CurrentStreams],
        events: Sequence[Event] = (),
    ) -> None:
        self._runtime = runtime
        self.index = index
        self._named = frozenset(streams)
        self._libraries = frozenset(libraries)
        self.events = events
        self.find_failure: Callable[[], Exception | None] = _find_none

    def is_done(self) -> bool:
        """Return whether the device has done it."""
        return all(map(self._runtime.is_done, self.events))

    def current_streams(self) -> set[int]:
        """Return the streams that the calling thread works in now."""
        return {*self._named, *(one.current(self.index) for one in self._libraries)}

    def join(self, where: str) -> set[int]:
        """Let the calling thread's current streams go on after it; return them.

        The host goes on at once, but for arrays whose library does not say in which stream it
        works: then the host waits. Raises UnsupportedError, for the function called ``where``, if a
        stream is being captured: it cannot wait for what is outside of its graph.
        """
        streams = self.current_streams()
        if not self.events:
            return streams
        for stream in streams:
            self._runtime.check_stream(self.index, stream, where)
        self._go_on(streams)
        return streams

    def _go_on(self, streams: Iterable[int]) -> None:
        for stream in streams:
            for event in self.events:
                if stream == UNKNOWN:
                    self._runtime.synchronize(event)
                else:
                    self._runtime.wait(self.index, stream, event)

    def here(self) -> Point:
        """Return the point up to which the calling thread's current streams are filled now."""
        streams = self.current_streams()
        events = [self._runtime.record(self.index, stream or LEGACY) for stream in streams]
        point = Point(self._runtime, self.index, self._named, self._libraries, events)
        point.find_failure = self.find_failure  # what comes after has nothing right to work on
        return point

    def settle(self) -> None:
        """Note that the results are there."""
        self.find_failure = _find_none

    @contextmanager
    def after(self, stream: int) -> Iterator[None]:
        """In here the libraries' current stream is this one, which goes on after the point; so do
        the streams of callers of no library.
        """
        self._go_on(self._named)
        self._go_on((stream,))
        with ExitStack() as stack:
            for library in self._libraries:
                stack.enter_context(library.using(self.index, stream))
            yield


class StreamOrder(Point):
    """The place of one call in the caller's streams.

    The call comes after what they hold when this is created, on the caller's thread. `enter` and
    `leave` may be called on another thread. A synchronous call comes before what they get once it
    has ended; of an asynchronous one, whoever needs the result joins the point.

    held: what the call reads and writes, kept until no reuse of the memory can meet the call.

    Raises UnsupportedError, for the function called ``where``, if a stream is being captured.
    """

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        streams: Iterable[int],
        libraries: Iterable[CurrentStreams] = (),
        named: Iterable[int] | None = None,
        held: object = None,
        where: str = "a call on device memory",
    ) -> None:
        self._streams = tuple(streams)
        super().__init__(runtime, index, self._streams if named is None else named, libraries)
        self._thread = threading.get_ident()
        self.asynchronous = False
        self._context: DeviceContext | None = None
        self.held = held
        self._dropped = False
        for one in self._streams:
            runtime.check_stream(index, one, where)
        self._before = [runtime.record(index, one or LEGACY) for one in self._streams]
        let_go_of_arrays()

    def is_due(self) -> bool:
        """Return whether all is done that the caller's streams held."""
        return all(map(self._runtime.is_done, self._before))

    def enter(self, context: DeviceContext) -> None:
        """Let the context begin after what the caller's streams held."""
        for event in self._before:
            self._runtime.wait(context.index, context.work, event)

    def leave(self, context: DeviceContext) -> None:
        """End the call with what the context holds so far; if it is synchronous, let the caller's
        streams go on after that.
        """
        self._context = context
        events = (context.record(),)
        with _dropping:
            self.events = events
            if self._dropped:
                self._hold_while_in_use()
        if not self.asynchronous:
            self._go_on(self._streams)
            self.held = None

    def join(self, where: str) -> set[int]:
        """Do as `Point.join`. Where all streams of the call go on after it, its arrays are let go:
        what reuses their memory comes in such a stream, as for any kernel.
        """
        streams = super().join(where)
        one_thread = self._thread == threading.get_ident() or PER_THREAD not in self._streams
        if one_thread and streams.issuperset(self._streams):
            self.held = None
        return streams

    def in_callbacks(self) -> AbstractContextManager[object]:
        """Return a context for callbacks on the group's thread: after the call, in a stream of
        their own, so that no stream of the program waits.
        """
        context = self._context
        return nullcontext() if context is None else self.after(context.callbacks)

    def drop(self) -> None:
        """Keep the arrays for as long as the device works on them, and the caller no longer. The
        call may not have begun yet.
        """
        with _dropping:
            self._dropped = True
            if self.events:
                self._hold_while_in_use()

    def _hold_while_in_use(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            _in_use.append((self, held))


class CapturedOrder(StreamOrder):
    """The place of a call in a stream that is being captured into a graph: in that stream itself.

    Who launches the graph orders it among the group's other calls, alike on all ranks.
    """

    def __init__(self, runtime: Runtime, index: int, stream: int, where: str) -> None:
        Point.__init__(self, runtime, index, (stream,), ())
        self._stream, self._where = stream, where
        self._capture = ExitStack()
        self.held, self._dropped = None, False

    @property
    def asynchronous(self) -> bool:
        """False: nobody can wait for what is in a graph."""
        return False

    @asynchronous.setter
    def asynchronous(self, wanted: bool) -> None:
        raise UnsupportedError(
            f"{self._where}: the current stream is being captured into a CUDA graph: call without "
            "async_op, and not before the group's asynchronous calls have ended"
        )

    def is_due(self) -> bool:
        """Return True."""
        return True

    def enter(self, context: DeviceContext) -> None:
        """Let the context work in the stream."""
        self._capture.enter_context(context.capturing(self._stream))

    def leave(self, context: DeviceContext) -> None:
        """Let the context work in its own stream again."""
        self._capture.close()

    def join(self, where: str) -> set[int]:
        """Return the stream."""
        return {self._stream}

    def in_callbacks(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()


#: Held where a call is dropped and where it gets its events, which threads may do at a time. By the
#: collector of garbage a Work can be dropped anywhere, also where it is held.
_dropping = threading.RLock()
#: Arrays of calls that nobody has waited for, while the device may work on them.
_in_use: deque[tuple[StreamOrder, object]] = deque()


def let_go_of_arrays() -> None:
    """Let go of arrays on which the device has done its work; asked for with each call."""
    for _ in range(len(_in_use)):
        try:
            order, held = _in_use.popleft()
        except IndexError:  # another thread looks as well
            return
        if not order.is_done():
            _in_use.append((order, held))
