"""The current device of mpicoll's own threads.

A new thread has no current device. MPI may move device memory on any thread that calls it, also for
messages of other threads, and UCX fails on a thread without a current device. So each thread of
mpicoll that calls MPI makes the process's device current once the process uses one.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.cuda.runtime import Runtime

_Device = tuple["Runtime", int]
#: The first device that the process uses.
_device: _Device | None = None


class _Own(threading.local):
    """Per thread: whether it belongs to mpicoll, and its device."""

    ours = False
    device: _Device | None = None


_own = _Own()


def set_process_device(runtime: Runtime, index: int) -> None:
    """Set the device that mpicoll's threads make current, unless an earlier call has set one."""
    global _device
    if _device is None or _device[0] is not runtime:
        _device = (runtime, index)
    if _own.ours:
        use_process_device()


def use_process_device() -> None:
    """Make the process's device, if any, current on this thread of mpicoll, before each task."""
    _own.ours = True
    if _own.device is not _device and _device is not None:
        runtime, index = _own.device = _device
        with suppress(Exception):  # calls that need the device report the error
            runtime.settle(index)
