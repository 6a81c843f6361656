"""Two seconds of random programs. ``make random`` runs them for 20 minutes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from whole_jobs import MPIEXEC, needs_mpiexec, run_program

pytestmark = [needs_mpiexec, pytest.mark.any_mpi, pytest.mark.nightly]

RUN = Path(__file__).parent / "random_programs" / "run.py"


def test_random_programs_give_the_expected_results() -> None:
    command = [sys.executable, RUN, "--mpiexec", shlex.join(MPIEXEC), "--seconds", "2"]
    done = run_program(*command, "--ranks", "2", "--setups", "default", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing wrong" in done.stdout and "default" in done.stdout.split(), done.stdout
