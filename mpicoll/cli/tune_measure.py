"""Measuring what can carry each kind of call, for ``python -m mpicoll tune``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.arrays import views
from mpicoll.cli.bench_calls import rounded
from mpicoll.cli.tune_steps import Figure
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.dtypes import DType, ReduceOp, by_name
from mpicoll.output import format_bytes
from mpicoll.primitives import Primitive
from mpicoll.routes.host import select
from mpicoll.routes.tuning import primitive_of

__all__ = ["FULL", "QUICK", "Effort", "Kind", "Outcome", "kinds_of", "measure", "room"]

#: Repetitions at the least and at the most, and calls of a route at a size in one of them.
REPETITIONS, CALLS = (3, 25), (1, 1000)
#: Calls that are tried once more where a call takes no time: the first ones take longer.
TRIES = 3
#: Bytes up to which the first size stands for all smaller ones.
SMALLEST = 8


class Effort(NamedTuple):
    """How long to measure.

    seconds: all together, at the most; what would take longer is left out.
    sample:  seconds that the calls of a route at a size take that are timed together.
    planned: repetitions that time is kept for while sizes are tried.
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
    candidates: dict[str, Implementation]

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
        candidates = select.candidates(CallKind(primitive, group, op, dtype))
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
    """What was measured, ``REPETITIONS[0]`` times at the least.

    figures:     by kind, bytes (0 for the least that there can be) and route.
    last:        by kind, the bytes of the largest size.
    repetitions: of what was measured least often.
    """

    figures: dict[str, dict[int, dict[str, Figure]]]
    last: dict[str, int]
    repetitions: int


def measure(
    group: ProcessGroup,
    kinds: Sequence[Kind],
    sizes: Sequence[int],
    effort: Effort,
    spent: Callable[[], float],
    progress: Callable[[str], None],
) -> Outcome:
    """Measures every candidate at every size, repetition by repetition in turn. All ranks call, and
    have the same outcome.

    sizes:    bytes of the larger array, rising.
    spent:    seconds of ``effort`` that are over, of which rank 0's count.
    progress: is told how far it is.
    """
    bench = _Bench(group, kinds, sizes, effort, spent, progress)
    bench.try_all()
    bench.repeat()
    bench.comm.Free()
    return bench.outcome()


@dataclass
class _Case:
    """A kind of call at a size, by each of its routes.

    least, last: the bytes that what is measured stands for.
    count:       elements of a block.
    calls:       one by each route.
    once:        seconds of a call by each route, the slowest rank's.
    turn:        seconds of a repetition, as rank 0 has them.
    samples:     seconds of a call by each route, the slowest rank's, for each repetition.
    """

    kind: Kind
    least: int
    last: int
    count: int
    calls: list[Callable[[], None]] = field(default_factory=list)
    once: list[float] = field(default_factory=list)
    turn: float = 0.0
    samples: list[list[float]] = field(default_factory=list)


def _cases(kind: Kind, sizes: Sequence[int], n: int) -> list[_Case]:
    """One for each size, but for those that come to as many elements as smaller ones."""
    found = []
    for count, same in groupby(sizes, lambda size: kind.elements(size, n)):
        first, *others = same
        least = 0 if count == 1 or (first == sizes[0] and first <= SMALLEST) else first
        nbytes = count * kind.dtype.itemsize * (n if kind.blocks else 1)
        found.append(_Case(kind, least, max(nbytes, first, *others), count))
    return found


class _Bench:
    """Every rank has one. What is decided follows from times that all know, or from rank 0's.

    cases: what is measured, those of one size together.
    """

    def __init__(
        self,
        group: ProcessGroup,
        kinds: Sequence[Kind],
        sizes: Sequence[int],
        effort: Effort,
        spent: Callable[[], float],
        progress: Callable[[str], None],
    ) -> None:
        self.comm = group.inner.Dup()
        self.cases: list[_Case] = []
        self._group = group
        self._wanted = sorted(
            (case for kind in kinds for case in _cases(kind, sizes, group.size())),
            key=lambda case: case.last,
        )
        self._effort = effort
        self._spent = spent
        self._progress = progress
        most = room(kinds, group.size(), sizes[-1])
        self._whole = np.zeros(most, np.uint8)
        self._block = np.zeros(most // group.size(), np.uint8)

    # --- the first calls ------------------------------------------------------------------------

    def try_all(self) -> None:
        """Calls everything that can be measured in time, size by size; a kind whose next size would
        take too long ends there.
        """
        smaller: dict[str, _Case] = {}
        tried: dict[str, float] = {}  # seconds of the first calls
        ended = set()
        for case in self._wanted:
            name = case.kind.name
            if name in ended:
                continue
            self._progress(f"first calls, {name} of {format_bytes(case.last)}")
            begin = self._spent()
            # What is twice as large takes twice as long.
            turn = 2 * smaller[name].turn if name in smaller else 0.0
            turns = turn + sum(known.turn for known in self.cases)
            ahead = 2 * tried.get(name, 0.0) + self._effort.planned * turns
            if self._late(ahead, self._effort.seconds) or not self._tried(case):
                ended.add(name)
                continue
            self.cases.append(case)
            smaller[name], tried[name] = case, self._spent() - begin

    def _tried(self, case: _Case) -> bool:
        """Calls each route, and finds how long a call takes, the least of some but for the very
        first; False where time is up.
        """
        case.calls = self._calls(case)
        took = [0.0] * len(case.calls)
        begin = self._spent()
        for i, call in enumerate(case.calls):
            for _ in range(2):
                if self._late(0.0, self._effort.seconds):
                    return False
                took[i] = self._timed(call, 1)
        case.once = self._slowest(took)
        around = (self._spent() - begin) / 2
        for _ in range(TRIES):
            short = [i for i, once in enumerate(case.once) if once < self._effort.sample]
            again = self._slowest([self._timed(case.calls[i], 1) for i in short])
            for i, once in zip(short, again, strict=True):
                case.once[i] = min(case.once[i], once)
        case.turn = around + sum(n * once for once in case.once if (n := self._loop(once)) > 1)
        return True

    def _calls(self, case: _Case) -> list[Callable[[], None]]:
        """A call by each route; the root is rank 0."""
        kind, count = case.kind, case.count
        group, row, n = self._group, kind.primitive, self._group.size()

        def buffer(memory: Any, elements: int) -> Any:
            array = memory[: elements * kind.dtype.itemsize].view(kind.dtype.numpy)
            return views.from_numpy(array, kind.dtype).buffer

        if not row.input:
            send, recv = None, buffer(self._whole, count)
        else:
            one = buffer(self._block, count)
            many = buffer(self._whole, n * count) if not row.root or group.rank() == 0 else None
            send, recv = many if row.many_in else one, many if row.many_out else one

        def call_by(route: Implementation) -> Callable[[], None]:
            def call() -> None:
                group.sequence += 1
                route(send, recv, count, 0)

            return call

        return [call_by(route) for route in kind.candidates.values()]

    # --- repetitions ----------------------------------------------------------------------------

    def repeat(self) -> None:
        """Measures every case, in turn, until it is enough or time is up.

        Each of the repetitions that there have to be has its share of the time that is left. They
        go from small to large, and what does not fit into one is left out for good.
        """
        least, most = REPETITIONS
        for number in range(most):
            chance = random.Random(number)
            begin, end = self._spent(), self._effort.seconds
            if number < least:
                share = begin + (end - begin) / (least - number)
                del self.cases[self._repetition(number, self.cases, chance, share) :]
            else:  # in an order in which nobody always comes after the same
                order = chance.sample(self.cases, len(self.cases))
                if self._repetition(number, order, chance, end) < len(order):
                    break

    def _repetition(
        self, number: int, order: Sequence[_Case], chance: random.Random, end: float
    ) -> int:
        """Measures each case once, its routes in any order; returns how many, before so many
        seconds were over.
        """
        took: list[list[float]] = []
        for case in order:
            left = max(0.0, self._effort.seconds - self._spent())
            self._progress(
                f"repetition {number + 1}, {len(took)} of {len(order)} sizes, "
                f"at most {left:.0f} s to go"
            )
            if self._late(case.turn, end):
                break
            begin, times = self._spent(), [0.0] * len(case.calls)
            for i in chance.sample(range(len(times)), len(times)):
                times[i] = self._timed(case.calls[i], self._loop(case.once[i]))
            took.append(times)
            case.turn = self._spent() - begin
        slowest = iter(self._slowest([one for times in took for one in times]))
        for case, times in zip(order, took, strict=False):
            case.samples.append([next(slowest) for _ in times])
        return len(took)

    def _loop(self, once: float) -> int:
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

    def outcome(self) -> Outcome:
        """The figures of what was measured often enough."""
        figures: dict[str, dict[int, dict[str, Figure]]] = {}
        for case in self.cases:
            quartiles = np.percentile(case.samples, [25, 50, 75], axis=0).T.tolist()
            figures.setdefault(case.kind.name, {})[case.least] = {
                route: Figure(*times)
                for route, times in zip(case.kind.candidates, quartiles, strict=True)
            }
        last = {case.kind.name: case.last for case in self.cases}
        return Outcome(figures, last, min((len(case.samples) for case in self.cases), default=0))

    # --- among the ranks ------------------------------------------------------------------------

    def _slowest(self, took: Sequence[float]) -> list[float]:
        """Each number, the greatest of all ranks."""
        greatest = np.array(took)
        self.comm.Allreduce(MPI.IN_PLACE, greatest, MPI.MAX)
        return [float(one) for one in greatest]

    def _late(self, ahead: float, end: float) -> bool:
        """After so many seconds more it would be later than ``end``, by rank 0's clock."""
        return bool(self.comm.bcast(self._spent() + ahead > end, 0))
