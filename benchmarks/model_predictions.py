"""What the cost model says of calls: which algorithm is the fastest at which size, and which routes
mpicoll's tables would have. It needs no MPI. model.py prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from model_costs import WAYS, Cost, Machine, Rates, Way, least, seconds
from model_fit import route_of
from model_steps import Place

from mpicoll.routes.tuning import Table, able

#: The greatest call that is looked at.
LARGEST = 1 << 30
#: A route is named as better from this factor on, and a table leaves a route where another gains
#: that much.
BETTER, WORTHWHILE = 1.2, 1.1


class Cluster(NamedTuple):
    """What is stated: a node has so many ranks, the machine is that of model_costs.

    each, scattered: see Place.
    """

    each: int
    scattered: bool
    machine: Machine

    def place(self, ranks: int) -> Place:
        """Where so many ranks are; raises ValueError where the nodes would not be full."""
        if ranks <= self.each:
            return Place(1, ranks)
        if ranks % self.each:
            raise ValueError(f"{ranks} ranks: expected a multiple of {self.each}, a node's ranks")
        return Place(ranks // self.each, self.each, self.scattered)


@cache
def cost_of(way: Way, place: Place, size: float) -> Cost | None:
    """A call of mpicoll that goes this way; None where it cannot."""
    made = way.cost(place, size)
    return None if made is None else made._replace(own=1)


def times_of(
    kind: str, place: Place, size: float, rates: Rates, machine: Machine
) -> dict[str, Any]:
    """The time of each algorithm that there is at the place, by its name."""
    made = {way.name: cost_of(way, place, size) for way in WAYS[kind]}
    return {
        name: seconds(cost, rates, place, machine)
        for name, cost in made.items()
        if cost is not None
    }


def sizes_of(kind: str, place: Place, factor: float = 2.0) -> list[float]:
    """Sizes of calls, from the smallest to the largest."""
    first = least(kind, place.ranks)
    return [first * factor**i for i in range(int(math.log(LARGEST / first, factor)) + 1)]


class Change(NamedTuple):
    """From so many bytes on this algorithm is the fastest; it was another."""

    size: float
    name: str
    before: str


def changes(kind: str, place: Place, rates: Rates, machine: Machine) -> list[Change]:
    """Where each algorithm begins to be the fastest, the first one from the smallest call on."""

    def best(size: float) -> str:
        times = times_of(kind, place, size, rates, machine)
        return min(times, key=lambda name: float(times[name]))

    def between(low: float, high: float, first: str, last: str) -> Iterator[Change]:
        if first == last:
            return
        if high / low < 1.001:
            yield Change(high, last, first)
            return
        middle = math.sqrt(low * high)
        half = best(middle)
        yield from between(low, middle, first, half)
        yield from between(middle, high, half, last)

    sizes = sizes_of(kind, place)
    names = [best(size) for size in sizes]
    found = [Change(sizes[0], names[0], "")]
    for i in range(1, len(sizes)):
        found += between(sizes[i - 1], sizes[i], names[i - 1], names[i])
    return found


def spread_of(
    change: Change, kind: str, place: Place, draws: Rates, machine: Machine
) -> tuple[float, float] | None:
    """Between which sizes the change may well be: two thirds of the draws. None where most of them
    have no such change.
    """
    sizes = np.array(sizes_of(kind, place, math.sqrt(2)))
    ways = {way.name: way for way in WAYS[kind]}

    def times(name: str) -> Any:
        """Rows of sizes, columns of draws."""
        costs = [cost_of(ways[name], place, float(size)) for size in sizes]
        return np.array([seconds(cost, draws, place, machine) for cost in costs if cost])

    gains = np.log(times(change.before) / times(change.name))
    found = []
    for gain in gains.T:
        at = np.flatnonzero((gain[:-1] < 0) & (gain[1:] >= 0))
        between = sizes[at] * math.sqrt(2) ** (gain[at] / (gain[at] - gain[at + 1]))
        if len(between):
            found.append(between[np.argmin(np.abs(np.log(between / change.size)))])
    if 2 * len(found) < gains.shape[1]:
        return None
    low, high = np.quantile(found, [1 / 6, 5 / 6])
    return float(low), float(high)


def places(cluster: Cluster, ranks: Iterable[int]) -> list[Place]:
    """So many ranks, on full nodes, and one a node."""
    found = [cluster.place(n) for n in ranks] + [Place(n, 1) for n in ranks]
    return list(dict.fromkeys(found))


# --- mpicoll's tables ---------------------------------------------------------------------------


def where(place: Place) -> str:
    """The place as mpicoll/core/tables.py names it."""
    return "node" if place.nodes == 1 else "nodes" if place.each > 1 else "apart"


def routed(
    kind: str, place: Place, size: float, rates: Rates, machine: Machine
) -> dict[str, float]:
    """The time by each route that a table may name, its fastest way."""
    times = times_of(kind, place, size, rates, machine)
    found: dict[str, float] = {}
    for way in WAYS[kind]:
        if way.route in able(kind, where(place)) and way.name in times:
            found[way.route] = min(found.get(way.route, math.inf), float(times[way.name]))
    return found


class Worse(NamedTuple):
    """Between two sizes the tables have one route, and another would be faster.

    most: times faster, at the size ``at``.
    """

    first: float
    last: float
    today: str
    better: str
    most: float
    at: float


def worse(table: Table, kind: str, place: Place, rates: Rates, machine: Machine) -> list[Worse]:
    """Where the tables have something else than the model, which may be no route of mpicoll's."""
    found: list[Worse] = []
    for size in sizes_of(kind, place):
        routes = routed(kind, place, size, rates, machine)
        today = route_of(table, kind, place.ranks, where(place), size)
        if today not in routes:
            today = route_of(table, kind, place.ranks, "apart", size)
        others = {**routes, **times_of(kind, place, size, rates, machine)}
        better = min(others, key=lambda name: float(others[name]))
        factor = routes[today] / float(others[better])
        if factor < BETTER:
            continue
        last = found[-1] if found else None
        if last and (last.today, last.better, 2 * last.last) == (today, better, size):
            most, at = max((last.most, last.at), (factor, size))
            found[-1] = last._replace(last=size, most=most, at=at)
        else:
            found.append(Worse(size, size, today, better, factor, size))
    return found


def steps(kind: str, place: Place, rates: Rates, machine: Machine) -> list[tuple[int, str]]:
    """What the model would have in the tables: routes from so many bytes on."""
    found: list[tuple[int, str]] = []
    for size in sizes_of(kind, place):
        routes = routed(kind, place, size, rates, machine)
        best = min(routes, key=lambda route: routes[route])
        if not found:
            found.append((0, best))
        elif best != found[-1][1] and routes[found[-1][1]] > WORTHWHILE * routes[best]:
            found.append((1 << round(math.log2(size)), best))
    return found
