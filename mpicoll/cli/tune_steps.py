"""Choose the steps of a table from measurements, for ``python -m mpicoll tune``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from mpicoll.cli.timing import Figure
from mpicoll.routes.tuning import Steps, merge_steps, route_at

__all__ = ["CLEAR_RATIO", "Change", "Figures", "choose_steps", "find_changes", "splice"]

#: Ratio of times above which a route is slower than another one, if the interquartile ranges of
#: their times do not overlap. A route slower than the default by this ratio is never used.
CLEAR_RATIO = 1.05

#: Figures by route.
ByRoute = Mapping[str, Figure]
#: By size in bytes (0 for the smallest call), and by distance of the ranks.
Figures = Mapping[int, Mapping[str, ByRoute]]


def choose_steps(figures: Figures, default: Steps) -> Steps:
    """Return the steps for the figures, starting at the smallest size.

    default: steps to keep unless others are faster.

    A size has the route of the previous size, or else the default's, unless it is slower than the
    fastest route by ``CLEAR_RATIO``. Otherwise it has the fastest one. With several distances of
    the ranks, the distance at which a route is slowest counts, because a job cannot know its
    distance in advance.
    """
    steps: list[tuple[int, str]] = []
    previous = None  # unless it is the default
    for size in sorted(figures):
        every = [*figures[size].values()]
        usual = _route_of(default, size, every[0])
        regrets = {
            route: max(_regret(by_route, route) for by_route in every)
            for route in every[0]
            if usual is None
            or all(one[route].median <= CLEAR_RATIO * one[usual].median for one in every)
        }
        route = min(regrets, key=lambda route: (regrets[route], route != usual))
        for kept in (usual, previous):
            if kept is not None and regrets.get(kept, math.inf) <= CLEAR_RATIO:
                route = kept
        previous = None if route == usual else route
        steps.append((size, route))
    return merge_steps(steps)


def _regret(by_route: ByRoute, route: str) -> float:
    """Return the slowdown relative to the fastest route, or 1 if their quartiles overlap."""
    own, best = by_route[route], min(by_route.values(), key=lambda one: one.median)
    return own.median / best.median if own.low > best.high else 1.0


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


def _route_of(steps: Steps, size: int, routes: Collection[str]) -> str | None:
    """Return the route of a size by these steps if only ``routes`` exist, or None."""
    had = [(least, route) for least, route in steps if route in routes]
    return next(
        (route for least, route in reversed(had) if least <= size or (least, route) == had[0]), None
    )


class Change(NamedTuple):
    """A range of sizes whose route changes.

    first, end: bytes, ``end`` excluded; None is the largest measured size.
    was, now:   the routes.
    gain:       speedup, the geometric mean over the sizes, at the distance where it is least.
    """

    first: int
    end: int | None
    was: str
    now: str
    gain: float


def find_changes(figures: Figures, before: Steps, after: Steps) -> list[Change]:
    """Return the differences between steps, among the measured sizes."""
    sizes = sorted(figures)
    routes = [
        tuple(
            _route_of(steps, size, next(iter(figures[size].values()))) for steps in (before, after)
        )
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
        end = next((size for size in sizes if size > span[-1]), None)
        gain = min(map(statistics.geometric_mean, gains.values()))
        found.append(Change(span[0], end, was, now, gain))
    return found
