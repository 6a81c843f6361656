"""Messages from one rank to another: send, recv, isend, irecv, batch_isend_irecv."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from mpicoll import launch
from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import AnyArray
from mpicoll.arrays.views import DeviceView, View
from mpicoll.core.groups import ProcessGroup, default_group, resolve
from mpicoll.core.pickles import Bytes
from mpicoll.core.progress import Pollable, Poller
from mpicoll.core.work import Work, deadline
from mpicoll.dispatch import execute
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    DistBackendError,
    EmptyListError,
    MPIError,
)
from mpicoll.watch import rank_status

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "MessageWork",
    "P2POp",
    "batch_isend_irecv",
    "drain",
    "exchange_bytes",
    "in_background",
    "irecv",
    "isend",
    "look_after",
    "post",
    "recv",
    "recv_async",
    "send",
    "stop_polling",
]

_poller: Poller | None = None
_poller_lock = threading.Lock()
#: Messages to ranks that have ended, and what they hold: MPI may read it as long as it lives.
_unsent: list[tuple[MPI.Request, View | None]] = []
#: Tests without a pause before a waiting thread lets others have the core.
_SPINS = 200
_PAUSE = 100e-6
#: Seconds between looks at whether the other rank has ended.
_LOOK = 0.5


def stop_polling() -> None:
    """End the thread that polls pending messages, if there is one."""
    global _poller
    with _poller_lock:
        if _poller is not None:
            _poller.stop()
            _poller = None


class MessageWork(Work):
    """A message on its way.

    It ends when a test of its request, by a waiting thread or by the poller, finds it complete.

    view: the array. packed: the buffer that MPI reads or writes. land: copies what was received
    into the array; None if it is there already.
    """

    __slots__ = (
        "_group",
        "_land",
        "_lock",
        "_nbytes",
        "_packed",
        "_peer",
        "_receives",
        "_request",
        "_source",
        "_status",
        "_view",
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
    ) -> None:
        from mpi4py import MPI

        from mpicoll.routes.wire import message

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
        self._lock = threading.Lock()
        self._source = -1
        self._status = MPI.Status()
        try:
            self._request = post(message(packed.buffer, packed.count, packed.dtype))
        except MPI.Exception as error:
            raise self._explained(error) from error

    def poll(self) -> bool:
        """Test the request, unless another thread does; True once the message is complete."""
        if self._finished or not self._lock.acquire(blocking=False):
            return self._finished
        try:
            if not self._finished and self._request.Test(self._status):
                self._complete()
        except Exception as error:
            self._end(self._explained(error))
        finally:
            self._lock.release()
        return self._finished

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
                f"{self.description}: the message from rank {self._source} has {got} bytes, the "
                f"array {expected}: sender and receiver must give arrays of one size"
            )

    def _end(self, error: BaseException | None) -> None:
        self._group.in_flight.discard(self)
        self._view = self._packed = self._land = None
        self.finish(error)

    def _explained(self, error: Exception) -> Exception:
        from mpi4py import MPI

        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
            return MPIError(
                f"{self.description}: the message is longer than the array of {self._nbytes} "
                "bytes: sender and receiver must give arrays of one size",
                MPI.ERR_TRUNCATE,
            )
        from mpicoll.routes.wire import translate_error

        return translate_error(error, self.description, self._group)

    def _wait_finished(self, limit: float | None) -> bool:
        moment = deadline(limit)
        look = time.monotonic() + _LOOK
        spins = 0
        while not self.poll():
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
        """End the wait for a rank that has ended, after one last test."""
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

    def _give_up(self, error: BaseException) -> None:
        """End with an error, unless the message is complete after all.

        MPI can cancel a receive, but not a send: what it may still read stays.
        """
        with self._lock:
            if self._finished:
                return
            if self._receives:
                self._request.Cancel()
                self._request.Wait(self._status)
                if not self._status.Is_cancelled():
                    self._complete()
                    return
            else:
                _unsent.append((self._request, self._packed))
            self._end(error)

    def abandon(self, error: BaseException) -> None:
        """End the message with an error; MPI may still read what it sends."""
        self._error_seen = True
        self._give_up(error)

    def cancel(self) -> bool:
        """Cancel a receive that no message has come for; False for a send, which cannot be."""
        if not self._receives:
            return False
        self._error_seen = True
        self._give_up(CollectiveTimeoutError(f"{self.description}: the group was destroyed"))
        return True

    def finish_now(self) -> None:
        """Wait for a message for the last time; whatever ends the wait, MPI does not go on using
        memory that the caller may free.
        """
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


def _check_tag(group: ProcessGroup, name: str, tag: SupportsIndex) -> int:
    try:
        number = operator.index(tag)
    except TypeError:
        raise ArgumentTypeError(f"{name}: tag: expected an int, got {type(tag).__name__}") from None
    if not 0 <= number < group.leave_tag:
        raise ArgumentError(f"{name}: tag: expected 0 to {group.leave_tag - 1}, got {number}")
    return number


def _message(
    group: ProcessGroup, name: str, tensor: AnyArray, peer: int, tag: int, receives: bool
) -> MessageWork:
    group.check_open()
    view = adapters.build_view(tensor, receives, f"{name}: tensor")
    packed, land = _packed(group, view, receives)
    begin = group.messages.Irecv if receives else group.messages.Isend
    return MessageWork(
        group, name, view, packed, land, receives, peer, lambda what: begin(what, peer, tag)
    )


def _packed(
    group: ProcessGroup, view: View, receives: bool
) -> tuple[View, Callable[[], None] | None]:
    """Return the buffer for MPI, and what copies it to the array after a receive."""
    if isinstance(view, DeviceView):
        assert view.device is not None
        staging = group.resources.find(("staging", view.device))
        if staging is None:
            from mpicoll.routes.device.staged import HostStaging

            staging = HostStaging(view.device)
            group.resources.keep(("staging", view.device), staging, lambda _: staging.close())
        if not receives:
            return staging.to_host(view), None
        packed: View = staging.place(view)
        return packed, partial(staging.to_device, view, packed, staging.stream_order(view))
    if view.buffer is not None:
        return view, None
    if not receives:
        return view.contiguous(), None
    packed = view.empty_like()
    return packed, partial(view.copy_from, packed)


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
    group: ProcessGroup, name: str, tensor: AnyArray, peer: int | None, tag: int, receives: bool
) -> MessageWork:
    """Begin to send an array to a rank in the group, or to receive one; None: from any rank."""
    tag = _check_tag(group, name, tag)
    if peer is None:
        peer = _source(name, group, None, None)
    return in_background(_message(group, name, tensor, peer, tag, receives))


def drain(group: ProcessGroup, limit: float) -> None:
    """End a group's pending messages: cancel receives, wait for sends.

    Raises CollectiveTimeoutError where a send is not received within ``limit`` seconds.
    """
    for work in list(group.in_flight):
        if not work.cancel() and not work._wait_finished(limit):
            raise CollectiveTimeoutError(
                f"{work.description}: nobody received the message within {limit:g} s"
            )


def _source(name: str, group: ProcessGroup | None, src: int | None, group_src: int | None) -> int:
    """Return the rank in the group to receive from; MPI_ANY_SOURCE if none is given."""
    if src is None and group_src is None:
        from mpi4py import MPI

        return MPI.ANY_SOURCE
    return execute.find_root(name, group, "src", src, group_src)


def exchange_bytes(
    group: ProcessGroup, name: str, whole: Bytes | None, peer: int | None
) -> tuple[Bytes, int]:
    """Send ``whole`` to a rank in the group, or with None receive from one (None: from any).

    Returns the bytes and the sender's global rank. They have a tag of their own, and their
    number goes first.
    """
    if whole is not None:
        assert peer is not None
        for part in (np.array([whole.nbytes], np.int64), whole):
            _message(group, name, part, peer, group.object_tag, False).finish_now()
        return whole, group.ranks[group.rank()]
    if peer is None:
        peer = _source(name, group, None, None)
    size = np.zeros(1, np.int64)
    work = _message(group, name, size, peer, group.object_tag, True)
    work.finish_now()
    source = work.source_rank()
    peer = group.group_rank(source)
    assert peer is not None
    whole = np.empty(int(size[0]), np.uint8)
    _message(group, name, whole, peer, group.object_tag, True).finish_now()
    return whole, source


def send(
    tensor: AnyArray,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send an array to another rank; return when it may be changed again.

    tensor: an array of any shape; the receiver gives one of as many bytes.
    dst: the receiver as a global rank.
    group: the process group, None for the default group.
    tag: 0 to MPI's greatest tag less two; the receiver names the same.
    group_dst: the receiver as a rank in the group; one of dst and group_dst is given.

    Raises ArgumentTypeError (a TypeError) for anything but an array, ArgumentError (a ValueError)
    for a tag out of range, and for a receiver that is this rank or not in the group, MPIError for
    errors of MPI, DistBackendError where the receiver has ended, and CollectiveTimeoutError where
    nobody receives within the group's timeout.
    """
    peer = execute.find_root("send", group, "dst", dst, group_dst)
    member = resolve(group)
    if member is None:
        execute.warn_outside("send")
        return
    if peer == member.rank():
        raise ArgumentError(f"send: dst: rank {peer} is this rank; isend may send to itself")
    _message(member, "send", tensor, peer, _check_tag(member, "send", tag), False).finish_now()


def recv(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive an array from another rank; return when it is here.

    tensor: a writable array of as many bytes as the message.
    src: the sender as a global rank.
    group: the process group, None for the default group.
    tag: the sender's, 0 to MPI's greatest tag less two.
    group_src: the sender as a rank in the group; any rank where neither src nor group_src is given.

    Returns the sender's global rank, and -1 on a rank outside the group.

    Raises ArgumentTypeError (a TypeError) for anything but an array, ArgumentError (a ValueError)
    for a read-only array, a tag out of range or a sender that is not in the group, MPIError where
    the message has another size, DistBackendError where the sender has ended, and
    CollectiveTimeoutError where nothing comes within the group's timeout.
    """
    member = resolve(group)
    if member is None:
        execute.warn_outside("recv")
        return -1
    peer = _source("recv", member, src, group_src)
    work = _message(member, "recv", tensor, peer, _check_tag(member, "recv", tag), True)
    work.finish_now()
    return work.source_rank()


def isend(
    tensor: AnyArray,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Begin to send an array to a rank, which may be this one.

    tensor: an array of any shape, which must not change until the Work is done.
    dst: the receiver as a global rank.
    group: the process group, None for the default group.
    tag: 0 to MPI's greatest tag less two; the receiver names the same.
    group_dst: the receiver as a rank in the group; one of dst and group_dst is given.

    Returns a Work, None on a rank outside the group.

    Raises ArgumentTypeError (a TypeError) for anything but an array and ArgumentError (a
    ValueError) for a tag out of range or a receiver that is not in the group; the Work's ``wait()``
    raises what send raises later.
    """
    peer = execute.find_root("isend", group, "dst", dst, group_dst)
    member = resolve(group)
    if member is None:
        execute.warn_outside("isend")
        return None
    return post(member, "isend", tensor, peer, tag, False)


def irecv(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Begin to receive an array from a rank.

    tensor: a writable array of as many bytes as the message, filled when the Work is done.
    src: the sender as a global rank.
    group: the process group, None for the default group.
    tag: the sender's, 0 to MPI's greatest tag less two.
    group_src: the sender as a rank in the group; any rank where neither src nor group_src is given.

    Returns a Work, whose ``source_rank()`` returns the sender; None on a rank outside the group.

    Raises ArgumentTypeError (a TypeError) for anything but an array and ArgumentError (a
    ValueError) for a read-only array, a tag out of range or a sender that is not in the group; the
    Work's ``wait()`` raises what recv raises later.
    """
    member = resolve(group)
    if member is None:
        execute.warn_outside("irecv")
        return None
    peer = _source("irecv", member, src, group_src)
    return post(member, "irecv", tensor, peer, tag, True)


recv_async = irecv


class P2POp:
    """One message of batch_isend_irecv.

    op: mpicoll.isend or mpicoll.irecv.
    tensor: the array to send, or a writable one to receive into.
    peer: the other rank as a global rank.
    group: the process group, None for the default group.
    tag: 0 to MPI's greatest tag less two, the same on both ranks.
    group_peer: the other rank as a rank in the group; one of peer and group_peer is given.

    Raises ArgumentError (a ValueError) for another op, a peer that is missing or not in the group,
    a tag out of range and a read-only array to receive into, and ArgumentTypeError (a TypeError)
    for anything but an array.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: AnyArray,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ArgumentError(f"P2POp: op: expected mpicoll.isend or mpicoll.irecv, got {op!r}")
        adapters.build_view(tensor, op is irecv, "P2POp: tensor")
        self.op = op
        self.tensor: Any = tensor
        self.group = default_group() if group is None else group
        self.tag = tag
        self.group_peer = execute.find_root("P2POp", self.group, "peer", peer, group_peer)
        member = resolve(self.group)
        if member is not None:
            _check_tag(member, "P2POp", tag)
        self.peer = peer if member is None else member.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin all messages of a list, in any order.

    p2p_op_list: one P2POp for each message, all of one group. No order of sends and receives
        deadlocks, for nothing waits until all are begun.

    Returns their Works, in the order of the list.

    Raises EmptyListError (a ValueError and an IndexError) for an empty list, ArgumentError (a
    ValueError) where the groups differ and ArgumentTypeError (a TypeError) for what is no list of
    P2POp.
    """
    where = "batch_isend_irecv"
    if not isinstance(p2p_op_list, (list, tuple)):
        raise ArgumentTypeError(
            f"{where}: p2p_op_list: expected a list of P2POp, got {type(p2p_op_list).__name__}"
        )
    if not p2p_op_list:
        raise EmptyListError(f"{where}: p2p_op_list: expected at least one P2POp")
    for i, one in enumerate(p2p_op_list):
        if not isinstance(one, P2POp):
            raise ArgumentTypeError(
                f"{where}: p2p_op_list[{i}]: expected a P2POp, got {type(one).__name__}"
            )
        if one.group is not p2p_op_list[0].group:
            raise ArgumentError(f"{where}: p2p_op_list[{i}] has another group than [0]")
    works = []
    for one in p2p_op_list:
        names = {"group_dst" if one.op is isend else "group_src": one.group_peer}
        work = one.op(one.tensor, group=one.group, tag=one.tag, **names)
        if work is not None:
            works.append(work)
    return works
