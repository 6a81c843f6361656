"""Map device memory of other processes (CUDA IPC).

A process that frees memory may get new memory at the same address. CUDA cannot map the new memory
while the old mapping exists (208, cudaErrorAlreadyMapped). A group closes its own stale mappings,
but another group of the process may keep one. So if a mapping fails, all groups close the mappings
that no call uses, and it is tried once more.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from mpicoll.cuda.runtime import Memory
from mpicoll.cuda.streams import DeviceContext

__all__ = ["open_memory", "register_cache"]


class MappingCache(Protocol):
    """An object that keeps memory mapped for later calls."""

    def close_unused(self) -> bool:
        """Close memory that no call uses, without waiting for a call on another thread; return
        whether any was closed.
        """


_caches: weakref.WeakSet[MappingCache] = weakref.WeakSet()
_lock = threading.Lock()  # held while ``_caches`` is read or changed


def register_cache(cache: MappingCache) -> None:
    """Register a cache (weakly), whose unused memory is closed when memory cannot be mapped."""
    with _lock:
        _caches.add(cache)


def open_memory(context: DeviceContext, handle: bytes) -> Memory:
    """Map another process's memory, as ``Runtime.open``. Raises the driver's error."""
    try:
        return context.runtime.open(context.index, handle)
    except Exception:
        with _lock:
            caches = list(_caches)
        closed = [cache.close_unused() for cache in caches]
        if not any(closed):
            raise
    return context.runtime.open(context.index, handle)
