"""Jobs that continue after a rank is killed, with Open MPI's ULFM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from whole_jobs import MPIEXEC, run_program

_OPTIONS = ["--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1"]


def _has_ulfm() -> bool:
    if not MPIEXEC:
        return False
    return "Open MPI" in run_program(*MPIEXEC, "--version").stdout


needs_survival = pytest.mark.skipif(not _has_ulfm(), reason="needs Open MPI's ULFM")


def launch(
    ranks: int, *program: str | Path, timeout_s: int, survives: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ranks. survives: the job continues without lost ranks."""
    options = _OPTIONS if survives else []
    command = [*MPIEXEC, *options, "-n", str(ranks), sys.executable, *program]
    return run_program(*command, errors="replace", timeout=timeout_s)
