"""Communicators of mpi4py: checks of those that programs pass in, and what is derived from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard, cast

from mpicoll.errors import ArgumentError, ArgumentTypeError, LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "checked_communicator",
    "create_private",
    "is_communicator",
    "reports_lost_rank",
    "spans_world",
    "subset",
    "translate_ranks",
]  # fmt: skip


def is_communicator(candidate: object) -> TypeGuard[MPI.Comm]:
    """Return whether ``candidate`` is a communicator of mpi4py, usable or not."""
    mpi = sys.modules.get("mpi4py.MPI")  # loaded wherever there is a communicator
    return mpi is not None and isinstance(candidate, mpi.Comm)


def checked_communicator(comm: object, where: str) -> MPI.Intracomm:
    """Return the intra-communicator that a program passes in, checked. Sends nothing.

    where: operation and argument, for the message ("new_group: ranks").

    Raises ArgumentTypeError if it is no communicator of mpi4py, ArgumentError for COMM_NULL, a
    freed one and an inter-communicator, LaunchError if MPI is not running.
    """
    if not is_communicator(comm):
        raise ArgumentTypeError(
            f"{where}: expected an intra-communicator of mpi4py, got {type(comm).__name__}"
        )
    mpi = sys.modules["mpi4py.MPI"]
    if not mpi.Is_initialized() or mpi.Is_finalized():
        how = "has not started; call MPI.Init() first" if not mpi.Is_initialized() else "has ended"
        raise LaunchError(f"{where}: MPI, whose communicator this is, {how}")
    if comm == mpi.COMM_NULL:
        raise ArgumentError(
            f"{where}: got MPI.COMM_NULL, a communicator that this process is not in, or that was "
            "freed; only its members call"
        )
    if comm.Is_inter():
        raise ArgumentError(
            f"{where}: got an inter-communicator; expected one of a single group, such as its "
            "Merge() makes"
        )
    return cast("MPI.Intracomm", comm if isinstance(comm, mpi.Intracomm) else mpi.Intracomm(comm))


def create_private(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Create a communicator of the same ranks for messages of our own. All ranks call.

    It lacks the attributes, hints and topology that a duplicate may inherit: a hint such as
    mpi_assert_no_any_source would be a false promise.
    """
    ranks = comm.Get_group()
    try:
        return cast("MPI.Intracomm", comm.Create(ranks))
    finally:
        ranks.Free()


def translate_ranks(comm: MPI.Comm, among: MPI.Comm) -> Sequence[int | None]:
    """Return the ranks of one communicator in another, in order; None for those not in it."""
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
    """Give an MPI group of some ranks of a communicator, in that order, and free it at the end."""
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
    losses.discard(MPI.ERR_UNKNOWN)  # their value where MPI has no ULFM
    return error.Get_error_class() in losses


def spans_world(comm: MPI.Comm) -> bool:
    """Return whether a communicator has the ranks of MPI_COMM_WORLD, in their order."""
    from mpi4py import MPI

    return MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
