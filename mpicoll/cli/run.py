"""``python -m mpicoll run``: run an unmodified PyTorch script with mpicoll."""

from __future__ import annotations

import argparse
import os
import sys

from mpicoll.cli import is_first_rank, refuse
from mpicoll.launch.environment import RUN_OPTION, find_torch_variables, interpreter_options
from mpicoll.settings import INSTALL_AS

#: If this is 0, torch silently loads no plug-ins, including mpicoll.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "python -m mpicoll run [--backend NAMES] [-m] SCRIPT [ARGUMENT ...]"
    parser.epilog = (
        "Start it on all ranks: mpirun -n 2 python -m mpicoll run train.py, or torchrun "
        "--nproc-per-node 2 -m mpicoll run train.py."
    )
    parser.add_argument(
        "--backend",
        type=_names,
        default=",".join(INSTALL_AS.values),
        metavar="NAMES",
        help=f"backends to replace: {INSTALL_AS.expected}; default: all",
    )
    parser.add_argument("-m", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the script and its arguments"
    )


def run(options: argparse.Namespace) -> int:
    """Replace this process with the script.

    __main__, sys.argv, sys.path, signals and uncaught exceptions therefore belong to the script,
    and the launcher keeps watching the process. RANK and further variables of torchrun are set
    from the variables of the launcher, unless they are set. Child processes inherit the variables,
    but not the option -X, which marks this process and lists the variables that were set.
    """
    if not options.script:
        return refuse("run", "expected a script, or -m and a module", is_first_rank(), 2)
    if os.environ.get(_AUTOLOAD) == "0":
        why = f"{_AUTOLOAD}=0 prevents torch from loading mpicoll: unset it"
        return refuse("run", why, is_first_rank(), 2)
    module = ["-m"] if options.m else []
    filled = {
        name: value for name, value in find_torch_variables().items() if name not in os.environ
    }
    mark = RUN_OPTION + (
        "=" + ",".join("=".join(pair) for pair in filled.items()) if filled else ""
    )
    words = [sys.executable, *interpreter_options(), "-X", mark, *module, *options.script]
    os.environ |= {INSTALL_AS.name: options.backend, **filled}
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execv(sys.executable, words)


def _names(text: str) -> str:
    try:
        return INSTALL_AS.value({INSTALL_AS.name: text})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
