"""Tuning tables: the route for each message size, by default or as measured.

A row of a table maps minimum sizes to routes. There is a row per operation. Reductions have two:
one for the dtypes and reduce operations that MPI combines correctly and one, like "all_reduce of
others", for the rest and for reproducible groups. A size is in bytes of a rank's larger array. Each
row has an entry for each placement of the ranks:

    node   all ranks on one node, with shared memory
    nodes  on several nodes, some with several ranks
    apart  any other placement, or without shared memory

In a measured table, the route "default" refers to the default table.

All ranks use rank 0's table, which init_process_group broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from mpicoll.errors import UnsupportedError

if TYPE_CHECKING:
    from mpicoll.primitives import Primitive
    from mpicoll.routes.route import Route

#: In a file: use the default table's route, because this size was not measured.
DEFAULT = "default"
#: The placements of a group's ranks.
PLACES = ("node", "nodes", "apart")
#: Minimum size in bytes and route, in ascending order from 0.
Steps = tuple[tuple[int, str], ...]
#: The steps by kind of call and placement.
Rows = dict[str, dict[str, Steps]]

_KIB, _MIB = 1 << 10, 1 << 20


def _row(node: Steps, nodes: Steps, apart: Steps) -> dict[str, Steps]:
    return dict(zip(PLACES, (node, nodes, apart), strict=True))


_MPI: Steps = ((0, "mpi"),)
_EXCHANGE: Steps = ((0, "exchange"),)
_SHARED: Steps = ((0, "shared"),)
#: Below, the Python code of a hierarchical call takes longer than MPI's whole call.
_MEASURED: Steps = ((0, "mpi"), (16 * _KIB, "measured"))

#: On one node: measured with 2 ranks, with and without a shared cache, with MPICH and Open MPI from
#: PyPI, without a difference. Other placements: from the cost model (docs/model.md).
_FEW: Rows = {
    "broadcast": _row(_SHARED, _MEASURED, _MPI),
    "all_reduce": _row(_SHARED, ((0, "mpi"), (1 * _MIB, "hierarchical")), _MPI),
    "all_reduce of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
    "reduce": _row(_SHARED, _MPI, _MPI),
    "reduce of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
    "all_gather": _row(_SHARED, _MEASURED, _MPI),
    "gather": _row(_SHARED, _MPI, _MPI),
    "scatter": _row(_SHARED, _MPI, _MPI),
    "reduce_scatter": _row(
        _SHARED, ((0, "mpi"), (4 * _MIB, "hierarchical")), ((0, "mpi"), (4 * _MIB, "exchange"))
    ),
    "reduce_scatter of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
}


def _for_many() -> Rows:
    # MPI's trees are faster for short messages than routes with a message or a poll per rank.
    steps = (*_MPI, (16 * _KIB, "shared"))
    many = {
        kind: row if kind.endswith(_OTHERS) else {**row, "node": steps}
        for kind, row in _FEW.items()
    }
    # The ranks of a node share its link, over which `exchange` sends the elements of each of them.
    between = ((0, "widened"), (512 * _KIB, "hierarchical"))
    return many | {"all_reduce of others": {**_FEW["all_reduce of others"], "nodes": between}}


_OTHERS = " of others"

#: Default tables by number of ranks.
_DEFAULTS = {2: _FEW, 32: _for_many()}
#: The kinds of call.
KINDS = tuple(_FEW)


def name_kind(primitive: Primitive, others: bool) -> str:
    """Return the kind of a call; others: a reduction that MPI does not compute correctly."""
    return primitive.name.removesuffix("_single") + _OTHERS * others


def parse_kind(kind: str) -> tuple[Primitive, bool]:
    """Return the arguments of ``name_kind`` for a kind of call."""
    from mpicoll.primitives import by_name

    return by_name[kind.removesuffix(_OTHERS)], kind.endswith(_OTHERS)


def eligible_routes(kind: str, place: str) -> tuple[str, ...]:
    """Return the routes that a table may name: all that serve a dtype of this kind."""
    from mpicoll.routes.host import registry  # loads MPI, which importing this module must not

    primitive, others = parse_kind(kind)
    return tuple(
        route.name
        for route in registry.HOST.values()
        if primitive.name in route.serves.primitives
        and route.needs.placement in ("", place)
        and (not primitive.reduces or _combines_some(route, others))
    )


def _combines_some(route: Route, others: bool) -> bool:
    from mpicoll.dtypes import DTYPES, OPERATIONS
    from mpicoll.routes.host import registry

    by_mpi = registry.HOST["mpi"].serves.combines
    return any(
        route.serves.combines(op, dtype) and by_mpi(op, dtype) is not others
        for op in OPERATIONS
        for dtype in DTYPES
        if dtype.kind in op.kinds
    )


@cache
def _of_routes(kind: str) -> dict[str, Steps]:
    """Return the row of a kind without an entry in the tables: the first route that requires the
    placement, or else the first eligible route.
    """
    from mpicoll.routes.host import registry

    row: dict[str, Steps] = {}
    for place in PLACES:
        routes = eligible_routes(kind, place)
        if not routes:
            raise UnsupportedError(f"{kind}: no route for arrays in host memory supports it")
        own = [name for name in routes if registry.HOST[name].needs.placement]
        row[place] = ((0, [*own, *routes][0]),)
    return row


class Table:
    """The tuning table of a job.

    measured: rows measured by ``tune``, by number of ranks.
    path:     the table's file; "" for the defaults.
    """

    def __init__(self, measured: Mapping[int, Rows] | None = None, path: str = "") -> None:
        self._measured = measured or {}
        self.path = path

    def row(self, kind: str, ranks: int) -> dict[str, Steps]:
        """Return the steps for a group of ``ranks`` ranks, by placement: measured with the closest
        number of ranks by ratio, or the defaults.
        """
        usual = _nearest(_DEFAULTS, kind, ranks) or _of_routes(kind)
        measured = _nearest(self._measured, kind, ranks)
        return usual | {place: _filled(steps, usual[place]) for place, steps in measured.items()}

    def describe(self) -> str:
        """Return the origin of the table for messages."""
        if not self.path:
            return "the defaults"
        return f"{self.path} (measured on {', '.join(map(str, sorted(self._measured)))} ranks)"


class _Job:
    table = Table()
    choose = ""


#: Holds the table of this job and MPICOLL_CHOOSE: rank 0's, on every rank.
job = _Job()


def _nearest(known: Mapping[int, Rows], kind: str, ranks: int) -> dict[str, Steps]:
    """Return the steps of each placement, for the number of ranks closest to ``ranks`` by ratio."""
    row: dict[str, Steps] = {}
    for n in sorted(known, key=lambda n: (max(n, ranks) / min(n, ranks), n), reverse=True):
        row.update(known[n].get(kind, {}))
    return row


def _filled(steps: Steps, default: Steps) -> Steps:
    """Replace the route "default" in steps by the default steps."""
    sizes = sorted({least for least, _ in (*steps, *default)})
    routes = ((size, route_at(steps, size)) for size in sizes)
    return merge_steps(
        (size, route_at(default, size) if route == DEFAULT else route) for size, route in routes
    )


def route_at(steps: Steps, size: int) -> str:
    """Return the route of a size."""
    return [route for least, route in steps if least <= size][-1]


def merge_steps(steps: Iterable[tuple[int, str]]) -> Steps:
    """Merge consecutive steps with the same route."""
    return tuple(next(same) for _, same in groupby(steps, key=itemgetter(1)))
