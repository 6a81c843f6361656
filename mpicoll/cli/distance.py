"""How far the processors of a job's ranks are apart.

Ranks are *near* if all of them share a last-level cache, *far* if some do not. Where calls go
through memory, they take several times as long between far ranks as between near ones. It is
measured, because what the system says of its caches need not be true: the processors of a virtual
machine move between near and far within seconds, and so do ranks that are not bound to processors.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll import control_messages
from mpicoll.kernels.library import kernels

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "DISTANCES",
    "FAR",
    "MIXED",
    "NEAR",
    "UNKNOWN",
    "Distance",
    "Pair",
    "classify",
    "measure_pairs",
]

#: How far ranks are apart. ``MIXED``: it changed so often that no samples of one distance are left.
NEAR, FAR, UNKNOWN, MIXED = "near", "far", "unknown", "mixed"
DISTANCES = (NEAR, FAR, UNKNOWN, MIXED)

#: Measurements of two ranks at a time, of which the least counts: others may have been interrupted.
_TRIES = 2
#: Nanoseconds that a rank waits for the other one's answer.
_PATIENCE = 50_000
#: Bytes between numbers that different ranks write: a cache line, and the one fetched with it.
_LINE = 128


class Distance:
    """The distance of the ranks of a communicator; every rank has one and makes the same calls.

    Each rank measures the latency of a cache line to its *partners*, the ranks whose number differs
    from its own in one bit. So with n ranks there are log2(n) measurements instead of n, all ranks
    are joined by them, and where the ranks of a cache are numbered in sequence, or in turn with
    those of other caches, no distance is missed.

    problem: why it cannot be measured, of use on rank 0; "" if it can, on all ranks alike.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._me, n = comm.Get_rank(), comm.Get_size()
        self._measurements = 0
        self._memory: np.ndarray | None = None
        self._bits = [bit for bit in range((n - 1).bit_length()) if self._me ^ 1 << bit < n]
        self.problem = "there is one rank" if n == 1 else self._share(n)

    def _share(self, n: int) -> str:
        """Share memory with the other ranks; return why that would not do, "" if it does."""
        from mpicoll.routes.host.shared_segment import share

        segment = share(self._comm, mmap.PAGESIZE, kernels is not None)
        if segment is None:
            return "the ranks do not share memory, as they can on one node with the C library"
        if segment.processors < n:
            return "there are more ranks than processors"
        self._memory = np.frombuffer(segment.memory, np.uint8)
        return ""

    def measure(self) -> float:
        """Return this rank's nanoseconds to the farthest of its partners; 0 if that is unknown."""
        found = self.measure_partners().values()
        most = max(found, default=0)
        return most if all(found) or classify(most, 0) == FAR else 0

    def measure_partners(self) -> dict[int, float]:
        """Return the nanoseconds to each partner; 0 for one that does not answer in time."""
        found: dict[int, float] = {}
        if self._memory is None or kernels is None:
            return found
        self._comm.Barrier()
        start = self._memory.ctypes.data
        for bit in self._bits:
            partner = self._me ^ 1 << bit
            own, other = (start + mmap.PAGESIZE * r + _LINE * bit for r in (self._me, partner))
            tries = [
                kernels.latency(own, other, self._me < partner, self._measurements + i, _PATIENCE)
                for i in range(_TRIES)
            ]
            found[partner] = min(filter(None, tries), default=0)
        self._measurements += _TRIES
        return found


class Pair(NamedTuple):
    """Two ranks, and the nanoseconds between them, measured several times, where they answered."""

    ranks: tuple[int, int]
    latencies: list[float]

    @property
    def median(self) -> float:
        """Return the median of the nanoseconds."""
        return statistics.median(self.latencies)

    @property
    def moves(self) -> bool:
        """Return whether the two are near at times and far at others; one measurement alone may
        have been disturbed.
        """
        found = Counter(classify(each, each) for each in self.latencies)
        return min(found[NEAR], found[FAR]) > 1


def measure_pairs(comm: MPI.Intracomm, times: int = 20, pause: float = 5e-3) -> list[Pair] | str:
    """Return the pairs of ranks between which distances were measured, or the reason for having
    none. All ranks call, with the same number of ``times``.
    """
    distance, own = Distance(comm), list[dict[int, float]]()
    for _ in range(times):
        own.append(distance.measure_partners())
        time.sleep(pause)
    found: dict[tuple[int, int], list[float]] = {}
    everybody = control_messages.allgather(comm, own, list[dict[int, float]])
    for rank, measured in enumerate(everybody):
        for partner, latency in (item for each in measured for item in each.items()):
            if rank < partner and latency:
                found.setdefault((rank, partner), []).append(latency)
    pairs = [Pair(ranks, latencies) for ranks, latencies in found.items()]
    return pairs or distance.problem or "no rank answered in time: the processors are busy"


def classify(most: float, least: float) -> str:
    """Return the distance of ranks by the most and the least nanoseconds that they measured, 0
    where that is unknown.
    """
    if kernels is not None and most >= kernels.far_ns():
        return FAR
    return NEAR if least else UNKNOWN
