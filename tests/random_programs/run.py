"""Run random programs on ranks, each of the ways that calls can go forced in turn.

    python tests/random_programs/run.py --mpiexec COMMAND [--seconds 1200] [--ranks 2 3 4]
        [--ways NAME ...] [--seed 0]

Every way has at least one launch, however few the seconds.

``make random`` calls it. The first failure ends the run with exit code 1, and the command that
repeats it; a launch that takes a minute longer than it should has failed, too.
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

from mpicoll.routes import registry
from mpicoll.routes.tuning import KINDS, PLACES, eligible_routes
from mpicoll.settings import CALLS, KERNELS, REPRODUCIBLE, SHARED_MEMORY, SINGLE_COPY, TABLE

PROGRAM = Path(__file__).resolve().parent / "program.py"
#: Seconds of a launch, and by how much it may exceed them.
EACH, GRACE = 20.0, 60.0


class Way(NamedTuple):
    """How calls are made to go: by environment variables, and options of the program."""

    environment: Mapping[str, str] = MappingProxyType({})
    options: tuple[str, ...] = ()


def build_ways(folder: Path) -> dict[str, Way]:
    """Return the ways by name; their tables go into ``folder``."""
    ways = {
        "default": Way(),
        "python": Way({CALLS.name: "python"}),
        "far": Way(options=("--far",)),
        "slots": Way({SINGLE_COPY.name: "0"}),
        "messages": Way({SHARED_MEMORY.name: "0"}),
        "numpy": Way({KERNELS.name: "numpy"}),
        "order": Way({REPRODUCIBLE.name: "order"}),
        "exact": Way({REPRODUCIBLE.name: "exact"}),
    }
    for name in registry.HOST:
        path = folder / f"{name}.json"
        path.write_text(json.dumps({"ranks": {"2": rows_of(name)}}))
        options = ("--any-order",) if name == "widened" else ()
        ways[f"route:{name}"] = Way({TABLE.name: str(path)}, options)
    return ways


def rows_of(route: str) -> dict[str, dict[str, list[tuple[int, str]]]]:
    """Return the rows of a table in which a route serves all that it can."""
    row = {
        kind: {place: [(0, route)] for place in PLACES if route in eligible_routes(kind, place)}
        for kind in KINDS
    }
    return {kind: places for kind, places in row.items() if places}


def launch(command: list[str], way: Way, timeout: float) -> tuple[int | None, str]:
    """Return exit code, None for a launch that was ended, and what it printed."""
    process = subprocess.Popen(
        command, env={**os.environ, TABLE.name: "0", **way.environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
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
    parser.add_argument("--ways", nargs="+", default=[], help="some of them")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    calls: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = build_ways(Path(folder))
        chosen = arguments.ways or list(ways)
        each = min(EACH, arguments.seconds / len(chosen))
        # Every way on some ranks, then on others.
        turns = itertools.product(range(len(arguments.ranks)), enumerate(chosen))
        for seed, (turn, (place, name)) in enumerate(itertools.cycle(turns), arguments.seed):
            if time.monotonic() >= end and len(calls) == len(chosen):
                break
            ranks = arguments.ranks[(turn + place) % len(arguments.ranks)]
            command = [*shlex.split(arguments.mpiexec), "-n", str(ranks), sys.executable,
                       str(PROGRAM), str(seed), str(each), *ways[name].options]  # fmt: skip
            code, output = launch(command, ways[name], each + GRACE)
            if code != 0:
                print(output[-20000:])
                settings = shlex.join(f"{k}={v}" for k, v in ways[name].environment.items())
                why = "did not end" if code is None else f"ended with exit code {code}"
                print(
                    f"{name}, {ranks} ranks, seed {seed}, {why}: {settings} {shlex.join(command)}"
                )
                return 1
            calls[name] = calls.get(name, 0) + int(output.split()[-1])
            print(f"{name:<20}{ranks} ranks  seed {seed:<6} {calls[name]:>9} calls", flush=True)
    print(f"{sum(calls.values())} calls, nothing wrong: {calls}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
