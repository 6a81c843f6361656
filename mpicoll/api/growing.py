"""Growing a running job: grow_group."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll import control_messages
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


def grow_group(count: int = 1, command: Sequence[str] | None = None) -> ProcessGroup:
    """Start new processes that join the default group. All ranks of the group call it.

    Each new process runs the program from its start and joins in ``init_process_group()``. Existing
    ranks continue here. All groups end. In the new default group, existing ranks keep their numbers
    and new ranks follow, so rank 0 has the state that new ranks need.

    count: number of new ranks, the same on all ranks.
    command: arguments of ``python``: a script, ``-m`` and a module, or ``-c`` and code, then the
        arguments of the program. None is the command of rank 0. Only the value of rank 0 is used.

    Returns the new default group.

    Raises ArgumentError (a ValueError) or ArgumentTypeError (a TypeError) for an invalid argument.
    Raises, on all ranks: UnsupportedError (a ValueError) if the job cannot start processes,
    MismatchError if ``count`` differs, MPIError if the launcher rejects the request, LostRankError
    if a rank is lost, and DistBackendError if async work is pending in other groups, or if new
    processes do not join within the timeout of the group. The old group is then unchanged.
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
        try:
            failure = control_messages.bcast(old.tested, wrong, 0, str)
            old.tested.Barrier()  # raises for a lost rank, which the merge would wait for
        except BaseException:
            wrong = "a rank is lost"
            raise
        finally:
            if old.rank() == 0:
                spawned_ranks.send_result(inter, wrong)
        return spawned_ranks.merge(inter, failure, raised)

    return lifecycle.begin_again(execute.run_in_order(old, _WHERE, grow, keeps_time=True))


def _agree_to_start(
    group: ProcessGroup, count: int, command: Sequence[str] | None
) -> tuple[list[str], str]:
    """Wait for all ranks and check that they can continue. Raises on all ranks if one cannot.

    Returns the result of ``spawned_ranks.find_command`` on rank 0, elsewhere an empty command.
    """
    words, folder, problem, end = list[str](), "", "", deadline(group.timeout)
    others = [one for one in state.groups if one is not group]
    limits = (0 if one.error else end - time.monotonic() for one in others)
    is_pending = not all(
        one.finish(min(max(limit, THREAD_EXIT_TIMEOUT_S), threading.TIMEOUT_MAX))
        for one, limit in zip(others, limits, strict=True)
    )
    if group.rank() == 0 and not is_pending:
        try:
            words, folder = spawned_ranks.find_command(command)
        except ArgumentError as error:
            problem = f"{error}; pass a list of arguments of `python`: ['job.py', '--option']"
        except OSError as error:
            problem = (
                f"{_WHERE}: the working directory of rank 0, in which new processes start, does "
                f"not exist; call os.chdir first ({error})"
            )
    own = count, is_pending, problem
    facts = execute.run_in_order(
        group, _WHERE, lambda: control_messages.allgather(group.tested, own, tuple[int, bool, str])
    )
    counts, pending, problems = zip(*facts, strict=True)
    if len(set(counts)) > 1:
        raise MismatchError(f"{_WHERE}: count: expected the same on all ranks, got {counts}")
    if any(pending):
        late = [rank for rank, one in enumerate(pending) if one]
        raise DistBackendError(
            f"{_WHERE}: async work of ranks {late} is still pending in other groups, which "
            f"{_WHERE} ends; wait for every Work before the call"
        )
    if problems[0]:
        raise ArgumentError(problems[0])
    return words, folder
