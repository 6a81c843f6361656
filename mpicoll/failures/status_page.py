"""Status page: memory in which a rank publishes its state for the node monitor.

The rank writes with plain stores, also from the native fast path (``kernels/src/calls.c``), and
never waits. The monitor, another process, can read the page while the rank is blocked, stopped or
dead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

#: State of a rank: it may make calls; it ends the job, and reports the reason itself; no other rank
#: needs it any more.
RUNNING, ENDING, DONE = range(3)
#: Maximum number of groups with a cell. Pages of memory that are never written cost nothing.
MAX_CELLS = 4096
NAME_BYTES = 56


def _words(*names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    return [(name, ctypes.c_uint64) for name in names]


class Cell(ctypes.Structure):
    """The last call of a group. The first 64 bytes are ``struct last_call`` of calls.c."""

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
    name: bytes  # of the group

    _fields_ = [
        *_words("group", "limit", "number", "kind", "sizes", "root", "inside", "thread"),
        ("size", ctypes.c_uint32), ("rank", ctypes.c_uint32), ("name", ctypes.c_char * NAME_BYTES),
    ]  # fmt: skip

    def as_dict(self) -> dict[str, int | str]:
        """Return the fields, for a message."""
        found = {field[0]: getattr(self, field[0]) for field in self._fields_}
        return found | {"name": self.name.decode("utf-8", "replace")}


class StatusPage(ctypes.Structure):
    """The state that a rank publishes. ``map_page`` creates and opens it."""

    state: int  # RUNNING, ENDING or DONE
    used: int  # number of cells that have been used
    main_thread: int  # as threading.get_ident returns it
    listener: int  # system-wide number of the thread that prints stacks on request
    ending_ns: int  # when the rank began to end the job, on the monotonic clock; 0: it has not
    generation: int  # number of the monitor, counted by init_process_group: earlier ones end
    monitor_pid: int  # process of the monitor, 0 until it runs
    end_order: int  # 1 if the monitor orders this rank to end; the monitor prints the reason
    cells: ctypes.Array[Cell]

    _fields_ = [
        ("cells", Cell * MAX_CELLS),  # first: each begins a cache line
        *_words("state", "used", "main_thread", "listener", "ending_ns"),
        *_words("generation", "monitor_pid", "end_order"),
    ]

    def set_ending(self) -> None:
        """Record that this rank ends the job now."""
        if self.state != ENDING:
            self.ending_ns = time.monotonic_ns()
            self.state = ENDING

    def set_done(self) -> None:
        """Record that no other rank needs this one. MPI_Abort may finalize MPI: ENDING is final."""
        if self.state != ENDING:
            self.state = DONE

    def take_cell(self, group: int, limit: int, size: int, rank: int, name: str) -> Cell | None:
        """Return a free cell for a group, None if there is none. It is free if its group is 0."""
        for k in range(MAX_CELLS):
            if self.cells[k].group == 0:
                text = name.encode()[:NAME_BYTES]
                self.cells[k] = Cell(group, limit, size=size, rank=rank, name=text)
                self.used = max(k + 1, self.used)
                return self.cells[k]
        return None

    def raw_cells(self) -> list[bytes]:
        """Return the bytes of each cell that has been used."""
        return [bytes(cell) for cell in self.cells[: self.used]]


def map_page(descriptor: int) -> StatusPage:
    """Return the page in the memory of a descriptor, which grows if necessary.

    Raises OSError if the memory cannot be mapped.
    """
    size = ctypes.sizeof(StatusPage)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return StatusPage.from_buffer(mmap.mmap(descriptor, size))
