"""Initialization and shutdown, ranks and sizes, and process sets."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import mpicoll as dist
from mpicoll import communicators, control_messages
from mpicoll.core.indices import check_indices
from mpicoll.dispatch import execute
from mpicoll.errors import (
    ArgumentError,
    LostRankError,
    MpicollError,
    NotInitializedError,
    UnsupportedError,
)
from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch.engine import Engine
from mpicoll.launch import host_identity
from mpicoll.launch.exit_hooks import exit_code

if TYPE_CHECKING:
    from mpi4py import MPI

#: The public names. Other modules also import the functions of the job.
__all__ = [
    "ProcessSet", "add_process_set", "cross_rank", "cross_size", "global_process_set", "init",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "rank", "remove_process_set",
    "shutdown", "size",
]  # fmt: skip

#: Horovod's operations do not time out: one rank may evaluate while the other ranks wait.
_NO_LIMIT = timedelta(days=3650)


class ProcessSet:
    """A subset of the ranks. Pass it to init or add_process_set, then to operations.

    ranks: global ranks.

    Raises ArgumentTypeError (a TypeError) if ranks are not ints.
    """

    #: An int while the set can be used, otherwise None.
    process_set_id: int | None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        self._engine: Engine | None = None
        self.ranks = sorted(check_indices(ranks, "ProcessSet: ranks"))

    def size(self) -> int | None:
        """Return the number of ranks; None if the set cannot be used."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's index in the set; None outside the set, or if it cannot be used.

        Roots of operations are global ranks, in any set.
        """
        if self.process_set_id is None or not self.included():
            return None
        return self.ranks.index(rank())

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


#: The set of all ranks.
global_process_set = ProcessSet([])


@dataclass
class _Job:
    """State between init and shutdown.

    owns: whether init has created mpicoll's default group.
    world: that group.
    rank, size: of the default group; also available in forked children.
    process: process id.
    nodes: node name of each rank.
    sets: process sets by id. made: number of sets created.
    """

    owns: bool
    world: Any
    rank: int
    size: int
    process: int = field(default_factory=os.getpid)
    nodes: list[str] = field(default_factory=list)
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    made: int = 0


_job: _Job | None = None


def _find() -> _Job | None:
    """Return the job; None before init, after shutdown, and after the end of mpicoll's default
    group.
    """
    if _job is None or _job.process != os.getpid():
        return _job
    if _job.world is not dist.group.WORLD:
        _close(_job)
        _forget()
    return _job


def current(where: str) -> _Job:
    """Return the job. Raises NotInitializedError (a ValueError) without one."""
    job = _find()
    if job is None:
        raise NotInitializedError(
            f"{where}: Horovod has not been initialized; call hvd.init() first"
        )
    return job


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Start MPI and the operations. Every rank calls; further calls can only add process sets.

    comm: a communicator of mpi4py with all ranks of the job; None or [] for MPI.COMM_WORLD. An
          existing default group of mpicoll is used.
    process_sets: sets to create; "dynamic" and None: none. Sets can always be added later.

    Raises UnsupportedError (a ValueError) for a list of a subset of the ranks; ArgumentError (a
    ValueError) for duplicate sets and for invalid ranks, without creating any of the sets; and
    errors of mpicoll.init_process_group.
    """
    if _find() is None:
        given: Any = comm if communicators.is_communicator(comm) else None
        owns = not dist.is_initialized()
        if owns:
            dist.init_process_group(comm=given)
        listed: Any = comm or []
        ranks = [] if given is not None else list(listed)
        if ranks and ranks != list(range(dist.get_world_size())):
            raise UnsupportedError(
                "init: comm: a list of a subset of the ranks is not supported; pass a "
                f"communicator, such as MPI.COMM_WORLD.Split(...), got {ranks}"
            )
        _begin(owns)
        # Registered after mpicoll's exit function, so that it runs before.
        atexit.register(_leave)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _leave, exitpriority=1)
    if process_sets is not None and not isinstance(process_sets, str):
        job = current("init")
        known = [each.ranks for each in job.sets.values()]
        new = [each for each in process_sets if each.process_set_id is None]
        for process_set in new:
            _check_ranks(process_set.ranks, known, "init")
            known.append(process_set.ranks)
        for process_set in new:
            _add(job, process_set)


def _begin(owns: bool) -> None:
    """Create the global set over mpicoll's default group."""
    global _job
    _job = _Job(owns, dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    global_process_set.ranks = list(range(dist.get_world_size()))
    _add(_job, global_process_set)
    group = engine_of(global_process_set, "init").group
    _job.nodes = execute.run_in_order(
        group, "init", lambda: control_messages.allgather(group.tested, host_identity.node(), str)
    )


def _add(job: _Job, process_set: ProcessSet) -> None:
    group: Any = dist.new_group(process_set.ranks, timeout=_NO_LIMIT)
    process_set.process_set_id = job.made
    job.sets[job.made] = process_set
    job.made += 1
    if dist.get_rank() in process_set.ranks:
        process_set._engine = Engine(group)


def _check_ranks(ranks: list[int], known: Iterable[list[int]], where: str) -> None:
    """Raise ArgumentError for invalid ranks, and for those of a known set."""
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size())):
        raise ArgumentError(
            f"{where}: ranks: expected distinct ranks of 0 to {size() - 1}, got {ranks}"
        )
    if ranks in known:
        raise ArgumentError(f"{where}: a set of the ranks {ranks} already exists")


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Create a process set. Every rank calls, in the same order, including ranks outside the set.

    process_set: the set, or its global ranks.

    Returns the set. Raises ArgumentError (a ValueError) for invalid ranks, and if a set of these
    ranks exists.
    """
    job = current("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    known = (each.ranks for each in job.sets.values())
    _check_ranks(process_set.ranks, known, "add_process_set")
    _add(job, process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Destroy a process set. Every rank calls, including ranks outside the set.

    process_set: a set that add_process_set or init has created.

    Returns False for the set of all ranks and for sets that do not exist.
    """
    job = current("remove_process_set")
    if not process_set.process_set_id:
        return False
    del job.sets[process_set.process_set_id]
    process_set.process_set_id = None
    engine, process_set._engine = process_set._engine, None
    if engine is not None:
        engine.close()
        dist.destroy_process_group(engine.group)
    return True


def shutdown() -> None:
    """Shut down after all operations that this rank has begun are done. Every rank calls.

    Operations that other ranks have begun and this rank has not fail there. Destroys mpicoll's
    default group if init has created it.
    """
    job = _find()
    if job is None:
        return
    for process_set in reversed(list(job.sets.values())):
        if process_set is global_process_set and process_set._engine is not None:
            process_set._engine.close()
            if not job.owns:
                dist.destroy_process_group(process_set._engine.group)
        else:
            remove_process_set(process_set)
    _forget()
    atexit.unregister(_leave)
    if job.owns:
        dist.destroy_process_group()


def _leave() -> None:
    """Abort operations before MPI_Finalize in a program that exits without shutdown.

    Every rank calls this at exit, unless it aborts the job.
    """
    job = _find()
    if job is not None and job.process == os.getpid() and not exit_code():
        _close(job)


def restart() -> bool:
    """Restart among the surviving ranks; all of them call.

    Pending operations fail, and added sets are removed.

    Returns whether ranks were lost. Raises an error that has occurred only on this rank, such as
    MemoryError: the other ranks wait in the operation and would not restart.
    """
    job = current("restart")
    _raise_own(job)
    engines = _close(job)
    _raise_own(job)
    # A rank that has not been notified of a loss finds it here, or in a later step.
    lost = {
        rank
        for engine in engines
        if isinstance(engine.failure, LostRankError)
        for rank in engine.failure.ranks
    }
    for engine in engines:
        dist.destroy_process_group(engine.group)
    size = dist.get_world_size()
    while True:
        _forget()
        try:
            if lost:
                dist.shrink_group(sorted(lost))
            _begin(job.owns)
            return dist.get_world_size() < size
        except LostRankError as error:
            lost = set(error.ranks)


def _engines(job: _Job) -> list[Engine]:
    return [each._engine for each in job.sets.values() if each._engine is not None]


def _close(job: _Job) -> list[Engine]:
    """Abort the operations of all sets; return their engines."""
    for engine in _engines(job):
        engine.close(abort=True)
    return _engines(job)


def _raise_own(job: _Job) -> None:
    """Raise an error that has ended a set's engine on this rank only."""
    for engine in _engines(job):
        if engine.failure is not None and not isinstance(engine.failure, MpicollError):
            raise engine.failure


def _forget() -> None:
    """Mark all sets as unusable."""
    global _job
    if _job is not None:
        for process_set in _job.sets.values():
            process_set.process_set_id = process_set._engine = None
    _job = None


def engine_of(process_set: ProcessSet, where: str) -> Engine:
    """Return the engine of a set.

    Raises NotInitializedError (a ValueError) before init, ArgumentError (a ValueError) for a set
    that was not added, and HorovodInternalError on a rank outside the set.
    """
    current(where)
    if process_set.process_set_id is None:
        raise ArgumentError(f"{where}: process_set: {process_set} was not added, or was removed")
    if process_set._engine is None:
        raise HorovodInternalError(f"{where}: process_set: rank {rank()} is not in {process_set}")
    return process_set._engine


# --- ranks and sizes ----------------------------------------------------------------------------


def is_initialized() -> bool:
    """Return whether the operations are available: after init and before shutdown."""
    return _find() is not None


def rank() -> int:
    """Return this rank. Like all functions below, raises NotInitializedError (a ValueError) before
    init.
    """
    return current("rank").rank


def size() -> int:
    """Return the number of ranks."""
    return current("size").size


def _on_node(where: str) -> list[int]:
    """Return the ranks of this rank's node."""
    nodes = current(where).nodes
    return [each for each, node in enumerate(nodes) if node == nodes[rank()]]


def local_rank() -> int:
    """Return this rank's index on its node."""
    return _on_node("local_rank").index(rank())


def local_size() -> int:
    """Return the number of ranks on this rank's node."""
    return len(_on_node("local_size"))


def _across(where: str) -> list[str]:
    """Return the nodes that have a rank with this local rank, ordered by their first ranks."""
    nodes, place = current(where).nodes, local_rank()
    return [node for node in dict.fromkeys(nodes) if nodes.count(node) > place]


def cross_rank() -> int:
    """Return the index of this rank's node among nodes that have a rank with this local rank."""
    return _across("cross_rank").index(current("cross_rank").nodes[rank()])


def cross_size() -> int:
    """Return the number of nodes that have a rank with this local rank."""
    return len(_across("cross_size"))


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    nodes = current("is_homogeneous").nodes
    return len({nodes.count(node) for node in nodes}) == 1
