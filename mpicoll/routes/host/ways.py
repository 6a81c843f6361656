"""The measured ways of a group's calls through shared memory; see ``kernels/src/choice.c``.

Rank 0 keeps the durations in a file, by machine, MPI, number of ranks and their processors. A later
job begins with the fastest way of the file, and measures again after some calls.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpicoll import __version__, control_messages, machine, private_files, settings
from mpicoll.core.groups import ProcessGroup
from mpicoll.kernels.library import Kernels
from mpicoll.output import format_bytes
from mpicoll.routes.tuning import job

#: The number of size classes of choice.c: powers of two.
_CLASS_COUNT = 40
#: How choice.c chooses for tests, by value of MPICOLL_CHOOSE.
_MODES = {"random": 1} | {way.lower(): 2 + (1 << bit) for bit, way in enumerate(settings.WAYS)}
#: Maximum size of a file, which is sent to all ranks.
_MAX_FILE_BYTES = 2**20
_PARSE_ERRORS = ValueError, TypeError, AttributeError, OverflowError, RecursionError

#: Nanoseconds by kind of call, exponent of the bytes, and way.
Times = dict[str, dict[int, dict[int, int]]]


class Ways:
    """The measured ways of one group's calls, by kind of call.

    kernels:   the C library.
    processors: the processors of each rank, as text.
    """

    def __init__(self, kernels: Kernels, group: ProcessGroup, processors: str) -> None:
        """All ranks call."""
        self._kernels = kernels
        self._choices: dict[str, np.ndarray] = {}  # by kind of call
        self._path: Path | None = None
        self._known: Times = {}
        if job.choose not in ("0", *_MODES):  # the same on all ranks
            if group.rank() == 0:
                self._path = _path(f"{group.size()} ranks on {processors}")
            text = control_messages.bcast(group.tested, _read(self._path), 0, str)
            with suppress(*_PARSE_ERRORS):
                self._known = _parse(text)

    def make(self, kind: str) -> int:
        """Return the address of a new table of ways for a kind of call; 0: the default ways."""
        if job.choose == "0":
            return 0
        made = self._choices[kind] = np.zeros(self._kernels.choices_size(), np.uint8)
        made[:4].view(np.uint32)[0] = _MODES.get(job.choose, 0)
        for exponent, times in self._known.get(kind, {}).items():
            for way, ns in times.items():
                self._kernels.choice_set(made.ctypes.data, 1 << exponent, way, ns)
        return made.ctypes.data

    def describe(self) -> dict[str, str]:
        """Return the measured ways by kind and size of call, the fastest first."""
        found = {}
        for kind, sizes in self._measured().items():
            for exponent, times in sizes.items():
                fastest_first = sorted(times.items(), key=lambda item: item[1])
                ways = (f"{_name(way)} {ns / 1000:.1f} us" for way, ns in fastest_first)
                found[f"{kind} {format_bytes(1 << exponent)}"] = ", ".join(ways)
        return found

    def save(self) -> None:
        """Write the file, on rank 0, once in each process."""
        path = self._path
        if path is None or path in _written or not (times := self._measured()):
            return
        _written.add(path)
        merged = {kind: self._known.get(kind, {}) | sizes for kind, sizes in times.items()}
        with suppress(OSError):
            private_files.write(path, json.dumps(self._known | merged).encode())

    def _measured(self) -> Times:
        found: Times = {}
        for kind, made in self._choices.items():
            for exponent in range(_CLASS_COUNT):
                if times := dict(self._read_times(made.ctypes.data, 1 << exponent)):
                    found.setdefault(kind, {})[exponent] = times
        return found

    def _read_times(self, choices: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield each measured way of calls of this size and its nanoseconds."""
        way, ns = ctypes.c_int32(), ctypes.c_uint32()
        at = ctypes.addressof(way), ctypes.addressof(ns)
        for candidate in itertools.count():
            if not self._kernels.choice_read(choices, nbytes, candidate, *at):
                return
            if ns.value:
                yield way.value, ns.value


#: Files that this process has written.
_written: set[Path] = set()


def _name(way: int) -> str:
    names = (name for bit, name in enumerate(settings.WAYS) if way >> bit & 1)
    return " and ".join(names) or "slots"


@cache
def _path(placement: str) -> Path | None:
    """Return the path of the file for this machine and MPI; None if there is to be none."""
    if settings.TABLE.is_set_to("0"):
        return None
    origin = __version__, machine.describe(), MPI.get_vendor(), placement
    with suppress(RuntimeError):  # a user without a home directory
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        return base / "mpicoll" / f"ways-{zlib.crc32(repr(origin).encode()):08x}.json"
    return None


@cache
def _read(path: Path | None) -> str:
    with suppress(OSError):
        if path is not None and path.stat().st_size <= _MAX_FILE_BYTES:
            return path.read_text(errors="replace")
    return "{}"


def _parse(text: str) -> Times:
    """Return the content of a file. Raises one of _PARSE_ERRORS for other content."""
    found: Times = {}
    for kind, sizes in json.loads(text).items():
        found[kind] = {
            int(exponent): {int(way): int(ns) for way, ns in times.items()}
            for exponent, times in sizes.items()
        }
        for exponent, times in found[kind].items():
            if not (0 <= exponent < _CLASS_COUNT and all(0 < ns < 2**32 for ns in times.values())):
                raise ValueError(f"{kind}: {exponent}: {times}")
    return found
