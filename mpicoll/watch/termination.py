"""How a process ends: an uncaught exception or sys.exit(1) on one rank ends the whole job.

A rank that goes away while others wait inside MPI leaves them waiting for ever. So a rank that
fails prints its message first, then ends the job.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import multiprocessing
import multiprocessing.util
import os
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from mpicoll import launch
from mpicoll.core.groups import state
from mpicoll.output import write_lines
from mpicoll.watch import flight_record, guarding

__all__ = ["INTERRUPTED", "ExitHooks", "end_job", "end_stuck_job", "exit_code", "keep_exit_code"]

INTERRUPTED = 130  # what a shell reports for a process that ended by SIGINT


class _Exit(SystemExit):
    """The SystemExit of sys.exit, which notices whether it ends the interpreter.

    The interpreter deletes an uncaught SystemExit when no Python code runs any more, before it
    calls the functions of atexit. A caught one is deleted by Python code.
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


_is_kept = False


def keep_exit_code() -> None:
    """Let ``exit_code`` work even after the ExitHooks were removed."""
    global _is_kept
    _is_kept = True


def exit_code() -> int | None:
    """Return the exit code of the sys.exit that ends the interpreter; None if it ends otherwise."""
    code = _Exit.final_code
    return code if code is None or isinstance(code, int) else 1


def end_job(code: int, explained: bool = True) -> None:
    """End every rank of the job with an exit code, after flushing the output.

    explained: this rank has printed why; else the guard reports the exit code.
    """
    for line in flight_record.last_words():
        write_lines(line)
    guarding.say_ending(code, explained)
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        # A hook of torch's collects what other hooks print, to print it when they return.
        with contextlib.suppress(OSError, ValueError):
            sys.__stderr__.write(sys.stderr.getvalue())
            sys.__stderr__.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with contextlib.suppress(KeyboardInterrupt):  # another one: it cannot end sooner
        _wait_for_launcher()
    session = launch.current()
    if session is not None:
        session.abort(code)
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)  # not through the lock of launch.serialized_mpi


def _wait_for_launcher(seconds: float = 1.0) -> None:
    """Wait until the launcher has read what this process wrote, for so many seconds at most.

    Launchers drop what is still in the ranks' pipes when the job ends, and may print what MPI says
    of it first. 0.1 s are left for what is no pipe, and for the launcher to print what it has read.
    """
    end = time.monotonic() + seconds
    while any(_unread(file) for file in (1, 2)) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)


def _unread(file: int) -> int:
    """Return how many bytes of a pipe that this process writes to are still in it."""
    try:
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(file, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:  # it is closed, or the system cannot say
        return 0


def end_stuck_job(why: str, code: int, thread: int = 0) -> None:
    """End the job from another thread, with the stack of one that is inside MPI.

    thread: that one, as threading.get_ident has it; 0: the main thread. An exception cannot be
    raised in a thread that is blocked inside MPI. All ranks write their flight records first,
    unless the user has interrupted the job.
    """
    if code != INTERRUPTED:
        flight_record.dump(why)
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    stack = "" if frame is None else "".join(traceback.format_stack(frame))
    default = state.default  # another thread may end it meanwhile
    rank = "?" if default is None else default.rank()
    told = f"mpicoll: rank {rank}: {why} (in the call above); ending the job"
    write_lines(
        "\n".join(
            (f"Traceback (most recent call last):\n{stack}{told}", *flight_record.last_words())
        )
    )
    end_job(code)


class ExitHooks:
    """Hooks by which an uncaught exception or a nonzero exit code ends the job.

    at_exit: called when the interpreter ends with success, without a destroy.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self._at_exit = at_exit
        self._pid = os.getpid()
        self._removed = False
        self._previous_hook = sys.excepthook
        self._previous_exit = sys.exit
        sys.excepthook = self._excepthook
        sys.exit = _exit
        _Exit.final_code = None
        atexit.register(self._exiting)
        self._finalizer: multiprocessing.util.Finalize | None = None
        if multiprocessing.parent_process() is not None:
            # multiprocessing ends a child without sys.excepthook, and a forked one without atexit.
            self._finalizer = multiprocessing.util.Finalize(
                None, self._child_exiting, exitpriority=0
            )

    def remove(self) -> None:
        """Restore the hooks of before."""
        atexit.unregister(self._exiting)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        if sys.exit is _exit and not _is_kept:
            sys.exit = self._previous_exit
        self._removed = True

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # Another hook may still call this one after it was removed, and an exception at an
        # interactive prompt ends nothing.
        ends = os.getpid() == self._pid and not self._removed and not hasattr(sys, "ps1")
        try:
            if self._previous_hook is sys.__excepthook__:  # which writes in many pieces
                text = "".join(traceback.format_exception(kind, error, trace)).rstrip("\n")
                write_lines("\n".join([text, *(flight_record.last_words() if ends else [])]))
            else:
                self._previous_hook(kind, error, trace)
        finally:
            if ends:
                end_job(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    def _exiting(self) -> None:
        if os.getpid() != self._pid:
            return
        code = exit_code()
        if code:
            end_job(code, explained=not isinstance(_Exit.final_code, int))
        self._at_exit()

    def _child_exiting(self) -> None:
        """End the job if an exception ends a child of multiprocessing."""
        if os.getpid() != self._pid:
            return
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                write_lines(error.code)
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code:
                end_job(code, explained=not isinstance(error.code, int))
        elif error is not None:
            self._excepthook(type(error), error, error.__traceback__)
        self._exiting()
