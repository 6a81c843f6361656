"""Measuring a line of the table of ``python -m mpicoll bench``."""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence

import mpi4py
import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll import cli
from mpicoll.cli import bench_table, doctor_machine
from mpicoll.cli.bench_calls import Buffers, Call, Case, Other, Place, op_name, own_call, variants
from mpicoll.cli.bench_check import contents, expected, fill, wrong
from mpicoll.cli.bench_table import PERCENTILES, Result
from mpicoll.core import tables
from mpicoll.kernels import library
from mpicoll.primitives import Layout

__all__ = ["Bench", "count_wrong"]

#: Seconds that a repetition is to take, and that --latency takes for a line, where -n is not given.
_REPETITION, _LATENCY = 0.01, 0.2
#: Calls in a repetition, and calls with --latency, at the least and at the most.
_CALLS, _SAMPLES = (1, 1000), (20, 2000)


class Bench:
    """Measures and prints line by line; every rank has one.

    comm:   of all ranks, and of nobody else.
    place:  where the arrays are.
    others: who makes the same calls beside, by name.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        comm: MPI.Intracomm,
        place: Place,
        others: Mapping[str, Other],
    ) -> None:
        self._options = options
        self._comm = comm
        self._place = place
        self._others = others
        self._first = comm.Get_rank() == 0

    def run(self, cases: Iterable[Case]) -> Result:
        """Makes a table of each primitive; returns what --json writes, on all ranks."""
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
                results.append(self._line(case))
                self._print(["".join(column.text(results[-1]) for column in columns)])
            self._print(bench_table.foot(results[start:], self._options.check, short))
            averages[row.name] = bench_table.average(results[start:])
        return {
            **facts,
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

    # --- one line -------------------------------------------------------------------------------

    def _line(self, case: Case) -> Result:
        self._progress(f"{case.row.name} of {case.size} bytes")
        buffers = Buffers(case, self._place)
        own = variants(case.row)
        calls: dict[str, Call] = {
            name: own_call(case, buffers, name, self._options.waits) for name in own
        }
        for name, other in self._others.items():
            call = other.call(case, buffers)
            if call is not None and self._works(call):
                calls[name] = call
        told = {name: self._told(case, times) for name, times in self._measure(calls).items()}
        if self._options.check and case.dtype is not None:
            for name in own:
                found = count_wrong(calls[name], case, buffers, name, self._place)
                told[name]["wrong"] = self._comm.allreduce(found)
        typical = "p50" if self._options.latency else "time"
        for name in self._others:
            if name in told:
                told[name]["ratio"] = told[name][typical] / told[own[0]][typical]
        return {
            "primitive": case.row.name,
            "size": case.size,
            "count": case.count,
            "type": case.dtype.name if case.dtype else "none",
            "redop": op_name(case.op) if case.op else "none",
            "root": case.root if case.row.root else -1,
            "out_of_place": told.get("out_of_place"),
            "in_place": told.get("in_place"),
            "compare": {name: told.get(name) for name in self._others},
        }

    def _works(self, call: Call) -> bool:
        """All ranks can make the call; libraries refuse what they do not have in many ways."""
        try:
            call()
        except Exception:
            works = False
        else:
            works = True
        return all(self._comm.allgather(works))

    def _measure(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Microseconds a call, one for each repetition; the calls take turns."""
        comm, average = self._comm, self._options.average
        once = {name: self._once(call) for name, call in calls.items()}
        repetitions, iterations = comm.bcast(self._plan(once), 0)
        times = np.zeros((len(calls), repetitions))
        for repetition in range(repetitions):
            for i, (name, call) in enumerate(calls.items()):
                took = self._timed(call, iterations[name])
                times[i, repetition] = 1e6 * took / iterations[name]
        if average == 0:
            comm.Bcast(times, 0)
        else:
            comm.Allreduce(MPI.IN_PLACE, times, (MPI.SUM, MPI.MIN, MPI.MAX)[average - 1])
        if average == 1:
            times /= comm.Get_size()
        return dict(zip(calls, times.tolist(), strict=True))

    def _plan(self, once: Mapping[str, float]) -> tuple[int, dict[str, int]]:
        """How many repetitions, and how many calls in each; ``once``: the seconds of a call."""
        given = self._options.iters
        if self._options.latency:
            wanted = given or _within(_SAMPLES, _LATENCY / sum(once.values()))
            return wanted, dict.fromkeys(once, 1)
        calls = {name: given or _within(_CALLS, _REPETITION / took) for name, took in once.items()}
        return self._options.repetitions, calls

    def _once(self, call: Call) -> float:
        """Seconds of a call, the least of those that warm up; of one where there are none and it
        has to be known.
        """
        warm = self._options.warmup_iters or (0 if self._options.iters else 1)
        return min((self._timed(call, 1) for _ in range(warm)), default=0.0)

    def _timed(self, call: Call, iterations: int) -> float:
        """Seconds of so many calls."""
        self._place.settle()
        self._comm.Barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            call()
        self._place.settle()
        return time.perf_counter() - start

    def _told(self, case: Case, times: list[float]) -> Result:
        """What is told of one call, from the times of its repetitions."""
        if self._options.latency:
            percentiles = np.percentile(times, list(PERCENTILES.values())).tolist()
            return dict(zip(PERCENTILES, percentiles, strict=True))
        took = statistics.median(times)
        told: Result = {"time": took, "algbw": None, "busbw": None, "times": times}
        if case.size:
            told["algbw"] = case.size / took / 1e3  # bytes a microsecond are MB/s
            told["busbw"] = told["algbw"] * case.row.moved(case.n)
        return told

    # --- what is above the table ----------------------------------------------------------------

    def _facts(self) -> Result:
        """Where and with what, rank 0's on all ranks."""
        nodes = self._comm.allgather(platform.node())
        name, version = MPI.get_vendor()
        facts = {
            "command": " ".join(sys.argv[1:]),
            "ranks": len(nodes),
            "nodes": list(dict.fromkeys(nodes)),
            "machine": f"{tables.machine()}, rank 0 may use {len(os.sched_getaffinity(0))}",
            "MPI": f"{name} {'.'.join(map(str, version))}",
            "mpicoll": mpicoll.__version__,
            "mpi4py": mpi4py.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
            "reductions": library.describe(),
            "arrays": self._place.name,
            "crowded": doctor_machine.find_crowded(
                self._comm.allgather(doctor_machine.Place.find())
            ),
        }
        told: Result = self._comm.bcast(facts, 0)
        return told

    def _header(self, facts: Result) -> list[str]:
        options, nodes = self._options, facts["nodes"]
        where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes ({nodes[0]}, ...)"
        if options.latency:
            how = f"one call at a time ({options.iters or f'as many as fit into {_LATENCY:g} s'})"
        else:
            calls = options.iters or f"as many as fit into {_REPETITION:g} s"
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
        if options.compare:
            lines.append("ratio: the other's time over mpicoll's")
        lines += facts["crowded"]
        if options.short:
            lines = [part for line in lines for part in textwrap.wrap(line, 98)]
        return [f"# {line}" for line in lines]


def count_wrong(call: Call, case: Case, buffers: Buffers, variant: str, place: Place) -> int:
    """Fills the arrays, makes the call, and counts the elements that are wrong on this rank."""
    assert case.dtype is not None
    input, output = buffers.of(case, variant)
    read = output if case.row.layout is Layout.IN_PLACE else input
    for block in output.blocks if output else ():
        block.view(np.uint8).fill(0)
    # Who has nothing to read has contents of no meaning, or none.
    for block, pattern in zip(read.blocks if read else (), contents(case), strict=False):
        fill(block, pattern, case.dtype, place.put)
    call()
    place.settle()
    pairs = zip(output.blocks if output else (), expected(case), strict=True)
    return sum(wrong(block, right, case.dtype, place.get) for block, right in pairs)


def _within(limits: tuple[int, int], wanted: float) -> int:
    return min(max(round(wanted), limits[0]), limits[1])
