"""Choose the steps of a table from measurements, for ``python -m mpicoll tune``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from mpicoll.cli.timing import Figure, typical_spread
from mpicoll.routes.tuning import Steps, merge_steps, route_at

__all__ = [
    "CLEAR_RATIO",
    "MAX_STEPS",
    "MIN_GAIN",
    "Change",
    "Figures",
    "choose_steps",
    "find_changes",
    "find_noise",
    "splice",
]

#: Minimum ratio of times at which a route is slower than another one, if the interquartile ranges
#: of their times do not overlap. A route that is slower than the default by this ratio is not used.
CLEAR_RATIO = 1.05
#: Minimum speedup of a new step, as a product over its sizes.
MIN_GAIN = 1.10
#: Maximum cost of a size, in steps, so that a single size is not worth two steps.
MAX_STEPS = 1.9
#: Additional cost of a route other than the default, to break ties.
_TIE_COST = 1e-9


#: Figures by route.
ByRoute = Mapping[str, Figure]
#: By size in bytes (0 for the smallest call), and by distance of the ranks.
Figures = Mapping[int, Mapping[str, ByRoute]]


def choose_steps(figures: Figures, default: Steps) -> Steps:
    """Return the best steps for the figures, starting at the smallest size.

    default: steps to keep unless others are better.

    At each size, a route costs the logarithm of its slowdown relative to the fastest route, at most
    ``MAX_STEPS`` steps, and nothing if it is not clearly slower. With several distances of the
    ranks, the distance with the highest cost counts, because a job cannot know its distance in
    advance. Each step between routes that the default does not have costs the logarithm of
    ``MIN_GAIN``. Dynamic programming over the last route (R. Bellman, Dynamic Programming, 1957)
    finds the cheapest sequence, among routes that are nowhere slower than the default.
    """
    sizes = sorted(figures)
    below = _in_force(default, max(sizes[0] - 1, 0), _routes(figures[sizes[0]]))
    best: dict[str | None, tuple[float, list[str]]] = {below: (0.0, [])}
    for size in sizes:
        usual = _in_force(default, size, _routes(figures[size]))
        ways: dict[str | None, tuple[float, list[str]]] = {}
        for route in _no_slower(figures[size], usual):
            here = _slower(figures[size], route) + _TIE_COST * (route != usual)
            ways[route] = min(
                (cost + _step((last, route), (below, usual)) + here, [*way, route])
                for last, (cost, way) in best.items()
            )
        best, below = ways, usual
    _, way = min(best.values())
    return merge_steps(zip(sizes, way, strict=True))


def splice(before: Steps, steps: Steps, last: int) -> Steps:
    """Replace the steps of ``before`` from the first size of ``steps`` up to ``last``."""
    return merge_steps(
        [
            *(step for step in before if step[0] < steps[0][0]),
            *steps,
            (last + 1, route_at(before, last + 1)),
            *(step for step in before if step[0] > last + 1),
        ]
    )


def _routes(at_size: Mapping[str, ByRoute]) -> list[str]:
    """Return the routes that were measured at a size."""
    first, *_ = at_size.values()
    return list(first)


def _no_slower(at_size: Mapping[str, ByRoute], usual: str | None) -> list[str]:
    """Return the routes that are not clearly slower than the default at any distance."""
    routes = _routes(at_size)
    if usual is None:
        return routes
    return [
        route
        for route in routes
        if all(one[route].median <= CLEAR_RATIO * one[usual].median for one in at_size.values())
    ]


def _step(step: tuple[str | None, str], usual: tuple[str | None, str | None]) -> float:
    """Return the cost of a step between routes, if the default has the step ``usual``."""
    return 0.0 if step[0] in (None, step[1]) or step == usual else math.log(MIN_GAIN)


def _slower(at_size: Mapping[str, ByRoute], route: str) -> float:
    """Return the cost of a route at a size."""
    return max(_slower_at(by_route, route) for by_route in at_size.values())


def _slower_at(by_route: ByRoute, route: str) -> float:
    """Return the cost of a route at one distance of the ranks."""
    own, best = by_route[route], min(by_route.values(), key=attrgetter("median"))
    clearly = own.median > CLEAR_RATIO * best.median and own.low > best.high
    return (
        min(math.log(own.median / best.median), MAX_STEPS * math.log(MIN_GAIN)) if clearly else 0.0
    )


def _in_force(steps: Steps, size: int, routes: Collection[str]) -> str | None:
    """Return the route of a size by these steps if only ``routes`` exist, or None."""
    had = [(least, route) for least, route in steps if route in routes]
    return next(
        (route for least, route in reversed(had) if least <= size or (least, route) == had[0]), None
    )


class Change(NamedTuple):
    """A range of sizes whose route changes.

    first, end: bytes, ``end`` excluded; None is the largest measured size.
    was, now:   the routes.
    gains:      speedup, the geometric mean over the sizes, by distance of the ranks.
    """

    first: int
    end: int | None
    was: str
    now: str
    gains: dict[str, float]


def find_changes(figures: Figures, before: Steps, after: Steps) -> list[Change]:
    """Return the differences between steps, among the measured sizes."""
    sizes = sorted(figures)
    routes = [
        tuple(_in_force(steps, size, _routes(figures[size])) for steps in (before, after))
        for size in sizes
    ]
    found = []
    for (was, now), group in groupby(zip(sizes, routes, strict=True), key=itemgetter(1)):
        if was is None or now is None or was == now:
            continue
        span = [size for size, _ in group]
        gains: dict[str, list[float]] = {}
        for size in span:
            for distance, one in figures[size].items():
                gains.setdefault(distance, []).append(one[was].median / one[now].median)
        end = next((s for s in sizes if s > span[-1]), None)
        means = {distance: statistics.geometric_mean(own) for distance, own in gains.items()}
        found.append(Change(span[0], end, was, now, means))
    return found


def find_noise(figures: Iterable[Figures]) -> float:
    """Return the median of the relative spreads of all times, or 0 without times."""
    return typical_spread(
        one
        for by_size in figures
        for at_size in by_size.values()
        for by_route in at_size.values()
        for one in by_route.values()
    )
