"""Which route carries messages of which size: a table for each MPI, and what was measured here.

A table gives, for a kind of call, the route from each size on. Kinds are the primitives; where
elements are combined, those that MPI combines rightly and, as "all_reduce of others", all others,
such as those of groups whose reductions are reproducible.
Sizes are bytes of the larger array of a rank, the one that holds the blocks of all ranks if there
is one. Routes depend on where the ranks of a group are:

    node   on one node, with memory that they share
    nodes  on several nodes, several of them on some
    apart  anywhere; what is used where the former two cannot be

A measured table leaves the rest to the defaults, by the route "default".

Every rank has the same table: rank 0's, which init_process_group hands out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from mpicoll.dtypes import DTYPES, OPERATIONS
from mpicoll.primitives import Primitive, by_name

if TYPE_CHECKING:
    from mpicoll.routes.route import Route

__all__ = [
    "DEFAULT",
    "KINDS",
    "PLACES",
    "Rows",
    "Steps",
    "Table",
    "eligible_routes",
    "job",
    "merge_steps",
    "name_kind",
    "parse_kind",
    "route_at",
]

#: In place of a route in a file, where nothing was measured: the route of the defaults of the
#: version that reads it.
DEFAULT = "default"
#: Where the ranks of a group can be.
PLACES = ("node", "nodes", "apart")
#: Bytes from which on a route is taken, in rising order from 0 on.
Steps = tuple[tuple[int, str], ...]
#: The steps by kind of call and place.
Rows = dict[str, dict[str, Steps]]

_KIB, _MIB = 1 << 10, 1 << 20


def _row(node: Steps, nodes: Steps, apart: Steps) -> dict[str, Steps]:
    return dict(zip(PLACES, (node, nodes, apart), strict=True))


_MPI: Steps = ((0, "mpi"),)
_EXCHANGE: Steps = ((0, "exchange"),)
_SHARED: Steps = ((0, "shared"),)
#: What is only moved: large messages by one copy or by slots, whichever was the faster lately, on
#: near or far processors and on small or huge pages.
_MOVED: Steps = ((0, "shared"), (512 * _KIB, "single_copy"))

#: On one node as measured on two ranks, on processors that share a cache and on others, with the
#: libraries from PyPI; elsewhere as the cost model has it, see docs/model.md.
_OPEN_MPI: Rows = {
    "broadcast": _row(_MOVED, _MPI, _MPI),
    "all_reduce": _row(
        _SHARED, ((0, "mpi"), (1 * _MIB, "hierarchical")), ((0, "mpi"), (8 * _MIB, "mpi_chunked"))
    ),
    "all_reduce of others": _row(_SHARED, ((0, "exchange"), (512, "hierarchical")), _EXCHANGE),
    "reduce": _row(_SHARED, _MPI, _MPI),
    "reduce of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
    "all_gather": _row(_MOVED, _MPI, _MPI),
    "gather": _row(_MOVED, _MPI, _MPI),
    "scatter": _row(_MOVED, _MPI, _MPI),
    "reduce_scatter": _row(
        _SHARED, ((0, "mpi"), (4 * _MIB, "hierarchical")), ((0, "mpi"), (4 * _MIB, "exchange"))
    ),
    "reduce_scatter of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
}
#: Nothing measured so far is best by another route.
_MPICH: Rows = _OPEN_MPI


def _for_many(rows: Rows) -> Rows:
    """Return the same for many ranks: where each looks at each other, or sends to each, a short
    message takes longer than by MPI's trees.
    """
    least = 16 * _KIB
    many = {}
    for kind, row in rows.items():
        steps = row["node"]
        if not kind.endswith(_OTHERS):
            before = [route for size, route in steps if size <= least]
            after = steps[len(before) :]
            steps = *_MPI, *([] if before[-1] == "mpi" else [(least, before[-1])]), *after
        many[kind] = {**row, "node": steps}
    nodes, apart = ((0, "widened"), (512 * _KIB, "hierarchical")), ((0, "widened"),)
    many["all_reduce of others"] |= {"nodes": nodes, "apart": apart}
    return many


_OTHERS = " of others"

#: What is not measured, by number of ranks.
_DEFAULTS = {
    openmpi: {2: rows, 32: _for_many(rows)}
    for openmpi, rows in ((False, _MPICH), (True, _OPEN_MPI))
}


#: The kinds of call.
KINDS = tuple(_MPICH)


def name_kind(primitive: Primitive, others: bool) -> str:
    """Return the kind of a call; ``others``: it combines elements, but not as MPI does rightly.

    A list of arrays and one array that holds them all are one kind.
    """
    return primitive.name.removesuffix("_single") + _OTHERS * others


def parse_kind(kind: str) -> tuple[Primitive, bool]:
    """Return the primitive of a kind of call, and whether it is that of others."""
    return by_name[kind.removesuffix(_OTHERS)], kind.endswith(_OTHERS)


def eligible_routes(kind: str, place: str) -> tuple[str, ...]:
    """Return the routes that a table may name for a kind of call at a place, in the order of the
    registry: those that serve some such calls.
    """
    from mpicoll.routes import registry  # loads MPI, which importing this module must not

    primitive, others = parse_kind(kind)
    return tuple(
        route.name
        for route in registry.HOST.values()
        if primitive.name in route.serves.primitives
        and route.needs.placement in ("", place)
        and (not primitive.reduces or _combines_some(route, others))
    )


def _combines_some(route: Route, others: bool) -> bool:
    from mpicoll.routes import registry

    by_mpi = registry.HOST["mpi"].serves.combines
    return any(
        route.serves.combines(op, dtype) and by_mpi(op, dtype) is not others
        for op in OPERATIONS
        for dtype in DTYPES
        if dtype.kind in op.kinds
    )


@cache
def _of_routes(kind: str) -> dict[str, Steps]:
    """Return the row of a kind that the tables lack: at each place the route that exists only
    there, but for short messages the one that serves in its place, or between nodes MPI's own;
    elsewhere the first that may be named.
    """
    from mpicoll.routes import registry

    row = {}
    for place in PLACES:
        first, *others = eligible_routes(kind, place)
        best = next((name for name in others if registry.HOST[name].needs.placement), first)
        short = registry.HOST[best].policy.fallback or best
        if first == "mpi" and place != "node":
            short = first
        row[place] = merge_steps([(0, short), (_SHORT, best)])
    return row


#: Bytes of the kinds that the tables lack from which on another route than MPI's own is taken.
_SHORT = 16 * _KIB


class Table:
    """The routes of one job.

    measured: what ``tune`` found, by number of ranks.
    path:     the table's file, "" for none.
    """

    def __init__(
        self, openmpi: bool, measured: Mapping[int, Rows] | None = None, path: str = ""
    ) -> None:
        self._openmpi = openmpi
        self._measured = measured or {}
        self.path = path

    def row(self, kind: str, ranks: int) -> dict[str, Steps]:
        """Return the steps for a group of ``ranks`` ranks, by place: as measured with the closest
        number of ranks, by ratio, and where nothing was measured the default's.
        """
        if kind not in KINDS:
            return _of_routes(kind)
        usual = _nearest(_DEFAULTS[self._openmpi], kind, ranks)
        measured = _nearest(self._measured, kind, ranks)
        return usual | {place: _filled(steps, usual[place]) for place, steps in measured.items()}

    def holding(self, measured: Mapping[int, Rows]) -> Table:
        """Return the table of the same MPI library with something else measured."""
        return Table(self._openmpi, measured)

    def describe(self) -> str:
        """Return where it comes from, in words."""
        if not self.path:
            return "the defaults"
        return f"{self.path} (measured on {', '.join(map(str, sorted(self._measured)))} ranks)"


class _Job:
    """The table of this job; rank 0's, on every rank."""

    def __init__(self) -> None:
        self.table = Table(openmpi=False)


job = _Job()


def _nearest(known: Mapping[int, Rows], kind: str, ranks: int) -> dict[str, Steps]:
    """Return the steps for the closest number of ranks, of those that have the place."""
    row: dict[str, Steps] = {}
    for n in sorted(known, key=lambda n: (max(n, ranks) / min(n, ranks), n), reverse=True):
        row.update(known[n].get(kind, {}))
    return row


def _filled(steps: Steps, default: Steps) -> Steps:
    """Return the steps, with the default's own where they leave a size to it."""
    sizes = sorted({least for least, _ in (*steps, *default)})
    routes = ((size, route_at(steps, size)) for size in sizes)
    return merge_steps(
        (size, route_at(default, size) if route == DEFAULT else route) for size, route in routes
    )


def route_at(steps: Steps, size: int) -> str:
    """Return the route that steps give a size."""
    return [route for least, route in steps if least <= size][-1]


def merge_steps(steps: Iterable[tuple[int, str]]) -> Steps:
    """Return the steps without those to the route that is taken already."""
    return tuple(next(same) for _, same in groupby(steps, key=itemgetter(1)))
