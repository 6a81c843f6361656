"""Processes that are started later, and join a job that runs (MPI_Comm_spawn, MPI-4.1 chapter 11).

MPI_Comm_spawn returns when the new processes have called MPI_Init, and waits for ever for one that
does not. So each starts here, calls MPI_Init at once, and then runs the program. Until it joins, in
init_process_group, the ranks that wait for it can hear of its end, and go on without.
"""

from __future__ import annotations

import builtins
import os
import runpy
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll import control_messages, settings
from mpicoll.errors import ArgumentError, DistBackendError, LaunchError, MPIError
from mpicoll.launch import world
from mpicoll.launch.host_identity import node
from mpicoll.launch.init_timeout import end_after
from mpicoll.launch.launchers import LAUNCHERS
from mpicoll.launch.rendezvous import Rendezvous

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "WORDS",
    "answer",
    "find_command",
    "has_grown",
    "join",
    "main",
    "merge",
    "start",
    "wait",
    "why_not",
]

_WHERE = "grow_group"
#: What starts a new process, before the program and its arguments.
_MAIN = ("-c", "from mpicoll.launch.spawned_ranks import main; main()")
#: A process that ends well whatever the program does; see docs/reliability.md.
_SHELL = ("sh", "-c", 'trap "" USR1; "$@"; true', "sh")
#: Tags of what new processes and the first of the others tell each other.
_HELLO, _READY, _GO = range(1, 4)
#: Seconds that a new process has to start and to call MPI_Init, before the program begins; and that
#: all have to be joined, once all are there.
_START = 60.0
_PAUSE = 2e-3
#: Bytes of what is wrong, at most.
WORDS = 300

#: In a new process, until it joins: the processes that have started it.
_parent: MPI.Intercomm | None = None
#: All ranks of the job, since it has grown.
_everybody: MPI.Intracomm | None = None


def why_not() -> str:
    """Return why no process can be started that joins, "" if one can: the same on all ranks."""
    if world.is_serialized():
        return "MPI lets one thread in at a time"
    if any(each.manager and each.manager in os.environ for each in LAUNCHERS):
        return ""
    return "the ranks were not started by Open MPI's mpirun or the mpiexec of MPICH's family"


def has_grown() -> bool:
    """Return whether the job has more ranks than its launcher knows of."""
    return _everybody is not None


# --- those that have been there -------------------------------------------------------------------


def find_program(words: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the options of the interpreter that runs this program, and the program itself.

    words: of its command line, from the interpreter on; () are those of this process.

    The program is a script and its arguments, or -m and a module, or -c and code, before them.
    Raises ArgumentError where it is none of these.
    """
    words = [*(words or sys.orig_argv)]
    place = 1
    while place < len(words) and words[place].startswith("-") and len(words[place]) > 1:
        word, place = words[place], place + 1
        if word.startswith("--"):
            place += word == "--check-hash-based-pycs"
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "cm":
                value = [word[at:]] if word[at:] else []
                options = [*words[1 : place - 1], *([word[: at - 1]] if at > 2 else [])]
                program = [f"-{letter}", *value, *words[place:]]
                whole = program[:2] == [*_MAIN]
                return options, program[2:] if whole else program
            if letter in "WX":
                place += not word[at:]
                break
    if place >= len(words) or words[place] == "-":
        raise ArgumentError(
            f"{_WHERE}: this program is no file, module or code that can be run again: {words}"
        )
    return words[1:place], words[place:]


def find_command(command: Sequence[str] | None, outlives: bool) -> tuple[list[str], str]:
    """Return the words of a new process's command line, and the folder that it begins in.

    command: the program and its arguments; None for this one's.
    outlives: a lost rank must not end the others.

    Raises ArgumentError where this program cannot be run again, OSError where the folder is gone.
    """
    try:
        flags, program = find_program()
    except ArgumentError:
        if command is None:
            raise
        flags, program = [], []
    words = [sys.executable, *flags, *_MAIN, *(program if command is None else command)]
    kept = [
        f"{name}={os.environ[name]}"
        for name in ("PYTHONPATH", *(each.name for each in settings.SETTINGS))
        if name in os.environ and name != settings.SECRET.name
    ]
    return [*(_SHELL if outlives else ()), "env", *kept, *words], str(Path.cwd())


def start(
    comm: MPI.Intracomm, count: int, words: Sequence[str], folder: str, limit: float | None
) -> MPI.Intercomm:
    """Start new processes; return what connects them: for ``wait``, ``answer`` and ``merge``.

    All ranks call. comm: of all ranks. What follows counts on its first one.
    count: how many processes. words, folder: as ``find_command`` returns them.
    limit: seconds, if fewer than they have anyway.

    Raises MPIError on all ranks where the launcher refuses.
    """
    from mpi4py import MPI

    info = MPI.Info.Create()
    if folder:
        info.Set("wdir", folder)
    late = min(_START, _START if limit is None else limit)
    message = (
        f"mpicoll: {_WHERE}: the launcher has not started the new processes within {late:g} s, and "
        "MPI_Comm_spawn does not return; ending the job\n"
    )
    try:
        with end_after(late, message, 1):
            name, *arguments = words or [""]
            inter = comm.Spawn(name, arguments, count, info, 0)
    except MPI.Exception as error:
        raise MPIError(
            f"{_WHERE} of {count} processes: MPI_Comm_spawn: {error.Get_error_string()}; see what "
            "the launcher has printed: it may have no slot for another process",
            error.Get_error_class(),
        ) from error
    finally:
        info.Free()
    inter.Set_errhandler(MPI.ERRORS_RETURN)
    return inter


def wait(
    inter: MPI.Intercomm, count: int, outlives: bool, limit: float | None, check: Callable[[], None]
) -> str:
    """Wait until all new processes are in init_process_group. The first rank calls.

    outlives: a lost rank must not end the others.
    limit: seconds to wait.
    check: called meanwhile; may raise what ends that.

    Returns "", or what has become of them.
    """
    from mpi4py import MPI

    end = time.monotonic() + (float("inf") if limit is None else limit)
    ends: dict[int, int] = {}  # new processes of this node: the pidfds
    ready: set[int] = set()
    status = MPI.Status()
    with ExitStack() as stack:
        while len(ready) < count:
            check()
            try:
                while inter.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                    source = status.Get_source()
                    said = bytearray(status.Get_count(MPI.BYTE))
                    inter.Recv([said, MPI.BYTE], source, status.Get_tag())
                    if status.Get_tag() == _READY:
                        ready.add(source)
                        continue
                    where, process = said.decode().split()
                    if where == node():
                        with suppress(OSError, AttributeError):
                            ends[source] = os.pidfd_open(int(process))
                            stack.callback(os.close, ends[source])
            except MPI.Exception as error:  # with ULFM it knows of the end of any process
                how = error.Get_error_string()
                return f"a new process ended before it called init_process_group: {how}"
            poll = select.poll()
            for descriptor in ends.values():
                poll.register(descriptor, select.POLLIN)
            gone = {descriptor for descriptor, _ in poll.poll(0)}
            if lost := [rank for rank, descriptor in ends.items() if descriptor in gone]:
                return f"new process {lost[0]} ended before it called init_process_group"
            if time.monotonic() > end:
                for rank, descriptor in ends.items():
                    if outlives and rank not in ready:  # the launcher would wait for it
                        with suppress(OSError):  # it has just ended
                            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                missing = sorted(set(range(count)) - ready)
                return f"new processes {missing} did not call init_process_group in {limit:g} s"
            time.sleep(_PAUSE)
    return ""


def answer(inter: MPI.Intercomm, wrong: str) -> None:
    """Tell the new processes to join, or what is wrong. The first rank calls."""
    from mpi4py import MPI

    box = wrong.encode()[:WORDS]
    for newcomer in range(inter.Get_remote_size()):
        # Not waited for where one may be gone: it is small, and MPI copies it.
        with suppress(MPI.Exception):
            inter.Isend([box, MPI.BYTE], newcomer, _GO).Test()


def merge(inter: MPI.Intercomm, wrong: str, raised: BaseException | None) -> MPI.Intracomm:
    """Make one communicator of all ranks and the new processes, which come last. All ranks call.

    inter: what ``start`` has returned. wrong: what the first rank has told the others.
    raised: what ended the first rank's ``wait``, on that rank, if anything did.

    If something is wrong, raises that there, and DistBackendError on all others.
    """
    if wrong:
        world.skip_finalize()  # MPI_Finalize may wait for the new processes, too
        raise raised or DistBackendError(f"{_WHERE}: {wrong}; the group is as it was")
    return _merge(inter, False)


def _merge(inter: MPI.Intercomm, is_new: bool) -> MPI.Intracomm:
    global _everybody
    from mpi4py import MPI

    message = (
        f"mpicoll: {_WHERE}: not all ranks and new processes were joined within {_START:g} s, as "
        "where one is lost meanwhile, and MPI_Intercomm_merge does not return; ending the job\n"
    )
    with end_after(_START, message, 1):
        made = inter.Merge(is_new)
        made.Set_errhandler(MPI.ERRORS_RETURN)
        inter.Free()
        # MPI_Finalize waits for all processes that are connected.
        skips = any(control_messages.allgather(made, world.skips_finalize(), bool))
    if skips:
        world.skip_finalize()
    _everybody = made
    return made


# --- those that are new ---------------------------------------------------------------------------


def main() -> None:
    """Start MPI, then run the program that the command line names."""
    global _parent
    program = sys.argv[1:]
    mpi = world.initialize()
    world.skip_finalize()  # until it has joined: the others may have given it up
    _parent = mpi.Comm.Get_parent()
    if _parent == mpi.COMM_NULL:
        raise LaunchError(f"{_WHERE}: MPI does not say who has started this process")
    _parent.Set_errhandler(mpi.ERRORS_RETURN)
    _parent.Send([f"{node()} {os.getpid()}".encode(), mpi.BYTE], 0, _HELLO)
    if program[0] == "-c":
        sys.argv[:] = ["-c", *program[2:]]
        sys.path[0] = ""
        space = sys.modules["__main__"].__dict__
        builtins.exec(compile(program[1], "<string>", "exec"), space)
    elif program[0] == "-m":
        sys.argv[:] = program[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def join(rendezvous: Rendezvous | None, limit: float | None) -> MPI.Intracomm | None:
    """Return the communicator of all ranks of a job that has grown; None if this one has not.

    limit: seconds that a new process waits for the others.

    Raises, in a new process, LaunchError if it has a rendezvous, and DistBackendError if it was
    given up, or the others do not come.
    """
    global _parent
    if _parent is None or rendezvous is not None:
        if _parent is not None:
            raise LaunchError(
                "init_process_group: this process was started by grow_group: call without "
                "init_method, rank and world_size"
            )
        return _everybody
    from mpi4py import MPI

    end = time.monotonic() + (float("inf") if limit is None else limit)
    inter, _parent = _parent, None
    inter.Send([b"", MPI.BYTE], 0, _READY)
    status = MPI.Status()
    while not inter.Iprobe(0, _GO, status):
        if time.monotonic() > end:
            raise DistBackendError(
                f"init_process_group: the other ranks did not come in {limit:g} s"
            )
        time.sleep(_PAUSE)
    wrong = bytearray(status.Get_count(MPI.BYTE))
    inter.Recv([wrong, MPI.BYTE], 0, _GO)
    if wrong:
        raise DistBackendError(
            f"init_process_group: this new process was given up: {wrong.decode(errors='replace')}"
        )
    world.skip_finalize(False)
    return _merge(inter, True)
