"""``python -m mpicoll tune``: measure the fastest route for each message size on this machine, and
save a table that init_process_group reads.

``mpicoll.routes.tuning`` defines the format of tables.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import __version__, cli, control_messages, machine, settings
from mpicoll.cli.bench_calls import Case, Memory, block_count, find_memory_problem, fresh, ring
from mpicoll.cli.timing import MAX_SPREAD, Effort, Figure, Timed, Timer
from mpicoll.core.groups import ProcessGroup, default_group
from mpicoll.core.plan import CallKind
from mpicoll.dtypes import ReduceOp
from mpicoll.dtypes import by_name as dtype_of
from mpicoll.output import format_bytes
from mpicoll.primitives import by_name
from mpicoll.routes import tuning, tuning_files
from mpicoll.routes.tuning import DEFAULT, Rows, Steps, merge_steps, route_at

if TYPE_CHECKING:
    from mpi4py import MPI

#: Exit code if measurements are too few or too noisy for a table.
_UNRELIABLE = 3
#: Ratio of times above which a route is slower than another one, if the interquartile ranges of
#: their times do not overlap. A route slower than the default by this ratio is never used.
CLEAR_RATIO = 1.05
#: Maximum first size that represents all smaller sizes.
_SMALLEST_BYTES = 8
#: Descriptions of placements.
_PLACES = {
    "node": "ranks share the memory of one node",
    "nodes": "ranks are on several nodes, with shared memory on each",
    "apart": "ranks do not share memory",
}

#: Figures of a kind of call by size in bytes (0 for the smallest call), and by route.
Figures = Mapping[int, Mapping[str, Figure]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: what to measure, the time limit, and the output file."""
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE",
        help="the table (default: MPICOLL_TABLE, else a file for this machine)")  # fmt: skip
    add("--sizes", type=_sizes, default="8:64M", metavar="FIRST:LAST",
        help="sizes of the larger array in bytes, or with K, M, G or T: doubles from FIRST to LAST "
        "(default: 8:64M)")  # fmt: skip
    add("--kinds", nargs="+", choices=tuning.KINDS, default=list(tuning.KINDS), metavar="KIND",
        help=f"any of {', '.join(map(repr, tuning.KINDS))} (default: all)")  # fmt: skip
    add("--seconds", type=float, default=60.0, metavar="N", help="time limit (default: 60)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--force", action="store_true",
        help=f"write the table even if times vary by more than {MAX_SPREAD:.0%}%")  # fmt: skip
    instead.add_argument("--dry-run", action="store_true",
        help="measure, and print the table instead of writing it")  # fmt: skip


def _sizes(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    least, most = cli.parse_size(first), cli.parse_size(last if colon else first)
    if least > most:
        raise argparse.ArgumentTypeError(f"{text!r}: the first size is larger than the last")
    return [least << i for i in range((most // least).bit_length())]


def run(options: argparse.Namespace) -> int:
    """Run the command and print on rank 0.

    Returns the exit code: 1 for a failed init or write, 2 for invalid options or nothing to tune, 3
    if times vary too much or time was too short.
    """
    begin = time.perf_counter()
    named = settings.TABLE.value()
    os.environ[settings.TABLE.name] = "0"  # an existing table must not interfere
    return cli.run_in_group("tune", lambda: _tune(options, named, begin))


class _Setting(NamedTuple):
    """The job to tune, and its table."""

    mpi: str  # name and version of the MPI library
    ranks: int  # number of ranks
    where: str  # names of their nodes
    place: str  # placement of the ranks, as in tables
    path: Path  # file of the table


def _tune(options: argparse.Namespace, named: str, begin: float) -> int:
    from mpi4py import MPI

    from mpicoll.routes.host.select import place

    group = default_group()
    comm, first = group.inner, group.rank() == 0
    vendor, version = MPI.get_vendor()
    mpi = f"{vendor} {'.'.join(map(str, version))}"
    nodes = list(dict.fromkeys(control_messages.allgather(comm, platform.node(), str)))
    where = f"{len(nodes)} node{'s' * (len(nodes) > 1)} ({nodes[0]}{', ...' * (len(nodes) > 1)})"
    path, problem = _find_path(options, named, mpi) if first else (Path(), "")
    setting = _Setting(mpi, group.size(), where, place(group), path)
    problem = control_messages.bcast(comm, problem, 0, str)
    points = find_points(options.kinds, options.sizes, group)
    if not problem and setting.ranks == 1:
        problem = "one rank has only one route: start the number of ranks of your jobs"
    elif not problem and not points:
        names = ", ".join(options.kinds)
        problem = f"{_PLACES[setting.place]}: only one route is available for {names}"
    elif not problem:
        cases, count = [each.case for each in points], max(len(each.routes) for each in points)
        problem = find_memory_problem(comm, Memory(), cases, (), count)
        problem = f"--sizes: {problem}" if problem else ""
    if problem:
        return cli.refuse("tune", problem, first, 2)
    if first:
        span = " to ".join(map(format_bytes, (options.sizes[0], options.sizes[-1])))
        kinds = len({point.kind for point in points})
        print(
            f"# {setting.ranks} ranks on {where}: {machine.describe()}\n"
            f"# {mpi}, mpicoll {__version__}; {_PLACES[setting.place]}\n"
            f"# {kinds} kinds of calls, {span}: takes about {options.seconds:g} s at most",
            flush=True,
        )
    effort = Effort(options.seconds, 2e-3, 3, 25)
    outcome = measure(comm, points, effort, lambda: time.perf_counter() - begin)
    code = 0
    if first:
        code = _finish(setting, outcome, [point.kind for point in points], options)
        if code == 0 and not options.dry_run:
            is_found = options.output is None and named != "0"
            used = "this environment" if is_found else f"MPICOLL_TABLE={path.absolute()}"
            print(f"# written to {path}; jobs with {used} use it", flush=True)
    return control_messages.bcast(comm, code, 0, int)


# --- measuring ----------------------------------------------------------------------------------


class Point(NamedTuple):
    """A kind of call, by its name in tables, at a size."""

    kind: str
    #: Range of bytes that this size represents.
    least: int
    last: int
    routes: tuple[str, ...]  # routes that support the kind in the group
    case: Case


def find_points(names: Sequence[str], sizes: Sequence[int], group: ProcessGroup) -> list[Point]:
    """Return the points of the kinds that have several routes, by size. All ranks call it.

    Reductions are sums of float32, or of bfloat16 for dtypes that MPI does not reduce. Sizes that
    round to the same number of elements are one point.
    """
    from mpicoll.routes.host import select

    found, n = [], group.size()
    for name in dict.fromkeys(names):
        primitive, others = tuning.parse_kind(name)
        row = by_name.get(f"{primitive.name}_single", primitive)
        dtype = dtype_of["bfloat16" if others else "float32"]
        op = ReduceOp.SUM if row.reduces else None
        routes = tuple(select.candidates(CallKind(row, group, op, dtype)))
        if len(routes) < 2:
            continue
        every = [(block_count(row, dtype, n, size), size) for size in sizes]
        for count, same in groupby(every, itemgetter(0)):
            own = [size for _, size in same]
            is_least = count == 1 or (own[0] == sizes[0] and own[0] <= _SMALLEST_BYTES)
            case = Case(row, dtype, op, count, n, group.rank(), 0)
            last = max(case.size, *own)
            found.append(Point(name, 0 if is_least else own[0], last, routes, case))
    return sorted(found, key=lambda point: point.last)


class Outcome(NamedTuple):
    """Measurements."""

    figures: Mapping[str, Figures]  # by kind
    last: dict[str, int]  # by kind, the largest size in bytes


def measure(
    comm: MPI.Intracomm, points: Sequence[Point], effort: Effort, spent: Callable[[], float]
) -> Outcome:
    """Measure every route at every point. All ranks call it and get the same result.

    A kind ends at the first size that would take too long. A size is assumed to take at most twice
    the time of the previous one.

    spent: returns the seconds of ``effort`` that have passed; only the value of rank 0 is used.
    """
    from mpicoll.cli.bench_others import Route

    def find_left() -> float:
        return control_messages.bcast(comm, effort.seconds - spent(), 0, float)

    names = dict.fromkeys(name for point in points for name in point.routes)
    routes = {name: Route(name, "cpu") for name in names}
    timer, left = Timer(comm), find_left()
    figures: dict[str, dict[int, dict[str, Figure]]] = {}
    last: dict[str, int] = {}
    took: dict[str, float] = {}  # time of the previous size of a kind; infinite after the last one
    for number, point in enumerate(points):
        if 2 * took.get(point.kind, 0.0) >= left:
            took[point.kind] = math.inf
            continue
        case, buffers = point.case, ring(point.case, Memory())
        timed: dict[str, Timed] = {}
        for name in point.routes:
            calls = [call for each in buffers if (call := routes[name].call(case, each))]
            if calls:
                timed[name] = fresh(case, buffers, calls)
        found = timer.measure(timed, effort._replace(seconds=left / (len(points) - number)))
        own = {name: times.figure for name, times in found.items()}
        figures.setdefault(point.kind, {})[point.least] = own
        last[point.kind] = point.last
        before, left = left, find_left()
        took[point.kind] = before - left
    for route in routes.values():
        route.close()
    return Outcome(figures, last)


# --- choosing -----------------------------------------------------------------------------------


def choose_steps(figures: Figures, default: Steps) -> Steps:
    """Return the steps for the figures, starting at the smallest size.

    default: steps to keep unless others are faster.

    A size has the route of the previous size, or else the default's, unless it is slower than the
    fastest route by ``CLEAR_RATIO``. Otherwise it has the fastest one.
    """
    steps: list[tuple[int, str]] = []
    previous = None  # unless it is the default
    for size, by_route in sorted(figures.items()):
        usual = _find_usual(default, size, by_route)
        kept = [name for name in (previous, usual) if name and _is_fast(name, usual, by_route)]
        route = kept[0] if kept else _fastest(by_route)
        previous = None if route == usual else route
        steps.append((size, route))
    return merge_steps(steps)


def _fastest(by_route: Mapping[str, Figure]) -> str:
    return min(by_route, key=lambda name: by_route[name].median)


def _is_fast(name: str, usual: str | None, by_route: Mapping[str, Figure]) -> bool:
    """Return whether a route is not slower than the fastest route and the usual one."""
    if name not in by_route:
        return False
    own, best = by_route[name], by_route[_fastest(by_route)]
    if usual is not None and own.median > CLEAR_RATIO * by_route[usual].median:
        return False
    return own.low <= best.high or own.median <= CLEAR_RATIO * best.median


def _find_usual(steps: Steps, size: int, routes: Collection[str]) -> str | None:
    """Return the route of a size by these steps if only ``routes`` exist, or None."""
    had = [(least, route) for least, route in steps if route in routes]
    first = had[0][1] if had else None
    return next((route for least, route in reversed(had) if least <= size), first)


def describe_changes(
    kind: str, figures: Figures, default: Steps, steps: Steps, last: int
) -> list[str]:
    """Describe each range of sizes with another route, with its mean speedup, in one line."""
    sizes, lines = sorted(figures), []
    routes = [(_find_usual(default, s, figures[s]), route_at(steps, s)) for s in sizes]
    for (was, now), same in groupby(zip(sizes, routes, strict=True), itemgetter(1)):
        if was is None or was == now:
            continue
        span = [size for size, _ in same]
        gain = statistics.geometric_mean(
            figures[s][was].median / figures[s][now].median for s in span
        )
        end = next((size for size in sizes if size > span[-1]), last)
        lines.append(
            f"{kind:<26}{format_bytes(span[0]):<11}{format_bytes(end):<11}{was:<13}{now:<13}"
            f"{gain:.2f} x"
        )
    return lines


# --- the table ----------------------------------------------------------------------------------


def _find_path(options: argparse.Namespace, named: str, mpi: str) -> tuple[Path, str]:
    """Return the file of the table, and why it cannot be written or extended, or ""."""
    path: Path = options.output or Path(named)
    try:
        if options.output is None and named in ("", "0"):
            path = tuning_files.default_path(mpi)
            if not options.dry_run:
                path.parent.mkdir(parents=True, exist_ok=True)
        _read(path, mpi)
    except (OSError, RuntimeError, ValueError) as error:
        return path, f"{error}; remove it, or name another file with --output"
    return path, "" if options.dry_run else cli.find_write_problem(path)


def _read(path: Path, mpi: str) -> str:
    """Return the text of the table, or "". Raises OSError, or ValueError for another file."""
    text = path.read_text(errors="replace") if path.exists() else ""
    if text:
        try:
            tuning_files.parse(text)
        except ValueError as error:
            raise ValueError(f"{path} is not a tuning table: {error}") from error
        other = tuning_files.origin_mismatch(text, mpi)
        if other:
            raise ValueError(
                f"{path} was measured with {other}, but this is {mpi} on {machine.describe()}"
            )
    return text


def _write(path: Path, text: str) -> None:
    """Write a file atomically, because other jobs may read it."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _finish(
    setting: _Setting, outcome: Outcome, kinds: Sequence[str], options: argparse.Namespace
) -> int:
    """Print the changes, and write the table; return the exit code."""
    if not outcome.figures:
        why = "timed out: too few measurements; increase --seconds"
        return cli.refuse("tune", why, True, _UNRELIABLE)
    rows: Rows = {}
    lines: list[str] = []
    for kind, figures in outcome.figures.items():
        default = tuning.job.table.row(kind, setting.ranks)[setting.place]
        steps, last = choose_steps(figures, default), outcome.last[kind]
        smaller = [(0, DEFAULT)] if steps[0][0] else []
        rows[kind] = {setting.place: (*smaller, *steps, (last + 1, DEFAULT))}
        lines += describe_changes(kind, figures, default, steps, last)
    head = f"{'kind of call':<26}{'from':<11}{'to':<11}{'default':<13}{'now':<13}faster"
    lines = [head, *lines] if lines else ["# no route is faster than the default"]
    late = [
        kind + f" of more than {format_bytes(last)}" * bool(last)
        for kind in dict.fromkeys(kinds)
        for last in [outcome.last.get(kind, 0)]
        if last < options.sizes[-1]
    ]
    lines += [f"# not measured within --seconds: {', '.join(late)}"] * bool(late)
    noise = statistics.median(
        figure.relative_spread
        for figures in outcome.figures.values()
        for by_route in figures.values()
        for figure in by_route.values()
    )
    lines.append(f"# times vary by {noise:.1%}, at most {MAX_SPREAD:.0%} for a table")
    print("\n".join(lines), flush=True)
    about = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "mpicoll": __version__,
        "where": setting.where,
        "sizes": " to ".join(map(format_bytes, (options.sizes[0], max(outcome.last.values())))),
        "noise": f"{noise:.1%}",
    }
    try:
        text = _read(setting.path, setting.mpi)
        table = tuning_files.join(text, setting.mpi, setting.ranks, rows, about)
        if options.dry_run:
            print(f"{table}# not written to {setting.path}: dry run", flush=True)
        if noise > MAX_SPREAD and not options.force:
            why = (
                f"times vary by {noise:.1%}, more than {MAX_SPREAD:.0%}: the machine is busy, and "
                "no table was written; stop other programs, start at most one rank per processor, "
                "increase --seconds, or use --force"
            )
            return cli.refuse("tune", why, True, _UNRELIABLE)
        if not options.dry_run:
            _write(setting.path, table)
    except (OSError, ValueError) as error:
        return cli.refuse("tune", str(error), True, 1)
    return 0
