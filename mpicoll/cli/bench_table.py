"""Measure the cases of ``python -m mpicoll bench``, and print a table."""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mpi4py
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import control_messages, machine
from mpicoll.cli.bench_calls import (
    Case,
    Memory,
    count_wrong,
    fresh,
    op_name,
    own_call,
    ring,
    variants,
)
from mpicoll.cli.bench_others import Other, Route, works_on_all
from mpicoll.cli.timing import MAX_SPREAD, Effort, Fresh, Samples, Timer
from mpicoll.kernels import library
from mpicoll.primitives import Primitive

#: A line of the table, or the measurements of one call in it.
Result = dict[str, Any]

#: Effort of a repetition without -n.
_REPETITION_EFFORT = Effort(sample=0.01)


class Column(NamedTuple):
    """One column."""

    group: str  # heading above the title
    title: str
    unit: str
    width: int
    path: tuple[str, ...]  # keys of the value in a line

    def text(self, result: Result) -> str:
        """Return the cell."""
        value: Any = result
        for name in self.path:
            value = (value or {}).get(name)
        if isinstance(value, float):
            value = f"{value:.0%}" if self.title == "spread" else f"{value:.2f}"
        return ("-" if value is None else str(value)).rjust(self.width)


def _build_columns(
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
        built += [
            Column(group, title, unit, 10, (name, title))
            for title, unit in (("time", "(us)"), ("algbw", "(GB/s)"), ("busbw", "(GB/s)"))
        ]
        if options.check:
            built.append(Column(group, "#wrong", "", 8, (name, "wrong")))
    for name in others:
        built.append(Column(name, "time", "(us)", 11, ("compare", name, "time")))
        built.append(Column(name, "ratio", "", 8, ("compare", name, "ratio")))
    return [*built, Column("", "spread", "", 8, ("spread",))]


def _heads(columns: Sequence[Column]) -> list[str]:
    groups = itertools.groupby(columns, lambda column: column.group)
    lines = [
        "".join(group.center(sum(each.width for each in own)) for group, own in groups),
        "".join(column.title.rjust(column.width) for column in columns),
        "".join(column.unit.rjust(column.width) for column in columns),
    ]
    return [f"#{line[1:].rstrip()}" for line in lines]


def _count_wrong(result: Result) -> int:
    """Return the number of wrong elements of a line."""
    others = [found for found in result["compare"].values() if found]
    return sum(found.get("wrong") or 0 for found in (*_own(result), *others))


def _own(result: Result) -> list[Result]:
    """Return the measurements of mpicoll's calls."""
    return [result[name] for name in ("out_of_place", "in_place") if result[name]]


@dataclass
class Bench:
    """The benchmark on one rank. It measures one line of the table at a time; rank 0 prints it."""

    options: argparse.Namespace
    comm: MPI.Intracomm  # a private communicator of all ranks
    memory: Memory  # of the arrays
    others: Mapping[str, Other]  # libraries and routes to compare with, by name
    notes: Sequence[str] = ()  # lines for the header

    def __post_init__(self) -> None:
        self._timer = Timer(self.comm, self.memory.settle)

    def run(self, cases: Iterable[Case]) -> Result:
        """Print a table for each primitive; return the data of --json, on all ranks."""
        facts = self._facts()
        self._print(*self._header(facts))
        results: list[Result] = []
        averages = {}
        for row, lines in itertools.groupby(cases, lambda case: case.row):
            columns = _build_columns(self.options, row, self.others)
            self._print("#", f"# {row.name}", *_heads(columns))
            start = len(results)
            for case in lines:
                results.append(self._line(case))
                self._print("".join(column.text(results[-1]) for column in columns))
            if self.options.check:
                found = sum(map(_count_wrong, results[start:]))
                self._print(f"# Out of bounds values : {found} {'FAILED' if found else 'OK'}")
            every = [one["busbw"] for result in results[start:] for one in _own(result)]
            averages[row.name] = mean = None if None in every else statistics.fmean(every)
            if mean is not None:
                self._print(f"# Avg bus bandwidth    : {mean:.4g}")
        noise = statistics.median(one["spread"] for one in results)
        if noise > MAX_SPREAD:
            self._print(
                f"# NOT RELIABLE: times vary by {noise:.0%}, more than {MAX_SPREAD:.0%}. Stop "
                "other programs, start at most one rank per processor, and run bench again"
            )
        return {
            **facts,
            "noise": noise,
            "results": results,
            "average_busbw": averages,
            "wrong": sum(map(_count_wrong, results)),
        }

    def _print(self, *lines: str) -> None:
        if self.comm.Get_rank() == 0:
            print("\n".join(lines), flush=True)

    def _line(self, case: Case) -> Result:
        buffers = ring(case, self.memory)
        own = variants(case.row)
        calls = {
            name: fresh(case, buffers, [own_call(case, each, name) for each in buffers], name)
            for name in own
        }
        for name, other in self.others.items():
            found_calls = [other.call(case, each) for each in buffers]
            if works_on_all(found_calls[0], self.comm):
                calls[name] = fresh(case, buffers, [call for call in found_calls if call])
        samples = self._measure(calls)
        found: dict[str, Result] = {name: {} for name in calls}
        for name, times in samples.items():
            every = [1e6 * seconds for seconds in times]
            took = statistics.median(every)
            algbw = case.size / took / 1e3 if case.size else None  # MB/s to GB/s
            found[name] = {
                "time": took,
                "algbw": algbw,
                "busbw": None if algbw is None else algbw * case.row.moved(case.n),
                "times": every,
                "spread": times.figure.relative_spread,
            }
            if name not in own:
                found[name]["ratio"] = took / found[own[0]]["time"]
            is_ours = name in own or isinstance(self.others[name], Route)
            if self.options.check and case.dtype and is_ours:
                variant = name if name in own else own[0]
                wrong = count_wrong(calls[name].calls[0], case, buffers[0], variant, self.memory)
                found[name]["wrong"] = sum(control_messages.allgather(self.comm, wrong, int))
        return {
            "primitive": case.row.name,
            "size": case.size,
            "count": case.count,
            "type": case.dtype.name if case.dtype else "none",
            "redop": op_name(case.op) if case.op else "none",
            "root": case.root if case.row.root else -1,
            "spread": found[own[0]]["spread"],
            "out_of_place": found.get("out_of_place"),
            "in_place": found.get("in_place"),
            "compare": {name: found.get(name) for name in self.others},
        }

    def _measure(self, calls: Mapping[str, Fresh]) -> Samples:
        given, warm = self.options.iters, self.options.warmup_iters
        warm = warm or (0 if given else 1)
        once = {
            name: min((self._timer.time(call) for _ in range(warm)), default=0.0)
            for name, call in calls.items()
        }
        once = control_messages.bcast(self.comm, once, 0, dict[str, float])
        loops = {name: given or _REPETITION_EFFORT.calls(took) for name, took in once.items()}
        return self._timer.sample(calls, self.options.repetitions, loops)

    def _facts(self) -> Result:
        """Return machine and versions of rank 0, on all ranks."""
        nodes = control_messages.allgather(self.comm, platform.node(), str)
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
            "arrays": self.memory.name,
        }
        return control_messages.bcast(self.comm, facts, 0, Result)

    def _header(self, facts: Result) -> list[str]:
        options, nodes = self.options, facts["nodes"]
        where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes ({nodes[0]}, ...)"
        calls = f"{options.iters} calls" if options.iters else f"{_REPETITION_EFFORT.sample:g} s"
        versions = ", ".join(f"{x} {facts[x]}" for x in ("mpicoll", "mpi4py", "NumPy", "Python"))
        lines = [
            f"mpicoll {facts['command']}",
            f"{facts['ranks']} ranks on {where}: {facts['machine']}",
            f"{facts['MPI']}, {versions}",
            f"arrays: {facts['arrays']}; reductions: {facts['reductions']}",
            f"time: median of {options.repetitions} repetitions of {calls} each, of the slowest "
            "rank; ranks send new data, written before a barrier",
        ]
        if self.others:
            lines.append("ratio: time of the comparison / time of mpicoll")
        return [f"# {line}" for line in (*lines, *self.notes)]
