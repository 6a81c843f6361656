"""Measure the cases of ``python -m mpicoll bench``, and print a table."""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mpi4py
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import cli, control_messages, machine
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
from mpicoll.cli.distance import DISTANCES
from mpicoll.cli.timing import MAX_SPREAD, ByDistance, Call, Effort, Timer, Times
from mpicoll.kernels import library
from mpicoll.primitives import Primitive

__all__ = ["Bench", "Result", "build_columns", "foot", "heads"]

#: A line of the table, or the measurements of one call in it.
Result = dict[str, Any]

#: Percentiles of --latency, by name.
_PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}

_BANDWIDTH = (("time", "(us)"), ("algbw", "(GB/s)"), ("busbw", "(GB/s)"))
_LATENCY = tuple((name, "(us)") for name in _PERCENTILES)


class Column(NamedTuple):
    """One column.

    group: heading above the title.
    path:  keys of the value in a line.
    """

    group: str
    title: str
    unit: str
    width: int
    path: tuple[str, ...]

    def text(self, result: Result) -> str:
        """Return the cell."""
        value: Any = result
        for name in self.path:
            value = (value or {}).get(name)
        if isinstance(value, float):
            value = f"{value:.0%}" if self.title == "spread" else f"{value:.2f}"
        return ("-" if value is None else str(value)).rjust(self.width)


def build_columns(
    options: argparse.Namespace, row: Primitive, others: Iterable[str]
) -> list[Column]:
    """Return the columns for a primitive.

    others: names of the other libraries and routes to compare with.
    """
    longest = max(len(dtype.name) for dtype in options.datatype)
    built = [
        Column("", "size", "(B)", 12, ("size",)),
        Column("", "count", "(elements)", 12, ("count",)),
        Column("", "type", "", max(9, longest + 2), ("type",)),
        Column("", "redop", "", 7, ("redop",)),
        Column("", "root", "", 6, ("root",)),
    ]
    for name in variants(row):
        group = name.replace("_", "-")
        times = _LATENCY if options.latency else _BANDWIDTH
        built += [Column(group, title, unit, 10, (name, title)) for title, unit in times]
        if options.check:
            built.append(Column(group, "#wrong", "", 8, (name, "wrong")))
    title = "p50" if options.latency else "time"
    for name in others:
        built.append(Column(name, title, "(us)", 11, ("compare", name, title)))
        built.append(Column(name, "ratio", "", 8, ("compare", name, "ratio")))
    if not options.latency:
        built.append(Column("", "spread", "", 8, ("spread",)))
    return [*built, Column("", "distance", "", 10, ("distance",))]


def heads(columns: Sequence[Column]) -> list[str]:
    """Return the lines above the table."""
    groups = itertools.groupby(columns, lambda column: column.group)
    lines = [
        "".join(group.center(sum(each.width for each in own)) for group, own in groups),
        "".join(column.title.rjust(column.width) for column in columns),
        "".join(column.unit.rjust(column.width) for column in columns),
    ]
    return [f"#{line[1:].rstrip()}" for line in lines]


def foot(results: Sequence[Result], check: bool) -> list[str]:
    """Return the lines below the table."""
    found = sum(map(_count_wrong, results))
    means = _average_busbw(results)
    lines = [f"Out of bounds values : {found} {'FAILED' if found else 'OK'}"] if check else []
    lines += [
        f"Avg bus bandwidth    : {mean:.4g}" + f" ({distance})" * (len(means) > 1)
        for distance, mean in means.items()
    ]
    return [f"# {line}" for line in lines]


def _count_wrong(result: Result) -> int:
    """Return the number of wrong elements of a line."""
    others = [found for found in result["compare"].values() if found]
    return sum(found.get("wrong") or 0 for found in (*_own(result), *others))


def _average_busbw(results: Sequence[Result]) -> dict[str, float]:
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
        results: list[Result] = []
        averages = {}
        for row, lines in itertools.groupby(cases, lambda case: case.row):
            columns = build_columns(self._options, row, self._others)
            self._print(["#", f"# {row.name}", *heads(columns)])
            start = len(results)
            for case in lines:
                found = self._lines(case)
                results += found
                self._print(["".join(column.text(one) for column in columns) for one in found])
            self._print(foot(results[start:], self._options.check))
            averages[row.name] = _average_busbw(results[start:])
        spreads = [one["spread"] for one in results if one["spread"] is not None]
        noise = statistics.median(spreads) if spreads else 0.0
        distance = self._timer.describe_distances()
        self._print([f"# {distance}"])
        if noise > MAX_SPREAD:
            self._print(
                [
                    f"# NOT RELIABLE: times vary by {noise:.0%}, more than {MAX_SPREAD:.0%}. Stop "
                    "other programs, start at most one rank per processor, and run bench again"
                ]
            )
        return {
            **facts,
            "distance": distance,
            "noise": noise,
            "latency": self._options.latency,
            "results": results,
            "average_busbw": averages,
            "wrong": sum(map(_count_wrong, results)),
        }

    def _print(self, lines: Sequence[str]) -> None:
        if self._first and lines:
            cli.show_progress("")
            print("\n".join(lines), flush=True)

    # --- one case -------------------------------------------------------------------------------

    def _lines(self, case: Case) -> list[Result]:
        """Return a line for each distance of the ranks that occurred."""
        if self._first:
            cli.show_progress(f"{case.row.name} of {case.size} bytes")
        buffers = Buffers(case, self._memory)
        own = variants(case.row)
        calls: dict[str, Call] = {
            name: own_call(case, buffers, name, self._options.waits) for name in own
        }
        for name, other in self._others.items():
            call = other.call(case, buffers)
            if works_on_all(call, self._comm) and call is not None:
                calls[name] = call
        lines = [
            (distance, {name: self._figures(case, one) for name, one in times.items()})
            for distance, times in self._measure(calls).items()
        ]
        if self._options.check and case.dtype is not None:
            routes = [name for name, other in self._others.items() if isinstance(other, Route)]
            for name in (*own, *(name for name in routes if name in calls)):
                variant = name if name in own else own[0]
                found = count_wrong(calls[name], case, buffers, variant, self._memory)
                lines[0][1][name]["wrong"] = sum(control_messages.allgather(self._comm, found, int))
        return [self._line(case, *line) for line in lines]

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

    def _measure(self, calls: Mapping[str, Call]) -> ByDistance:
        given, warm = self._options.iters, self._options.warmup_iters
        warm = warm or (0 if given else 1)
        once = {
            name: min((self._timer.time(call) for _ in range(warm)), default=0.0)
            for name, call in calls.items()
        }
        once = control_messages.bcast(self._comm, once, 0, dict[str, float])
        if self._options.latency:
            count = given or _LATENCY_EFFORT.samples(sum(once.values()))
            return self._timer.sample(calls, count, dict.fromkeys(once, 1))
        loops = {name: given or _REPETITION_EFFORT.calls(took) for name, took in once.items()}
        return self._timer.sample(calls, self._options.repetitions, loops)

    def _figures(self, case: Case, times: Times) -> Result:
        """Return the figures of one call."""
        every = [1e6 * seconds for seconds in times.values()]
        if self._options.latency:
            percentiles = np.percentile(every, list(_PERCENTILES.values())).tolist()
            return dict(zip(_PERCENTILES, percentiles, strict=True))
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
        name, version = MPI.get_vendor()
        facts = {
            "command": " ".join(sys.argv[1:]),
            "ranks": len(nodes),
            "nodes": list(dict.fromkeys(nodes)),
            "machine": machine.describe(),
            "MPI": f"{name} {'.'.join(map(str, version))}",
            "mpicoll": mpicoll.__version__,
            "mpi4py": mpi4py.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "reductions": library.describe(),
            "arrays": self._memory.name,
        }
        return control_messages.bcast(self._comm, facts, 0, Result)

    def _header(self, facts: Result) -> list[str]:
        options, nodes = self._options, facts["nodes"]
        where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes ({nodes[0]}, ...)"
        calls = f"{options.iters} calls" if options.iters else ""
        if options.latency:
            method = f"single calls ({calls or f'for {_LATENCY_EFFORT.seconds:g} s'})"
        else:
            calls = calls or f"{_REPETITION_EFFORT.sample:g} s"
            method = f"median of {options.repetitions} repetitions of {calls} each"
        versions = ", ".join(f"{x} {facts[x]}" for x in ("mpicoll", "mpi4py", "NumPy", "Python"))
        lines = [
            f"mpicoll {facts['command']}",
            f"{facts['ranks']} ranks on {where}: {facts['machine']}",
            f"{facts['MPI']}, {versions}",
            f"arrays: {facts['arrays']}; reductions: {facts['reductions']}",
            f"time: {method}, after a barrier, of the slowest rank"
            + ("; async_op=True and wait()" if options.waits else ""),
        ]
        if self._others:
            lines.append("ratio: time of the comparison / time of mpicoll")
        return [f"# {line}" for line in (*lines, *self._notes)]
