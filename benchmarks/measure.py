"""What the benchmarks share: times and their spread, aims, and repetitions in turn."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Case = Callable[[], object]

KIB, MIB = 1 << 10, 1 << 20
#: Who makes the calls: contestants.py says what they are. Copy is a copy of as many bytes.
MPI4PY, FACADE, TORCH, GLOO, COPY = "mpi4py", "mpicoll", "mpicoll torch", "Gloo", "copy"


@dataclass(frozen=True)
class Times:
    """Seconds a call, one figure for each repetition: the slowest rank's."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2

    def over(self, other: Times) -> Times:
        """The time above another's, repetition by repetition."""
        return Times([a - b for a, b in zip(self.seconds, other.seconds, strict=True)])

    def per(self, other: Times) -> Times:
        """The time as a multiple of another's, repetition by repetition."""
        return Times([a / b for a, b in zip(self.seconds, other.seconds, strict=True)])

    def text(self, unit: float, width: int) -> str:
        """Median and spread in this unit."""
        median, spread = self.median / unit, self.spread / unit
        digits = 2 if median < 100 else 0
        return f"{median:>{width}.{digits}f} +-{spread:5.{digits}f}"

    def record(self) -> dict[str, float]:
        """Median and spread in seconds."""
        return {"median": self.median, "spread": self.spread}


@dataclass(frozen=True)
class Aim:
    """What is aimed at, and what was measured.

    measured: None where it was not, and ``note`` says why.
    spread:   half the distance between the quartiles of what was measured.
    note:     where in what was measured the figure comes from.
    """

    name: str
    limit: float
    measured: float | None
    unit: str
    at_least: bool = False
    spread: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it is met, by the figures as they are printed; None where nobody knows."""
        if self.measured is None:
            return None
        limit, measured = round(self.limit, 2), round(self.measured, 2)
        return measured >= limit if self.at_least else measured <= limit

    @property
    def asked(self) -> str:
        """The limit in words."""
        return f"at {'least' if self.at_least else 'most'} {self.limit:g} {self.unit}"

    @property
    def verdict(self) -> str:
        """Whether it is met, in words."""
        return {None: "not measured", True: "met", False: "MISSED"}[self.met]

    def __str__(self) -> str:
        measured = "" if self.measured is None else f"{self.measured:>8.2f} {self.unit:<4}"
        return f"{self.name:<58}{self.asked:<16}{measured}{self.verdict}"

    def record(self) -> dict[str, object]:
        """All of it."""
        return {**vars(self), "met": self.met}


class Ranks(NamedTuple):
    """How the ranks that measure together meet.

    rank: this one's number.
    meet: returns when all are there.
    slowest: makes an array of float64 that of the greatest values of all ranks, in place.
    """

    rank: int
    meet: Callable[[], object]
    slowest: Callable[[np.ndarray], object]


def measure(
    ranks: Ranks,
    cases: Mapping[str, Case],
    repetitions: int,
    calls: int | Mapping[str, int] = 1,
    first: int = 5,
    lead: int = 0,
) -> dict[str, Times]:
    """Time each case; it begins on all ranks at once.

    calls: how many are timed together, of every case or of each.
    first: so many calls are not timed: they are compared between the ranks, and make plans.
    lead:  so many calls before those of each repetition are not timed, either: what the other cases
           left in the caches is not this one's fault.
    """
    for case in cases.values():
        for _ in range(first):
            case()
    order = list(enumerate(cases.items()))
    table = np.zeros((len(order), repetitions))
    for repetition in range(repetitions):
        random.Random(repetition).shuffle(order)  # nobody always comes after the same
        for index, (name, case) in order:
            together = calls if isinstance(calls, int) else calls[name]
            for _ in range(lead):
                case()
            ranks.meet()
            start = time.perf_counter()
            for _ in range(together):
                case()
            table[index, repetition] = (time.perf_counter() - start) / together
    ranks.slowest(table)
    return {name: Times(row.tolist()) for name, row in zip(cases, table, strict=True)}


class Effort(NamedTuple):
    """How long to measure cases that are compared.

    seconds:  all repetitions together take about so long, if their number allows it.
    least, most: repetitions.
    together: the calls of a case that are timed together take about so many seconds, if ``CALLS``
              allows it.
    """

    seconds: float = 1.5
    least: int = 15
    most: int = 60
    together: float = 2e-3


#: Calls of a case that are timed together, at the least and at the most.
CALLS = (1, 1000)


def measure_well(ranks: Ranks, cases: Mapping[str, Case], effort: Effort) -> dict[str, Times]:
    """Time each case, with as many repetitions and calls as the effort and a trial say."""
    trial = measure(ranks, cases, 3, first=2)  # the same on all ranks: the slowest's
    calls = {name: within(CALLS, effort.together / each.median) for name, each in trial.items()}
    took = sum(each.median * (calls[name] + 1) for name, each in trial.items())
    repetitions = within((effort.least, effort.most), effort.seconds / took)
    return measure(ranks, cases, repetitions, calls, first=0, lead=1)


def within(limits: tuple[int, int], wanted: float) -> int:
    """The whole number next to ``wanted`` that is between the limits."""
    return round(min(max(wanted, limits[0]), limits[1]))


def shown(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, name in ((1e-6, "us"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def bytes_shown(size: int) -> str:
    """A size in the unit that suits it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


class Report:
    """Prints on rank 0, and collects what goes into the file."""

    def __init__(self, ranks: Ranks) -> None:
        self.main = ranks.rank == 0
        self.aims: list[Aim] = []
        self.record: dict[str, Any] = {}

    def line(self, text: str = "") -> None:
        """Print a line."""
        if self.main:
            print(text, flush=True)

    def add(self, section: str, entry: dict[str, Any]) -> None:
        """Add an entry to a section of the file."""
        self.record.setdefault(section, []).append(entry)

    def end(self, path: Path | None) -> None:
        """Print the aims, and write the file."""
        for aim in self.aims:
            self.line(str(aim))
        self.record["aims"] = [aim.record() for aim in self.aims]
        self.write(path)

    def write(self, path: Path | None) -> None:
        """Write the file."""
        if path and self.main:
            path.write_text(json.dumps(self.record, indent=1) + "\n")
