"""Test MPI with device memory between the nodes of a group, before a route needs it.

`probe` tests an MPI library between two processes of one node. Between nodes MPI uses another
transport, the network card and GPUDirect. A crash here would end the job, but this MPI has already
moved device memory within a node; remaining problems are errors, wrong data, and messages that
never arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpicoll import control_messages
from mpicoll.cuda.capabilities import Capabilities, CudaSupport
from mpicoll.cuda.probe import HUNG, OK, ProbeDevice, exchange_messages
from mpicoll.cuda.runtime import Runtime

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["find_partners", "try_messages"]

#: Timeout in seconds for the messages.
LIMIT = 30.0


def find_partners(nodes: Sequence[str], me: int) -> list[int]:
    """Return the ranks on other nodes with which a rank exchanges messages; the relation is
    symmetric.

    nodes: the node of each rank.

    Each rank is paired with the rank of the same position on the next node. If all nodes have the
    same number of ranks, a rank has at most two partners.
    """
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(nodes):
        members.setdefault(name, []).append(rank)
    ring, found = list(members.values()), set()
    for place, here in enumerate(ring):
        after = ring[(place + 1) % len(ring)]
        for number, rank in enumerate(here):
            pair = {rank, after[number % len(after)]}
            found |= pair - {me} if me in pair else set()
    return sorted(found)


def try_messages(
    comm: MPI.Intracomm,
    runtime: Runtime,
    index: int,
    all_ranks: Sequence[Capabilities],
) -> tuple[Capabilities, ...]:
    """Test MPI with device memory between nodes; return the updated capabilities of each rank.

    Every rank sends and receives 64 bytes and 4 MiB of device memory and checks them. If that fails
    on any rank, device memory is not passed to MPI on any rank. All ranks call.

    index:     number of the device that this rank uses.
    all_ranks: capabilities of each rank by itself.
    """
    nodes = [own.node for own in all_ranks]
    if len(set(nodes)) == 1 or any(own.cuda is CudaSupport.NONE for own in all_ranks):
        return tuple(all_ranks)
    apart = comm.Dup()  # so that undelivered messages do not match later ones
    place = ProbeDevice(apart, runtime, index, runtime.create_stream(index))
    try:
        verdict = exchange_messages(place, find_partners(nodes, comm.Get_rank()), LIMIT)
    except Exception as error:  # an error of MPI or CUDA, reported to all ranks
        verdict = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    said = control_messages.allgather(comm, verdict, str)
    if all(one == OK for one in said):
        runtime.destroy_stream(place.stream)
        apart.Free()
        return tuple(all_ranks)
    # A rank that waited for a failed rank has only a timeout to report.
    bad = [rank for rank, one in enumerate(said) if one != OK]
    rank = next((one for one in bad if said[one] != HUNG), bad[0])
    told = f"tried between nodes: {said[rank]} (rank {rank})"
    return tuple(
        replace(own, cuda=CudaSupport.NONE, why=f"{own.why}; {told}", problem=told)
        for own in all_ranks
    )
