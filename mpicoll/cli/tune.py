"""``python -m mpicoll tune``: measure the fastest route for each message size on this machine, and
save a table that init_process_group reads.

``tune_measure`` measures, ``tune_steps`` chooses routes, and ``mpicoll.routes.tuning`` defines the
format of tables.
"""

from __future__ import annotations

import argparse
import os
import platform
import secrets
import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mpicoll import __version__, cli, control_messages, machine, settings
from mpicoll.cli.distance import DISTANCES
from mpicoll.cli.timing import MAX_SPREAD
from mpicoll.cli.tune_steps import choose_steps, find_changes, splice
from mpicoll.core.groups import default_group
from mpicoll.output import format_bytes
from mpicoll.routes import tuning, tuning_files
from mpicoll.routes.tuning import DEFAULT, Rows

if TYPE_CHECKING:
    from mpicoll.cli.tune_measure import Outcome

__all__ = ["add_arguments", "run"]

#: Exit code if measurements are too few or too noisy for a table.
_UNRELIABLE = 3

#: Descriptions of placements.
_PLACES = {
    "node": "ranks share the memory of one node",
    "nodes": "ranks are on several nodes, with shared memory on each",
    "apart": "ranks do not share memory",
}


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
    add("--seconds", type=float, metavar="N",
        help="time limit (default: 60; 8 with --quick)")  # fmt: skip
    add("--quick", action="store_true", help="fewer and shorter repetitions")
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
    wrong = cli.start_group()
    if wrong:
        return cli.refuse("tune", wrong, cli.is_first_rank(), 1)
    code = _with_ranks(options, named, begin)
    cli.end_group()
    return code


class _Setting(NamedTuple):
    """The job to tune, and its table.

    mpi:   name and version of the MPI library.
    ranks: number of ranks.
    where: names of their nodes.
    place: placement of the ranks, as in tables.
    path:  file of the table.
    """

    mpi: str
    ranks: int
    where: str
    place: str
    path: Path


def _with_ranks(options: argparse.Namespace, named: str, begin: float) -> int:
    from mpi4py import MPI

    from mpicoll.cli.bench_calls import Memory, find_memory_problem
    from mpicoll.cli.tune_measure import FULL, QUICK, find_points, measure
    from mpicoll.routes.host.select import place

    group = default_group()
    comm, first = group.inner, group.rank() == 0
    vendor, version = MPI.get_vendor()
    nodes = list(dict.fromkeys(control_messages.allgather(comm, platform.node(), str)))
    where = f"{len(nodes)} node{'s' * (len(nodes) > 1)} ({nodes[0]}{', ...' * (len(nodes) > 1)})"
    mpi = f"{vendor} {'.'.join(map(str, version))}"
    path, wrong = _find_path(options, named, mpi) if first else (Path(), "")
    wrong = control_messages.bcast(comm, wrong, 0, str)
    if group.size() == 1:
        wrong = wrong or "one rank has only one route: start the number of ranks of your jobs"
    if wrong:
        return cli.refuse("tune", wrong, first, 2)
    points = find_points(options.kinds, options.sizes, group)
    setting = _Setting(mpi, group.size(), where, place(group), path)
    if points:
        cases, routes = [each.case for each in points], max(len(each.routes) for each in points)
        problem = find_memory_problem(comm, Memory(), cases, (), routes)
        wrong = f"--sizes: {problem}" if problem else ""
    else:
        wrong = f"{_PLACES[setting.place]}: only one route is available for "
        wrong += ", ".join(options.kinds)
    if wrong:
        return cli.refuse("tune", wrong, first, 2)
    effort = QUICK if options.quick else FULL
    effort = effort._replace(seconds=options.seconds or effort.seconds)
    kinds = list(dict.fromkeys(point.kind for point in points))
    if first:
        span = " to ".join(map(format_bytes, (options.sizes[0], options.sizes[-1])))
        print(
            f"# {setting.ranks} ranks on {where}: {machine.describe()}\n"
            f"# {mpi}, mpicoll {__version__}; {_PLACES[setting.place]}\n"
            f"# {len(kinds)} kinds of calls, {span}: takes about {effort.seconds:g} s at most",
            flush=True,
        )
    outcome = measure(comm, points, effort, lambda: time.perf_counter() - begin)
    code = 0
    if first:
        cli.show_progress("")
        code = _finish(setting, outcome, kinds, options)
        if code == 0 and not options.dry_run:
            is_found = options.output is None and named != "0"
            used = "this environment" if is_found else f"MPICOLL_TABLE={path.absolute()}"
            print(f"# written to {path}; jobs with {used} use it", flush=True)
    return control_messages.bcast(comm, code, 0, int)


# --- files --------------------------------------------------------------------------------------


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
    if not path.exists():
        return ""
    text = path.read_text(errors="replace")
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


# --- after --------------------------------------------------------------------------------------


def _finish(
    setting: _Setting, outcome: Outcome, kinds: Sequence[str], options: argparse.Namespace
) -> int:
    """Print the changes, and write the table; return the exit code."""
    if not outcome.figures:
        why = "timed out: too few measurements; increase --seconds"
        return cli.refuse("tune", why, True, _UNRELIABLE)
    measured = [
        at_distance
        for figures in outcome.figures.values()
        for at_size in figures.values()
        for at_distance in at_size.items()
    ]
    noise = statistics.median(
        one.relative_spread for _, by_route in measured for one in by_route.values()
    )
    occurred = {distance for distance, _ in measured}
    about = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "mpicoll": __version__,
        "where": setting.where,
        "sizes": " to ".join(map(format_bytes, (options.sizes[0], max(outcome.last.values())))),
        "noise": f"{noise:.1%}",
        "distance of the ranks": " and ".join(each for each in DISTANCES if each in occurred),
    }
    try:
        text = _read(setting.path, setting.mpi)
        table = tuning_files.join(
            text, setting.mpi, setting.ranks, _rows(setting, outcome, text), about
        )
        lines = [*_changes(setting, outcome, text, table), *_missing(outcome, kinds, options.sizes)]
        lines.append(f"# {outcome.distance}")
        lines.append(f"# times vary by {noise:.1%}, at most {MAX_SPREAD:.0%} for a table")
        print("\n".join(lines), flush=True)
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


def _rows(setting: _Setting, outcome: Outcome, text: str) -> Rows:
    """Return the measured steps, merged into the existing table."""
    known = tuning_files.parse(text).get(setting.ranks, {}) if text else {}
    rows: Rows = {}
    for kind, figures in outcome.figures.items():
        before = known.get(kind, {}).get(setting.place, ((0, DEFAULT),))
        usual = tuning.job.table.row(kind, setting.ranks)[setting.place]
        steps = choose_steps(figures, usual)
        rows[kind] = {setting.place: splice(before, steps, outcome.last[kind])}
    return rows


def _changes(setting: _Setting, outcome: Outcome, before: str, after: str) -> list[str]:
    """Return the changes from the existing table, or from the defaults."""
    tables = [tuning.Table(tuning_files.parse(text) if text else {}) for text in (before, after)]
    lines = [f"{'kind of call':<26}{'from':<11}{'to':<11}{'before':<13}{'now':<13}faster"]
    for kind, figures in outcome.figures.items():
        was, now = (table.row(kind, setting.ranks)[setting.place] for table in tables)
        for each in find_changes(figures, was, now):
            end = format_bytes(outcome.last[kind] if each.end is None else each.end)
            lines.append(
                f"{kind:<26}{format_bytes(each.first):<11}{end:<11}{each.was:<13}{each.now:<13}"
                f"{each.gain:.2f} x"
            )
    return lines if lines[1:] else ["# no route is faster than the current one"]


def _missing(outcome: Outcome, kinds: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Return lines about sizes that were not measured in time."""
    ends: dict[int, list[str]] = {}
    for kind in kinds:
        ends.setdefault(outcome.last.get(kind, 0), []).append(kind)
    return [
        f"# not measured within --seconds, not changed: {', '.join(names)}"
        + (f" of more than {format_bytes(last)}" if last else "")
        for last, names in sorted(ends.items())
        if last < sizes[-1]
    ]
