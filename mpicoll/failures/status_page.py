"""Status page: memory in which a rank publishes its state for the node monitor.

The rank writes with plain stores, also from the native fast path (``kernels/src/calls.c``), and
never waits. The monitor, another process, can read the page while the rank is blocked, stopped or
dead. Each init_process_group makes a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

#: State of a rank: it may make calls; it ends the job, and reports the reason itself; no other rank
#: needs it any more.
RUNNING, ENDING, DONE = range(3)
#: Maximum number of groups with a cell. Pages of memory that are never written cost nothing.
MAX_CELLS = 4096
NAME_BYTES = 48


class Cell(ctypes.Structure):
    """The last call of a group. The first 64 bytes are ``struct last_call`` of calls.c."""

    group: int  # number of the group, the same on its ranks; 0 for a free cell
    late: int  # number of the latest call that has lasted too long
    number: int  # number, kind, sizes and root of the call, see core/signature.py
    kind: int
    sizes: int
    root: int
    inside: int  # 1 until the call has ended
    thread: int  # that makes it
    late_ms: int  # how long the late call had lasted
    size: int  # of the group

    _fields_ = [
        *((name, ctypes.c_uint64) for name in __annotations__),
        ("name", ctypes.c_char * NAME_BYTES),  # of the group
    ]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for a message."""
        found = {name: getattr(self, name) for name, *_ in self._fields_}
        return found | {"name": self.name.decode("utf-8", "replace")}


class StatusPage(ctypes.Structure):
    """The state that a rank publishes. ``map_page`` creates and opens it."""

    state: int  # RUNNING, ENDING or DONE
    used: int  # number of cells that have been used
    main_thread: int  # as threading.get_ident returns it
    listener: int  # system-wide number of the thread that prints stacks on request
    ending_ns: int  # when the rank began to end the job, on the monotonic clock
    monitor_pid: int  # process of the monitor, 0 until it runs
    end_order: int  # 1 if the monitor orders this rank to end; the monitor prints the reason

    _fields_ = [
        ("cells", Cell * MAX_CELLS),  # first: each begins a cache line
        *((name, ctypes.c_uint64) for name in __annotations__),
    ]
    cells: ctypes.Array[Cell]

    def set_ending(self) -> None:
        """Record that this rank ends the job now."""
        if self.state != ENDING:
            self.ending_ns = time.monotonic_ns()
            self.state = ENDING

    def set_done(self) -> None:
        """Record that no other rank needs this one. MPI_Abort may finalize MPI: ENDING is final."""
        if self.state != ENDING:
            self.state = DONE

    def take_cell(self, group: int, size: int, name: str) -> Cell | None:
        """Assign a free cell, whose group is 0, to a group; return it, or None if there is none."""
        for k in range(MAX_CELLS):
            if self.cells[k].group == 0:
                self.cells[k] = Cell(group, size=size, name=name.encode()[:NAME_BYTES])
                self.used = max(k + 1, self.used)
                return self.cells[k]
        return None

    def read_cells(self) -> list[Cell]:
        """Return copies of the cells of all groups."""
        copies = (Cell.from_buffer_copy(cell) for cell in self.cells[: self.used])
        return [cell for cell in copies if cell.group]


def map_page(descriptor: int) -> StatusPage:
    """Return the page in the memory of a descriptor, which grows if necessary.

    Raises OSError if the memory cannot be mapped.
    """
    size = ctypes.sizeof(StatusPage)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    return StatusPage.from_buffer(mmap.mmap(descriptor, size))
