"""The commands: ``python -m mpicoll COMMAND``, alone or on all ranks of a job.

A command is a module here with ``add_arguments(parser)`` and ``run(options)``, which returns the
exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mpicoll.errors import MpicollError

__all__ = ["COMMANDS", "first", "main", "progress", "refuse", "size", "start"]

#: What each command does, by its name, which is that of its module.
COMMANDS: dict[str, str] = {
    "bench": "what collectives take here, and whether they are right",
    "doctor": "what was found here, how calls are carried out, and what to change",
    "hello": "one line from each rank",
    "tune": "what carries messages of which size best here, measured, for later jobs to go by",
}

#: Variables with the rank, the innermost launcher's first.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
#: Seconds that the others give the rank that speaks: mpirun ends all ranks once one has failed.
A_MOMENT = 2.0
#: Seconds after which a rank that did not come is missing.
LIMIT = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code. Exits with code 2 for a bad command line."""
    with contextlib.ExitStack() as quiet:
        if not first():
            nowhere = quiet.enter_context(open(os.devnull, "w"))  # noqa: PTH123
            quiet.enter_context(contextlib.redirect_stdout(nowhere))
            quiet.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            options = _parser().parse_args(arguments)
        except SystemExit as end:
            if end.code and not first():
                time.sleep(A_MOMENT)
            raise
    return int(_module(options.command).run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mpicoll", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        _module(name).add_arguments(command)
    return parser


def _module(name: str) -> Any:
    return importlib.import_module(f"mpicoll.cli.{name}")


def first(environment: Mapping[str, str] = os.environ) -> bool:
    """This is rank 0, or alone, as the launcher says: the rank that speaks before MPI runs."""
    said = next((environment[name] for name in RANKS if environment.get(name)), "0")
    return said == "0"


def start() -> str:
    """Makes the default group of all ranks; returns why there is none, "" where there is."""
    import mpicoll as dist

    try:
        dist.init_process_group(timeout=LIMIT)
    except MpicollError as error:
        return str(error)
    return ""


def refuse(command: str, why: str, speaks: bool, code: int) -> int:
    """The exit code of a command that cannot do what is asked for, once one rank has said why."""
    if speaks:
        print(f"python -m mpicoll {command}: error: {why}", file=sys.stderr, flush=True)
    return code


def size(text: str) -> int:
    """Bytes given on a command line, with K, M, G or T for 1024 and its powers."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.strip(), re.IGNORECASE)
    unit = 1024 ** " KMGT".index(found[2].upper() or " ") if found else 1
    nbytes = int(Fraction(found[1]) * unit) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: expected a number of bytes, at least 1, or one with K, M, G, T"
        )
    return nbytes


def progress(text: str) -> None:
    """Says how far it is, on a terminal, in a line that goes away again; "" takes it away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
