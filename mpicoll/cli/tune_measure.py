"""Measure the routes of each kind of call, for ``python -m mpicoll tune``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import cli, control_messages
from mpicoll.cli.bench_calls import Buffers, Case, Memory, block_count
from mpicoll.cli.bench_others import Route
from mpicoll.cli.timing import Call, Effort, Figure, Timer
from mpicoll.cli.tune_steps import Figures
from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import CallKind
from mpicoll.dtypes import ReduceOp
from mpicoll.dtypes import by_name as dtype_of
from mpicoll.output import format_bytes
from mpicoll.primitives import by_name
from mpicoll.routes.host import select
from mpicoll.routes.tuning import parse_kind

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FULL", "QUICK", "Outcome", "Point", "find_points", "measure"]

#: Maximum first size that represents all smaller sizes.
_SMALLEST_BYTES = 8

#: The measurement takes about ``seconds``. Sizes that would take longer are omitted.
FULL = Effort(60.0, 2e-3, 3, 25)
QUICK = Effort(8.0, 0.5e-3, 3, 8)


class Point(NamedTuple):
    """A kind of call, by its name in tables, at a size.

    least, last: range of bytes that this size represents.
    routes:      routes that support the kind in the group.
    """

    kind: str
    least: int
    last: int
    routes: tuple[str, ...]
    case: Case


def find_points(names: Sequence[str], sizes: Sequence[int], group: ProcessGroup) -> list[Point]:
    """Return the points of the kinds that have several routes, by size. All ranks call it.

    Reductions are sums of float32, or of bfloat16 for dtypes that MPI does not reduce. Sizes that
    round to the same number of elements are one point.
    """
    found, n = [], group.size()
    for name in dict.fromkeys(names):
        primitive, others = parse_kind(name)
        row = by_name.get(f"{primitive.name}_single", primitive)
        dtype = dtype_of["bfloat16" if others else "float32"]
        op = ReduceOp.SUM if row.reduces else None
        routes = tuple(select.candidates(CallKind(row, group, op, dtype)))
        if len(routes) < 2:
            continue
        every = [(block_count(row, dtype, n, size), size) for size in sizes]
        for count, same in groupby(every, itemgetter(0)):
            own = [size for _, size in same]
            is_least = count == 1 or (own[0] == sizes[0] and own[0] <= _SMALLEST_BYTES)
            case = Case(row, dtype, op, count, n, group.rank(), 0)
            last = max(case.size, *own)
            found.append(Point(name, 0 if is_least else own[0], last, routes, case))
    return sorted(found, key=lambda point: point.last)


class Outcome(NamedTuple):
    """Measurements.

    figures:  by kind.
    last:     by kind, the largest size in bytes.
    distance: description of the distance of the ranks.
    """

    figures: dict[str, Figures]
    last: dict[str, int]
    distance: str


def measure(
    comm: MPI.Intracomm, points: Sequence[Point], effort: Effort, spent: Callable[[], float]
) -> Outcome:
    """Measure every route at every point. All ranks call it and get the same result.

    A kind ends at the first size that would take too long. A size is assumed to take at most twice
    the time of the previous one.

    spent: returns the seconds of ``effort`` that have passed; only the value of rank 0 is used.
    """

    def find_left() -> float:
        return control_messages.bcast(comm, effort.seconds - spent(), 0, float)

    names = dict.fromkeys(name for point in points for name in point.routes)
    routes = {name: Route(name, "cpu", waits=False) for name in names}
    timer, left = Timer(comm), find_left()
    figures: dict[str, dict[int, dict[str, dict[str, Figure]]]] = {}
    last: dict[str, int] = {}
    took: dict[str, float] = {}  # time of the previous size of a kind; infinite after the last one
    for number, point in enumerate(points):
        if 2 * took.get(point.kind, 0.0) >= left:
            took[point.kind] = math.inf
            continue
        if comm.Get_rank() == 0:
            text = f"{point.kind} of {format_bytes(point.last)}, about {left:.0f} s left"
            cli.show_progress(f"tune: {text}")
        buffers = Buffers(point.case, Memory())
        calls: dict[str, Call] = {}
        for name in point.routes:
            call = routes[name].call(point.case, buffers)
            if call is not None:
                calls[name] = call
        share = left / (len(points) - number)
        found = timer.measure(calls, effort._replace(seconds=share))
        figures.setdefault(point.kind, {})[point.least] = {
            distance: {name: times.figure for name, times in own.items()}
            for distance, own in found.items()
        }
        last[point.kind] = point.last
        before, left = left, find_left()
        took[point.kind] = before - left
    for route in routes.values():
        route.close()
    return Outcome({**figures}, last, timer.describe_distances())
