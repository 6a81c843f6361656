"""A small share of the soak; ``make soak`` runs all of it."""

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


def test_nothing_grows() -> None:
    done = run("--share", "0.002", "--phases", "works", "objects", "groups")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" | +0 | +0 |") == 3, done.stdout


def test_what_grows_is_found(tmp_path: Path) -> None:
    """A file that every call leaves open."""
    script = "import mpicoll\nbarrier, kept = mpicoll.barrier, []\n"
    script += "def leaks(*a):\n    barrier(*a)\n    kept.append(open('/dev/null'))\n"
    script += "mpicoll.barrier = leaks\n"
    (tmp_path / "sitecustomize.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("--share", "0.002", "--phases", "messages", PYTHONPATH=path)
    assert done.returncode == 1 and "NOT FLAT" in done.stdout, done.stdout + done.stderr
