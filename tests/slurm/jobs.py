"""Start jobs on the cluster and wait for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NODES, RANKS = 2, 4
#: Seconds after which a job counts as hanging.
LIMIT = 120


def command(*words: str | Path) -> str:
    """Run a command that has to succeed. Return its output."""
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


VENDOR = command(
    sys.executable, "-c", "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.get_vendor()[0])",
).strip()  # fmt: skip
#: The value of srun's option --mpi for this MPI library.
MPI = "pmix" if VENDOR == "Open MPI" else "pmi2"

ENVIRONMENT = {
    "VENV": sys.prefix,
    "MPI": MPI,
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # The nodes have more processors in Slurm's configuration than the machine.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


class Ended(NamedTuple):
    """Result of a job: Slurm's state, and the output."""

    state: str
    out: str


def environment(**variables: str) -> dict[str, str]:
    """Return a job's environment. Without Open MPI's variables that allow oversubscription, because
    all ranks would be on the first node.
    """
    own = {name: value for name, value in os.environ.items() if "rmaps" not in name}
    return own | ENVIRONMENT | variables


def wait_until(condition: Callable[[], object], timeout: float = LIMIT) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.2)


def submit(
    script: str | Path, folder: Path, *words: str, options: tuple[str, ...] = (), **variables: str
) -> str:
    """Submit a script by sbatch with two ranks on each node; return the job ID."""
    done = subprocess.run(
        ["sbatch", "--parsable", f"--nodes={NODES}", "--ntasks-per-node=2",
         f"--output={folder}/%A.%a.out", *options, ROOT / "jobs" / script, *words],
        env=environment(**variables), cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def shown(job: str) -> str:
    """Return scontrol's text about a job with all elements of its array."""
    return subprocess.run(
        ["scontrol", "show", "job", job], stdout=subprocess.PIPE, text=True, check=False
    ).stdout


def output(job: str, folder: Path) -> str:
    """Return the output so far of a job with all elements of its array."""
    return "".join(path.read_text() for path in sorted(folder.glob(f"{job}.*.out")))


def wait(job: str, folder: Path, seconds: float = LIMIT) -> Ended:
    """Wait until a job has ended and is not queued again."""

    def states() -> set[str]:
        return set(re.findall(r"JobState=(\w+)", shown(job)))

    try:
        wait_until(lambda: not states() & {"PENDING", "RUNNING", "COMPLETING"}, seconds)
    except AssertionError:
        cancel(job)
        raise AssertionError(f"{shown(job)}\n{output(job, folder)}") from None
    return Ended("+".join(sorted(states())), output(job, folder))


def cancel(job: str) -> None:
    """Cancel a job and wait for its end."""
    subprocess.run(["scancel", job], check=False)
    wait_until(lambda: "COMPLETING" not in shown(job) and "RUNNING" not in shown(job))


def start(*words: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Start srun in the background."""
    return subprocess.Popen(
        ["srun", *map(str, words)], env=environment(**variables), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def srun(*words: str | Path, **variables: str) -> tuple[int, str]:
    """Run srun; return its exit code and output."""
    step = start(*words, **variables)
    try:
        out, _ = step.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        step.terminate()
        raise AssertionError(f"srun hangs: {step.communicate()[0]}") from None
    return step.returncode, out
