"""Messages on their way: the Work of a message, the thread that polls, and their end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from mpicoll import communicators, launch
from mpicoll.arrays import adapters
from mpicoll.arrays.views import Bytes, DeviceView, View
from mpicoll.core.groups import ProcessGroup, default_group
from mpicoll.core.indices import check_index
from mpicoll.core.progress import Pollable, Poller
from mpicoll.core.work import Work, deadline
from mpicoll.dispatch import execute
from mpicoll.dtypes import DTYPES, DType
from mpicoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DistBackendError,
    MismatchError,
    MPIError,
)
from mpicoll.failures import flight_record, rank_status
from mpicoll.output import format_count

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.routes.device.staged import HostStaging

__all__ = [
    "MessageWork",
    "begin_message",
    "check_tag",
    "drain",
    "exchange_bytes",
    "find_source",
    "in_background",
    "look_after",
    "post",
    "stop_polling",
]

_poller: Poller | None = None
_poller_lock = threading.Lock()
#: Messages to ranks that have exited, with their buffers, which MPI may still read.
_unsent: list[tuple[MPI.Request, View | None]] = []
#: Number of tests before a waiting thread sleeps between tests.
_SPINS = 200
_PAUSE = 100e-6
#: Seconds between checks whether the other rank has exited or has sent another dtype.
_LOOK = 0.5
#: Number of MPI tags per user tag: one for each dtype, so that a receive matches only messages of
#: its dtype. MPI has at least 32767 tags.
_TAGS = 32
assert len(DTYPES) <= _TAGS


def stop_polling() -> None:
    """End the thread that polls pending messages, if there is one."""
    global _poller
    with _poller_lock:
        if _poller is not None:
            _poller.stop()
            _poller = None


class MessageWork(Work):
    """A pending message. ``entry`` is its entry in the flight record, if any.

    It ends when a test of its request, by a waiting thread or by the poller, finds it complete.

    view: the array. packed: the buffer that MPI reads or writes. fill: copies the array into it
    before a send; land: copies it into the array after a receive; None if no copy is needed.
    is_due: returns whether the array may be read or written now; None if it may.

    A message that is not due is sent later, and delays later messages of its group.

    tag: the user's tag; None for a message of the library, which has a separate tag.
    """

    __slots__ = (
        "_arrived",
        "_fill",
        "_group",
        "_is_due",
        "_land",
        "_lock",
        "_nbytes",
        "_next_check",
        "_packed",
        "_peer",
        "_post",
        "_receives",
        "_request",
        "_source",
        "_status",
        "_tag",
        "_view",
        "entry",
    )

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        view: View,
        packed: View,
        land: Callable[[], None] | None,
        receives: bool,
        peer: int,
        post: Callable[[list[Any]], MPI.Request],
        fill: Callable[[], None] | None = None,
        is_due: Callable[[], bool] | None = None,
        tag: int | None = None,
    ) -> None:
        from mpi4py import MPI

        outputs = (view.owner,) if receives else ()
        super().__init__(
            f"{name} on rank {group.rank()} of group {group.group_name}", outputs, group.timeout
        )
        self._group = group
        self._view: View | None = view
        self._packed: View | None = packed
        self._land = land
        self._nbytes = view.nbytes
        self._receives = receives
        self._peer = peer
        self._tag = tag
        self._lock = threading.Lock()
        self._next_check = time.monotonic() + _LOOK
        self._source = -1
        self._status = MPI.Status()
        self._fill, self._is_due, self._post = fill, is_due, post
        self._request: MPI.Request | None = None
        self._arrived = False
        self.entry: list[Any] | None = None
        if not receives and (group.held_back or not (is_due is None or is_due())):
            group.held_back.append(self)
            return
        try:
            self._begin()
        except MPI.Exception as error:
            raise self._explained(error) from error

    def _begin(self) -> None:
        from mpicoll.routes.wire import message

        packed = self._packed
        assert packed is not None
        if self._fill is not None:
            self._fill()
        self._request = self._post(message(packed.buffer, packed.count, packed.dtype))

    def _has_begun(self) -> bool:
        """Start a delayed send if it is the first in the queue and due; return whether it has
        started.
        """
        if self._request is None:
            waiting = self._group.held_back
            if waiting[0] is not self or not (self._is_due is None or self._is_due()):
                return False
            try:
                self._begin()
            finally:
                waiting.popleft()
        return True

    def poll(self) -> bool:
        """Test the request, unless another thread does; True once the message is complete.

        At intervals, also look for a message that has another dtype, and end with an error.
        """
        if self._test():
            return True
        if self._receives and (now := time.monotonic()) > self._next_check:
            self._next_check = now + _LOOK
            self._check_dtype()
        return self._finished

    def _test(self) -> bool:
        """Test the request, unless another thread does; True once the message is complete."""
        if self._finished or not self._lock.acquire(blocking=False):
            return self._finished
        try:
            if not self._finished and self._has_arrived() and self._may_land():
                self._complete()
        except Exception as error:
            self._end(self._explained(error))
        finally:
            self._lock.release()
        return self._finished

    def _has_arrived(self) -> bool:
        """Test the request until it is complete: after that its status would be empty."""
        if not self._arrived and self._has_begun():
            assert self._request is not None
            self._arrived = self._request.Test(self._status)
        return self._arrived

    def _may_land(self) -> bool:
        return self._land is None or self._is_due is None or self._is_due()

    def _complete(self) -> None:
        if self._receives:
            self._source = self._group.ranks[self._status.Get_source()]
            self._check_size()
            if self._land is not None:
                self._land()
        self._end(None)

    def _check_size(self) -> None:
        from mpi4py import MPI

        got = self._status.Get_count(MPI.BYTE)
        expected = self._nbytes
        if got != expected and not (got < 0 and expected > 2**31 - 1):
            raise MPIError(
                f"{self.description}: the message from rank {self._source} has "
                f"{format_count(got, 'byte')}, the array {expected}: sender and receiver must give "
                "arrays of one size"
            )

    def _end(self, error: BaseException | None) -> None:
        self._group.in_flight.discard(self)
        self._view = self._packed = self._land = self._fill = self._is_due = None
        if error is None and self.entry is not None:
            flight_record.complete_message(self.entry, self._group, self._source)
        self.finish(error)

    def _explained(self, error: Exception) -> Exception:
        from mpi4py import MPI

        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
            return MPIError(
                f"{self.description}: the message is longer than the array of "
                f"{format_count(self._nbytes, 'byte')}: sender and receiver must give arrays of "
                "one size",
                MPI.ERR_TRUNCATE,
            )
        from mpicoll.routes.wire import translate_error

        return translate_error(error, self.description, self._group)

    def _wait_finished(self, limit: float | None) -> bool:
        moment = deadline(limit)
        look = time.monotonic() + _LOOK
        spins = 0
        while not self._test():
            spins += 1
            if spins < _SPINS:
                continue
            now = time.monotonic()
            if now > moment:
                return False
            if now > look:
                self._check_peer()
                look = now + _LOOK
            # Large messages move only inside tests, so the pause stays short.
            os.sched_yield() if spins < 50 * _SPINS else time.sleep(_PAUSE)
        return True

    def _check_peer(self) -> None:
        """End the wait for a rank that has ended, or in a broken group, after one last test."""
        if self._group.error is not None and not self.poll():
            self._give_up(self._group.failure())
            return
        self._check_dtype()
        gone = rank_status.find_departed(self._group)
        everybody = len(gone) == self._group.size() - 1
        if (self._peer in gone or (self._peer < 0 and everybody)) and not self.poll():
            self._give_up(
                DistBackendError(
                    f"{self.description}: the other rank has ended, the message will not come "
                    "through"
                )
            )
        rank_status.receive(self._group)

    def _check_dtype(self) -> None:
        """End the wait for a message if one with the same tag is here that has another dtype."""
        view = self._view
        if not self._receives or self._tag is None or view is None:
            return
        from mpi4py import MPI

        status = MPI.Status()
        try:
            arrived = next(
                (
                    dtype
                    for dtype in DTYPES
                    if dtype is not view.dtype
                    and self._group.closed is None
                    and self._group.messages.Iprobe(
                        self._peer, _with_dtype(self._tag, dtype), status
                    )
                ),
                None,
            )
        except MPI.Exception as error:
            if not communicators.reports_lost_rank(error):  # lost_ranks.check handles losses
                raise
            return
        if arrived is not None:
            sender = self._group.ranks[status.Get_source()]
            self._give_up(
                MismatchError(
                    f"{self.description}: expected a message of {view.dtype} with tag "
                    f"{self._tag}, got one of {arrived} from rank {sender}: sender and receiver "
                    "must give arrays of one dtype"
                )
            )

    def _give_up(self, error: BaseException) -> None:
        """End with an error, unless the message is complete after all.

        MPI cannot cancel a send, so its buffer is kept alive.
        """
        with self._lock:
            if self._finished:
                return
            if self._request is None:
                self._group.held_back.remove(self)
            elif self._arrived:
                self._complete()
                return
            elif self._receives:
                self._request.Cancel()
                self._request.Wait(self._status)
                if not self._status.Is_cancelled():
                    self._complete()
                    return
            else:
                _unsent.append((self._request, self._packed))
            self._end(error)

    def abandon(self, error: BaseException) -> None:
        """End the message with an error; MPI may still read the buffer of a send."""
        self._error_seen = True
        self._give_up(error)

    def cancel(self) -> bool:
        """Cancel a receive without a message; return False for a send, which MPI cannot cancel."""
        if not self._receives:
            return False
        self._error_seen = True
        self._give_up(CollectiveTimeoutError(f"{self.description}: the group was destroyed"))
        return True

    def finish_now(self) -> None:
        """Wait for the message. After an exception, MPI no longer uses the caller's memory."""
        try:
            self.wait()
        except BaseException as error:
            self._error_seen = True
            if self._receives:
                self._give_up(error)
            elif not self._finished:
                in_background(self)
            raise

    def source_rank(self) -> int:
        """Return the global rank that the message came from, once it is here."""
        if not self._receives:
            return super().source_rank()
        return self._source


def check_tag(group: ProcessGroup, name: str, tag: SupportsIndex) -> int:
    """Return a tag as a number; raise where it is none that messages may have."""
    number = check_index(tag, f"{name}: tag")
    end = group.leave_tag // _TAGS
    if not 0 <= number < end:
        raise ArgumentError(f"{name}: tag: expected 0 to {end - 1}, got {number}")
    return number


def _with_dtype(tag: int, dtype: DType) -> int:
    """Return MPI's tag of messages of one dtype with a user's tag."""
    return tag * _TAGS + dtype.code


def begin_message(
    group: ProcessGroup, name: str, tensor: Any, peer: int, tag: int | None, receives: bool
) -> MessageWork:
    """Begin to send an array to a rank in the group, or to receive one.

    tag: as ``check_tag`` returns it; None for messages of objects, which have a tag of their own.
    """
    group.check_whole()
    view = adapters.build_view(tensor, receives, f"{name}: tensor")
    shown = group.object_tag if tag is None else tag
    entry = flight_record.enter_message(group, peer, shown, receives, view)
    work = _begin_view(group, name, view, peer, tag, receives)
    work.entry = entry
    return work


def _begin_view(
    group: ProcessGroup, name: str, view: View, peer: int, tag: int | None, receives: bool
) -> MessageWork:
    begin = group.messages.Irecv if receives else group.messages.Isend
    make = partial(MessageWork, group, name, view, tag=tag)
    sent = group.object_tag if tag is None else _with_dtype(tag, view.dtype)
    rest = receives, peer, lambda what: begin(what, peer, sent)
    if isinstance(view, DeviceView):
        assert view.device is not None
        staging = _staging(group, view.device)
        packed, order = staging.place(view), staging.stream_order(view)
        copy = partial(staging.move, view, packed, order, receives)
        fill, land = (None, copy) if receives else (copy, None)
        return make(packed, land, *rest, fill, order.is_due)
    if view.buffer is not None:
        return make(view, None, *rest)
    if not receives:
        return make(view.contiguous(), None, *rest)
    packed = view.empty_like()
    return make(packed, partial(view.copy_from, packed), *rest)


def _staging(group: ProcessGroup, device: int) -> HostStaging:
    """Return the group's staging buffers for messages from and to a device."""

    def create() -> HostStaging:
        from mpicoll.routes.device.staged import HostStaging

        return HostStaging(device)

    return group.resources.get_or_create(
        ("staging", device), create, close=lambda staging, _: staging.close()
    )


def in_background(work: MessageWork) -> MessageWork:
    """Hand a message to the poller, which progresses it and holds its arrays meanwhile."""
    if not work.poll():
        work._group.in_flight.add(work)
        look_after(work)
    return work


def look_after(item: Pollable) -> None:
    """Hand an item that needs calls of MPI to the poller."""
    global _poller
    if _poller is None:
        with _poller_lock:
            if _poller is None:
                launch.warn_if_serialized(default_group().rank())
                _poller = Poller()
    _poller.add(item)


def post(
    group: ProcessGroup, name: str, tensor: Any, peer: int | None, tag: int, receives: bool
) -> MessageWork:
    """Begin to send an array to a rank in the group, or to receive one.

    peer: as ``find_root`` or ``find_source`` returns it. None: receive from any rank.
    """
    tag = check_tag(group, name, tag)
    if peer is None:
        peer = find_source(name, group, None, None)
    return in_background(begin_message(group, name, tensor, peer, tag, receives))


def drain(group: ProcessGroup, limit: float) -> None:
    """End a group's pending messages: cancel receives, wait for sends.

    Raises CollectiveTimeoutError where a send is not received within ``limit`` seconds.
    """
    for work in list(group.in_flight):
        if not work.cancel() and not work._wait_finished(limit):
            raise CollectiveTimeoutError(
                f"{work.description}: timed out: the message was not received within {limit:g} s"
            )


def find_source(
    name: str, group: ProcessGroup | None, src: int | None, group_src: int | None
) -> int:
    """Return the rank in the group to receive from; MPI_ANY_SOURCE if none is given."""
    if src is None and group_src is None:
        from mpi4py import MPI

        return MPI.ANY_SOURCE
    return execute.find_root(name, group, "src", src, group_src)


def exchange_bytes(
    group: ProcessGroup, name: str, whole: Bytes | None, peer: int | None
) -> tuple[Bytes, int]:
    """Send ``whole`` to a rank in the group or, if it is None, receive from one (None: from any).

    Returns the bytes and the sender's global rank. Their number is sent first. Both messages use a
    separate tag.
    """
    if whole is not None:
        assert peer is not None
        for part in (np.array([whole.nbytes], np.int64), whole):
            begin_message(group, name, part, peer, None, False).finish_now()
        return whole, group.ranks[group.rank()]
    if peer is None:
        peer = find_source(name, group, None, None)
    size = np.zeros(1, np.int64)
    work = begin_message(group, name, size, peer, None, True)
    work.finish_now()
    source = work.source_rank()
    peer = group.group_rank(source)
    assert peer is not None
    whole = np.empty(int(size[0]), np.uint8)
    begin_message(group, name, whole, peer, None, True).finish_now()
    return whole, source
