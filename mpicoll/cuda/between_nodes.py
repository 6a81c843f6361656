"""MPI's messages of device memory, tried between the nodes of a group before a route needs them.

`probe` tries an MPI library between two processes of one node. Between nodes it takes another way:
another transport, the network card, GPUDirect. A crash there would end the job, but who gets so far
has an MPI that moves device memory on a node; what is left are errors, wrong data, and messages
that never arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpicoll import control_messages
from mpicoll.cuda.capabilities import Capabilities, CudaSupport
from mpicoll.cuda.probe import HUNG, OK, Place, exchange_messages
from mpicoll.cuda.runtime import Runtime

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["find_partners", "try_messages"]

#: Seconds for messages to arrive.
LIMIT = 30.0


def find_partners(nodes: Sequence[str], me: int) -> list[int]:
    """Return the ranks on other nodes that a rank exchanges messages with; they return it as well.

    nodes: of each rank.

    Each rank goes together with the one of its number on the next node: where all nodes have as
    many ranks, two partners at most.
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
    """Try MPI with device memory between nodes; return what each rank can do, now that it is tried.

    Every rank sends and receives 64 bytes and 4 MiB of device memory, checked. Where that fails on
    one rank, MPI moves none on any. All ranks call.

    index: of the device that this rank works on.
    all_ranks: what each rank can do by itself.
    """
    nodes = [own.node for own in all_ranks]
    if len(set(nodes)) == 1 or any(own.cuda is CudaSupport.NONE for own in all_ranks):
        return tuple(all_ranks)
    apart = comm.Dup()  # what is never received does not meet later messages
    place = Place(apart, runtime, index, runtime.create_stream(index))
    try:
        verdict = exchange_messages(place, find_partners(nodes, comm.Get_rank()), LIMIT)
    except Exception as error:  # of MPI or of CUDA: the others hear of it
        verdict = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    said = control_messages.allgather(comm, verdict, str)
    if all(one == OK for one in said):
        runtime.destroy_stream(place.stream)
        apart.Free()
        return tuple(all_ranks)
    # Who waits for a rank that failed says no more than that.
    bad = [rank for rank, one in enumerate(said) if one != OK]
    rank = next((one for one in bad if said[one] != HUNG), bad[0])
    told = f"tried between nodes: {said[rank]} (rank {rank})"
    return tuple(
        replace(own, cuda=CudaSupport.NONE, why=f"{own.why}; {told}", problem=told)
        for own in all_ranks
    )
