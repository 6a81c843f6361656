"""Collectives and messages of Python objects.

Objects are sent as pickles. Unpickling can run any code: receive only from ranks that you trust, or
restrict the classes with ``restricted_pickle``. NumPy arrays inside objects are sent as separate
buffers, without a copy into the pickle. Sizes are not limited to 2 GiB.

group: the process group; None is the default group. On a rank outside the group, a call warns and
    returns.
src, dst: root (0 by default), or the other rank of a message, as a global rank.
group_src, group_dst: the same, as a rank in the group. Use instead of ``src`` or ``dst``.
device: None or "cpu". Objects are sent in host memory.
use_batch: ignored.

Raises NotInitializedError (a ValueError) before init_process_group; ArgumentTypeError (a TypeError)
for an argument that must be a list; ArgumentError (a ValueError) for a list of a wrong length or a
rank outside the group; UnsupportedError (a ValueError) for another device; any exception of pickle
for an object that cannot be pickled; RefusedPickleError for a class that restricted_pickle does not
allow; CollectiveTimeoutError if the call timed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpicoll.arrays.views import Bytes
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.pickles import decode, encode
from mpicoll.dispatch import execute
from mpicoll.dispatch.point_to_point import exchange_bytes, find_source
from mpicoll.errors import ArgumentError, ArgumentTypeError, MismatchError, UnsupportedError
from mpicoll.output import format_count

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
    "scatter_object_list", "send_object_list",
]  # fmt: skip

T = TypeVar("T")


def _check_list(
    name: str, argument: str, value: object, length: int = 0, exact: bool = False
) -> list[Any]:
    """Return a list argument. Raises if it is not a list of (at least) ``length`` entries."""
    if not isinstance(value, list):
        raise ArgumentTypeError(f"{name}: {argument}: expected a list, got {type(value).__name__}")
    if len(value) < length or (exact and len(value) > length):
        raise ArgumentError(
            f"{name}: {argument}: expected {format_count(length, 'object')}, one for each rank, "
            f"got {len(value)}"
        )
    return value


def _check_device(name: str, device: object) -> None:
    kind = getattr(device, "type", device)
    if kind is not None and str(kind).partition(":")[0] != "cpu":
        raise UnsupportedError(f"{name}: device: expected None or 'cpu', got {device!r}")


def _run(group: ProcessGroup, name: str, root: int, task: Callable[[Any, MPI.Intracomm], T]) -> T:
    """Call ``task(wire, comm)`` in the order of the group's collectives."""
    from mpicoll.routes import wire  # loads MPI, which importing this module must not

    return execute.run_in_order(  # type: ignore[no-any-return]
        group, name, lambda: task(wire, group.tested), root=root
    )


def all_gather_object(
    object_list: list[Any], obj: object, group: ProcessGroup | None = None
) -> None:
    """Gather the objects of all ranks into a list, on every rank.

    object_list: list with one entry for each rank. The entries are replaced, in rank order.
    obj: any object that can be pickled.
    """
    name = "all_gather_object"
    member = execute.resolve_or_warn(group, name)
    if member is None:
        return
    found = _check_list(name, "object_list", object_list, member.size())
    own = encode(obj)
    wholes = _run(member, name, -1, lambda wire, comm: wire.all_gather_bytes(comm, own))
    found[: len(wholes)] = [decode(whole) for whole in wholes]


def gather_object(
    obj: object,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Gather the objects of all ranks into a list on the root.

    obj: any object that can be pickled.
    object_gather_list: on the root, a list with one entry for each rank. The entries are replaced,
        in rank order. None on other ranks.
    """
    name = "gather_object"
    root = execute.find_root(name, group, "dst", dst, group_dst, 0)
    member = execute.resolve_or_warn(group, name)
    if member is None:
        return
    if (member.rank() == root) != (object_gather_list is not None):
        raise ArgumentError(
            f"{name}: object_gather_list: must be given on the root, rank {root}, and must be None "
            "on other ranks"
        )
    found = object_gather_list
    if found is not None:
        _check_list(name, "object_gather_list", found, member.size())
    own = encode(obj)
    wholes = _run(member, name, root, lambda wire, comm: wire.gather_bytes(comm, own, root))
    if found is not None:
        found[: len(wholes)] = [decode(whole) for whole in wholes]


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_src: int | None = None,
) -> None:
    """Copy the objects in the list of the root into the lists of all ranks.

    object_list: list of the same length on all ranks. On ranks other than the root, the entries are
        replaced.

    Raises MismatchError if the lengths differ.
    """
    name = "broadcast_object_list"
    root = execute.find_root(name, group, "src", src, group_src, 0)
    member = execute.resolve_or_warn(group, name)
    if member is None:
        return
    _check_list(name, "object_list", object_list)
    _check_device(name, device)
    own = encode(object_list) if member.rank() == root else np.empty(0, np.uint8)
    whole = _run(member, name, root, lambda wire, comm: wire.broadcast_bytes(comm, own, root))
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
    """Send each rank one object from a list on the root.

    scatter_object_output_list: list with at least one entry. The first entry is replaced.
    scatter_object_input_list: on the root, one object for each rank, in rank order. Ignored on
        other ranks.
    """
    name = "scatter_object_list"
    root = execute.find_root(name, group, "src", src, group_src, 0)
    member = execute.resolve_or_warn(group, name)
    if member is None:
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"{name}: scatter_object_output_list: expected a list of at least one entry"
        )
    wholes: Sequence[Bytes] | None = None
    if member.rank() == root:
        if scatter_object_input_list is None:
            raise ArgumentError(
                f"{name}: scatter_object_input_list: must be given on the root, rank {root}"
            )
        argument = "scatter_object_input_list"
        given = _check_list(name, argument, scatter_object_input_list, member.size(), exact=True)
        wholes = [encode(obj) for obj in given]
    whole = _run(member, name, root, lambda wire, comm: wire.scatter_bytes(comm, wholes, root))
    scatter_object_output_list[0] = decode(whole)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | None = None,
    device: object = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send a list of objects to another rank. Returns when the data has been sent.

    object_list: objects that can be pickled. The receiver passes a list of the same length.

    Raises ArgumentError (a ValueError) if the receiver is this rank.
    """
    name = "send_object_list"
    peer = execute.find_root(name, group, "dst", dst, group_dst, None)
    member = execute.resolve_or_warn(group, name)
    if member is None:
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

    object_list: list of the same length as the sender's. The entries are replaced.
    src, group_src: sender. Without either, a message from any rank is accepted.

    Returns the global rank of the sender, or -1 on a rank outside the group.

    Raises MismatchError if the lengths differ.
    """
    name = "recv_object_list"
    member = execute.resolve_or_warn(group, name)
    if member is None:
        return -1
    _check_list(name, "object_list", object_list)
    _check_device(name, device)
    peer = find_source(name, member, src, group_src)
    whole, source = exchange_bytes(member, name, None, peer)
    assert whole is not None
    _replace_entries(name, object_list, decode(whole), source)
    return source
