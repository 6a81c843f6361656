"""Which route carries messages of which size: a table for each MPI, and what was measured here.

A table gives, for a kind of call, the route from each size on. Kinds are the primitives; where
elements are combined, those that MPI combines rightly and, as "all_reduce of others", all others.
Sizes are bytes of the larger array of a rank, the one that holds the blocks of all ranks where
there is one. Routes depend on where the ranks of a group are:

    node   on one node, with memory that they share
    nodes  on several nodes, several of them on some
    apart  anywhere; what is used where the former two cannot be

Every rank has the same table: rank 0's, which init_process_group hands out.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from mpicoll.errors import ArgumentError

__all__ = ["KINDS", "PLACES", "ROUTES", "Steps", "Table", "default_path", "read", "table_of"]

#: The routes of host memory that a table chooses among.
ROUTES = ("mpi", "pieces", "exchange", "shared", "levels")
#: Where the ranks of a group can be.
PLACES = ("node", "nodes", "apart")
#: The one place where a route is to be had.
_NEEDS = {"shared": "node", "levels": "nodes"}

#: Bytes from which on a route is taken, in rising order from 0 on.
Steps = tuple[tuple[int, str], ...]
#: The steps by kind of call and place.
Rows = dict[str, dict[str, Steps]]

_KIB, _MIB = 1 << 10, 1 << 20


def _everywhere(*steps: tuple[int, str]) -> dict[str, Steps]:
    return dict.fromkeys(PLACES, steps)


_MPI, _EXCHANGE = _everywhere((0, "mpi")), _everywhere((0, "exchange"))

#: Measured on two ranks of one node with the libraries from PyPI; docs/performance.md says how.
#: Between nodes nothing was measured: see there, too.
_MPICH: Rows = {
    "broadcast": {**_MPI, "node": ((0, "mpi"), (32 * _MIB, "shared"))},
    "all_reduce": {
        "node": ((0, "mpi"), (4 * _KIB, "shared")),
        "nodes": ((0, "mpi"), (256 * _KIB, "levels")),
        "apart": ((0, "mpi"), (32 * _MIB, "pieces")),
    },
    "all_reduce of others": {**_EXCHANGE, "node": ((0, "shared"),)},
    "reduce": _MPI,
    "reduce of others": _EXCHANGE,
    "all_gather": _MPI,
    "gather": _MPI,
    "scatter": _MPI,
    "reduce_scatter": {
        **_everywhere((0, "mpi"), (16 * _KIB, "exchange")),
        "node": ((0, "mpi"), (8 * _KIB, "shared")),
    },
    "reduce_scatter of others": {**_EXCHANGE, "node": ((0, "shared"),)},
}
_OPEN_MPI: Rows = {
    **_MPICH,
}


#: The kinds of call.
KINDS = tuple(_MPICH)


class Table:
    """The routes of one job. measured: what ``tune`` found, by number of ranks; see ``read``."""

    def __init__(self, openmpi: bool, measured: dict[int, Rows] | None = None) -> None:
        self._default = _OPEN_MPI if openmpi else _MPICH
        self._measured = measured or {}

    def row(self, kind: str, ranks: int) -> dict[str, Steps]:
        """The steps for a group of so many ranks, by place: as measured with the number of ranks
        that comes closest, by ratio, and where nothing was measured the default's.
        """
        kind = kind.replace("_single", "")
        row = dict(self._default[kind])
        near = sorted(self._measured, key=lambda n: (abs(math.log(n / ranks)), n), reverse=True)
        for n in near:
            row.update(self._measured[n].get(kind, {}))
        return row


def default_path(mpi: str) -> Path:
    """Where ``tune`` writes the table of an MPI library, and init looks for one.

    mpi: name and version.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(base) / "mpicoll" / (re.sub(r"[^\w.]+", "-", mpi).lower() + ".json")


def read(mpi: str) -> tuple[str, str]:
    """The file whose table is meant and its text; both "" for none.

    MPICOLL_TABLE names the file, or is "0": none; else it is ``default_path(mpi)``, if it is there.
    A file that was asked for by name and cannot be read is an error in ``table_of``.
    """
    named = os.environ.get("MPICOLL_TABLE", "")
    if named == "0":
        return "", ""
    path = Path(named) if named else default_path(mpi)
    try:
        return str(path), path.read_text()
    except OSError as error:
        return (str(path), f"{error}") if named else ("", "")


def table_of(openmpi: bool, path: str, text: str) -> Table:
    """The table of an MPI library and a file: ``{"ranks": {"2": {KIND: {PLACE: [[BYTES, ROUTE],
    ...]}}}}``.

    Raises ArgumentError for a text that is none such; every rank has the same.
    """
    if not path:
        return Table(openmpi)
    try:
        measured = {
            int(ranks): {
                kind: {place: _steps(steps) for place, steps in row.items()}
                for kind, row in rows.items()
            }
            for ranks, rows in json.loads(text)["ranks"].items()
        }
        _check(measured)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"init_process_group: {path} is no table of routes ({error or type(error).__name__}: "
            f"{text[:80]!r}); write one with python -m mpicoll tune, or set MPICOLL_TABLE=0"
        ) from error
    return Table(openmpi, measured)


def _steps(found: list[Any]) -> Steps:
    return tuple((int(least), str(route)) for least, route in found)


def _check(measured: dict[int, Rows]) -> None:
    """Raises ValueError where something is unknown or out of order."""
    for ranks, rows in measured.items():
        if ranks < 1:
            raise ValueError(f"{ranks} ranks")
        for kind, row in rows.items():
            if kind not in KINDS:
                raise ValueError(f"no such kind of call: {kind}")
            for place, steps in row.items():
                if place not in PLACES:
                    raise ValueError(f"no such place: {place}")
                needed = {name for _, name in steps if _NEEDS.get(name, place) != place}
                if needed:
                    raise ValueError(f"{kind}: {place}: not there: {', '.join(sorted(needed))}")
                sizes = [least for least, _ in steps]
                if sizes[:1] != [0] or sizes != sorted(set(sizes)):
                    raise ValueError(f"{kind}: sizes do not rise from 0 on: {sizes}")
                unknown = {route for _, route in steps} - set(ROUTES)
                if unknown:
                    raise ValueError(f"{kind}: no such route: {', '.join(sorted(unknown))}")
