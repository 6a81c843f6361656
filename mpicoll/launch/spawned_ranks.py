"""Start processes that join a running job (MPI_Comm_spawn, MPI-4.1 chapter 11).

MPI_Comm_spawn returns when the new processes have called MPI_Init, and hangs if one does not. So a
new process starts in ``main``, which calls MPI_Init immediately and then runs the program. If the
process ends before it joins in init_process_group, the waiting ranks detect this and continue.
"""

from __future__ import annotations

import builtins
import os
import runpy
import select
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll import control_messages, settings
from mpicoll.errors import ArgumentError, DistBackendError, LaunchError, MPIError
from mpicoll.launch import world
from mpicoll.launch.environment import interpreter_options
from mpicoll.launch.host_identity import node
from mpicoll.launch.init_timeout import end_after
from mpicoll.launch.launchers import LAUNCHERS
from mpicoll.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from mpi4py import MPI

_WHERE = "grow_group"
#: Arguments of the interpreter before the program and its arguments.
_MAIN = ("-c", "from mpicoll.launch.spawned_ranks import main; main()")
#: Tags of messages between new processes and rank 0: MPI has started, waiting in
#: init_process_group, and rank 0's reply.
_STARTED, _READY, _RESULT = range(1, 4)
#: Timeout in seconds of MPI_Comm_spawn, and of MPI_Intercomm_merge once all processes are ready.
_START_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 2e-3
#: Maximum size in bytes of a failure message.
MAX_FAILURE_BYTES = 300

#: In a new process, until it joins: the intercommunicator to the ranks that started it.
_parent: MPI.Intercomm | None = None
#: All ranks of a job that has grown.
_world: MPI.Intracomm | None = None


def unsupported_reason() -> str:
    """Return why this job cannot start processes that join, "" if it can. The same on all ranks."""
    if world.is_serialized():
        return "MPI provides less than MPI_THREAD_MULTIPLE"
    if any(each.manager and each.manager in os.environ for each in LAUNCHERS):
        return ""
    return "the ranks were not started by Open MPI's mpirun or an mpiexec of the MPICH family"


def has_grown() -> bool:
    """Return whether the job has more ranks than its launcher started."""
    return _world is not None


# --- existing ranks -------------------------------------------------------------------------------


def find_command(command: Sequence[str] | None) -> tuple[list[str], str]:
    """Return the command line of a new process and its working directory.

    command: the program and its arguments; None: of this process, a script or a module.

    Raises ArgumentError if this program cannot be started again, OSError without a directory.
    """
    if command is None:
        module = getattr(sys.modules["__main__"].__spec__, "name", "__main__")
        if module != "__main__":
            command = ["-m", module.removesuffix(".__main__"), *sys.argv[1:]]
        elif sys.argv[0] in ("", "-", "-c"):
            raise ArgumentError(f"{_WHERE}: this program is neither a script nor a module")
        else:
            command = sys.argv
    names = {"PYTHONPATH", *(each.name for each in settings.SETTINGS)} - {settings.SECRET.name}
    kept = [f"{name}={os.environ[name]}" for name in sorted(names & os.environ.keys())]
    words = [sys.executable, *interpreter_options(), *_MAIN, *command]
    return ["env", *kept, *words], str(Path.cwd())


def start(
    comm: MPI.Intracomm, count: int, words: Sequence[str], folder: str, limit: float | None
) -> MPI.Intercomm:
    """Start new processes; return the intercommunicator to them. All ranks call.

    comm: all ranks. The other arguments are used on rank 0; words, folder: from ``find_command``.
    limit: timeout in seconds, at most _START_TIMEOUT_S.

    Raises MPIError on all ranks if the launcher rejects the request.
    """
    from mpi4py import MPI

    info = MPI.Info.Create()
    if folder:
        info.Set("wdir", folder)
    timeout = min(_START_TIMEOUT_S, _START_TIMEOUT_S if limit is None else limit)
    message = (
        f"mpicoll: {_WHERE}: timed out after {timeout:g} s: the launcher has not started the new "
        "processes, and MPI_Comm_spawn does not return; ending the job\n"
    )
    try:
        with end_after(timeout, message, 1):
            name, *arguments = words or [""]
            inter = comm.Spawn(name, arguments, count, info, 0)
    except MPI.Exception as error:
        raise MPIError(
            f"{_WHERE} of {count} processes: MPI_Comm_spawn: {error.Get_error_string()}. Check the "
            "output of the launcher; it may need more slots",
            error.Get_error_class(),
        ) from error
    finally:
        info.Free()
    inter.Set_errhandler(MPI.ERRORS_RETURN)
    return inter


def wait(inter: MPI.Intercomm, count: int, limit: float | None, check: Callable[[], None]) -> str:
    """Wait until all new processes are in init_process_group; return the failure, "" without one.

    Rank 0 calls. limit: timeout in seconds. check: called repeatedly; may raise.
    """
    from mpi4py import MPI

    end = time.monotonic() + (float("inf") if limit is None else limit)
    pidfds: dict[int, int] = {}  # by rank, of new processes on this node
    ready: set[int] = set()
    status = MPI.Status()
    with ExitStack() as stack:
        while len(ready) < count:
            check()
            try:
                while inter.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                    source, data = status.Get_source(), _receive(inter, status)
                    if status.Get_tag() == _READY:
                        ready.add(source)
                        continue
                    where, process = data.split()
                    if where == node():
                        with suppress(OSError, AttributeError):
                            pidfds[source] = os.pidfd_open(int(process))
                            stack.callback(os.close, pidfds[source])
            except MPI.Exception as error:  # ULFM reports lost processes
                reason = error.Get_error_string()
                return f"a new process ended before it called init_process_group: {reason}"
            poll = select.poll()
            for descriptor in pidfds.values():
                poll.register(descriptor, select.POLLIN)
            ended = {descriptor for descriptor, _ in poll.poll(0)}
            if lost := [rank for rank, descriptor in pidfds.items() if descriptor in ended]:
                return f"new process {lost[0]} ended before it called init_process_group"
            if time.monotonic() > end:
                missing = sorted(set(range(count)) - ready)
                return f"new processes {missing} did not call init_process_group within {limit:g} s"
            time.sleep(_POLL_INTERVAL_S)
    return ""


def _receive(inter: MPI.Intercomm, status: MPI.Status) -> str:
    from mpi4py import MPI

    data = bytearray(status.Get_count(MPI.BYTE))
    inter.Recv([data, MPI.BYTE], status.Get_source(), status.Get_tag())
    return data.decode(errors="replace")


def send_result(inter: MPI.Intercomm, failure: str) -> None:
    """Send the new processes the failure, "" if they may join. Rank 0 calls."""
    from mpi4py import MPI

    box = failure.encode()[:MAX_FAILURE_BYTES]
    for rank in range(inter.Get_remote_size()):
        with suppress(MPI.Exception):  # a lost process. Do not wait: MPI copies a small message
            inter.Isend([box, MPI.BYTE], rank, _RESULT).Test()


def merge(inter: MPI.Intercomm, failure: str, raised: BaseException | None) -> MPI.Intracomm:
    """Create the communicator of all ranks, followed by the new processes. All ranks call.

    inter: from ``start``. failure: rank 0's, "" without one. It raises ``raised`` on rank 0, if
    any, and DistBackendError on all other ranks.
    """
    if failure:
        world.skip_finalize()  # MPI_Finalize may wait for the new processes
        raise raised or DistBackendError(f"{_WHERE}: {failure}; the group is unchanged")
    return _merge(inter, False)


def _merge(inter: MPI.Intercomm, is_new: bool) -> MPI.Intracomm:
    global _world
    from mpi4py import MPI

    message = (
        f"mpicoll: {_WHERE}: timed out after {_START_TIMEOUT_S:g} s: MPI_Intercomm_merge does not "
        "return, probably because a rank or a new process is lost; ending the job\n"
    )
    with end_after(_START_TIMEOUT_S, message, 1):
        made = inter.Merge(is_new)
        made.Set_errhandler(MPI.ERRORS_RETURN)
        inter.Free()
        # MPI_Finalize waits for all connected processes.
        skips = any(control_messages.allgather(made, world.skips_finalize(), bool))
    if skips:
        world.skip_finalize()
    _world = made
    return made


# --- new processes --------------------------------------------------------------------------------


def main() -> None:
    """Start MPI, then run the program that the command line names."""
    global _parent
    program = sys.argv[1:]
    mpi = world.load()
    world.initialize(mpi)
    world.skip_finalize()  # until it has joined, because the other ranks may have timed out
    _parent = mpi.Comm.Get_parent()
    if _parent == mpi.COMM_NULL:
        raise LaunchError(f"{_WHERE}: MPI_Comm_get_parent returned MPI_COMM_NULL")
    _parent.Set_errhandler(mpi.ERRORS_RETURN)
    _parent.Send([f"{node()} {os.getpid()}".encode(), mpi.BYTE], 0, _STARTED)
    if program[0] == "-c":
        sys.argv[:] = ["-c", *program[2:]]
        sys.path[0] = ""
        builtins.exec(compile(program[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif program[0] == "-m":
        sys.argv[:] = program[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def join_grown_job(rendezvous: Rendezvous | None, limit: float | None) -> MPI.Intracomm | None:
    """Return the communicator of all ranks of a job that has grown; None in any other job.

    limit: seconds for which a new process waits for the existing ranks; None: no timeout.

    In a new process, raises LaunchError if it has a rendezvous, DistBackendError after a failure.
    """
    global _parent
    if _parent is None:
        return _world
    if rendezvous is not None:
        raise LaunchError(
            "init_process_group: this process was started by grow_group: call without "
            "init_method, rank and world_size"
        )
    from mpi4py import MPI

    end = time.monotonic() + (float("inf") if limit is None else limit)
    inter, _parent = _parent, None
    inter.Send([b"", MPI.BYTE], 0, _READY)
    status = MPI.Status()
    while not inter.Iprobe(0, _RESULT, status):
        if time.monotonic() > end:
            raise DistBackendError(
                f"init_process_group: timed out after {limit:g} s waiting for the ranks that "
                "called grow_group"
            )
        time.sleep(_POLL_INTERVAL_S)
    if failure := _receive(inter, status):
        raise DistBackendError(f"init_process_group: this new process cannot join: {failure}")
    world.skip_finalize(False)
    return _merge(inter, True)
