"""Commands: ``python -m mpicoll COMMAND``, alone or on all ranks of a job.

A command is a module with ``add_arguments(parser)`` and ``run(options)``, which returns the exit
code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from mpicoll import __version__
from mpicoll.errors import MpicollError
from mpicoll.launch import exit_hooks
from mpicoll.launch.exit_hooks import INTERRUPTED
from mpicoll.launch.launchers import find_rank
from mpicoll.output import write_lines

#: Descriptions of commands, by the names of their modules.
COMMANDS: dict[str, str] = {
    "bench": "time collectives and check their results",
    "doctor": "report the installation, the routes of calls, and what to change",
    "hello": "print one line from each rank",
    "run": "run an unmodified PyTorch script with mpicoll as its backend",
    "tune": "measure the fastest route for each message size, and save it for later jobs",
    "watch": "show the state of the ranks of a running job",
}

#: Time that other ranks wait before they exit, so that rank 0 can print: mpirun, and srun
#: --kill-on-bad-exit, kill all ranks once one has failed.
EXIT_DELAY_S = 2.0
#: Time to wait for missing ranks in init_process_group.
INIT_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Exit with code 2 for a bad command line."""
    exit_hooks.remove()  # a command handles its own errors
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
                time.sleep(EXIT_DELAY_S)
            raise
        if options.command is None:
            parser.print_help()
            return 0
    return int(_module(options.command).run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mpicoll", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mpicoll {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        _module(name).add_arguments(command)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"mpicoll.cli.{name}")


def is_first_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher made this process rank 0, which prints before MPI has started."""
    return find_rank(environment) in ("", "0")


def start_group() -> str:
    """Create the default group of all ranks. Returns an error message, or ""."""
    import mpicoll as dist

    try:
        dist.init_process_group(timeout=INIT_TIMEOUT_S)
    except MpicollError as error:
        if not is_first_rank():
            time.sleep(EXIT_DELAY_S)
        return str(error)
    return ""


def run_in_group(command: str, run: Callable[[], int]) -> int:
    """Run a command in the default group; return its exit code, 1 if there is no group."""
    if problem := start_group():
        return refuse(command, problem, is_first_rank(), 1)
    code = run()
    end_group()
    return code


def end_group() -> None:
    """Destroy all groups and restore Python's exit hooks for the rest of the command."""
    import mpicoll as dist

    dist.destroy_process_group()
    exit_hooks.remove()


def refuse(command: str, why: str, prints: bool, code: int) -> int:
    """Print an error on one rank, and return the exit code."""
    if prints:
        write_lines(f"python -m mpicoll {command}: error: {why}")
    return code


def parse_size(text: str) -> int:
    """Parse a number of bytes, with K, M, G or T for powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.strip(), re.IGNORECASE)
    unit = 1024 ** " KMGT".index(found[2].upper() or " ") if found else 1
    nbytes = int(Fraction(found[1]) * unit) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, at least 1, optionally with K, M, G or T, got {text!r}"
        )
    return nbytes


def find_write_problem(path: Path) -> str:
    """Return why a file cannot be written, or ""."""
    folder = path.absolute().parent
    try:
        if not folder.is_dir():
            return f"{path}: there is no folder {folder}"
        exists = path.exists()
        path.open("a").close()
        if not exists:
            path.unlink()
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror}"
    return ""


def _end_quietly() -> None:
    """Make Ctrl-C end the job with one line, even if this rank is blocked.

    A thread waits for the signal, because a main thread that is blocked inside MPI runs no Python.
    The watchdog of a process group does not replace an existing signal thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, lambda *_: threading.Event().wait())  # stop the main thread
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reader,), name="mpicoll-signals", daemon=True).start()


def _listen(reader: int) -> None:
    while os.read(reader, 1)[0] != signal.SIGINT:
        pass
    if not is_first_rank():
        time.sleep(EXIT_DELAY_S)  # if rank 0 was also interrupted, it prints and ends the job
    write_lines("interrupted")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide messages of MPI libraries about MPI_Abort
    try:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            from mpicoll.failures.watchdog import end_job

            end_job(INTERRUPTED)
    finally:
        os._exit(INTERRUPTED)
