"""Pending point-to-point messages: the Work of a message, and its completion."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from mpicoll import communicators
from mpicoll.arrays import adapters
from mpicoll.arrays.views import Bytes, DeviceView, View
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.indices import check_index
from mpicoll.core.progress import poller
from mpicoll.core.work import Work, deadline
from mpicoll.dispatch import execute
from mpicoll.dtypes import DTYPES, DType
from mpicoll.errors import (
    ArgumentError,
    DistBackendError,
    MismatchError,
    MPIError,
)
from mpicoll.failures import rank_status
from mpicoll.launch.world import warn_if_serialized
from mpicoll.output import format_count

if TYPE_CHECKING:
    from mpi4py import MPI

#: Messages to ranks that have exited, with their buffers, which MPI may still read.
_unsent: list[tuple[MPI.Request, View]] = []
#: Time that a rank that has ended has to print its own error before this rank may end the job.
_ENDING_GRACE_S = 0.5
#: Number of tests before a waiting thread sleeps between tests.
_SPINS = 200
_PAUSE = 100e-6
#: Seconds between checks whether the other rank has exited or has sent another dtype.
_LOOK = 0.5
#: Number of MPI tags per user tag: one for each dtype, so that a receive matches only messages of
#: its dtype. MPI has at least 32767 tags.
_TAGS = 32
assert len(DTYPES) <= _TAGS


class Message(NamedTuple):
    """The array of a message, and the memory that MPI reads or writes."""

    view: View
    packed: View
    #: Copies the array to this memory before a send, or back after a receive, if needed.
    copy: Callable[[], None] = lambda: None
    #: Returns whether the array may be read or written now.
    is_due: Callable[[], bool] = lambda: True


class MessageWork(Work):
    """A pending message.

    It ends when a test of its request, by a waiting thread or by the poller, finds it complete. A
    send that is not due is started later, and delays later sends of its group.

    tag: the user's tag; None for a message of the library, which has a separate tag.
    """

    __slots__ = (
        "_arrived", "_group", "_lock", "_message", "_nbytes", "_next_check", "_peer", "_post",
        "_receives", "_request", "_source", "_status", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        message: Message,
        receives: bool,
        peer: int,
        post: Callable[[list[Any]], MPI.Request],
        tag: int | None = None,
    ) -> None:
        from mpi4py import MPI

        outputs = (message.view.owner,) if receives else ()
        super().__init__(execute.describe(name, group), outputs, group.timeout)
        self._group = group
        self._message: Message | None = message
        self._nbytes = message.view.nbytes
        self._receives = receives
        self._peer = peer
        self._tag = tag
        self._lock = threading.Lock()
        self._next_check = time.monotonic() + _LOOK
        self._source = -1
        self._status = MPI.Status()
        self._post = post
        self._request: MPI.Request | None = None
        self._arrived = False
        if not receives and (group.held_back or not message.is_due()):
            group.held_back.append(self)
            return
        try:
            self._begin(message)
        except MPI.Exception as error:
            raise self._explain(error) from error

    def _begin(self, message: Message) -> None:
        from mpicoll.routes import wire

        if not self._receives:
            message.copy()
        packed = message.packed
        self._request = self._post(wire.message(packed.buffer, packed.count, packed.dtype))

    def poll(self) -> bool:
        """Test the request, unless another thread does; True once the message is complete.

        At intervals, also look for a message that has another dtype, and end with an error.
        """
        if not self._test() and self._receives and (now := time.monotonic()) > self._next_check:
            self._next_check = now + _LOOK
            self._check_dtype()
        return self._finished

    def _test(self) -> bool:
        """Start a held send if it is due, test the request, and end a complete message."""
        if self._finished or not self._lock.acquire(blocking=False):
            return self._finished
        try:
            message, waiting = self._message, self._group.held_back
            if message is None:
                return True
            if self._request is None and waiting[0] is self and message.is_due():
                try:
                    self._begin(message)
                finally:
                    waiting.popleft()
            if self._request is not None and not self._arrived:  # later its status is empty
                self._arrived = self._request.Test(self._status)
            if self._arrived and (not self._receives or message.is_due()):
                self._complete(message)
        except Exception as error:
            self._end(self._explain(error))
        finally:
            self._lock.release()
        return self._finished

    def _complete(self, message: Message) -> None:
        from mpi4py import MPI

        if self._receives:
            self._source = self._group.ranks[self._status.Get_source()]
            got, expected = self._status.Get_count(MPI.BYTE), self._nbytes
            if got != expected and not (got < 0 and expected > 2**31 - 1):
                raise MPIError(
                    f"{self.description}: the message from rank {self._source} has "
                    f"{format_count(got, 'byte')}, the array {expected}: sender and receiver must "
                    "give arrays of the same size"
                )
            message.copy()
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._group.in_flight.discard(self)
        self._message = None
        self.finish(error)

    def _explain(self, error: Exception) -> Exception:
        from mpi4py import MPI

        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
            return MPIError(
                f"{self.description}: the message is longer than the array of "
                f"{format_count(self._nbytes, 'byte')}: sender and receiver must give arrays of "
                "the same size",
                MPI.ERR_TRUNCATE,
            )
        return execute.to_mpi_error(error, self.description, self._group)

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
        """Complete this message with an error if its peer has departed, its group has failed or its
        dtype differs, unless a last test completes it. Also receive status messages.
        """
        if self._group.error is not None and not self.poll():
            self._give_up(self._group.failure())
            return
        self._check_dtype()
        gone = rank_status.find_departed(self._group)
        everybody = len(gone) == self._group.size() - 1
        if (self._peer in gone or (self._peer < 0 and everybody)) and not self.poll():
            time.sleep(_ENDING_GRACE_S)
            self._give_up(
                DistBackendError(
                    f"{self.description}: the other rank has ended, the message will not come "
                    "through"
                )
            )
        rank_status.receive(self._group)

    def _check_dtype(self) -> None:
        """Fail a receive with MismatchError if a message of its tag but another dtype is here."""
        message = self._message
        if not self._receives or self._tag is None or message is None:
            return
        from mpi4py import MPI

        group, status = self._group, MPI.Status()
        try:
            for dtype in DTYPES:
                if (
                    dtype is not message.view.dtype
                    and group.closed is None
                    and group.messages.Iprobe(self._peer, _with_dtype(self._tag, dtype), status)
                ):
                    break
            else:
                return
        except MPI.Exception as error:
            if not communicators.reports_lost_rank(error):  # lost_ranks.check handles losses
                raise
            return
        self._give_up(
            MismatchError(
                f"{self.description}: expected a message of {message.view.dtype} with tag "
                f"{self._tag}, got one of {dtype} from rank {group.ranks[status.Get_source()]}: "
                "sender and receiver must give arrays of the same dtype"
            )
        )

    def _give_up(self, error: BaseException) -> None:
        """End with an error, unless the message is complete after all.

        MPI cannot cancel a send, so its buffer is kept alive.
        """
        with self._lock:
            message = self._message
            if message is None:
                return
            if self._request is None:
                self._group.held_back.remove(self)
            elif self._receives and not self._arrived:
                self._request.Cancel()
                self._request.Wait(self._status)
                self._arrived = not self._status.Is_cancelled()
            elif not self._arrived:
                _unsent.append((self._request, message.packed))
            if self._arrived:
                self._complete(message)
            else:
                self._end(error)

    def abandon(self, error: BaseException) -> None:
        """End the message with an error; MPI may still read the buffer of a send."""
        self._error_seen = True
        self._give_up(error)

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
        """Return the global rank of the sender; -1 before the message has arrived."""
        if not self._receives:
            return super().source_rank()
        return self._source


def check_tag(group: ProcessGroup, name: str, tag: SupportsIndex) -> int:
    """Convert a tag to an int. Raises ArgumentError if it is out of range."""
    number = check_index(tag, f"{name}: tag")
    end = group.status_tag // _TAGS
    if not 0 <= number < end:
        raise ArgumentError(f"{name}: tag: expected 0 to {end - 1}, got {number}")
    return number


def _with_dtype(tag: int, dtype: DType) -> int:
    """Return the MPI tag for messages with a user's tag and a dtype."""
    return tag * _TAGS + dtype.code


#: Tag of messages of objects, which MPI sends with a separate one.
_OBJECTS: Any = object()


def begin_message(
    group: ProcessGroup,
    name: str,
    tensor: Any,
    peer: int | None,
    tag: SupportsIndex,
    receives: bool,
) -> MessageWork:
    """Begin to send an array to a rank in the group, or to receive one (peer None: from any rank).

    tag: the user's, or _OBJECTS.
    """
    from mpi4py import MPI

    number = None if tag is _OBJECTS else check_tag(group, name, tag)
    group.check_whole()
    view = adapters.build_view(tensor, receives, f"{name}: tensor")
    peer = MPI.ANY_SOURCE if peer is None else peer
    sent = group.status_tag + 1 if number is None else _with_dtype(number, view.dtype)
    begin = group.messages.Irecv if receives else group.messages.Isend
    return MessageWork(
        group, name, _build_message(group, view, receives), receives, peer,
        lambda buffer: begin(buffer, peer, sent), number,
    )  # fmt: skip


def _build_message(group: ProcessGroup, view: View, receives: bool) -> Message:
    if isinstance(view, DeviceView):
        from mpicoll.arrays.host_staging import HostStaging

        device = view.device
        staging = group.resources.get_or_create(
            ("staging", device), lambda: HostStaging(device), lambda made, _: made.close()
        )
        packed, order = staging.place(view), staging.stream_order(view)
        copy = partial(staging.move, view, packed, order, receives)
        return Message(view, packed, copy, order.is_due)
    if view.buffer is not None:
        return Message(view, view)
    if not receives:
        return Message(view, view.contiguous())
    packed = view.empty_like()
    return Message(view, packed, partial(view.copy_from, packed))


def in_background(work: MessageWork) -> MessageWork:
    """Hand a message to the poller, which progresses it and holds its arrays meanwhile."""
    if not work.poll():
        work._group.in_flight.add(work)
        keep_polling(work._group, work.poll)
    return work


def keep_polling(group: ProcessGroup, poll: Callable[[], bool]) -> None:
    """Call a function, which calls MPI, on the poller's thread until it returns True."""
    warn_if_serialized(group.ranks[group.rank()])
    poller.add(poll)


def find_source(
    name: str, group: ProcessGroup | None, src: int | None, group_src: int | None
) -> int | None:
    """Return the rank in the group to receive from; None, for any rank, if none is given."""
    if src is None and group_src is None:
        return None
    return execute.find_root(name, group, "src", src, group_src, None)


def exchange_bytes(
    group: ProcessGroup, name: str, whole: Bytes | None, peer: int | None
) -> tuple[Bytes, int]:
    """Send ``whole`` to a rank in the group or, if it is None, receive from one (None: from any).

    Returns the bytes and the sender's global rank. Sends the number of bytes first. Both messages
    use a separate tag.
    """
    if whole is not None:
        for part in (np.array([whole.nbytes], np.int64), whole):
            begin_message(group, name, part, peer, _OBJECTS, False).finish_now()
        return whole, group.ranks[group.rank()]
    size = np.zeros(1, np.int64)
    work = begin_message(group, name, size, peer, _OBJECTS, True)
    work.finish_now()
    source = work.source_rank()
    whole = np.empty(int(size[0]), np.uint8)
    begin_message(group, name, whole, group.group_rank(source), _OBJECTS, True).finish_now()
    return whole, source
