"""The beginning and the end: init_process_group to destroy_process_group, new groups, and what is
available.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from mpicoll import execute, groups, launch
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveTimeoutError,
    LaunchError,
    MpicollError,
    UnsupportedError,
)
from mpicoll.groups import GroupMember, ProcessGroup, default_group, state
from mpicoll.point_to_point import stop_polling
from mpicoll.watch.ends import Guard
from mpicoll.work import seconds

__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "Backend",
    "destroy_process_group",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_node_local_rank",
    "get_pg_count",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "shrink_group",
    "split_group",
]

#: Seconds after which an operation has failed, unless init_process_group says otherwise.
DEFAULT_TIMEOUT = 1800.0
#: Seconds that a destroy gives work that other ranks have not joined.
_LAST_CHANCE = 5.0

SHRINK_DEFAULT, SHRINK_ABORT = 0, 1

_guard: Guard | None = None


class Backend(str):
    """The name of a backend in lower case: ``Backend("MPI") == Backend.MPI == "mpi"``.

    Everything is carried by MPI. "gloo" and "nccl" are names under which existing scripts keep
    running: host buffers and device buffers.
    """

    __slots__ = ()

    UNDEFINED: ClassVar[str] = "undefined"
    MPI: ClassVar[str] = "mpi"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    XCCL: ClassVar[str] = "xccl"
    FAKE: ClassVar[str] = "fake"

    backend_list: ClassVar[list[str]] = ["undefined", "gloo", "nccl", "mpi"]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": "mpi", "cuda": "mpi"}
    backend_capability: ClassVar[dict[str, list[str]]] = {
        "mpi": ["cpu"],
        "gloo": ["cpu"],
        "nccl": ["cpu"],
    }

    def __new__(cls, name: str) -> Backend:
        """The backend of that name; raises ArgumentError (a ValueError) for what is no string."""
        if not isinstance(name, str):
            raise ArgumentError(f"Backend: expected a name, got {type(name).__name__}")
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Any,
        extended_api: bool = False,
        devices: str | list[str] | None = None,
    ) -> None:
        """Refused: mpicoll carries everything over MPI and takes no plug-ins."""
        raise UnsupportedError(
            f"Backend.register_backend: {name!r}: mpicoll takes no other backends; register it "
            "with torch.distributed"
        )


def _backend(name: str | None, where: str) -> str:
    """The backend asked for, "mpi" where none is; raises ArgumentError for one that is not ours."""
    if name is None:
        return Backend.MPI
    found = str(Backend(name))
    devices = [part.partition(":")[2] or part for part in found.split(",")]
    for device in devices:
        if not is_backend_available(device):
            raise ArgumentError(
                f"{where}: backend {found!r} is not available; expected mpi, or gloo or nccl as "
                "names under which scripts run over MPI"
            )
    return found


# --- what is available --------------------------------------------------------------------------


def is_available() -> bool:
    """True: mpicoll is here."""
    return True


def is_initialized() -> bool:
    """True between init_process_group and destroy_process_group."""
    return state.default is not None


def is_mpi_available() -> bool:
    """True where mpi4py is installed; what MPI library it loads shows at init_process_group."""
    return importlib.util.find_spec("mpi4py") is not None


def is_gloo_available() -> bool:
    """True where MPI is: "gloo" is a name under which host buffers go over MPI."""
    return is_mpi_available()


def is_nccl_available() -> bool:
    """False: NCCL itself is not used yet. backend="nccl" is accepted all the same."""
    return False


def is_ucc_available() -> bool:
    """False: there is no UCC backend."""
    return False


def is_xccl_available() -> bool:
    """False: there is no XCCL backend."""
    return False


def is_backend_available(backend: str) -> bool:
    """True for the names that init_process_group takes: "mpi", "gloo", "nccl"."""
    return backend.lower() in (Backend.MPI, Backend.GLOO, Backend.NCCL) and is_mpi_available()


def is_torchelastic_launched() -> bool:
    """True where torchrun (torchelastic) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def get_default_backend_for_device(device: Any) -> str:
    """The backend of a device ("cpu", "cuda:1" or a torch.device).

    Raises ArgumentError (a ValueError) for a device that has none.
    """
    kind = str(getattr(device, "type", device)).partition(":")[0]
    try:
        return Backend.default_device_backend_map[kind]
    except KeyError:
        raise ArgumentError(
            f"get_default_backend_for_device: no backend serves device {device!r}; expected one of "
            f"{', '.join(Backend.default_device_backend_map)}"
        ) from None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This process's rank among those on its node.

    From LOCAL_RANK, else from the launcher's own variable, else ``fallback_rank``, else, once
    there is a process group, from MPI. Raises MpicollError (a RuntimeError) if nobody knows.
    """
    known = launch.local_rank()
    if known is not None:
        return known
    if fallback_rank is not None:
        return int(fallback_rank)
    if _node is not None:
        return _node[0]
    raise MpicollError(
        "get_node_local_rank: neither LOCAL_RANK nor a launcher's variable is set; call "
        "init_process_group first or give fallback_rank"
    )


def get_backend(group: ProcessGroup | None = None) -> Backend:
    """The backend that was asked for, in lower case.

    Raises ArgumentError (a ValueError) on a rank outside of the group.
    """
    return Backend(_member(group, "get_backend").backend)


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """The backend of each device, "cpu:mpi,cuda:mpi"."""
    backend = _member(group, "get_backend_config").backend
    return backend if ":" in backend else f"cpu:{backend},cuda:{backend}"


def get_pg_count() -> int:
    """Number of groups alive on this rank."""
    return len(state.groups)


def _member(group: Any, where: str) -> ProcessGroup:
    default_group()
    found = groups.resolve(group)
    if found is None or found.closed is not None:
        raise ArgumentError(f"{where}: {group!r} is not a group that this rank is in")
    return found


# --- the beginning ------------------------------------------------------------------------------

#: Rank on the node and number of ranks on it, known from init on.
_node: tuple[int, int] | None = None


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
    _ranks: list[int] | None = None,
) -> None:
    """Starts MPI and makes the default group of all ranks.

    backend:     "mpi" (default); "gloo" and "nccl" are names under which existing scripts run over
                 MPI.
    init_method: "mpi://", "env://" or nothing: rank and size are MPI's own. "env://" compares them
                 with RANK and WORLD_SIZE where these are set.
    timeout:     seconds or a timedelta after which an operation has failed; half an hour.
    world_size, rank: compared with MPI's own where given.
    group_name:  a name for the default group.

    Raises ArgumentError (a ValueError) when called twice or for an argument that cannot be served,
    ArgumentTypeError (a TypeError) for a timeout that is none, and LaunchError (a ValueError)
    where launcher, arguments and MPI disagree.
    """
    global _guard, _node
    where = "init_process_group"
    if state.forked:
        default_group()
    if state.default is not None:
        raise ArgumentError(f"{where}: the default process group exists already")
    chosen = _backend(backend, where)
    limit = seconds(timeout, DEFAULT_TIMEOUT, where)
    if store is not None or _ranks is not None:
        raise UnsupportedError(f"{where}: store and _ranks have no use: MPI is the rendezvous")
    if pg_options is not None:
        raise UnsupportedError(f"{where}: pg_options are not supported; leave them out")
    if device_id is not None:
        raise UnsupportedError(f"{where}: device_id: devices are not supported yet")
    expected = _expected(init_method, rank, world_size)
    world = launch.start()
    _check(expected, world.Get_rank(), world.Get_size())
    comm, messages = world.Dup(), world.Dup()
    node = comm.Split_type(_shared_memory())
    _node = (node.Get_rank(), node.Get_size())
    node.Free()
    state.made = 0
    state.default = groups.register(
        ProcessGroup(
            comm, messages, range(comm.Get_size()), chosen, limit, group_name or "0", "default_pg"
        )
    )
    _guard = Guard(world, _close_quietly)


def _shared_memory() -> int:
    from mpi4py import MPI

    return MPI.COMM_TYPE_SHARED


def _expected(init_method: str | None, rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    """What arguments and environment say of rank and size, with the name of who says it."""
    where = "init_process_group"
    if init_method not in (None, "env://", "mpi://"):
        raise UnsupportedError(
            f"{where}: init_method: expected 'mpi://', 'env://' or nothing, got {init_method!r}; "
            "start the job with mpirun or srun, MPI finds the ranks"
        )
    found: dict[str, tuple[str, int]] = {}
    if init_method == "env://":
        for what, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
            if variable in os.environ:
                try:
                    found[what] = (f"{variable}=", int(os.environ[variable]))
                except ValueError:
                    raise ArgumentError(
                        f"{where}: {variable}: expected a number, got {os.environ[variable]!r}"
                    ) from None
    for what, value in (("rank", rank), ("world_size", world_size)):
        if not isinstance(value, int):
            raise ArgumentTypeError(f"{where}: {what}: expected an int, got {type(value).__name__}")
        if value != -1:
            found[what] = (f"{what}=", value)
    return found


def _check(expected: dict[str, tuple[str, int]], rank: int, size: int) -> None:
    """Raises LaunchError where MPI's rank and size are not what was expected."""
    if expected.get("world_size", ("", -1))[1] != 1:
        launch.check_world(size)
    for what, own in (("rank", rank), ("world_size", size)):
        name, value = expected.get(what, ("", own))
        if value != own:
            raise LaunchError(
                f"init_process_group: {name}{value} disagrees with MPI's own {what}, {own} "
                f"(MPI sees rank {rank} of {size}); leave it out, or start the job so that both "
                "agree"
            )


# --- the end ------------------------------------------------------------------------------------


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Ends a group, and with the default group everything.

    Every member calls. Pending work is waited for: CollectiveTimeoutError is raised where other
    ranks have not joined it within seconds. Raises ArgumentError (a ValueError) for a group that
    is not alive.
    """
    global _guard, _node
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        return
    default = default_group()
    chosen = default if group is None else group
    if not isinstance(chosen, ProcessGroup) or chosen.closed is not None:
        raise ArgumentError(f"destroy_process_group: {group!r} is not a group that is alive")
    if chosen is not default:
        _end(chosen)
        return
    for one in reversed(list(state.groups.values())):
        if one is not default:
            _end(one)
    _end(default)
    state.default = None
    state.made = 0
    _node = None
    stop_polling()
    if _guard is not None:
        _guard.remove()
        _guard = None


def _end(group: ProcessGroup, limit: float = _LAST_CHANCE) -> None:
    """Waits for what is pending in a group, frees its communicators, strikes it off."""
    from mpicoll.point_to_point import drain

    if not group.worker.stop(limit):
        raise CollectiveTimeoutError(
            f"destroy_process_group: {group.group_name}: asynchronous work is still pending after "
            f"{limit:g} s; another rank did not make the call. Wait for every Work before the end"
        )
    drain(group, limit)
    group.close()
    del state.groups[group.group_name]
    group.messages.Free()
    group.comm.Free()


def _close_quietly() -> None:
    """The end of a program that did not call destroy_process_group.

    Nothing collective happens here: other ranks may be busy yet, and MPI_Finalize waits for them.
    """
    global _guard
    from mpicoll.point_to_point import drain

    guard, _guard = _guard, None
    for group in list(state.groups.values()):
        try:
            done = group.worker.stop(_LAST_CHANCE)
            drain(group, _LAST_CHANCE)
        except MpicollError:
            done = False
        if not done:
            print(
                f"mpicoll: rank {group.rank()} of {group.group_name} ends with work pending that "
                "other ranks have not joined; ending the job",
                flush=True,
            )
            if guard is not None:
                guard.abort(1)
    stop_polling()
    if guard is not None:
        guard.remove()


# --- new groups ---------------------------------------------------------------------------------


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | int | None:
    """Makes the group of some global ranks.

    ranks:      global ranks, None for all; sorted unless ``sort_ranks`` is False.
    timeout:    seconds or a timedelta; the default group's where None.
    use_local_synchronization: ranks that are not members need not call, and get None.

    Every rank of the default group calls, in the same order; only members communicate. Returns the
    group, on others GroupMember.NON_GROUP_MEMBER. Raises ArgumentError (a ValueError) for ranks
    that are given twice or do not exist.
    """
    where = "new_group"
    world = default_group()
    chosen = world.backend if backend is None else _backend(backend, where)
    limit = seconds(timeout, world.timeout, where)
    _refuse_options(where, pg_options, device_id)
    size = world.size()
    members = list(range(size)) if ranks is None else [_rank(r, size, where) for r in ranks]
    if len(set(members)) != len(members):
        raise ArgumentError(f"{where}: ranks: some rank is given twice in {members}")
    if sort_ranks:
        members.sort()
    if use_local_synchronization:
        # Others may not call, so the count of groups is no common ground: the name tells what
        # the members know.
        same = sum(1 for g in state.groups.values() if g.ranks == tuple(members))
        name = f"local:{','.join(map(str, members))}:{same}"
    else:
        state.made += 1
        name = str(state.made)
    if world.rank() not in members:
        return None if use_local_synchronization else GroupMember.NON_GROUP_MEMBER
    return execute.in_order(  # type: ignore[no-any-return]
        world,
        where,
        lambda: groups.create(
            world,
            members,
            members,
            backend=chosen,
            timeout=limit,
            name=name,
            description=group_desc or "undefined",
        ),
    )


def _rank(rank: Any, size: int, where: str) -> int:
    try:
        found = int(rank)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{where}: ranks: expected ints, got {type(rank).__name__}"
        ) from None
    if not 0 <= found < size:
        raise ArgumentError(f"{where}: ranks: rank {found} is out of range 0 to {size - 1}")
    return found


def _refuse_options(where: str, pg_options: Any, device_id: Any = None) -> None:
    if pg_options is not None:
        raise UnsupportedError(f"{where}: pg_options are not supported; leave them out")
    if device_id is not None:
        raise UnsupportedError(f"{where}: device_id: devices are not supported yet")


def new_subgroups(
    group_size: int | None = None,
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[Any]]:
    """Divides a group into subgroups of ``group_size`` neighbouring ranks.

    group_size: ranks a subgroup; where None, the ranks of a node. Returns this rank's subgroup and
    the list of all. Raises ArgumentError (a ValueError) for a size that does not divide the group.
    """
    where = "new_subgroups"
    ranks = groups.get_process_group_ranks(group)
    if group_size is None:
        assert _node is not None
        sizes = set(execute.in_order(default_group(), where, _node_sizes))
        if len(sizes) != 1:
            raise ArgumentError(
                f"{where}: the nodes run different numbers of ranks, {sorted(sizes)}; give "
                "group_size"
            )
        group_size = sizes.pop()
    if group_size <= 0:
        raise ArgumentError(f"{where}: group_size: expected more than 0, got {group_size}")
    if len(ranks) < group_size or len(ranks) % group_size:
        raise ArgumentError(
            f"{where}: group_size: {group_size} does not divide the group's {len(ranks)} ranks"
        )
    return new_subgroups_by_enumeration(
        [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)],
        timeout,
        backend,
        pg_options,
        group_desc,
    )


def _node_sizes() -> list[int]:
    assert _node is not None
    return default_group().comm.allgather(_node[1])


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[Any]]:
    """Makes one group for each list of global ranks; the lists must not overlap.

    Returns this rank's group (None if it is in no list) and the list of all groups. Raises
    ArgumentError (a ValueError) for an empty or overlapping enumeration, before any is made.
    """
    where = "new_subgroups_by_enumeration"
    if not ranks_per_subgroup_list:
        raise ArgumentError(
            f"{where}: ranks_per_subgroup_list: expected at least one list of ranks"
        )
    owner: dict[int, int] = {}
    for i, ranks in enumerate(ranks_per_subgroup_list):
        for rank in ranks:
            if owner.setdefault(rank, i) != i:
                raise ArgumentError(f"{where}: rank {rank} is in subgroup {owner[rank]} and in {i}")
    mine, made = None, []
    for ranks in ranks_per_subgroup_list:
        one = new_group(ranks, timeout, backend, pg_options, group_desc=group_desc)
        made.append(one)
        if isinstance(one, ProcessGroup):
            mine = one
    return mine, made


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | Backend | None = None,
) -> ProcessGroup | None:
    """Splits a group; every rank of it calls.

    split_ranks: a list of lists of ranks of the parent group. Returns this rank's new group, None
    where it is in no list. Raises ArgumentError (a ValueError) for lists that are empty, overlap
    or name ranks that the parent does not have.
    """
    where = "split_group"
    parent = _member(parent_pg, where)
    if not split_ranks:
        raise ArgumentError(f"{where}: split_ranks: expected at least one list of ranks")
    _refuse_options(where, pg_options)
    chosen = parent.backend if backend is None else _backend(backend, where)
    limit = seconds(timeout, parent.timeout, where)
    lists = [sorted(_rank(r, parent.size(), where) for r in ranks) for ranks in split_ranks]
    everyone = [rank for ranks in lists for rank in ranks]
    if not all(lists) or len(set(everyone)) != len(everyone):
        raise ArgumentError(
            f"{where}: split_ranks: lists must have ranks, and each rank at most once; got "
            f"{split_ranks}"
        )
    parent.splits += 1
    mine = next((ranks for ranks in lists if parent.rank() in ranks), None)
    if mine is None:
        return None
    name = f"{parent.group_name}:split:{parent.splits}:{mine[0]}"
    return execute.in_order(  # type: ignore[no-any-return]
        parent,
        where,
        lambda: groups.create(
            parent,
            mine,
            [parent.ranks[r] for r in mine],
            backend=chosen,
            timeout=limit,
            name=name,
            description=group_desc or f"{parent.group_desc}:split:{parent.splits - 1}",
        ),
    )


def shrink_group(
    ranks_to_exclude: list[int],
    group: ProcessGroup | None = None,
    shrink_flags: int = SHRINK_DEFAULT,
    pg_options: Any = None,
) -> ProcessGroup:
    """Makes the group without some of its ranks; only the ranks that stay call.

    ranks_to_exclude: ranks of the group. The old group is gone afterwards; shrinking the default
    group ends all others, and the result, whose global ranks count anew from 0, becomes the
    default group. With SHRINK_ABORT pending work of the old group is not waited for.

    Raises ArgumentTypeError (a TypeError) for what is no list of ints, ArgumentError (a
    ValueError) for ranks that are not in the group, given twice, or all of them, and MpicollError
    (a RuntimeError) on a rank that is excluded.
    """
    where = "shrink_group"
    old = _member(group, where)
    if not isinstance(ranks_to_exclude, list):
        raise ArgumentTypeError(
            f"{where}: ranks_to_exclude: expected a list, got {type(ranks_to_exclude).__name__}"
        )
    if not ranks_to_exclude:
        raise ArgumentError(f"{where}: ranks_to_exclude: expected at least one rank")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ArgumentError(
            f"{where}: shrink_flags: expected SHRINK_DEFAULT or SHRINK_ABORT, got {shrink_flags}"
        )
    _refuse_options(where, pg_options)
    size = old.size()
    if size < 2:
        raise ArgumentError(f"{where}: a group of {size} cannot shrink")
    for rank in ranks_to_exclude:
        if not isinstance(rank, int):
            raise ArgumentTypeError(f"{where}: ranks_to_exclude: expected ints, got {rank!r}")
        if not 0 <= rank < size:
            raise ArgumentError(f"{where}: ranks_to_exclude: rank {rank} is not in 0 to {size - 1}")
    excluded = set(ranks_to_exclude)
    if len(excluded) != len(ranks_to_exclude) or len(excluded) == size:
        raise ArgumentError(
            f"{where}: ranks_to_exclude: each rank once and not all of them, got {ranks_to_exclude}"
        )
    if old.rank() in excluded:
        raise MpicollError(
            f"{where}: rank {old.rank()} is excluded and must not call; it may end by itself"
        )
    is_default = old is state.default
    staying = [rank for rank in range(size) if rank not in excluded]
    others = [one for one in state.groups.values() if one is not old]
    if is_default and others:
        warnings.warn(
            f"{where}: shrinking the default group ends {len(others)} other group(s): global ranks "
            "count anew",
            stacklevel=2,
        )
    old.splits += 1

    def make() -> ProcessGroup:
        return groups.create(
            old,
            staying,
            range(len(staying)) if is_default else [old.ranks[r] for r in staying],
            backend=old.backend,
            timeout=old.timeout,
            name=f"{old.group_name}:shrunk:{old.splits}",
            description="default:shrunken" if is_default else f"{old.group_name}:shrunk",
        )

    made: ProcessGroup = (
        make() if shrink_flags == SHRINK_ABORT else execute.in_order(old, where, make)
    )
    for one in [*others, old] if is_default else [old]:
        if shrink_flags == SHRINK_ABORT:
            one.close()
            del state.groups[one.group_name]
        else:
            _end(one)
    if is_default:
        state.default = made
    return made
