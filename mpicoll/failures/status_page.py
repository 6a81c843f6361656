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

__all__ = [
    "CALL_BYTES",
    "DONE",
    "ENDING",
    "LEFT",
    "RUNNING",
    "Cell",
    "Header",
    "StatusPage",
]  # fmt: skip

#: State of a rank: it may make calls; it ends the job, and reports the reason itself; no other rank
#: needs it any more; it has another page and another monitor.
RUNNING, ENDING, DONE, LEFT = range(4)
#: Maximum number of groups with a cell. Pages of memory that are never written cost nothing.
MAX_CELLS = 4096
NAME_BYTES = 48

_HEADER = struct.Struct("=9Q")
_ORDER_BYTES = 504  # cells begin at a multiple of 64
_CELL = struct.Struct(f"=8Q2I{NAME_BYTES}s2I")
#: Size of the part of a cell that a collective call changes, its beginning.
CALL_BYTES = 64
#: Offset of the messages in a cell.
_MESSAGES = _CELL.size - 8
_FIRST_CELL = _HEADER.size + _ORDER_BYTES
_PAGE_BYTES = _FIRST_CELL + MAX_CELLS * _CELL.size


class Header(NamedTuple):
    """The state that a rank publishes.

    state: RUNNING, ENDING, DONE or LEFT.
    code: exit code with which it ends the job.
    cells: number of cells that have been used.
    thread: the main thread, as threading.get_ident returns it.
    listener: system-wide number of the thread that prints stacks on request.
    signal: number of a signal for a handler of the program; 0 if none has arrived.
    ending_ns: when the rank began to end the job, on the monotonic clock; 0: it has not.
    unexplained: 1 while the rank waits for the monitor to report its exit code.
    monitor_pid: process of the monitor, 0 until it runs.
    """

    state: int
    code: int
    cells: int
    thread: int
    listener: int
    signal: int
    ending_ns: int
    unexplained: int
    monitor_pid: int


class Cell(NamedTuple):
    """The last call of a group.

    group:  number of the group, the same on its ranks; 0 for a free cell.
    limit:  milliseconds of waiting after which a hang is reported; 0: never.
    number, kind, sizes, root: of the call, see core/signature.py.
    inside: 1 until the call has ended. thread: that makes it.
    size, rank: of the group, and this rank in it. name: of the group.
    messages: number of messages that this rank has begun to send or receive.
    last_message: 2 * (global rank of the peer + 1), 0 for any peer, plus 1 for a receive.
    """

    group: int
    limit: int
    number: int
    kind: int
    sizes: int
    root: int
    inside: int
    thread: int
    size: int
    rank: int
    name: str
    messages: int
    last_message: int


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

    # --- the rank --------------------------------------------------------------------------------

    def set_state(self, state: int) -> None:
        """Set the state. ENDING is final, because MPI_Abort may finalize MPI."""
        if self.header().state != ENDING:
            struct.pack_into("=Q", self._memory, 0, state)

    def set_ending(self, code: int, explained: bool) -> None:
        """Record that this rank ends the job with an exit code, now.

        explained: it has printed the reason.
        """
        if self.header().state != ENDING:  # else it has recorded the first reason
            now = time.monotonic_ns()
            struct.pack_into("=2Q", self._memory, 48, now, not explained)
            struct.pack_into("=2Q", self._memory, 0, ENDING, code & 0xFF)

    def begin(self, thread: int, listener: int) -> None:
        """Record that this rank runs, and its threads; see Header."""
        struct.pack_into("=5Q", self._memory, 24, thread, listener, 0, 0, 0)
        struct.pack_into("=Q", self._memory, 0, RUNNING)
        self._memory[_HEADER.size] = 0

    def set_signal(self, number: int) -> None:
        """Record that this rank has received a signal that may end it; 0: it was reported."""
        struct.pack_into("=Q", self._memory, 40, number)

    def take_cell(self, group: int, limit: int, size: int, rank: int, name: str) -> int:
        """Take a free cell for a group; return its address, 0 if there is none."""
        for k in range(MAX_CELLS):
            at = _FIRST_CELL + k * _CELL.size
            if struct.unpack_from("=Q", self._memory, at)[0] == 0:
                text = name.encode()[:NAME_BYTES]
                struct.pack_into(
                    f"=2I{NAME_BYTES}s2I", self._memory, at + CALL_BYTES, size, rank, text, 0, 0
                )
                struct.pack_into("=8Q", self._memory, at, group, limit, 0, 0, 0, 0, 0, 0)
                used = max(k + 1, self.header().cells)
                struct.pack_into("=Q", self._memory, 16, used)
                return self._start + at
        return 0

    def free_cell(self, address: int) -> None:
        """Free a cell, to which nothing is written any more."""
        struct.pack_into("=Q", self._memory, address - self._start, 0)

    def record_message(self, address: int, peer: int, receives: bool) -> None:
        """Record in a cell that a message begins; peer: its global rank, -1 for any."""
        at = address - self._start + _MESSAGES
        count = struct.unpack_from("=I", self._memory, at)[0] + 1 & 0xFFFFFFFF
        struct.pack_into("=2I", self._memory, at, count, 2 * (peer + 1) + receives)

    def end_order(self) -> str:
        """Return the reason for which the monitor orders this rank to end, "" if it does not."""
        if not self._memory[_HEADER.size]:
            return ""
        return self._memory[_HEADER.size : _FIRST_CELL].rstrip(b"\0").decode("utf-8", "replace")

    def cell(self, address: int) -> Cell:
        """Return a group's cell."""
        at = address - self._start
        return parse(self._memory[at : at + _CELL.size])

    # --- the monitor -----------------------------------------------------------------------------

    def set_monitor_pid(self, pid: int) -> None:
        """Record which process the monitor is."""
        struct.pack_into("=Q", self._memory, 64, pid)

    def set_explained(self) -> None:
        """Record that the monitor has reported why this rank ends the job."""
        struct.pack_into("=Q", self._memory, 56, 0)

    def order_end(self, why: str) -> None:
        """Order this rank to end, with a reason."""
        text = why.encode()[: _ORDER_BYTES - 1]
        self._memory[_HEADER.size + 1 : _HEADER.size + len(text)] = text[1:]
        self._memory[_HEADER.size] = text[0]

    def header(self) -> Header:
        """Return the header."""
        return Header(*_HEADER.unpack_from(self._memory))

    def raw_cells(self) -> list[bytes]:
        """Return the bytes of each cell that has been used."""
        size, first = _CELL.size, _FIRST_CELL
        used = min(self.header().cells, MAX_CELLS)
        whole = self._memory[first : first + used * size]
        return [whole[k * size : (k + 1) * size] for k in range(used)]

    def cells(self) -> list[Cell]:
        """Return the cells of groups."""
        return [cell for cell in map(parse, self.raw_cells()) if cell.group]


def parse(raw: bytes) -> Cell:
    """Return a cell from its memory."""
    *numbers, name, messages, last = _CELL.unpack(raw)
    return Cell._make([*numbers, name.rstrip(b"\0").decode("utf-8", "replace"), messages, last])
