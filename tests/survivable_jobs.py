"""Jobs that continue after a rank is killed, with Open MPI's ULFM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rank_scripts import MPIEXEC

_OPTIONS = ["--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1"]


def _has_ulfm() -> bool:
    if not MPIEXEC:
        return False
    done = subprocess.run([*MPIEXEC, "--version"], capture_output=True, text=True, check=False)
    return "Open MPI" in done.stdout


needs_survival = pytest.mark.skipif(not _has_ulfm(), reason="needs Open MPI's ULFM")


def launch(
    ranks: int, *program: str | Path, timeout_s: int, survives: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ranks. survives: the job continues without lost ranks."""
    options = _OPTIONS if survives else []
    return subprocess.run(
        [*MPIEXEC, *options, "-n", str(ranks), sys.executable, *program],
        capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
    )  # fmt: skip
