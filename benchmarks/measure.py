"""What the benchmarks share: times and their spread, aims, and repetitions in turn."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Case = Callable[[], object]


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
    """What is aimed at, and what was measured."""

    name: str
    limit: float
    measured: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is met, by the figures as they are printed."""
        limit, measured = round(self.limit, 2), round(self.measured, 2)
        return measured >= limit if self.at_least else measured <= limit

    def __str__(self) -> str:
        kind = "at least" if self.at_least else "at most"
        aim = f"{kind} {self.limit:g} {self.unit}"
        verdict = "met" if self.met else "MISSED"
        return f"{self.name:<58}{aim:<16}{self.measured:>8.2f} {self.unit:<4}{verdict}"

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
    ranks: Ranks, cases: dict[str, Case], repetitions: int, calls: int = 1, first: int = 5
) -> dict[str, Times]:
    """Time each case; it begins on all ranks at once.

    first: so many calls are not timed: they are compared between the ranks, and make plans.
    """
    for case in cases.values():
        for _ in range(first):
            case()
    names = list(cases)
    table = np.zeros((len(names), repetitions))
    for repetition in range(repetitions):
        for place in range(len(names)):
            index = (place + repetition) % len(names)  # nobody always comes after the same
            case = cases[names[index]]
            ranks.meet()
            start = time.perf_counter()
            for _ in range(calls):
                case()
            table[index, repetition] = (time.perf_counter() - start) / calls
    ranks.slowest(table)
    return {name: Times(row.tolist()) for name, row in zip(names, table, strict=True)}


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
        if path and self.main:
            path.write_text(json.dumps(self.record, indent=1) + "\n")
