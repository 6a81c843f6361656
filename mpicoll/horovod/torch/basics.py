"""Initialization and shutdown, ranks and sizes, and build queries."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

import mpicoll as dist
from mpicoll import communicators, control_messages
from mpicoll.dispatch import execute
from mpicoll.errors import LostRankError, MpicollError, NotInitializedError, UnsupportedError
from mpicoll.horovod.torch.engine import Engine
from mpicoll.launch import host_identity
from mpicoll.launch.exit_hooks import exit_code

if TYPE_CHECKING:
    from mpi4py import MPI

#: The public names. Other modules also import ``current`` and ``restart``.
__all__ = [
    "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "init",
    "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size",
]  # fmt: skip

#: Horovod's operations do not time out: one rank may evaluate while the other ranks wait.
_NO_LIMIT = timedelta(days=3650)


@dataclass
class _Job:
    """State between init and shutdown."""

    owns: bool  # whether init has created mpicoll's default group
    engine: Engine
    nodes: list[str]  # node name of each rank
    world: Any = field(default_factory=lambda: dist.group.WORLD)  # mpicoll's default group
    #: Of that group; also available in forked children.
    rank: int = field(default_factory=dist.get_rank)
    size: int = field(default_factory=dist.get_world_size)
    process: int = field(default_factory=os.getpid)  # process id


_job: _Job | None = None


def _find() -> _Job | None:
    """Return the job; None before init, after shutdown, and once the default group has ended."""
    global _job
    if _job is not None and _job.process == os.getpid() and _job.world is not dist.group.WORLD:
        _job.engine.close(abort=True)
        _job = None
    return _job


def current(where: str) -> _Job:
    """Return the job. Raises NotInitializedError (a ValueError) without one."""
    job = _find()
    if job is None:
        raise NotInitializedError(
            f"{where}: Horovod has not been initialized; call hvd.init() first"
        )
    return job


def init(comm: MPI.Intracomm | None = None) -> None:
    """Start MPI and the operations. Every rank calls; further calls do nothing.

    comm: a communicator of mpi4py with all ranks of the job; None or [] for MPI.COMM_WORLD. An
          existing default group of mpicoll is used.

    Raises UnsupportedError (a ValueError) for a list of ranks, and errors of
    mpicoll.init_process_group.
    """
    if _find() is not None:
        return
    is_communicator = communicators.is_communicator(comm)
    if comm and not is_communicator:
        raise UnsupportedError(
            "init: comm: a list of ranks is not supported; pass a communicator, such as "
            f"MPI.COMM_WORLD.Split(...), got {comm}"
        )
    owns = not dist.is_initialized()
    if owns:
        dist.init_process_group(comm=comm if is_communicator else None)
    _begin(owns)
    # Registered after mpicoll's exit function, so that it runs before.
    atexit.register(_leave)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _leave, exitpriority=1)


def _begin(owns: bool) -> None:
    """Create the engine, on a group of all ranks of mpicoll's default group."""
    global _job
    group: Any = dist.new_group(timeout=_NO_LIMIT)
    nodes = execute.run_in_order(
        group, "init", lambda: control_messages.allgather(group.tested, host_identity.node(), str)
    )
    _job = _Job(owns, Engine(group), nodes)


def shutdown() -> None:
    """Shut down after all operations that this rank has begun are done. Every rank calls.

    Operations that other ranks have begun and this rank has not fail there. Destroys mpicoll's
    default group if init has created it.
    """
    global _job
    job = _find()
    if job is None:
        return
    job.engine.close()
    _job = None
    atexit.unregister(_leave)
    dist.destroy_process_group(None if job.owns else job.engine.group)


def _leave() -> None:
    """Abort operations before MPI_Finalize in a program that exits without shutdown.

    Every rank calls this at exit, unless it aborts the job.
    """
    job = _find()
    if job is not None and job.process == os.getpid() and not exit_code():
        job.engine.close(abort=True)


def restart() -> bool:
    """Restart among the surviving ranks; all of them call. Pending operations fail.

    Returns whether ranks were lost. Raises an error that has occurred only on this rank, such as
    MemoryError: the other ranks wait in the operation and would not restart.
    """
    global _job
    job = current("restart")
    _raise_own(job)
    job.engine.close(abort=True)
    _raise_own(job)
    # A rank that has not been notified of a loss finds it here, or in a later step.
    failure = job.engine.failure
    lost = set(failure.ranks) if isinstance(failure, LostRankError) else set()
    dist.destroy_process_group(job.engine.group)
    _job = None
    while True:
        try:
            if lost:
                dist.shrink_group(sorted(lost))
            _begin(job.owns)
            return dist.get_world_size() < job.size
        except LostRankError as error:
            lost = set(error.ranks)


def _raise_own(job: _Job) -> None:
    """Raise an error that has ended the engine on this rank only."""
    failure = job.engine.failure
    if failure is not None and not isinstance(failure, MpicollError):
        raise failure


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
    nodes = current(where).nodes
    return [each for each, node in enumerate(nodes) if node == nodes[rank()]]


def local_rank() -> int:
    """Return this rank's index on its node."""
    return _on_node("local_rank").index(rank())


def local_size() -> int:
    """Return the number of ranks on this rank's node."""
    return len(_on_node("local_size"))


# --- build queries; they ignore ``verbose`` -----------------------------------------------------


def mpi_built(verbose: bool = False) -> bool:
    """Return True: all operations run over MPI."""
    return True


def mpi_threads_supported() -> bool:
    """Return whether MPI provides MPI_THREAD_MULTIPLE.

    Raises NotInitializedError (a ValueError) before init.
    """
    current("mpi_threads_supported")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def cuda_built(verbose: bool = False) -> bool:
    """Return whether torch supports CUDA tensors, which operations accept with any MPI."""
    return torch.version.cuda is not None


def nccl_built(verbose: bool = False) -> int:
    """Return 0: operations do not use NCCL."""
    return 0


def rocm_built(verbose: bool = False) -> bool:
    """Return False: not supported."""
    return False


mpi_enabled = mpi_built
gloo_built = gloo_enabled = ddl_built = ccl_built = rocm_built
