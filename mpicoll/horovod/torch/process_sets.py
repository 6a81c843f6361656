"""The beginning and the end, who is who, and sets of ranks that do operations among themselves."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
from mpicoll.horovod.torch.timeline import TIMELINE, start_as_told
from mpicoll.launch import host_identity
from mpicoll.launch.exit_hooks import exit_code

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "ProcessSet",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "current",
    "engine_of",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "restart",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

T = TypeVar("T")

#: Horovod's operations wait without limit, as where one rank evaluates while the others go on.
_NO_LIMIT = timedelta(days=3650)


class ProcessSet:
    """Some of the ranks. Give it to init or add_process_set, then to operations.

    ranks_or_comm: their global ranks, or a communicator of mpi4py, for init alone. Each rank gives
        one that it is in; what Split has made comes to as many sets.

    Raises ArgumentTypeError (a TypeError) for anything but ints.
    """

    #: A number once operations can use the set, None before and after.
    process_set_id: int | None = None
    mpi_comm: MPI.Intracomm | None = None

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Intracomm) -> None:
        self._engine: Engine | None = None
        self.ranks: list[int] = []
        given: Any = ranks_or_comm
        if communicators.is_communicator(given):
            self.mpi_comm = cast("MPI.Intracomm", given)
            return
        self.ranks = sorted(check_indices(given, "ProcessSet: ranks_or_comm"))

    def size(self) -> int | None:
        """Return how many ranks it has; None before the set can be used."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's place in the set; None before the set can be used, and outside.

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


#: All ranks.
global_process_set = ProcessSet([])


@dataclass
class _Job:
    """What is known between init and shutdown.

    owns: whether init has made mpicoll's default group.
    world: that group.
    rank, size: of this process, and of all ranks; forked children ask for them, too.
    process: its number.
    nodes: the name of each rank's node.
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
    """Return the job; None before init, after shutdown, and once mpicoll's default group ended."""
    if _job is None or _job.process != os.getpid():
        return _job
    if _job.world is not dist.group.WORLD:
        _close(_job)
        TIMELINE.stop()
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
    """Start MPI and the operations. Every rank calls; another call can only add sets.

    comm: a communicator of mpi4py, whose ranks are then all ranks; None or [] for all that MPI has
        started. The default group of mpicoll, if there is one already, is used.
    process_sets: sets to begin with; "dynamic" and None: none. Sets can be added in any case.

    Raises UnsupportedError (a ValueError) for a list of some ranks, ArgumentError (a ValueError)
    for a set that is there already and for ranks that do not exist, after which none of these sets
    is there, and what mpicoll.init_process_group raises.
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
                f"init: comm: a list of some ranks is not built; give their communicator, such as "
                f"MPI.COMM_WORLD.Split(...), got {ranks}"
            )
        _begin(owns)
        # After mpicoll's own function, and so before it.
        atexit.register(_leave)
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _leave, exitpriority=1)
        global_process_set.mpi_comm = given
        if rank() == 0:
            start_as_told()
    if process_sets is not None and not isinstance(process_sets, str):
        _add_all([each for each in process_sets if each.process_set_id is None])


def _add_all(process_sets: Sequence[ProcessSet]) -> None:
    """Make sets usable, or none of them."""
    job = current("init")
    before, made = set(job.sets), job.made
    try:
        for process_set in process_sets:
            if process_set.mpi_comm is None:
                add_process_set(process_set)
            else:
                _add_of_communicator(process_set)
    except ArgumentError:
        for number in sorted(job.sets.keys() - before):
            remove_process_set(job.sets[number])
        job.made = made
        raise


def _begin(owns: bool) -> None:
    """Make the global set over mpicoll's default group."""
    global _job
    _job = _Job(owns, dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    global_process_set.ranks = list(range(dist.get_world_size()))
    _add(_job, global_process_set)
    _job.nodes = _exchange(host_identity.node(), str)


def _exchange(value: T, kind: type[T]) -> list[T]:
    """Return every rank's value. All ranks call, before any begins an operation."""
    group = engine_of(global_process_set, "init").group
    return execute.run_in_order(  # type: ignore[no-any-return]
        group, "init", lambda: control_messages.allgather(group.tested, value, kind)
    )


def _add_of_communicator(process_set: ProcessSet) -> None:
    """Make usable the sets of the communicators that the ranks have given, by their first ranks."""
    group = engine_of(global_process_set, "init").group
    assert process_set.mpi_comm is not None
    process_set.ranks = sorted(
        rank
        for rank in communicators.translate_ranks(process_set.mpi_comm, group.messages)
        if rank is not None
    )
    everybody = _exchange(process_set.ranks, list[int])
    for ranks in [each for at, each in enumerate(everybody) if each not in everybody[:at]]:
        add_process_set(process_set if ranks == process_set.ranks else ProcessSet(ranks))


def _add(job: _Job, process_set: ProcessSet) -> None:
    group: Any = dist.new_group(process_set.ranks, timeout=_NO_LIMIT)
    process_set.process_set_id = job.made
    job.sets[job.made] = process_set
    job.made += 1
    if dist.get_rank() in process_set.ranks:
        process_set._engine = Engine(group, process_set.ranks)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set usable. Every rank calls, in the same order, those outside as well.

    process_set: the set, or its global ranks.

    Returns the set. Raises ArgumentError (a ValueError) for ranks that do not exist, and if there
    is a set of these ranks.
    """
    job = current("add_process_set")
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.mpi_comm is not None and not process_set.ranks:
        raise NotImplementedError(
            "add_process_set: sets of communicators are given to init; give the ranks here"
        )
    ranks = process_set.ranks
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size())):
        raise ArgumentError(
            f"add_process_set: ranks: expected some of 0 to {size() - 1}, each once, got {ranks}"
        )
    if any(each.ranks == ranks for each in job.sets.values()):
        raise ArgumentError(f"add_process_set: there is a set of the ranks {ranks} already")
    _add(job, process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set. Every rank calls, those outside as well.

    process_set: one that add_process_set or init has made usable.

    Returns whether it was one that can be used, and not that of all ranks.
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
    """End the operations, when all that this rank has begun is done. Every rank calls.

    What other ranks have begun and this one has not fails there. Ends mpicoll's default group if
    init has made it, and the timeline.
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
    TIMELINE.stop()
    _forget()
    atexit.unregister(_leave)
    if job.owns:
        dist.destroy_process_group()


def _leave() -> None:
    """End the operations of a program that ends without shutdown, before MPI ends.

    What is pending is given up. Every rank comes here, or ends the job.
    """
    job = _find()
    if job is not None and job.process == os.getpid() and not exit_code():
        _close(job)
        TIMELINE.stop()


def restart() -> bool:
    """Begin anew among the ranks that live; all of them call.

    What is on its way fails. Sets that were added are gone.

    Returns whether ranks were lost. Raises what has failed on this rank alone, such as MemoryError:
    the others wait in what it has not carried out, and would not begin anew with it.
    """
    job = current("restart")
    _raise_own(job)
    engines = _close(job)
    _raise_own(job)
    # A rank that has not heard of a loss yet hears of it here, or in what comes.
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
    """End what is on its way in all sets; return their engines."""
    for engine in _engines(job):
        engine.close(abandon=True)
    return _engines(job)


def _raise_own(job: _Job) -> None:
    """Raise what has ended the operations of a set on this rank alone."""
    for engine in _engines(job):
        if engine.failure is not None and not isinstance(engine.failure, MpicollError):
            raise engine.failure


def _forget() -> None:
    """Leave no set usable."""
    global _job
    if _job is not None:
        for process_set in _job.sets.values():
            process_set.process_set_id = process_set._engine = None
    _job = None


def engine_of(process_set: ProcessSet, where: str) -> Engine:
    """Return what carries out a set's operations.

    Raises NotInitializedError (a ValueError) before init, ArgumentError (a ValueError) for a set
    that was not added, and HorovodInternalError on a rank outside the set.
    """
    current(where)
    if process_set.process_set_id is None:
        raise ArgumentError(f"{where}: process_set: {process_set} was not added, or was removed")
    if process_set._engine is None:
        raise HorovodInternalError(f"{where}: process_set: rank {rank()} is not in {process_set}")
    return process_set._engine


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write what becomes of operations to a file, on rank 0; a file before that ends.

    file_path: in Chrome's trace format, as chrome://tracing and ui.perfetto.dev read it. The
        environment variable HOROVOD_TIMELINE names one to begin with, in init.
    mark_cycles: also when the ranks have told each other what they have begun.

    Raises NotInitializedError (a ValueError) before init.
    """
    current("start_timeline")
    if rank() == 0:
        TIMELINE.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the file of start_timeline. Raises NotInitializedError (a ValueError) before init."""
    current("stop_timeline")
    TIMELINE.stop()


# --- who is who ----------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Return whether init was called, and shutdown was not."""
    return _find() is not None


def rank() -> int:
    """Return this rank. Raises NotInitializedError (a ValueError) before init, as all of these."""
    return current("rank").rank


def size() -> int:
    """Return how many ranks there are."""
    return current("size").size


def _on_node(where: str) -> list[int]:
    """Return the ranks of this rank's node."""
    nodes = current(where).nodes
    return [each for each, node in enumerate(nodes) if node == nodes[rank()]]


def local_rank() -> int:
    """Return this rank's place on its node."""
    return _on_node("local_rank").index(rank())


def local_size() -> int:
    """Return how many ranks this rank's node has."""
    return len(_on_node("local_size"))


def _across(where: str) -> list[str]:
    """Return the nodes, in the order of their first ranks, that have a rank of this local rank."""
    nodes, place = current(where).nodes, local_rank()
    return [node for node in dict.fromkeys(nodes) if nodes.count(node) > place]


def cross_rank() -> int:
    """Return the place of this rank's node among those that have a rank of this local rank."""
    return _across("cross_rank").index(current("cross_rank").nodes[rank()])


def cross_size() -> int:
    """Return how many nodes have a rank of this rank's local rank."""
    return len(_across("cross_size"))


def is_homogeneous() -> bool:
    """Return whether all nodes have as many ranks."""
    nodes = current("is_homogeneous").nodes
    return len({nodes.count(node) for node in nodes}) == 1
