"""From what was measured to the steps of a table: the rule of ``python -m mpicoll tune``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from mpicoll.tables import Steps

__all__ = ["CLEAR", "MOST", "WORTH", "Change", "Figure", "Figures", "changes", "chosen", "unrest"]

#: A route is slower than the fastest where it takes more than so many times its time, and the
#: middle halves of their times do not overlap.
CLEAR = 1.05
#: A step that is new has to make the sizes that it is for so many times faster, multiplied.
WORTH = 1.10
#: No size counts for more than so many steps: one that stands alone is never worth those there and
#: back.
MOST = 1.9
#: The cost of another route than the default's, where nothing else tells them apart.
_OTHER = 1e-9


class Figure(NamedTuple):
    """Seconds of a call, the slowest rank's: over repetitions the median, between the quartiles."""

    low: float
    median: float
    high: float


#: By bytes, 0 for the least that there can be, and by route; the same routes for all sizes.
Figures = Mapping[int, Mapping[str, Figure]]


def chosen(figures: Figures, default: Steps, before: Steps | None = None) -> Steps:
    """The steps that the figures speak for.

    default: those that stay where nothing speaks against them.
    before:  those that stay for sizes that were not measured, if they are others.

    A route costs, at each size, the logarithm of how many times slower it is than the fastest,
    ``MOST`` steps at the most, and nothing where it is not clearly slower. Each step from route to
    route that the default does not have costs the logarithm of ``WORTH``. The way through all sizes
    that costs least is taken, by dynamic programming over its last route (R. Bellman, Dynamic
    Programming, 1957).
    """
    sizes = sorted(figures)
    below = _in_force(default, max(sizes[0] - 1, 0), figures[sizes[0]])
    best: dict[str | None, tuple[float, list[str]]] = {below: (0.0, [])}
    for size in sizes:
        usual = _in_force(default, size, figures[size])
        ways: dict[str | None, tuple[float, list[str]]] = {}
        for route in figures[size]:
            here = _slower(figures[size], route) + _OTHER * (route != usual)
            ways[route] = min(
                (cost + _step((last, route), (below, usual)) + here, [*way, route])
                for last, (cost, way) in best.items()
            )
        best, below = ways, usual
    _, way = min(best.values())
    return _joined(before or default, sizes, way)


def _step(step: tuple[str | None, str], usual: tuple[str | None, str | None]) -> float:
    """The cost of going from one route to another, where the default has ``usual``."""
    return 0.0 if step[0] in (None, step[1]) or step == usual else math.log(WORTH)


def _slower(at_size: Mapping[str, Figure], route: str) -> float:
    """What a route costs at a size."""
    own, best = at_size[route], min(at_size.values(), key=attrgetter("median"))
    clearly = own.median > CLEAR * best.median and own.low > best.high
    return min(math.log(own.median / best.median), MOST * math.log(WORTH)) if clearly else 0.0


def _joined(before: Steps, sizes: list[int], way: list[str]) -> Steps:
    """The way as steps, between what was before below and above the sizes."""
    steps = [step for step in before if step[0] < sizes[0]]
    steps += zip(sizes, way, strict=True)
    steps += [step for step in before if step[0] > sizes[-1]]
    return tuple(next(same) for _, same in groupby(steps, key=itemgetter(1)))


def _in_force(steps: Steps, size: int, routes: Collection[str]) -> str | None:
    """The route that steps give a size where only ``routes`` can be had; None for none of them."""
    had = [(least, route) for least, route in steps if route in routes]
    return next(
        (route for least, route in reversed(had) if least <= size or (least, route) == had[0]), None
    )


class Change(NamedTuple):
    """A range of sizes that has another route than by default.

    first, end: bytes from which on it has, and has it no more; None for never.
    usual, now: the routes.
    gain:       how many times faster the route now is, the geometric mean over the sizes.
    """

    first: int
    end: int | None
    usual: str
    now: str
    gain: float


def changes(figures: Figures, default: Steps, steps: Steps) -> list[Change]:
    """Where steps differ from the default's, among the sizes that were measured."""
    sizes = sorted(figures)
    routes = [
        (_in_force(default, size, figures[size]), _in_force(steps, size, figures[size]))
        for size in sizes
    ]
    found = []
    for (usual, now), group in groupby(zip(sizes, routes, strict=True), key=itemgetter(1)):
        if usual is None or now is None or usual == now:
            continue
        span = [size for size, _ in group]
        logs = [math.log(figures[s][usual].median / figures[s][now].median) for s in span]
        end = next((s for s in sizes if s > span[-1]), None)
        found.append(Change(span[0], end, usual, now, math.exp(sum(logs) / len(logs))))
    return found


def unrest(figures: Iterable[Figures]) -> float:
    """Half the distance between the quartiles of a time, as a part of it: the median of all."""
    return statistics.median(
        (one.high - one.low) / 2 / one.median
        for by_size in figures
        for at_size in by_size.values()
        for one in at_size.values()
    )
