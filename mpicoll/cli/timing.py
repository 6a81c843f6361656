"""Time calls that ranks make together: the harness of ``bench``, ``tune`` and ``benchmarks/``.

A sample is the time of some calls of one case after a barrier. Samples of all cases take turns, in
a changing order, so that a disturbance hits all of them alike. The time of a sample is the slowest
rank's, unless another is requested. Figures are medians with quartiles.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CALLS", "Call", "Effort", "Figure", "Timer", "Times", "clamp", "format_seconds"]

Call = Callable[[], object]

#: The fewest and the most calls in a sample.
CALLS = (1, 1000)
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


@dataclass(frozen=True)
class Times:
    """Seconds of a call, one number for each sample."""

    seconds: list[float]

    @property
    def figure(self) -> Figure:
        """Return median and quartiles, interpolated between samples."""
        return Figure(*statistics.quantiles(self.seconds, n=4, method="inclusive"))

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Return half the distance between the quartiles."""
        return self.figure.spread

    def minus(self, other: Times) -> Times:
        """Subtract another's time, sample by sample."""
        return Times([a - b for a, b in zip(self.seconds, other.seconds, strict=True)])

    def over(self, other: Times) -> Times:
        """Divide by another's time, sample by sample."""
        return Times([a / b for a, b in zip(self.seconds, other.seconds, strict=True)])

    def text(self, unit: float, width: int) -> str:
        """Format median and spread in this unit."""
        median, spread = self.median / unit, self.spread / unit
        digits = 2 if median < 100 else 0
        return f"{median:>{width}.{digits}f} +-{spread:5.{digits}f}"


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


class Timer:
    """A taker of samples; every rank of the communicator has one and makes the same calls on it.

    settle: waits for calls that return before they are done.
    """

    def __init__(self, comm: MPI.Intracomm, settle: Call | None = None) -> None:
        self._comm = comm
        self._settle = settle

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
    ) -> list[float]:
        """Return a sample of each case on this rank; ``chance`` orders them."""
        took = [0.0] * len(cases)
        for i in chance.sample(range(len(cases)), len(cases)):
            took[i] = self.time(cases[i], calls[i])
        return took

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
        """Return ``samples`` samples of every case.

        calls: the number of calls of each case in a sample.
        """
        loops = [calls[name] for name in cases]
        turns = [
            self.turn(list(cases.values()), loops, random.Random(number))
            for number in range(samples)
        ]
        flat = iter(self.combine([took for turn in turns for took in turn], whose))
        rows = [[next(flat) for _ in cases] for _ in range(samples)]
        return {name: Times([row[i] for row in rows]) for i, name in enumerate(cases)}

    def once(self, cases: Mapping[str, Call], tries: int = 3, first: int = 2) -> dict[str, float]:
        """Return the median seconds of ``tries`` single calls, after ``first`` that are not timed.

        The first calls make plans, and are compared between the ranks.
        """
        for case in cases.values():
            for _ in range(first):
                case()
        found = self.sample(cases, tries, dict.fromkeys(cases, 1))
        return {name: times.median for name, times in found.items()}

    def measure(self, cases: Mapping[str, Call], effort: Effort) -> dict[str, Times]:
        """Return samples of the cases, as many as the effort allows."""
        once = self.once(cases)
        calls = {name: effort.calls(took) for name, took in once.items()}
        turn = sum(took * (calls[name] + 1) for name, took in once.items())
        return self.sample(cases, effort.samples(turn), calls)


def format_seconds(seconds: float) -> str:
    """Format a time in the unit that suits it."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"
