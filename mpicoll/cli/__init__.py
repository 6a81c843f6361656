"""The commands: ``python -m mpicoll COMMAND``, alone or on all ranks of a job.

A command is a module here with ``add_arguments(parser)`` and ``run(options)``, which returns the
exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Protocol, cast

from mpicoll import __version__, launch
from mpicoll.errors import MpicollError
from mpicoll.launch import exit_hooks
from mpicoll.launch.exit_hooks import INTERRUPTED
from mpicoll.output import write_lines

__all__ = [
    "COMMANDS",
    "is_first_rank",
    "main",
    "parse_size",
    "refuse",
    "show_progress",
    "start_group",
]

#: What each command does, by its name, which is that of its module.
COMMANDS: dict[str, str] = {
    "bench": "what collectives take here, and whether they are right",
    "doctor": "what was found here, how calls are carried out, and what to change",
    "hello": "one line from each rank",
    "run": "a PyTorch script as it is, with mpicoll for the backend that it names",
    "trace": "flight records of all ranks as one timeline, for Perfetto",
    "tune": "what carries messages of which size best here, measured, for later jobs to go by",
    "watch": "what the ranks of a running job do, asked from outside",
}

#: Seconds that the others leave rank 0 to print: mpirun, and srun --kill-on-bad-exit, end all ranks
#: once one has failed.
A_MOMENT = 2.0
#: Seconds after which a rank that did not come is missing.
LIMIT = 120.0
#: Seconds between two lines of progress where a line cannot be replaced.
PACE = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Exit with code 2 for a bad command line."""
    exit_hooks.remove()  # a command ends in its own way
    _end_quietly()
    with contextlib.ExitStack() as quiet:
        if not is_first_rank():
            nowhere = quiet.enter_context(open(os.devnull, "w"))  # noqa: PTH123
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        parser = _parser()
        try:
            options = parser.parse_args(arguments)
        except SystemExit as end:
            if end.code and not is_first_rank():
                time.sleep(A_MOMENT)
            raise
        if options.command is None:
            parser.print_help()
            return 0
    return _module(options.command).run(options)


class _Parser(argparse.ArgumentParser):
    """Suggests the closest command for a misspelt one."""

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in COMMANDS:
            close = difflib.get_close_matches(value, COMMANDS, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(COMMANDS)}"
            self.error(f"{value}: there is no such command; {hint}")
        super()._check_value(action, value)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m mpicoll", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mpicoll {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        _module(name).add_arguments(command)
    return parser


class _Command(Protocol):
    """What a module of a command has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command and return its exit code."""


def _module(name: str) -> _Command:
    return cast("_Command", importlib.import_module(f"mpicoll.cli.{name}"))


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher made this process rank 0, which prints before MPI runs."""
    return launch.find_rank(environment) in ("", "0")


def start_group() -> str:
    """Create the default group of all ranks; return why that failed, "" if it did not."""
    import mpicoll as dist

    try:
        dist.init_process_group(timeout=LIMIT)
    except MpicollError as error:
        if not is_first_rank():
            time.sleep(A_MOMENT)
        return str(error)
    return ""


def refuse(command: str, why: str, speaks: bool, code: int) -> int:
    """Print on one rank why a command cannot do what is asked for, and return ``code``."""
    if speaks:
        write_lines(f"python -m mpicoll {command}: error: {why}")
    return code


def parse_size(text: str) -> int:
    """Parse a number of bytes, with K, M, G or T for 1024 and its powers."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.strip(), re.IGNORECASE)
    unit = 1024 ** " KMGT".index(found[2].upper() or " ") if found else 1
    nbytes = int(Fraction(found[1]) * unit) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: expected a number of bytes, at least 1, or one with K, M, G, T"
        )
    return nbytes


def show_progress(text: str) -> None:
    """Show progress in a line of the terminal that the next one replaces; "" removes it.

    Elsewhere, as under mpirun, print a plain line if the last is ``PACE`` seconds old; "" counts
    as a line.
    """
    global _last_shown
    now = time.monotonic()
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
    elif not text or _last_shown is None:
        _last_shown = now
    elif now - _last_shown >= PACE:
        _last_shown = now
        write_lines(text)


#: When ``show_progress`` spoke last, or began.
_last_shown: float | None = None


def _end_quietly() -> None:
    """Make Ctrl-C end the job with one line, whatever this rank is doing.

    A thread listens, because a main thread that is blocked inside MPI runs no Python. The watchdog
    of a process group leaves signals to an existing listener.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, lambda *_: threading.Event().wait())  # no more is done
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reader,), name="mpicoll-signals", daemon=True).start()


def _listen(reader: int) -> None:
    while os.read(reader, 1)[0] != signal.SIGINT:
        pass
    if not is_first_rank():
        time.sleep(A_MOMENT)  # rank 0 speaks, if it was interrupted too, and ends the job
    show_progress("")
    write_lines("interrupted")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI libraries comment on MPI_Abort
    try:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            from mpicoll.failures.termination import end_job

            end_job(INTERRUPTED)
    finally:
        os._exit(INTERRUPTED)
