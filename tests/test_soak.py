"""A short soak run. ``make soak`` runs the whole soak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_scripts import MPIEXEC, needs_mpiexec

pytestmark = [needs_mpiexec, pytest.mark.any_mpi, pytest.mark.slow]

SOAK = Path(__file__).parent / "soak" / "soak.py"


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MPIEXEC, "-n", "2", sys.executable, str(SOAK), *options],
        env={**os.environ, "UCX_MEM_EVENTS": "n", **environment}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip


def test_memory_and_files_do_not_grow() -> None:
    done = run("--share", "0.002", "--phases", "works", "objects", "groups")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" | +0 | +0 |") == 3, done.stdout


def test_leaked_file_descriptors_are_reported(tmp_path: Path) -> None:
    """Every barrier leaves a file open."""
    script = "import mpicoll\nbarrier, files = mpicoll.barrier, []\n"
    script += "def leak(*a):\n    barrier(*a)\n    files.append(open('/dev/null'))\n"
    script += "mpicoll.barrier = leak\n"
    (tmp_path / "sitecustomize.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("--share", "0.002", "--phases", "messages", PYTHONPATH=path)
    assert done.returncode == 1 and "NOT FLAT" in done.stdout, done.stdout + done.stderr
