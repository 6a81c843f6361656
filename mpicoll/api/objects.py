"""Collectives and messages of Python objects.

Objects travel as pickles. Unpickling can run any code: receive only from ranks that you trust, or
name what may arrive with ``restricted_pickle``. NumPy arrays inside objects travel as buffers of
their own, without a copy into the pickle; sizes are not padded and not limited to 2 GiB. Every
function raises NotInitializedError (a ValueError) before init_process_group; a rank outside the
group is warned and does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.core.groups import ProcessGroup, resolve
from mpicoll.core.pickles import Bytes, decode, encode
from mpicoll.dispatch import execute
from mpicoll.dispatch.point_to_point import exchange_bytes
from mpicoll.errors import ArgumentError, ArgumentTypeError, MismatchError, UnsupportedError
from mpicoll.output import format_count

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


def _check_list(name: str, argument: str, value: object, length: int | None = None) -> list[Any]:
    """Return a list argument; raise unless it is a list of at least ``length`` entries."""
    if not isinstance(value, list):
        raise ArgumentTypeError(f"{name}: {argument}: expected a list, got {type(value).__name__}")
    if length is not None and len(value) < length:
        raise ArgumentError(
            f"{name}: {argument}: expected {format_count(length, 'object')}, one a rank, got "
            f"{len(value)}"
        )
    return value


def _check_device(name: str, device: object) -> None:
    kind = getattr(device, "type", device)
    if kind is not None and str(kind).partition(":")[0] != "cpu":
        raise UnsupportedError(f"{name}: device: objects travel in host memory, got {device!r}")


def _empty(size: int) -> Bytes:
    return np.empty(size, np.uint8)


def all_gather_object(
    object_list: list[Any], obj: object, group: ProcessGroup | None = None
) -> None:
    """Gather the objects of all ranks in a list, on every rank.

    object_list: a list with one entry for each rank, which are replaced, in rank order.
    obj: this rank's object, anything that can be pickled.
    group: the process group, None for the default group.

    Raises ArgumentTypeError (a TypeError) if it is no list and ArgumentError (a ValueError) for
    one that is too short, what pickle raises for an object that cannot be pickled, and
    RefusedPickleError for what restricted_pickle does not allow.
    """
    name = "all_gather_object"
    member = resolve(group)
    if member is None:
        execute.warn_outside(name)
        return
    found = _check_list(name, "object_list", object_list, member.size())
    own = encode(obj)
    wholes = execute.run_in_order(member, name, lambda: _all_gather(member, own), root=-1)
    found[: len(wholes)] = [decode(whole) for whole in wholes]


def _all_gather(group: ProcessGroup, own: Bytes) -> list[Bytes]:
    from mpicoll.routes.wire import all_gather_bytes

    return all_gather_bytes(group.tested, own)


def gather_object(
    obj: object,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Gather the objects of all ranks in a list on the root.

    obj: this rank's object, anything that can be pickled.
    object_gather_list: on the root a list with one entry for each rank, which are replaced, in rank
        order; elsewhere None.
    dst: the root as a global rank; rank 0 of all where neither dst nor group_dst is given.
    group: the process group, None for the default group.
    group_dst: the root as a rank in the group.

    Raises ArgumentTypeError (a TypeError) if it is no list and ArgumentError (a ValueError) for
    one that is too short, missing on the root or given elsewhere, and for a root that is not in the
    group, what pickle raises for an object that cannot be pickled, and RefusedPickleError for what
    restricted_pickle does not allow.
    """
    name = "gather_object"
    root = execute.find_root(name, group, "dst", dst, group_dst, default=0)
    member = resolve(group)
    if member is None:
        execute.warn_outside(name)
        return
    if (member.rank() == root) != (object_gather_list is not None):
        raise ArgumentError(
            f"{name}: object_gather_list: must be given on the rank that receives, {root}, and "
            "only there"
        )
    found = object_gather_list
    if found is not None:
        _check_list(name, "object_gather_list", found, member.size())
    own = encode(obj)

    def move() -> list[Bytes]:
        from mpicoll.routes.wire import gather_bytes

        return gather_bytes(member.tested, own, root)

    wholes = execute.run_in_order(member, name, move, root=root)
    if found is not None:
        found[: len(wholes)] = [decode(whole) for whole in wholes]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_src: int | None = None,
) -> None:
    """Copy the root's list of objects into the lists of all ranks.

    object_list: a list, as long on all ranks as on the root, whose entries are replaced but on the
        root.
    src: the root as a global rank; rank 0 of all where neither src nor group_src is given.
    group: the process group, None for the default group.
    device: None or the host, where objects travel.
    group_src: the root as a rank in the group.

    Raises ArgumentTypeError (a TypeError) if it is no list, ArgumentError (a ValueError) for a
    root that is not in the group, UnsupportedError (a ValueError) for another device, MismatchError
    for a list of another length, what pickle raises for an object that cannot be pickled, and
    RefusedPickleError for what restricted_pickle does not allow.
    """
    name = "broadcast_object_list"
    root = execute.find_root(name, group, "src", src, group_src, default=0)
    member = resolve(group)
    if member is None:
        execute.warn_outside(name)
        return
    _check_list(name, "object_list", object_list)
    _check_device(name, device)
    own = encode(object_list) if member.rank() == root else _empty(0)

    def move() -> Bytes:
        from mpicoll.routes.wire import broadcast_bytes

        return broadcast_bytes(member.tested, own, root)

    whole = execute.run_in_order(member, name, move, root=root)
    if member.rank() != root:
        _replace_entries(name, object_list, decode(whole), root)


def _replace_entries(name: str, mine: list[Any], theirs: list[Any], source: int) -> None:
    if len(mine) != len(theirs):
        raise MismatchError(
            f"{name}: object_list has {format_count(len(mine), 'object')}, rank {source} sent "
            f"{len(theirs)}"
        )
    mine[:] = theirs


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Send each rank its object of the root's list.

    scatter_object_output_list: a list with at least one entry; the first is replaced.
    scatter_object_input_list: on the root one object for each rank, in rank order; ignored
        elsewhere.
    src: the root as a global rank; rank 0 of all where neither src nor group_src is given.
    group: the process group, None for the default group.
    group_src: the root as a rank in the group.

    Raises ArgumentTypeError (a TypeError) if it is no list and ArgumentError (a ValueError) for
    one of another length and for a root that is not in the group, what pickle raises for an object
    that cannot be pickled, and RefusedPickleError for what restricted_pickle does not allow.
    """
    name = "scatter_object_list"
    root = execute.find_root(name, group, "src", src, group_src, default=0)
    member = resolve(group)
    if member is None:
        execute.warn_outside(name)
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"{name}: scatter_object_output_list: expected a list of at least one entry"
        )
    wholes: Sequence[Bytes] | None = None
    if member.rank() == root:
        if scatter_object_input_list is None:
            raise ArgumentError(
                f"{name}: scatter_object_input_list: must be given on the rank that sends, {root}"
            )
        given = _check_list(
            name, "scatter_object_input_list", scatter_object_input_list, member.size()
        )
        if len(given) != member.size():
            raise ArgumentError(
                f"{name}: scatter_object_input_list: expected "
                f"{format_count(member.size(), 'object')}, one a rank, got {len(given)}"
            )
        wholes = [encode(obj) for obj in given]

    def move() -> Bytes:
        from mpicoll.routes.wire import scatter_bytes

        return scatter_bytes(member.tested, wholes, root)

    whole = execute.run_in_order(member, name, move, root=root)
    scatter_object_output_list[0] = decode(whole)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send a list of objects to another rank; return when it is on its way.

    object_list: anything that can be pickled; the receiver gives a list as long.
    dst: the receiver as a global rank.
    group: the process group, None for the default group.
    device: None or the host, where objects travel.
    group_dst: the receiver as a rank in the group; one of dst and group_dst is given.
    use_batch: has no effect; messages never wait for their order.

    Raises ArgumentTypeError (a TypeError) if it is no list, ArgumentError (a ValueError) for a
    receiver that is this rank or not in the group, UnsupportedError (a ValueError) for another
    device, CollectiveTimeoutError where nobody receives, and what pickle raises for an object that
    cannot be pickled.
    """
    name = "send_object_list"
    peer = execute.find_root(name, group, "dst", dst, group_dst)
    member = resolve(group)
    if member is None:
        execute.warn_outside(name)
        return
    _check_list(name, "object_list", object_list)
    _check_device(name, device)
    if peer == member.rank():
        raise ArgumentError(f"{name}: dst: rank {peer} is this rank")
    exchange_bytes(member, name, encode(object_list), peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive a list of objects from another rank.

    object_list: a list as long as the sender's, whose entries are replaced.
    src: the sender as a global rank.
    group: the process group, None for the default group.
    device: None or the host, where objects travel.
    group_src: the sender as a rank in the group; any rank where neither src nor group_src is given.
    use_batch: has no effect.

    Returns the sender's global rank, and -1 on a rank outside the group.

    Raises ArgumentTypeError (a TypeError) if it is no list, ArgumentError (a ValueError) for a
    sender that is not in the group, UnsupportedError (a ValueError) for another device,
    MismatchError for a list of another length, CollectiveTimeoutError where nothing comes, and
    RefusedPickleError for what restricted_pickle does not allow.
    """
    name = "recv_object_list"
    member = resolve(group)
    if member is None:
        execute.warn_outside(name)
        return -1
    _check_list(name, "object_list", object_list)
    _check_device(name, device)
    peer = None
    if src is not None or group_src is not None:
        peer = execute.find_root(name, group, "src", src, group_src)
    whole, source = exchange_bytes(member, name, None, peer)
    assert whole is not None
    _replace_entries(name, object_list, decode(whole), source)
    return source
