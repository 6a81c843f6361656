"""Growing a running job: grow_group."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.api import lifecycle
from mpicoll.core.groups import ProcessGroup, default_group, state
from mpicoll.core.indices import check_index
from mpicoll.core.work import THREAD_EXIT_TIMEOUT_S, deadline
from mpicoll.dispatch import execute
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistBackendError,
    MismatchError,
    UnsupportedError,
)
from mpicoll.launch import spawned_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["grow_group"]

_WHERE = "grow_group"
#: States of a rank before processes are started.
_READY, _PENDING, _NO_PROGRAM, _NO_FOLDER = range(4)


def grow_group(count: int = 1, command: Sequence[str] | None = None) -> ProcessGroup:
    """Start new processes that join the default group. All ranks of the group call it.

    Each new process runs the program from its start and joins in ``init_process_group()``. Existing
    ranks continue here. All groups end. In the new default group, existing ranks keep their numbers
    and new ranks follow, so rank 0 has the state that new ranks need.

    count: number of new ranks, the same on all ranks.
    command: arguments of ``python``: a script, ``-m`` and a module, or ``-c`` and code, then the
        arguments of the program. None is the command of rank 0. Only the value of rank 0 is used.

    Returns the new default group.

    Raises, on all ranks: UnsupportedError (a ValueError) if no process that joins can be started,
    MPIError if the launcher rejects the request, LostRankError if a rank is lost, and
    DistBackendError if new processes exit before they join or do not join within the timeout of the
    group. After any of these, the old group is unchanged.
    """
    old = default_group()
    count = check_index(count, f"{_WHERE}: count")
    if count < 1:
        raise ArgumentError(f"{_WHERE}: count: expected at least 1, got {count}")
    if isinstance(command, str) or not (
        command is None or (command and all(isinstance(word, str) for word in command))
    ):
        raise ArgumentTypeError(
            f"{_WHERE}: command: expected a list of arguments of `python`, such as "
            f"['job.py', '--option'], or None, got {command!r}"
        )
    if problem := lifecycle.met_elsewhere() or spawned_ranks.unsupported_reason():
        raise UnsupportedError(
            f"{_WHERE}: not supported in this job: {problem}; start the job with mpirun, or with "
            "all ranks that it may need"
        )
    words, folder = _agree_to_start(old, count, command)

    def grow() -> MPI.Intracomm:
        inter = spawned_ranks.start(old.inner, count, words, folder, old.timeout)
        wrong, raised = "", None
        if old.rank() == 0:
            try:
                wrong = spawned_ranks.wait(inter, count, old.timeout, old.check_whole)
            except BaseException as error:  # the other ranks wait for the broadcast
                wrong, raised = f"rank 0: {type(error).__name__}: {error}", error
        message = np.zeros(spawned_ranks.MAX_FAILURE_BYTES, np.uint8)
        encoded = np.frombuffer(wrong.encode()[: message.size], np.uint8)
        message[: encoded.size] = encoded
        try:
            old.tested.Bcast(message, 0)
            old.tested.Barrier()  # raises for a lost rank, which the merge would wait for
        except BaseException:
            wrong = "a rank is lost"
            raise
        finally:
            if old.rank() == 0:
                spawned_ranks.send_result(inter, wrong)
        wrong = message.tobytes().rstrip(b"\0").decode("utf-8", "replace")
        return spawned_ranks.merge(inter, wrong, raised)

    return lifecycle.begin_again(execute.run_in_order(old, _WHERE, grow, keeps_time=True))


def _remaining_s(end: float) -> float | None:
    """Return the seconds until a deadline, at least the exit time of a thread, or None."""
    return None if end == math.inf else max(THREAD_EXIT_TIMEOUT_S, end - time.monotonic())


def _agree_to_start(
    group: ProcessGroup, count: int, command: Sequence[str] | None
) -> tuple[list[str], str]:
    """Wait for all ranks and check that they can continue. Raises on all ranks if one cannot.

    Returns the result of ``spawned_ranks.find_command`` on rank 0, elsewhere an empty command.
    """
    own_state, words, folder, end = _READY, list[str](), "", deadline(group.timeout)
    others = [one for one in state.groups if one is not group]
    if not all(
        one.finish(THREAD_EXIT_TIMEOUT_S if one.error else _remaining_s(end)) for one in others
    ):
        own_state = _PENDING
    elif group.rank() == 0:
        try:
            words, folder = spawned_ranks.find_command(command)
        except ArgumentError:
            own_state = _NO_PROGRAM
        except OSError:
            own_state = _NO_FOLDER
    own, gathered = np.array([count, own_state]), np.empty((group.size(), 2), np.int64)
    execute.run_in_order(group, _WHERE, lambda: group.tested.Allgather(own, gathered))
    counts, states = gathered.T.tolist()
    if len(set(counts)) > 1:
        raise MismatchError(f"{_WHERE}: count: expected the same on all ranks, got {counts}")
    if _NO_PROGRAM in states:
        raise ArgumentError(
            f"{_WHERE}: command: the program of rank 0 cannot be started again, got None; pass a "
            "list of arguments of `python`: ['job.py', '--option']"
        )
    if _NO_FOLDER in states:
        raise ArgumentError(
            f"{_WHERE}: the working directory of rank 0, in which new processes start, does not "
            "exist; call os.chdir first"
        )
    if _PENDING in states:
        late = [rank for rank, one in enumerate(states) if one == _PENDING]
        raise DistBackendError(
            f"{_WHERE}: async work of ranks {late} is still pending in other groups, which end "
            "now; wait for every Work before the call"
        )
    return words, folder
