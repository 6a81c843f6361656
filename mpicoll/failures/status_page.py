"""Status page: memory in which a rank publishes its state for the node monitor.

The rank writes with plain stores, also from the native fast path (``kernels/src/calls.c``), and
never waits. The monitor, another process, can read the page while the rank is blocked, stopped or
dead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from typing import NamedTuple

__all__ = ["DONE", "ENDING", "LEFT", "RUNNING", "Cell", "Header", "StatusPage", "parse"]

#: State of a rank: it may make calls; it ends the job, and reports the reason itself; no other rank
#: needs it any more; it has another page and another monitor.
RUNNING, ENDING, DONE, LEFT = range(4)
#: Maximum number of groups with a cell. Pages of memory that are never written cost nothing.
MAX_CELLS = 4096
NAME_BYTES = 56

_HEADER = struct.Struct("=7Q72x")
#: The first 64 bytes are ``struct last_call`` of calls.c.
_CELL = struct.Struct(f"=8Q2I{NAME_BYTES}s")
_PAGE_BYTES = _HEADER.size + MAX_CELLS * _CELL.size


class Header(NamedTuple):
    """The state that a rank publishes."""

    state: int  # RUNNING, ENDING, DONE or LEFT
    cells: int  # number of cells that have been used
    thread: int  # the main thread, as threading.get_ident returns it
    listener: int  # system-wide number of the thread that prints stacks on request
    ending_ns: int  # when the rank began to end the job, on the monotonic clock; 0: it has not
    monitor_pid: int  # process of the monitor, 0 until it runs
    end_order: int  # 1 if the monitor orders this rank to end; the monitor prints the reason


class Cell(NamedTuple):
    """The last call of a group."""

    group: int  # number of the group, the same on its ranks; 0 for a free cell
    limit: int  # milliseconds of waiting after which a hang is reported; 0: never
    number: int  # number, kind, sizes and root of the call, see core/signature.py
    kind: int
    sizes: int
    root: int
    inside: int  # 1 until the call has ended
    thread: int  # that makes it
    size: int  # of the group
    rank: int  # this rank in the group
    name: str  # of the group


class StatusPage:
    """The page of this rank, or, given a descriptor, of another rank."""

    def __init__(self, descriptor: int = -1) -> None:
        """Raise OSError if the memory cannot be created or mapped."""
        self.descriptor = descriptor
        if descriptor < 0:
            self.descriptor = os.memfd_create("mpicoll-status-page")
            os.ftruncate(self.descriptor, _PAGE_BYTES)
        self._memory = mmap.mmap(self.descriptor, _PAGE_BYTES)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def header(self) -> Header:
        """Return the header."""
        return Header(*_HEADER.unpack_from(self._memory))

    def write(self, **fields: int) -> None:
        """Write fields of the header, in this order."""
        for name, value in fields.items():
            struct.pack_into("=Q", self._memory, 8 * Header._fields.index(name), value)

    def set_state(self, state: int) -> None:
        """Set the state. ENDING is final, because MPI_Abort may finalize MPI."""
        if self.header().state != ENDING:
            self.write(state=state)

    def set_ending(self) -> None:
        """Record that this rank ends the job now."""
        if self.header().state != ENDING:
            self.write(ending_ns=time.monotonic_ns(), state=ENDING)

    def take_cell(self, group: int, limit: int, size: int, rank: int, name: str) -> int:
        """Take a free cell for a group; return its address, 0 if there is none."""
        for k in range(MAX_CELLS):
            at = _HEADER.size + k * _CELL.size
            if struct.unpack_from("=Q", self._memory, at)[0] == 0:
                text = name.encode()[:NAME_BYTES]
                _CELL.pack_into(self._memory, at, group, limit, 0, 0, 0, 0, 0, 0, size, rank, text)
                self.write(cells=max(k + 1, self.header().cells))
                return self._start + at
        return 0

    def free_cell(self, address: int) -> None:
        """Free a cell, to which nothing is written any more."""
        struct.pack_into("=Q", self._memory, address - self._start, 0)

    def cell(self, address: int) -> Cell:
        """Return a group's cell."""
        at = address - self._start
        return parse(self._memory[at : at + _CELL.size])

    def raw_cells(self) -> list[bytes]:
        """Return the bytes of each cell that has been used."""
        used = min(self.header().cells, MAX_CELLS)
        whole = self._memory[_HEADER.size : _HEADER.size + used * _CELL.size]
        return [whole[at : at + _CELL.size] for at in range(0, len(whole), _CELL.size)]


def parse(raw: bytes) -> Cell:
    """Return a cell from its memory."""
    *numbers, name = _CELL.unpack(raw)
    return Cell._make([*numbers, name.rstrip(b"\0").decode("utf-8", "replace")])
