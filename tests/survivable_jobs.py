"""Jobs that continue after a rank is killed: with Open MPI's ULFM, or MPICH and MPICOLL_SURVIVE."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_scripts import MPIEXEC

#: By MPI: options of mpiexec, words before the program, environment variables. MPICH's mpiexec
#: kills all ranks if one fails, so a shell exits with success instead.
_SETUPS: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "Open MPI": (["--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1"], [], {}),
    "HYDRA": (
        ["-disable-auto-cleanup"],
        ["sh", "-c", 'trap "" USR1; "$@"; true', "sh"],
        {"MPICOLL_SURVIVE": "1"},
    ),
}


def _find_mpi() -> str:
    if not MPIEXEC:
        return ""
    done = subprocess.run([*MPIEXEC, "--version"], capture_output=True, text=True, check=False)
    return next((name for name in _SETUPS if name in done.stdout), "")


_MPI = _find_mpi()
needs_survival = pytest.mark.skipif(not _MPI, reason="needs an MPI that outlives a lost rank")


def launch(
    ranks: int, *program: str | Path, timeout_s: int, survives: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ranks. survives: the job continues without lost ranks."""
    options, before, variables = _SETUPS[_MPI] if survives else ([], [], {})
    return subprocess.run(
        [*MPIEXEC, *options, "-n", str(ranks), *before, sys.executable, *program],
        env=os.environ | variables, capture_output=True, text=True, errors="replace",
        timeout=timeout_s, check=False,
    )  # fmt: skip
