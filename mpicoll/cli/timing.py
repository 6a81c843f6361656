"""Time calls that ranks make together. Used by ``bench``, ``tune`` and ``benchmarks/``.

A sample is the time of some calls of one case after a barrier. Ranks write new data before the
barrier (``Fresh``), because the kernel and other ranks read unchanged data from their own caches.
Samples are taken in turns, one of each case in random order, so that a disturbance affects all
cases. The time of the slowest rank counts. Figures are medians with quartiles.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

Call = Callable[[], object]


class Fresh(NamedTuple):
    """A call to time with new data."""

    write: Call  # writes new data into all arrays that this rank sends
    #: The call, on each of several arrays. They are timed together.
    calls: Sequence[Call]


Timed: TypeAlias = Call | Fresh

#: Minimum and maximum number of calls in a sample.
CALL_COUNTS = (1, 1000)
#: Maximum median spread of reliable times, relative to the median time.
MAX_SPREAD = 0.1


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


#: Samples of calls by name.
Samples = dict[str, Times]


class Effort(NamedTuple):
    """Time to spend on a measurement."""

    seconds: float = 1.5  # approximate time of all samples; limits on their number take precedence
    sample: float = 2e-3  # approximate time of one sample; ``CALL_COUNTS`` takes precedence
    #: Minimum and maximum number of samples of each case.
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

    def time(self, case: Timed, count: int = 1) -> float:
        """Return the time of a call on this rank in seconds, from one sample of ``count`` calls.

        An additional call precedes a sample of several, to refill caches that other cases have
        used. It is not timed, and neither are the barriers and the writing of new data.
        """
        write, calls = case if isinstance(case, Fresh) else (None, [case] * count)
        calls, settle, seconds = calls[:count], self._settle, 0.0
        if count > 1:
            calls[0]()
        rounds = math.ceil(count / len(calls))
        for _ in range(rounds):
            if write is not None:
                write()
            if settle is not None:
                settle()
            self._comm.Barrier()
            start = time.perf_counter()
            for call in calls:
                call()
            if settle is not None:
                settle()
            seconds += time.perf_counter() - start
        return seconds / (rounds * len(calls))

    def combine(self, seconds: Sequence[float]) -> list[float]:
        """Return the maximum of each number over all ranks."""
        from mpi4py import MPI

        numbers = np.array(seconds)
        self._comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
        found: list[float] = numbers.tolist()
        return found

    def sample(self, cases: Mapping[str, Timed], turns: int, calls: Mapping[str, int]) -> Samples:
        """Return ``turns`` samples of every case.

        calls: number of calls of each case in a sample.
        """
        took: list[dict[str, float]] = []
        for number in range(turns):
            order = random.Random(number).sample([*cases], len(cases))
            took.append({name: self.time(cases[name], calls[name]) for name in order})
        seconds = self.combine([each[name] for name in cases for each in took])
        return {name: Times(seconds[i * turns :][:turns]) for i, name in enumerate(cases)}

    def once(self, cases: Mapping[str, Timed], tries: int = 3) -> dict[str, float]:
        """Return the median time of ``tries`` calls in seconds, after two untimed calls.

        The first calls build plans and are compared between the ranks.
        """
        for case in [*cases.values()] * 2:
            self.time(case)
        took = [self.combine([self.time(case) for case in cases.values()]) for _ in range(tries)]
        return dict(zip(cases, map(statistics.median, zip(*took, strict=True)), strict=True))

    def measure(self, cases: Mapping[str, Timed], effort: Effort) -> Samples:
        """Return samples of the cases within the effort."""
        calls = {name: effort.calls(took) for name, took in self.once(cases).items()}
        begin = time.perf_counter()
        for name, case in cases.items():
            self.time(case, calls[name])
        (turn,) = self.combine([time.perf_counter() - begin])
        return self.sample(cases, effort.samples(turn), calls)
