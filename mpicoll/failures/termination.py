"""End of the job by a rank with a process group.

The rank prints its message first, then writes its flight record and notifies the node monitor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from mpicoll.core.groups import state
from mpicoll.failures import flight_record, monitor_client
from mpicoll.launch.error_output import format_stack, with_rank
from mpicoll.launch.exit_hooks import (
    INTERRUPTED,
    RankEnd,
    end_ranks,
    flush_output,
)
from mpicoll.output import write_lines

__all__ = ["GroupEnd", "end_job", "end_stuck_job"]


def end_job(code: int) -> None:
    """End every rank of the job with an exit code, after flushing the output."""
    for line in flight_record.last_words():
        write_lines(line)
    monitor_client.report_ending()
    flush_output()
    end_ranks(code)


def end_stuck_job(why: str, code: int, thread: int = 0) -> None:
    """End the job from another thread, with the stack of one that is inside MPI.

    An exception cannot be raised in a thread that is blocked inside MPI. All ranks write their
    flight records first, unless the user has interrupted the job.

    thread: that one, as threading.get_ident returns it; 0: the main thread.
    """
    if code != INTERRUPTED:
        flight_record.dump(why)
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    stack = "" if frame is None else format_stack(frame)
    rank = _find_rank()
    told = f"mpicoll: rank {rank}: {why} (in the call above); ending the job"
    text = with_rank(rank, f"Traceback (most recent call last):\n{stack}{told}")
    write_lines("\n".join((text, *flight_record.last_words())))
    end_job(code)


def _find_rank() -> str:
    """Return this rank in the default group, else in the job, "?" if it is unknown."""
    default = state.default  # another thread may end it meanwhile
    return RankEnd().rank() if default is None else str(default.rank())


class GroupEnd(RankEnd):
    """The steps by which a rank with a process group ends its job.

    at_exit: called when the interpreter ends with success, without a destroy.
    """

    def __init__(self, at_exit: Callable[[], None]) -> None:
        self._at_exit = at_exit

    def rank(self) -> str:
        """Return this rank in the default group."""
        return _find_rank()

    def extra_lines(self) -> list[str]:
        """Report the end of this rank; return the line that names the flight records."""
        monitor_client.report_ending()
        return flight_record.last_words()

    def end_job(self, code: int) -> None:
        """End every rank of the job, and notify the node's monitor."""
        end_job(code)

    def at_exit(self) -> None:
        """End the groups."""
        self._at_exit()
