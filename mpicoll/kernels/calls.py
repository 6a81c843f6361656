"""The calls of a group: call numbers, call records, history and the native fast path.

The native fast path is a compiled module, ``src/calls.c``. Without it calls run in Python, with the
same behavior: without a C compiler or Python header, in free-threaded Python, and with
MPICOLL_CALLS=python.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from importlib import import_module
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mpicoll import settings
from mpicoll.kernels.library import kernels

if TYPE_CHECKING:
    import threading
    from types import ModuleType

    from mpicoll.core.progress import Worker

#: The types of functions of the C library that fast paths call; FUSED runs a list of calls.
LISTS, COMPARE, FUSED = range(3)

#: A call record: call number, signature without the root, number for the sizes, root.
RecordEntry = tuple[int, int, int, int]

Fast = TypeVar("Fast", bound=Callable[..., object])
All = TypeVar("All", bound=Callable[..., object])
Root = TypeVar("Root", bound=Callable[..., int])


class CallEntry(NamedTuple):
    """A call in a group's history. Times are nanoseconds of the monotonic clock; 0: not yet."""

    id: int  # number, from 1 on, in the order in which calls were made or queued
    #: Number, from 1 on, in the order in which calls began, which is the same on all ranks; 0: not
    #: begun.
    place: int
    number: int  # the call number, or the latest call number if this call has none
    kind: int
    sizes: int
    root: int
    created: int  # when the call was made or queued
    started: int
    completed: int
    thread: int  # the thread that runs the call, or has queued it


#: A call number that is never reached.
_NEVER = (1 << 63) - 1


#: A group's last call, mirrored in ``src/calls.c`` and failures/status_page.py, and the indices of
#: fields that are written individually.
_LastCall: type[ctypes.Array[ctypes.c_uint64]] = ctypes.c_uint64 * 8
_INSIDE, _THREAD = 6, 7


class PythonCalls:
    """The calls of one group.

    lock:     held while a collective runs.
    length:   number of calls in the history; 0: no history is kept.
    sequence: call number of the last collective; only calls that are compared between the ranks
              count.
    worker:   the group's progress thread; None before the first asynchronous call.
    group_ranks: the rank in the group of each global rank.
    next_check: call number at which the ranks' records are compared next.
    compared: each call is compared as it runs, so only the last record is kept.
    """

    def __init__(self, lock: threading.Lock, length: int = 0) -> None:
        self.lock = lock
        self._length = length
        self._history: deque[list[int]] = deque(maxlen=length)
        self._entered = self._begun = 0
        self._current: list[int] | None = None
        self.sequence = 0
        self.worker: Worker | None = None
        self.group_ranks: dict[int, int] = {}
        self.next_check = 0
        self.compared = False
        self._record: list[RecordEntry] = [NO_CALL]
        self._own = _LastCall()
        self._last = self._own

    def begin(self, kind: int, sizes: int, root: int, scheduled: int = 0) -> bool:
        """Count a call and record it; return whether the records must be compared now. scheduled:
        the id of its entry if the call is already in the history.
        """
        self.sequence += 1
        if self._length:
            self._start(kind, sizes, root, scheduled)
        entry = (self.sequence, kind, sizes, root & 0xFFFFFFFF)
        self._last[2:] = [*entry, 1, get_ident()]
        if self.compared:
            self._record[-1] = entry
        else:
            self._record.append(entry)
        return self.sequence >= self.next_check

    def begin_uncompared(self, kind: int, sizes: int, root: int) -> None:
        """Add a call that begins now and has no call number to the history."""
        if self._length:
            self._start(kind, sizes, root, 0)

    def schedule(self, kind: int, sizes: int, root: int) -> int:
        """Add a queued call to the history; return its id, or 0 if no history is kept."""
        if not self._length:
            return 0
        self._entered += 1
        entry = [self._entered, 0, 0, kind, sizes, root, monotonic_ns(), 0, 0, get_ident()]
        self._history.append(entry)
        return self._entered

    def _start(self, kind: int, sizes: int, root: int, scheduled: int) -> None:
        self._begun = place = self._begun + 1
        started = monotonic_ns()
        if scheduled and scheduled > self._entered - self._length:  # its entry has not been dropped
            self._current = entry = self._history[scheduled - self._entered - 1]
            entry[1], entry[2], entry[7], entry[9] = place, self.sequence, started, get_ident()
            return
        self._entered = number = self._entered + 1
        self._current = entry = [
            number, place, self.sequence, kind, sizes, root, started, started, 0, get_ident(),
        ]  # fmt: skip
        self._history.append(entry)

    def complete(self) -> None:
        """Mark the running call as completed."""
        if self._current is not None:
            self._current[8] = monotonic_ns()
            self._current = None

    def history(self) -> list[tuple[int, ...]]:
        """Return the latest calls, oldest first, as tuples of CallEntry's fields."""
        return [(*one[:5], one[5] & 0xFFFFFFFF, *one[6:]) for one in list(self._history)]

    def end(self) -> None:
        """Mark the last call as ended, and release the lock."""
        self._last[_INSIDE] = 0
        self.lock.release()

    def publish(self, address: int) -> None:
        """From now on store the last call at an address in the status page; 0: in this object."""
        before, self._last = self._last, _LastCall.from_address(address) if address else self._own
        self._last[2:] = list(before)[2:]

    @property
    def thread(self) -> int:
        """The thread that ran the last call."""
        return self._last[_THREAD]

    @property
    def inside(self) -> bool:
        """Whether the last call is still running."""
        return bool(self._last[_INSIDE])

    @property
    def recent(self) -> list[RecordEntry]:
        """The call records since the last comparison; only the last one if ``compared``."""
        return self._record

    @recent.setter
    def recent(self, record: list[RecordEntry]) -> None:
        self._record = record
        self.compared = False

    def compare_each(self) -> None:
        """From now on each call is compared as it runs; keep only the last record."""
        self.compared = True
        self.next_check = _NEVER
        self._record = [NO_CALL, self._record[-1]]

    def drop_last(self) -> None:
        """Erase the record of the last call, whose mismatch was reported. Only if ``compared``."""
        self._record[-1] = (self._record[-1][0], -1, 0, 0)

    def register_fast_path(self, *path: Any) -> None:
        """Run matching calls by the native fast path, if it is available."""

    def forget_fast_paths(self) -> None:
        """Run all calls in Python again."""


#: The record before the first call.
NO_CALL: RecordEntry = (0, 0, 0, 0)


def _load() -> tuple[ModuleType | None, str]:
    if settings.CALLS.is_set_to("python"):
        return None, "MPICOLL_CALLS=python"
    if kernels is None:
        return None, "the C library is not used"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "free-threaded Python is not supported"
    try:
        return import_module("mpicoll.kernels._calls"), ""
    except ImportError as error:
        return None, f"the module does not load: {error}"


@cache
def _add_dtypes(module: ModuleType) -> None:
    """Register the dtypes once, and NumPy's arrays if they have the layout that C code assumes."""
    import numpy as np

    from mpicoll.dtypes import DTYPES, Kind

    for row in DTYPES:
        # A complex tensor may be a lazy conjugate.
        code, bits = (-1, 0) if row.kind is Kind.COMPLEX else row.dlpack
        module.add_dtype(row, row.numpy, row.itemsize, code, bits)
    module.set_numpy(np.ndarray)
    if not _has_known_layout(module):
        module.set_numpy(None)


def _has_known_layout(module: ModuleType) -> bool:
    import numpy as np

    from mpicoll.dtypes import DTYPES

    subclass: Any = type("_Subclass", (np.ndarray,), {})
    for row in DTYPES:
        whole = np.zeros((3, 5, 7), row.numpy)
        fixed = whole[:2]
        fixed.flags.writeable = False
        for array in (whole, whole[1:], whole[1, 2, 3:], whole[0, 0, 0:1].reshape(()), fixed):
            rows = array.shape[0] if array.ndim else 1
            writable = int(array.flags.writeable)
            if module.view_array(array) != (row, array.ctypes.data, array.size, rows, writable):
                return False
        unsupported = whole.T, whole[:, 1], whole[:0], whole.view(subclass)
        if any(module.view_array(array) is not None for array in unsupported):
            return False
    return True


_module, _missing_reason = _load()

if TYPE_CHECKING:
    Calls = PythonCalls
else:
    Calls = PythonCalls if _module is None else _module.Calls


def find_signal_handler() -> int:
    """Return the address of the C function that runs pending signal handlers, or 0. It is called
    without the GIL, on the main thread, and returns whether a handler has raised.
    """
    return 0 if _module is None else int(_module.signal_handler())


def take_interruption() -> BaseException | None:
    """Return the exception that a signal handler has raised, once."""
    return None if _module is None else _module.take_interruption()


def describe() -> str:
    """Return "compiled", or "python" and the reason."""
    return f"python ({_missing_reason})" if _module is None else "compiled"


def bind_fast_path(
    run_fast: Fast,
    run_all: All,
    find_root: Root,
    state: object,
    group_type: type,
    *,
    run_later: Callable[..., object],
    finish: Callable[..., object],
    finished: Callable[..., object],
) -> tuple[Fast, All, Root]:
    """Return native functions like ``run_fast``, ``run_all`` and ``find_root`` if possible.

    run_fast:   runs a call. run_all: runs a list of calls. find_root: returns the root of a call.
    state:      its attribute ``default`` is the default group. group_type: type of groups.
    run_later:  runs an asynchronous call that must be queued.
    finish:     completes a call whose C function did not return 1, or raises. Takes the group, the
                fast path's owner, the result, primitive, output, input and root; a list of calls
                passes all outputs, all inputs and LIST.
    finished:   returns the Work of an asynchronous call that has run. Takes the group, primitive,
                output, and the exception that ``finish`` has raised, or None.
    """
    if _module is None:
        return run_fast, run_all, find_root
    _add_dtypes(_module)
    _module.set_up(state, group_type, run_fast, run_later, run_all, find_root, finish, finished)
    return _module.run_fast, _module.run_all, _module.find_root


def add_tensor_type(kind: type, exchange: object, is_unusual: Callable[[Any], bool]) -> None:
    """Support tensors of a type in the native fast path. exchange: the capsule of DLPack's exchange
    API (DLPack 1.3), or None. is_unusual: returns whether a tensor's memory is not its value.
    """
    if _module is not None and exchange is not None:
        _module.add_type(kind, exchange, is_unusual)
