"""Capabilities of MPI and the GPUs in each rank's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import control_messages, settings
from mpicoll.cuda import mpi_support, probe_cache, runtime
from mpicoll.cuda.probe_cache import HUNG, OK, ProbeOutcome
from mpicoll.cuda.runtime import Runtime
from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.launch.host_identity import node
from mpicoll.launch.mpi_library import find_library
from mpicoll.machine import ranks_by_value

if TYPE_CHECKING:
    from mpi4py import MPI

#: Support for device memory set by the site.
OVERRIDE = settings.CUDA_AWARE.name
#: Timeout in seconds for the messages between nodes.
BETWEEN_NODES_TIMEOUT_S = 30.0


class Capabilities(NamedTuple):
    """The capabilities of one rank's process."""

    #: Of the MPI library.
    vendor: str
    version: str
    library: str  # file of the MPI library
    cuda: bool  # whether MPI sends and receives device memory
    why: str  # reason for that value, for people
    node: str  # identifies the processes that share memory with this one
    #: Description of a test that failed although MPI claims support; "" if none did.
    problem: str = ""
    remedy: str = ""  # advice for better support, if known
    settled: bool = True  # whether ``cuda`` is final; False if only a probe can tell
    #: Key of the probe's outcome: equal for ranks whose probes would have the same outcome.
    key: str = ""
    gpus: tuple[str, ...] = ()  # PCI bus id and UUID of each GPU that this process sees
    names: tuple[str, ...] = ()  # model names of these GPUs
    no_gpu: str = ""  # reason that this process has no GPUs
    nccl: bool = False  # whether NCCL is available
    forced: str = ""  # value of MPICOLL_DEVICE_ROUTE in this process
    used: str = ""  # the GPU of the rank's arrays; "" before a group's first call on device memory

    def lacks_mpi(self) -> str:
        """Return the missing MPI support as text; "" if it is sufficient."""
        return "" if self.cuda else f"an MPI that sends and receives device memory ({self.why})"

    def lacks_gpu(self) -> str:
        """Return the reason that this process has no GPU; "" if it has one."""
        return "" if self.gpus else f"a GPU ({self.no_gpu})"


_known: Capabilities | None = None


def forget() -> None:
    """Discard the stored capabilities; the next use discovers them again."""
    global _known
    _known = None


def discover(probes: bool = False, again: bool = False) -> Capabilities:
    """Return the capabilities of this process, and store them once settled. MPI must be running.

    probes: probe in child processes if neither the MPI library's reports nor earlier probes settle
            the question. That takes some seconds, at most about two minutes. With `exchange` one
            rank probes for all equal ranks.
    again:  ignore the outcomes of earlier probes.

    Raises ArgumentError if MPICOLL_CUDA_AWARE is not 0 or 1.
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
        cuda=False,
        why="",
        node=node(),
        forced=os.environ.get(settings.DEVICE_ROUTE.name, ""),
    )
    try:
        cuda = runtime.get_runtime()
    except UnsupportedError as error:
        found = found._replace(no_gpu=str(error), why="there is no GPU")
    else:
        count = range(cuda.count())
        names, gpus = tuple(map(cuda.name, count)), tuple(map(cuda.identity, count))
        found = found._replace(gpus=gpus, names=names, nccl=cuda.has_nccl())
    override = settings.CUDA_AWARE.value()
    if override:
        return found._replace(cuda=override == "1", why=f"{OVERRIDE}={override}")
    if not found.gpus:
        return found
    switch = mpi_support.find_switch(version, os.environ)
    if switch is not None:
        value = os.environ.get(switch.name)
        how = "is not set" if value is None else f"is {value!r}"
        return found._replace(why=f"{switch.name} {how}", remedy=switch.remedy)
    said = {name: query() for name, query in mpi_support.QUERIES.items()}
    claims = [name for name, value in said.items() if value]
    denials = [name for name, value in said.items() if value == 0]
    if denials and not claims and not mpi_support.has_ucx_cuda():
        return found._replace(why=f"{' and '.join(denials)}: no")
    key = probe_cache.build_key(version, library, found.names, cuda.driver_version())
    outcome = None if again else probe_cache.load(key)
    if outcome is None and probes:
        from mpicoll.cuda import probe

        outcome = probe.run_probe(vendor == "Open MPI", library)
        probe_cache.store(key, outcome)
    return judge(found._replace(key=probe_cache.digest(key)), claims, outcome)


def judge(found: Capabilities, claims: Sequence[str], outcome: ProbeOutcome | None) -> Capabilities:
    """Return ``found``, updated by the MPI library's claims and the outcome of a probe.

    claims:  the queries in which the library claims support for device memory.
    outcome: None without a probe.
    """
    says = f"{' and '.join(claims)}: yes" if claims else "MPI does not report support"
    if outcome is None:
        return found._replace(cuda=bool(claims), why=f"{says}; not tried", settled=False)
    tried = f"tried {'between two ranks' if outcome.ranks == 2 else 'on one rank'}"
    if outcome.began != OK:
        why = f"{says}; could not be tried: {outcome.began}"
        return found._replace(cuda=bool(claims), why=why)
    cuda, problem, remedy = outcome.transfer == OK, "", ""
    verdict = f"transfer {outcome.transfer}"
    if not cuda:
        remedy = mpi_support.find_ucx_remedy(os.environ)
    if claims and not cuda:
        problem = f"MPI says that it takes device memory ({says}), but {tried}: {verdict}"
    why = f"{says}; {tried}: {verdict}"
    return found._replace(cuda=cuda, why=why, problem=problem, remedy=remedy)


def find_nodes(all_ranks: Sequence[Capabilities]) -> list[list[int]]:
    """Return the ranks of each node, in the order of their first ranks."""
    return list(ranks_by_value(own.node for own in all_ranks).values())


def exchange(
    comm: MPI.Intracomm, probes: bool = False, again: bool = False
) -> tuple[Capabilities, ...]:
    """Return the capabilities of each rank; all ranks of the communicator call.

    probes: run outstanding probes, on one rank for all equal ranks; the other ranks wait.
    again:  ignore the outcomes of earlier probes.

    Raises ArgumentError on all ranks if MPICOLL_CUDA_AWARE is invalid on one.
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
            found[rank] = each._replace(
                cuda=like.cuda, why=like.why, problem=like.problem, remedy=like.remedy,
                settled=True,
            )  # fmt: skip
    _known = found[me]
    return tuple(found)


def find_partners(nodes: Sequence[str], me: int) -> list[int]:
    """Return the ranks on other nodes with which rank ``me`` exchanges test messages. Each is a
    partner of the other.

    nodes: the node of each rank.

    Each rank is paired with the same local rank on the next node. If all nodes have the same number
    of ranks, a rank has at most two partners.
    """
    ring, found = list(ranks_by_value(nodes).values()), set()
    for place, here in enumerate(ring):
        after = ring[(place + 1) % len(ring)]
        for number, rank in enumerate(here):
            pair = {rank, after[number % len(after)]}
            found |= pair - {me} if me in pair else set()
    return sorted(found)


def try_messages(
    comm: MPI.Intracomm,
    cuda: Runtime,
    index: int,
    all_ranks: Sequence[Capabilities],
) -> tuple[Capabilities, ...]:
    """Test MPI with device memory between nodes, before a route needs it; return the updated
    capabilities of each rank.

    `probe` tests an MPI library between two processes of one node. Between nodes MPI uses another
    transport, the network card and GPUDirect. A crash here would end the job, but this MPI has
    already moved device memory within a node; remaining problems are errors, wrong data, and
    messages that never arrive. Every rank sends and receives 64 bytes and 4 MiB of device memory
    and checks them. If that fails on any rank, device memory is not passed to MPI on any rank. All
    ranks call.

    index:     number of the device that this rank uses.
    all_ranks: capabilities of each rank before this test.
    """
    from mpicoll.cuda import probe

    nodes = [own.node for own in all_ranks]
    if len(set(nodes)) == 1 or not all(own.cuda for own in all_ranks):
        return tuple(all_ranks)
    apart = comm.Dup()  # so that undelivered messages do not match later ones
    place = probe.ProbeDevice(apart, cuda, index, cuda.create_stream(index))
    try:
        verdict = probe.exchange_messages(
            place, find_partners(nodes, comm.Get_rank()), BETWEEN_NODES_TIMEOUT_S
        )
    except Exception as error:  # an error of MPI or CUDA, reported to all ranks
        verdict = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    said = control_messages.allgather(comm, verdict, str)
    if all(one == OK for one in said):
        cuda.destroy_stream(place.stream)
        apart.Free()
        return tuple(all_ranks)
    # A rank that waited for a failed rank has only a timeout to report.
    bad = [rank for rank, one in enumerate(said) if one != OK]
    rank = next((one for one in bad if said[one] != HUNG), bad[0])
    told = f"tried between nodes: {said[rank]} (rank {rank})"
    return tuple(
        own._replace(cuda=False, why=f"{own.why}; {told}", problem=told) for own in all_ranks
    )
