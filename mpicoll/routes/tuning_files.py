"""Read and write the files of tuning tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll import machine, settings
from mpicoll.errors import ArgumentError
from mpicoll.routes.tuning import DEFAULT, KINDS, PLACES, Rows, Steps, Table, eligible_routes


def default_path(mpi: str) -> Path:
    """Return the default path of the table for an MPI library (name and version) on this type of
    machine. Raises RuntimeError for a user without a home directory.
    """
    base = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    name = re.sub(r"[^\w.]+", "-", f"{mpi} on {machine.describe()}").strip("-").lower()
    return Path(base) / "mpicoll" / f"{name}.json"


#: Maximum size of a table's file: its text, escaped, fits into a control message.
_MAX_FILE_BYTES = 2**20


class Found(NamedTuple):
    """A file (path "": none), its text, and why a file requested by name cannot be read."""

    path: str = ""
    text: str = ""
    problem: str = ""


def read(mpi: str) -> Found:
    """Return the file of the table: MPICOLL_TABLE, "0" for none, or ``default_path(mpi)`` if that
    exists. Raises nothing, because only one rank calls.
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


def build_table(path: str, text: str, problem: str = "") -> Table:
    """Return the table of a file from ``read``, or raise ArgumentError, on all ranks."""
    if problem:
        raise ArgumentError(
            f"init_process_group: the file that MPICOLL_TABLE names cannot be read: {problem}; "
            "name a file that rank 0 can read, or unset MPICOLL_TABLE"
        )
    if not path:
        return Table()
    try:
        return Table(parse(text), path)
    except ValueError as error:
        raise ArgumentError(
            f"init_process_group: {path} is not a tuning table: {error}; remove it and write a new "
            "one with python -m mpicoll tune, or set MPICOLL_TABLE=0"
        ) from error


def parse(text: str) -> dict[int, Rows]:
    """Return the measured rows of a file, by number of ranks. The expected JSON is

    {"ranks": {"2": {KIND: {PLACE: [[BYTES, ROUTE], ...]}}}}

    Other keys are ignored. A route may be "default". Raises ValueError for any other text.
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
    """Raise ValueError if a name is unknown or sizes are out of order."""
    if kind not in KINDS:
        raise ValueError(f"KIND: expected one of {', '.join(KINDS)}, got {kind!r}")
    if place not in PLACES:
        raise ValueError(f"{kind}: placement: expected one of {', '.join(PLACES)}, got {place!r}")
    sizes = [least for least, _ in steps]
    if sizes[:1] != [0] or sizes != sorted(set(sizes)):
        raise ValueError(f"{kind}: {place}: expected ascending bytes from 0, got {sizes}")
    names = *eligible_routes(kind, place), DEFAULT
    for _, route in steps:
        if route not in names:
            expected = ", ".join(names)
            raise ValueError(f"{kind}: {place}: expected one of {expected}, got {route!r}")


def origin_mismatch(text: str, mpi: str) -> str:
    """Return the MPI and machine of a file, if they are not this MPI and this machine; else ""."""
    content: Mapping[str, Any] = json.loads(text)
    origin = [str(content.get(name, own)) for name, own in _origin(mpi).items()]
    return "" if origin == list(_origin(mpi).values()) else " on ".join(origin)


def _origin(mpi: str) -> dict[str, str]:
    return {"mpi": mpi, "machine": machine.describe()}


def join(text: str, mpi: str, ranks: int, rows: Rows, about: Mapping[str, Any]) -> str:
    """Return the text of a file with the rows measured on this machine with ``ranks`` ranks, and
    notes on the measurement. text: the old text, whose other rows are kept.
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
    import textwrap

    entries = [f"{json.dumps(name)}: {_lines(one, depth - 1)}" for name, one in value.items()]
    return "{\n" + textwrap.indent(",\n".join(entries), " ") + "\n}"
