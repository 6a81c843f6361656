"""Processes of Linux: state, end, signals of a job, and names claimed by one per node."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

#: Signals that launchers and schedulers send to every process of a job, not only to its ranks.
JOB_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"})
_PF_EXITING = 4  # flag of a process that is exiting, in /proc/PID/stat
#: Asks Linux how the process of a pidfd has ended (since 6.15), and where the answer has that.
_PIDFD_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 8, struct.Struct("=Q52xi")


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. The next one is the parent."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """Return "running", "stopped" or "gone"."""
    with contextlib.suppress(OSError):
        return "stopped" if read_stat(pid)[0] in "Tt" else "running"
    return "gone"


def is_dying(pid: int) -> bool:
    """Return whether a process has ended, is exiting, or was sent a fatal signal.

    If any fatal signal ends a process, the kernel has SIGKILL pending for each of its threads.
    """
    with contextlib.suppress(OSError):
        state = read_stat(pid)
        return (
            state[0] in "ZX"
            or bool(int(state[6]) & _PF_EXITING)
            or any(is_in_signal_set(pid, name, signal.SIGKILL) for name in ("SigPnd", "ShdPnd"))
        )
    return True


def is_in_signal_set(pid: int, name: str, number: int) -> bool:
    """Return whether a signal is in a set of /proc/PID/status, such as SigCgt (handled)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.split(f"{name}:")[1].split()[0], 16) >> (number - 1) & 1)


def read_end(pidfd: int, pid: int, until: float) -> str:
    """Return how a process has ended: the name of a signal, "code N", or "" if it is unknown."""
    while True:  # while its parent waits for it, both sources may fail
        answer = bytearray(struct.pack("=Q", _INFO_EXIT) + bytes(56))
        with contextlib.suppress(OSError):  # after its parent has waited for it
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, answer)
            mask, code = _INFO.unpack_from(answer)
            if mask & _INFO_EXIT:
                return _name_end(code)
        with contextlib.suppress(OSError, ValueError, IndexError):  # before
            fields = read_stat(pid)
            if fields[0] in "ZX":
                return _name_end(int(fields[-1]))
        if time.monotonic() >= until:
            return ""
        time.sleep(0.002)


def _name_end(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        return f"code {code}" if code >= 0 else signal.Signals(-code).name
    return f"signal {-code}"


@contextlib.contextmanager
def blocked_job_signals() -> Iterator[None]:
    """Block ``JOB_SIGNALS`` in processes that are started in this context, which inherit the mask.

    Such a process serves ranks that may survive the signal, and ends with them. If it ignored the
    signals itself, one that arrives while Python starts would end it.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.Signals[name] for name in JOB_SIGNALS}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: The sockets of this process's claims. A forked child closes them.
_claims: dict[str, socket.socket] = {}


def claim(name: str) -> bool:
    """Claim a name on this node until ``release``, or until this process ends.

    Returns False if another process has claimed it. A claim is an abstract socket address, which
    leaves no file. Returns True where these are not allowed.
    """
    if name in _claims:
        return True
    try:
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return True
    try:
        holder.bind(f"\0{name}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE
    _claims[name] = holder
    return True


def release(name: str) -> None:
    """End this process's claim of a name, if it has one."""
    if holder := _claims.pop(name, None):
        holder.close()


def _after_fork() -> None:
    for name in list(_claims):
        release(name)


os.register_at_fork(after_in_child=_after_fork)
