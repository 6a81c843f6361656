"""What MPI and the GPUs can do in the process of each rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from mpicoll import control_messages, settings
from mpicoll.cuda import mpi_support, probe, probe_cache, runtime
from mpicoll.cuda.probe import OK, ProbeOutcome
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.launch.host_identity import node
from mpicoll.launch.mpi_library import find_library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Capabilities", "CudaSupport", "discover", "exchange", "find_clusters", "judge"]

#: What MPI does with device memory, for sites that know: none, transfer or full.
OVERRIDE = settings.CUDA_AWARE.name


class CudaSupport(IntEnum):
    """What an MPI library does with device memory."""

    #: Nothing: it has to be copied to the host.
    NONE = 0
    #: It sends and receives it.
    TRANSFER = 1
    #: It also reduces it, and has collectives of it.
    FULL = 2


@dataclass(frozen=True)
class Capabilities:
    """What the process of one rank can do.

    vendor, version: of the MPI library.
    library: its file.
    cuda:    what MPI does with device memory.
    why:     how that is known.
    problem: how it falls short of what the library claims; "" if it does not.
    remedy:  what to change to get more of it, if known.
    settled: nothing is left to probe.
    key:     of the probe's outcome: equal for ranks whose probes would have the same outcome.
    gpus:    what names the GPUs that this process sees: PCI bus ids and UUIDs.
    names:   of their models.
    no_gpu:  why there are none.
    kind:    what they are programmed by: CUDA or ROCm; "" without any.
    nccl:    NCCL is available, or RCCL.
    node:    names the processes that share memory with this one.
    forced:  the value of MPICOLL_DEVICE_ROUTE in this process.
    used:    which of the GPUs the rank's arrays are on; "" before a group's first call on them.
    """

    vendor: str
    version: str
    library: str
    cuda: CudaSupport
    why: str
    node: str
    problem: str = ""
    remedy: str = ""
    settled: bool = True
    key: str = ""
    gpus: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    no_gpu: str = ""
    kind: str = ""
    nccl: bool = False
    forced: str = ""
    used: str = ""

    def lacks_mpi(self, least: CudaSupport) -> str:
        """Return what MPI lacks to do so much with device memory, in words; "" for nothing."""
        does = "sends and receives" if least is CudaSupport.TRANSFER else _EVERYTHING
        return "" if self.cuda >= least else f"an MPI that {does} device memory ({self.why})"

    def lacks_gpu(self, kind: str = "") -> str:
        """Return what lacks for work on a GPU, of a kind if one is given, in words; "" for
        nothing.
        """
        if not self.gpus:
            return f"a GPU ({self.no_gpu})"
        return "" if kind in ("", self.kind) else f"a GPU for {kind} (its GPUs are {self.kind}'s)"

    def words(self) -> dict[str, Any]:
        """Return plain values, fit for JSON."""
        return asdict(self) | {
            "cuda": self.cuda.name.lower(),
            "gpus": list(self.gpus),
            "names": list(self.names),
        }


_EVERYTHING = "sends, receives and reduces"

_known: Capabilities | None = None


def forget() -> None:
    """Discover the capabilities anew when they are next needed."""
    global _known
    _known = None


def discover(probes: bool = False, again: bool = False) -> Capabilities:
    """Return what this process can do, with MPI running. A settled answer is kept.

    probes: probe what neither the MPI library's own words nor earlier probes settle, in two child
            processes. That takes some seconds, a minute at most. `exchange` lets one rank probe for
            all that are alike.
    again:  ignore the outcomes of earlier probes.

    Raises ArgumentError if MPICOLL_CUDA_AWARE is none of none, transfer and full.
    """
    global _known
    if _known is None or not _known.settled or again:
        _known = _discover(probes, again)
    return _known


def _discover(probes: bool, again: bool) -> Capabilities:
    from mpi4py import MPI

    vendor, numbers = MPI.get_vendor()
    version, library = MPI.Get_library_version().strip("\0 \n"), find_library()
    found = Capabilities(
        vendor=vendor,
        version=".".join(map(str, numbers)),
        library=str(library),
        cuda=CudaSupport.NONE,
        why="",
        node=node(),
        forced=os.environ.get(settings.DEVICE_ROUTE.name, ""),
    )
    try:
        cuda = runtime.get_runtime()
    except UnsupportedError as error:
        found = replace(found, no_gpu=str(error), why="there is no GPU")
    else:
        count = range(cuda.count())
        names, gpus = tuple(map(cuda.name, count)), tuple(map(cuda.identity, count))
        found = replace(found, gpus=gpus, names=names, nccl=cuda.has_nccl(), kind=cuda.kind())
    override = settings.CUDA_AWARE.value()
    if override:
        return replace(
            found, cuda=CudaSupport[override.upper()], why=f"{OVERRIDE}={os.environ[OVERRIDE]}"
        )
    if not found.gpus:
        return found
    switch = mpi_support.find_switch(version, os.environ, found.kind)
    if switch is not None:
        value = os.environ.get(switch.name)
        how = "is not set" if value is None else f"is {value!r}"
        return replace(found, why=f"{switch.name} {how}", remedy=switch.remedy)
    said = {name: query() for name, query in mpi_support.find_queries(found.kind).items()}
    claims = [name for name, value in said.items() if value]
    denials = [name for name, value in said.items() if value == 0]
    if denials and not claims and not mpi_support.has_ucx_with(found.kind):
        return replace(found, why=f"{' and '.join(denials)}: no")
    key = probe_cache.build_key(version, library, found.names, cuda.driver_version())
    outcome = None if again else probe_cache.load(key)
    if outcome is None and probes:
        outcome = probe.run_probe(vendor == "Open MPI", library)
        probe_cache.store(key, outcome)
    return judge(replace(found, key=probe_cache.digest(key)), claims, outcome)


def judge(found: Capabilities, claims: Sequence[str], outcome: ProbeOutcome | None) -> Capabilities:
    """Return what follows from the MPI library's claims and the outcome of a probe.

    claims:  the queries in which it says that it takes device memory.
    outcome: None if nothing was probed.
    """
    says = f"{' and '.join(claims)}: yes" if claims else "MPI does not say that it takes any"
    # Point-to-point is the lesser claim: where libraries fail, it is in reductions.
    believed = CudaSupport.TRANSFER if claims else CudaSupport.NONE
    if outcome is None:
        return replace(found, cuda=believed, why=f"{says}; not tried", settled=False)
    tried = f"tried {'between two ranks' if outcome.ranks == 2 else 'on one rank'}"
    if outcome.began != OK:
        why = f"{says}; could not be tried: {outcome.began}"
        return replace(found, cuda=believed, why=why)
    stages = {"transfer": outcome.transfer, "reduction": outcome.reduction}
    details = ", ".join(f"{stage} {how}" for stage, how in stages.items() if how)
    cuda = CudaSupport.NONE
    if outcome.transfer == OK:
        cuda = CudaSupport.FULL if outcome.reduction == OK else CudaSupport.TRANSFER
    problem = ""
    if claims and cuda is not CudaSupport.FULL:
        problem = f"MPI says that it takes device memory ({says}), but {tried}: {details}"
    return replace(found, cuda=cuda, why=f"{says}; {tried}: {details}", problem=problem)


def find_clusters(all_ranks: Sequence[Capabilities]) -> list[list[int]]:
    """Return the ranks of each node, or, if all are on one, of each GPU that their arrays are on;
    in order, the clusters in the order of their first ranks.
    """
    apart = any(own.node != all_ranks[0].node for own in all_ranks)
    found: dict[str, list[int]] = {}
    for rank, own in enumerate(all_ranks):
        found.setdefault(own.node if apart else own.used, []).append(rank)
    return list(found.values())


def exchange(
    comm: MPI.Intracomm, probes: bool = False, again: bool = False
) -> tuple[Capabilities, ...]:
    """Return what each rank can do, by rank; all ranks of the communicator call.

    probes: probe what is not settled, on one rank for all that are alike, while the others wait.
    again:  ignore the outcomes of earlier probes.

    Raises ArgumentError on all ranks if MPICOLL_CUDA_AWARE has no meaning on one.
    """
    global _known
    me, wrong, open_key = comm.Get_rank(), "", ""
    try:
        own = discover(again=again)
        open_key = "" if own.settled else own.key
    except ArgumentError as error:
        wrong = str(error)
    said = control_messages.allgather(comm, (wrong, open_key), tuple[str, str])
    for rank, (wrong, _) in enumerate(said):
        if wrong:
            raise ArgumentError(f"rank {rank}: {wrong}")
    if probes and open_key and said.index(("", open_key)) == me:
        own = discover(probes=True, again=again)
    found = control_messages.allgather(comm, own, Capabilities)
    settled = {each.key: each for each in found if each.settled and each.key}
    for rank, each in enumerate(found):
        if not each.settled and each.key in settled:
            like = settled[each.key]
            found[rank] = replace(
                each, cuda=like.cuda, why=like.why, problem=like.problem, settled=True
            )
    _known = found[me]
    return tuple(found)
