"""The table that ``python -m mpicoll bench`` prints, with the columns of nccl-tests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from mpicoll.cli.distance import DISTANCES, UNKNOWN
from mpicoll.cli.timing import MAX_SPREAD
from mpicoll.output import format_bytes

__all__ = [
    "PERCENTILES",
    "Column",
    "Result",
    "averages",
    "columns",
    "foot",
    "heads",
    "noise",
    "noise_warning",
    "short_columns",
    "wrong",
]

#: A line of the table, or what was measured of one call in it.
Result = dict[str, Any]

#: Percentiles of --latency, by name.
PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}

#: The others in words; a route is called by its name.
_NAMES = {"mpi4py": "MPI alone", "gloo": "Gloo", "copy": "a copy"}

_BANDWIDTH = (("time", "(us)"), ("algbw", "(GB/s)"), ("busbw", "(GB/s)"))
_LATENCY = tuple((name, "(us)") for name in PERCENTILES)


def _form(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _form_distance(value: str) -> str:
    return "-" if value == UNKNOWN else value


def _form_share(value: float) -> str:
    return f"{value:.0%}"


class Column(NamedTuple):
    """One column.

    group: what is above the title.
    path:  where the value is in a line.
    form:  how it is shown.
    none:  what is shown where there is none.
    """

    group: str
    title: str
    unit: str
    width: int
    path: tuple[str, ...]
    form: Callable[[Any], str] = _form
    none: str = "-"

    def text(self, result: Result) -> str:
        """Return the cell."""
        value: Any = result
        for name in self.path:
            value = (value or {}).get(name)
        return (self.none if value is None else self.form(value)).rjust(self.width)


#: The last, so that readers of nccl-tests' tables find theirs.
_DISTANCE = Column("", "distance", "", 10, ("distance",), _form_distance)


def columns(latency: bool, longest: int, others: Sequence[str]) -> list[Column]:
    """Return the columns.

    longest: letters of a dtype's name.
    others:  names of those whose times stand beside.
    """
    built = [
        Column("", "size", "(B)", 14, ("size",)),
        Column("", "count", "(elements)", 13, ("count",)),
        Column("", "type", "", max(10, longest + 2), ("type",)),
        Column("", "redop", "", 7, ("redop",)),
        Column("", "root", "", 6, ("root",)),
    ]
    times = _LATENCY if latency else _BANDWIDTH
    for name in ("out_of_place", "in_place"):
        group = name.replace("_", "-")
        built += [Column(group, title, unit, 10, (name, title)) for title, unit in times]
        built.append(Column(group, "#wrong", "", 8, (name, "wrong")))
    title = "p50" if latency else "time"
    for name in others:
        built.append(Column(name, title, "(us)", 11, ("compare", name, title)))
        built.append(Column(name, "ratio", "", 8, ("compare", name, "ratio")))
    if not latency:
        built.append(Column("", "spread", "", 8, ("spread",), _form_share))
    return [*built, _DISTANCE]


def short_columns(variant: str, longest: int, others: Sequence[str]) -> list[Column]:
    """Return the columns with --short: the time of a variant, and the others' beside."""
    built = [
        Column("", "size", "", 10, ("size",), format_bytes),
        Column("", "type", "", max(10, longest + 2), ("type",)),
        Column("mpicoll", "time", "(us)", 12, (variant, "time")),
        Column("mpicoll", "spread", "", 8, ("spread",), _form_share),
    ]
    for name in others:
        path = ("compare", name, "time")
        built.append(Column(_NAMES.get(name, name), "time", "(us)", 12, path, none="refused"))
        built.append(Column(_NAMES.get(name, name), "ratio", "", 8, ("compare", name, "ratio")))
    return [*built, _DISTANCE]


def heads(columns: Sequence[Column]) -> list[str]:
    """Return what is above the lines."""
    groups = groupby(columns, lambda column: column.group)
    lines = [
        "".join(group.center(sum(each.width for each in own)) for group, own in groups),
        "".join(column.title.rjust(column.width) for column in columns),
        "".join(column.unit.rjust(column.width) for column in columns),
    ]
    return [f"#{line[1:].rstrip()}" for line in lines]


def foot(results: Sequence[Result], check: bool, short: bool) -> list[str]:
    """Return what is below the lines."""
    found = sum(wrong(result) for result in results)
    lines = [f"# Out of bounds values : {found} {'FAILED' if found else 'OK'}"] if check else []
    if short:
        return lines + _refused(results)
    means = averages(results)
    return lines + [
        f"# Avg bus bandwidth    : {mean:.4g}" + f" ({distance})" * (len(means) > 1)
        for distance, mean in means.items()
    ]


def _refused(results: Sequence[Result]) -> list[str]:
    """Return which of the others lack what."""
    lacks: dict[str, dict[str, None]] = {}
    for result in results:
        for name, found in result["compare"].items():
            if found is None:
                lacks.setdefault(name, {})[result["type"]] = None
    primitive = results[0]["primitive"]
    return [
        f"# refused: {_NAMES.get(name, name)} has no {primitive} of {', '.join(dtypes)}"
        for name, dtypes in lacks.items()
    ]


def wrong(result: Result) -> int:
    """Return the number of wrong elements of a line."""
    others = [found for found in result["compare"].values() if found]
    return sum(found.get("wrong") or 0 for found in (*_own(result), *others))


def noise(results: Sequence[Result]) -> float:
    """Return the median of the spreads of mpicoll's times; 0 with --latency, which has none."""
    spreads = [one["spread"] for one in results if one.get("spread") is not None]
    return statistics.median(spreads) if spreads else 0.0


#: Maximum load average per processor. A job that has just ended on all processors leaves up to 1.
_MAX_LOAD = 1.5


def noise_warning(noise: float, load: float, crowded: bool) -> list[str]:
    """Return lines that say that the times are not reliable; none if they are.

    noise:   the median of the spreads.
    load:    the load average before the start, per processor of the busiest node.
    crowded: whether there are more ranks than processors.
    """
    if noise <= MAX_SPREAD and load <= _MAX_LOAD:
        return []
    reasons = [f"times vary by {noise:.0%}, more than {MAX_SPREAD:.0%}"] * (noise > MAX_SPREAD)
    if load > _MAX_LOAD:
        reasons.append(f"the load average was {load:.1f} per processor before the start")
    remedy = "Start no more ranks than processors" if crowded else "Stop other programs"
    return [f"NOT RELIABLE: {' and '.join(reasons)}. {remedy}, and run bench again"]


def averages(results: Sequence[Result]) -> dict[str, float]:
    """Return the mean bus bandwidth of all lines, by how far the ranks were apart."""
    found: dict[str, list[float]] = {distance: [] for distance in DISTANCES}
    for result in results:
        every = [one.get("busbw") for one in _own(result)]
        found[result["distance"]] += [one for one in every if one is not None]
    return {distance: statistics.fmean(every) for distance, every in found.items() if every}


def _own(result: Result) -> list[Result]:
    """Return what was measured of mpicoll's calls."""
    return [result[name] for name in ("out_of_place", "in_place") if result[name]]
