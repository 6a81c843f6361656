"""The groups of the core under torch's groups: creating and destroying them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as c10d

from mpicoll import launch
from mpicoll.api import lifecycle, subgroups
from mpicoll.core import groups
from mpicoll.core.groups import ProcessGroup, state
from mpicoll.dispatch import execute
from mpicoll.errors import ArgumentError, CollectiveTimeoutError, UnsupportedError
from mpicoll.torch import NAME, versions
from mpicoll.torch.options import MAX_TIMEOUT_S
from mpicoll.torch.store import keep_store

__all__ = [
    "abort", "create", "create_default", "create_subgroup", "destroy", "merge", "shrink", "split",
]  # fmt: skip

#: The core's default group where torch's default group has another backend. No torch group stands
#: on it, so that every group can end alone.
_base: ProcessGroup | None = None
#: The prefix of a merge's keys in its store.
_MERGE = "mpicoll/merge"


def create_default(
    store: c10d.Store,
    rank: int,
    size: int,
    limit: float | None,
    name: str,
    reproducible: str | None = None,
) -> ProcessGroup:
    """Create the group of all ranks; the first one starts MPI.

    limit: seconds after which an operation has failed, None for never.
    reproducible: the group's level, None for the default.
    """
    if state.default is not None:
        return create_subgroup(range(size), limit, name, reproducible)
    if rank == 0:
        versions.warn_if_newer()  # once a job
    expected = {"rank": ("rank=", rank), "world_size": ("world_size=", size)}
    rendezvous = launch.Rendezvous(store, rank, size, host=launch.loopback(_find_host(store)))
    group = lifecycle.begin(
        NAME, limit, "0", rendezvous=rendezvous, expected=expected, reproducible=reproducible
    )
    keep_store(store if rank == 0 and size > 1 else None)
    return group


def _find_host(store: c10d.Store) -> str:
    """Return the host at which all ranks reach a torch store, "" if the store does not say."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def create_subgroup(
    ranks: Sequence[int], limit: float | None, name: str, reproducible: str | None = None
) -> ProcessGroup:
    """Create the group of some of the core's global ranks; only they call.

    name: the same on all of them.
    reproducible: the group's level, None for the default group's.
    """
    default = groups.default_group()
    return execute.run_in_order(  # type: ignore[no-any-return]
        default,
        "new_group",
        lambda: groups.create(
            default,
            ranks,
            ranks,
            backend=NAME,
            timeout=limit,
            reproducible=default.reproducible if reproducible is None else reproducible,
            name=f"torch:{name}",
            description="undefined",
        ),
        everybody=False,
    )


def create(
    store: c10d.Store,
    rank: int,
    ranks: Sequence[int],
    limit: float | None,
    name: str,
    reproducible: str | None = None,
) -> ProcessGroup:
    """Create the group of some of torch's global ranks; only they call.

    reproducible: the group's level, None for the default.

    Raises UnsupportedError if it is the first group and does not hold all ranks: it starts MPI.
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
        _base = create_default(store, rank, world, limit, name)
    return create_subgroup(ranks, limit, name, reproducible)


def split(
    group: ProcessGroup, ranks: Sequence[int], limit: float | None, name: str
) -> ProcessGroup:
    """Create the group of some ranks of ``group``; only they call.

    ranks: ranks in the group, in the order of the new one.
    limit: seconds after which an operation has failed, None for never.
    name:  of the new group, the same on all of them.

    Raises ArgumentError if this rank is not one of them.
    """
    if group.rank() not in ranks:
        raise ArgumentError(
            f"split_group: ranks: expected this rank, {group.rank()}, among them, got "
            f"{list(ranks)}; let only members call, or use new_group"
        )
    global_ranks = [group.ranks[rank] for rank in ranks]
    return create_subgroup(global_ranks, limit, name, group.reproducible)


def merge(
    group: ProcessGroup, store: c10d.Store, rank: int, size: int, limit: float | None
) -> ProcessGroup:
    """Create the group of the processes that call with the same store; only they call.

    group: a group of this process, whose level of reproducibility the new one has.
    store: of torch, not used for a merge before.
    rank:  of this process in the new group, different on each of them.
    size:  the number of processes.
    limit: seconds for the processes to come, and after which an operation of the new group has
           failed; None for never.

    Raises ArgumentError for a rank that is not below ``size``, and for processes that are not all
    of this job; CollectiveTimeoutError if not all of them come in time.
    """
    if not 0 <= rank < size:
        raise ArgumentError(
            f"merge_remote_group: size: expected the number of processes that call, got {size}, "
            f"and this is number {rank + 1}; pass a new store, such as a PrefixStore, to each merge"
        )
    keys = [f"{_MERGE}/{other}" for other in range(size)]
    if rank == 0:  # the first process names the group
        store.set(f"{_MERGE}/name", secrets.token_hex(8))
    store.set(keys[rank], str(groups.default_group().rank()))
    waiting = timedelta(seconds=MAX_TIMEOUT_S if limit is None else limit)
    try:
        store.wait([*keys, f"{_MERGE}/name"], waiting)
    except RuntimeError as error:
        came = sum(store.check([key]) for key in keys)
        raise CollectiveTimeoutError(
            f"merge_remote_group: {came} of {size} processes came in time; let all of "
            "them call with the same store, or give a longer timeout"
        ) from error
    ranks = [int(store.get(key)) for key in keys]
    if len(set(ranks)) < size or max(ranks) >= groups.default_group().size():
        raise ArgumentError(
            f"merge_remote_group: expected different ranks of one MPI job, got global ranks {ranks}"
        )
    name = store.get(f"{_MERGE}/name").decode()
    return create_subgroup(ranks, limit, f"{_MERGE}/{name}", group.reproducible)


def shrink(group: ProcessGroup, excluded: Sequence[int], flags: int) -> ProcessGroup:
    """Create the group of the remaining ranks of ``group``, which ends; only they call.

    excluded: ranks in the group.
    flags: SHRINK_ABORT abandons its pending operations.

    If ``group`` is the default group, the new one takes its place, and global ranks are counted
    anew, both in torch and in mpicoll.
    """
    return subgroups.shrink_group(list(excluded), group, flags)


def destroy(group: ProcessGroup) -> None:
    """Wait for pending operations and end the group; with the default group, end all groups.

    Raises CollectiveTimeoutError if other ranks do not join the pending operations.
    """
    if group.closed is None and group is not _base:
        lifecycle.destroy_process_group(group)
    _destroy_base()


def abort(group: ProcessGroup) -> None:
    """End the group without waiting for pending operations, which other ranks may never join."""
    if group.closed is None and group is not _base:
        lifecycle.abort(group)
    _destroy_base()


def _destroy_base() -> None:
    """Destroy the base group after the last group that stands on it."""
    global _base
    if _base is not None and state.groups == [_base]:
        _base = None
        lifecycle.destroy_process_group()
