"""The files of tuning tables: where they are, what they may contain, and how they are written."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll import machine, settings
from mpicoll.errors import ArgumentError
from mpicoll.routes.tuning import DEFAULT, KINDS, PLACES, Rows, Steps, Table, eligible_routes

__all__ = [
    "Found",
    "build_table",
    "default_path",
    "join",
    "origin_mismatch",
    "parse",
    "read",
]


def default_path(mpi: str) -> Path:
    """Return where ``tune`` writes its table for an MPI library on this machine, and init looks.

    mpi: name and version. Machines with other processors have another file: a home directory may be
         shared by nodes of several kinds. Raises RuntimeError for a user without a home directory.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    name = re.sub(r"[^\w.]+", "-", f"{mpi} on {machine.describe()}").strip("-").lower()
    return Path(base) / "mpicoll" / f"{name}.json"


#: Maximum size of a table's file: its text, escaped, fits into a control message.
_MAX_FILE_BYTES = 2**20


class Found(NamedTuple):
    """A file and its text.

    path:    "" if there is none.
    problem: why a file requested by name cannot be read; "" if it can.
    """

    path: str = ""
    text: str = ""
    problem: str = ""


def read(mpi: str) -> Found:
    """Return the file of the table; raise nothing, for one rank alone calls.

    MPICOLL_TABLE names it, or is "0": none; else it is ``default_path(mpi)``, if that is there.
    """
    named = settings.TABLE.value()
    if named == "0":
        return Found()
    try:
        path = Path(named) if named else default_path(mpi)
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise OSError(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        return Found(str(path), path.read_text(errors="replace"))
    except (OSError, RuntimeError) as error:
        return Found(named, problem=str(error)) if named else Found()


def build_table(openmpi: bool, path: str, text: str, problem: str = "") -> Table:
    """Return the table of an MPI library and a file as ``read`` found it.

    Raises ArgumentError if the file is no such table; every rank has the same.
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
    """Return what a file says was measured, by number of ranks. It must be:

    {"ranks": {"2": {KIND: {PLACE: [[BYTES, ROUTE], ...]}}}}

    and may have more beside. A route may be "default", too. Raises ValueError, with the reason, for
    any other text.
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
    return least, _BEFORE.get(route, route)


#: Names of routes in files of earlier versions.
_BEFORE = {"pieces": "mpi_chunked", "levels": "hierarchical"}


def _check(kind: str, place: str, steps: Steps) -> None:
    """Raise ValueError if something is unknown, cannot be, or is out of order."""
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
    """Return what a file was measured with, if that is not this machine with this MPI."""
    said: Mapping[str, Any] = json.loads(text)
    told = [str(said.get(name, own)) for name, own in _origin(mpi).items()]
    return "" if told == list(_origin(mpi).values()) else " on ".join(told)


def _origin(mpi: str) -> dict[str, str]:
    return {"mpi": mpi, "machine": machine.describe()}


def join(text: str, mpi: str, ranks: int, rows: Rows, about: Mapping[str, Any]) -> str:
    """Return the text of a file with what was measured on this machine with ``ranks`` ranks.

    text:  of the file so far, which keeps what was measured otherwise; "" if there is none.
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


def _lines(value: object, depth: int) -> str:
    """Return JSON with a line end after each entry down to a depth."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    entries = [f"{json.dumps(name)}: {_lines(one, depth - 1)}" for name, one in value.items()]
    return "{\n" + textwrap.indent(",\n".join(entries), " ") + "\n}"
