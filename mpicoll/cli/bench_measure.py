"""Measure a line of the table of ``python -m mpicoll bench``."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import mpi4py
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import cli, control_messages, machine
from mpicoll.cli import bench_table, doctor_machine
from mpicoll.cli.bench_calls import Buffers, Case, Place, op_name, own_call, variants
from mpicoll.cli.bench_check import contents, expected, fill, wrong
from mpicoll.cli.bench_others import Other, Route, works_on_all
from mpicoll.cli.bench_table import PERCENTILES, Result
from mpicoll.cli.timing import Call, Effort, Timer, Times
from mpicoll.kernels import library
from mpicoll.primitives import Layout

__all__ = ["Bench", "count_wrong"]

#: The effort of a repetition without -n; and of all calls of a line with --latency.
_REPETITION, _LATENCY = Effort(sample=0.01), Effort(seconds=0.2, fewest=20, most=2000)


class Bench:
    """The benchmark on one rank: measures and prints line by line.

    comm:   a communicator of all ranks, for this alone.
    place:  the memory of the arrays.
    others: the comparisons, by name.
    notes:  lines for the header.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        comm: MPI.Intracomm,
        place: Place,
        others: Mapping[str, Other],
        notes: Sequence[str] = (),
    ) -> None:
        self._options = options
        self._comm = comm
        self._place = place
        self._others = others
        self._notes = notes
        self._timer = Timer(comm, place.settle)
        self._first = comm.Get_rank() == 0

    def run(self, cases: Iterable[Case]) -> Result:
        """Print a table for each primitive; return the output of --json, on all ranks."""
        facts = self._facts()
        self._print(self._header(facts))
        longest = max(len(dtype.name) for dtype in self._options.datatype)
        others, short = list(self._others), self._options.short
        columns = bench_table.columns(self._options.latency, longest, others)
        results: list[Result] = []
        averages = {}
        for row, lines in itertools.groupby(cases, lambda case: case.row):
            if short:
                columns = bench_table.short_columns(variants(row)[0], longest, others)
            self._print(["#", f"# {row.name}", *bench_table.heads(columns)])
            start = len(results)
            for case in lines:
                found = self._lines(case)
                results += found
                self._print(["".join(column.text(one) for column in columns) for one in found])
            self._print(bench_table.foot(results[start:], self._options.check, short))
            averages[row.name] = bench_table.averages(results[start:])
        distance, noise = self._timer.describe_distances(), bench_table.noise(results)
        warning = bench_table.noise_warning(noise, facts["load"], bool(facts["crowded"]))
        self._print(self._comments([distance, *warning]))
        return {
            **facts,
            "distance": distance,
            "noise": noise,
            "latency": self._options.latency,
            "results": results,
            "average_busbw": averages,
            "wrong": sum(map(bench_table.wrong, results)),
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
        buffers = Buffers(case, self._place)
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
                found = count_wrong(calls[name], case, buffers, variant, self._place)
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
            return given or _LATENCY.samples(sum(once.values())), dict.fromkeys(once, 1)
        calls = {name: given or _REPETITION.calls(took) for name, took in once.items()}
        return self._options.repetitions, calls

    def _warm_up(self, call: Call) -> float:
        """Warm up, and return the least seconds of a call; makes one if they have to be known."""
        warm = self._options.warmup_iters or (0 if self._options.iters else 1)
        return min((self._timer.time(call) for _ in range(warm)), default=0.0)

    def _figures(self, case: Case, times: Times) -> Result:
        """Return the figures of one call for the table and --json."""
        every = [1e6 * seconds for seconds in times.seconds]
        if self._options.latency:
            percentiles = np.percentile(every, list(PERCENTILES.values())).tolist()
            return dict(zip(PERCENTILES, percentiles, strict=True))
        took = statistics.median(every)
        found: Result = {"time": took, "algbw": None, "busbw": None, "times": every}
        found["spread"] = times.figure.relative_spread
        if case.size:
            found["algbw"] = case.size / took / 1e3  # bytes a microsecond are MB/s
            found["busbw"] = found["algbw"] * case.row.moved(case.n)
        return found

    # --- what is above the table ----------------------------------------------------------------

    def _facts(self) -> Result:
        """Return the machine and versions of this run: rank 0's, on all ranks."""
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
            "machine": f"{machine.describe()}, rank 0 may use {len(os.sched_getaffinity(0))}",
            "MPI": f"{name} {'.'.join(map(str, version))}",
            "mpicoll": mpicoll.__version__,
            "mpi4py": mpi4py.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "reductions": library.describe(),
            "arrays": self._place.name,
            "load": load,
            "crowded": doctor_machine.find_crowded(
                control_messages.allgather(
                    self._comm, doctor_machine.Place.find(), doctor_machine.Place
                )
            ),
        }
        return control_messages.bcast(self._comm, facts, 0, Result)

    def _header(self, facts: Result) -> list[str]:
        options, nodes = self._options, facts["nodes"]
        where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes ({nodes[0]}, ...)"
        if options.latency:
            calls = options.iters or f"as many as fit into {_LATENCY.seconds:g} s"
            how = f"one call at a time ({calls})"
        else:
            calls = options.iters or f"as many as fit into {_REPETITION.sample:g} s"
            how = f"median of {options.repetitions} repetitions, each of calls in a loop ({calls})"
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
            f"time: {how} after a barrier, by time.perf_counter, of {whose[options.average]}"
            + ("; async_op=True and wait()" if options.waits else "")
        )
        if self._others:
            lines.append("ratio: the other's time over mpicoll's")
        return self._comments([*lines, *self._notes, *facts["crowded"]])

    def _comments(self, lines: Sequence[str]) -> list[str]:
        if self._options.short:
            lines = [part for line in lines for part in textwrap.wrap(line, 98)]
        return [f"# {line}" for line in lines]


def count_wrong(call: Call, case: Case, buffers: Buffers, variant: str, place: Place) -> int:
    """Fill the arrays, make the call, and count the wrong elements on this rank."""
    assert case.dtype is not None
    input, output = buffers.of(case, variant)
    read = output if case.row.layout is Layout.IN_PLACE else input
    for block in output.blocks if output else ():
        block.view(np.uint8).fill(0)
    # A rank with nothing to read has contents without meaning, or none.
    for block, pattern in zip(read.blocks if read else (), contents(case), strict=False):
        fill(block, pattern, case.dtype, place.put)
    call()
    place.settle()
    pairs = zip(output.blocks if output else (), expected(case), strict=True)
    return sum(wrong(block, right, case.dtype, place.get) for block, right in pairs)
