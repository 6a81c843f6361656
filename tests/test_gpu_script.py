"""The scripts of tests/gpu, on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_mpi

GPU = Path(__file__).resolve().parent / "gpu"


def start(*words, **variables):
    """Return the exit code and the output of on_a_gpu.sh."""
    done = subprocess.run(
        ["bash", GPU / "on_a_gpu.sh", *words], env=os.environ | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout


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


@pytest.fixture(scope="module")
def gpu_run():
    """tests/gpu/run.py, which imports another module named run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GPU))
        patch.delitem(sys.modules, "run", raising=False)
        spec = importlib.util.spec_from_file_location("gpu_run", GPU / "run.py")
        patch.setitem(sys.modules, "gpu_run", module := importlib.util.module_from_spec(spec))
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("run", None)


def options_of(gpu_run, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["run.py", "mpich=x", *words])
    return gpu_run.parse_arguments()


def planned(gpu_run, monkeypatch, *words):
    """Return the suite, route and number of ranks of each task if all routes are available."""
    site = gpu_run.Site("mpich", Path(sys.executable), Path("mpiexec"))
    monkeypatch.setattr(gpu_run, "sites_of", lambda *_: [site])
    monkeypatch.setattr(gpu_run, "has", lambda *_: True)
    monkeypatch.setattr(gpu_run, "routes_of", lambda *_: dict.fromkeys(gpu_run.ROUTES, ""))
    tasks = gpu_run.plan(options_of(gpu_run, monkeypatch, *words), [])
    return {(task.suite.name, task.route, task.ranks) for task in tasks}


def test_every_route_has_tests(gpu_run, monkeypatch):
    from mpicoll.routes import registry

    assert {*gpu_run.ROUTES} == {"auto", *registry.DEVICE}
    found = planned(gpu_run, monkeypatch)
    assert {suite for suite, _, _ in found} == {suite.name for suite in gpu_run.SUITES}
    for suite in gpu_run.SUITES:
        for word in suite.tests:
            assert not word.startswith("tests/") or (GPU.parent.parent / word).exists(), word
