"""The device that mpicoll's own threads work on.

A thread begins with no device. MPI may move device memory on any thread that calls it, for messages
of any other: UCX then fails on one where no device is current. So each of our threads that calls
MPI has one, from when the process has given mpicoll one to work on.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicoll.cuda.runtime import Runtime

__all__ = ["announce", "attend"]

_Device = tuple["Runtime", int]
#: The first device that the process works on.
_device: _Device | None = None


class _Own(threading.local):
    """Of a thread: whether it is one of mpicoll's, and the device that it has been given."""

    ours = False
    device: _Device | None = None


_own = _Own()


def announce(runtime: Runtime, index: int) -> None:
    """Tell mpicoll's threads that the process works on a device; they keep to the first."""
    global _device
    if _device is None or _device[0] is not runtime:
        _device = (runtime, index)
    if _own.ours:
        attend()


def attend() -> None:
    """Give this thread of mpicoll's the process's device, once there is one. It asks now and then:
    before each task.
    """
    _own.ours = True
    if _own.device is not _device and _device is not None:
        runtime, index = _own.device = _device
        with suppress(Exception):  # the calls that need the device say what is wrong with it
            runtime.settle(index)
