"""Check communicators of mpi4py, and create derived communicators."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, cast

from mpicoll.errors import ArgumentError, ArgumentTypeError, LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI


def is_communicator(candidate: object) -> TypeGuard[MPI.Comm]:
    """Return whether ``candidate`` is a communicator of mpi4py, usable or not."""
    mpi = sys.modules.get("mpi4py.MPI")  # loaded if a communicator exists
    return mpi is not None and isinstance(candidate, mpi.Comm)


def checked_communicator(comm: object, where: str) -> MPI.Intracomm:
    """Check that an argument is a usable intra-communicator and return it. Sends no messages.

    where: operation and argument in error messages ("new_group: ranks").

    Raises ArgumentTypeError if it is not a communicator of mpi4py, ArgumentError for COMM_NULL, a
    freed communicator and an inter-communicator, and LaunchError if MPI is not running.
    """
    if not is_communicator(comm):
        raise ArgumentTypeError(
            f"{where}: expected an intra-communicator of mpi4py, got {type(comm).__name__}"
        )
    mpi = sys.modules["mpi4py.MPI"]
    if not mpi.Is_initialized() or mpi.Is_finalized():
        state = "has ended" if mpi.Is_initialized() else "has not started; call MPI.Init() first"
        raise LaunchError(f"{where}: MPI {state}")
    if comm == mpi.COMM_NULL:
        raise ArgumentError(
            f"{where}: got MPI.COMM_NULL: this process is not a member, or the communicator was "
            "freed; only members may call"
        )
    if comm.Is_inter():
        raise ArgumentError(
            f"{where}: expected an intra-communicator, got an inter-communicator; pass the result "
            "of its Merge()"
        )
    return cast("MPI.Intracomm", comm if isinstance(comm, mpi.Intracomm) else mpi.Intracomm(comm))


def create_private(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Create a communicator of the same ranks for internal messages. All ranks call it.

    A duplicate could inherit attributes, hints and topology. A hint such as
    mpi_assert_no_any_source would be wrong for these messages.
    """
    with subset(comm, range(comm.Get_size())) as everybody:
        return cast("MPI.Intracomm", comm.Create(everybody))


def translate_ranks(comm: MPI.Comm, among: MPI.Comm) -> Sequence[int | None]:
    """Return the ranks of ``comm`` as ranks in ``among``, in order; None for a non-member."""
    from mpi4py import MPI

    ours, theirs = comm.Get_group(), among.Get_group()
    try:
        found = ours.Translate_ranks(None, theirs)
    finally:
        ours.Free()
        theirs.Free()
    return [None if rank == MPI.UNDEFINED else rank for rank in found]


@contextmanager
def subset(comm: MPI.Comm, ranks: Sequence[int]) -> Iterator[MPI.Group]:
    """Yield the MPI group of the given ranks of a communicator, in that order; then free it."""
    everybody = comm.Get_group()
    chosen = everybody.Incl(list(ranks))
    try:
        yield chosen
    finally:
        chosen.Free()
        everybody.Free()


def reports_lost_rank(error: MPI.Exception) -> bool:
    """Return whether an error means that a rank is lost or a communicator was revoked (ULFM)."""
    from mpi4py import MPI

    losses = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
    losses.discard(MPI.ERR_UNKNOWN)  # the value of these constants without ULFM
    return error.Get_error_class() in losses


def spans_world(comm: MPI.Comm) -> bool:
    """Return whether a communicator has the ranks of MPI_COMM_WORLD, in their order."""
    from mpi4py import MPI

    return MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
