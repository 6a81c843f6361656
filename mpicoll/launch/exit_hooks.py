"""Hooks that abort the job when this rank fails: an uncaught exception, or sys.exit(1).

Without them, the other ranks would wait forever inside MPI. ``import mpicoll`` installs the hooks
in each rank of a job, because other ranks may already wait in MPI_Init. A process group installs
another ``RankEnd`` (``failures/watchdog.py``). The hooks stay after all groups have been
destroyed, because other ranks may wait in the next ``init_process_group``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import os
import select
import stat
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import NoReturn

from mpicoll.launch import error_output
from mpicoll.launch.environment import (
    is_inherited,
    is_multiprocessing_child,
    is_started_by_torchrun,
)
from mpicoll.launch.host_identity import job_name, open_manager
from mpicoll.launch.launchers import announced, find_launcher, find_rank
from mpicoll.launch.session import current_session
from mpicoll.output import flush_streams, write_lines

#: The exit code that a shell reports for a process that ended by SIGINT.
INTERRUPTED = 130

#: Set by each rank, so that its child processes know that they are not ranks.
_RANK_VARIABLE = "_MPICOLL_RANK_PROCESS"
#: Seconds that a process manager has to answer before this rank asks it to end the job.
_MANAGER_TIMEOUT_S = 2.0
#: Seconds that the launcher has to read the output of this rank before the job ends.
_READING_TIMEOUT_S = 1.0


class _Exit(SystemExit):
    """The SystemExit of sys.exit. Records its code if it ends the interpreter.

    An uncaught SystemExit is deleted outside any Python frame, before the functions of atexit run.
    """

    final_code: object = None

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            _Exit.final_code = self.code


def _exit(status: object = None) -> NoReturn:
    is_main = threading.get_ident() == threading.main_thread().ident
    raise (_Exit if is_main else SystemExit)(status)


def exit_code() -> int | None:
    """Return the exit code of the sys.exit that ends the interpreter; None if it ends otherwise."""
    code = _Exit.final_code
    return code if code is None or isinstance(code, int) else 1


# --- abort the job --------------------------------------------------------------------------------


def end_ranks(code: int) -> None:
    """Abort all ranks of the job with an exit code. Returns if this process cannot do so.

    Uses MPI_Abort, or the process manager if MPI is not running in this process.
    """
    session = current_session()
    if session is not None:
        session.abort(code)
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        _abort_by_manager(code)
    elif not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)  # without the lock of serialized_mpi


def _abort_by_manager(code: int) -> None:
    """Send PMI-1's abort to the process manager, before MPI has connected to it.

    MPICH's mpiexec and srun ignore a process that exits with an error before MPI_Init.
    """
    if is_inherited() or _is_child_of_rank():
        return
    with contextlib.suppress(OSError), open_manager(os.environ.get("PMI_FD", "")) as manager:
        manager.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n")
        poll = select.poll()
        poll.register(manager, select.POLLIN)
        if poll.poll(1000 * _MANAGER_TIMEOUT_S):
            manager.recv(1024)
        manager.sendall(f"cmd=abort exitcode={code & 255 or 1}\n".encode())


def _is_child_of_rank() -> bool:
    """Return whether this process is a child of a rank that inherited the rank's variables.

    The first caller, the rank, marks its process ID, job and rank in the environment. Ranks that an
    mpiexec inside the job starts have another job or rank.
    """
    this = f"{job_name()} {find_rank()}"
    process, _, marked = os.environ.get(_RANK_VARIABLE, "").partition(" ")
    if marked == this:
        return process != str(os.getpid())
    os.environ[_RANK_VARIABLE] = f"{os.getpid()} {this}"
    return False


def flush_output() -> None:
    """Flush the output of this process, and wait until the launcher has read it."""
    flush_streams()
    # Launchers drop output that is still in the ranks' pipes when the job ends, and may print MPI's
    # own message first. The final 0.1 s are for output to files, and for the launcher to print.
    end = time.monotonic() + _READING_TIMEOUT_S
    with contextlib.suppress(KeyboardInterrupt):  # the process is ending already
        while any(_unread(file) for file in (1, 2)) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)


def _unread(file: int) -> int:
    """Return the number of unread bytes in an output pipe of this process; 0 if not a pipe."""
    try:
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # closed, or FIONREAD is not supported
        return 0


# --- the hooks ------------------------------------------------------------------------------------


class RankEnd:
    """The steps by which a rank without a process group aborts its job."""

    def rank(self) -> str:
        """Return this rank for messages, "?" if it is unknown."""
        mpi: ModuleType | None = sys.modules.get("mpi4py.MPI")
        rank = announced()[0]
        if rank == "?" and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            return str(mpi.COMM_WORLD.Get_rank())
        return rank

    def extra_lines(self) -> list[str]:
        """Return lines to print after an error."""
        return []

    def end_job(self, code: int) -> None:
        """Abort all ranks of the job, if this process can."""
        flush_output()
        end_ranks(code)

    def at_exit(self) -> None:
        """Called when the interpreter ends with success."""


class _ExitHooks:
    """Wrappers of sys.excepthook and sys.exit. An instance other than ``_current`` only prints."""

    def __init__(self, end: RankEnd) -> None:
        self.end = end
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook
        sys.exit = _exit  # stays, so that ``exit_code`` works after the hooks were removed
        atexit.register(self._exiting)
        self._finalizer: Finalize | None = None
        if is_multiprocessing_child():
            from multiprocessing.util import Finalize

            # multiprocessing ends a child without sys.excepthook, and a forked one without atexit.
            self._finalizer = Finalize(None, self._child_exiting, exitpriority=0)

    def take(self, end: RankEnd) -> bool:
        """Use another RankEnd; return False after a fork, or if another hook is installed."""
        if sys.excepthook != self._excepthook or self._pid != os.getpid():
            return False
        self.end = end
        atexit.unregister(self._exiting)  # atexit calls the latest function first
        atexit.register(self._exiting)
        return True

    def remove(self) -> None:
        atexit.unregister(self._exiting)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Another hook may still call this one after it was removed. An exception at an interactive
        # prompt does not end the process.
        is_rank = os.getpid() == self._pid and not hasattr(sys, "ps1")
        # Write to the real standard error inside a hook that collects output, as torch's does.
        is_collected = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None
        with contextlib.redirect_stderr(sys.__stderr__ if is_collected else sys.stderr):
            try:
                hook = _skip_own(self._previous_hook)
                if hook is not sys.__excepthook__:
                    hook(kind, error, trace)
                elif is_rank and _current is not None:
                    error_output.print_once(error, _current.end.rank(), _current.end.extra_lines)
                else:
                    write_lines(error_output.format_error(error))
            finally:
                if is_rank and self is _current:
                    code = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
                    self.end.end_job(code)

    def _exiting(self) -> None:
        if os.getpid() != self._pid:
            return
        if exit_code():
            self._end_by_exit(_Exit.final_code)
        self.end.at_exit()

    def _end_by_exit(self, status: object) -> None:
        """End the job because of ``sys.exit(status)``. Print an exit code once per node."""
        if not isinstance(status, int):  # a message, which the interpreter prints
            self.end.end_job(1)
            return
        if error_output.claim(f"exit code {status}"):
            rank = self.end.rank()
            write_lines(f"mpicoll: rank {rank} exited with code {status} (sys.exit); the job ends")
        self.end.end_job(status)

    def _child_exiting(self) -> None:
        """End the job if an exception ends a child of multiprocessing."""
        if os.getpid() != self._pid:
            return
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                write_lines(error.code)
            if error.code not in (None, 0):
                self._end_by_exit(error.code)
        elif error is not None:
            self._excepthook(type(error), error, error.__traceback__)
        self._exiting()


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _skip_own(hook: Hook) -> Hook:
    """Return the program's hook under earlier hooks of mpicoll and of torch.distributed.

    Each init_process_group of torch installs a hook that calls the current hook.
    """
    while True:
        code = getattr(hook, "__code__", None)
        if isinstance(owner := getattr(hook, "__self__", None), _ExitHooks):
            hook = owner._previous_hook
        elif code is not None and code.co_name == "_distributed_excepthook":
            cells = dict(zip(code.co_freevars, hook.__closure__ or (), strict=False))
            if "old_hook" not in cells:
                return hook
            hook = cells["old_hook"].cell_contents
        else:
            return hook


_current: _ExitHooks | None = None


def install(end: RankEnd) -> None:
    """Install the hooks, or change the RankEnd of installed hooks."""
    global _current
    if _current is None or not _current.take(end):
        if _current is not None:
            _current.remove()
        _current = _ExitHooks(end)


def install_in_rank() -> None:
    """Install the hooks if this process is one of several ranks; else remove the hooks.

    Not in pytest or at an interactive prompt, which continue after an exception, nor under
    torchrun, which ends all ranks when one has failed.
    """
    _, size, _ = announced()
    is_rank = not (
        find_launcher() is None or size in ("0", "1") or is_started_by_torchrun() or is_inherited()
    )
    continues = "_pytest" in sys.modules or sys.flags.interactive or hasattr(sys, "ps1")
    if is_rank and not continues and not _is_child_of_rank():
        install(RankEnd())
    else:
        remove()


def remove() -> None:
    """Remove the hooks; restore the previous sys.excepthook."""
    global _current
    if _current is not None:
        _current.remove()
        _current = None
