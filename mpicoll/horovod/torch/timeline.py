"""What becomes of each operation, as a file in Chrome's trace format: Horovod's timeline.

Rank 0 writes it. Each operation is a row of its own. There NEGOTIATE_ALLREDUCE lasts from when the
first rank is known to have begun it until all have, with a tick for each rank, and ALLREDUCE until
it is done. What ranks say is known from round to round, see ``engine``.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

__all__ = ["TIMELINE", "Timeline", "start_as_told"]


class Timeline:
    """A file of events, written as they come; none before ``start`` and after ``stop``."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._mark_cycles = False

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file. A file that was not stopped is stopped."""
        self.stop()
        with self._lock:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file = os.fdopen(file, "w")  # stop closes it
            self._mark_cycles = mark_cycles
            self._began = time.perf_counter()
            self._rows: dict[str, int] = {}
            self._told: dict[str, set[int]] = {}
            self._separator = "[\n"
            now = time.time_ns() // 1000
            self._write("start_time_since_epoch_in_micros", "M", args={"time": now})

    def stop(self) -> None:
        """End the file."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def told(self, names: Iterable[str], rank: int) -> None:
        """A rank has begun operations, by their names."""
        if self._file is None:
            return
        with self._lock:
            for name in names:
                known = self._told.setdefault(name, set())
                if not known:
                    self._write(f"NEGOTIATE_{_kind(name)}", "B", name)
                if rank not in known:
                    known.add(rank)
                    self._write(str(rank), "X", name, dur=0)

    def runs(self, name: str) -> None:
        """All ranks have begun an operation: it is carried out."""
        if self._file is None:
            return
        with self._lock:
            if self._told.pop(name, None):  # else the file began in the middle of it
                self._write(f"NEGOTIATE_{_kind(name)}", "E", name)
                self._write(_kind(name), "B", name)

    def done(self, name: str) -> None:
        """An operation is done, or has failed."""
        if self._file is None:
            return
        with self._lock:
            if name in self._rows:
                self._write(_kind(name), "E", name)

    def cycle(self) -> None:
        """The ranks tell each other what they have begun."""
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


def _kind(name: str) -> str:
    return name.partition(".")[0].upper()


#: That of this process.
TIMELINE = Timeline()


def start_as_told() -> None:
    """Begin the file that HOROVOD_TIMELINE names, with cycles if HOROVOD_TIMELINE_MARK_CYCLES=1.

    ``DYNAMIC`` there names none.
    """
    path = os.environ.get("HOROVOD_TIMELINE", "DYNAMIC")
    if path and path != "DYNAMIC":
        TIMELINE.start(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
