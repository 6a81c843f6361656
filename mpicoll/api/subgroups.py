"""Groups derived from groups: new_group, new_subgroups, split_group, shrink_group.

timeout: seconds or a timedelta. None: as in the default group, or in the parent.
backend: a name as in init_process_group. None: as in the default group, or in the parent.
pg_options: ignored with a warning.
group_desc: a description of each new group, for humans.

Raises NotInitializedError (a ValueError) before init_process_group; ArgumentTypeError (a TypeError)
for ranks that are not ints; ArgumentError (a ValueError) for ranks that are unknown or in two
groups, and for an unknown backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from mpicoll import communicators, control_messages
from mpicoll.api import backends
from mpicoll.api.backends import Backend
from mpicoll.api.lifecycle import abort_group, close_group, node_size
from mpicoll.core import groups
from mpicoll.core.groups import GroupMember, Options, ProcessGroup, default_group, state
from mpicoll.core.indices import check_index, check_indices
from mpicoll.core.reproducible import parse as parse_reductions
from mpicoll.core.work import parse_timeout
from mpicoll.dispatch import execute
from mpicoll.errors import ArgumentError, ArgumentTypeError, MpicollError
from mpicoll.failures import lost_ranks
from mpicoll.output import format_count
from mpicoll.serialized_mpi import unwrap

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "SHRINK_ABORT", "SHRINK_DEFAULT", "new_group", "new_subgroups", "new_subgroups_by_enumeration",
    "shrink_group", "split_group",
]  # fmt: skip

SHRINK_DEFAULT, SHRINK_ABORT = 0, 1


def new_group(
    ranks: Sequence[int] | MPI.Intracomm | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: object = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: object = None,
    sort_ranks: bool = True,
    *,
    reproducible: str | None = None,
    wire: str | None = None,
) -> ProcessGroup | int | None:
    """Create a group of global ranks.

    Every rank of the default group calls it, in the same order, from one thread. Only members
    communicate. Threads that call collectives concurrently need separate groups, because the calls
    of a group are matched in order.

    ranks: global ranks, None for all. Or a communicator of mpi4py: only its members call, and it
        defines their order. It becomes ``comm`` of the group and is never freed.
    use_local_synchronization: if True, only members need to call. Other ranks that call get None.
    device_id: ignored.
    sort_ranks: if True, order the members by global rank. If False, keep the order of ``ranks``.
    reproducible, wire: as in init_process_group, the same on all members. None is the value of the
        default group.

    Returns the group, or GroupMember.NON_GROUP_MEMBER on a rank that is not a member.

    Raises ArgumentError (a ValueError) also for an inter-communicator, and for a communicator
    without this process or with ranks outside the default group; MismatchError on all members if
    reproducible or wire differs.
    """
    where = "new_group"
    world = default_group()
    chosen = world.backend if backend is None else backends.parse_backend(backend, where)
    limit = parse_timeout(timeout, world.timeout, where)
    reductions = parse_reductions(reproducible, wire, world.reductions, where)
    backends.warn_about_options(pg_options, where)
    given, members = None, list(range(world.size()))
    if communicators.is_communicator(ranks):
        given = communicators.checked_communicator(ranks, f"{where}: ranks")
        members = _members(given, world, where)
        use_local_synchronization, sort_ranks = True, False
    elif ranks is not None:
        members = _ranks(ranks, world.size(), f"{where}: ranks")
    if len(set(members)) != len(members):
        raise ArgumentError(f"{where}: ranks: duplicate rank in {members}")
    if sort_ranks:
        members.sort()
    if use_local_synchronization:
        # Other ranks may not call, so the number of groups may differ.
        name = f"local:{','.join(map(str, members))}:{state.count_group(tuple(members))}"
    else:
        name = str(state.count_group())
    if world.rank() not in members:
        if use_local_synchronization:
            return None
        world.formed += 1
        return GroupMember.NON_GROUP_MEMBER
    options, everybody = Options(chosen, limit, reductions), not use_local_synchronization
    return create_in_order(
        where, world, members, members, options, name, group_desc or "undefined", given, everybody
    )


def create_in_order(
    where: str,
    parent: ProcessGroup,
    members: Sequence[int],
    ranks: Sequence[int],
    options: Options,
    name: str,
    description: str,
    given: MPI.Intracomm | None = None,
    everybody: bool = True,
) -> ProcessGroup:
    """Create a group (see ``groups.create``) in the order of the collectives of its parent.

    everybody: all ranks of the parent call, or count the group in ``formed``.
    """
    create = partial(groups.create, parent, members, ranks, options, name, description, given)
    made: ProcessGroup = execute.run_in_order(parent, where, create, everybody=everybody)
    return made


def _members(comm: MPI.Intracomm, world: ProcessGroup, where: str) -> list[int]:
    """Return the global ranks of the members of a communicator, in its order."""
    found = communicators.translate_ranks(comm, unwrap(world.inner))
    outside = [rank for rank, member in enumerate(found) if member is None]
    if outside:
        raise ArgumentError(
            f"{where}: ranks: rank{'s' * (len(outside) > 1)} {', '.join(map(str, outside))} of the "
            "communicator are not in the default group; pass a communicator of its ranks only, or "
            "call init_process_group(comm=...) with a larger one"
        )
    return [member for member in found if member is not None]


def _ranks(ranks: object, size: int, where: str) -> list[int]:
    """Convert ranks to ints. Raises ArgumentError for a rank that is not below ``size``."""
    found = check_indices(ranks, where)
    for rank in found:
        if not 0 <= rank < size:
            raise ArgumentError(f"{where}: rank {rank} is out of range 0 to {size - 1}")
    return found


def _rank_lists(lists: object, size: int, where: str) -> list[list[int]]:
    """Convert lists of ranks as ``_ranks`` does. Raises ArgumentError if there is no list."""
    try:
        items = list(lists)  # type: ignore[call-overload]
    except TypeError:
        raise ArgumentTypeError(
            f"{where}: expected a list of lists of ints, got {type(lists).__name__}"
        ) from None
    found = [_ranks(ranks, size, f"{where}[{i}]") for i, ranks in enumerate(items)]
    if not found:
        raise ArgumentError(f"{where}: expected at least one list of ranks")
    return found


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int]]:
    """Split a group into subgroups of consecutive ranks. Every rank of the group calls it.

    group_size: number of ranks per subgroup; None is the number of ranks per node.
    group: the process group; None is the default group.

    Returns the subgroup of this rank and the list of all subgroups. In the list, subgroups without
    this rank are GroupMember.NON_GROUP_MEMBER.

    Raises ArgumentError (a ValueError) also if the size does not divide the size of the group.
    """
    where = "new_subgroups"
    ranks = groups.get_process_group_ranks(group)
    if group_size is None:
        world = default_group()
        gather = partial(control_messages.allgather, world.tested, node_size(), int)
        sizes = set(execute.run_in_order(world, where, gather))
        if len(sizes) != 1:
            raise ArgumentError(
                f"{where}: the nodes run different numbers of ranks, {sorted(sizes)}; give "
                "group_size"
            )
        group_size = sizes.pop()
    group_size = check_index(group_size, f"{where}: group_size")
    if group_size <= 0:
        raise ArgumentError(f"{where}: group_size: expected more than 0, got {group_size}")
    if len(ranks) < group_size or len(ranks) % group_size:
        raise ArgumentError(
            f"{where}: group_size: {group_size} does not divide the group's "
            f"{format_count(len(ranks), 'rank')}"
        )
    lists = [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)]
    # Only the members of the group call.
    local = group is not None and group is not default_group()
    return _enumerated(where, lists, timeout, backend, pg_options, group_desc, local)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int]]:
    """Create one group for each list of global ranks. Every rank calls it.

    ranks_per_subgroup_list: lists of global ranks that do not overlap.

    Returns the group of this rank (None if it is in no list) and the list of all groups. In the
    list, groups without this rank are GroupMember.NON_GROUP_MEMBER.

    Raises ArgumentError (a ValueError) also for an empty list, before any group is created.
    """
    where = "new_subgroups_by_enumeration"
    size = default_group().size()
    lists = _rank_lists(ranks_per_subgroup_list, size, f"{where}: ranks_per_subgroup_list")
    return _enumerated(where, lists, timeout, backend, pg_options, group_desc, False)


def _enumerated(
    where: str,
    lists: Sequence[Sequence[int]],
    timeout: timedelta | float | None,
    backend: str | None,
    pg_options: object,
    group_desc: str | None,
    local: bool,
) -> tuple[ProcessGroup | None, list[ProcessGroup | int]]:
    owner: dict[int, int] = {}
    for i, ranks in enumerate(lists):
        for rank in ranks:
            if rank in owner:
                raise ArgumentError(f"{where}: rank {rank} is in subgroup {owner[rank]} and in {i}")
            owner[rank] = i
    mine, made = None, []
    for ranks in lists:
        one = new_group(ranks, timeout, backend, pg_options, local, group_desc)
        made.append(GroupMember.NON_GROUP_MEMBER if one is None else one)
        if isinstance(one, ProcessGroup):
            mine = one
    return mine, made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | Backend | None = None,
) -> ProcessGroup | None:
    """Split a group into disjoint groups. Every rank of the group calls it.

    parent_pg: the group to split; None is the default group.
    split_ranks: lists of ranks in the parent group that do not overlap. Each is sorted.

    Returns the new group of this rank, or None if it is in no list.

    Raises ArgumentError (a ValueError) also for empty lists.
    """
    where = "split_group"
    parent = groups.find_open(parent_pg, where)
    given = [] if split_ranks is None else split_ranks
    lists = [sorted(one) for one in _rank_lists(given, parent.size(), f"{where}: split_ranks")]
    backends.warn_about_options(pg_options, where)
    chosen = parent.backend if backend is None else backends.parse_backend(backend, where)
    limit = parse_timeout(timeout, parent.timeout, where)
    everyone = [rank for ranks in lists for rank in ranks]
    if not all(lists) or len(set(everyone)) != len(everyone):
        raise ArgumentError(
            f"{where}: split_ranks: expected non-empty lists with each rank at most once, got "
            f"{split_ranks}"
        )
    parent.splits += 1
    mine = next((ranks for ranks in lists if parent.rank() in ranks), None)
    if mine is None:
        parent.formed += 1
        return None
    name = f"{parent.group_name}:split:{parent.splits}:{mine[0]}"
    description = group_desc or f"{parent.group_desc}:split:{parent.splits - 1}"
    options = Options(chosen, limit, parent.reductions)
    ranks = [parent.ranks[r] for r in mine]
    return create_in_order(where, parent, mine, ranks, options, name, description)


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: object = None,
) -> ProcessGroup:
    """Create a group without some ranks of a group. Only the remaining ranks call it.

    The old group ends. If it is the default group, all other groups end, and the new group becomes
    the default group with global ranks from 0. If ranks were lost in a job that survives this (Open
    MPI, ``mpirun --with-ft ulfm``), exclude exactly the lost ranks.

    ranks_to_exclude: list of ranks in the group.
    group: the process group; None is the default group.
    shrink_flags: SHRINK_DEFAULT, or SHRINK_ABORT to abort pending work of the old group instead of
        waiting for it.

    Returns the new group.

    Raises ArgumentError (a ValueError) also if no rank or all ranks are excluded, or one that is
    alive while others are lost; LostRankError if a remaining rank is lost; MpicollError (a
    RuntimeError) on a rank that is excluded.
    """
    where = "shrink_group"
    old = groups.find_open(group, where)
    if not isinstance(ranks_to_exclude, list):
        raise ArgumentTypeError(
            f"{where}: ranks_to_exclude: expected a list, got {type(ranks_to_exclude).__name__}"
        )
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ArgumentError(
            f"{where}: shrink_flags: expected SHRINK_DEFAULT or SHRINK_ABORT, got {shrink_flags}"
        )
    backends.warn_about_options(pg_options, where)
    size = old.size()
    ranks_to_exclude = _ranks(ranks_to_exclude, size, f"{where}: ranks_to_exclude")
    excluded = set(ranks_to_exclude)
    if not 0 < len(excluded) == len(ranks_to_exclude) < size:
        raise ArgumentError(
            f"{where}: ranks_to_exclude: expected at least one rank, each once, and not all "
            f"{format_count(size, 'rank')}, got {ranks_to_exclude}"
        )
    if old.rank() in excluded:
        raise MpicollError(f"{where}: rank {old.rank()} is excluded and must not call; it can exit")
    is_default = old is state.default
    staying = [rank for rank in range(size) if rank not in excluded]
    others = [one for one in state.groups if one is not old]
    if is_default and others:
        warnings.warn(
            f"{where}: shrinking the default group ends {len(others)} other group(s), because "
            "global ranks change",
            stacklevel=2,
        )
    lost = lost_ranks.is_fault_tolerant() and lost_ranks.check(old)

    ranks = range(len(staying)) if is_default else [old.ranks[r] for r in staying]
    name = f"{old.group_name}:shrunk:{old.splits + 1}"
    description = "default:shrunken" if is_default else f"{old.group_name}:shrunk"
    if lost or shrink_flags == SHRINK_ABORT:
        inner = lost_ranks.shrink(old, excluded, where) if lost else None
        made = groups.create(old, staying, ranks, old.options, name, description, inner=inner)
    else:
        made = create_in_order(
            where, old, staying, ranks, old.options, name, description, everybody=False
        )
    old.splits += 1
    for one in [*others, old] if is_default else [old]:
        if shrink_flags == SHRINK_ABORT:
            abort_group(one)
        else:
            close_group(one)
    if is_default:
        state.set_default(made)
    return made
