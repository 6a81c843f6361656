"""Messages from one rank to another: send, recv, isend, irecv, batch_isend_irecv."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import AnyArray
from mpicoll.core.groups import ProcessGroup, default_group, resolve
from mpicoll.core.work import Work
from mpicoll.dispatch import execute
from mpicoll.dispatch.point_to_point import begin_message, check_tag, find_source, post
from mpicoll.errors import ArgumentError, ArgumentTypeError, EmptyListError

__all__ = [
    "P2POp",
    "batch_isend_irecv",
    "irecv",
    "isend",
    "recv",
    "recv_async",
    "send",
]


def send(
    tensor: AnyArray,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send an array to another rank; return when it may be changed again.

    tensor: an array of any shape; the receiver gives one of the same dtype and number of elements.
    dst: the receiver as a global rank.
    group: the process group, None for the default group.
    tag: 0 to 1022, with most MPI libraries many more; the receiver gives the same.
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
    begin_message(member, "send", tensor, peer, check_tag(member, "send", tag), False).finish_now()


def recv(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive an array from another rank; return when it is here.

    tensor: a writable array of the dtype and number of elements of the message.
    src: the sender as a global rank.
    group: the process group, None for the default group.
    tag: the sender's.
    group_src: the sender as a rank in the group; any rank where neither src nor group_src is given.

    Returns the sender's global rank, and -1 on a rank outside the group.

    Raises ArgumentTypeError (a TypeError) for anything but an array, ArgumentError (a ValueError)
    for a read-only array, a tag out of range or a sender that is not in the group, MPIError where
    the message has another size, MismatchError where the message that comes instead has another
    dtype, DistBackendError where the sender has ended, and CollectiveTimeoutError where nothing
    comes within the group's timeout.
    """
    member = resolve(group)
    if member is None:
        execute.warn_outside("recv")
        return -1
    peer = find_source("recv", member, src, group_src)
    work = begin_message(member, "recv", tensor, peer, check_tag(member, "recv", tag), True)
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
    tag: 0 to 1022, with most MPI libraries many more; the receiver gives the same.
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

    tensor: a writable array of the dtype and number of elements of the message, filled when the
        Work is done.
    src: the sender as a global rank.
    group: the process group, None for the default group.
    tag: the sender's.
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
    peer = find_source("irecv", member, src, group_src)
    return post(member, "irecv", tensor, peer, tag, True)


recv_async = irecv


class P2POp:
    """One message of batch_isend_irecv.

    op: mpicoll.isend or mpicoll.irecv.
    tensor: the array to send, or a writable one to receive into.
    peer: the other rank as a global rank.
    group: the process group, None for the default group.
    tag: 0 to 1022, with most MPI libraries many more; the same on both ranks.
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
            check_tag(member, "P2POp", tag)
        self.peer = peer if member is None else member.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Begin all messages of a list, in any order.

    p2p_op_list: one P2POp for each message, all of one group. No order of sends and receives
        deadlocks, for nothing waits until all are begun. An array that is received must not share
        memory with another array of the list; this is not checked.

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
