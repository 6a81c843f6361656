"""The communicators of mpi4py that programs hand in: which are taken, and what is made of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from mpicoll.errors import ArgumentError, ArgumentTypeError, LaunchError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "is_communicator", "members", "private", "spans_world", "subset", "taken", "tells_of_loss",
]  # fmt: skip


def is_communicator(candidate: Any) -> bool:
    """Tells a communicator of mpi4py from everything else, whether it is one to be taken or not."""
    mpi = sys.modules.get("mpi4py.MPI")  # who has a communicator has loaded it
    return mpi is not None and isinstance(candidate, mpi.Comm)


def taken(comm: Any, where: str) -> MPI.Intracomm:
    """The intra-communicator that a program hands in. Sends nothing.

    where: operation and argument, for the message ("new_group: ranks").

    Raises ArgumentTypeError for what is no communicator of mpi4py, ArgumentError for COMM_NULL, one
    that was freed, and an inter-communicator, LaunchError where MPI does not run.
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


def private(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of the same ranks whose messages meet nobody's. All of them call.

    Without the attributes, hints and topology that a duplicate may take over: a hint such as
    mpi_assert_no_any_source would be a promise that is not kept.
    """
    ranks = comm.Get_group()
    try:
        return cast("MPI.Intracomm", comm.Create(ranks))
    finally:
        ranks.Free()


def members(comm: MPI.Comm, among: MPI.Comm) -> Sequence[int | None]:
    """The ranks of one communicator in another, in their order; None for those not in it."""
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
    """Some ranks of a communicator, in that order, as a group of MPI; it is freed at the end."""
    everybody = comm.Get_group()
    chosen = everybody.Incl(list(ranks))
    try:
        yield chosen
    finally:
        chosen.Free()
        everybody.Free()


def tells_of_loss(error: MPI.Exception) -> bool:
    """A call ended because a rank is lost, or because another rank has said that one is (ULFM)."""
    from mpi4py import MPI

    losses = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
    losses.discard(MPI.ERR_UNKNOWN)  # which they are where the MPI has none of them
    return error.Get_error_class() in losses


def spans_world(comm: MPI.Comm) -> bool:
    """The communicator has the ranks of MPI_COMM_WORLD, in their order."""
    from mpi4py import MPI

    return MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.IDENT, MPI.CONGRUENT)
