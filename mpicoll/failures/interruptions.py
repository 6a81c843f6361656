"""Signal handlers during a call: Python's handlers run while the main thread waits in C.

A thread that waits in C for shared memory runs no Python, and so no handlers of the program. It
periodically checks for pending signals and runs their handlers. If a handler raises an exception,
this rank leaves the call, which raises it.

Without the compiled module (``kernels/calls.py``) handlers run after the call.
"""

from __future__ import annotations

import threading

from mpicoll.kernels.calls import find_signal_handler, take_interruption
from mpicoll.kernels.library import kernels

__all__ = ["attend", "take"]


def attend() -> None:
    """Run handlers while this thread, the main thread, waits in shared memory."""
    if kernels is not None:
        kernels.shared_set_signal_handler(find_signal_handler())


def take() -> BaseException | None:
    """Return the exception that a handler raised in the call that this rank has left, if any."""
    if threading.current_thread() is not threading.main_thread():
        return None  # handlers run on the main thread alone
    return take_interruption()
