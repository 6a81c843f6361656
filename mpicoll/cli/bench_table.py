"""Measure the cases of ``python -m mpicoll bench``, and print a table."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mpi4py
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import cli, control_messages, machine
from mpicoll.cli import doctor_machine
from mpicoll.cli.bench_calls import (
    Buffers,
    Case,
    Memory,
    count_wrong,
    op_name,
    own_call,
    variants,
)
from mpicoll.cli.bench_others import Other, Route, works_on_all
from mpicoll.cli.distance import DISTANCES, UNKNOWN
from mpicoll.cli.timing import MAX_SPREAD, Call, Effort, Timer, Times
from mpicoll.kernels import library
from mpicoll.output import format_bytes

__all__ = [
    "PERCENTILES",
    "Bench",
    "Column",
    "Result",
    "average_busbw",
    "build_columns",
    "foot",
    "heads",
    "median_spread",
    "noise_warning",
    "short_columns",
    "wrong_count",
]

#: A line of the table, or the measurements of one call in it.
Result = dict[str, Any]

#: Percentiles of --latency, by name.
PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}

#: Headings of comparisons; a route has its own name.
_NAMES = {"mpi4py": "mpi4py", "gloo": "Gloo", "copy": "copy"}

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

    group: heading above the title.
    path:  keys of the value in a line.
    form:  formats the value.
    none:  printed instead of a missing value.
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


#: The last column, so that columns of nccl-tests keep their positions.
_DISTANCE = Column("", "distance", "", 10, ("distance",), _form_distance)


def build_columns(latency: bool, longest: int, others: Sequence[str]) -> list[Column]:
    """Return the columns.

    longest: maximum length of a dtype's name.
    others:  names of the other libraries and routes to compare with.
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
    """Return the columns of --short: the time of one variant, and the comparisons."""
    built = [
        Column("", "size", "", 10, ("size",), format_bytes),
        Column("", "type", "", max(10, longest + 2), ("type",)),
        Column("mpicoll", "time", "(us)", 12, (variant, "time")),
        Column("mpicoll", "spread", "", 8, ("spread",), _form_share),
    ]
    for name in others:
        path = ("compare", name, "time")
        built.append(Column(_NAMES.get(name, name), "time", "(us)", 12, path, none="-"))
        built.append(Column(_NAMES.get(name, name), "ratio", "", 8, ("compare", name, "ratio")))
    return [*built, _DISTANCE]


def heads(columns: Sequence[Column]) -> list[str]:
    """Return the lines above the table."""
    groups = itertools.groupby(columns, lambda column: column.group)
    lines = [
        "".join(group.center(sum(each.width for each in own)) for group, own in groups),
        "".join(column.title.rjust(column.width) for column in columns),
        "".join(column.unit.rjust(column.width) for column in columns),
    ]
    return [f"#{line[1:].rstrip()}" for line in lines]


def foot(results: Sequence[Result], check: bool, short: bool) -> list[str]:
    """Return the lines below the table."""
    found = sum(wrong_count(result) for result in results)
    lines = [f"# Out of bounds values : {found} {'FAILED' if found else 'OK'}"] if check else []
    if short:
        return lines + _refused(results)
    means = average_busbw(results)
    return lines + [
        f"# Avg bus bandwidth    : {mean:.4g}" + f" ({distance})" * (len(means) > 1)
        for distance, mean in means.items()
    ]


def _refused(results: Sequence[Result]) -> list[str]:
    """Return a line for each comparison that lacks a dtype."""
    missing: dict[str, dict[str, None]] = {}
    for result in results:
        for name, found in result["compare"].items():
            if found is None:
                missing.setdefault(name, {})[result["type"]] = None
    primitive = results[0]["primitive"]
    return [
        f"# not supported: {primitive} of {', '.join(dtypes)} by {_NAMES.get(name, name)}"
        for name, dtypes in missing.items()
    ]


def wrong_count(result: Result) -> int:
    """Return the number of wrong elements of a line."""
    others = [found for found in result["compare"].values() if found]
    return sum(found.get("wrong") or 0 for found in (*_own(result), *others))


def median_spread(results: Sequence[Result]) -> float:
    """Return the median of the spreads of mpicoll's times; 0 with --latency."""
    spreads = [one["spread"] for one in results if one.get("spread") is not None]
    return statistics.median(spreads) if spreads else 0.0


#: Maximum load average per processor. A job that has just ended on all processors leaves up to 1.
_MAX_LOAD = 1.5


def noise_warning(noise: float, load: float, crowded: bool) -> list[str]:
    """Return a warning if the times are not reliable.

    noise:   median of the spreads.
    load:    load average before the start, per processor of the busiest node.
    crowded: whether there are more ranks than processors.
    """
    if noise <= MAX_SPREAD and load <= _MAX_LOAD:
        return []
    reasons = [f"times vary by {noise:.0%}, more than {MAX_SPREAD:.0%}"] * (noise > MAX_SPREAD)
    if load > _MAX_LOAD:
        reasons.append(f"the load average was {load:.1f} per processor before the start")
    remedy = "Start at most one rank per processor" if crowded else "Stop other programs"
    return [f"NOT RELIABLE: {' and '.join(reasons)}. {remedy}, and run bench again"]


def average_busbw(results: Sequence[Result]) -> dict[str, float]:
    """Return the mean bus bandwidth of all lines, by distance of the ranks."""
    found: dict[str, list[float]] = {distance: [] for distance in DISTANCES}
    for result in results:
        every = [one.get("busbw") for one in _own(result)]
        found[result["distance"]] += [one for one in every if one is not None]
    return {distance: statistics.fmean(every) for distance, every in found.items() if every}


def _own(result: Result) -> list[Result]:
    """Return the measurements of mpicoll's calls."""
    return [result[name] for name in ("out_of_place", "in_place") if result[name]]


# --- measuring ----------------------------------------------------------------------------------

#: Effort of a repetition without -n, and of all calls of a line with --latency.
_REPETITION_EFFORT, _LATENCY_EFFORT = Effort(sample=0.01), Effort(seconds=0.2, fewest=20, most=2000)


class Bench:
    """The benchmark on one rank. It measures one line of the table at a time; rank 0 prints it.

    comm:   a private communicator of all ranks.
    memory: memory of the arrays.
    others: the other libraries and routes to compare with, by name.
    notes:  lines for the header.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        comm: MPI.Intracomm,
        memory: Memory,
        others: Mapping[str, Other],
        notes: Sequence[str] = (),
    ) -> None:
        self._options = options
        self._comm = comm
        self._memory = memory
        self._others = others
        self._notes = notes
        self._timer = Timer(comm, memory.settle)
        self._first = comm.Get_rank() == 0

    def run(self, cases: Iterable[Case]) -> Result:
        """Print a table for each primitive; return the data of --json, on all ranks."""
        facts = self._facts()
        self._print(self._header(facts))
        longest = max(len(dtype.name) for dtype in self._options.datatype)
        others, short = list(self._others), self._options.short
        columns = build_columns(self._options.latency, longest, others)
        results: list[Result] = []
        averages = {}
        for row, lines in itertools.groupby(cases, lambda case: case.row):
            if short:
                columns = short_columns(variants(row)[0], longest, others)
            self._print(["#", f"# {row.name}", *heads(columns)])
            start = len(results)
            for case in lines:
                found = self._lines(case)
                results += found
                self._print(["".join(column.text(one) for column in columns) for one in found])
            self._print(foot(results[start:], self._options.check, short))
            averages[row.name] = average_busbw(results[start:])
        distance, noise = self._timer.describe_distances(), median_spread(results)
        warning = noise_warning(noise, facts["load"], bool(facts["crowded"]))
        self._print(self._comments([distance, *warning]))
        return {
            **facts,
            "distance": distance,
            "noise": noise,
            "latency": self._options.latency,
            "results": results,
            "average_busbw": averages,
            "wrong": sum(map(wrong_count, results)),
        }

    def _print(self, lines: Sequence[str]) -> None:
        if self._first and lines:
            self._progress("")
            print("\n".join(lines), flush=True)

    def _progress(self, text: str) -> None:
        if self._first:
            cli.show_progress(text)

    # --- one case -------------------------------------------------------------------------------

    def _lines(self, case: Case) -> list[Result]:
        """Return a line for each distance of the ranks that occurred."""
        self._progress(f"{case.row.name} of {case.size} bytes")
        buffers = Buffers(case, self._memory)
        own = variants(case.row)
        calls: dict[str, Call] = {
            name: own_call(case, buffers, name, self._options.waits) for name in own
        }
        for name, other in self._others.items():
            call = other.call(case, buffers)
            if works_on_all(call, self._comm) and call is not None:
                calls[name] = call
        lines: dict[str, dict[str, Result]] = {}
        for name, times in self._measure(calls).items():
            for distance, one in times.split().items():
                lines.setdefault(distance, {})[name] = self._figures(case, one)
        first, *_ = lines.values()
        if self._options.check and case.dtype is not None:
            routes = [name for name, other in self._others.items() if isinstance(other, Route)]
            for name in (*own, *(name for name in routes if name in calls)):
                variant = name if name in own else own[0]
                found = count_wrong(calls[name], case, buffers, variant, self._memory)
                first[name]["wrong"] = sum(control_messages.allgather(self._comm, found, int))
        return [self._line(case, *line) for line in lines.items()]

    def _line(self, case: Case, distance: str, figures: Mapping[str, Result]) -> Result:
        typical = "p50" if self._options.latency else "time"
        first = variants(case.row)[0]
        for name in self._others:
            if name in figures:
                figures[name]["ratio"] = figures[name][typical] / figures[first][typical]
        return {
            "primitive": case.row.name,
            "size": case.size,
            "count": case.count,
            "type": case.dtype.name if case.dtype else "none",
            "redop": op_name(case.op) if case.op else "none",
            "root": case.root if case.row.root else -1,
            "distance": distance,
            "spread": figures[first].get("spread"),
            "out_of_place": figures.get("out_of_place"),
            "in_place": figures.get("in_place"),
            "compare": {name: figures.get(name) for name in self._others},
        }

    def _measure(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        once = {name: self._warm_up(call) for name, call in calls.items()}
        samples, loops = control_messages.bcast(
            self._comm, self._plan(once), 0, tuple[int, dict[str, int]]
        )
        return self._timer.sample(calls, samples, loops, self._options.average)

    def _plan(self, once: Mapping[str, float]) -> tuple[int, dict[str, int]]:
        """Return the numbers of repetitions and of calls in each; ``once``: seconds of a call."""
        given = self._options.iters
        if self._options.latency:
            return given or _LATENCY_EFFORT.samples(sum(once.values())), dict.fromkeys(once, 1)
        calls = {name: given or _REPETITION_EFFORT.calls(took) for name, took in once.items()}
        return self._options.repetitions, calls

    def _warm_up(self, call: Call) -> float:
        """Warm up, and return the minimum time of a call in seconds."""
        warm = self._options.warmup_iters or (0 if self._options.iters else 1)
        return min((self._timer.time(call) for _ in range(warm)), default=0.0)

    def _figures(self, case: Case, times: Times) -> Result:
        """Return the figures of one call."""
        every = [1e6 * seconds for seconds in times.seconds]
        if self._options.latency:
            percentiles = np.percentile(every, list(PERCENTILES.values())).tolist()
            return dict(zip(PERCENTILES, percentiles, strict=True))
        took = statistics.median(every)
        found: Result = {"time": took, "algbw": None, "busbw": None, "times": every}
        found["spread"] = times.figure.relative_spread
        if case.size:
            found["algbw"] = case.size / took / 1e3  # MB/s to GB/s
            found["busbw"] = found["algbw"] * case.row.moved(case.n)
        return found

    # --- the header -----------------------------------------------------------------------------

    def _facts(self) -> Result:
        """Return machine and versions of rank 0, on all ranks."""
        nodes = control_messages.allgather(self._comm, platform.node(), str)
        load = max(
            control_messages.allgather(
                self._comm, os.getloadavg()[0] / (os.cpu_count() or 1), float
            )
        )
        name, version = MPI.get_vendor()
        facts = {
            "command": " ".join(sys.argv[1:]),
            "ranks": len(nodes),
            "nodes": list(dict.fromkeys(nodes)),
            "machine": f"{machine.describe()}, {len(os.sched_getaffinity(0))} for rank 0",
            "MPI": f"{name} {'.'.join(map(str, version))}",
            "mpicoll": mpicoll.__version__,
            "mpi4py": mpi4py.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "reductions": library.describe(),
            "arrays": self._memory.name,
            "load": load,
            "crowded": doctor_machine.find_crowded(
                control_messages.allgather(
                    self._comm, doctor_machine.Placement.find(), doctor_machine.Placement
                )
            ),
        }
        return control_messages.bcast(self._comm, facts, 0, Result)

    def _header(self, facts: Result) -> list[str]:
        options, nodes = self._options, facts["nodes"]
        where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes ({nodes[0]}, ...)"
        if options.latency:
            calls = (
                f"{options.iters} calls" if options.iters else f"for {_LATENCY_EFFORT.seconds:g} s"
            )
            method = f"single calls ({calls})"
        else:
            calls = (
                f"{options.iters} calls" if options.iters else f"{_REPETITION_EFFORT.sample:g} s"
            )
            method = f"median of {options.repetitions} repetitions of {calls} each"
        whose = ("rank 0", "the mean of the ranks", "the fastest rank", "the slowest rank")
        versions = ", ".join(f"{x} {facts[x]}" for x in ("mpicoll", "mpi4py", "NumPy", "Python"))
        lines = [
            f"{facts['ranks']} ranks on {where}: {facts['machine']}",
            f"{facts['MPI']}, {versions}",
        ]
        if not options.short:
            lines.insert(0, f"mpicoll {facts['command']}")
            lines.append(f"arrays: {facts['arrays']}; reductions: {facts['reductions']}")
        lines.append(
            f"time: {method}, after a barrier, of {whose[options.average]}"
            + ("; async_op=True and wait()" if options.waits else "")
        )
        if self._others:
            lines.append("ratio: time of the comparison / time of mpicoll")
        return self._comments([*lines, *self._notes, *facts["crowded"]])

    def _comments(self, lines: Sequence[str]) -> list[str]:
        if self._options.short:
            lines = [part for line in lines for part in textwrap.wrap(line, 98)]
        return [f"# {line}" for line in lines]
