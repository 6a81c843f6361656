"""The calls of a group: their number and their record, and the short way of some.

The short way is a compiled module, ``src/calls.c``. Without it calls go the way in Python, to the
same behaviour: where there was no C compiler or no header of Python, where Python runs without its
lock, and with MPICOLL_CALLS=python.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from mpicoll import settings
from mpicoll.dtypes import DTYPES, Kind
from mpicoll.kernels.library import kernels

if TYPE_CHECKING:
    import threading
    from types import ModuleType

    from mpicoll.core.progress import Worker

__all__ = [
    "AGREE",
    "ALL_REDUCE",
    "BLOCKS",
    "FUSED",
    "LISTS",
    "CallEntry",
    "Calls",
    "PythonCalls",
    "Ways",
    "add_tensor_type",
    "describe",
    "find_attendant",
    "short_ways",
    "take_interruption",
]

#: The functions of ``src/shared.c`` that the short way calls, by their arguments; FUSED: with the
#: calls of a list.
ALL_REDUCE, BLOCKS, AGREE, LISTS, FUSED = range(5)

#: One call: its number in the group, its kind without the root, the number of its sizes, the root.
RecordEntry = tuple[int, int, int, int]

Fast = TypeVar("Fast", bound=Callable[..., object])
All = TypeVar("All", bound=Callable[..., object])


class CallEntry(NamedTuple):
    """A call in a group's history. Times are nanoseconds of the monotonic clock; 0: not yet.

    id:      from 1 on, in the order in which calls were made or queued.
    place:   from 1 on, in the order in which they began, the same on all ranks; 0: not begun.
    number:  of the last call that is compared between the ranks, this one included.
    kind, sizes, root: of its signature.
    created, started, completed: when it was made or queued, when it began, when it was done.
    thread:  the thread that carries it out; that has queued it, if it has not begun.
    """

    id: int
    place: int
    number: int
    kind: int
    sizes: int
    root: int
    created: int
    started: int
    completed: int
    thread: int


#: Of the number of a call that none reaches.
_NEVER = (1 << 63) - 1


#: A group's last call, laid out as in ``src/calls.c`` and failures/status_page.py, and the indices
#: of fields that are written alone.
_Cell: type[ctypes.Array[ctypes.c_uint64]] = ctypes.c_uint64 * 8
_INSIDE, _THREAD = 6, 7


class PythonCalls:
    """The calls of one group.

    lock:     held while a collective runs.
    sequence: number of collectives begun that are compared between the ranks.
    worker:   the group's thread; None before the first asynchronous call.
    next_check: the number of the call before which the ranks' records are compared next.
    compared: each call is compared by what carries it out, so that no record is needed.

    length: of the history: the latest calls, as CallEntry has them. 0: none is kept.
    thread:   the thread that made the last call, as threading.get_ident has it.
    inside:   whether that has not ended.
    """

    def __init__(self, lock: threading.Lock, length: int = 0) -> None:
        self.lock = lock
        self._length = length
        self._history: deque[list[int]] = deque(maxlen=length)
        self._entered = self._begun = 0
        self._current: list[int] | None = None
        self.sequence = 0
        self.worker: Worker | None = None
        self.next_check = 0
        self.compared = False
        self._record: list[RecordEntry] = [_NO_CALL]
        self._own = _Cell()
        self._last = self._own

    def begin(self, kind: int, sizes: int, root: int, scheduled: int = 0) -> bool:
        """Count a call and put it on the record; return whether that is to be compared now.

        scheduled: its id in the history, if it is there already.
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
        """Put a call into the history that begins now, and is not counted."""
        if self._length:
            self._start(kind, sizes, root, 0)

    def schedule(self, kind: int, sizes: int, root: int) -> int:
        """Put a queued call into the history; return its id there, 0 if none is kept."""
        if not self._length:
            return 0
        self._entered += 1
        created = monotonic_ns()
        entry = [self._entered, 0, 0, kind, sizes, root, created, 0, 0, get_ident()]
        self._history.append(entry)
        return self._entered

    def _start(self, kind: int, sizes: int, root: int, scheduled: int) -> None:
        self._begun = place = self._begun + 1
        started = monotonic_ns()
        if scheduled and scheduled > self._entered - self._length:  # it is there yet
            self._current = entry = self._history[scheduled - self._entered - 1]
            entry[1], entry[2], entry[7], entry[9] = place, self.sequence, started, get_ident()
            return
        self._entered = number = self._entered + 1
        self._current = entry = [
            number, place, self.sequence, kind, sizes, root, started, started, 0, get_ident(),
        ]  # fmt: skip
        self._history.append(entry)

    def complete(self) -> None:
        """Note that the call that began last is done."""
        if self._current is not None:
            self._current[8] = monotonic_ns()
            self._current = None

    def history(self) -> list[tuple[int, ...]]:
        """Return the latest calls, oldest first: the fields of CallEntry."""
        entries = list(self._history)
        return [(*entry[:5], entry[5] & 0xFFFFFFFF, *entry[6:]) for entry in entries]

    def end(self) -> None:
        """Note that the last call has ended, and release the lock."""
        self._last[_INSIDE] = 0
        self.lock.release()

    def publish(self, address: int) -> None:
        """Keep the last call in a cell of failures/status_page.py; 0: in this object."""
        before, self._last = self._last, _Cell.from_address(address) if address else self._own
        self._last[2:] = list(before)[2:]

    @property
    def thread(self) -> int:
        """The thread that made the last call."""
        return self._last[_THREAD]

    @property
    def inside(self) -> bool:
        """Whether the last call has not ended."""
        return bool(self._last[_INSIDE])

    @property
    def recent(self) -> list[RecordEntry]:
        """The calls since the ranks' were last compared; the last one if each is."""
        return self._record

    @recent.setter
    def recent(self, record: list[RecordEntry]) -> None:
        self._record = record
        self.compared = False

    def compare_each(self) -> None:
        """Keep no record any more: each call is compared by what carries it out."""
        self.compared = True
        self.next_check = _NEVER
        self._record = [_NO_CALL, self._record[-1]]

    def drop_last(self) -> None:
        """Strike the last call, which differed between the ranks, where each is compared."""
        self._record[-1] = (self._record[-1][0], -1, 0, 0)

    def learn(self, *way: Any) -> None:
        """Carry such calls out by the short way, if there is one."""

    def forget(self) -> None:
        """Leave all calls to Python again."""


#: Stands for the calls before the first.
_NO_CALL: RecordEntry = (0, 0, 0, 0)


def _load() -> tuple[ModuleType | None, str]:
    if settings.CALLS.is_set_to("python"):
        return None, "MPICOLL_CALLS=python"
    if kernels is None:
        return None, "the C library is not used"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return None, "Python runs without its lock"
    try:
        _calls = import_module("mpicoll.kernels._calls")
    except ImportError as error:
        return None, f"the module does not load: {error}"
    for row in DTYPES:
        # A complex tensor may be a lazy conjugate.
        code, bits = (-1, 0) if row.kind is Kind.COMPLEX else row.dlpack
        _calls.add_dtype(row, row.numpy, row.itemsize, code, bits)
    _calls.set_numpy(np.ndarray)
    if not _sees_arrays(_calls):
        _calls.set_numpy(None)
    return _calls, ""


def _sees_arrays(module: ModuleType) -> bool:
    """Return whether NumPy's arrays lie in memory as the module has them."""
    for row in DTYPES:
        whole = np.zeros((3, 5, 7), row.numpy)
        fixed = whole[:2]
        fixed.flags.writeable = False
        for array in (whole, whole[1:], whole[1, 2, 3:], whole[0, 0, 0:1].reshape(()), fixed):
            rows = array.shape[0] if array.ndim else 1
            writable = int(array.flags.writeable)
            if module.look(array) != (row, array.ctypes.data, array.size, rows, writable):
                return False
        strange = whole.T, whole[:, 1], whole[:0], whole.view(_Subclass)
        if any(module.look(array) is not None for array in strange):
            return False
    return True


class _Subclass(np.ndarray[Any, Any]):
    pass


_module, _why_not = _load()

if TYPE_CHECKING:
    Calls = PythonCalls
else:
    Calls = PythonCalls if _module is None else _module.Calls


def find_attendant() -> int:
    """Return the address of what runs the handlers of signals that are due, 0 if there is none.

    It is called without Python's lock, on the main thread, and returns whether one has raised.
    """
    return 0 if _module is None else int(_module.attendant())


def take_interruption() -> BaseException | None:
    """Return what such a handler has raised, once."""
    found: BaseException | None = None if _module is None else _module.take_interruption()
    return found


def describe() -> str:
    """Return how calls are made, "compiled" or "python", and why."""
    return f"python ({_why_not})" if _module is None else "compiled"


@dataclass(frozen=True)
class Ways(Generic[Fast, All]):  # in Python 3.10 no NamedTuple can be generic
    """What Python has a part in.

    run_fast:  a call.
    run_later: an asynchronous call that is not best carried out at once.
    run_all:   a list of calls.
    finish:    ends a call that was begun in short and could not be carried out so, or raises why
               not. Takes the group, the way's owner, what its function returned, primitive, output,
               input, root; of a list of calls those of all, and LIST.
    finished:  returns the Work of an asynchronous call that was carried out in short. Takes the
               group, primitive, output, and the error that ``finish`` has raised, or None.
    """

    run_fast: Fast
    run_later: Fast
    run_all: All
    finish: Callable[..., object]
    finished: Callable[..., object]


def short_ways(ways: Ways[Fast, All], state: object, group_type: type) -> tuple[Fast, All]:
    """Return functions that do what ``run_fast`` and ``run_all`` do, in short where they can.

    state: its attribute ``default`` is the group of calls without one. group_type: of groups.
    """
    if _module is None:
        return ways.run_fast, ways.run_all
    _module.set_up(
        state, group_type, ways.run_fast, ways.run_later, ways.run_all, ways.finish, ways.finished
    )
    return _module.run_fast, _module.run_all


def add_tensor_type(kind: type, exchange: object, is_unusual: Callable[[Any], bool]) -> None:
    """Let the short way see a type of tensors.

    exchange: the capsule of DLPack's exchange API (DLPack 1.3), None if the type has none.
    is_unusual: whether a tensor's memory is not its value.
    """
    if _module is not None and exchange is not None:
        _module.add_type(kind, exchange, is_unusual)
