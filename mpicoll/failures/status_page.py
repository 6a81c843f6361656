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
    "CELLS",
    "DONE",
    "ENDING",
    "LEFT",
    "NAME",
    "RUNNING",
    "Cell",
    "Header",
    "StatusPage",
]  # fmt: skip

#: What becomes of a rank: it may make calls; it ends the job, for a reason that it says itself; no
#: other rank needs it any more; it has another page, and another monitor.
RUNNING, ENDING, DONE, LEFT = range(4)
#: Most groups with a cell; later ones have none. Memory that is not written takes no room.
CELLS = 4096
#: Bytes of a group's name.
NAME = 48

_HEADER = struct.Struct("=9Q")
_ORDER = 504  # bytes: cells begin at a multiple of 64
_CELL = struct.Struct(f"=8Q2I{NAME}s2I")
#: Bytes of a cell that a collective call changes: the first ones.
CALL_BYTES = 64
#: Where a cell has its messages.
_MESSAGES = _CELL.size - 8
_FIRST = _HEADER.size + _ORDER
_SIZE = _FIRST + CELLS * _CELL.size


class Header(NamedTuple):
    """The state that a rank publishes.

    state: RUNNING, ENDING, DONE or LEFT. code: the exit code with which it ends the job. cells: the
    number of cells that have been used. thread: the main thread, as threading.get_ident has it.
    listener: the thread that prints stacks on request, by its system-wide number. signal: the
    number of a signal that the program's handler receives; 0 without one. ending_ns: when the rank
    began to end the job, in nanoseconds of the monotonic clock, which all processes of a node
    share; 0: it has not.
    unexplained: 1 while the rank, which ends the job by an exit code, waits for the monitor to
    report it. monitor_pid: the monitor's process, 0 until it runs.
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
    """A group's last call.

    group:  a number of the group, the same on its ranks; 0 for a cell that is free.
    limit:  milliseconds of waiting after which the hang is reported; 0: never.
    number, kind, sizes, root: of the call, see core/signature.py.
    inside: whether it has not ended. thread: that makes it.
    size, rank: of the group, and in it. name: the group's.
    messages: that this rank has begun to send or receive. last_message: 2 * the other rank, counted
    from 1 and in the job, 0 for any, plus 1 for a message that is received.
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
    """The memory of one rank: its own, or, from a descriptor, that of another."""

    def __init__(self, descriptor: int = -1) -> None:
        """Raise OSError where there is no such memory."""
        self.descriptor = descriptor
        if descriptor < 0:
            self.descriptor = os.memfd_create("mpicoll-status-page")
            os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    # --- the rank --------------------------------------------------------------------------------

    def say(self, state: int) -> None:
        """Set the state. ENDING is final, because MPI_Abort may finalize MPI."""
        if self.header().state != ENDING:
            struct.pack_into("=Q", self._memory, 0, state)

    def say_ending(self, code: int, explained: bool) -> None:
        """Record that this rank ends the job with an exit code, now.

        explained: it has printed why.
        """
        if self.header().state != ENDING:  # else it has recorded the first reason
            now = time.monotonic_ns()
            struct.pack_into("=2Q", self._memory, 48, now, not explained)
            struct.pack_into("=2Q", self._memory, 0, ENDING, code & 0xFF)

    def begin(self, thread: int, listener: int) -> None:
        """Say that this rank runs, and which its threads are; see Header."""
        struct.pack_into("=5Q", self._memory, 24, thread, listener, 0, 0, 0)
        struct.pack_into("=Q", self._memory, 0, RUNNING)
        self._memory[_HEADER.size] = 0

    def say_signal(self, number: int) -> None:
        """Say that a signal has come that may end this rank."""
        struct.pack_into("=Q", self._memory, 40, number)

    def take_cell(self, group: int, limit: int, size: int, rank: int, name: str) -> int:
        """Take a free cell for a group; return its address, 0 if there is none."""
        for k in range(CELLS):
            place = _FIRST + k * _CELL.size
            if struct.unpack_from("=Q", self._memory, place)[0] == 0:
                text = name.encode()[:NAME]
                struct.pack_into(
                    f"=2I{NAME}s2I", self._memory, place + CALL_BYTES, size, rank, text, 0, 0
                )
                struct.pack_into("=8Q", self._memory, place, group, limit, 0, 0, 0, 0, 0, 0)
                used = max(k + 1, self.header().cells)
                struct.pack_into("=Q", self._memory, 16, used)
                return self._start + place
        return 0

    def free_cell(self, address: int) -> None:
        """Give a cell back, which nothing is written to any more."""
        struct.pack_into("=Q", self._memory, address - self._start, 0)

    def say_message(self, address: int, peer: int, receives: bool) -> None:
        """Record a message that begins, in a cell; peer: its other rank in the job, -1 for any."""
        place = address - self._start + _MESSAGES
        count = struct.unpack_from("=I", self._memory, place)[0] + 1 & 0xFFFFFFFF
        struct.pack_into("=2I", self._memory, place, count, 2 * (peer + 1) + receives)

    def order(self) -> str:
        """Return why the monitor wants this rank to end, "" if it does not."""
        if not self._memory[_HEADER.size]:
            return ""
        return self._memory[_HEADER.size : _FIRST].rstrip(b"\0").decode("utf-8", "replace")

    def cell(self, address: int) -> Cell:
        """Return a group's cell."""
        place = address - self._start
        return parse(self._memory[place : place + _CELL.size])

    # --- the monitor -----------------------------------------------------------------------------

    def set_monitor_pid(self, pid: int) -> None:
        """Record which process the monitor is."""
        struct.pack_into("=Q", self._memory, 64, pid)

    def set_explained(self) -> None:
        """Record that the monitor has reported why this rank ends the job."""
        struct.pack_into("=Q", self._memory, 56, 0)

    def give_order(self, why: str) -> None:
        """Have this rank end, and say why."""
        text = why.encode()[: _ORDER - 1]
        self._memory[_HEADER.size + 1 : _HEADER.size + len(text)] = text[1:]
        self._memory[_HEADER.size] = text[0]

    def header(self) -> Header:
        """Return what the rank says of itself."""
        return Header(*_HEADER.unpack_from(self._memory))

    def raw_cells(self) -> list[bytes]:
        """Return the cells that have been used, as they are in memory: cheap to compare."""
        size, first = _CELL.size, _FIRST
        used = min(self.header().cells, CELLS)
        whole = self._memory[first : first + used * size]
        return [whole[k * size : (k + 1) * size] for k in range(used)]

    def cells(self) -> list[Cell]:
        """Return the cells of groups."""
        return [cell for cell in map(parse, self.raw_cells()) if cell.group]


def parse(raw: bytes) -> Cell:
    """Return a cell from its memory."""
    *numbers, name, messages, last = _CELL.unpack(raw)
    return Cell._make([*numbers, name.rstrip(b"\0").decode("utf-8", "replace"), messages, last])
