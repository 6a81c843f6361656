"""Latency of a cache line between the processors of a job's ranks.

Calls through memory take several times longer between processors without a common cache. The
latency is measured, because unbound ranks, and processors of a virtual machine, may move.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from mpicoll.kernels.library import kernels

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Latency"]

#: Number of measurements of a pair, of which the minimum is used.
_TRY_COUNT = 2
#: Time to wait for the partner.
_TIMEOUT_NS = 50_000
#: Distance of numbers that different ranks write: a cache line and the prefetched next one.
_LINE_BYTES = 128


class Latency:
    """Latency between the ranks of a communicator. Every rank has one and makes the same calls.

    Each rank measures the latency of a cache line to its *partners*, the ranks whose number differs
    from its own in one bit. With n ranks, this takes log2(n) measurements instead of n, and all
    ranks are connected by them. No distance is missed if the ranks of a cache have consecutive or
    interleaved numbers.

    problem: reason why it cannot be measured, of use on rank 0; "" if it can, on all ranks alike.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._me, n = comm.Get_rank(), comm.Get_size()
        self._measurements = 0
        self._memory: np.ndarray | None = None
        self._bits = [bit for bit in range((n - 1).bit_length()) if self._me ^ 1 << bit < n]
        self.problem = "there is one rank" if n == 1 else self._share(n)

    def _share(self, n: int) -> str:
        """Share memory with the other ranks. Returns a reason if this is not possible, or ""."""
        from mpicoll.routes.host.shared_segment import share

        segment = share(self._comm, mmap.PAGESIZE, kernels is not None)
        if segment is None:
            return "the ranks do not share memory (requires one node and the C library)"
        if segment.processors < n:
            return "there are more ranks than processors"
        self._memory = np.frombuffer(segment.memory, np.uint8)
        return ""

    def measure(self) -> float:
        """Return the nanoseconds to the farthest partner, or 0 if unknown."""
        if self._memory is None or kernels is None:
            return 0
        self._comm.Barrier()
        start = self._memory.ctypes.data
        found: list[float] = []
        for bit in self._bits:
            partner = self._me ^ 1 << bit
            own, other = (
                start + mmap.PAGESIZE * r + _LINE_BYTES * bit for r in (self._me, partner)
            )
            tries = [
                kernels.latency(own, other, self._me < partner, self._measurements + i, _TIMEOUT_NS)
                for i in range(_TRY_COUNT)
            ]
            found.append(min(filter(None, tries), default=0))
        self._measurements += _TRY_COUNT
        return max(found) if all(found) else 0
