"""Which route carries messages of which size: a table for each MPI, and what was measured here.

A table gives, for a kind of call, the route from each size on. Kinds are the primitives; where
elements are combined, those that MPI combines rightly and, as "all_reduce of others", all others.
Sizes are bytes of the larger array of a rank, the one that holds the blocks of all ranks where
there is one. Routes depend on where the ranks of a group are:

    node   on one node, with memory that they share
    nodes  on several nodes, several of them on some
    apart  anywhere; what is used where the former two cannot be

A table that was measured leaves to the defaults, by the route "default", what was not.

Every rank has the same table: rank 0's, which init_process_group hands out.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll import machine, settings
from mpicoll.dtypes import DTYPES, OPERATIONS
from mpicoll.errors import ArgumentError
from mpicoll.primitives import Primitive, by_name
from mpicoll.routes import registry
from mpicoll.routes.route import Route

__all__ = [
    "DEFAULT",
    "KINDS",
    "PLACES",
    "Found",
    "Rows",
    "Steps",
    "Table",
    "build_table",
    "default_path",
    "eligible_routes",
    "job",
    "join",
    "merge_steps",
    "name_kind",
    "origin_mismatch",
    "parse",
    "parse_kind",
    "read",
    "route_at",
]

#: What a file has in place of a route where nothing was measured: what the defaults of the version
#: that reads it have there.
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

#: On one node as measured by ``tune`` on two ranks, with the libraries from PyPI; elsewhere as the
#: cost model has it, see docs/model.md.
_MPICH: Rows = {
    "broadcast": _row(
        ((0, "mpi"), (8 * _KIB, "shared"), (32 * _KIB, "mpi"), (16 * _MIB, "shared")), _MPI, _MPI
    ),
    "all_reduce": _row(
        _SHARED, ((0, "mpi"), (1 * _MIB, "hierarchical")), ((0, "mpi"), (8 * _MIB, "mpi_chunked"))
    ),
    "all_reduce of others": _row(_SHARED, ((0, "exchange"), (512, "hierarchical")), _EXCHANGE),
    "reduce": _row(_SHARED, _MPI, _MPI),
    "reduce of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
    "all_gather": _row(((0, "shared"), (512 * _KIB, "mpi"), (32 * _MIB, "shared")), _MPI, _MPI),
    "gather": _row(((0, "shared"), (64 * _KIB, "mpi"), (32 * _MIB, "shared")), _MPI, _MPI),
    "scatter": _row(
        ((0, "mpi"), (16 * _KIB, "shared"), (64 * _KIB, "mpi"), (32 * _MIB, "shared")), _MPI, _MPI
    ),
    "reduce_scatter": _row(
        _SHARED, ((0, "mpi"), (4 * _MIB, "hierarchical")), ((0, "mpi"), (4 * _MIB, "exchange"))
    ),
    "reduce_scatter of others": _row(_SHARED, _EXCHANGE, _EXCHANGE),
}
_OPEN_MPI: Rows = {
    **_MPICH,
    **{
        kind: {**_MPICH[kind], "node": steps}
        for kind, steps in {
            "broadcast": ((0, "mpi"), (512, "shared"), (16 * _KIB, "mpi"), (16 * _MIB, "shared")),
            "all_reduce": (
                (0, "mpi"), (512, "shared"), (2 * _MIB, "mpi_chunked"), (32 * _MIB, "shared"),
            ),
            "reduce": ((0, "mpi"), (512, "shared")),
            "all_gather": (
                (0, "mpi"), (1 * _KIB, "shared"), (16 * _KIB, "mpi"), (32 * _MIB, "shared"),
            ),
            "gather": (
                (0, "mpi"), (1 * _KIB, "shared"), (32 * _KIB, "mpi"), (32 * _MIB, "shared"),
            ),
            "scatter": (
                (0, "mpi"), (1 * _KIB, "shared"), (32 * _KIB, "mpi"), (32 * _MIB, "shared"),
            ),
            "reduce_scatter": ((0, "mpi"), (1 * _KIB, "shared")),
        }.items()
    },
}  # fmt: skip


def _for_many(rows: Rows) -> Rows:
    """The same for many ranks: where each looks at each other, or sends to each, a short message
    takes longer than by MPI's trees.
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
    """The kind of a call; ``others``: it combines elements, and not such as MPI combines rightly.

    A list of arrays and one array that holds them all are one kind.
    """
    return primitive.name.removesuffix("_single") + _OTHERS * others


def parse_kind(kind: str) -> tuple[Primitive, bool]:
    """The primitive of a kind of call, and whether it is that of others."""
    return by_name[kind.removesuffix(_OTHERS)], kind.endswith(_OTHERS)


def eligible_routes(kind: str, place: str) -> tuple[str, ...]:
    """Return the routes that a table may name for a kind of call at a place, in the order of the
    registry: those that serve some such calls.
    """
    primitive, others = parse_kind(kind)
    return tuple(
        route.name
        for route in registry.HOST.values()
        if primitive.name in route.primitives
        and route.place in ("", place)
        and (not primitive.reduces or _combines_some(route, others))
    )


def _combines_some(route: Route, others: bool) -> bool:
    by_mpi = registry.HOST["mpi"].combines
    return any(
        route.combines(op, dtype) and by_mpi(op, dtype) is not others
        for op in OPERATIONS
        for dtype in DTYPES
        if dtype.kind in op.kinds
    )


@cache
def _of_routes(kind: str) -> dict[str, Steps]:
    """The row of a kind that the tables do not have: at each place the route that is only had
    there, else the first that may be named.
    """
    return {
        place: ((0, next((r for r in names if registry.HOST[r].place), names[0])),)
        for place in PLACES
        if (names := eligible_routes(kind, place))
    }


class Table:
    """The routes of one job.

    measured: what ``tune`` found, by number of ranks.
    path:     the file that it comes from, "" for none.
    """

    def __init__(
        self, openmpi: bool, measured: Mapping[int, Rows] | None = None, path: str = ""
    ) -> None:
        self._openmpi = openmpi
        self._measured = measured or {}
        self.path = path

    def row(self, kind: str, ranks: int) -> dict[str, Steps]:
        """The steps for a group of so many ranks, by place: as measured with the number of ranks
        that comes closest, by ratio, and where nothing was measured the default's.
        """
        if kind not in KINDS:
            return _of_routes(kind)
        usual = _nearest(_DEFAULTS[self._openmpi], kind, ranks)
        measured = _nearest(self._measured, kind, ranks)
        return usual | {place: _filled(steps, usual[place]) for place, steps in measured.items()}

    def holding(self, measured: Mapping[int, Rows]) -> Table:
        """The table of the same MPI library with something else measured."""
        return Table(self._openmpi, measured)

    def describe(self) -> str:
        """Where it comes from, in words."""
        if not self.path:
            return "the defaults"
        return f"{self.path} (measured on {', '.join(map(str, sorted(self._measured)))} ranks)"


class _Job:
    """The table of this job; rank 0's, on every rank."""

    def __init__(self) -> None:
        self.table = Table(openmpi=False)


job = _Job()


def _nearest(known: Mapping[int, Rows], kind: str, ranks: int) -> dict[str, Steps]:
    """The steps for the number of ranks that comes closest, of those that have the place."""
    row: dict[str, Steps] = {}
    for n in sorted(known, key=lambda n: (max(n, ranks) / min(n, ranks), n), reverse=True):
        row.update(known[n].get(kind, {}))
    return row


def _filled(steps: Steps, default: Steps) -> Steps:
    """The steps, with the default's own where they leave a size to it."""
    sizes = sorted({least for least, _ in (*steps, *default)})
    routes = ((size, route_at(steps, size)) for size in sizes)
    return merge_steps(
        (size, route_at(default, size) if route == DEFAULT else route) for size, route in routes
    )


def route_at(steps: Steps, size: int) -> str:
    """The route that steps give a size."""
    return [route for least, route in steps if least <= size][-1]


def merge_steps(steps: Iterable[tuple[int, str]]) -> Steps:
    """The steps without those to the route that is taken already."""
    return tuple(next(same) for _, same in groupby(steps, key=itemgetter(1)))


# --- the file -----------------------------------------------------------------------------------


def default_path(mpi: str) -> Path:
    """Where ``tune`` writes what it finds on this machine with an MPI library, and init looks.

    mpi: name and version. Machines with other processors have another file: a home directory may
    be shared by nodes of several kinds. Raises RuntimeError for a user without a home directory.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    name = re.sub(r"[^\w.]+", "-", f"{mpi} on {machine.describe()}").strip("-").lower()
    return Path(base) / "mpicoll" / f"{name}.json"


class Found(NamedTuple):
    """A file and its text.

    path:    "" where there is none.
    problem: why a file that was asked for by name cannot be read; "" where it can.
    """

    path: str = ""
    text: str = ""
    problem: str = ""


def read(mpi: str) -> Found:
    """The file whose table is meant; raises nothing, for one rank alone calls.

    MPICOLL_TABLE names it, or is "0": none; else it is ``default_path(mpi)``, if that is there.
    """
    named = settings.TABLE.value()
    if named == "0":
        return Found()
    try:
        path = Path(named) if named else default_path(mpi)
        return Found(str(path), path.read_text(errors="replace"))
    except (OSError, RuntimeError) as error:
        return Found(named, problem=str(error)) if named else Found()


def build_table(openmpi: bool, path: str, text: str, problem: str = "") -> Table:
    """The table of an MPI library and a file as ``read`` found it.

    Raises ArgumentError where the file is no such table; every rank has the same.
    """
    if problem:
        raise ArgumentError(
            f"init_process_group: the file that MPICOLL_TABLE names cannot be read: {problem}; "
            "name a file that rank 0 can read, or unset MPICOLL_TABLE"
        )
    if not path:
        return Table(openmpi)
    try:
        return Table(openmpi, parse(text), path)
    except ValueError as error:
        raise ArgumentError(
            f"init_process_group: {path} is no table of routes: {error}; remove it and write a new "
            "one with python -m mpicoll tune, or set MPICOLL_TABLE=0"
        ) from error


def parse(text: str) -> dict[int, Rows]:
    """What a file says was measured, by number of ranks. What it must be:

    {"ranks": {"2": {KIND: {PLACE: [[BYTES, ROUTE], ...]}}}}

    and more beside. A route may be "default", too. Raises ValueError, with the reason, for a text
    that is not.
    """
    try:
        measured = {
            _ranks(ranks): {
                kind: {place: tuple(map(_step, steps)) for place, steps in row.items()}
                for kind, row in rows.items()
            }
            for ranks, rows in json.loads(text)["ranks"].items()
        }
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        form = '{"ranks": {RANKS: {KIND: {PLACE: [[BYTES, ROUTE], ...]}}}}'
        raise ValueError(f"expected {form}, got something else ({error})") from error
    for rows in measured.values():
        for kind, row in rows.items():
            for place, steps in row.items():
                _check(kind, place, steps)
    return measured


def _ranks(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text, re.ASCII):
        raise ValueError(f"expected a number of ranks, got {text!r}")
    return int(text)


def _step(pair: Iterable[Any]) -> tuple[int, str]:
    least, route = pair
    if type(least) is not int or type(route) is not str:
        raise ValueError(f"expected [BYTES, ROUTE], got {[least, route]}")
    return least, route


def _check(kind: str, place: str, steps: Steps) -> None:
    """Raises ValueError where something is unknown, cannot be, or is out of order."""
    if kind not in KINDS:
        raise ValueError(f"expected one of {', '.join(KINDS)}, got {kind!r}")
    if place not in PLACES:
        raise ValueError(f"{kind}: expected one of {', '.join(PLACES)}, got {place!r}")
    sizes = [least for least, _ in steps]
    if sizes[:1] != [0] or sizes != sorted(set(sizes)):
        raise ValueError(f"{kind}: {place}: expected bytes that rise from 0 on, got {sizes}")
    names = *eligible_routes(kind, place), DEFAULT
    for _, route in steps:
        if route not in names:
            expected = ", ".join(names)
            raise ValueError(f"{kind}: {place}: expected one of {expected}, got {route!r}")


def origin_mismatch(text: str, mpi: str) -> str:
    """What a file says that it was measured with, where that is not this machine with this MPI."""
    said: Mapping[str, Any] = json.loads(text)
    told = [str(said.get(name, own)) for name, own in _origin(mpi).items()]
    return "" if told == list(_origin(mpi).values()) else " on ".join(told)


def _origin(mpi: str) -> dict[str, str]:
    return {"mpi": mpi, "machine": machine.describe()}


def join(text: str, mpi: str, ranks: int, rows: Rows, about: Mapping[str, Any]) -> str:
    """The text of a file with what was measured on this machine with so many ranks.

    text:  of the file so far, which keeps what was measured otherwise; "" where there is none.
    about: how it was measured, for people.
    """
    said: dict[str, Any] = json.loads(text or "{}")
    every = said.get("ranks", {})
    own = every.setdefault(str(ranks), {})
    for kind, places in rows.items():
        own.setdefault(kind, {}).update(places)
    notes = said.get("measured")
    notes = {**(notes if isinstance(notes, dict) else {}), str(ranks): dict(about)}
    ordered = {"ranks": dict(sorted(every.items(), key=lambda item: int(item[0])))}
    return _lines({**_origin(mpi), **said, **_origin(mpi), "measured": notes, **ordered}, 3) + "\n"


def _lines(value: Any, depth: int) -> str:
    """JSON, in which a line ends after each entry down to a depth."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    entries = [f"{json.dumps(name)}: {_lines(one, depth - 1)}" for name, one in value.items()]
    return "{\n" + textwrap.indent(",\n".join(entries), " ") + "\n}"
