"""Signals that launchers and schedulers send to every process of a job, not only to its ranks."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

#: Names of the signals.
JOB_SIGNALS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"})


@contextlib.contextmanager
def blocked_job_signals() -> Iterator[None]:
    """Block these signals in processes that are started in this context, which inherit the mask.

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
