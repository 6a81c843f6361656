"""The watchdog: a thread that ends the job when a rank is stuck inside MPI.

A thread that is blocked inside MPI runs no Python. So another one handles Ctrl-C, looks for calls
that exceed their group's timeout or wait for a rank that will not come, and listens for the end of
other ranks.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpicoll import launch, settings
from mpicoll.core.groups import state
from mpicoll.cuda.threads import attend
from mpicoll.errors import CollectiveTimeoutError, LostRankError
from mpicoll.failures import (
    flight_record,
    interruptions,
    lost_ranks,
    monitor_client,
    rank_status,
    timeouts,
)
from mpicoll.failures.group_failure import fail_all_ranks, grace
from mpicoll.failures.termination import GroupEnd, end_job, end_stuck_job
from mpicoll.launch import exit_hooks
from mpicoll.launch.exit_hooks import INTERRUPTED
from mpicoll.output import write_lines

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["Watchdog"]

#: Seconds between checks of the groups.
_TICK = 1.0
#: Seconds that a process blocked in MPI has to come out of it by itself after Ctrl-C.
_INTERRUPT_GRACE = 1.0
#: Seconds between the news that another rank has ended the job and the end of this rank. Meanwhile
#: it may print its own message, and the launcher sees which rank was first.
_NEWS_GRACE = 0.5
#: Seconds after which a rank that waits in a collective sends its status, and seconds after which a
#: rank that does not wait receives the status messages of others.
_SEND_AFTER, _RECEIVE_INTERVAL = 2.0, 10.0


@dataclass(slots=True)
class _Wait:
    """A group that is inside a collective.

    number: of the collective. since: when it was first seen there. has_sent: the rank has sent its
    status. closing: the thread that closes the group. closed: the seconds beyond the timeout when
    the group was first seen closed.
    """

    number: int
    since: float
    has_sent: bool = False
    closing: threading.Thread | None = None
    closed: float | None = None


class Watchdog:
    """The watchdog thread and the exit hooks, from init_process_group to destroy_process_group.

    at_exit: called when the interpreter ends with success, without a destroy.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self._stopping = False
        self._closing: list[threading.Thread] = []
        self._next_receive = time.monotonic() + _RECEIVE_INTERVAL
        #: Groups with work on devices that are broken, and since when.
        self._broken: dict[ProcessGroup, float] = {}
        self._previous_fd = -1
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        exit_hooks.install(GroupEnd(at_exit))
        self._hears_signals = threading.current_thread() is threading.main_thread()
        if self._hears_signals:
            interruptions.attend()
            self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if self._previous_fd != -1:  # another listener, most likely asyncio
                signal.set_wakeup_fd(self._previous_fd)
                self._hears_signals = False
        self._replaces = threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        )
        if self._replaces:
            signal.signal(signal.SIGUSR1, self._on_usr1)
        _watchdogs.add(self)
        self._thread = threading.Thread(target=self._run, name="mpicoll-watchdog", daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        """The thread, as the system numbers it."""
        return self._thread.native_id or 0

    def remove(self) -> None:
        """Remove the hooks and end the thread."""
        exit_hooks.remove()
        owns_pipe = not self._hears_signals
        if threading.current_thread() is threading.main_thread():
            if self._hears_signals:
                self._stop_hearing()
                owns_pipe = True
            if self._owns_usr1():
                signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self._stopping = True
        os.write(self._writer, b"\0")
        for thread in (self._thread, *self._closing):
            thread.join()
        _watchdogs.discard(self)
        if owns_pipe:  # else Python still writes to the pipe at each signal
            os.close(self._reader)
            os.close(self._writer)

    def _on_usr1(self, *_: object) -> None:
        """Take the signal, which would end the process. The thread has heard of it already, if it
        hears signals, even while this one is blocked inside MPI.
        """
        if not self._hears_signals:
            os.write(self._writer, bytes([signal.SIGUSR1]))

    def _owns_usr1(self) -> bool:
        """Return whether SIGUSR1 is for the flight record, and not the program's own."""
        return self._replaces and signal.getsignal(signal.SIGUSR1) == self._on_usr1

    def _stop_hearing(self) -> None:
        current_fd = signal.set_wakeup_fd(-1)
        if current_fd not in (self._writer, -1):
            signal.set_wakeup_fd(current_fd)

    def forget(self) -> None:
        """Close the pipe in a forked child: it is the parent's."""
        if self._hears_signals:
            self._stop_hearing()
        os.close(self._reader)
        os.close(self._writer)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        waits: dict[ProcessGroup, _Wait] = {}
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        session = launch.current()
        if session is not None:
            poll.register(session, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * self._pause())]
            if self._stopping:
                return
            heard = os.read(self._reader, 512) if self._reader in ready else b""
            if signal.SIGUSR1 in heard and self._owns_usr1() and not _is_news_of_loss():
                flight_record.dump("signal SIGUSR1", 0)
                for line in flight_record.last_words():
                    write_lines(line)
            if signal.SIGTERM in heard:  # the program's handlers run in the middle of a call
                monitor_client.say_signal(signal.SIGTERM)
            if signal.SIGINT in heard:
                self._handle_interrupt()
            if session is not None and session.fileno() in ready:
                self._handle_news(session.ending(), session.rank)
            if monitor_client.find_order():  # the monitor has said why
                end_job(1)
            self._check_groups(waits)

    def _pause(self) -> float:
        """Return the seconds until the groups are looked at next: soon where timeouts are short."""
        shortest = min((g.timeout for g in list(state.groups) if g.timeout), default=_TICK)
        return min(_TICK, max(shortest / 5, _TICK / 10))

    def _find_groups_inside(self) -> list[ProcessGroup]:
        """Return the groups that are inside a collective."""
        return [group for group in list(state.groups) if group.lock.locked()]

    def _handle_interrupt(self) -> None:
        """End the job after Ctrl-C if a call is blocked in MPI.

        Python raises KeyboardInterrupt between two bytecodes, which a blocked call never reaches.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        before = {group: group.begun for group in self._find_groups_inside() if not group.busy()}
        time.sleep(_INTERRUPT_GRACE)
        if any(before.get(group) == group.begun for group in self._find_groups_inside()):
            end_stuck_job("interrupted while it waited for other ranks", INTERRUPTED)

    def _handle_news(self, news: tuple[str, int] | None, rank: int) -> None:
        """End this rank, because another has ended the job."""
        if news is None:
            return
        why, code = news
        if not why:  # MPI_Abort in this process leaves its end to what has started it
            monitor_client.say_ending(code)
            os._exit(code)
        time.sleep(_NEWS_GRACE)
        if not self._stopping:
            flight_record.write(why)
            records = flight_record.last_words() if rank == 0 else []
            write_lines("\n".join([f"mpicoll: rank {rank}: {why}; ending too", *records]))
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
            monitor_client.say_ending(code)
            os._exit(code)

    def _check_groups(self, waits: dict[ProcessGroup, _Wait]) -> None:
        attend()
        now = time.monotonic()
        # The status messages for a rank that never waits must not pile up. Where MPI lets one
        # thread in at a time, the program may be inside it now.
        if now > self._next_receive and not launch.is_serialized():
            self._next_receive = now + _RECEIVE_INTERVAL
            for group in list(state.groups):
                rank_status.receive(group)
                timeouts.receive_failures(group)
        default = state.default  # another thread may destroy it meanwhile
        if default is not None and not launch.is_serialized():
            rank_status.receive(default)
            timeouts.receive_failures(default)
        flight_record.answer()
        if lost_ranks.is_fault_tolerant() and not launch.is_serialized():
            for group in list(state.groups):
                lost_ranks.check(group)
        for group in self._broken.keys() - state.groups:
            del self._broken[group]
        for group in list(state.groups):
            if group.device_error is not None:
                self._check_devices(group, now)
        inside = self._find_groups_inside()
        for group in [group for group in waits if group not in inside]:
            del waits[group]
        for group in inside:
            wait = waits.get(group)
            if wait is None or wait.number != group.begun:
                waits[group] = _Wait(group.begun, now)
            else:
                self._check_wait(group, wait, now)

    def _check_devices(self, group: ProcessGroup, now: float) -> None:
        """Look whether devices have ended calls of a group without their results, or never will
        end them. A program that goes on with such results without a word is ended.
        """
        if not launch.is_serialized():
            rank_status.receive(group)
            timeouts.receive_failures(group)
        group.check_device_errors()
        if group.error is None and not group.lock.locked():
            missing = rank_status.find_missing(group, True)
            if missing:  # one that leaves by an exception tells devices next, and its job may go on
                time.sleep(_NEWS_GRACE)
                group.check_device_errors()
            if missing and group.error is None:
                who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                end_stuck_job(f"{who} ended without making the last calls of this rank", 1)
        error = group.error
        if error is None or isinstance(error, LostRankError):
            return
        if group not in self._broken:
            self._broken[group] = now
            if group.pending_error is not None:
                flight_record.dump_for(group, "devices", str(error), 0)
                write_lines(f"mpicoll: {error}")
            fail_all_ranks(group, error)  # ranks that devices have not told
        elif group.pending_error is not None and now - self._broken[group] > grace():
            write_lines(
                f"mpicoll: rank {group.ranks[group.rank()]}: no call of this program has raised "
                f"the error above within {grace():g} s ({settings.TIMEOUT_GRACE.name}), "
                "and what it works with may be incomplete; ending the job"
            )
            end_job(1)

    def _check_wait(self, group: ProcessGroup, wait: _Wait, now: float) -> None:
        """Look whether the collective that a group waits in will ever end."""
        rank_status.receive(group)
        timeouts.receive_failures(group)
        # Its calls are about to end.
        ends = isinstance(group.error, (LostRankError, CollectiveTimeoutError))
        missing = [] if ends else rank_status.find_missing(group, group.keeps_time or group.busy())
        if missing:
            who = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            end_stuck_job(f"{who} ended without making this call", 1, group.thread)
        if not group.keeps_time and not ends:
            soon = min(_SEND_AFTER, math.inf if group.timeout is None else group.timeout / 2)
            if not wait.has_sent and now - wait.since > soon:
                wait.has_sent = True
                rank_status.send(group)
            mismatch = rank_status.describe_mismatch(group)
            if mismatch:
                end_stuck_job(mismatch, 1, group.thread)
        if group.timeout is not None and not group.keeps_time:
            self._check_time(group, wait, now - wait.since - group.timeout)

    def _check_time(self, group: ProcessGroup, wait: _Wait, over: float) -> None:
        """Close a group whose collective is late; end what does not end then, being inside MPI.

        over: seconds beyond the group's timeout.
        """
        if over <= 0:
            return
        if group.error is None:
            # Not here: it waits for seconds for the others' flight records.
            if wait.closing is None or not wait.closing.is_alive():
                wait.closing = threading.Thread(
                    target=_close, args=(group, wait.number), name="mpicoll-closing", daemon=True
                )
                self._closing = [one for one in self._closing if one.is_alive()]
                self._closing.append(wait.closing)
                wait.closing.start()
            return
        if wait.closed is None:
            wait.closed = over
        since = over - wait.closed  # what can leave has had a moment for it
        if since > _TICK and group.busy():  # the thread stays in there, the callers go on
            for work in list(group.pending):
                work.has_timed_out = True
                work.abandon(group.failure())
        elif since > max(grace(), _TICK):
            end_stuck_job(
                f"{group.error}. This call is inside MPI, which cannot take it back: it was given "
                f"{grace():g} s more ({settings.TIMEOUT_GRACE.name}). With "
                f"{settings.TESTED_CALLS.name}=1 it would have raised this error",
                1,
                group.thread,
            )


def _close(group: ProcessGroup, number: int) -> None:
    """Close a group whose collective of a number is late, on a thread of its own."""
    attend()
    timeouts.fail_late_call(group, number)


def _is_news_of_loss() -> bool:
    """Return whether SIGUSR1 may say that a rank is lost, as Hydra's does to those that survive:
    that writes the records by itself.
    """
    return lost_ranks.is_fault_tolerant() and any(
        lost_ranks.check(group) for group in list(state.groups)
    )


_watchdogs: set[Watchdog] = set()


def _after_fork() -> None:
    while _watchdogs:
        _watchdogs.pop().forget()


os.register_at_fork(after_in_child=_after_fork)
