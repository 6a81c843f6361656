"""The rates of the cost model (model_costs.py), from what ``make bench`` measured on one node.

Every time is a sum of rates, each times what it counts. The logarithms of the rates are fitted to
the logarithms of the times by least squares, so that relative errors count and no rate is negative,
with a guess for each rate, which is as good as a measurement that is off by its factor. A rate of
which the figures tell nothing stays what was guessed, and keeps the guess's uncertainty: so it is
seen which have been measured. Times that are far off what the others say count less (as for errors
of Student's t-distribution): machines are disturbed, and libraries may do something else than is
taken. It needs no MPI.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from aims import Results
from measure import COPY, FACADE, KIB, MPI4PY
from model_costs import WAYS, Cost, Machine, Rates, exchanged_all_to_all, seconds
from model_steps import Place, Step, pairwise

from mpicoll.routes.tuning import Table

#: How far off a time is even if it is measured exactly: a model has few terms.
INEXACT = 0.15
#: Degrees of freedom of the t-distribution.
FREEDOM = 4.0
#: Bytes of caches, of which one is chosen.
CACHES = [2.0**i for i in range(18, 29)]
#: Copies of fewer bytes are a call of NumPy rather than a copy.
COPIED = 16 * KIB
#: Which measurements are looked at.
SECTIONS, DTYPES = ("sizes", "growth", "dtypes"), ("float32", "bfloat16")


class Guess(NamedTuple):
    """What a rate is about, before anything is measured.

    what:   it is the time of.
    factor: by which it may well be wrong.
    """

    what: str
    seconds: float
    factor: float


_BYTE = 5.0
#: ``exchange`` and ``entry`` were timed by hand, on one rank, without the memory: no figure of
#: ``make bench`` tells them, for they need several nodes.
GUESSES = Rates(
    own=Guess("what mpicoll does before its route begins", 2e-6, 3.0),
    call=Guess("a call of MPI from Python", 0.4e-6, 2.0),
    message=Guess("a message between ranks of a node", 0.5e-6, 4.0),
    python=Guess("a message sent from Python", 2.5e-6, 3.0),
    exchange=Guess("an exchange on a node by levels: Python", 9e-6, 2.0),
    entry=Guess("each block given or taken in it: Python", 1.2e-6, 2.0),
    wait=Guess("a wait for the others in shared memory", 0.5e-6, 4.0),
    look=Guess("a look how far each of them is", 0.1e-6, 3.0),
    copied=Guess("a byte copied by a rank, in caches", 0.05e-9, _BYTE),
    copied_far=Guess("the same in memory", 0.15e-9, _BYTE),
    shared=Guess("a byte into shared memory or out of it, in caches", 0.1e-9, _BYTE),
    shared_far=Guess("the same in memory", 0.15e-9, _BYTE),
    sent=Guess("a byte sent or received on the node, in caches", 0.1e-9, _BYTE),
    sent_far=Guess("the same in memory", 0.2e-9, _BYTE),
    combined=Guess("a byte combined by MPI, in caches", 0.1e-9, _BYTE),
    combined_far=Guess("the same in memory", 0.2e-9, _BYTE),
    reduced=Guess("a byte combined by mpicoll, in caches", 0.05e-9, _BYTE),
    reduced_far=Guess("the same in memory", 0.1e-9, _BYTE),
    narrowed=Guess("a byte of bfloat16 combined by mpicoll, in caches", 0.1e-9, _BYTE),
    narrowed_far=Guess("the same in memory", 0.15e-9, _BYTE),
)


class Point(NamedTuple):
    """A measurement, and what the call may have done: whatever is fastest.

    route: that it took, as mpicoll/core/tables.py names it; "copy".
    """

    case: str
    route: str
    kind: str
    place: Place
    bytes: int
    seconds: float
    spread: float
    costs: tuple[Cost, ...]


def points(results: Results, processors: int) -> tuple[list[Point], list[Point]]:
    """What is fitted, and what was measured with more ranks than processors."""
    table = Table(openmpi=results.mpi.startswith("Open MPI"))
    found: tuple[list[Point], list[Point]] = [], []
    for one in results.measurements:
        if one["section"] in SECTIONS and one["dtype"] in DTYPES:
            point = _point(one, table)
            if point is not None:
                found[point.place.ranks > processors].append(point)
    return found


def _point(one: Mapping[str, Any], table: Table) -> Point | None:
    """None where the model has no term for it."""
    n, size, case = one["ranks"], one["bytes"], one["case"]
    narrow = one["dtype"] == "bfloat16"
    kind = one["primitive"].removesuffix("_single")
    place = Place(1, n)
    if case == COPY:
        route, costs = COPY, [Cost(2 * size, copied=size)] if size >= COPIED else []
    elif case not in (MPI4PY, FACADE) or (narrow and case == MPI4PY):
        return None
    elif kind == "all_to_all":
        route = "mpi" if case == MPI4PY else "exchange"
        of_mpi = Cost(size, calls=1, copied=size / n, steps=_pairs(place, size / n))
        costs = [of_mpi if case == MPI4PY else exchanged_all_to_all(place, size)]
    else:
        kind += " of others" * narrow
        if kind not in WAYS:
            return None
        route = "mpi" if case == MPI4PY else route_of(table, kind, n, "node", size)
        costs = [cost for _, cost in costs_of(kind, route, place, size)]
    if not costs or one["median"] <= 0:
        return None
    own = case == FACADE
    made = tuple(each._replace(own=float(own)) for each in costs)
    return Point(case, route, kind, place, size, one["median"], one["spread"], made)


def _pairs(place: Place, block: float) -> tuple[Step, ...]:
    return tuple(pairwise(place, block, False))


def route_of(table: Table, kind: str, ranks: int, where: str, size: float) -> str:
    """The route that a table has for a call."""
    return [route for least, route in table.row(kind, ranks)[where] if least <= size][-1]


def costs_of(kind: str, route: str, place: Place, size: float) -> list[tuple[str, Cost]]:
    """The ways that a route may go, by name."""
    made = [(way.name, way.cost(place, size)) for way in WAYS[kind] if way.route == route]
    return [(name, cost) for name, cost in made if cost is not None]


class Fit(NamedTuple):
    """What was found.

    rates:      the best.
    covariance: of their logarithms.
    told:       for each, how much of what was not known the figures have told: 0 to 1.
    cache:      bytes, see Machine.
    points, predicted: what was fitted, and the model's times.
    """

    rates: Rates
    covariance: Any
    told: Rates
    cache: float
    points: Sequence[Point]
    predicted: Any

    @property
    def machine(self) -> Machine:
        """The one that was measured, as far as the model has it."""
        return Machine(self.cache)

    @property
    def factors(self) -> Rates:
        """The standard error of each rate, as a factor."""
        return Rates(*np.exp(np.sqrt(np.diag(self.covariance))))

    @property
    def errors(self) -> Any:
        """By how much each time is off, relative to the smaller of measured and predicted."""
        measured = np.array([point.seconds for point in self.points])
        return np.exp(np.abs(np.log(self.predicted / measured))) - 1

    def draws(self, many: int, seed: int = 0) -> Rates:
        """Rates as they might as well be: arrays."""
        random = np.random.default_rng(seed)
        logs = random.multivariate_normal(np.log(self.rates), self.covariance, many)
        return Rates(*np.exp(logs).T)

    def entangled(self, least: float = 0.9) -> list[tuple[str, str]]:
        """Pairs of rates of which the figures tell the sum rather than each."""
        scale = np.sqrt(np.diag(self.covariance))
        related = self.covariance / np.outer(scale, scale)
        names = Rates._fields
        return [
            (names[i], names[j])
            for i in range(len(names))
            for j in range(i)
            if related[i, j] <= -least
        ]


def predicted(rates: Rates, made: Iterable[Point], machine: Machine) -> Any:
    """The model's time of each point."""
    times = [
        min(float(seconds(cost, rates, point.place, machine)) for cost in point.costs)
        for point in made
    ]
    return np.array(times)


def fit(made: Sequence[Point]) -> Fit:
    """The rates that explain the measurements best; raises ValueError where there are none."""
    if not made:
        raise ValueError("there is nothing to fit: expected measurements of mpi4py and mpicoll")
    found = [_fit(made, cache) for cache in CACHES]
    best = min(range(len(found)), key=lambda i: found[i][0])
    return found[best][1]


def _fit(made: Sequence[Point], cache: float) -> tuple[float, Fit]:
    """With that cache; and how bad it is."""
    machine, ones = Machine(cache), Rates(*np.eye(len(Rates._fields)))
    # What each possible cost of each point counts of every rate: of one node time is linear.
    most = max(len(point.costs) for point in made)
    counts = np.array(
        [
            [seconds(cost, ones, point.place, machine) for cost in _filled(point.costs, most)]
            for point in made
        ]
    )
    measured = np.log([point.seconds for point in made])
    exact = np.array([(point.spread / point.seconds) ** 2 + INEXACT**2 for point in made])
    guessed = np.log([guess.seconds for guess in GUESSES])
    sure = 1 / np.log([guess.factor for guess in GUESSES]) ** 2

    def look(logs: Any) -> tuple[float, Any, Any]:
        """How bad these rates are; the errors, and what they change by with each rate."""
        rates = np.exp(logs)
        every = counts @ rates
        rows = counts[np.arange(len(made)), every.argmin(1)]
        times = every.min(1)
        errors = np.log(times) - measured
        far = errors**2 / exact
        bad = (FREEDOM + 1) * np.log1p(far / FREEDOM).sum() + sure @ (logs - guessed) ** 2
        return float(bad), errors, rows * rates / times[:, None]

    logs, damping = guessed, 1e-3
    bad, errors, slopes = look(logs)
    for _ in range(200):
        weights = (FREEDOM + 1) / (FREEDOM + errors**2 / exact) / exact
        normal = slopes.T @ (weights[:, None] * slopes) + np.diag(sure)
        downhill = slopes.T @ (weights * errors) + sure * (logs - guessed)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -downhill)
        tried = look(logs + step)
        if tried[0] < bad:
            done = bad - tried[0] < 1e-9 * abs(bad)
            logs, (bad, errors, slopes), damping = logs + step, tried, damping / 3
            if done:
                break
        elif damping > 1e9:
            break
        else:
            damping *= 4
    weights = (FREEDOM + 1) / (FREEDOM + errors**2 / exact) / exact
    # If the errors are greater than was thought, so is what they leave open.
    excess = max(1.0, float(np.median(errors**2 / exact)) / 0.455)
    told = slopes.T @ (weights[:, None] * slopes) / excess
    covariance = np.linalg.inv(told + np.diag(sure))
    known = Rates(*(1 - np.diag(covariance) * sure))
    rates = Rates(*np.exp(logs))
    return bad, Fit(rates, covariance, known, cache, made, np.exp(measured + errors))


def _filled(costs: Sequence[Cost], many: int) -> list[Cost]:
    """So many, the last one again and again."""
    return [*costs, *[costs[-1]] * (many - len(costs))]


def crowded(found: Fit, made: Iterable[Point], processors: int) -> list[tuple[Point, float]]:
    """Large calls of more ranks than processors, and how many times longer they took than the
    model says, if the processors are shared evenly. It is not fitted: these take turns.
    """
    large = [point for point in made if point.bytes >= 1024 * KIB]
    times = predicted(found.rates, large, found.machine)
    return [
        (point, point.seconds / (time * point.place.ranks / processors))
        for point, time in zip(large, times, strict=True)
    ]
