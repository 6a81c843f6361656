"""Time calls that ranks make together. Used by ``bench``, ``tune`` and ``benchmarks/``.

A sample is the time of some calls of one case after a barrier. Samples of all cases alternate in
random order, so that a disturbance affects all of them. The time of the slowest rank is used,
unless another is requested. Figures are medians with quartiles.

The distance of the ranks (``distance``) is measured before and after each sample. A figure uses
samples of one distance. A sample during which the distance changed is dropped.
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
    "CALL_COUNTS",
    "ENOUGH_COUNT",
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

#: Minimum and maximum number of calls in a sample.
CALL_COUNTS = (1, 1000)
#: Minimum number of samples of a distance for a figure.
ENOUGH_COUNT = 5
#: Maximum median spread of reliable times, relative to the median time.
MAX_SPREAD = 0.1
#: Distance of a sample during which it changed.
_MOVED = "moved"
#: Ranks whose time is used: values of nccl-tests' option ``-a``.
RANK_0, MEAN, FASTEST, SLOWEST = range(4)


class Figure(NamedTuple):
    """Time of a call in seconds, over samples: the median and the quartiles."""

    low: float
    median: float
    high: float

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        return (self.high - self.low) / 2

    @property
    def relative_spread(self) -> float:
        """The spread divided by the median."""
        return self.spread / self.median


class Sample(NamedTuple):
    """Time of a call in seconds, its turn, and the distance of the ranks."""

    seconds: float
    turn: int = 0
    distance: str = UNKNOWN


@dataclass(frozen=True)
class Times:
    """The samples of a call. Figures need samples of one distance (``split``)."""

    samples: list[Sample]

    @property
    def seconds(self) -> list[float]:
        """Seconds of each sample."""
        return [sample.seconds for sample in self.samples]

    @property
    def figure(self) -> Figure:
        """Median and quartiles, interpolated between samples."""
        if len(self.samples) == 1:
            return Figure(*3 * self._seconds)
        return Figure(*statistics.quantiles(self._seconds, n=4, method="inclusive"))

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self._seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        return self.figure.spread

    @property
    def _seconds(self) -> list[float]:
        """Seconds of each sample. Raises ValueError for samples of several distances."""
        found = dict.fromkeys(sample.distance for sample in self.samples)
        if len(found) > 1:
            raise ValueError(f"a figure of samples of several distances: {', '.join(found)}")
        return self.seconds

    @property
    def is_enough(self) -> bool:
        """Whether there are ``ENOUGH_COUNT`` samples for a figure."""
        return len(self.samples) >= ENOUGH_COUNT

    def split(self) -> dict[str, Times]:
        """Return the samples of each distance."""
        found = {
            distance: [sample for sample in self.samples if sample.distance == distance]
            for distance in DISTANCES
        }
        return {distance: Times(samples) for distance, samples in found.items() if samples}

    def map(self, change: Callable[[float], float]) -> Times:
        """Return the samples with converted times."""
        return Times([each._replace(seconds=change(each.seconds)) for each in self.samples])

    def minus(self, other: Times) -> Times:
        """Subtract another time, sample by sample of the same turn and distance."""
        return self._pair(other, lambda a, b: a - b)

    def over(self, other: Times) -> Times:
        """Divide by another time, sample by sample of the same turn and distance."""
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
        """Format median and spread."""
        median, spread = self.median / unit, self.spread / unit
        digits = 2 if median < 100 else 0
        return f"{median:>{width}.{digits}f} +-{spread:5.{digits}f}"


def keep(turns: Sequence[Sequence[Sample]], enough: int) -> list[Times]:
    """Return the samples of each case to use in figures.

    turns: a sample of each case, turn by turn.

    Near and far samples are kept if each case has ``enough`` of them. If neither is kept, samples
    of unknown distance are kept. If these are too few as well, all samples are kept as mixed.
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
    """Return the minimum or maximum number of samples of a case at each distance."""
    counts = [Counter(sample.distance for sample in samples) for samples in cases]
    return {distance: which([each[distance] for each in counts]) for distance in DISTANCES}


class Effort(NamedTuple):
    """Time to spend on a measurement.

    seconds: approximate time of all samples; limits on their number take precedence.
    sample:  approximate time of one sample; ``CALL_COUNTS`` takes precedence.
    fewest, most: minimum and maximum number of samples of each case.
    """

    seconds: float = 1.5
    sample: float = 2e-3
    fewest: int = 15
    most: int = 60

    def calls(self, once: float) -> int:
        """Return the number of calls per sample if one takes ``once`` seconds."""
        return clamp(self.sample / once, *CALL_COUNTS) if once > 0 else CALL_COUNTS[1]

    def samples(self, turn: float) -> int:
        """Return the number of samples if one of every case takes ``turn`` seconds."""
        return clamp(self.seconds / turn, self.fewest, self.most)


def clamp(wanted: float, least: int, most: int) -> int:
    """Round to an integer within limits."""
    return round(min(max(wanted, least), most))


class Taken(NamedTuple):
    """A sample on one rank: time of a call in seconds, and nanoseconds to the farthest partner
    before and after it (0 if unknown).
    """

    seconds: float
    before: float
    after: float


class Timer:
    """Takes samples. Every rank of the communicator has one and makes the same calls.

    settle: waits for calls that return before they are done.
    """

    def __init__(self, comm: MPI.Intracomm, settle: Call | None = None) -> None:
        self._comm = comm
        self._settle = settle
        self._distance = Distance(comm)
        self._counts: Counter[str] = Counter()  # samples, by distance
        self._latencies: dict[str, list[float]] = {NEAR: [], FAR: []}  # nanoseconds

    def time(self, call: Call, calls: int = 1) -> float:
        """Return the time of a call on this rank in seconds, from one sample of ``calls`` calls.

        An additional call precedes a loop, to refill caches that other cases have used.
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
        """Return a sample of each case on this rank, in the random order of ``chance``."""
        took = [Taken(0.0, 0.0, 0.0)] * len(cases)
        before = self._distance.measure()
        for i in chance.sample(range(len(cases)), len(cases)):
            seconds = self.time(cases[i], calls[i])
            after = self._distance.measure()
            took[i] = Taken(seconds, before, after)
            before = after
        return took

    def agree(self, turns: Sequence[Sequence[Taken]], whose: int = SLOWEST) -> list[list[Sample]]:
        """Return samples combined over all ranks.

        Times are combined as by ``combine``, and distances are taken from the farthest ranks.
        """
        flat = [taken for turn in turns for taken in turn]
        seconds = self.combine([taken.seconds for taken in flat], whose)
        # The maximum before and after each sample, and the minimum as the negated maximum.
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
        """Describe the distances of the ranks in all samples so far."""
        if self._distance.problem:
            return f"distance of the ranks: unknown, because {self._distance.problem}"
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
            parts.append(f"unknown in {counts[UNKNOWN]} (timed out)")
        return f"distance of the ranks: {'; '.join(parts)}"

    def combine(self, seconds: Sequence[float], whose: int = SLOWEST) -> list[float]:
        """Return each number combined over all ranks: the maximum, or according to ``whose``."""
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
        """Return ``samples`` samples of every case.

        Takes up to twice the number to have ``ENOUGH_COUNT`` of each distance that occurs (see
        ``keep``).

        calls: number of calls of each case in a sample.
        """
        loops = [calls[name] for name in cases]
        enough = min(ENOUGH_COUNT, samples)
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
        """Return the median time of ``tries`` calls in seconds, after ``first`` untimed calls.

        The first calls build plans and are compared between the ranks.
        """
        for case in cases.values():
            for _ in range(first):
                case()
        took = [self.combine([self.time(case) for case in cases.values()]) for _ in range(tries)]
        medians = map(statistics.median, zip(*took, strict=True))
        return dict(zip(cases, medians, strict=True))

    def measure(self, cases: Mapping[str, Call], effort: Effort) -> dict[str, Times]:
        """Return samples of the cases within the effort."""
        once = self.once(cases)
        calls = {name: effort.calls(took) for name, took in once.items()}
        turn = sum(took * (calls[name] + 1) for name, took in once.items())
        return self.sample(cases, effort.samples(turn), calls)


def typical_spread(figures: Iterable[Figure]) -> float:
    """Return the median of the relative spreads, or 0 without figures."""
    spreads = [figure.relative_spread for figure in figures]
    return statistics.median(spreads) if spreads else 0.0


def format_seconds(seconds: float) -> str:
    """Format a time in a suitable unit."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
