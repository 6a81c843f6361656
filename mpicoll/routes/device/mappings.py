"""Device memory of other processes, mapped by CUDA IPC.

A process that frees memory may get new memory at the same address. CUDA cannot map the new memory
while the old mapping exists (208, cudaErrorAlreadyMapped). A group closes its own stale mappings,
but another group of the process may keep one. So if a mapping fails, all groups close the mappings
that no call uses, and it is tried once more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from mpicoll.cuda.runtime import Allocation, Event, Memory
from mpicoll.cuda.streams import DeviceContext, poll_until

#: Size in bytes of the driver's blocks. Small allocations share a block, and opening one of them
#: maps the whole block.
BLOCK = 2 * 1024 * 1024
#: Seconds to wait for a stream to finish with a mapping that blocks another one.
_CLOSE_TIMEOUT_S = 1.0

_all: weakref.WeakSet[Mappings] = weakref.WeakSet()
_lock = threading.Lock()  # held while ``_all`` is read or changed


def open_memory(context: DeviceContext, handle: bytes) -> Memory:
    """Map another process's memory. After an error, close all unused mappings and retry once."""
    try:
        return context.runtime.open(context.index, handle)
    except Exception:
        with _lock:
            groups = list(_all)
        closed = [mappings.close_unused() for mappings in groups]
        if not any(closed):
            raise
    return context.runtime.open(context.index, handle)


class Mappings:
    """A group's mappings of other ranks' allocations, which it keeps for later calls.

    A buffer id is never reused, so memory at the same address with another id is opened again, and
    the old mapping is closed once the stream no longer uses it. (UCX's cuda_ipc cache also keeps
    freed memory mapped until then.)
    """

    def __init__(self, context: DeviceContext, limit: int) -> None:
        """limit: maximum number of mappings; the least recently used ones are closed."""
        self._context, self._limit = context, limit
        #: By rank and base, in LRU order.
        self._open: dict[tuple[int, int], tuple[Allocation, Memory]] = {}
        self._retired: deque[tuple[Event, Memory]] = deque()
        self._lock = threading.RLock()  # held in a call
        self._in_call = False
        with _lock:
            _all.add(self)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context of a call, in which only retired memory is closed."""
        with self._lock:
            self._in_call = True
            try:
                yield
            finally:
                self._in_call = False

    def get(self, rank: int, found: Allocation, handle: bytes) -> int:
        """Return the address in this process of another rank's allocation.

        Raises the driver's error if it cannot be mapped.
        """
        key, end = (rank, found.base), found.base + found.nbytes
        if key in self._open and self._open[key][0] == found:
            self._open[key] = self._open.pop(key)  # the most recently used one
            return self._open[key][1].address
        freed = [
            (whose, base)
            for (whose, base), (old, _) in self._open.items()
            if whose == rank and base < end and found.base < base + old.nbytes
        ]
        for other in freed:
            self._retire(other)
        self._open[key] = found, open_memory(self._context, handle)
        if len(self._open) > self._limit:
            self._retire(next(iter(self._open)))
        return self._open[key][1].address

    def _retire(self, key: tuple[int, int]) -> None:
        """Close a mapping once the work in the stream is done."""
        _, memory = self._open.pop(key)
        self._retired.append((self._context.record(), memory))

    def close_retired(self, moment: float = 0.0) -> None:
        """Close retired memory that the stream no longer uses; wait until a monotonic time."""
        while self._retired:
            event, _ = self._retired[0]
            if not poll_until(partial(self._context.runtime.is_done, event), moment):
                return
            self._retired.popleft()

    def close_unused(self) -> bool:
        """Close memory that no call uses, unless another thread is in a call; return whether any
        was closed. In a call of this thread, close only retired memory.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._open and not self._in_call:
                self._retire(next(iter(self._open)))
            before = len(self._retired)
            self.close_retired(time.monotonic() + _CLOSE_TIMEOUT_S)
            return len(self._retired) < before
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Close all mappings; the stream has finished."""
        with self._lock:
            self._open.clear()
            self._retired.clear()
