"""What is started on a machine with a GPU, as far as it goes without: it says what fails."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

GPU = Path(__file__).resolve().parent / "gpu"
SCRIPT = GPU / "on_a_gpu.sh"


def start(*words, **variables):
    """Exit code and all that is printed."""
    ours = {"PYTHON": sys.executable, "OUT": "", "STATE": "", "WHEELS": "", "ARGS": ""}
    done = subprocess.run(
        ["bash", str(SCRIPT), *map(str, words)], env=os.environ | ours | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "The parts;"),
        (["--wheels"], "The parts;"),
        (["--nonsense", "setup"], "The parts;"),
        (["--wheels", "/nonexistent", "setup"], "/nonexistent: there is no such folder"),
    ],
)
def test_wrong_words(words, said):
    code, output = start(*words)
    assert code == 2 and said in output


def test_what_fails_is_in_the_archive(tmp_path):
    """Here there is no wheel of an MPI, and so nothing can run."""
    (tmp_path / "wheels").mkdir()
    places = ["--wheels", "wheels", "--state", "state", "--out", "out"]
    words = [str(tmp_path / each) if i % 2 else each for i, each in enumerate(places)]
    code, output = start(*words, "all")
    assert code == 1
    with tarfile.open(tmp_path / "out" / "on_a_gpu.tar.gz") as archive:
        summary = archive.extractfile("results/summary.txt").read().decode()
    for each in (output, summary):
        assert "NOT RUN  mpich: there is no wheel of it" in each
        assert "FAILED   there is no MPI: nothing can run" in each


def test_the_machine_is_described():
    done = subprocess.run(
        [sys.executable, str(GPU / "machine.py")], capture_output=True, text=True, check=True
    )
    assert "mpi4py 4" in done.stdout and "GPU: " in done.stdout
