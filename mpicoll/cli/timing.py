"""Time calls that ranks make together: the harness of ``bench``, ``tune`` and ``benchmarks/``.

A sample is the time of some calls of one case after a barrier. Samples of all cases take turns, in
a changing order, so that a disturbance hits all of them alike. The time of a sample is the slowest
rank's, unless another is requested. Figures are medians with quartiles.

How far the ranks are apart (``distance``) is measured before and after each sample. A figure is of
samples of one distance; a sample during which it changed is dropped.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll.cli.distance import DISTANCES, FAR, MIXED, NEAR, UNKNOWN, Distance, classify

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "CALLS",
    "ENOUGH",
    "MAX_SPREAD",
    "Call",
    "Effort",
    "Figure",
    "Sample",
    "Taken",
    "Timer",
    "Times",
    "clamp",
    "format_seconds",
    "keep",
    "typical_spread",
]

Call = Callable[[], object]

#: The fewest and the most calls in a sample.
CALLS = (1, 1000)
#: The fewest samples of a distance for a figure, where as many are taken.
ENOUGH = 5
#: The greatest typical spread of reliable times, as a share of the median. Above it the machine is
#: too busy to be measured.
MAX_SPREAD = 0.1
#: The distance of a sample during which it changed.
_MOVED = "moved"
#: Whose time counts: values of nccl-tests' option ``-a``.
RANK_0, MEAN, FASTEST, SLOWEST = range(4)


class Figure(NamedTuple):
    """The time of a call in seconds, over samples: the median, between the quartiles."""

    low: float
    median: float
    high: float

    @property
    def spread(self) -> float:
        """Return half the distance between the quartiles."""
        return (self.high - self.low) / 2

    @property
    def relative_spread(self) -> float:
        """Return the spread as a share of the median."""
        return self.spread / self.median


class Sample(NamedTuple):
    """The time of a call in seconds, in which turn it was, and how far the ranks were apart."""

    seconds: float
    turn: int = 0
    distance: str = UNKNOWN


@dataclass(frozen=True)
class Times:
    """The samples of a call, by their turns; figures are of one distance (``split``)."""

    samples: list[Sample]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each sample."""
        return [sample.seconds for sample in self.samples]

    @property
    def figure(self) -> Figure:
        """Return median and quartiles, interpolated between samples."""
        if len(self.samples) == 1:
            return Figure(*3 * self._seconds)
        return Figure(*statistics.quantiles(self._seconds, n=4, method="inclusive"))

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self._seconds)

    @property
    def spread(self) -> float:
        """Return half the distance between the quartiles."""
        return self.figure.spread

    @property
    def _seconds(self) -> list[float]:
        """Return the seconds; raise ValueError for samples of several distances."""
        found = dict.fromkeys(sample.distance for sample in self.samples)
        if len(found) > 1:
            raise ValueError(f"one figure of samples of several distances: {', '.join(found)}")
        return self.seconds

    @property
    def is_enough(self) -> bool:
        """Return whether there are ``ENOUGH`` samples for a figure."""
        return len(self.samples) >= ENOUGH

    def split(self) -> dict[str, Times]:
        """Return the samples of each distance that occurs."""
        found = {
            distance: [sample for sample in self.samples if sample.distance == distance]
            for distance in DISTANCES
        }
        return {distance: Times(samples) for distance, samples in found.items() if samples}

    def map(self, change: Callable[[float], float]) -> Times:
        """Return the samples with other times."""
        return Times([each._replace(seconds=change(each.seconds)) for each in self.samples])

    def minus(self, other: Times) -> Times:
        """Subtract another's time, sample by sample: those of a turn with the same distance."""
        return self._pair(other, lambda a, b: a - b)

    def over(self, other: Times) -> Times:
        """Divide by another's time, sample by sample: those of a turn with the same distance."""
        return self._pair(other, lambda a, b: a / b)

    def _pair(self, other: Times, combine: Callable[[float, float], float]) -> Times:
        theirs = {each[1:]: each.seconds for each in other.samples}
        return Times(
            [
                each._replace(seconds=combine(each.seconds, theirs[each[1:]]))
                for each in self.samples
                if each[1:] in theirs
            ]
        )

    def text(self, unit: float, width: int) -> str:
        """Format median and spread in this unit."""
        median, spread = self.median / unit, self.spread / unit
        digits = 2 if median < 100 else 0
        return f"{median:>{width}.{digits}f} +-{spread:5.{digits}f}"


def keep(turns: Sequence[Sequence[Sample]], enough: int) -> list[Times]:
    """Return the samples of each case that figures are made of.

    turns: a sample of each case, turn by turn.

    Kept are near and far samples if each case has ``enough`` of them; where there are neither,
    those whose distance is unknown; and if these are too few as well, all there are, as mixed.
    """
    cases = [
        [sample._replace(turn=number) for number, sample in enumerate(samples)]
        for samples in zip(*turns, strict=True)
    ]
    fewest = _count(cases, min)
    kept = [distance for distance in (NEAR, FAR) if fewest[distance] >= enough]
    if not kept and fewest[UNKNOWN] >= enough:
        kept = [UNKNOWN]
    if not kept:
        cases = [[sample._replace(distance=MIXED) for sample in samples] for samples in cases]
        kept = [MIXED]
    return [Times([each for each in samples if each.distance in kept]) for samples in cases]


def _has_enough(turns: Sequence[Sequence[Sample]], enough: int) -> bool:
    """Return whether each case has enough samples of every distance that occurs."""
    cases = list(zip(*turns, strict=True))
    fewest, most = _count(cases, min), _count(cases, max)
    occur = [distance for distance in (NEAR, FAR) if most[distance]] or [UNKNOWN]
    return all(fewest[distance] >= enough for distance in occur)


def _count(cases: Sequence[Sequence[Sample]], which: Callable[[list[int]], int]) -> dict[str, int]:
    """Return the number of samples at each distance in the case that has fewest or most."""
    counts = [Counter(sample.distance for sample in samples) for samples in cases]
    return {distance: which([each[distance] for each in counts]) for distance in DISTANCES}


class Effort(NamedTuple):
    """The time to spend on measuring.

    seconds: for all samples, about; the limits of their number come first.
    sample:  seconds for one sample, about; ``CALLS`` comes first.
    fewest, most: samples of each case.
    """

    seconds: float = 1.5
    sample: float = 2e-3
    fewest: int = 15
    most: int = 60

    def calls(self, once: float) -> int:
        """Return the number of calls in a sample if one takes ``once`` seconds."""
        return clamp(self.sample / once, *CALLS) if once > 0 else CALLS[1]

    def samples(self, turn: float) -> int:
        """Return the number of samples if one of every case takes ``turn`` seconds."""
        return clamp(self.seconds / turn, self.fewest, self.most)


def clamp(wanted: float, least: int, most: int) -> int:
    """Return the whole number nearest to ``wanted`` within the limits."""
    return round(min(max(wanted, least), most))


class Taken(NamedTuple):
    """A sample on one rank: seconds of a call, and the nanoseconds to its farthest partner before
    and after it, 0 where that is unknown.
    """

    seconds: float
    before: float
    after: float


class Timer:
    """A taker of samples; every rank of the communicator has one and makes the same calls on it.

    settle: waits for calls that return before they are done.
    """

    def __init__(self, comm: MPI.Intracomm, settle: Call | None = None) -> None:
        self._comm = comm
        self._settle = settle
        self._distance = Distance(comm)
        self._counts: Counter[str] = Counter()  # samples, by distance
        self._latencies: dict[str, list[float]] = {NEAR: [], FAR: []}  # nanoseconds

    def time(self, call: Call, calls: int = 1) -> float:
        """Return the seconds of a call on this rank, from one sample of ``calls`` calls.

        One call more precedes several: it refills the caches that other cases have used.
        """
        settle = self._settle
        if calls > 1:
            call()
        if settle is not None:
            settle()
        self._comm.Barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if settle is not None:
            settle()
        return (time.perf_counter() - start) / calls

    def turn(
        self, cases: Sequence[Call], calls: Sequence[int], chance: random.Random
    ) -> list[Taken]:
        """Return a sample of each case on this rank; ``chance`` orders them."""
        took = [Taken(0.0, 0.0, 0.0)] * len(cases)
        before = self._distance.measure()
        for i in chance.sample(range(len(cases)), len(cases)):
            seconds = self.time(cases[i], calls[i])
            after = self._distance.measure()
            took[i] = Taken(seconds, before, after)
            before = after
        return took

    def agree(self, turns: Sequence[Sequence[Taken]], whose: int = SLOWEST) -> list[list[Sample]]:
        """Return samples combined over all ranks: times as by ``combine``, distances of the ranks
        that are farthest from each other.
        """
        flat = [taken for turn in turns for taken in turn]
        seconds = self.combine([taken.seconds for taken in flat], whose)
        # Two numbers each, before and after: the most; and the least, which is the most negated.
        ends = [end for taken in flat for end in (taken.before, taken.after)]
        bounds = self.combine([*ends, *(-end for end in ends)])
        most, least = bounds[: len(ends)], [-bound for bound in bounds[len(ends) :]]
        found = map(classify, most, least)
        samples = []
        for took, (before, after), latency in zip(
            seconds, zip(found, found, strict=True), most[1::2], strict=True
        ):
            distance = before if before == after else _MOVED
            self._counts[distance] += 1
            if distance in self._latencies:
                self._latencies[distance].append(latency)
            samples.append(Sample(took, distance=distance))
        each = iter(samples)
        return [[next(each) for _ in turn] for turn in turns]

    def describe_distances(self) -> str:
        """Return how far the ranks were apart in the samples so far, in words."""
        if self._distance.problem:
            return f"distance of the ranks: unknown, for {self._distance.problem}"
        counts, every = self._counts, self._counts.total()
        parts = [
            f"{distance} ({statistics.median(latencies):.0f} ns) in {counts[distance]} of {every} "
            "samples"
            if latencies
            else f"{distance} did not occur"
            for distance, latencies in self._latencies.items()
        ]
        if counts[_MOVED]:
            parts.append(f"dropped: {counts[_MOVED]}, during which it changed")
        if counts[UNKNOWN]:
            parts.append(f"unknown in {counts[UNKNOWN]}, for a rank did not answer")
        return f"distance of the ranks: {'; '.join(parts)}"

    def combine(self, seconds: Sequence[float], whose: int = SLOWEST) -> list[float]:
        """Return each number combined over all ranks: the greatest, or as ``whose`` says."""
        from mpi4py import MPI

        numbers = np.array(seconds)
        if whose == RANK_0:
            self._comm.Bcast(numbers, 0)
        else:
            op = {MEAN: MPI.SUM, FASTEST: MPI.MIN, SLOWEST: MPI.MAX}[whose]
            self._comm.Allreduce(MPI.IN_PLACE, numbers, op)
        if whose == MEAN:
            numbers /= self._comm.Get_size()
        found: list[float] = numbers.tolist()
        return found

    def sample(
        self,
        cases: Mapping[str, Call],
        samples: int,
        calls: Mapping[str, int],
        whose: int = SLOWEST,
    ) -> dict[str, Times]:
        """Return ``samples`` samples of every case; up to twice as many, as long as there are fewer
        than ``ENOUGH`` of a distance that occurs. Of others there are none (``keep``).

        calls: the number of calls of each case in a sample.
        """
        loops = [calls[name] for name in cases]
        enough = min(ENOUGH, samples)
        turns: list[list[Sample]] = []
        while not turns or (len(turns) < 2 * samples and not _has_enough(turns, enough)):
            more = min(enough, 2 * samples - len(turns)) if turns else samples
            taken = [
                self.turn(list(cases.values()), loops, random.Random(number))
                for number in range(len(turns), len(turns) + more)
            ]
            turns += self.agree(taken, whose)
        return dict(zip(cases, keep(turns, enough), strict=True))

    def once(self, cases: Mapping[str, Call], tries: int = 3, first: int = 2) -> dict[str, float]:
        """Return the median seconds of ``tries`` single calls, after ``first`` that are not timed.

        The first calls make plans, and are compared between the ranks.
        """
        for case in cases.values():
            for _ in range(first):
                case()
        took = [self.combine([self.time(case) for case in cases.values()]) for _ in range(tries)]
        medians = map(statistics.median, zip(*took, strict=True))
        return dict(zip(cases, medians, strict=True))

    def measure(self, cases: Mapping[str, Call], effort: Effort) -> dict[str, Times]:
        """Return samples of the cases, as many as the effort allows."""
        once = self.once(cases)
        calls = {name: effort.calls(took) for name, took in once.items()}
        turn = sum(took * (calls[name] + 1) for name, took in once.items())
        return self.sample(cases, effort.samples(turn), calls)


def typical_spread(figures: Iterable[Figure]) -> float:
    """Return the median of the relative spreads; 0 without figures."""
    spreads = [figure.relative_spread for figure in figures]
    return statistics.median(spreads) if spreads else 0.0


def format_seconds(seconds: float) -> str:
    """Format a time in the unit that suits it."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
