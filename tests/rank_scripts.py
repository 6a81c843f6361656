"""Jobs of scripts under mpiexec, and their results.

A rank that still runs after LIMIT seconds prints the stacks of its threads and dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import pytest
from whole_jobs import ENVIRONMENT, HUNG, MPIEXEC, compiled, made_by, needs_mpiexec, preamble

__all__ = [
    "HUNG", "LIMIT", "MPIEXEC", "WAITING", "Ended", "Job", "compiled", "job", "needs_mpiexec",
    "needs_torch", "run", "run_once",
]  # fmt: skip

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

#: Seconds after which a job counts as hanging. Most take two.
LIMIT = 40

READY = """
def ready():  # the test may send its signal
    open(sys.argv[1] + f"/pid-{dist.get_rank()}", "w").write(str(os.getpid()))
"""


@dataclass(frozen=True)
class Job:
    """A script and its options.

    options:   of Python.
    interrupt: receiver of a SIGINT after all ranks have called ready(): "mpiexec", or a rank.
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
    """Result of a job: the exit codes of its processes, its output, its duration and its folder."""

    codes: list[int]
    out: str
    err: str
    seconds: float
    folder: Path

    @property
    def code(self) -> int:
        """The exit code of the first process, such as mpiexec."""
        return self.codes[0]

    @property
    def lines(self) -> list[str]:
        return sorted(self.out.split("\n"))[1:]

    def printed(self, *lines: str) -> None:
        """Assert that the job succeeded with this output, in any order."""
        assert not any(self.codes), self
        assert self.lines == sorted(lines), self

    def in_good_order(self, *lines: str) -> None:
        """Assert that the job succeeded without errors. lines: its output, in any order."""
        assert (self.code, self.err) == (0, ""), self
        assert not lines or self.lines == sorted(lines), self

    def badly(self, *words: str) -> None:
        """Assert that the job failed without a hang, printed ``words`` before MPI_Abort's, and did
        not continue where it must not.
        """
        assert self.code != 0 and "not reached" not in self.out, self
        assert HUNG not in self.err, f"a rank hung\n{self}"
        first = re.split("(?i)MPI_Abort", self.err, maxsplit=1)[0]
        for word in words:
            assert word in first, f"{word!r} is missing\n{self}"

    def with_codes(self, *codes: int) -> None:
        """Assert that the processes ended with these exit codes without a hang."""
        assert HUNG not in self.err, f"a rank hung\n{self}"
        assert self.codes == list(codes), self

    def __str__(self) -> str:
        return (
            f"exit codes {self.codes} after {self.seconds:.1f} s\n---- stdout\n{self.out}"
            f"---- stderr\n{self.err}"
        )


#: Error of Open MPI's launcher, once in thousands of starts, before it starts any rank.
NOT_STARTED = "The PMIx server's listener thread failed to start"


def run(task: Job, parameters: dict[str, Any], folder: Path) -> Ended:
    ended = run_once(task, parameters, folder)
    return run_once(task, parameters, folder) if NOT_STARTED in ended.err else ended


job = made_by(Job, run, needs_mpiexec)


def run_once(task: Job, parameters: dict[str, Any], folder: Path) -> Ended:
    script = folder / "script.py"
    script.write_text(
        preamble(task.limit) + READY + Template(task.script).safe_substitute(parameters)
    )
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
    return Ended([process.returncode], out, err, time.monotonic() - start, folder)


def send_interrupt(task: Job, process: subprocess.Popen[str], folder: Path) -> None:
    files = [folder / f"pid-{rank}" for rank in range(task.ranks)]
    while not all(file.exists() and file.read_text() for file in files):
        if process.poll() is not None:
            return
        time.sleep(0.05)
    time.sleep(1)  # until the ranks are in their call
    if task.interrupt == "mpiexec":
        process.send_signal(signal.SIGINT)
    else:
        os.kill(int(files[int(task.interrupt)].read_text()), signal.SIGINT)


#: Calls that block until the other rank makes them.
WAITING = {
    "all_reduce": "dist.all_reduce(x)",
    "recv": "dist.recv(x, 1)",
    "irecv": "dist.irecv(x, 1).wait()",
    "async": "dist.all_reduce(x, async_op=True).wait()",
    "barrier": "dist.barrier()",
    "objects": "dist.all_gather_object([None, None], 'x')",
}
