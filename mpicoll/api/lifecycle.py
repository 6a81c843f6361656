"""Start and end of process groups: init_process_group and destroy_process_group.

group: the process group; None is the default group.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpicoll import communicators, control_messages, settings
from mpicoll.api import backends
from mpicoll.api.backends import Backend
from mpicoll.core import groups
from mpicoll.core import reproducible as levels
from mpicoll.core.groups import GroupMember, Options, ProcessGroup, default_group, state
from mpicoll.core.indices import check_index
from mpicoll.core.progress import poller
from mpicoll.core.work import THREAD_EXIT_TIMEOUT_S, parse_timeout
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
from mpicoll.failures import flight_record, lost_ranks, monitor_client, rank_status
from mpicoll.failures.watchdog import Watchdog, end_job
from mpicoll.launch.environment import check_world, fill_environment
from mpicoll.launch.exit_hooks import exit_code
from mpicoll.launch.launchers import find_local_rank
from mpicoll.launch.rendezvous import Rendezvous, find_rendezvous, read_rank
from mpicoll.launch.roll_call import run_on_each
from mpicoll.launch.session import current_session
from mpicoll.launch.spawned_ranks import has_grown, join_grown_job
from mpicoll.launch.world import (
    call_before_finalize,
    master_address,
    notify_failure,
    skip_finalize,
    start_mpi,
)
from mpicoll.output import write_lines
from mpicoll.serialized_mpi import unwrap

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "destroy_process_group", "get_backend", "get_backend_config", "get_node_local_rank",
    "get_pg_count", "init_process_group", "is_initialized",
]  # fmt: skip

#: Default timeout of an operation.
DEFAULT_TIMEOUT_S = 1800.0
#: Time that a destroy waits for work that other ranks have not joined.
_DESTROY_TIMEOUT_S = 5.0

_watchdog: Watchdog | None = None
#: Rank on the node and number of ranks on it, known after init.
_node: tuple[int, int] | None = None
#: Name of the default group, and whether the ranks met through an init_method or torch's store.
_name, _met_elsewhere = "0", False


def is_initialized() -> bool:
    """Return True between init_process_group and destroy_process_group."""
    return state.default is not None


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return the rank of this process among the ranks of its node.

    fallback_rank: returned if neither LOCAL_RANK nor a variable of the launcher is set. None: the
        rank by MPI, after init_process_group.

    Raises MpicollError (a RuntimeError) if none is known.
    """
    known = find_local_rank()
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
    """Return the name of the backend that was requested, as a Backend in lower case.

    Raises NotInitializedError (a ValueError) before init_process_group and ArgumentError (a
    ValueError) on a rank outside the group.
    """
    return Backend(groups.find_open(group, "get_backend").backend)


def get_backend_config(group: ProcessGroup | None = None) -> str:
    """Return the backend of each device type, such as "cpu:mpi,cuda:mpi".

    Raises the errors of get_backend: NotInitializedError and ArgumentError.
    """
    backend = groups.find_open(group, "get_backend_config").backend
    return backend if ":" in backend else f"cpu:{backend},cuda:{backend}"


def get_pg_count() -> int:
    """Return the number of open process groups on this rank, 0 before init_process_group."""
    return len(state.groups)


def node_size() -> int:
    """Return the number of ranks on this node, between init and destroy."""
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
    wire: str | None = None,
) -> AbstractContextManager[ProcessGroup]:
    """Start MPI and create the default group of all ranks. Every rank calls it.

    backend: "mpi" (default) or "mpicoll". "gloo" and "nccl" are accepted so that existing scripts
        run unchanged, over MPI.
    init_method: how the ranks find each other.
        "mpi://": MPI provides rank and size, for jobs that mpirun or srun starts.
        "env://", "tcp://HOST:PORT", "file:///PATH": the caller provides rank and world size, by
        RANK and WORLD_SIZE or as arguments.
        None: "mpi://" under an MPI launcher; else "env://" if RANK and WORLD_SIZE are set, as by
            torchrun; else a job of one rank.
    timeout: seconds or a timedelta after which an operation fails, including this one. None is 30
        minutes.
    world_size: number of ranks, -1 if not given. With "mpi://", it must match MPI.
    rank: rank of this process, -1 if not given. With "mpi://", it must match MPI.
    store: not supported; must be None.
    group_name: name of the default group.
    pg_options: ignored with a warning.
    device_id: ignored.
    _ranks: not supported; must be None.
    comm: a communicator of mpi4py whose ranks become the ranks of the job, in the same order. Only
        these ranks call. None is all ranks of MPI. mpicoll duplicates the communicator and never
        frees it.
    reproducible: the same on all ranks. None is the value of MPICOLL_REPRODUCIBLE.
        "order": a reduction gives the same bits for every size, route and placement on nodes.
        "exact": also, sums and averages give the same bits for every order and number of ranks.
    wire: the same on all ranks. None is the value of MPICOLL_WIRE, by default "float32".
        "bfloat16": sums and averages of float32 cross the network between nodes as bfloat16, with
        half the bytes, and add up in float32. Not in shared memory, and not with reproducible.

    Returns a context manager, which may be ignored. ``with init_process_group() as group:``
    destroys all groups at the end of the block. After an exception it does not wait for other
    ranks.

    Raises ArgumentError (a ValueError) when called twice or for an invalid value; ArgumentTypeError
    (a TypeError) for a timeout, rank, size or comm of the wrong type; UnsupportedError (a
    ValueError) for store, _ranks or an unknown init_method; LaunchError (a ValueError) if launcher,
    arguments and MPI disagree; MismatchError if reproducible or wire differs between ranks;
    CollectiveTimeoutError if ranks are missing.
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
                    f"{where}: init_method: expected None or 'mpi://' together with comm, got "
                    f"{init_method!r}"
                )
            init_method = "mpi://"
        is_known = True
        rank = check_index(rank, f"{where}: rank")
        world_size = check_index(world_size, f"{where}: world_size")
        given = read_rank(
            init_method, None if rank == -1 else rank, None if world_size == -1 else world_size
        )
        limit = parse_timeout(timeout, DEFAULT_TIMEOUT_S, where)
        wait = DEFAULT_TIMEOUT_S if limit is None else limit
        rendezvous = find_rendezvous(init_method, given, wait)
        chosen = backends.parse_backend(backend, where)
        reductions = levels.parse(reproducible, wire, levels.DEFAULTS, where)
        if store is not None or _ranks is not None:
            raise UnsupportedError(
                f"{where}: store and _ranks are not supported, because ranks connect through "
                "MPI; omit them"
            )
        backends.warn_about_options(pg_options, where)
    except Exception as error:
        if is_known:  # else it is unknown which ranks wait for this one
            notify_failure(error, init_method, given, comm)
        raise
    values = {"rank": given.rank, "world_size": given.world_size}
    expected = {what: (given.names[what], n) for what, n in values.items() if n is not None}
    begin(chosen, limit, group_name or "0", rendezvous, expected, comm, reductions)
    return _until_the_end()


def begin(
    backend: str,
    limit: float | None,
    name: str,
    rendezvous: Rendezvous | None = None,
    expected: dict[str, tuple[str, int]] | None = None,
    comm: MPI.Intracomm | None = None,
    reductions: levels.Reductions = levels.DEFAULTS,
) -> ProcessGroup:
    """Start MPI and create the default group of all ranks.

    limit:      seconds after which an operation fails.
    rendezvous: store through which ranks without an MPI launcher find each other.
    expected:   without a rendezvous: rank and size that were given, each with its source.
    comm:       communicator of the program, if its ranks are the ranks of the job.
    reductions: options of the group. None is the value of the environment.

    If a local step fails on a rank, raises its exception on that rank, and a LaunchError that
    quotes the exception on every other rank.
    """
    global _name, _met_elsewhere
    _name, _met_elsewhere = name, rendezvous is not None
    given = join_grown_job(rendezvous, limit) if comm is None else comm
    has_begun, facts = False, dict[str, str]()

    def prepare(world: MPI.Intracomm) -> None:
        """Run the local steps. If one fails, all ranks raise."""
        global _watchdog
        nonlocal reductions
        settings.check()
        level, wire = settings.REPRODUCIBLE.value() or None, settings.WIRE.value() or "float32"
        reductions = levels.parse(*reductions, levels.Reductions(level, wire), "init_process_group")
        facts.update(find_facts())
        if rendezvous is None:
            if given is None and (expected or {}).get("world_size", ("", -1))[1] != 1:
                check_world(world.Get_size())
            whose = "MPI" if given is None else "comm"
            _check_expected(expected or {}, world.Get_rank(), world.Get_size(), whose)
        session = current_session()
        if session is not None:
            session.check()
            session.send("busy" if world.Get_size() == session.size else "busy part")
        _remove_watchdog()  # left by a group that an exception has destroyed
        _watchdog = Watchdog(_close_quietly)  # from now on, a lost rank ends the job
        call_before_finalize(_finalizing)

    try:
        with start_mpi(rendezvous, limit, given, prepare) as world:
            has_begun = True
            agree(world, facts)
            levels.agree(world, reductions, "init_process_group")
            inner = communicators.create_private(world)
            messages = communicators.create_private(world)
            assert _watchdog is not None
            _discover_node(inner, _watchdog)
            ranks = range(inner.Get_size())
            is_lent = given is not None or communicators.spans_world(unwrap(world))
            lent = unwrap(world) if is_lent else None  # else it is freed at the end of this block
            options = Options(backend, limit, reductions)
            made = ProcessGroup(inner, messages, ranks, options, name, "default_pg", lent)
            groups.register(made)
            state.set_default(made)
    except BaseException:
        _remove_watchdog()
        session = current_session()
        if session is not None and not has_begun:  # all ranks have raised
            session.send("free")
        raise
    return made


def met_elsewhere() -> str:
    """Return a phrase saying that the ranks did not connect through MPI, or "" if they did."""
    return "its ranks connected by an init_method or torch.distributed" if _met_elsewhere else ""


def begin_again(comm: MPI.Intracomm) -> ProcessGroup:
    """End all groups, and create a new default group that includes new ranks.

    comm: communicator of all ranks, with new ranks last. The new ranks call ``begin``.
    """
    old = default_group()
    for group in reversed(list(state.groups)):
        close_group(group)
    _reset()
    return begin(old.backend, old.timeout, _name, comm=comm, reductions=old.reductions)


def _discover_node(comm: MPI.Intracomm, watchdog: Watchdog) -> None:
    """Find the ranks on this node, start the node monitor, set the environment variables that
    libraries read, and get the routing table of rank 0.
    """
    global _node
    from mpi4py import MPI

    from mpicoll.routes import tuning, tuning_files

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    _node = (node.Get_rank(), node.Get_size())
    is_one_node = node.Get_size() == comm.Get_size()
    monitor_client.start(comm, node, watchdog.native_id)
    node.Free()
    vendor, version = MPI.get_vendor()

    def read() -> tuple[Any, ...]:
        if comm.Get_rank() != 0:
            return ()
        host = master_address(is_one_node)
        with socket.create_server(("", 0)) as probe:  # a port that is free now
            port = os.environ.get("MASTER_PORT", probe.getsockname()[1])
        found = tuning_files.read(f"{vendor} {'.'.join(map(str, version))}")
        return host, port, settings.CHOOSE.value(), found

    host, port, tuning.job.choose, table = control_messages.bcast(
        comm, run_on_each(comm, read), 0, tuple[str, int | str, str, tuning_files.Found]
    )
    # The variables describe the whole job.
    if _met_elsewhere or communicators.spans_world(unwrap(comm)) or has_grown():
        fill_environment(comm.Get_rank(), comm.Get_size(), *_node, host, port)
    tuning.job.table = tuning_files.build_table(*table)


def _check_expected(expected: dict[str, tuple[str, int]], rank: int, size: int, whose: str) -> None:
    """Raise LaunchError if rank and size, of MPI or of comm, are not as expected."""
    for what, own in (("rank", rank), ("world_size", size)):
        name, value = expected.get(what, ("", own))
        if value != own:
            raise LaunchError(
                f"init_process_group: {name}{value} disagrees with {whose}'s own {what}, {own} "
                f"({whose} reports rank {rank} of {size}); omit {name.rstrip('=')}, or start the "
                "job so that both agree"
            )


# --- the end ------------------------------------------------------------------------------------


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """End a group. For the default group, end all groups. Every member calls it.

    Waits for pending work and cancels receives without a matching send.

    Raises NotInitializedError (a ValueError) before init_process_group; ArgumentError (a
    ValueError) for a group that has ended, or from a signal handler that interrupted a call of the
    group; CollectiveTimeoutError if pending work does not complete within seconds because other
    ranks did not join it. When all groups have ended, also raises MismatchError if ranks made
    different calls or a different number of them, and any device error that no call has raised.
    """
    if isinstance(group, int) and group == GroupMember.NON_GROUP_MEMBER:
        return
    default = default_group()
    chosen = default if group is None else group
    if not isinstance(chosen, ProcessGroup) or chosen.closed is not None:
        raise ArgumentError(f"destroy_process_group: {group!r} is not an open group")
    for one in state.groups if chosen is default else (chosen,):
        one.check_outside("destroy_process_group")
    if chosen is not default:
        ending = [chosen]
        close_group(chosen)
    else:
        until = time.monotonic() + rank_status.DESTROY_TIMEOUT_S
        ending = [*(one for one in reversed(list(state.groups)) if one is not default), default]
        wrong = [close_group(one, until=until) for one in ending]
        _forget_groups()
        if any(wrong):
            raise MismatchError(f"destroy_process_group: {' | '.join(filter(None, wrong))}")
    pending_errors = [_found_at_end.pop(one) for one in ending if one in _found_at_end]
    if pending_errors:
        raise pending_errors[0]


@contextmanager
def _until_the_end() -> Iterator[ProcessGroup]:
    """Return the context manager of init_process_group. It does nothing until it is entered."""
    try:
        yield default_group()
    except BaseException:
        # Do not wait for other ranks, which may be in any call: that would delay the error. Notify
        # them that this rank makes no more calls: nothing else would, if the program goes on.
        if state.default is not None:
            flight_record.notify()
            for group in state.groups:
                group.finish(THREAD_EXIT_TIMEOUT_S)  # work that all ranks have joined
            # Before the devices are notified: other ranks check status messages first.
            for group in state.groups:
                rank_status.send(group, rank_status.EXITING)
            abort(state.default)
        raise
    if state.default is not None:  # else the program has destroyed it
        destroy_process_group()


def _forget_groups() -> None:
    """Reset module state after all groups have ended, when no other rank is needed any longer."""
    _reset()
    if sys.exc_info()[1] is not None:
        return  # the exception may still end this process, and then other ranks must be notified
    _sign_off()
    _remove_watchdog()


def _remove_watchdog() -> None:
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    if watchdog is not None:
        watchdog.remove()


def _reset() -> None:
    global _node
    state.reset()
    _node = None
    poller.stop()


def _sign_off() -> None:
    """Notify the node monitor and the launch server, if any, that this rank is finished."""
    monitor_client.sign_off()
    session = current_session()
    if session is not None:
        session.send("free")


def close_group(group: ProcessGroup, until: float | None = None) -> str:
    """Wait for pending work of a group, free its communicators and remove it.

    until: given when all groups end: time (time.monotonic) until which to compare the calls of all
        ranks. Returns the mismatch, or "".

    Raises CollectiveTimeoutError if work is pending after _DESTROY_TIMEOUT_S; aborts the group
    instead if that work has timed out before, or if the group has failed or lost a rank.
    """
    if lost_ranks.is_fault_tolerant() and lost_ranks.check(group):
        abort_group(group, "has lost a rank")
        if skip_finalize():
            _leave_out_mpi()
        return ""
    is_late = group.error or any(work.has_timed_out for work in group.pending)
    limit = THREAD_EXIT_TIMEOUT_S if is_late else _DESTROY_TIMEOUT_S
    if not group.finish(limit):
        if group.error or all(work.has_timed_out for work in group.pending):
            abort_group(group, "ended while this call was pending, after its timeout")
            return ""
        raise CollectiveTimeoutError(
            f"destroy_process_group: {group.group_name}: timed out: async work is still pending "
            f"after {limit:g} s, because another rank did not make the call. Wait for every Work "
            "before destroying the group"
        )
    group.check_device_errors(wait=True)
    if group.pending_error is not None:  # destroy_process_group raises it
        _found_at_end[group], group.pending_error = group.pending_error, None
    if group.error:
        limit = THREAD_EXIT_TIMEOUT_S
    if not group.error and sys.exc_info()[1] is None:
        _free_windows(group)
    if group.error:
        for work in list(group.in_flight):
            work.abandon(group.failure())
    else:
        _end_messages(group, limit)
    try:
        if group.error:
            group.resources.leave()  # do not wait for ranks that have left
        group.resources.close(limit)
    finally:
        clean, wrong = not group.error, ""
        if until is not None and clean and sys.exc_info()[1] is None:
            clean, wrong = rank_status.compare_at_destroy(group, until)
        rank_status.receive(group)
        with rank_status.lock:  # the watchdog may be checking the group
            group.close()
            state.groups.remove(group)
            if clean and not group.expects_messages:
                group.free()
            else:  # a late message must not arrive in the communicator of a new group
                _not_freed.append(group)
    return wrong


def _run_in_order(*arguments: Any, **options: Any) -> Any:
    from mpicoll.dispatch import execute  # loads NumPy, which init_process_group does not need

    return execute.run_in_order(*arguments, **options)


groups.set_task_runner(_run_in_order)


def _free_windows(group: ProcessGroup) -> None:
    """Free the windows of a group that ends; every member calls it."""
    ending = [window for window in groups.windows if window.group is group]

    def free() -> None:
        for window in ending:
            window.free()

    if ending:
        _run_in_order(group, "destroy_process_group", free)


def _end_messages(group: ProcessGroup, limit: float) -> None:
    """End a group's pending messages: cancel receives, wait for sends.

    Raises CollectiveTimeoutError where a send is not received within ``limit`` seconds.
    """
    for work in list(group.in_flight):
        if work._receives:
            work.abandon(CollectiveTimeoutError(f"{work.description}: the group was destroyed"))
        elif not work._wait_finished(limit):
            raise CollectiveTimeoutError(
                f"{work.description}: timed out: the message was not received within {limit:g} s"
            )


#: Pending device errors of groups that are ending, until destroy_process_group raises them.
_found_at_end: dict[ProcessGroup, DistBackendError] = {}
#: Groups whose communicators may still receive messages.
_not_freed: list[ProcessGroup] = []


def abort(group: ProcessGroup) -> None:
    """End a group without waiting: pending calls raise. For the default group, end all groups."""
    chosen = list(state.groups) if group is state.default else [group]
    for one in reversed(chosen):
        abort_group(one)
    if group is state.default:
        _forget_groups()


def abort_group(group: ProcessGroup, why: str = "was aborted") -> None:
    """End a group without waiting for pending work, whose waiters get an error.

    A thread that is blocked in MPI stays there. MPI cannot be finalized, so the process exits
    without it.
    """
    group.close()  # first, so that no further call begins
    error = DistBackendError(f"process group {group.group_name!r} {why}")
    for work in [*group.pending, *group.in_flight]:
        work.abandon(error)
    group.resources.abandon()
    group.close()  # again, because a call of another thread may have ended since
    state.groups.remove(group)
    if not group.finish(THREAD_EXIT_TIMEOUT_S):
        skip_finalize()
        # A blocked thread may wake up while the interpreter ends.
        _leave_out_mpi("aborted work is still inside MPI; MPI is not finalized")


def _leave_out_mpi(why: str = "") -> None:
    """When the interpreter exits, end the process before mpi4py can finalize MPI."""
    atexit.register(_end_without_mpi, why)


def _end_without_mpi(why: str) -> None:
    if why:
        write_lines(f"mpicoll: {why}")
    sys.stdout.flush()
    _sign_off()
    code = exit_code()
    # sys.last_value is set if an exception has ended the program.
    os._exit(int(hasattr(sys, "last_value")) if code is None else code)


def _close_quietly() -> None:
    """End the groups of a program that did not call destroy_process_group.

    Makes no collective calls: other ranks may still be busy, and MPI_Finalize waits for them. Ends
    the job if work is still pending, or if there is a device error that no call has raised.
    """
    global _watchdog
    watchdog, _watchdog = _watchdog, None
    living = list(state.groups)
    for group in living:
        if group.error:
            continue  # its calls have raised the reason
        try:
            done = group.finish(_DESTROY_TIMEOUT_S)
            _end_messages(group, _DESTROY_TIMEOUT_S)
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
    poller.stop()
    _sign_off()
    if watchdog is not None:
        watchdog.remove()


def _finalizing() -> None:
    """End all groups because the program finalizes MPI itself."""
    if _watchdog is None:
        return  # no group was created, or all have ended
    _close_quietly()
    for group in state.groups:
        group.close(NotInitializedError)
    state.finalize()
