"""Create and destroy the core's groups below torch's groups. Only the members of a group call.

limit: seconds after which an operation fails, None for never.
reductions: options of the group, None for the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as c10d

from mpicoll.api import lifecycle
from mpicoll.api.subgroups import create_in_order
from mpicoll.core import groups
from mpicoll.core.groups import ProcessGroup, state
from mpicoll.core.reproducible import DEFAULTS, Reductions, parse
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.launch.rendezvous import Rendezvous, loopback
from mpicoll.torch import NAME
from mpicoll.torch.internals import warn_if_newer
from mpicoll.torch.rendezvous import keep_store

#: The core's default group if torch's default group has another backend. No torch group uses it, so
#: that every group can end alone.
_base: ProcessGroup | None = None


def create_default(
    store: c10d.Store,
    rank: int,
    size: int,
    limit: float | None,
    name: str,
    reductions: Reductions = DEFAULTS,
) -> ProcessGroup:
    """Create the group of all ranks. The first one starts MPI."""
    if state.default is not None:
        return create_subgroup(range(size), limit, name, reductions)
    if rank == 0:
        warn_if_newer()  # once per job
    expected = {"rank": ("rank=", rank), "world_size": ("world_size=", size)}
    rendezvous = Rendezvous(store, rank, size, host=loopback(_find_host(store)))
    group = lifecycle.begin(
        NAME, limit, "0", rendezvous=rendezvous, expected=expected, reductions=reductions
    )
    keep_store(store if rank == 0 and size > 1 else None)
    return group


def _find_host(store: c10d.Store) -> str:
    """Return the host of a torch store that all ranks reach, or "" if it is unknown."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def create_subgroup(
    ranks: Sequence[int], limit: float | None, name: str, reductions: Reductions = DEFAULTS
) -> ProcessGroup:
    """Create a group of global ranks of the core, with the same name on all of them."""
    default = groups.default_group()
    options = groups.Options(NAME, limit, parse(*reductions, default.reductions, "new_group"))
    return create_in_order(
        "new_group", default, ranks, ranks, options, f"torch:{name}", "undefined", everybody=False
    )


def create(
    store: c10d.Store,
    rank: int,
    ranks: Sequence[int],
    limit: float | None,
    name: str,
    reductions: Reductions = DEFAULTS,
) -> ProcessGroup:
    """Create a group of global ranks of torch.

    Raises UnsupportedError if it is the first group, which starts MPI, and does not contain all
    ranks.
    """
    global _base
    if state.default is None:
        world = c10d.get_world_size()
        if len(ranks) != world:
            raise UnsupportedError(
                f"new_group: backend 'mpicoll' over a default group of backend "
                f"{c10d.get_backend()!r}: the first group of mpicoll starts MPI and must contain "
                f"all {world} ranks, got {list(ranks)}; create one with ranks=None first, or call "
                "init_process_group('mpicoll')"
            )
        _base = create_default(store, rank, world, limit, name)
    return create_subgroup(ranks, limit, name, reductions)


def split(
    group: ProcessGroup, ranks: Sequence[int], limit: float | None, name: str
) -> ProcessGroup:
    """Create a subgroup of ``group`` from ranks in it, in the order of the new one.

    Raises ArgumentError if this rank is not a member.
    """
    if group.rank() not in ranks:
        raise ArgumentError(
            f"split_group: ranks: expected this rank, {group.rank()}, among them, got "
            f"{list(ranks)}; let only members call, or use new_group"
        )
    return create_subgroup([group.ranks[rank] for rank in ranks], limit, name, group.reductions)


def end(group: ProcessGroup, by: Callable[[ProcessGroup], None]) -> None:
    """End a group by a function, and the base group after the last group that depends on it."""
    global _base
    if group.closed is None and group is not _base:
        by(group)
    if _base is not None and state.groups == [_base]:
        _base = None
        lifecycle.destroy_process_group()
