"""Point-to-point messages: send, recv, isend, irecv, batch_isend_irecv.

tensor: array of any shape. The receiver passes a writable array of the same dtype and size.
src, dst: the other rank, as a global rank.
group_src, group_dst: the other rank, as a rank in the group. Use instead of ``src`` or ``dst``. A
    receive without either accepts a message from any rank.
group: the process group; None is the default group. On a rank outside the group, a call warns and
    returns None.
tag: 0 to 1022, more with most MPI libraries. Sender and receiver use the same tag.

Raises, before any data is sent: NotInitializedError (a ValueError) before init_process_group;
ArgumentTypeError (a TypeError) for an argument of the wrong type; ArgumentError (a ValueError) for
a tag out of range, a rank outside the group or a read-only output.

The call, or ``wait()`` of the Work, raises DistBackendError if the peer has exited,
CollectiveTimeoutError if it timed out, and MPIError for an error of MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpicoll.api.collectives import check_list
from mpicoll.arrays import adapters
from mpicoll.arrays.protocols import AnyArray
from mpicoll.core.groups import ProcessGroup, default_group, resolve
from mpicoll.core.work import Work
from mpicoll.dispatch import execute
from mpicoll.dispatch.point_to_point import begin_message, check_tag, find_source, in_background
from mpicoll.errors import ArgumentError, ArgumentTypeError

__all__ = [
    "P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "recv_async", "send",
]  # fmt: skip


def send(
    tensor: AnyArray,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send an array to another rank. Returns when the array may be changed again.

    Raises ArgumentError (a ValueError) if the receiver is this rank.
    """
    peer = execute.find_root("send", group, "dst", dst, group_dst, None)
    member = execute.resolve_or_warn(group, "send")
    if member is None:
        return
    if peer == member.rank():
        raise ArgumentError(f"send: dst: rank {peer} is this rank; use isend to send to itself")
    begin_message(member, "send", tensor, peer, tag, False).finish_now()


def recv(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive an array from another rank.

    Returns the global rank of the sender, or -1 on a rank outside the group.

    Raises MPIError if the message has another size, and MismatchError if it has another dtype.
    """
    member = execute.resolve_or_warn(group, "recv")
    if member is None:
        return -1
    peer = find_source("recv", member, src, group_src)
    work = begin_message(member, "recv", tensor, peer, tag, True)
    work.finish_now()
    return work.source_rank()


def isend(
    tensor: AnyArray,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start to send an array to a rank, which may be this rank.

    Returns a Work. The array must not change until it completes.
    """
    peer = execute.find_root("isend", group, "dst", dst, group_dst, None)
    member = execute.resolve_or_warn(group, "isend")
    if member is None:
        return None
    return in_background(begin_message(member, "isend", tensor, peer, tag, False))


def irecv(
    tensor: AnyArray,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start to receive an array from a rank.

    Returns a Work, whose ``source_rank()`` is the global rank of the sender. The array is filled
    when the Work completes. ``wait()`` also raises the errors of recv.
    """
    member = execute.resolve_or_warn(group, "irecv")
    if member is None:
        return None
    peer = find_source("irecv", member, src, group_src)
    return in_background(begin_message(member, "irecv", tensor, peer, tag, True))


recv_async = irecv


class P2POp:
    """One message of batch_isend_irecv.

    op: mpicoll.isend or mpicoll.irecv.
    tensor: the array to send, or a writable array to receive into.
    peer: the other rank, as a global rank.
    group_peer: the other rank, as a rank in the group. Use instead of ``peer``.

    Raises ArgumentError (a ValueError) for another op, a missing peer or one outside the group, a
    tag out of range, or a read-only array to receive into. Raises ArgumentTypeError (a TypeError)
    if the tensor is not an array.
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
        self.group_peer = execute.find_root("P2POp", self.group, "peer", peer, group_peer, None)
        member = resolve(self.group)
        if member is not None:
            check_tag(member, "P2POp", tag)
        self.peer = peer if member is None else member.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Start all messages of a list. Any order of sends and receives is free of deadlocks.

    p2p_op_list: P2POp objects, all of the same group. An array that is received must not share
        memory with another array of the list; this is not checked.

    Returns a list of Works, in the order of ``p2p_op_list``.

    Raises EmptyListError (a ValueError and an IndexError) for an empty list, ArgumentError (a
    ValueError) if the groups differ, and ArgumentTypeError (a TypeError) if it is not a list of
    P2POp.
    """
    where = "batch_isend_irecv"
    check_list(f"{where}: p2p_op_list", p2p_op_list, "P2POp")
    for i, one in enumerate(p2p_op_list):
        if not isinstance(one, P2POp):
            raise ArgumentTypeError(
                f"{where}: p2p_op_list[{i}]: expected a P2POp, got {type(one).__name__}"
            )
        if one.group is not p2p_op_list[0].group:
            raise ArgumentError(
                f"{where}: p2p_op_list[{i}]: expected the group of p2p_op_list[0], got another"
            )
    works = []
    for one in p2p_op_list:
        names = {"group_dst" if one.op is isend else "group_src": one.group_peer}
        work = one.op(one.tensor, group=one.group, tag=one.tag, **names)
        if work is not None:
            works.append(work)
    return works
