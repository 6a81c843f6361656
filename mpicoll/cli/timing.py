"""Time calls that ranks make together. Used by ``bench``, ``tune`` and ``benchmarks/``.

A sample is the time of some calls of one case after a barrier. Samples are taken in turns, one of
each case in random order, so that a disturbance affects all cases. The time of the slowest rank
counts. Figures are medians with quartiles.

The distance of the ranks (``distance``) is measured between turns. Figures are from turns of the
distance that occurred most often.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicoll.cli.distance import FAR, MIXED, NEAR, UNKNOWN, Distance, classify

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "CALL_COUNTS",
    "ENOUGH_COUNT",
    "MAX_SPREAD",
    "Call",
    "Effort",
    "Figure",
    "Samples",
    "Timer",
    "Times",
]

Call = Callable[[], object]

#: Minimum and maximum number of calls in a sample.
CALL_COUNTS = (1, 1000)
#: Minimum number of turns of one distance.
ENOUGH_COUNT = 5
#: Maximum median spread of reliable times, relative to the median time.
MAX_SPREAD = 0.1
#: Distance of a turn during which it changed.
_CHANGED = "changed"


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


class Times(list[float]):
    """Samples of a call in seconds. Cases that were sampled together have their turns in common."""

    @property
    def figure(self) -> Figure:
        """Median and quartiles, interpolated between samples."""
        return Figure(*np.percentile(self, (25, 50, 75)).tolist())

    def pair(self, other: Times, combine: Callable[[float, float], float]) -> Times:
        """Combine samples with those of another call in the same turns."""
        return Times(combine(*both) for both in zip(self, other, strict=True))


class Samples(NamedTuple):
    """Samples of calls by name, and the distance of the ranks in their turns."""

    distance: str
    times: dict[str, Times]


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
        return _clamp(self.sample / once, *CALL_COUNTS) if once > 0 else CALL_COUNTS[1]

    def samples(self, turn: float) -> int:
        """Return the number of samples if one of every case takes ``turn`` seconds."""
        return _clamp(self.seconds / turn, self.fewest, self.most)


def _clamp(wanted: float, least: int, most: int) -> int:
    return round(min(max(wanted, least), most))


class Timer:
    """Takes samples. Every rank of the communicator has one and makes the same calls.

    settle: waits for calls that return before they are done.
    """

    def __init__(self, comm: MPI.Intracomm, settle: Call | None = None) -> None:
        self._comm = comm
        self._settle = settle
        self._distance = Distance(comm)
        self._counts: Counter[str] = Counter()  # turns, by distance

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

    def combine(self, seconds: Sequence[float]) -> list[float]:
        """Return the maximum of each number over all ranks."""
        from mpi4py import MPI

        numbers = np.array(seconds)
        self._comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
        found: list[float] = numbers.tolist()
        return found

    def sample(self, cases: Mapping[str, Call], turns: int, calls: Mapping[str, int]) -> Samples:
        """Return ``turns`` samples of every case, fewer if the distance of the ranks changed.

        Keeps the turns of the most frequent distance. Takes up to twice the number of turns, until
        this distance has ``ENOUGH_COUNT``. If it still has fewer, all turns are kept as mixed.

        calls: number of calls of each case in a sample.
        """
        enough, missing = min(ENOUGH_COUNT, turns), turns
        found: list[str] = []
        samples: list[list[float]] = []
        while missing > 0:
            more = self._take_turns(cases, calls, range(len(found), len(found) + missing))
            found += more[0]
            samples += more[1]
            most = max((NEAR, FAR, UNKNOWN), key=found.count)
            is_enough = found.count(most) >= enough
            missing = 0 if is_enough else min(enough, 2 * turns - len(found))
        distance = most if is_enough else MIXED
        kept = [own for own, each in zip(samples, found, strict=True) if distance in (each, MIXED)]
        return Samples(distance, dict(zip(cases, map(Times, zip(*kept, strict=True)), strict=True)))

    def _take_turns(
        self, cases: Mapping[str, Call], calls: Mapping[str, int], numbers: Sequence[int]
    ) -> tuple[list[str], list[list[float]]]:
        """Return distances and samples of some turns, in the order of the cases."""
        took: list[dict[str, float]] = []
        between = [self._distance.measure()]  # nanoseconds to the farthest partner
        for number in numbers:
            order = random.Random(number).sample([*cases], len(cases))
            took.append({name: self.time(cases[name], calls[name]) for name in order})
            between.append(self._distance.measure())
        seconds = iter(self.combine([each[name] for each in took for name in cases]))
        # The maximum over the ranks, and the minimum as the negated maximum.
        bounds = self.combine([*between, *(-latency for latency in between)])
        most, least = bounds[: len(between)], [-bound for bound in bounds[len(between) :]]
        ends = [*map(classify, most, least)]
        found = [
            after if before == after else _CHANGED for before, after in itertools.pairwise(ends)
        ]
        self._counts.update(found)
        return found, [[next(seconds) for _ in cases] for _ in numbers]

    def describe_distances(self) -> str:
        """Describe the distances of the ranks in all turns so far."""
        if self._distance.problem:
            return f"distance of the ranks: unknown, because {self._distance.problem}"
        counts = self._counts
        parts = [f"{distance} in {count}" for distance, count in sorted(counts.items())]
        return f"distance of the ranks: {', '.join(parts)} of {counts.total()} turns"

    def once(self, cases: Mapping[str, Call], tries: int = 3) -> dict[str, float]:
        """Return the median time of ``tries`` calls in seconds, after two untimed calls.

        The first calls build plans and are compared between the ranks.
        """
        for case in cases.values():
            case()
            case()
        took = [self.combine([self.time(case) for case in cases.values()]) for _ in range(tries)]
        medians = map(statistics.median, zip(*took, strict=True))
        return dict(zip(cases, medians, strict=True))

    def measure(self, cases: Mapping[str, Call], effort: Effort) -> Samples:
        """Return samples of the cases within the effort."""
        once = self.once(cases)
        calls = {name: effort.calls(took) for name, took in once.items()}
        turn = sum(took * (calls[name] + 1) for name, took in once.items())
        return self.sample(cases, effort.samples(turn), calls)
