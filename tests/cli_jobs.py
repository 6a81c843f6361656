"""Run ``python -m mpicoll`` as a job. For modules that use the plugin ``whole_jobs``.

A rank that still runs after LIMIT_S seconds prints its stacks and ends.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

import pytest
import rank_scripts
from rank_scripts import HUNG, MPIEXEC, needs_mpiexec
from whole_jobs import ENVIRONMENT, made_by, run_program

#: Timeout of a job in seconds. Most jobs take two, with torch four.
LIMIT_S = 60

#: The command, with a timeout.
PROGRAM = f"""
import faulthandler, signal
faulthandler.register(signal.SIGALRM, chain=True)  # print all stacks, then exit
signal.alarm({LIMIT_S})
import runpy
runpy.run_module("mpicoll", run_name="__main__")
"""

#: Variables of srun on the first of two ranks. MPI has only one.
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


@dataclass(frozen=True)
class Job:
    """A command line, in which $FOLDER and $words are replaced.

    ranks: number of ranks under mpiexec; 0 is a plain process.
    environment: additional variables, with $FOLDER.
    site: code that every process runs before the command. $name is a parameter of the test.
    table: the content of $FOLDER/table.json before the job.
    then: the command line of a second job.
    """

    words: str
    ranks: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    site: str = ""
    table: str | None = None
    then: str = ""


@dataclass(frozen=True)
class Ended(rank_scripts.Ended):
    """The result of a job, and of the second job. ``folder`` is $FOLDER."""

    after: Ended | None = None

    @property
    def table(self) -> Path:
        return self.folder / "table.json"

    @property
    def cells(self) -> list[list[str]]:
        """The cells of the lines that are not comments."""
        return [line.split() for line in self.out.splitlines() if not line.startswith("#")]

    @property
    def report(self) -> Any:
        """The content of $FOLDER/report.json."""
        return json.loads((self.folder / "report.json").read_text())

    def refused(self, *words: str, code: int = 2) -> None:
        """Check that one rank printed an error with these words and all ranks ended at once."""
        assert self.code == code and self.out == "", self
        assert self.err.count("error: ") == 1 and "Traceback" not in self.err, self
        assert all(word in self.err for word in words), self
        assert self.seconds < LIMIT_S / 3, self


def run(job: Job, parameters: Mapping[str, Any], folder: Path) -> Ended:
    paths = [str(folder), job.environment.get("PYTHONPATH"), ENVIRONMENT.get("PYTHONPATH")]
    own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": "$FOLDER", "MPICOLL_TABLE": ""}
    own |= {"XDG_CONFIG_HOME": "$FOLDER/config", **job.environment}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    own = {name: value.replace("$FOLDER", str(folder)) for name, value in own.items()}
    if job.site:
        site = Template(job.site).safe_substitute(parameters)
        (folder / "sitecustomize.py").write_text(site)
    if job.table is not None:
        (folder / "table.json").write_text(job.table)
    words = job.words.replace("$words", str(parameters.get("words", "")))
    words = words.replace("$FOLDER", str(folder))
    start = [*MPIEXEC, "-n", str(job.ranks)] if job.ranks else []
    begin = time.monotonic()
    command = [*start, sys.executable, "-c", PROGRAM, *shlex.split(words)]
    done = run_program(*command, env=ENVIRONMENT | own, timeout=LIMIT_S + 20)
    assert HUNG not in done.stderr, f"a rank hung\n{done.stderr}"
    took = time.monotonic() - begin
    second = replace(job, words=job.then, then="", table=None)
    after = run(second, parameters, folder) if job.then else None
    return Ended([done.returncode], done.stdout, done.stderr, took, folder, after)


_with_job = made_by(Job, run)


def job(words: str, every_mpi: bool = False, **how: Any) -> Callable[[Any], Any]:
    """Give a test its job. every_mpi: run it with every MPI. By default tests/run.py uses one."""

    def decorate(test: Any) -> Any:
        test = _with_job(words, **how)(test)
        test = needs_mpiexec(test) if how.get("ranks") else test
        return test if every_mpi else pytest.mark.any_mpi(test)

    return decorate
