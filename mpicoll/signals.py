"""Signals that launchers and schedulers send to every process of a job, not to its ranks alone."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

__all__ = ["FROM_OUTSIDE", "blocked_from_outside"]

#: By their names.
FROM_OUTSIDE = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2"})


@contextlib.contextmanager
def blocked_from_outside() -> Iterator[None]:
    """Have a process that is started here never hear them: it keeps what this thread blocks.

    It serves ranks that may go on after such a signal, and ends with them. From its first moment
    on: if it ignored them itself, one that comes while Python starts would end it.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.Signals[name] for name in FROM_OUTSIDE}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
