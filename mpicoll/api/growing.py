"""A job that gets more ranks: grow_group."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.api import lifecycle
from mpicoll.core.groups import ProcessGroup, default_group, state
from mpicoll.core.indices import check_index
from mpicoll.core.work import A_MOMENT, deadline
from mpicoll.dispatch import execute
from mpicoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DistBackendError,
    MismatchError,
    UnsupportedError,
)
from mpicoll.failures import lost_ranks
from mpicoll.launch import spawned_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["grow_group"]

_WHERE = "grow_group"
#: What a rank says before anything is started.
_FINE, _PENDING, _NO_PROGRAM, _NO_FOLDER = range(4)


def grow_group(count: int = 1, command: Sequence[str] | None = None) -> ProcessGroup:
    """Start further processes, which join the default group. All its ranks call.

    In each the program begins at its top, and joins by ``init_process_group()``. The others go on
    here. All groups end. In the new default group the ranks keep their numbers, and the new
    ones come last. So rank 0 has what the new ones need.

    count: how many, the same on all ranks.
    command: what follows ``python``: a script, ``-m`` and a module, or ``-c`` and code, and the
        arguments; None for rank 0's own. Rank 0's counts.

    Returns the new default group.

    Raises UnsupportedError (a ValueError) where no process can be started that joins, MPIError
    where the launcher refuses, LostRankError where a rank is lost meanwhile, and DistBackendError
    where new processes end before they join, or do not join within the group's timeout: on all
    ranks. After these the group is as it was.
    """
    old = default_group()
    count = check_index(count, f"{_WHERE}: count")
    if count < 1:
        raise ArgumentError(f"{_WHERE}: count: expected at least 1, got {count}")
    if isinstance(command, str) or not (
        command is None or (command and all(isinstance(word, str) for word in command))
    ):
        raise ArgumentTypeError(
            f"{_WHERE}: command: expected a list of strings as after `python`, "
            f"['job.py', '--option'], or None, got {command!r}"
        )
    if problem := lifecycle.met_elsewhere() or spawned_ranks.why_not():
        raise UnsupportedError(
            f"{_WHERE}: no process can be started that joins this job: {problem}; start the job by "
            "mpirun, or with as many ranks as it may need"
        )
    outlives = lost_ranks.is_watching()
    words, folder = _meet(old, count, command, outlives)

    def grow() -> MPI.Intracomm:
        inter = spawned_ranks.start(old.inner, count, words, folder, old.timeout)
        wrong, raised = "", None
        if old.rank() == 0:
            try:
                wrong = spawned_ranks.wait(inter, count, outlives, old.timeout, old.check_whole)
            except BaseException as error:  # the others wait for what this rank says
                wrong, raised = f"rank 0: {type(error).__name__}: {error}", error
        told = np.zeros(spawned_ranks.WORDS, np.uint8)
        mine = np.frombuffer(wrong.encode()[: told.size], np.uint8)
        told[: mine.size] = mine
        try:
            old.tested.Bcast(told, 0)
            old.tested.Barrier()  # MPI would wait for a rank that is lost by now
        except BaseException:
            wrong = "a rank is lost"
            raise
        finally:
            if old.rank() == 0:
                spawned_ranks.answer(inter, wrong)
        wrong = told.tobytes().rstrip(b"\0").decode("utf-8", "replace")
        return spawned_ranks.merge(inter, wrong, raised)

    return lifecycle.begin_again(execute.run_in_order(old, _WHERE, grow, keeps_time=True))


def _left(end: float) -> float | None:
    """Return the seconds until a moment (monotonic), and some for a thread without work; None for a
    moment that never comes.
    """
    return None if end == math.inf else max(A_MOMENT, end - time.monotonic())


def _meet(
    group: ProcessGroup, count: int, command: Sequence[str] | None, outlives: bool
) -> tuple[list[str], str]:
    """Return what ``spawned_ranks.find_command`` returns, on rank 0, once all ranks have called.

    Raises on all ranks if one of them cannot continue.

    command, outlives: as there.
    """
    what, words, folder, end = _FINE, list[str](), "", deadline(group.timeout)
    others = [one for one in state.groups if one is not group]
    if not all(one.finish(A_MOMENT if one.error else _left(end)) for one in others):
        what = _PENDING
    elif group.rank() == 0:
        try:
            words, folder = spawned_ranks.find_command(command, outlives)
        except ArgumentError:
            what = _NO_PROGRAM
        except OSError:
            what = _NO_FOLDER
    own, everybody = np.array([count, what]), np.empty((group.size(), 2), np.int64)
    execute.run_in_order(group, _WHERE, lambda: group.tested.Allgather(own, everybody))
    counts, said = everybody.T.tolist()
    if len(set(counts)) > 1:
        raise MismatchError(f"{_WHERE}: count: expected the same on all ranks, got {counts}")
    if _NO_PROGRAM in said:
        raise ArgumentError(
            f"{_WHERE}: command: rank 0 runs no script, module or code that can be run again, got "
            "None; give a list of what follows `python`: ['job.py', '--option']"
        )
    if _NO_FOLDER in said:
        raise ArgumentError(
            f"{_WHERE}: rank 0's working directory, in which the new processes would begin, is "
            "gone; call os.chdir with one that exists"
        )
    if _PENDING in said:
        late = [rank for rank, one in enumerate(said) if one == _PENDING]
        raise DistBackendError(
            f"{_WHERE}: asynchronous work of ranks {late} is still pending in other groups, which "
            "end here; wait for every Work before"
        )
    return words, folder
