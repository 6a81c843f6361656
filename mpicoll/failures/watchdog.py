"""Watchdog: a thread that ends the job when a rank is stuck inside MPI.

A thread that is blocked inside MPI runs no Python. So the watchdog thread handles Ctrl-C, checks
for calls that are late or wait for a rank that has ended, and receives the end of the job from the
launch server and the node monitor.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable
from copy import copy
from weakref import WeakKeyDictionary

from mpicoll import settings
from mpicoll.core.groups import ProcessGroup, state
from mpicoll.cuda.threads import use_process_device
from mpicoll.errors import DistBackendError, LostRankError, MismatchError
from mpicoll.failures import flight_record, group_failure, lost_ranks, monitor_client, rank_status
from mpicoll.kernels.calls import find_signal_handler
from mpicoll.kernels.library import kernels
from mpicoll.launch import exit_hooks
from mpicoll.launch.error_output import find_stack, with_rank
from mpicoll.launch.exit_hooks import INTERRUPTED, RankEnd, end_ranks, flush_output
from mpicoll.launch.session import current_session
from mpicoll.launch.world import is_serialized
from mpicoll.output import flush_streams, write_lines

#: Maximum time between checks of the groups.
_CHECK_INTERVAL_S = 1.0
#: Default time after which a call is reported as late: maximum, and fraction of the timeout.
_REPORT_AFTER_S, _TIMEOUT_FRACTION = 60.0, 0.5
#: Time that a blocked call of MPI has to return after Ctrl-C.
_INTERRUPT_GRACE_S = 1.0
#: Time that the watchdog thread spends in one check before the standby thread checks the devices.
_STUCK_AFTER_S = 3.0
#: Time between the message that another rank has ended the job and the end of this rank. Meanwhile
#: this rank may print its own message, and the launcher sees which rank was first.
_JOB_END_GRACE_S = 0.5
#: Time after which a rank that waits in a collective sends its status, and interval at which a rank
#: that does not wait receives status messages.
_SEND_AFTER_S, _RECEIVE_INTERVAL_S = 2.0, 10.0


def end_job(code: int) -> None:
    """End every rank of the job with an exit code, after flushing the output."""
    for line in flight_record.last_words():
        write_lines(line)
    monitor_client.report_ending()
    if flight_record.wait_for_others():
        time.sleep(_JOB_END_GRACE_S)  # other ranks may print their errors now
    flush_output()
    end_ranks(code)


def _report_after(group: ProcessGroup) -> float:
    """Return the time in seconds after which a call is reported as late; 0: never."""
    timeout = math.inf if group.timeout is None else _TIMEOUT_FRACTION * group.timeout
    return float(settings.REPORT_AFTER.value() or min(_REPORT_AFTER_S, timeout))


class _Wait:
    """The collective that a group is inside, if any, and when the group was first seen FAILED."""

    def __init__(self, number: int = -1, since: float = 0.0, failed: float | None = None) -> None:
        self.number = number  # of the collective, -1 outside
        self.since = since  # when it was first seen
        self.is_reported = False  # as late
        self.has_sent = False  # the rank has sent its status
        self.failed = failed


class Watchdog(RankEnd):
    """The watchdog thread, from init_process_group to destroy_process_group. As a RankEnd, the
    steps by which this rank ends its job.

    at_exit: called when the interpreter ends with success, without a destroy.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        global _current
        self._at_exit = at_exit
        self._stopping = threading.Event()
        self._check_since = math.inf  # when the watchdog thread began the present check
        self._standby: threading.Thread | None = None
        self._waits: WeakKeyDictionary[ProcessGroup, _Wait] = WeakKeyDictionary()
        self._next_receive = time.monotonic() + _RECEIVE_INTERVAL_S
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        exit_hooks.install(self)
        self._receives_signals = threading.current_thread() is threading.main_thread()
        if self._receives_signals:
            if kernels is not None:  # a call that waits in C then runs the program's handlers
                kernels.shared_set_signal_handler(find_signal_handler())
            previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            if previous_fd != -1:  # another library uses it, most likely asyncio
                signal.set_wakeup_fd(previous_fd)
                self._receives_signals = False
        _current = self
        self._thread = threading.Thread(target=self._run, name="mpicoll-watchdog", daemon=True)
        self._thread.start()
        self.native_id = self._thread.native_id or 0

    def remove(self) -> None:
        """Reset the exit hooks to those of a rank without a group, and end the threads."""
        global _current
        exit_hooks.install_in_rank()
        self._stopping.set()
        os.write(self._writer, b"\0")
        for thread in filter(None, (self._thread, self._standby)):
            thread.join()
        _current = None
        # On another thread, Python would still write to the pipe at each signal.
        if not self._receives_signals or threading.current_thread() is threading.main_thread():
            self.forget()

    def forget(self) -> None:
        """Close the pipe; a forked child also does so, because it belongs to the parent."""
        if self._receives_signals:
            current_fd = signal.set_wakeup_fd(-1)
            if current_fd not in (self._writer, -1):
                signal.set_wakeup_fd(current_fd)
        os.close(self._reader)
        os.close(self._writer)

    def rank(self) -> str:
        """Return this rank in the default group, else in the job, "?" if it is unknown."""
        default = state.default  # another thread may end it meanwhile
        return super().rank() if default is None else str(default.rank())

    def extra_lines(self) -> list[str]:
        """Report this rank's end to the node monitor; return the line with the flight records."""
        monitor_client.report_ending()
        return flight_record.last_words()

    def end_job(self, code: int) -> None:
        """End every rank of the job."""
        end_job(code)

    def at_exit(self) -> None:
        """End the groups."""
        self._at_exit()

    def _end_stuck_job(self, why: str, code: int, thread: int = 0) -> None:
        """End the job with the stack of a thread that is inside MPI, in which nothing can raise.

        thread: that one, as threading.get_ident returns it; 0: the main thread.
        """
        found = find_stack(thread or threading.main_thread().ident or 0)
        stack, rank = "".join(traceback.format_list(found)), self.rank()
        told = f"mpicoll: rank {rank}: {why} (in the call above); ending the job"
        text = with_rank(rank, f"Traceback (most recent call last):\n{stack}{told}")
        write_lines("\n".join((text, *flight_record.last_words())))
        end_job(code)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        session = current_session()
        if session is not None:
            poll.register(session, select.POLLIN)
        while True:
            groups = list(state.groups)
            limits = {group.timeout for group in groups} | {*map(_report_after, groups)}
            pause = min([_CHECK_INTERVAL_S, *(max(each / 5, 0.1) for each in limits if each)])
            ready = [descriptor for descriptor, _ in poll.poll(1000 * pause)]
            if self._stopping.is_set():
                return
            self._check_since = time.monotonic()
            signals = os.read(self._reader, 512) if self._reader in ready else b""
            if signal.SIGINT in signals:
                self._handle_interrupt()
            if session is not None and session.fileno() in ready:
                self._handle_job_end(session.end_reason(), session.rank)
            if monitor_client.is_ordered_to_end():  # the monitor has printed the reason
                end_job(1)
            self._check_groups()
            self._check_since = math.inf

    def start_standby(self) -> None:
        """Start the standby thread. Call it before device work waits for other ranks."""
        if self._standby is None:
            self._standby = threading.Thread(
                target=self._stand_by, name="mpicoll-watchdog-standby", daemon=True
            )
            self._standby.start()

    def _stand_by(self) -> None:
        """End the device work of failed groups while the watchdog thread is stuck.

        The garbage collector may run destructors of the program on the watchdog thread. One that
        frees device memory waits until all kernels end, also those that wait for a lost rank and
        that the watchdog thread is to abort. Until it returns, the collector does not run on
        another thread.
        """
        while not self._stopping.wait(_CHECK_INTERVAL_S):
            if time.monotonic() - self._check_since > _STUCK_AFTER_S:
                self._check_devices()

    def _check_devices(self) -> None:
        """End the device work of failed groups, and fail groups whose devices have failed."""
        use_process_device()
        groups = [group for group in list(state.groups) if group.device_error is not None]
        for group in groups:
            group.check_device_errors()
            wait = self._waits.get(group)
            if group.error is not None and (wait is None or wait.failed is None):
                group.resources.leave(alone=True)
        if not is_serialized():
            for group in groups:  # last: another thread may be stuck inside
                group_failure.receive_failures(group)

    def _find_calls(self) -> set[tuple[ProcessGroup, int]]:
        """Return each group that is inside a synchronous call, with the number of the call."""
        groups = [group for group in list(state.groups) if group.lock.locked()]
        return {(group, group.begun) for group in groups if not group.busy()}

    def _handle_interrupt(self) -> None:
        """End the job after Ctrl-C if a call is blocked in MPI.

        Python raises KeyboardInterrupt between two bytecodes, and a blocked call does not return.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        before = self._find_calls()
        time.sleep(_INTERRUPT_GRACE_S)
        if before & self._find_calls():
            self._end_stuck_job("interrupted while it waited for other ranks", INTERRUPTED)

    def _handle_job_end(self, ending: tuple[str, int] | None, rank: int) -> None:
        """End this rank because the launch server reports the end of the job."""
        if ending is None:
            return
        why, code = ending
        if why:  # else MPI_Abort in this process relies on the launcher to end it
            time.sleep(_JOB_END_GRACE_S)
            if self._stopping.is_set():
                return
            flight_record.write(why)
            records = flight_record.last_words() if rank == 0 else []
            write_lines("\n".join([f"mpicoll: rank {rank}: {why}; ending too", *records]))
            flush_streams()
        monitor_client.report_ending()
        os._exit(code)

    def _check_groups(self) -> None:
        self._check_devices()
        now = time.monotonic()
        if not is_serialized():  # else the program may be inside MPI now
            is_due = now > self._next_receive  # messages for a rank that never waits accumulate
            if is_due:
                self._next_receive = now + _RECEIVE_INTERVAL_S
            for group in list(state.groups):
                if is_due or group is state.default:
                    group_failure.receive_failures(group)
                if lost_ranks.is_fault_tolerant():
                    lost_ranks.check(group)
        for group in list(state.groups):
            wait = self._waits.setdefault(group, _Wait())
            number = group.begun if group.lock.locked() else -1
            if number != wait.number:
                self._waits[group] = _Wait(number, now, wait.failed)
            elif number >= 0:
                self._check_wait(group, wait, now - wait.since)
            elif group.device_error is not None and group.error is None:
                self._check_missing(group)
            if (error := group.error) is not None:
                self._check_failed(group, error, self._waits[group], now)
        flight_record.answer()  # last: another rank may wait for it to end the job

    def _check_wait(self, group: ProcessGroup, wait: _Wait, waited: float) -> None:
        """Fail a group if the collective that it waits in is late, or cannot complete."""
        if not wait.is_reported and 0 < _report_after(group) < waited:
            wait.is_reported = True
            monitor_client.report_late(group, wait.number - group.formed, waited)
        group_failure.receive_failures(group)
        keeps_time = group.task.keeps_time
        if group.error is not None:
            return
        if missing := rank_status.find_missing(group, keeps_time or group.busy()):
            why = f"{missing} ended without making this call"
            group_failure.fail(group, MismatchError(f"group {group.group_name}: {why}"))
        elif not keeps_time:
            soon = min(_SEND_AFTER_S, math.inf if group.timeout is None else group.timeout / 2)
            if not wait.has_sent and waited > soon:
                wait.has_sent = True
                rank_status.send(group)
            if mismatch := group_failure.find_mismatch(group):
                group_failure.fail(group, mismatch)
            elif group.timeout is not None and waited > group.timeout:
                group_failure.fail_late_call(group, wait.number)

    def _check_missing(self, group: ProcessGroup) -> None:
        """Fail a group whose device work waits for a rank that has ended."""
        if missing := rank_status.find_missing(group, True):
            time.sleep(_JOB_END_GRACE_S)  # a rank that raises an exception notifies devices next
            group.check_device_errors()
            why = f"{missing} ended without making the last calls of this rank"
            group_failure.fail(
                group, MismatchError(f"group {group.group_name}: {why}"), pending=True
            )

    def _check_failed(
        self, group: ProcessGroup, error: DistBackendError, wait: _Wait, now: float
    ) -> None:
        """End the job if the program does not notice that a group has failed: no call has raised
        its device error, or a call is blocked inside MPI.
        """
        is_lost = isinstance(error, LostRankError)
        if wait.failed is None:
            wait.failed = now
            if group.pending_error is not None:
                write_lines(f"mpicoll: {error}")
            if group.device_error is not None and not is_lost:
                group_failure.fail(group, error)  # some devices may not have notified their ranks
        limit, setting = group_failure.grace(), settings.TIMEOUT_GRACE.name
        if group.pending_error is not None and now - wait.failed > limit and not is_lost:
            write_lines(
                f"mpicoll: rank {group.ranks[group.rank()]}: no call of this program has raised "
                f"the error above within {limit:g} s ({setting}), and its data may be incomplete; "
                "ending the job"
            )
            end_job(1)
        if wait.number < 0 or (group.task.keeps_time and not rank_status.find_missing(group, True)):
            return
        since = now - max(wait.failed, wait.since)
        if since > _CHECK_INTERVAL_S and group.busy():  # the progress thread is stuck
            for work in list(group.pending):
                work.has_timed_out = True
                work.abandon(copy(error))
            return
        late = f" and has not returned within {limit:g} s more ({setting})"
        if isinstance(error, MismatchError):  # else late ranks may still come
            limit, late = 0.0, ""
        elif is_lost:  # MPI makes most calls return
            limit += math.inf if group.timeout is None else group.timeout
        if since > max(limit, _CHECK_INTERVAL_S):
            why = (
                f"{error}. This call is blocked inside MPI{late}. With "
                f"{settings.TESTED_CALLS.name}=1 it would have raised this error"
            )
            self._end_stuck_job(why, 1, group.thread)


#: The watchdog of this process.
_current: Watchdog | None = None


def watch_devices() -> None:
    """Start the standby thread, before a group has device work that waits for other ranks."""
    if _current is not None:
        _current.start_standby()


def _after_fork() -> None:
    global _current
    if _current is not None:
        _current.forget()
        _current = None


os.register_at_fork(after_in_child=_after_fork)
