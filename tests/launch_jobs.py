"""Jobs of scripts without an MPI launcher, and their results.

A script is started as plain processes with RANK and WORLD_SIZE, by torchrun, or by mpiexec. A
process that still runs after LIMIT seconds prints the stacks of its threads and dies.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rank_scripts import Ended
from whole_jobs import ENVIRONMENT, MPIEXEC, made_by, preamble, run_program

__all__ = [
    "LIMIT", "PROCESSES", "TORCHRUN", "VENDOR", "Ended", "Job", "job", "job_on_any_mpi", "mpich",
    "run",
]  # fmt: skip

TORCHRUN = Path(sys.executable).with_name("torchrun")
#: Seconds after which a job counts as hanging. Most take two.
LIMIT = 90

VENDOR = run_program(
    sys.executable, "-c", "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.get_vendor()[0])",
).stdout.strip()  # fmt: skip

mpich = pytest.mark.skipif(VENDOR == "Open MPI", reason="Open MPI does not support PMI-1")

TOTAL = """
def total(value):
    x = np.full(3, value, np.float64)
    dist.all_reduce(x)
    return x[0]
"""


@dataclass(frozen=True)
class Job:
    """A script and its options.

    ranks:       the ranks that are started, of ``size``.
    by:          "hand", "torchrun", "mpiexec" or "one" (a process that starts its ranks).
    environment: $PORT and $FOLDER are replaced; None removes a variable.
    later:       these ranks start a second later.
    nodes:       commands that run their arguments on the node of each rank.
    """

    script: str
    ranks: tuple[int, ...] = (0, 1)
    size: int = 0
    by: str = "hand"
    environment: Mapping[str, str | None] = field(default_factory=dict)
    later: tuple[int, ...] = ()
    nodes: tuple[list[str], ...] = ()


def find_free_port() -> str:
    """Return a free port below Linux's ephemeral ports, which other processes get meanwhile."""
    while True:
        port = random.randrange(16384, 32768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


def run(task: Job, parameters: Mapping[str, Any], folder: Path) -> Ended:
    port = find_free_port()

    def fill(text: str) -> str:
        for name, value in {**parameters, "PORT": port, "FOLDER": folder}.items():
            text = text.replace(f"${name}", str(value))
        return text

    script = folder / "script.py"
    script.write_text(preamble(LIMIT) + TOTAL + fill(task.script))
    size = task.size or len(task.ranks)
    common: dict[str, str | None] = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TEST_MPICOLL_FOLDER": str(folder),
    }
    commands = [([sys.executable, str(script)], common)]
    if task.by == "hand":
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
        nodes = task.nodes or ([],) * len(task.ranks)
        commands = [
            ([*node, *commands[0][0]], common | {"RANK": str(rank)})
            for node, rank in zip(nodes, task.ranks, strict=True)
        ]
    elif task.by == "torchrun":
        options = ["--nproc-per-node", str(size), "--master-port", port, "--max-restarts", "1"]
        commands = [([str(TORCHRUN), *options, str(script)], common)]
    elif task.by == "mpiexec":
        commands = [([*MPIEXEC, "-n", str(size), *commands[0][0]], common)]
    start = time.monotonic()
    processes = []
    for rank, (command, variables) in enumerate(commands):
        environment = {
            name: fill(value)
            for name, value in {**ENVIRONMENT, **variables, **task.environment}.items()
            if value is not None
        }
        if rank in task.later:
            time.sleep(1)
        with (folder / f"out-{rank}").open("w") as out, (folder / f"err-{rank}").open("w") as err:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    start_new_session=True,
                )
            )  # fmt: skip
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, start + LIMIT + 10 - time.monotonic()))
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def read(kind: str) -> str:
        return "".join(path.read_text() for path in sorted(folder.glob(f"{kind}-*")))

    codes = [process.returncode for process in processes]
    return Ended(codes, read("out"), read("err"), time.monotonic() - start, folder)


job = made_by(Job, run, mpich)
#: The same for jobs that also run with Open MPI.
job_on_any_mpi = made_by(Job, run)

#: Defines processes(), which returns the script of each process of this job by process ID.
PROCESSES = """
    def processes():
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ, cmdline = (open(f"/proc/{pid}/{name}").read()
                                    for name in ("environ", "cmdline"))
            except OSError:
                continue
            if "TEST_MPICOLL_FOLDER=$FOLDER\\0" in environ:
                words = [word for word in cmdline.split("\\0") if ".py" in word]
                found[int(pid)] = os.path.basename(words[0]) if words else ""
        return found
"""
