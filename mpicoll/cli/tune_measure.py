"""Measuring what can carry each kind of call, for ``python -m mpicoll tune``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll import views
from mpicoll.calls import Direct
from mpicoll.cli.bench_calls import rounded
from mpicoll.cli.tune_steps import Figure
from mpicoll.dtypes import DType, ReduceOp, by_name
from mpicoll.groups import ProcessGroup
from mpicoll.primitives import Primitive
from mpicoll.routes import hosts
from mpicoll.tables import primitive_of, shown

__all__ = ["FULL", "QUICK", "Effort", "Kind", "Outcome", "kinds_of", "measure", "room"]

#: Repetitions at the least and at the most, and calls of a route at a size in one of them.
REPETITIONS, CALLS = (3, 25), (1, 1000)
#: Calls that are tried once more where a call takes no time: the first ones take longer.
TRIES = 3
#: Bytes up to which the first size stands for all smaller ones.
SMALLEST = 8


class Effort(NamedTuple):
    """How long to measure.

    seconds: all together, at the most; sizes that would take longer are left out.
    sample:  seconds that the calls of a route at a size take that are timed together.
    planned: repetitions that time is kept for.
    """

    seconds: float
    sample: float
    planned: int


FULL = Effort(60.0, 2e-3, 5)
QUICK = Effort(8.0, 0.5e-3, 5)


class Kind(NamedTuple):
    """A kind of call, by what tables call it, and what can carry it out in a group."""

    name: str
    primitive: Primitive
    dtype: DType
    candidates: dict[str, Direct]

    @property
    def blocks(self) -> bool:
        """The larger array holds a block for each rank."""
        return self.primitive.many_in or self.primitive.many_out

    def elements(self, size: int, n: int) -> int:
        """Elements of a block, where the larger array of n ranks has about so many bytes."""
        return rounded(self.primitive, self.dtype, n, size)


def kinds_of(names: Sequence[str], group: ProcessGroup) -> list[Kind]:
    """The kinds of those names for which there is a choice. All ranks call.

    Sums, where elements are combined: of float32, and of bfloat16 for what MPI does not combine.
    """
    found = []
    for name in names:
        primitive, others = primitive_of(name)
        dtype = by_name["bfloat16" if others else "float32"]
        op = ReduceOp.SUM if primitive.reduces else None
        candidates = hosts.candidates(primitive, group, op, dtype)
        if len(candidates) > 1:
            found.append(Kind(name, primitive, dtype, candidates))
    return found


def room(kinds: Sequence[Kind], n: int, largest: int) -> int:
    """Bytes of the larger array, for all sizes up to the largest. A block has an n-th of it."""
    return max(
        kind.elements(largest, n) * kind.dtype.itemsize * (n if kind.blocks else 1)
        for kind in kinds
    )


class Outcome(NamedTuple):
    """What was measured.

    figures:     by kind, bytes (0 for the least that there can be) and route.
    largest:     the last size that was measured.
    repetitions: of everything.
    """

    figures: dict[str, dict[int, dict[str, Figure]]]
    largest: int
    repetitions: int


def measure(
    group: ProcessGroup,
    kinds: Sequence[Kind],
    sizes: Sequence[int],
    effort: Effort,
    progress: Callable[[str], None],
) -> Outcome:
    """Measures every candidate at every size, repetition by repetition in turn. All ranks call, and
    have the same outcome.

    sizes:    bytes of the larger array, rising.
    progress: is told how far it is.
    """
    bench = _Bench(group, kinds, sizes, effort, progress)
    largest = bench.try_all()
    samples = bench.repeat()
    bench.comm.Free()
    quartiles = np.percentile(samples, [25, 50, 75], axis=0).T.tolist()
    figures: dict[str, dict[int, dict[str, Figure]]] = {}
    for point, times in zip(bench.points, quartiles, strict=True):
        at_size = figures.setdefault(point.kind, {}).setdefault(point.least, {})
        at_size[point.route] = Figure(*times)
    return Outcome(figures, largest, len(samples))


class _Point(NamedTuple):
    """A kind of call at a size, by one route.

    least: bytes from which on what is measured stands.
    """

    kind: str
    least: int
    route: str
    call: Callable[[], None]


class _Bench:
    """Every rank has one. What is decided follows from times that all know, or from rank 0's.

    points: what is measured; those of one size lie together, and in them those of one kind.
    once:   seconds that a call of each takes, the slowest rank's.
    """

    def __init__(
        self,
        group: ProcessGroup,
        kinds: Sequence[Kind],
        sizes: Sequence[int],
        effort: Effort,
        progress: Callable[[str], None],
    ) -> None:
        self.comm = group.comm.Dup()
        self.points: list[_Point] = []
        self.once: list[float] = []
        self._group = group
        self._kinds = kinds
        self._sizes = sizes
        self._effort = effort
        self._progress = progress
        self._start = time.perf_counter()
        most = room(kinds, group.size(), sizes[-1])
        self._whole = np.zeros(most, np.uint8)
        self._block = np.zeros(most // group.size(), np.uint8)

    # --- the first calls ------------------------------------------------------------------------

    def try_all(self) -> int:
        """Makes all points that can be measured in time; returns the last size.

        Each call is tried, and time is kept for the repetitions to come.
        """
        each = 0.0  # seconds of a repetition
        for size in self._sizes:
            begin = self._spent()
            self._progress(f"{shown(size)}, first calls")
            points = self._points(size)
            once, around = self._tried(points)
            self.points += points
            self.once += once
            calls = map(self._calls, once)
            last = around + sum(n * took for n, took in zip(calls, once, strict=True) if n > 1)
            each += last
            # The next size is twice as large.
            ahead = 2 * (self._spent() - begin) + self._effort.planned * (each + 2 * last)
            if self._decided(self._spent() + ahead > self._effort.seconds):
                break
        return size

    def _points(self, size: int) -> list[_Point]:
        """The points of a size, without those that come to as many elements as smaller ones."""
        n = self._group.size()
        found = []
        for kind in self._kinds:
            count, first = kind.elements(size, n), size == self._sizes[0]
            if not first and count == kind.elements(size // 2, n):
                continue
            least = 0 if count == 1 or (first and size <= SMALLEST) else size
            found += [
                _Point(kind.name, least, route, self._call(kind, direct, count))
                for route, direct in kind.candidates.items()
            ]
        return found

    def _call(self, kind: Kind, direct: Direct, count: int) -> Callable[[], None]:
        """A call on so many elements a block; the root is rank 0."""
        group, row, n = self._group, kind.primitive, self._group.size()

        def buffer(memory: Any, elements: int) -> Any:
            array = memory[: elements * kind.dtype.itemsize].view(kind.dtype.numpy)
            return views.of_numpy(array, kind.dtype).buffer

        if not row.input:
            send, recv = None, buffer(self._whole, count)
        else:
            one = buffer(self._block, count)
            many = buffer(self._whole, n * count) if not row.root or group.rank() == 0 else None
            send, recv = many if row.many_in else one, many if row.many_out else one

        def call() -> None:
            group.sequence += 1
            direct(send, recv, count, 0)

        return call

    def _tried(self, points: Sequence[_Point]) -> tuple[list[float], float]:
        """Seconds of a call of each, the least of some but for the very first; and of a round of
        one call of each, with the ways to them.
        """
        for point in points:
            point.call()
        begin = self._spent()
        once = self._slowest([self._timed(point.call, 1) for point in points])
        around = self._spent() - begin
        for _ in range(TRIES):
            short = [i for i, took in enumerate(once) if took < self._effort.sample]
            again = self._slowest([self._timed(points[i].call, 1) for i in short])
            for i, took in zip(short, again, strict=True):
                once[i] = min(once[i], took)
        return once, around

    # --- repetitions ----------------------------------------------------------------------------

    def repeat(self) -> Any:
        """Seconds of a call, the slowest rank's, of each point and repetition: an array of shape
        (repetitions, points).
        """
        samples: list[list[float]] = []
        longest = 0.0
        least, most = REPETITIONS
        while len(samples) < most:
            begin = self._spent()
            enough = len(samples) >= least
            if self._decided(enough and begin + longest > self._effort.seconds):
                break
            samples.append(self._repetition(len(samples)))
            longest = max(longest, self._spent() - begin)
        return np.array(samples)

    def _repetition(self, number: int) -> list[float]:
        """Seconds of a call of each point. What is compared comes one after the other, in an order
        in which nobody always comes after the same.
        """
        together = [
            list(same) for _, same in groupby(range(len(self.points)), lambda i: self.points[i][:2])
        ]
        order = random.Random(number)
        order.shuffle(together)
        took = [0.0] * len(self.points)
        for same in together:
            left = max(0.0, self._effort.seconds - self._spent())
            self._progress(f"repetition {number + 1}, at most {left:.0f} s to go")
            order.shuffle(same)
            for i in same:
                took[i] = self._timed(self.points[i].call, self._calls(self.once[i]))
        return self._slowest(took)

    def _calls(self, once: float) -> int:
        """How many calls are timed together, of those that take so many seconds."""
        return round(min(max(self._effort.sample / once, CALLS[0]), CALLS[1]))

    def _timed(self, call: Callable[[], None], calls: int) -> float:
        """Seconds of a call, of so many. Before several there is one more: what others left in the
        caches is not their fault.
        """
        if calls > 1:
            call()
        self.comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    # --- among the ranks ------------------------------------------------------------------------

    def _slowest(self, took: Sequence[float]) -> list[float]:
        """Each number, the greatest of all ranks."""
        greatest = np.array(took)
        self.comm.Allreduce(MPI.IN_PLACE, greatest, MPI.MAX)
        return [float(one) for one in greatest]

    def _decided(self, what: bool) -> bool:
        """What rank 0 says."""
        return bool(self.comm.bcast(what, 0))

    def _spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start
