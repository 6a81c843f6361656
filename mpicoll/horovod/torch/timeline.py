"""Horovod's timeline: the state of each operation over time, as a file in Chrome's trace format.

Rank 0 writes it, with one row per operation. NEGOTIATE_ALLREDUCE lasts from the first rank's
request until all ranks have made theirs, with a tick for each rank; then ALLREDUCE lasts until the
operation is done. Requests of other ranks are known from round to round, see ``engine``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

__all__ = ["TIMELINE", "Timeline", "start_from_environment"]


class Timeline:
    """A file of events, written as they happen between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._mark_cycles = False

    def start(self, path: str, mark_cycles: bool) -> None:
        """Open a file, after closing the previous one."""
        self.stop()
        with self._lock:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file = os.fdopen(file, "w")  # stop closes it
            self._mark_cycles = mark_cycles
            self._began = time.perf_counter()
            self._rows: dict[str, int] = {}
            self._ranks_ready: dict[str, set[int]] = {}
            self._separator = "[\n"
            now = time.time_ns() // 1000
            self._write("start_time_since_epoch_in_micros", "M", args={"time": now})

    def stop(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def negotiates(self, names: Iterable[str], rank: int) -> None:
        """Record that a rank has begun operations with these names."""
        if self._file is None:
            return
        with self._lock:
            for name in names:
                known = self._ranks_ready.setdefault(name, set())
                if not known:
                    self._write(f"NEGOTIATE_{_operation_name(name)}", "B", name)
                if rank not in known:
                    known.add(rank)
                    self._write(str(rank), "X", name, dur=0)

    def begins(self, name: str) -> None:
        """Record that all ranks have begun an operation, which runs now."""
        if self._file is None:
            return
        with self._lock:
            if self._ranks_ready.pop(name, None):  # else started during the negotiation
                self._write(f"NEGOTIATE_{_operation_name(name)}", "E", name)
                self._write(_operation_name(name), "B", name)

    def done(self, name: str) -> None:
        """Record that an operation is done, or has failed."""
        if self._file is None:
            return
        with self._lock:
            if name in self._rows:
                self._write(_operation_name(name), "E", name)

    def cycle(self) -> None:
        """Record a round of the engine."""
        if self._file is None or not self._mark_cycles:
            return
        with self._lock:
            self._write("CYCLE_START", "i", s="g")

    def _write(self, event: str, phase: str, row: str | None = None, **more: Any) -> None:
        if self._file is None:
            return
        at = int((time.perf_counter() - self._began) * 1e6)
        number = 0
        if row is not None:
            if row not in self._rows:
                self._rows[row] = len(self._rows) + 1
                named = {"pid": self._rows[row], "args": {"name": row}}
                self._put({"name": "process_name", "ph": "M", **named})
            number = self._rows[row]
        self._put({"name": event, "ph": phase, "ts": at, "pid": number, "tid": 0, **more})

    def _put(self, entry: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(self._separator + json.dumps(entry))
        self._separator = ",\n"
        self._file.flush()


def _operation_name(name: str) -> str:
    return name.partition(".")[0].upper()


#: The timeline of this process.
TIMELINE = Timeline()


def start_from_environment() -> None:
    """Open the file in HOROVOD_TIMELINE, with cycles if HOROVOD_TIMELINE_MARK_CYCLES=1.

    ``DYNAMIC`` means no file.
    """
    path = os.environ.get("HOROVOD_TIMELINE", "DYNAMIC")
    if path and path != "DYNAMIC":
        TIMELINE.start(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
