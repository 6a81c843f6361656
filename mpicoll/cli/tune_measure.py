"""Measure the routes of each kind of call, for ``python -m mpicoll tune``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from mpicoll import control_messages
from mpicoll.arrays import views
from mpicoll.arrays.views import Bytes
from mpicoll.cli.bench_calls import block_count
from mpicoll.cli.timing import Call, Effort, Figure, Sample, Taken, Timer, keep
from mpicoll.cli.tune_steps import Figures
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind, Run
from mpicoll.dtypes import DType, ReduceOp, by_name
from mpicoll.output import format_bytes
from mpicoll.primitives import Primitive
from mpicoll.routes.host import select
from mpicoll.routes.tuning import parse_kind

__all__ = ["FULL", "QUICK", "Kind", "Outcome", "array_bytes", "find_kinds", "measure"]

#: Number of single calls timed to estimate the time of a call, after slower first calls.
TRY_COUNT = 3
#: Maximum first size that represents all smaller sizes.
SMALLEST_BYTES = 8
#: Number of samples of each case to reserve time for during first calls.
PLANNED_COUNT = 5

#: The measurement takes at most ``seconds``. Sizes that would take longer are omitted.
FULL = Effort(60.0, 2e-3, 3, 25)
QUICK = FULL._replace(seconds=8.0, sample=0.5e-3)


class Kind(NamedTuple):
    """A kind of call, by its name in tables, and the routes that support it in a group."""

    name: str
    primitive: Primitive
    dtype: DType
    candidates: dict[str, Run]

    @property
    def blocks(self) -> bool:
        """Whether the larger array has a block per rank."""
        return self.primitive.many_in or self.primitive.many_out

    def elements(self, size: int, n: int) -> int:
        """Return the elements of a block if the larger array of n ranks has ``size`` bytes."""
        return block_count(self.primitive, self.dtype, n, size)


def find_kinds(names: Sequence[str], group: ProcessGroup) -> list[Kind]:
    """Return the given kinds with several routes. All ranks call it.

    Reductions are sums of float32, or of bfloat16 for dtypes that MPI does not reduce.
    """
    found = []
    for name in names:
        primitive, others = parse_kind(name)
        dtype = by_name["bfloat16" if others else "float32"]
        op = ReduceOp.SUM if primitive.reduces else None
        candidates = select.candidates(CallKind(primitive, group, op, dtype))
        if len(candidates) > 1:
            functions = {route: each.run for route, each in candidates.items()}
            found.append(Kind(name, primitive, dtype, functions))
    return found


def array_bytes(kinds: Sequence[Kind], n: int, largest: int) -> int:
    """Return the maximum size of the larger array. A block is an n-th of it."""
    return max(
        kind.elements(largest, n) * kind.dtype.itemsize * (n if kind.blocks else 1)
        for kind in kinds
    )


class Outcome(NamedTuple):
    """Measurements with at least the minimum number of samples.

    figures:  by kind.
    last:     by kind, the largest size in bytes.
    samples:  minimum number of samples, at any distance of the ranks.
    distance: description of the distance of the ranks.
    """

    figures: dict[str, Figures]
    last: dict[str, int]
    samples: int
    distance: str


def measure(
    group: ProcessGroup,
    kinds: Sequence[Kind],
    sizes: Sequence[int],
    effort: Effort,
    spent: Callable[[], float],
    progress: Callable[[str], None],
) -> Outcome:
    """Measure every candidate at every size, sample by sample in turn.

    All ranks call it and get the same result.

    sizes:    sizes of the larger array in bytes, increasing.
    spent:    returns the seconds of ``effort`` that have passed; only the value of rank 0 is used.
    progress: called with a description of the progress.
    """
    run = _Run(group, kinds, sizes, effort, spent, progress)
    run.try_all()
    run.sample_all()
    run.comm.Free()
    return run.outcome()


@dataclass
class _Case:
    """A kind of call at a size, by each of its routes.

    least, last: range of bytes that this size represents.
    count:       elements of a block.
    calls:       a call by each route.
    once:        time of a call by each route in seconds, of the slowest rank.
    turn:        time of a sample of all routes in seconds, on rank 0.
    samples:     samples of each route, turn by turn.
    """

    kind: Kind
    least: int
    last: int
    count: int
    calls: list[Call] = field(default_factory=list)
    once: list[float] = field(default_factory=list)
    turn: float = 0.0
    samples: list[list[Sample]] = field(default_factory=list)


def _cases(kind: Kind, sizes: Sequence[int], n: int) -> list[_Case]:
    """Return a case for each size, without sizes that round to the same number of elements."""
    found = []
    for count, same in groupby(sizes, lambda size: kind.elements(size, n)):
        first, *others = same
        least = 0 if count == 1 or (first == sizes[0] and first <= SMALLEST_BYTES) else first
        nbytes = count * kind.dtype.itemsize * (n if kind.blocks else 1)
        found.append(_Case(kind, least, max(nbytes, first, *others), count))
    return found


class _Run:
    """The measurement on one rank. Decisions depend on times that all ranks have, or on rank 0.

    cases: the cases to measure, ordered by size.
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
        self._timer = Timer(self.comm)
        self._group = group
        self._wanted = sorted(
            (case for kind in kinds for case in _cases(kind, sizes, group.size())),
            key=lambda case: case.last,
        )
        self._effort = effort
        self._spent = spent
        self._progress = progress
        most = array_bytes(kinds, group.size(), sizes[-1])
        self._whole = np.zeros(most, np.uint8)
        self._block = np.zeros(most // group.size(), np.uint8)

    # --- the first calls ------------------------------------------------------------------------

    def try_all(self) -> None:
        """Make first calls of everything that can be measured in time, by size.

        A kind ends at the first size that would take too long.
        """
        smaller: dict[str, _Case] = {}
        tried: dict[str, float] = {}  # time of the first calls
        ended = set()
        for case in self._wanted:
            name = case.kind.name
            if name in ended:
                continue
            self._progress(f"first calls, {name} of {format_bytes(case.last)}")
            begin = self._spent()
            # Assume that twice the bytes take twice the time.
            turn = 2 * smaller[name].turn if name in smaller else 0.0
            turns = turn + sum(known.turn for known in self.cases)
            ahead = 2 * tried.get(name, 0.0) + PLANNED_COUNT * turns
            if self._late(ahead, self._effort.seconds) or not self._tried(case):
                ended.add(name)
                continue
            self.cases.append(case)
            smaller[name], tried[name] = case, self._spent() - begin

    def _tried(self, case: _Case) -> bool:
        """Call each route and estimate its time. Returns False after the time limit."""
        case.calls = self._calls(case)
        took = [0.0] * len(case.calls)
        begin = self._spent()
        for i, call in enumerate(case.calls):
            for _ in range(2):
                if self._late(0.0, self._effort.seconds):
                    return False
                took[i] = self._timer.time(call)
        case.once = self._timer.combine(took)
        around = (self._spent() - begin) / 2
        for _ in range(TRY_COUNT):
            short = [i for i, once in enumerate(case.once) if once < self._effort.sample]
            again = self._timer.combine([self._timer.time(case.calls[i]) for i in short])
            for i, once in zip(short, again, strict=True):
                case.once[i] = min(case.once[i], once)
        case.turn = around + sum(
            n * once for once in case.once if (n := self._effort.calls(once)) > 1
        )
        return True

    def _calls(self, case: _Case) -> list[Call]:
        """Return a call by each route. The root is rank 0."""
        kind, count = case.kind, case.count
        group, row, n = self._group, kind.primitive, self._group.size()

        def buffer(memory: Bytes, elements: int) -> views.Buffer:
            array = memory[: elements * kind.dtype.itemsize].view(kind.dtype.numpy)
            return views.from_numpy(array, kind.dtype).buffer

        if not row.input:
            send, recv = None, buffer(self._whole, count)
        else:
            one = buffer(self._block, count)
            many = buffer(self._whole, n * count) if not row.root or group.rank() == 0 else None
            send, recv = many if row.many_in else one, many if row.many_out else one

        def call_by(route: Run) -> Call:
            def call() -> None:
                group.sequence += 1
                route(send, recv, count, 0)

            return call

        return [call_by(route) for route in kind.candidates.values()]

    # --- samples --------------------------------------------------------------------------------

    def sample_all(self) -> None:
        """Take samples of every case, in turn, until there are enough or the time limit is reached.

        Each required sample has an equal share of the remaining time. It starts with small sizes.
        Cases that do not fit into the share are dropped.
        """
        fewest, most = self._effort.fewest, self._effort.most
        for number in range(most):
            chance = random.Random(number)
            begin, end = self._spent(), self._effort.seconds
            if number < fewest:
                share = begin + (end - begin) / (fewest - number)
                del self.cases[self._sample(number, self.cases, chance, share) :]
            else:  # in random order
                order = chance.sample(self.cases, len(self.cases))
                if self._sample(number, order, chance, end) < len(order):
                    break

    def _sample(
        self, number: int, order: Sequence[_Case], chance: random.Random, end: float
    ) -> int:
        """Take a sample of each case; return the number of samples taken before ``end`` seconds."""
        took: list[list[Taken]] = []
        for case in order:
            left = max(0.0, self._effort.seconds - self._spent())
            self._progress(
                f"repetition {number + 1}, {len(took)} of {len(order)} sizes, "
                f"at most {left:.0f} s left"
            )
            if self._late(case.turn, end):
                break
            begin = self._spent()
            took.append(
                self._timer.turn(case.calls, list(map(self._effort.calls, case.once)), chance)
            )
            case.turn = self._spent() - begin
        for case, samples in zip(order, self._timer.agree(took), strict=False):
            case.samples.append(samples)
        return len(took)

    def outcome(self) -> Outcome:
        """Return the figures of cases with enough samples."""
        figures: dict[str, dict[int, dict[str, dict[str, Figure]]]] = {}
        for case in self.cases:
            at_size = figures.setdefault(case.kind.name, {}).setdefault(case.least, {})
            every = keep(case.samples, self._effort.fewest)
            for route, times in zip(case.kind.candidates, every, strict=True):
                for distance, one in times.split().items():
                    at_size.setdefault(distance, {})[route] = one.figure
        last = {case.kind.name: case.last for case in self.cases}
        fewest = min((len(case.samples) for case in self.cases), default=0)
        return Outcome({**figures}, last, fewest, self._timer.describe_distances())

    def _late(self, ahead: float, end: float) -> bool:
        """Return whether ``ahead`` more seconds would exceed ``end``, by the clock of rank 0."""
        return control_messages.bcast(self.comm, bool(self._spent() + ahead > end), 0, bool)
