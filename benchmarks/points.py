"""Measuring one point: a call on so many bytes, by everybody who can make it."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from contestants import PLACE, World
from measure import FACADE, GLOO, KIB, MPI4PY, TORCH, Effort, Report, Times, measure_well, shown
from measure import Case as Timed

from mpicoll import cli
from mpicoll.cli.bench_calls import Buffers, Call, Case, variants
from mpicoll.cli.bench_measure import count_wrong
from mpicoll.dtypes import DType
from mpicoll.primitives import Primitive

#: Bytes of a call that is checked before any of its kind are timed.
CHECKED = 64 * KIB


class Bench:
    """What a section works with.

    largest: greater sizes are left out.
    """

    def __init__(self, world: World, report: Report, effort: Effort, largest: int) -> None:
        self.world, self.report, self.effort, self.largest = world, report, effort, largest
        self._able: dict[tuple[Primitive, DType | None], list[str]] = {}

    def upto(self, sizes: Sequence[int]) -> list[int]:
        """Those that are not left out."""
        return [size for size in sizes if size <= self.largest]

    def calls(self, case: Case, buffers: Buffers) -> dict[str, Call]:
        """The call by everybody who can make it, on all ranks, and whose result is right."""
        if (case.row, case.dtype) not in self._able:
            assert case.dtype is not None
            tried = self.world.case(case.row.name, CHECKED, case.dtype)
            self._able[case.row, case.dtype] = self._try(tried)
        calls = {}
        for name in self._able[case.row, case.dtype]:
            call = self.world.contestants[name].call(case, buffers)
            assert call is not None
            calls[name] = call
        return calls

    def _try(self, case: Case) -> list[str]:
        """Who makes this call, and right.

        Not looked at is what Gloo gives, whose reduce leaves something on every rank, and what MPI
        gives in the place of lists: it has an array of its own there.
        """
        able = []
        for name, contestant in self.world.contestants.items():
            buffers = Buffers(case, PLACE)
            call = contestant.call(case, buffers)
            wrong = ""
            if call is None or not self._works(call):
                wrong = "is refused"
            elif (
                name != GLOO
                and not (name == MPI4PY and case.row.listed)
                and self._wrong(call, case, buffers)
            ):
                wrong = "gives a wrong result"
            if not wrong:
                able.append(name)
            elif name in (FACADE, TORCH):
                raise SystemExit(f"{case.row} of {case.dtype} by {name} {wrong}")
            else:
                self.left_out(f"{case.row} of {case.dtype} by {name}: it {wrong}")
        return able

    def _works(self, call: Call) -> bool:
        """All ranks can make the call; libraries refuse what they do not have in many ways."""
        try:
            call()
        except Exception:
            works = False
        else:
            works = True
        return all(self.world.mpi.allgather(works))

    def _wrong(self, call: Call, case: Case, buffers: Buffers) -> bool:
        variant = variants(case.row)[0]
        return bool(self.world.mpi.allreduce(count_wrong(call, case, buffers, variant, PLACE)))

    def left_out(self, what: str) -> None:
        """Says once what is not measured."""
        if what not in self.report.record.get("left out", ()):
            self.report.line(f"left out: {what}")
            self.report.record.setdefault("left out", []).append(what)

    def timed(self, cases: Mapping[str, Timed]) -> dict[str, Times]:
        """The time of each case, with the effort that was asked for."""
        return measure_well(self.world.ranks, cases, self.effort)

    def record(
        self, section: str, name: str, primitive: str, size: int, dtype: str, times: Times,
        **more: Any,
    ) -> None:  # fmt: skip
        """Add a measurement to the file."""
        entry = {"section": section, "case": name, "primitive": primitive, **more}
        entry |= {"ranks": self.world.n, "bytes": size, "dtype": dtype, **times.record()}
        seconds = [float(f"{second:.4g}") for second in times.seconds]
        self.report.add("measurements", {**entry, "seconds": seconds})

    def tell(self, what: str, times: Mapping[str, Times]) -> None:
        """Print a line for a point."""
        told = [f"{name} {shown(each.median)}" for name, each in times.items()]
        if len(told) <= 5:
            self.report.line(f"{what:<36}{'  '.join(told)}")
        else:
            self.report.line("\n    ".join([what, *told]))


# --- the command line ----------------------------------------------------------------------------


@contextlib.contextmanager
def one_speaks() -> Iterator[None]:
    """In here rank 0 alone prints."""
    with contextlib.ExitStack() as quiet:
        if not cli.is_first_rank():
            nowhere = quiet.enter_context(open(os.devnull, "w"))  # noqa: PTH123
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def file(text: str) -> Path:
    """A file that can be made; raises ArgumentTypeError."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.absolute().parent}")
    return path
