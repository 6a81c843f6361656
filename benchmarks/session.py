"""A launch of ranks that measure: supported calls, times, and the file of results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aims import FACADE, GLOO, KIB, TORCH, format_seconds
from contestants import PLACE, World

from mpicoll import cli
from mpicoll.cli.bench_calls import Buffers, Case, count_wrong, fresh, ring, variants
from mpicoll.cli.bench_others import works_on_all
from mpicoll.cli.timing import Call, Effort, Fresh, Samples, Timed
from mpicoll.dtypes import DType
from mpicoll.primitives import Primitive

#: Size in bytes of the call that checks a contestant before it is timed.
CHECKED = 64 * KIB


class Session:
    """A launch of ranks that measure.

    largest: maximum size in bytes.
    alone:   the primitive and the contestant of the section memory.
    primitives: the primitives to measure, or None for those of the sections.
    results: the content of the file.
    """

    def __init__(
        self, world: World, effort: Effort, largest: int, alone: tuple[str, ...],
        primitives: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.world, self.effort, self.largest, self.alone = world, effort, largest, alone
        self.primitives = primitives
        self.results: dict[str, Any] = world.facts()
        self._working: dict[tuple[Primitive, DType | None], list[str]] = {}
        for problem in world.problems:
            self.leave_out(problem)

    def fresh_calls(self, case: Case) -> dict[str, Fresh]:
        """Return the calls of each contestant on new buffers, to be timed with new data."""
        buffers = ring(case, PLACE)
        every = [self.calls(case, each) for each in buffers]
        return {name: fresh(case, buffers, [each[name] for each in every]) for name in every[0]}

    def calls(self, case: Case, buffers: Buffers) -> dict[str, Call]:
        """Return the call of each contestant that supports it with correct results on all ranks."""
        key = case.row, case.dtype
        if key not in self._working:
            assert case.dtype is not None
            self._working[key] = self._find_working(
                self.world.case(case.row.name, CHECKED, case.dtype)
            )
        found = {name: self.world.contestants[name] for name in self._working[key]}
        calls = {name: contestant.call(case, buffers) for name, contestant in found.items()}
        return {name: call for name, call in calls.items() if call is not None}

    def _find_working(self, case: Case) -> list[str]:
        """Return the names of contestants that support the call.

        Results of Gloo are not checked, because its reduce writes on every rank.
        """
        working = []
        for name, contestant in self.world.contestants.items():
            buffers = Buffers(case, PLACE)
            call = contestant.call(case, buffers)
            wrong = ""
            if not works_on_all(call, self.world.mpi) or call is None:
                wrong = "is not supported"
            elif name != GLOO:
                variant = variants(case.row)[0]
                found = count_wrong(call, case, buffers, variant, PLACE)
                wrong = "gives a wrong result" if self.world.mpi.allreduce(found) else ""
            if not wrong:
                working.append(name)
            elif name in (FACADE, TORCH) and call is not None:
                raise SystemExit(f"{case.row} of {case.dtype} by {name} {wrong}")
            else:
                self.leave_out(f"{case.row} of {case.dtype} by {name} {wrong}")
        return working

    def leave_out(self, reason: str) -> None:
        """Print and record a case that is not measured, once."""
        if reason not in self.results.get("left out", ()):
            self.line(f"left out: {reason}")
            self.results.setdefault("left out", []).append(reason)

    def measure(self, cases: Mapping[str, Timed], effort: Effort | None = None) -> Samples:
        """Time the cases."""
        return self.world.timer.measure(cases, effort or self.effort)

    def record(
        self, section: str, name: str, primitive: str, size: int, dtype: str,
        measured: Samples | None = None, label: str = "", **more: Any,
    ) -> None:  # fmt: skip
        """Record a measurement. label: the name of its samples, if it is not ``name``."""
        entry = {"section": section, "case": name, "primitive": primitive, **more}
        entry |= {"ranks": self.world.n, "bytes": size, "dtype": dtype}
        if measured is not None:
            times = measured[label or name]
            entry |= {
                "median": times.figure.median,
                "spread": times.figure.spread,
                "seconds": [float(f"{second:.4g}") for second in times],
            }
        self.results.setdefault("measurements", []).append(entry)

    def line(self, text: str = "") -> None:
        """Print a line on rank 0."""
        if self.world.me == 0:
            print(text, flush=True)

    def report(self, title: str, found: Samples) -> None:
        """Print a line with the medians of all cases."""
        medians = [f"{name} {format_seconds(one.figure.median)}" for name, one in found.items()]
        if len(medians) <= 5:
            self.line(f"{title:<40}{'  '.join(medians)}")
        else:
            self.line("\n    ".join([title, *medians]))

    def end(self, path: Path | None) -> None:
        """Write the file on rank 0, and destroy the process group."""
        if path and self.world.me == 0:
            path.write_text(json.dumps(self.results, indent=1) + "\n")
        self.world.close()


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add ``--json`` and parse the command line. Only rank 0 prints errors."""
    parser.add_argument("--json", type=_file, metavar="FILE", help="write the results to this file")
    with contextlib.ExitStack() as quiet:
        if not cli.is_first_rank():
            nowhere = quiet.enter_context(open(os.devnull, "w"))  # noqa: PTH123
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        return parser.parse_args()


def _file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no folder {path.absolute().parent}")
    return path
