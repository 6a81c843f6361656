"""``python -m mpicoll tune``: measure the fastest route for each message size on this machine, and
save a table that init_process_group reads.

``tune_measure`` measures, ``tune_steps`` chooses routes, and ``mpicoll.routes.tuning`` defines the
format of tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import secrets
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll import __version__, cli, control_messages, machine, settings
from mpicoll.cli.distance import DISTANCES, UNKNOWN
from mpicoll.cli.timing import MAX_SPREAD
from mpicoll.cli.tune_steps import choose_steps, find_changes, find_noise, splice
from mpicoll.core.groups import default_group
from mpicoll.errors import ArgumentError
from mpicoll.output import format_bytes
from mpicoll.routes import tuning, tuning_files
from mpicoll.routes.tuning import DEFAULT, Rows, Steps

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpicoll.cli.timing import Effort
    from mpicoll.cli.tune_measure import Kind, Outcome

__all__ = ["add_arguments", "run"]

#: Additional memory per rank that routes and MPI may use.
_SCRATCH_BYTES = 64 << 20

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
    add("--seconds", type=_seconds, metavar="N",
        help="time limit (default: 60; 8 with --quick)")  # fmt: skip
    add("--quick", action="store_true", help="fewer and shorter repetitions")
    add("--json", type=Path, metavar="FILE", help="write all measurements as JSON")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--force", action="store_true",
        help=f"write the table even if times vary by more than {MAX_SPREAD:.0%}%")  # fmt: skip
    instead.add_argument("--dry-run", action="store_true",
        help="measure, and print the table instead of writing it")  # fmt: skip
    instead.add_argument("--reset", action="store_true",
        help="remove the table and exit")  # fmt: skip


def _sizes(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    least, most = cli.parse_size(first), cli.parse_size(last if colon else first)
    if least > most:
        raise argparse.ArgumentTypeError(f"{text!r}: the first size is larger than the last")
    return [least << i for i in range((most // least).bit_length())]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return seconds


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
    """The job to tune.

    mpi:   name and version of the MPI library.
    ranks: number of ranks.
    nodes: names of their nodes.
    place: placement of the ranks, as in tables.
    """

    mpi: str
    ranks: int
    nodes: list[str]
    place: str

    @property
    def where(self) -> str:
        """Description of the nodes."""
        n = len(self.nodes)
        return f"{n} node{'s' * (n > 1)} ({self.nodes[0]}{', ...' * (n > 1)})"

    def default(self, kind: str) -> Steps:
        """Return the steps of the default table."""
        return tuning.job.table.row(kind, self.ranks)[self.place]


def _with_ranks(options: argparse.Namespace, named: str, begin: float) -> int:
    from mpi4py import MPI

    from mpicoll.cli.tune_measure import FULL, QUICK, find_kinds, measure
    from mpicoll.routes.host.select import place

    group = default_group()
    comm, first = group.inner, group.rank() == 0
    vendor, version = MPI.get_vendor()
    mpi = f"{vendor} {'.'.join(map(str, version))}"
    target, wrong = None, ""
    if first:
        try:
            target = _target(options.output, named, mpi)
            if options.reset:
                print(_remove(target, mpi), flush=True)
            else:
                _check_files(target, mpi, options)
        except ArgumentError as error:
            wrong = str(error)
    wrong = control_messages.bcast(comm, wrong, 0, str)
    if not wrong and group.size() == 1 and not options.reset:
        wrong = (
            "one rank has only one route: start the number of ranks of your jobs (mpirun -n ...)"
        )
    if wrong:
        return cli.refuse("tune", wrong, first, 2)
    if options.reset:
        return 0
    kinds, here = find_kinds(list(dict.fromkeys(options.kinds)), group), place(group)
    if not kinds:
        wrong = f"{_PLACES[here]}: only one route is available for {', '.join(options.kinds)}"
    wrong = wrong or _out_of_memory(comm, kinds, options.sizes[-1])
    if wrong:
        return cli.refuse("tune", wrong, first, 2)
    effort = QUICK if options.quick else FULL
    effort = effort._replace(seconds=options.seconds or effort.seconds)
    nodes = control_messages.allgather(comm, platform.node(), str)
    setting = _Setting(mpi, group.size(), list(dict.fromkeys(nodes)), here)
    if first:
        print("\n".join(_header(setting, kinds, options.sizes, effort)), flush=True)

    def spent() -> float:
        return time.perf_counter() - begin

    def progress(text: str) -> None:
        if first:
            cli.show_progress(f"tune: {text}")

    outcome = measure(group, kinds, options.sizes, effort, spent, progress)
    code = 0
    if target is not None:
        cli.show_progress("")
        code = _finish(setting, outcome, [kind.name for kind in kinds], options, target)
    return control_messages.bcast(comm, code, 0, int)


# --- before -------------------------------------------------------------------------------------


class _Target(NamedTuple):
    """The file of the table.

    found: whether jobs with this environment read it.
    own:   whether it is the default file of this MPI and machine.
    """

    path: Path
    found: bool
    own: bool


def _target(output: Path | None, named: str, mpi: str) -> _Target:
    """Return the file of the table. Raises ArgumentError without a default."""
    if output is not None:
        return _Target(output, False, False)
    if named not in ("", "0"):
        return _Target(Path(named), True, False)
    try:
        return _Target(tuning_files.default_path(mpi), named != "0", True)
    except RuntimeError as error:
        raise ArgumentError(f"{error}; name a file with --output") from error


def _remove(target: _Target, mpi: str) -> str:
    """Remove the table; return a message. Raises ArgumentError if the file is not a table."""
    path = target.path
    try:
        if not path.exists():
            return f"# there is no table at {path}"
        if not _read(path, mpi):
            raise ArgumentError(f"{path} is not a tuning table: it is empty; not removed")
        path.unlink()
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be removed: {error.strerror}") from error
    unset = "; unset MPICOLL_TABLE, which refers to it" if target.found and not target.own else ""
    return f"# removed {path}{unset}"


def _check_files(target: _Target, mpi: str, options: argparse.Namespace) -> None:
    """Raise ArgumentError if a file cannot be written or extended."""
    path, figures = target.path, options.json
    _read(path, mpi)
    if figures is not None and figures.resolve() == path.resolve():
        raise ArgumentError(f"{path}: --output and --json name the same file")
    if not options.dry_run:
        if target.own:
            _make_folder(path.parent)
        _check_writable(path)
    if figures is not None:
        _check_writable(figures)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"{error}; name a file with --output") from error


def _read(path: Path, mpi: str) -> str:
    """Return the text of the table, or "". Raises ArgumentError if it cannot be extended."""
    try:
        text = path.read_text(errors="replace") if path.exists() else ""
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from error
    if not text:
        return ""
    try:
        tuning_files.parse(text)
    except ValueError as error:
        raise ArgumentError(
            f"{path} is not a tuning table: {error}; remove it, or set another file with --output"
        ) from error
    other = tuning_files.origin_mismatch(text, mpi)
    if other:
        raise ArgumentError(
            f"{path} was measured with {other}, but this is {mpi} on {machine.describe()}; remove "
            "it, or set another file with --output"
        )
    return text


def _check_writable(path: Path) -> None:
    """Raise ArgumentError if a file cannot be written."""
    folder = path.absolute().parent
    try:
        if not folder.is_dir():
            raise ArgumentError(f"{path}: there is no folder {folder}")
        if path.exists():
            path.open("a").close()
        probe = _temporary(path)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be written: {error.strerror}") from error


def _temporary(path: Path) -> Path:
    """Return a new name in the folder of a file, with links resolved."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _out_of_memory(comm: MPI.Intracomm, kinds: Sequence[Kind], largest: int) -> str:
    """Return why the arrays do not fit into memory, the same on all ranks, or ""."""
    from mpicoll.cli.bench_calls import Memory
    from mpicoll.cli.tune_measure import array_bytes

    memory, n = Memory(), comm.Get_size()
    whole = array_bytes(kinds, n, largest)
    needed = whole + whole // n + _SCRATCH_BYTES
    problem = cli.out_of_memory(comm, memory.pool, needed, memory.available())
    return f"--sizes: {format_bytes(largest)} {problem}" if problem else ""


def _header(
    setting: _Setting, kinds: Sequence[Kind], sizes: Sequence[int], effort: Effort
) -> list[str]:
    """Return the header of the output."""
    routes = sum(len(kind.candidates) for kind in kinds)
    lines = [
        f"{setting.ranks} ranks on {setting.where}: {machine.describe()}",
        f"{setting.mpi}, mpicoll {__version__}; {_PLACES[setting.place]}",
        f"{routes} routes of {len(kinds)} kinds of calls, {format_bytes(sizes[0])} to "
        f"{format_bytes(sizes[-1])}: takes at most {effort.seconds:g} s",
    ]
    return [f"# {line}" for line in lines]


# --- after --------------------------------------------------------------------------------------


def _finish(
    setting: _Setting,
    outcome: Outcome,
    kinds: Sequence[str],
    options: argparse.Namespace,
    target: _Target,
) -> int:
    """Write the table and print the changes; return the exit code."""
    path = target.path
    try:
        text = _read(path, setting.mpi)
        noise = find_noise(outcome.figures.values())
        rows = _rows(setting, outcome, text)
        if options.json:
            report = _report(setting, outcome, noise, rows)
            _write(options.json, json.dumps(report, indent=1) + "\n")
        if not rows:
            why = "timed out: too few measurements; increase --seconds"
            return cli.refuse("tune", why, True, _UNRELIABLE)
        about = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "mpicoll": __version__,
            "where": setting.where,
            "sizes": " to ".join(map(format_bytes, (options.sizes[0], max(outcome.last.values())))),
            "repetitions": outcome.samples,
            "noise": f"{noise:.1%}",
            "distance of the ranks": " and ".join(_distances(outcome)),
        }
        table = tuning_files.join(text, setting.mpi, setting.ranks, rows, about)
        lines = [*_changes(setting, outcome, text, table), *_missing(outcome, kinds, options.sizes)]
        lines.append(f"# {outcome.distance}")
        print("\n".join(lines), flush=True)
        print(f"# times vary by {noise:.1%}, at most {MAX_SPREAD:.0%} for a table", flush=True)
        if options.dry_run:
            print(table, end="", flush=True)
        if noise > MAX_SPREAD and not options.force:
            why = (
                f"times vary by {noise:.1%}, more than {MAX_SPREAD:.0%}: the machine is busy, and "
                "no table was written; stop other programs, start at most one rank per processor, "
                "increase --seconds, or use --force"
            )
            return cli.refuse("tune", why, True, _UNRELIABLE)
        if not options.dry_run:
            _write(path, table)
    except (ArgumentError, OSError) as error:
        return cli.refuse("tune", str(error), True, 1)
    if options.dry_run:
        print(f"# not written to {path}: dry run")
        return 0
    print(f"# written to {path}")
    if target.found:
        print("# jobs with this environment use it; check with python -m mpicoll doctor")
    else:
        print(f"# jobs with MPICOLL_TABLE={path.absolute()} use it")
    return 0


def _rows(setting: _Setting, outcome: Outcome, text: str) -> Rows:
    """Return the measured steps, merged into the existing table."""
    known = tuning_files.parse(text).get(setting.ranks, {}) if text else {}
    rows: Rows = {}
    for kind, figures in outcome.figures.items():
        before = known.get(kind, {}).get(setting.place, ((0, DEFAULT),))
        steps = choose_steps(figures, setting.default(kind))
        rows[kind] = {setting.place: splice(before, steps, outcome.last[kind])}
    return rows


def _changes(setting: _Setting, outcome: Outcome, before: str, after: str) -> list[str]:
    """Return the changes from the existing table, or from the defaults."""
    was, now = (tuning.Table(tuning_files.parse(text) if text else {}) for text in (before, after))
    lines, distances = [], _distances(outcome)
    for kind, figures in outcome.figures.items():
        steps = (table.row(kind, setting.ranks)[setting.place] for table in (was, now))
        for each in find_changes(figures, *steps):
            end = format_bytes(outcome.last[kind] if each.end is None else each.end)
            gains = [f"{each.gains[d]:.2f} x" if d in each.gains else "-" for d in distances]
            lines.append(
                f"{kind:<26}{format_bytes(each.first):<11}{end:<11}{each.was:<13}{each.now:<13}"
                + "".join(map("{:<14}".format, gains)).rstrip()
            )
    faster = [f"faster, {d}" if d != UNKNOWN else "faster" for d in distances]
    head = f"{'kind of call':<26}{'from':<11}{'to':<11}{'before':<13}{'now':<13}"
    head += "".join(map("{:<14}".format, faster)).rstrip()
    return [head, *lines] if lines else ["# no route is faster than the current one"]


def _distances(outcome: Outcome) -> list[str]:
    """Return the distances of the ranks that occurred, in the order of ``DISTANCES``."""
    sizes = [at_size for figures in outcome.figures.values() for at_size in figures.values()]
    return [distance for distance in DISTANCES if any(distance in each for each in sizes)]


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


def _report(setting: _Setting, outcome: Outcome, noise: float, rows: Rows) -> dict[str, Any]:
    """Return the data of --json."""
    return {
        **setting._asdict(),
        "machine": machine.describe(),
        "mpicoll": __version__,
        "repetitions": outcome.samples,
        "noise": noise,
        "distance": outcome.distance,
        "figures": {
            kind: [
                {
                    "bytes": size,
                    "distance": distance,
                    **{name: one._asdict() for name, one in by_route.items()},
                }
                for size, at_size in figures.items()
                for distance, by_route in at_size.items()
            ]
            for kind, figures in outcome.figures.items()
        },
        "steps": rows,
    }


def _write(path: Path, text: str) -> None:
    """Write a file atomically, because other jobs may read it."""
    temporary = _temporary(path)
    try:
        temporary.write_text(text)
        temporary.replace(path.resolve())
    finally:
        temporary.unlink(missing_ok=True)
