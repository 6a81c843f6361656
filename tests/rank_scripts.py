"""Scripts that mpiexec runs on two ranks or more, and how these jobs end.

No job may hang: a rank that is still there after LIMIT seconds prints where it is and goes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import pytest
from whole_jobs import ENVIRONMENT, made_by

from mpicoll.kernels.library import kernels

MPIEXEC = shlex.split(os.environ.get("TEST_MPICOLL_MPIEXEC", ""))

needs_mpiexec = pytest.mark.skipif(not MPIEXEC, reason="TEST_MPICOLL_MPIEXEC names no mpiexec")
compiled = pytest.mark.skipif(kernels is None, reason="the limit is the C library's")

#: Seconds after which a job counts as hanging. Most take two.
LIMIT = 25
#: What a rank prints then.
HUNG = "(most recent call first)"

#: What every script begins with.
PREAMBLE = f"""
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGALRM, chain=True)  # print where all threads are, then die
signal.alarm({LIMIT})
import numpy as np
import mpicoll as dist

def say(*words):  # one write, so that ranks do not print into each other's lines
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def ready():  # the test may send its signal
    open(sys.argv[1] + f"/pid-{{dist.get_rank()}}", "w").write(str(os.getpid()))
"""


@dataclass(frozen=True)
class Job:
    """A script and how it is started.

    options:   of Python.
    interrupt: who gets SIGINT once all ranks have called ready(): "mpiexec", or a rank's number.
    limit:     seconds after which the job counts as hanging.
    """

    script: str
    ranks: int = 2
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    interrupt: str | int = ""
    limit: int = LIMIT


@dataclass(frozen=True)
class Ended:
    """How a job ended: mpiexec's exit code, what was printed, and after how long."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.split("\n"))[1:]

    def in_good_order(self) -> None:
        assert (self.code, self.err) == (0, ""), self

    def badly(self, *words: str) -> None:
        """The job ended at once, with a code that says so, its own words before those of MPI."""
        assert self.code != 0, self
        assert HUNG not in self.err, f"a rank hung\n{self}"
        first = re.split("(?i)MPI_Abort", self.err, maxsplit=1)[0]
        for word in words:
            assert word in first, f"{word!r} is missing\n{self}"

    def __str__(self) -> str:
        return (
            f"exit code {self.code} after {self.seconds:.1f} s\n---- stdout\n{self.out}"
            f"---- stderr\n{self.err}"
        )


job = made_by(Job)


#: What Open MPI's launcher says, once in thousands of starts, when it has started no rank.
NOT_STARTED = "The PMIx server's listener thread failed to start"


def run(task: Job, parameters: dict[str, Any], folder: Path) -> Ended:
    ended = run_once(task, parameters, folder)
    return run_once(task, parameters, folder) if NOT_STARTED in ended.err else ended


def run_once(task: Job, parameters: dict[str, Any], folder: Path) -> Ended:
    script = folder / "script.py"
    preamble = PREAMBLE.replace(f"alarm({LIMIT})", f"alarm({task.limit})")
    script.write_text(preamble + Template(task.script).safe_substitute(parameters))
    command = [*MPIEXEC, "-n", str(task.ranks), sys.executable, *task.options, script, folder]
    start = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | task.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        if task.interrupt != "":
            send_interrupt(task, process, folder)
        out, err = process.communicate(timeout=start + task.limit + 10 - time.monotonic())
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"the job did not end: {error}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Ended(process.returncode, out, err, time.monotonic() - start)


def send_interrupt(task: Job, process: subprocess.Popen[str], folder: Path) -> None:
    marks = [folder / f"pid-{rank}" for rank in range(task.ranks)]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        if process.poll() is not None:
            return
        time.sleep(0.05)
    time.sleep(1)  # let them reach the call
    if task.interrupt == "mpiexec":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(int(marks[int(task.interrupt)].read_text()), signal.SIGINT)


#: What the others may be waiting in.
WAITING = {
    "all_reduce": "dist.all_reduce(x)",
    "recv": "dist.recv(x, 1)",
    "irecv": "dist.irecv(x, 1).wait()",
    "async": "dist.all_reduce(x, async_op=True).wait()",
    "barrier": "dist.barrier()",
    "objects": "dist.all_gather_object([None, None], 'x')",
}
