"""Signals in the middle of a call: Python's handlers run while the main thread waits in C.

A thread that waits in C, in shared memory, runs no Python, and so none of the program's handlers.
There it looks now and then whether one is due. If that raises, as sys.exit or KeyboardInterrupt do,
this rank leaves the call, which raises the same.

Without the compiled module (see ``kernels/calls.py``) handlers run when the call has ended.
"""

from __future__ import annotations

import threading

from mpicoll.kernels.calls import find_attendant, take_interruption
from mpicoll.kernels.library import kernels

__all__ = ["attend", "take"]


def attend() -> None:
    """Let handlers run while this thread, the main one, waits in shared memory."""
    if kernels is not None:
        kernels.shared_attend(find_attendant())


def take() -> BaseException | None:
    """Return what a handler has raised in the call that this rank has left, None for nothing."""
    if threading.current_thread() is not threading.main_thread():
        return None  # handlers run on the main thread alone
    return take_interruption()
