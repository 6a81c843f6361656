"""The faster of two routes for data movement between nodes, as measured in the calls of a group.

Both move the same bits: `hierarchical`, and MPI's own call or, for all_to_all, `exchange`. Each
size class, a power of two in bytes of a rank's larger array, has its own choice: the first calls
alternate, then one MPI_Allreduce of the medians on the slowest rank decides. So every rank runs the
same route, although their times differ.

A rank counts the calls of a class, so none of them may run natively before the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from statistics import median
from time import perf_counter
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from mpicoll.core.plan import CallKind, Extent, Implementation, NativeCall, Run
from mpicoll.errors import MismatchError
from mpicoll.output import format_bytes
from mpicoll.routes.host import hierarchical, mpi
from mpicoll.routes.route import EXCHANGES, Route, Serves
from mpicoll.routes.tuning import job

#: Number of calls of each route before the choice. The first one is not counted, because it may
#: connect ranks.
TRIAL_COUNT = 5
#: Maximum number of all_to_all calls that do not compare sizes, once `exchange` was faster.
MAX_SKIP_COUNT = 63


class Measured(Implementation):
    """Implementation that runs the calls of each size class by the faster of two routes.

    usual, nodes: the other route, and `hierarchical`.
    agree: returns the count of an all_to_all whose blocks are equal on all ranks, or -1.
    """

    def __init__(
        self, kind: CallKind, usual: Implementation, nodes: Run,
        agree: Callable[[Extent], int] | None = None,
    ) -> None:  # fmt: skip
        self._kind, self._usual, self._agree = kind, usual, agree
        self._runs = usual.run, nodes
        many = kind.primitive.many_in or kind.primitive.many_out
        self._block_bytes = kind.dtype.itemsize * (kind.group.size() if many else 1)
        self._seconds: dict[int, tuple[list[float], list[float]]] = {}  # by size class and route
        self._chosen: dict[int, int] = {}  # index of the faster route by size class
        self._skip_count = self._left = 0

    def run(self, send: Any, recv: Any, extent: Any, root: int) -> None:
        """Run one call."""
        count = extent if self._agree is None else self._agree_on(extent)
        size = (count * self._block_bytes).bit_length()
        extent = extent if count < 0 else count  # without a list of equal blocks
        way = 0 if count < 0 else self._chosen.get(size)
        seconds = self._seconds.setdefault(size, ([], []))
        if way is None and len(seconds[1]) == TRIAL_COUNT:
            way = self._choose(size, seconds)
        elif way is None and job.choose == "random":
            way = crc32(b"%d" % self._kind.group.sequence) & 1
        if way is not None:
            self._runs[way](send, recv, extent, root)
            return
        own = seconds[len(seconds[0]) > len(seconds[1])]
        own.append(inf)  # also if a signal handler raises
        begin = perf_counter()
        try:
            self._runs[own is seconds[1]](send, recv, extent, root)
        except MismatchError:  # on all ranks, which may be in different classes
            own.pop()
            raise
        own[-1] = perf_counter() - begin

    def _agree_on(self, extent: Extent) -> int:
        """Return the count of an all_to_all; -1 if its blocks differ or were not compared."""
        assert self._agree is not None
        if self._left:
            self._left -= 1
            return -1
        count = self._agree(extent)
        usual = count < 0 or self._chosen.get((count * self._block_bytes).bit_length()) == 0
        self._left = self._skip_count = min(2 * self._skip_count + 1, MAX_SKIP_COUNT) * usual
        return count

    def _choose(self, size: int, seconds: Sequence[Sequence[float]]) -> int:
        """Choose the route whose median is shorter on its slowest rank; return its index."""
        primitive, group, op, dtype = self._kind
        medians = np.array([median(each[1:]) for each in seconds])
        group.tested.Allreduce(MPI.IN_PLACE, medians, MPI.MAX)  # a signal fails the group
        self._chosen[size] = way = int(medians[1] < medians[0])
        if plan := group.plans.get((primitive, dtype, op)):
            plan.fast_path_registered = False  # the next call registers this size class
        names = "mpi" if self._agree is None else "exchange", "hierarchical"
        times = (
            f"{name} {1e6 * time:.1f} us" for time, name in sorted(zip(medians, names, strict=True))
        )
        found = group.resources.get_or_create("measured", dict, abandon=lambda _: None)
        found[f"{primitive} {dtype} {format_bytes(1 << size >> 1)}"] = ", ".join(times)
        return way

    def native_calls(self) -> Sequence[NativeCall]:
        """Return the native calls of MPI in the classes in which MPI was chosen."""
        return [
            call._replace(
                min_count=-(-(1 << size >> 1) // self._block_bytes),
                end_count=min(call.end_count, -(-(1 << size) // self._block_bytes)),
            )
            for call in self._usual.native_calls() or ()
            for size, way in list(self._chosen.items())  # another thread may add one
            if way == 0
        ]


def _build(kind: CallKind) -> Implementation | None:
    """Return the implementation; None without `hierarchical`. All ranks call."""
    nodes = None if job.choose == "0" else hierarchical.build(kind)
    if isinstance(nodes, hierarchical.AllToAll):
        return Measured(kind, nodes.other, nodes.move, nodes.agree)
    return nodes and Measured(kind, mpi.Collective(kind), nodes.run)


ROUTE = Route(
    __name__,
    "MPI or, if measured to be faster, node by node",
    Serves(hierarchical.MOVED, uneven=EXCHANGES),
    _build,
    hierarchical.ROUTE.needs,
)
