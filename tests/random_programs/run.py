"""Run random programs on ranks, with one setup after another.

    python tests/random_programs/run.py --mpiexec COMMAND [--seconds 1200] [--ranks 2 3 4]
        [--setups NAME ...] [--seed 0]

A setup forces a route, a reproducibility level or another setting. Each setup is launched at least
once. The first failure ends the run with exit code 1 and prints the command that repeats it. A
launch that takes a minute longer than planned has also failed. ``make random`` calls this program.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mpicoll import settings
from mpicoll.routes import registry
from mpicoll.routes.tuning import KINDS, PLACES, eligible_routes

PROGRAM = Path(__file__).resolve().parent / "program.py"
#: Maximum duration of a program, and the additional time until its launch has failed.
PROGRAM_S, GRACE_S = 20.0, 60.0
#: The tests use no tables of the user, and waiting ranks of MPICH and Open MPI yield.
ENVIRONMENT = {
    settings.TABLE.name: "0", "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}  # fmt: skip


class Setup(NamedTuple):
    """Environment variables, and options of the program."""

    environment: Mapping[str, str] = MappingProxyType({})
    options: tuple[str, ...] = ()


def build_setups(folder: Path) -> dict[str, Setup]:
    """Return the setups by name. Writes their tuning tables into ``folder``."""
    setups = {
        "default": Setup(),
        "python": Setup({settings.CALLS.name: "python"}),
        "defaults": Setup({settings.CHOOSE.name: "0"}),
        "random": with_threads("random"),
        "nodes": Setup({settings.CHOOSE.name: "random"}, ("--nodes", "--any-order")),
        **{f"way:{way}": with_threads(way) for way in settings.WAYS},
        "slots": Setup({settings.SINGLE_COPY.name: "0"}),
        "messages": Setup({settings.SHARED_MEMORY.name: "0"}),
        "numpy": Setup({settings.KERNELS.name: "numpy"}),
        "order": Setup({settings.REPRODUCIBLE.name: "order"}),
        "exact": Setup({settings.REPRODUCIBLE.name: "exact"}),
    }
    for name, route in registry.HOST.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"ranks": {"2": rows_of(name)}}))
        nodes = route.needs.placement == "nodes"
        options = ("--any-order",) * (name == "widened" or nodes) + ("--nodes",) * nodes
        setups[f"route:{name}"] = Setup({settings.TABLE.name: str(path)}, options)
    return setups


def with_threads(choice: str) -> Setup:
    """Return the setup of a choice of ways, with processors for up to three threads per rank."""
    return Setup({settings.CHOOSE.name: choice, "OMP_NUM_THREADS": "3"}, ("--processors",))


def rows_of(route: str) -> dict[str, dict[str, list[tuple[int, str]]]]:
    """Return the rows of a tuning table that uses a route for all calls that it supports."""
    row = {
        kind: {place: [(0, route)] for place in PLACES if route in eligible_routes(kind, place)}
        for kind in KINDS
    }
    return {kind: places for kind, places in row.items() if places}


def launch(command: list[str], setup: Setup, timeout_s: float) -> tuple[int | None, str]:
    """Return the exit code, or None after a timeout, and the output."""
    process = subprocess.Popen(
        command, env={**os.environ, **ENVIRONMENT, **setup.environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mpiexec", required=True, help="the launcher, and its options")
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--setups", nargs="+", default=[], help="(all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    calls: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        setups = build_setups(Path(folder))
        chosen = arguments.setups or list(setups)
        seconds = min(PROGRAM_S, arguments.seconds / len(chosen))
        # Each turn has all setups, on another number of ranks than in the turn before.
        turns = itertools.product(range(len(arguments.ranks)), enumerate(chosen))
        for seed, (turn, (place, name)) in enumerate(itertools.cycle(turns), arguments.seed):
            if time.monotonic() >= end and len(calls) == len(chosen):
                break
            ranks = arguments.ranks[(turn + place) % len(arguments.ranks)]
            command = [*shlex.split(arguments.mpiexec), "-n", str(ranks), sys.executable,
                       str(PROGRAM), str(seed), str(seconds), *setups[name].options]  # fmt: skip
            code, output = launch(command, setups[name], seconds + GRACE_S)
            if code != 0:
                print(output[-20000:])
                settings = shlex.join(f"{k}={v}" for k, v in setups[name].environment.items())
                outcome = "did not end" if code is None else f"ended with exit code {code}"
                print(f"{name}, {ranks} ranks, seed {seed}, {outcome}: {settings} "
                      + shlex.join(command))  # fmt: skip
                return 1
            calls[name] = calls.get(name, 0) + int(output.split()[-1])
            print(f"{name:<26}{ranks} ranks  seed {seed:<6} {calls[name]:>9} calls", flush=True)
    print(f"{sum(calls.values())} calls, nothing wrong: {calls}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
