"""The scripts of tests/gpu, on a machine without a GPU."""

from __future__ import annotations

import os
import re
import runpy
import sys
import tarfile
from pathlib import Path

import pytest
from whole_jobs import run_program

pytestmark = pytest.mark.any_mpi

GPU = Path(__file__).resolve().parent / "gpu"


def start(*words, **variables):
    """Return the exit code and the output of on_a_gpu.sh."""
    environment = os.environ | variables
    done = run_program("bash", GPU / "on_a_gpu.sh", *words, env=environment, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("words", [(), ("--nonsense",), ("all",)])
def test_script_prints_its_commands(words):
    code, output = start(*words)
    assert code == 2 and "tests/gpu/on_a_gpu.sh first" in output and "pip download" in output


def test_output_folder_has_the_reason_why_no_test_ran(tmp_path):
    """There are no wheels."""
    code, output = start(
        "first", PYTHON=sys.executable, WHEELS=str(tmp_path), STATE=str(tmp_path / "state"),
        OUT=str(tmp_path / "out"),
    )  # fmt: skip
    log = (tmp_path / "out" / "log.txt").read_text()
    assert code == 1
    for each in (output, log):
        assert "GPU: no driver" in each and "FAILED: there is no environment" in each
    assert tarfile.is_tarfile(tmp_path / "out" / "logs.tar.gz")


# ---- run.py --------------------------------------------------------------------------------------


def test_every_suite_has_files_and_a_known_route_and_number_of_ranks(monkeypatch):
    from mpicoll.routes import registry

    monkeypatch.syspath_prepend(GPU)
    sys.modules.pop("run", None)
    found = runpy.run_path(str(GPU / "run.py"))  # imports tests/run.py
    sys.modules.pop("run")
    assert {*found["ROUTES"]} == {"auto", *registry.DEVICE}
    tested = {route for suite in found["SUITES"] for route in (*suite.routes, suite.about)}
    assert tested == {"", *found["ROUTES"]}
    commands = re.findall(r"--suites ([a-z ]+)", (GPU / "on_a_gpu.sh").read_text())
    assert {*" ".join(commands).split()} <= {suite.name for suite in found["SUITES"]}
    for suite in found["SUITES"]:
        assert {*suite.ranks} <= {0, *found["RANKS"]}
        assert all((GPU.parent.parent / word).exists() for word in suite.tests), suite


def test_every_wait_for_a_device_is_listed():
    assert runpy.run_path(str(GPU / "removed_waits.py"))["find_unlisted"]() == []
