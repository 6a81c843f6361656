"""A group's streams and scratch memory on a device, and the order of calls in callers' streams."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

from mpicoll.cuda.runtime import LEGACY, PER_THREAD, UNKNOWN, Event, Memory, Runtime, allocate
from mpicoll.cuda.threads import set_process_device
from mpicoll.errors import UnsupportedError


class DeviceContext:
    """A group's resources on one device: streams, and scratch memory that its calls use in turn.

    work:     the stream in which calls enqueue work.
    captured: whether that is a caller's stream, which is being captured into a graph.
    """

    #: Scratch larger than LARGE_BYTES is freed after UNUSED_COUNT calls that did not use it.
    #: Freeing and reallocating wait for the device.
    LARGE_BYTES, UNUSED_COUNT = 64 * 1024 * 1024, 100

    def __init__(self, runtime: Runtime, index: int) -> None:
        self.runtime = runtime
        self.index = index
        set_process_device(runtime, index)
        self._streams = [runtime.create_stream(index)]
        self.work = self._streams[0]
        self._blocks: list[Memory] = []
        self._since: list[int] = []  # number of calls since the last use of each block
        self._taken = 0
        self._pinned: Memory | None = None
        self._failed_scratch: list[tuple[list[Memory], Memory | None]] = []
        self.captured = False

    def _create_stream(self) -> int:
        self._streams.append(self.runtime.create_stream(self.index))
        return self._streams[-1]

    #: Streams for copies to the host and to the device, and for users' callbacks.
    to_host = cached_property(_create_stream)
    to_device = cached_property(_create_stream)
    callbacks = cached_property(_create_stream)

    @contextmanager
    def capturing(self, stream: int) -> Iterator[None]:
        """Context in which calls enqueue into a stream that is being captured into a graph."""
        work, self.work, self.captured = self.work, stream, True
        try:
            with self.runtime.relaxed():  # CuPy queries the memory at a thread's first launch
                yield
        finally:
            self.work, self.captured = work, False

    def _check_captured(self) -> None:
        """Raise UnsupportedError in a capture: the memory of a graph must not be freed."""
        if self.captured:
            raise UnsupportedError(
                "a call that is being captured into a CUDA graph cannot allocate scratch memory: "
                "pass contiguous arrays that do not overlap, on the device of the group's first "
                "call; lists of arrays and PREMUL_SUM are not supported"
            )

    def begin(self) -> None:
        """Begin a call: the previous call's scratch may be reused."""
        if self.captured:
            return
        self._since = [0 if k < self._taken else n + 1 for k, n in enumerate(self._since)]
        self._taken = 0
        for place in range(len(self._blocks)):
            if (
                self._since[place] >= self.UNUSED_COUNT
                and self._blocks[place].nbytes > self.LARGE_BYTES
            ):
                self._blocks[place] = _FREED

    def scratch(self, nbytes: int) -> Memory:
        """Return device memory for the rest of the call, to be used in the work stream.

        Raises UnsupportedError in a capture.
        """
        self._check_captured()
        place = self._taken
        if place == len(self._blocks):
            self._blocks.append(allocate(self.runtime, self.index, max(nbytes, 1)))
            self._since.append(0)
        elif self._blocks[place].nbytes < nbytes:
            # Freeing device memory waits until no work uses it.
            self._blocks[place] = allocate(self.runtime, self.index, nbytes)
        self._taken += 1
        return self._blocks[place]

    def replace_scratch(self, nbytes: int) -> Memory:
        """Replace the block that ``scratch`` returned last by a new one."""
        self._taken -= 1
        self._blocks[self._taken] = _FREED
        return self.scratch(nbytes)

    def mark(self) -> int:
        """Return a mark for ``release``."""
        return self._taken

    def release(self, mark: int) -> None:
        """Make scratch since a mark reusable, in the order of the work stream."""
        self._taken = mark

    def pinned(self, nbytes: int) -> Memory:
        """Return pinned memory for the rest of the call; there is only one such block.

        Raises UnsupportedError in a capture.
        """
        self._check_captured()
        if self._pinned is None or self._pinned.nbytes < nbytes:
            if self._pinned is not None:
                self._synchronize_all()
            self._pinned = None  # free it before allocating another
            self._pinned = self.runtime.allocate_pinned(self.index, max(nbytes, 1))
        return self._pinned

    def copy(self, into: int, source: int, nbytes: int, stream: int | None = None) -> None:
        """Enqueue a copy in the work stream or another, unless it is in place."""
        if into != source:
            self.runtime.copy(self.index, into, source, nbytes, stream or self.work)

    def after(self, later: int, earlier: int) -> None:
        """Make later work of one stream wait for the present work of another."""
        self.runtime.wait(self.index, later, self.runtime.record(self.index, earlier))

    def follow(self, other: DeviceContext) -> None:
        """Make later work of this context wait for the present work of another context."""
        self.runtime.wait(self.index, self.work, self.runtime.record(other.index, other.work))

    def record(self) -> Event:
        """Return an event for the present work of the work stream."""
        return self.runtime.record(self.index, self.work)

    def synchronize(self, stream: int) -> None:
        """Block until the present work of a stream is done."""
        self.runtime.synchronize(self.runtime.record(self.index, stream))

    def _synchronize_all(self) -> None:
        for stream in self._streams:
            self.synchronize(stream)

    def retain_scratch(self) -> None:
        """After an error, do not reuse memory that MPI or copies may still access."""
        self._failed_scratch.append((self._blocks, self._pinned))
        self._blocks, self._since, self._pinned = [], [], None

    def abandon(self) -> None:
        """Never free the memory that MPI or copies may still access."""
        self.retain_scratch()
        _retained.extend(self._failed_scratch)

    def close(self, limit: float = 0, keep: bool = False) -> None:
        """Free all resources once no work uses them.

        keep: do not free the memory of failed calls: MPI may still access it.
        """
        self._synchronize_all()
        if keep:
            _retained.extend(self._failed_scratch)
        self._failed_scratch = []
        release_finished_arrays()
        self._blocks, self._pinned = [], None
        for stream in self._streams:
            self.runtime.destroy_stream(stream)


def poll_until(is_done: Callable[[], bool], moment: float) -> bool:
    """Poll until ``is_done`` returns True, or until a monotonic time; return whether it did.

    CUDA cannot wait for an event with a timeout.
    """
    pause = 10e-6
    while not is_done():
        if time.monotonic() > moment:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def _no_failure() -> None:
    return None


#: Replaces a block of scratch that was freed.
_FREED = Memory(0, 0, None)

_retained: list[tuple[list[Memory], Memory | None]] = []


class CurrentStreams(NamedTuple):
    """An array library's notion of the calling thread's current streams."""

    current: Callable[[int], int]  # returns the current stream of a device
    #: Returns a context in which a device has another current stream.
    using: Callable[[int, int], AbstractContextManager[object]]


class Point:
    """A point in a device's work, given by events, at which the results of a call are available.

    streams:   streams of callers whose array library has no current stream.
    libraries: array libraries of all callers that have current streams.
    find_failure: returns the reason that the results are invalid although the events have
                  completed, as far as known; else None.
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
        self.find_failure: Callable[[], Exception | None] = _no_failure

    def is_done(self) -> bool:
        """Return whether the device has reached the point."""
        return all(map(self._runtime.is_done, self.events))

    def current_streams(self) -> set[int]:
        """Return the calling thread's current streams."""
        return {*self._named, *(one.current(self.index) for one in self._libraries)}

    def join(self, where: str) -> set[int]:
        """Make the calling thread's current streams wait for the point; return them.

        The host does not wait, except for arrays whose library does not name its stream. Raises
        UnsupportedError, in the name of the function ``where``, if a stream is being captured: it
        cannot wait for work outside its graph.
        """
        streams = self.current_streams()
        if not self.events:
            return streams
        for stream in streams:
            self._runtime.check_stream(self.index, stream, where)
        self._make_wait(streams)
        return streams

    def _make_wait(self, streams: Iterable[int]) -> None:
        for stream in streams:
            for event in self.events:
                if stream == UNKNOWN:
                    self._runtime.synchronize(event)
                else:
                    self._runtime.wait(self.index, stream, event)

    def here(self) -> Point:
        """Return a point after the present work of the calling thread's current streams."""
        streams = self.current_streams()
        events = [self._runtime.record(self.index, stream or LEGACY) for stream in streams]
        point = Point(self._runtime, self.index, self._named, self._libraries, events)
        point.find_failure = self.find_failure  # their work uses invalid results as well
        return point

    def settle(self) -> None:
        """Mark the results as valid: ``find_failure`` returns None from now on."""
        self.find_failure = _no_failure

    @contextmanager
    def after(self, stream: int) -> Iterator[None]:
        """Context in which ``stream`` is the libraries' current stream and waits for the point, as
        do the streams of callers without a library.
        """
        self._make_wait(self._named)
        self._make_wait((stream,))
        with ExitStack() as stack:
            for library in self._libraries:
                stack.enter_context(library.using(self.index, stream))
            yield


class StreamOrder(Point):
    """The order of one call relative to the caller's streams.

    Create it on the caller's thread: the call waits for the present work of the streams. `enter`
    and `leave` may be called on another thread. After a synchronous call, the caller's later work
    waits for the call; after an asynchronous call, a caller that needs the result joins the point.

    held: arrays of the call, kept alive until their memory can be reused.

    Raises UnsupportedError, in the name of the function ``where``, if a stream is being captured.
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
        if self._streams:  # a query of an event is not allowed in a capture
            release_finished_arrays()

    def is_due(self) -> bool:
        """Return whether the earlier work of the caller's streams is done."""
        return all(map(self._runtime.is_done, self._before))

    def enter(self, context: DeviceContext) -> None:
        """Make the context wait for the earlier work of the caller's streams."""
        for event in self._before:
            self._runtime.wait(context.index, context.work, event)

    def leave(self, context: DeviceContext) -> None:
        """End the call after the context's work; a synchronous call orders the caller's streams."""
        self._context = context
        self.events = (context.record(),)
        if self.asynchronous:
            _unfinished.append(self)
        else:
            self._make_wait(self._streams)
            self.held = None

    def join(self, where: str) -> set[int]:
        """Join as `Point.join`. If all streams of the call wait, its arrays are released: work that
        reuses their memory runs in such a stream, as after any kernel.
        """
        streams = super().join(where)
        one_thread = self._thread == threading.get_ident() or PER_THREAD not in self._streams
        if one_thread and streams.issuperset(self._streams):
            self.held = None
        return streams

    def in_callbacks(self) -> AbstractContextManager[object]:
        """Return a context for callbacks on the progress thread: after the call, in a separate
        stream, so that no stream of the program waits.
        """
        context = self._context
        return nullcontext() if context is None else self.after(context.callbacks)

    def drop(self) -> None:
        """Keep the arrays until the device no longer uses them, because the caller does not wait.
        The call may not have begun yet.
        """
        self._dropped = True

    def holds(self) -> bool:
        """Return whether the arrays must be kept: the caller may wait, or the device use them."""
        return self.held is not None and not (self._dropped and self.is_done())


class CapturedOrder(StreamOrder):
    """The order of a call in a stream that is being captured into a graph: in that stream itself.

    The program must launch the graph in the same order among the group's calls on all ranks.
    """

    def __init__(self, runtime: Runtime, index: int, stream: int, where: str) -> None:
        super().__init__(runtime, index, (), named=(stream,), where=where)
        self._stream, self._where = stream, where
        self._capture = ExitStack()

    @property
    def asynchronous(self) -> bool:
        """False: work in a graph cannot be waited for."""
        return False

    @asynchronous.setter
    def asynchronous(self, wanted: bool) -> None:
        if wanted:
            raise UnsupportedError(
                f"{self._where}: the current stream is being captured into a CUDA graph: call "
                "without async_op, after the group's asynchronous calls have ended"
            )

    def enter(self, context: DeviceContext) -> None:
        """Make the context enqueue into the captured stream."""
        self._capture.enter_context(context.capturing(self._stream))

    def leave(self, context: DeviceContext) -> None:
        """Make the context enqueue into its own stream again."""
        self._capture.close()


#: Asynchronous calls for which the program has perhaps not waited. They are added when they start.
#: When a Work is dropped it is too late: the garbage collector may have destroyed the events of a
#: Work in a reference cycle before.
_unfinished: deque[StreamOrder] = deque()


def release_finished_arrays() -> None:
    """Release arrays that the device no longer uses; called in each call."""
    for _ in range(len(_unfinished)):
        try:
            order = _unfinished.popleft()
        except IndexError:  # another thread runs this function as well
            return
        if order.holds():
            _unfinished.append(order)
        else:
            order.held = None
