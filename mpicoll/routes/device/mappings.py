"""Device memory of other processes that this one has mapped (CUDA IPC), and how it maps more.

A process that frees memory may get other memory at the same address. Who has the first still mapped
cannot map the second: CUDA refuses it (208, cudaErrorAlreadyMapped), as it maps another process's
memory by its address. A group finds what is stale among its own mappings, but not among those of
another group of the process, which may make no call for long. So where memory is refused, all
groups close what they only keep for later calls, and it is tried once more.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from mpicoll.cuda.runtime import Memory
from mpicoll.cuda.streams import DeviceContext

__all__ = ["keep_in_mind", "open_memory"]


class Keeper(Protocol):
    """Who keeps memory open that no call uses."""

    def close_unused(self) -> bool:
        """Close it, without waiting for a call on another thread; return whether there was any."""


#: Those of this process; held where one is added, as threads may be at both at a time.
_keepers: weakref.WeakSet[Keeper] = weakref.WeakSet()
_adding = threading.Lock()


def keep_in_mind(keeper: Keeper) -> None:
    """Ask a keeper to close what is unused, while it lives, when memory cannot be opened."""
    with _adding:
        _keepers.add(keeper)


def open_memory(context: DeviceContext, handle: bytes) -> Memory:
    """Map another process's memory, as ``Runtime.open``; raises whatever the driver says."""
    try:
        return context.runtime.open(context.index, handle)
    except Exception:  # whatever the driver says
        with _adding:
            keepers = list(_keepers)
        closed = [keeper.close_unused() for keeper in keepers]
        if not any(closed):
            raise
    return context.runtime.open(context.index, handle)
