"""Two seconds of random programs. ``make random`` runs them for 20 minutes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rank_scripts import MPIEXEC, needs_mpiexec

pytestmark = [needs_mpiexec, pytest.mark.any_mpi, pytest.mark.slow]

RUN = Path(__file__).parent / "random_programs" / "run.py"


def test_random_programs_give_the_expected_results() -> None:
    command = [sys.executable, str(RUN), "--mpiexec", shlex.join(MPIEXEC), "--seconds", "2"]
    command += ["--ranks", "2", "--ways", "default"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing wrong" in done.stdout and "default" in done.stdout.split(), done.stdout
