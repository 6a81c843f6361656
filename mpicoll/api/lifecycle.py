"""The beginning and the end: init_process_group to destroy_process_group."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpicoll import communicators, control_messages, launch, settings
from mpicoll.api import windows
from mpicoll.core import backends, groups
from mpicoll.core import reproducible as levels
from mpicoll.core.backends import Backend
from mpicoll.core.groups import GroupMember, ProcessGroup, default_group, state
from mpicoll.core.indices import check_index
from mpicoll.core.work import parse_timeout
from mpicoll.dispatch import point_to_point
from mpicoll.dispatch.agreement import agree, find_facts
from mpicoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    DistBackendError,
    LaunchError,
    MismatchError,
    MpicollError,
    NotInitializedError,
    UnsupportedError,
)
from mpicoll.failures import lost_ranks, monitor_client, rank_status
from mpicoll.failures.termination import end_job
from mpicoll.failures.watchdog import Watchdog
from mpicoll.launch.exit_hooks import exit_code, install_in_rank, keep_exit_code
from mpicoll.launch.serialized_mpi import plain
from mpicoll.output import write_lines

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "abort",
    "abort_group",
    "begin",
    "begin_again",
    "close_group",
    "destroy_process_group",
    "get_backend",
    "get_backend_config",
    "get_node_local_rank",
    "get_pg_count",
    "init_process_group",
    "is_initialized",
    "met_elsewhere",
    "node_size",
    "resolve_member",
]

#: Seconds after which an operation has failed, unless init_process_group says otherwise.
DEFAULT_TIMEOUT = 1800.0
#: Seconds that a destroy gives work that other ranks have not joined.
_LAST_CHANCE = 5.0
#: Seconds that a thread without work needs to end, with plenty to spare.
_A_MOMENT = 0.5

_watchdog: Watchdog | None = None
#: Rank on the node and number of ranks on it, known from init on.
_node: tuple[int, int] | None = None
#: The name of the default group as init_process_group makes it, and whether the ranks have found
#: each other by an init_method, or by torch's store.
_name, _met_elsewhere = "0", False


def is_initialized() -> bool:
    """Check whether there is a default process group.

    Returns True between init_process_group and destroy_process_group.
    """
    return state.default is not None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Find this process's rank among those on its node.

    fallback_rank: returned if neither LOCAL_RANK nor a launcher's variable is set.

    Returns the rank: of LOCAL_RANK, else of the launcher's own variable, else fallback_rank, else,
    once there is a process group, of MPI.

    Raises MpicollError (a RuntimeError) if none of them is known.
    """
    known = launch.find_local_rank()
    if known is not None:
        return known
    if fallback_rank is not None:
        return check_index(fallback_rank, "get_node_local_rank: fallback_rank")
    if _node is not None:
        return _node[0]
    raise MpicollError(
        "get_node_local_rank: neither LOCAL_RANK nor a launcher's variable is set; call "
        "init_process_group first or give fallback_rank"
    )


def get_backend(group: ProcessGroup | None = None) -> Backend:
    """Get the backend that was asked for.

    group: the process group, None for the default group.

    Returns its name as a Backend, in lower case.

    Raises NotInitializedError (a ValueError) before init_process_group and ArgumentError (a
    ValueError) on a rank outside the group.
    """
    return Backend(resolve_member(group, "get_backend").backend)


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Get the backend of each kind of device.

    group: the process group, None for the default group.

    Returns text such as "cpu:mpi,cuda:mpi".

    Raises NotInitializedError (a ValueError) before init_process_group and ArgumentError (a
    ValueError) on a rank outside the group.
    """
    backend = resolve_member(group, "get_backend_config").backend
    return backend if ":" in backend else f"cpu:{backend},cuda:{backend}"


def get_pg_count() -> int:
    """Count the process groups that are alive on this rank.

    Returns the number, 0 before init_process_group.
    """
    return len(state.groups)


def resolve_member(group: object, where: str) -> ProcessGroup:
    """Return the group that an argument names; raise ArgumentError if this rank is not in it."""
    default_group()
    found = groups.resolve(group)
    if found is None or found.closed is not None:
        raise ArgumentError(f"{where}: {group!r} is not a group that this rank is in")
    return found


def node_size() -> int:
    """Return the number of ranks on this rank's node, between init and destroy."""
    assert _node is not None
    return _node[1]


# --- the beginning ------------------------------------------------------------------------------


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: object = None,
    group_name: str = "",
    pg_options: object = None,
    device_id: object = None,
    _ranks: list[int] | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    reproducible: str | None = None,
) -> AbstractContextManager[ProcessGroup]:
    """Start MPI and make the default group of all ranks. Every rank calls.

    backend: "mpi", where None; "mpicoll" is the same; "gloo" and "nccl" are names under which
        existing scripts run over MPI.
    init_method: how the ranks find each other.
        "mpi://": rank and size are MPI's own, for jobs that mpirun or srun starts.
        "env://", "tcp://HOST:PORT", "file:///PATH": each process is given its rank and the world
        size, by RANK and WORLD_SIZE or by the arguments below.
        None: "mpi://" under a launcher of MPI, else "env://" where RANK and WORLD_SIZE are set
        (torchrun sets them), else this process is a job of its own.
    timeout: seconds or a timedelta after which an operation has failed, this one included; half an
        hour where None.
    world_size: number of ranks, -1 if not given; with "mpi://" compared with MPI's own.
    rank: this process's rank, -1 if not given; with "mpi://" compared with MPI's own.
    store: None; MPI is the rendezvous.
    group_name: a name for the default group.
    pg_options: ignored with a warning.
    device_id: a GPU of this process, such as 1 or "cuda:1"; checked, otherwise unused.
    _ranks: None.
    comm: a communicator of mpi4py: its ranks, numbered as it numbers them, are all ranks, and no
        others call; None for all that MPI has started. mpicoll makes its own of the same ranks,
        and never frees this one.
    reproducible: "order": reductions give the same bits whatever the size, the route and the nodes;
        "exact": sums and averages also for any order and number of ranks; the same on all ranks.
        None: what MPICOLL_REPRODUCIBLE says.

    Returns a context manager, which may be ignored: ``with init_process_group() as group:``
    destroys all groups when the block ends; after an exception without waiting for other ranks.

    Raises ArgumentError (a ValueError) when called twice and for an impossible value,
    ArgumentTypeError (a TypeError) for a timeout, rank, size or comm of the wrong type,
    UnsupportedError (a ValueError) for store, _ranks and another init_method, LaunchError (a
    ValueError) where launcher, arguments and MPI disagree, MismatchError where ranks disagree about
    reproducible, and CollectiveTimeoutError where ranks do not come.
    """
    where = "init_process_group"
    if state.forked:
        default_group()
    if state.default is not None:
        raise ArgumentError(f"{where}: the default process group exists already")
    given, is_known = None, False
    try:
        if comm is not None:
            comm = communicators.checked_communicator(comm, f"{where}: comm")
            if init_method not in (None, "mpi://"):
                raise ArgumentError(
                    f"{where}: init_method: the ranks of comm have found each other; expected None "
                    f"or 'mpi://', got {init_method!r}"
                )
            init_method = "mpi://"
        is_known = True
        given = launch.read_rank(
            init_method, _index("rank", rank), _index("world_size", world_size)
        )
        limit = parse_timeout(timeout, DEFAULT_TIMEOUT, where)
        wait = DEFAULT_TIMEOUT if limit is None else limit
        rendezvous = launch.find_rendezvous(init_method, given, wait)
        chosen = backends.parse_backend(backend, where)
        level = levels.parse(reproducible, None, where)
        if store is not None or _ranks is not None:
            raise UnsupportedError(f"{where}: store and _ranks have no use: MPI is the rendezvous")
        backends.warn_about_options(pg_options, where)
        backends.check_device(device_id, where)
    except Exception as error:
        if is_known:  # which ranks wait for this one
            launch.tell_failure(error, init_method, given, comm)
        raise
    values = {"rank": given.rank, "world_size": given.world_size}
    expected = {what: (given.names[what], n) for what, n in values.items() if n is not None}
    begin(
        chosen,
        limit,
        group_name or "0",
        rendezvous=rendezvous,
        expected=expected,
        comm=comm,
        reproducible=level,
    )
    return _until_the_end()


def begin(
    backend: str,
    limit: float | None,
    name: str,
    *,
    rendezvous: launch.Rendezvous | None = None,
    expected: dict[str, tuple[str, int]] | None = None,
    comm: MPI.Intracomm | None = None,
    reproducible: str | None = None,
) -> ProcessGroup:
    """Start MPI and create the default group of all ranks.

    limit:    seconds after which an operation has failed.
    meeting:  where ranks without a launcher of MPI find each other.
    expected: without a meeting, the rank and size that were given, and the names of their sources.
    comm:     the program's communicator, if its ranks are all ranks.
    reproducible: the group's level; None is what the environment says.

    If a local step fails on a rank, raises its exception on that rank, and a LaunchError that
    quotes the exception on every other rank.
    """
    global _watchdog, _name, _met_elsewhere
    _name, _met_elsewhere = name, rendezvous is not None
    given = launch.join(rendezvous, limit) if comm is None else comm
    has_begun, facts = False, dict[str, str]()

    def prepare(world: MPI.Intracomm) -> None:
        """Run the local steps. If one fails, all ranks raise."""
        global _watchdog
        settings.check()
        facts.update(find_facts())  # loads all routes
        if rendezvous is None:
            if given is None and (expected or {}).get("world_size", ("", -1))[1] != 1:
                launch.check_world(world.Get_size())
            whose = "MPI" if given is None else "comm"
            _check_expected(expected or {}, world.Get_rank(), world.Get_size(), whose)
        session = launch.current()
        if session is not None:
            session.check()
            session.send("busy" if world.Get_size() == session.size else "busy part")
        if _watchdog is not None:  # of a group that was destroyed on the way of an exception
            _watchdog.remove()
        _watchdog = Watchdog(_close_quietly)  # from here on a rank that is lost ends the others
        launch.call_before_finalize(_finalizing)

    try:
        with launch.start(rendezvous, limit, given, prepare) as world:
            has_begun = True
            level = levels.from_environment() if reproducible is None else reproducible
            _renumber(world)
            agree(world, facts)
            lost_ranks.start(world)
            levels.agree(world, level, "init_process_group")
            inner, messages = (
                communicators.create_private(world),
                communicators.create_private(world),
            )
            assert _watchdog is not None
            _discover_node(inner, _watchdog)
            ranks = range(inner.Get_size())
            is_lent = given is not None or communicators.spans_world(plain(world))
            lent = plain(world) if is_lent else None  # else it is freed as soon as this block ends
            made = ProcessGroup(
                inner, messages, ranks, backend, limit, name, "default_pg", lent, level
            )
            groups.register(made)
            state.set_default(made)
    except BaseException:
        lost_ranks.stop()
        if _watchdog is not None:
            _watchdog.remove()
            _watchdog = None
        install_in_rank()  # the error may end this process while other ranks wait for it
        session = launch.current()
        if session is not None and not has_begun:  # all ranks have raised, and none needs this one
            session.send("free")
        raise
    return made


#: The ranks in MPI_COMM_WORLD of the latest default group, in its order.
_members: list[int | None] = []


def _renumber(world: MPI.Intracomm) -> None:
    """Leave the node monitor if the new group numbers a process differently. All ranks call."""
    global _members
    from mpi4py import MPI

    members = list(communicators.translate_ranks(plain(world), MPI.COMM_WORLD))
    has_changed = array("i", [bool(_members) and members != _members])
    world.Allreduce(MPI.IN_PLACE, [has_changed, MPI.INT], MPI.MAX)
    if has_changed[0]:
        monitor_client.renew()
    _members = members


def met_elsewhere() -> str:
    """Return how the ranks have found each other, if not by MPI, "" if so."""
    return "its ranks met by an init_method or by torch.distributed" if _met_elsewhere else ""


def begin_again(comm: MPI.Intracomm) -> ProcessGroup:
    """End all groups, and make the default group of all ranks anew, with others among them.

    comm: of all ranks, in their order. Those that are new call ``begin``.
    """
    old = default_group()
    for group in reversed(list(state.groups)):
        close_group(group)
    _reset()
    monitor_client.renew()
    _members.clear()
    return begin(old.backend, old.timeout, _name, comm=comm, reproducible=old.reproducible)


def _discover_node(comm: MPI.Intracomm, watchdog: Watchdog) -> None:
    """Find the ranks on this node, start its guard, set the variables that libraries read, and get
    rank 0's table of routes.
    """
    global _node
    from mpi4py import MPI

    from mpicoll.routes import tuning, tuning_files

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    _node = (node.Get_rank(), node.Get_size())
    monitor_client.start(comm, node, watchdog.native_id)
    node.Free()
    host = launch.master_address(comm)
    vendor, version = MPI.get_vendor()

    def choose() -> tuple[Any, Any]:
        if comm.Get_rank() != 0:
            return None, None
        with socket.create_server(("", 0)) as probe:  # the port is free now, if not for ever
            port = os.environ.get("MASTER_PORT", probe.getsockname()[1])
        return port, tuning_files.read(f"{vendor} {'.'.join(map(str, version))}")

    port, table = control_messages.bcast(
        comm, launch.run_on_each(comm, choose), 0, tuple[int | str, tuning_files.Found]
    )
    # The variables describe the whole job.
    if _met_elsewhere or communicators.spans_world(plain(comm)) or launch.has_grown():
        launch.fill_environment(comm.Get_rank(), comm.Get_size(), *_node, host, port)
    tuning.job.table = tuning_files.build_table(vendor == "Open MPI", *table)


def _index(what: str, value: object) -> int | None:
    """Return a rank or size argument, None for -1; raise ArgumentTypeError for no integer."""
    number = check_index(value, f"init_process_group: {what}")
    return None if number == -1 else number


def _check_expected(expected: dict[str, tuple[str, int]], rank: int, size: int, whose: str) -> None:
    """Raise LaunchError if rank and size, of MPI or of comm, are not as expected."""
    for what, own in (("rank", rank), ("world_size", size)):
        name, value = expected.get(what, ("", own))
        if value != own:
            raise LaunchError(
                f"init_process_group: {name}{value} disagrees with {whose}'s own {what}, {own} "
                f"({whose} sees rank {rank} of {size}); leave it out, or start the job so that "
                "both agree"
            )


# --- the end ------------------------------------------------------------------------------------


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End a group, and with the default group all of them. Every member calls.

    group: the process group, None for the default group.

    Waits for pending work and cancels receives whose messages were not sent.

    Raises NotInitializedError (a ValueError) where there is no default group, ArgumentError (a
    ValueError) for a group that is not alive, and one of which this thread is in the middle of a
    call, as in a signal's handler, and CollectiveTimeoutError where other ranks have not
    joined pending work within seconds. Once all groups have ended, raises MismatchError where
    another rank has made different calls after the last that were compared, or more of them, and
    the error of calls on devices that have ended there without results, such as a
    CollectiveTimeoutError, if no call has raised it.
    """
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        return
    default = default_group()
    chosen = default if group is None else group
    if not isinstance(chosen, ProcessGroup) or chosen.closed is not None:
        raise ArgumentError(f"destroy_process_group: {group!r} is not a group that is alive")
    for one in state.groups if chosen is default else (chosen,):
        one.check_outside("destroy_process_group")
    if chosen is not default:
        close_group(chosen)
        _raise_pending_errors([chosen])
        return
    until = time.monotonic() + rank_status.DESTROY_TIMEOUT_S
    living = [*(one for one in reversed(list(state.groups)) if one is not default), default]
    wrong = [close_group(one, until=until) for one in living]
    _forget_groups()
    if any(wrong):
        raise MismatchError(f"destroy_process_group: {' | '.join(filter(None, wrong))}")
    _raise_pending_errors(living)


def _raise_pending_errors(groups: Sequence[ProcessGroup]) -> None:
    """Raise the error of calls that devices have ended without results, if none has raised it."""
    found = [_found_at_end.pop(group) for group in groups if group in _found_at_end]
    if found:
        raise found[0]


@contextmanager
def _until_the_end() -> Iterator[ProcessGroup]:
    """Return what init_process_group returns. It does nothing until it is entered."""
    try:
        yield default_group()
    except BaseException:
        # Other ranks may be anywhere, and what this rank has begun must not delay its error. They
        # are given that it makes no more calls; if the program goes on, nothing else would tell
        # them.
        if state.default is not None:
            for group in state.groups:
                group.finish(_A_MOMENT)  # what all ranks have joined
            # At once before their devices are told the same: others look there first.
            for group in state.groups:
                rank_status.send(group, rank_status.EXITING)
            abort(state.default)
        raise
    if state.default is not None:  # the program may have done it
        destroy_process_group()


def _forget_groups() -> None:
    """Reset what is known of groups once there is none, and need no other rank any more."""
    global _watchdog
    _reset()
    if sys.exc_info()[1] is not None:
        return  # it may end this process yet, and then the others have to hear of it
    _sign_off()
    if _watchdog is not None:
        _watchdog.remove()
        _watchdog = None


def _reset() -> None:
    """Reset what is known of groups once there is none."""
    global _node
    state.reset()
    _node = None
    point_to_point.stop_polling()
    lost_ranks.stop()


def _sign_off() -> None:
    """Tell the server, if there is one, and the guard that no other rank needs this one."""
    monitor_client.sign_off()
    session = launch.current()
    if session is not None:
        session.send("free")


def close_group(
    group: ProcessGroup, limit: float = _LAST_CHANCE, until: float | None = None
) -> str:
    """Wait for what is pending in a group, free its communicators and forget it.

    until: given when all groups end: compare the ranks' calls once more, waiting for the others
           until then, by time.monotonic. Returns how they differ, "" if they do not.

    Work whose wait has timed out is not waited for again: it is left pending with the group.
    """
    if lost_ranks.is_fault_tolerant() and lost_ranks.check(group):
        abort_group(group, "has lost a rank")
        if launch.skip_finalize():
            _leave_out_mpi()
        return ""
    if group.error or any(work.has_timed_out for work in group.pending):
        limit = _A_MOMENT
    if not group.finish(limit):
        if group.error or all(work.has_timed_out for work in group.pending):
            abort_group(group, "ended while it was pending, beyond its timeout")
            return ""
        raise CollectiveTimeoutError(
            f"destroy_process_group: {group.group_name}: asynchronous work is still pending after "
            f"{limit:g} s; another rank did not make the call. Wait for every Work before the end"
        )
    group.check_device_errors(wait=True)
    if group.pending_error is not None:  # destroy_process_group raises it, not the watchdog
        _found_at_end[group], group.pending_error = group.pending_error, None
    if group.error:
        limit = _A_MOMENT
    if not group.error and sys.exc_info()[1] is None:
        windows.free_all(group)
    if group.error:
        for work in list(group.in_flight):
            work.abandon(group.failure())
    else:
        point_to_point.drain(group, limit)
    try:
        if group.error:
            group.resources.leave()  # nothing waits for ranks that have left
        group.resources.close(limit)
    finally:
        clean, wrong = (not group.error, "")
        if until is not None and clean and sys.exc_info()[1] is None:
            clean, wrong = rank_status.compare_at_destroy(group, until)
        rank_status.receive(group)
        with rank_status.lock:  # the watchdog may be looking at the group
            group.close()
            state.groups.remove(group)
            if clean:
                group.free()
            else:  # a message that is still under way must not meet a new group's communicator
                _not_freed.append(group)
    return wrong


#: Of groups that end now, why devices have ended calls without results, if no call has raised it.
_found_at_end: dict[ProcessGroup, DistBackendError] = {}
#: Groups whose communicators messages may still come to.
_not_freed: list[ProcessGroup] = []


def abort(group: ProcessGroup) -> None:
    """End a group without waiting for what is pending: waiting callers get an error. With the
    default group all groups end.
    """
    chosen = list(state.groups) if group is state.default else [group]
    for one in reversed(chosen):
        abort_group(one)
    if group is state.default:
        _forget_groups()


def _fail_pending(group: ProcessGroup, why: str) -> None:
    """End what is pending in a group with an error."""
    error = DistBackendError(f"process group {group.group_name!r} {why}")
    for work in [*group.pending, *group.in_flight]:
        work.abandon(error)


def abort_group(group: ProcessGroup, why: str = "was aborted") -> None:
    """End a group without waiting for pending work, whose waiters get an error."""
    group.close()  # before looking for what is under way: nothing begins any more
    _fail_pending(group, why)
    _drop(group)


def _drop(group: ProcessGroup) -> None:
    """Forget a group without waiting for what is pending in it.

    What is stuck stays inside MPI, which then cannot be finalised: the process ends without.
    """
    group.resources.abandon()
    group.close()
    state.groups.remove(group)
    if not group.finish(_A_MOMENT):
        launch.skip_finalize()
        # Instead of finalising MPI: what is stuck may wake up while the interpreter ends.
        _leave_out_mpi("work that was given up is still inside MPI; MPI is not finalised")


def _leave_out_mpi(why: str = "") -> None:
    """Make the process end before mpi4py can finalise MPI."""
    keep_exit_code()
    atexit.register(_end_without_mpi, why)


def _end_without_mpi(why: str) -> None:
    if why:
        write_lines(f"mpicoll: {why}")
    sys.stdout.flush()
    _sign_off()
    code = exit_code()
    # An exception that has ended the program was printed, and left here.
    os._exit(int(hasattr(sys, "last_value")) if code is None else code)


def _close_quietly() -> None:
    """End the groups of a program that did not call destroy_process_group.

    Nothing collective happens here: other ranks may still be busy, and MPI_Finalize waits for them.
    """
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    living = list(state.groups)
    for group in living:
        if group.error:
            continue  # its calls have raised why
        try:
            done = group.finish(_LAST_CHANCE)
            point_to_point.drain(group, _LAST_CHANCE)
            group.check_device_errors(wait=True)
        except MpicollError:
            done = False
        if not done:
            write_lines(
                f"mpicoll: rank {group.rank()} of group {group.group_name} ends with work pending "
                "that other ranks have not joined; ending the job"
            )
            end_job(1)
    pending_error = [group.pending_error for group in living if group.pending_error is not None]
    if pending_error:
        write_lines(f"mpicoll: {pending_error[0]}; ending the job")
        end_job(1)
    for group in living:
        rank_status.send(group, rank_status.EXITING)
    point_to_point.stop_polling()
    _sign_off()
    if watchdog is not None:
        watchdog.remove()


def _finalizing() -> None:
    """End all groups because the program finalises MPI itself."""
    if _watchdog is None:
        return  # nothing was begun, or all of it has ended
    _close_quietly()
    for group in state.groups:
        group.close(NotInitializedError)
    state.finalize()
