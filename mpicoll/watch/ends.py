"""How a process ends: an uncaught exception, sys.exit(1) or Ctrl-C on one rank ends the job, and a
rank that is stuck in MPI beyond its group's timeout says so instead of hanging.

A rank that goes away while others wait inside MPI leaves them waiting for ever, so whoever goes
badly takes the job along, its own words first.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mpicoll import launch
from mpicoll.core.groups import state
from mpicoll.errors import LostRankError
from mpicoll.output import write_lines
from mpicoll.watch import losses, positions

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Guard", "end_job", "exit_code", "keep_exit_code"]

#: Seconds between looks at the groups' timeouts, and seconds that a process blocked in MPI is
#: given to come out of it by itself after Ctrl-C.
_TICK, _PATIENCE = 1.0, 1.0
#: Seconds between the news that another rank ended the job and this rank's end, in which it may
#: find its own words, and whoever started the ranks sees which was the first.
_AFTER_NEWS = 0.5
#: Seconds after which a rank that waits in a collective tells the others where it is, and between
#: looks at what others have told this one.
_LONG, _SELDOM = 2.0, 10.0
_INTERRUPTED = 130  # what a shell reports for a process that ended by SIGINT


@dataclass(slots=True)
class _Wait:
    """A group that is inside a collective.

    number: of the collective. since: when it was first seen there. told: the others know.
    """

    number: int
    since: float
    told: bool = False


class _Exit(SystemExit):
    """The SystemExit of sys.exit, which can tell that it ends the interpreter.

    The interpreter drops an uncaught SystemExit when no Python code runs any more and before the
    functions of atexit are called. One that somebody caught is dropped by Python code.
    """

    final: Any = None

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:
            _Exit.final = self.code


def _exit(status: Any = None) -> NoReturn:
    main = threading.get_ident() == threading.main_thread().ident
    raise (_Exit if main else SystemExit)(status)


_kept = False


def keep_exit_code() -> None:
    """Has ``exit_code`` know even after the Guard was removed."""
    global _kept
    _kept = True


def exit_code() -> int | None:
    """The exit code of the sys.exit that ends the interpreter; None where it ends otherwise."""
    code = _Exit.final
    return code if code is None or isinstance(code, int) else 1


def end_job(code: int) -> None:
    """Ends every rank of the job with an exit code; what was printed goes out first."""
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        # A hook of torch's collects what others print, to print it when they return.
        with contextlib.suppress(OSError, ValueError):
            sys.__stderr__.write(sys.stderr.getvalue())
            sys.__stderr__.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    time.sleep(0.1)  # launchers drop what ranks still had in their pipes when the job ends
    session = launch.current()
    if session is not None:
        session.abort(code)
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(code)  # not through the one lock of launch.serialized_mpi


class Guard:
    """Installed from init_process_group to destroy_process_group.

    at_exit: what is done when the interpreter ends in good order without a destroy.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self._at_exit = at_exit
        self._pid = os.getpid()
        self._stopping = False
        self._look_at_all = time.monotonic() + _SELDOM
        self._previous_hook = sys.excepthook
        self._previous_exit = sys.exit
        self._previous_fd = -1
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        sys.excepthook = self._excepthook
        sys.exit = _exit
        _Exit.final = None
        atexit.register(self._exiting)
        self._child: multiprocessing.util.Finalize | None = None
        if multiprocessing.parent_process() is not None:
            # multiprocessing ends a child without sys.excepthook, and a forked one without atexit.
            self._child = multiprocessing.util.Finalize(None, self._child_exiting, exitpriority=0)
        self._hears_signals = threading.current_thread() is threading.main_thread()
        if self._hears_signals:
            self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if self._previous_fd != -1:  # somebody else listens, asyncio most likely
                signal.set_wakeup_fd(self._previous_fd)
                self._hears_signals = False
        _guards.add(self)
        self._thread = threading.Thread(target=self._watch, name="mpicoll-guard", daemon=True)
        self._thread.start()

    def remove(self) -> None:
        """Puts everything back as it was; ends the thread."""
        atexit.unregister(self._exiting)
        if self._child is not None:
            self._child.cancel()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._previous_hook
        if sys.exit is _exit and not _kept:
            sys.exit = self._previous_exit
        deaf = not self._hears_signals
        if self._hears_signals and threading.current_thread() is threading.main_thread():
            self._stop_hearing()
            deaf = True
        self._stopping = True
        os.write(self._writer, b"\0")
        self._thread.join()
        _guards.discard(self)
        if deaf:  # else Python still writes to the pipe at each signal
            os.close(self._reader)
            os.close(self._writer)

    def _stop_hearing(self) -> None:
        listening = signal.set_wakeup_fd(-1)
        if listening not in (self._writer, -1):
            signal.set_wakeup_fd(listening)

    def forget(self) -> None:
        """In a forked child: the pipe is the parent's."""
        if self._hears_signals:
            self._stop_hearing()
        os.close(self._reader)
        os.close(self._writer)

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        try:
            if self._previous_hook is sys.__excepthook__:  # which writes in many pieces
                write_lines("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"))
            else:
                self._previous_hook(kind, error, trace)
        finally:
            # Another hook may still call this one when its time is over, and at a prompt an
            # exception ends nothing.
            ends = not self._stopping and not hasattr(sys, "ps1")
            if os.getpid() == self._pid and ends:
                end_job(_INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)

    def _exiting(self) -> None:
        if os.getpid() != self._pid:
            return
        code = exit_code()
        if code:
            end_job(code)
        self._at_exit()

    def _child_exiting(self) -> None:
        """At the end of a child of multiprocessing, an exception that ends it on its way."""
        if os.getpid() != self._pid:
            return
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                write_lines(error.code)
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code:
                end_job(code)
        elif error is not None:
            self._excepthook(type(error), error, error.__traceback__)
        self._exiting()

    # --- the thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        stuck: dict[ProcessGroup, _Wait] = {}
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        session = launch.current()
        if session is not None:
            poll.register(session, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * _TICK)]
            if self._stopping:
                return
            if self._reader in ready and signal.SIGINT in os.read(self._reader, 512):
                self._interrupted()
            if session is not None and session.fileno() in ready:
                self._heard(session.ending(), session.rank)
            self._look_around(stuck)

    def _inside(self) -> list[ProcessGroup]:
        """The groups that are inside a collective."""
        return [group for group in list(state.groups) if group.lock.locked()]

    def _interrupted(self) -> None:
        """Ctrl-C: Python handles it between two bytecodes, which a blocked MPI call never ends."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        before = {group: group.begun for group in self._inside() if not group.busy()}
        time.sleep(_PATIENCE)
        if any(before.get(group) == group.begun for group in self._inside()):
            self._give_up("interrupted while it waited for other ranks", _INTERRUPTED)

    def _heard(self, news: tuple[str, int] | None, rank: int) -> None:
        """Another rank has ended the job: so does this one, in its own words if it finds some."""
        if news is None:
            return
        why, code = news
        if not why:  # MPI_Abort in this process leaves its end to whoever started it
            os._exit(code)
        time.sleep(_AFTER_NEWS)
        if not self._stopping:
            write_lines(f"mpicoll: rank {rank}: {why}; ending too")
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            os._exit(code)

    def _look_around(self, stuck: dict[ProcessGroup, _Wait]) -> None:
        now = time.monotonic()
        # What others tell a rank that never waits must not pile up. Where MPI lets one thread in at
        # a time, the program may be inside it now.
        if now > self._look_at_all and not launch.is_serialized():
            self._look_at_all = now + _SELDOM
            for group in list(state.groups):
                positions.look(group)
        if losses.survives() and not launch.is_serialized():
            for group in list(state.groups):
                losses.look(group)
        inside = self._inside()
        for group in [group for group in stuck if group not in inside]:
            del stuck[group]
        for group in inside:
            wait = stuck.get(group)
            if wait is None or wait.number != group.begun:
                stuck[group] = _Wait(group.begun, now)
                continue
            positions.look(group)
            lost = isinstance(group.broken, LostRankError)  # its calls are about to end
            gone = [] if lost else positions.missing(group, group.keeps_time or group.busy())
            if gone:
                who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}"
                self._give_up(f"{who} ended without making this call", 1)
            if not group.keeps_time and not lost:
                if not wait.told and now - wait.since > _LONG:
                    wait.told = True
                    positions.tell(group)
                differing = positions.differing(group)
                if differing:
                    self._give_up(differing, 1)
            late = group.timeout is not None and now - wait.since > group.timeout
            if late and group.busy():
                # Whoever waits for a Work sees to the timeout; a Future's has to be seen to.
                for work in [one for one in list(group.pending) if one.has_future]:
                    work.time_out(group.timeout)
            elif late and not group.keeps_time:
                self._give_up(
                    f"the other ranks of group {group.group_name} did not come within its timeout "
                    f"of {group.timeout:g} s",
                    1,
                )

    def _give_up(self, why: str, code: int) -> None:
        """A thread that is blocked in MPI cannot be sent an exception: the job has to end."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        rank = "?" if state.default is None else state.default.rank()
        write_lines(
            f"Traceback (most recent call last):\n{stack}"
            f"mpicoll: rank {rank}: {why} (in the call above); ending the job"
        )
        end_job(code)


_guards: set[Guard] = set()


def _after_fork() -> None:
    while _guards:
        _guards.pop().forget()


os.register_at_fork(after_in_child=_after_fork)
