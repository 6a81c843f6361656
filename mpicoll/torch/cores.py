"""The groups of the core that torch's groups stand on: making and ending them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as c10d

from mpicoll import launch
from mpicoll.api import lifecycle, subgroups
from mpicoll.core import groups
from mpicoll.core.groups import ProcessGroup, state
from mpicoll.dispatch import execute
from mpicoll.errors import UnsupportedError
from mpicoll.torch import NAME, versions

__all__ = ["abort", "end", "part", "some", "whole", "without"]

#: The core's default group where torch's is of another backend: nobody is given it, so that every
#: group can end alone.
_base: ProcessGroup | None = None
#: The stores of rank 0, kept until the process ends: a rank that is through with its destroy before
#: rank 0 may begin anew at the same port, with the store of before.
_stores: list[Any] = []


def whole(store: Any, rank: int, size: int, limit: float | None, name: str) -> ProcessGroup:
    """The group of all ranks; the first one starts MPI.

    limit: seconds after which an operation has failed, None never.
    """
    if state.default is not None:
        return part(range(size), limit, name)
    if rank == 0:
        versions.warn_if_newer()  # once a job
        _stores.append(store)
    expected = {"rank": ("rank=", rank), "world_size": ("world_size=", size)}
    rendezvous = launch.Rendezvous(store, rank, size, host=launch.loopback(_host(store)))
    return lifecycle.begin(NAME, limit, "0", rendezvous=rendezvous, expected=expected)


def _host(store: Any) -> str:
    """Where all ranks reach a store of torch's, "" where it does not say."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def part(ranks: Sequence[int], limit: float | None, name: str) -> ProcessGroup:
    """The group of some of the core's global ranks, made by them alone.

    name: the same on all of them.
    """
    default = groups.default_group()
    return execute.in_order(  # type: ignore[no-any-return]
        default,
        "new_group",
        lambda: groups.create(
            default,
            ranks,
            ranks,
            backend=NAME,
            timeout=limit,
            name=f"torch:{name}",
            description="undefined",
        ),
        everybody=False,
    )


def some(
    store: Any, rank: int, ranks: Sequence[int], limit: float | None, name: str
) -> ProcessGroup:
    """The group of some of torch's global ranks, made by them alone.

    Raises UnsupportedError where it is the first and not of all: it has MPI to start.
    """
    global _base
    if state.default is None:
        world = c10d.get_world_size()
        if len(ranks) != world:
            raise UnsupportedError(
                f"new_group: backend 'mpicoll' over a default group of backend "
                f"{c10d.get_backend()!r}: the first such group starts MPI and must hold all "
                f"{world} ranks, got {list(ranks)}; make one with ranks=None first, or begin with "
                "init_process_group('mpicoll')"
            )
        _base = whole(store, rank, world, limit, name)
    return part(ranks, limit, name)


def without(group: ProcessGroup, excluded: Sequence[int], flags: int) -> ProcessGroup:
    """The group of the ranks of ``group`` but some, made by them alone; ``group`` is gone.

    excluded: ranks in the group.
    flags: SHRINK_ABORT gives up what is pending in it.

    In the place of the default group it is that, and global ranks count anew, in torch as here.
    """
    return subgroups.shrink_group(list(excluded), group, flags)


def end(group: ProcessGroup) -> None:
    """Waits for what is pending and ends the group; the default group ends everything.

    Raises CollectiveTimeoutError where other ranks do not join what is pending.
    """
    if group.closed is None and group is not _base:
        lifecycle.destroy_process_group(group)
    _end_base()


def abort(group: ProcessGroup) -> None:
    """Ends the group without waiting for anything, which other ranks may never join."""
    if group.closed is None and group is not _base:
        lifecycle.abandon(group)
    _end_base()


def _end_base() -> None:
    """With the last group that stands on it ends the one that nobody was given."""
    global _base
    if _base is not None and state.groups == [_base]:
        _base = None
        lifecycle.destroy_process_group()
