"""Derive the steps of a table from what was measured: the rule of ``python -m mpicoll tune``."""

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
    "CLEAR",
    "MOST",
    "WORTH",
    "Change",
    "Figures",
    "choose_steps",
    "find_changes",
    "find_noise",
    "splice",
]

#: A route is slower than the fastest if it takes more than this many times as long, and the middle
#: halves of their times do not overlap. None is chosen that takes more than this many times as long
#: as the default's.
CLEAR = 1.05
#: A new step has to make its sizes this many times faster, multiplied.
WORTH = 1.10
#: No size counts for more than this many steps: a single one is never worth a step there and one
#: back.
MOST = 1.9
#: The cost of another route than the default's, where nothing else distinguishes them.
_OTHER = 1e-9


#: By route, the same ones at all sizes.
ByRoute = Mapping[str, Figure]
#: By bytes, 0 for the smallest call there is, and by how far the ranks were apart: each of the
#: distances that occurred at that size.
Figures = Mapping[int, Mapping[str, ByRoute]]


def choose_steps(figures: Figures, default: Steps) -> Steps:
    """Return the steps that the figures call for, from the first of their sizes on.

    default: the steps that stay if nothing speaks against them.

    At each size a route costs the logarithm of how many times slower it is than the fastest, at
    most ``MOST`` steps, and nothing if it is not clearly slower; of several distances of the ranks
    the one counts where it is slowest. (A job cannot know at which it will run: of all routes this
    one's regret is the smallest.) Each step from route to route that the default does not have
    costs the logarithm of ``WORTH``. The cheapest way through all sizes is taken, by dynamic
    programming over its last route (R. Bellman, Dynamic Programming, 1957), of those that nowhere
    take a route that is slower than the default's, at any distance.
    """
    sizes = sorted(figures)
    below = _in_force(default, max(sizes[0] - 1, 0), _routes(figures[sizes[0]]))
    best: dict[str | None, tuple[float, list[str]]] = {below: (0.0, [])}
    for size in sizes:
        usual = _in_force(default, size, _routes(figures[size]))
        ways: dict[str | None, tuple[float, list[str]]] = {}
        for route in _no_slower(figures[size], usual):
            here = _slower(figures[size], route) + _OTHER * (route != usual)
            ways[route] = min(
                (cost + _step((last, route), (below, usual)) + here, [*way, route])
                for last, (cost, way) in best.items()
            )
        best, below = ways, usual
    _, way = min(best.values())
    return merge_steps(zip(sizes, way, strict=True))


def splice(before: Steps, steps: Steps, last: int) -> Steps:
    """Put the steps into ``before``, from the first of their sizes up to ``last``."""
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
    """Return the routes hardly slower than the default's at any distance; all if there is none."""
    routes = _routes(at_size)
    if usual is None:
        return routes
    return [
        route
        for route in routes
        if all(one[route].median <= CLEAR * one[usual].median for one in at_size.values())
    ]


def _step(step: tuple[str | None, str], usual: tuple[str | None, str | None]) -> float:
    """Return the cost of going from one route to another, if the default has ``usual``."""
    return 0.0 if step[0] in (None, step[1]) or step == usual else math.log(WORTH)


def _slower(at_size: Mapping[str, ByRoute], route: str) -> float:
    """Return the cost of a route at a size."""
    return max(_slower_at(by_route, route) for by_route in at_size.values())


def _slower_at(by_route: ByRoute, route: str) -> float:
    """Return the cost of a route at one distance of the ranks."""
    own, best = by_route[route], min(by_route.values(), key=attrgetter("median"))
    clearly = own.median > CLEAR * best.median and own.low > best.high
    return min(math.log(own.median / best.median), MOST * math.log(WORTH)) if clearly else 0.0


def _in_force(steps: Steps, size: int, routes: Collection[str]) -> str | None:
    """Return the route that steps give a size if only ``routes`` exist; None for none of them."""
    had = [(least, route) for least, route in steps if route in routes]
    return next(
        (route for least, route in reversed(had) if least <= size or (least, route) == had[0]), None
    )


class Change(NamedTuple):
    """A range of sizes whose route changes.

    first, end: bytes, ``end`` excluded; None up to the largest size that was measured.
    was, now:   the routes.
    gains:      how many times faster the route now is, the geometric mean over the sizes, by how
                far the ranks were apart.
    """

    first: int
    end: int | None
    was: str
    now: str
    gains: dict[str, float]


def find_changes(figures: Figures, before: Steps, after: Steps) -> list[Change]:
    """Return where steps differ, among the measured sizes."""
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
    """Return the median of the relative spreads of all times; 0 for none."""
    return typical_spread(
        one
        for by_size in figures
        for at_size in by_size.values()
        for by_route in at_size.values()
        for one in by_route.values()
    )
