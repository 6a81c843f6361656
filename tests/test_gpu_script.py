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
SCRIPT = GPU / "on_a_gpu.sh"


def start(*words, **variables):
    """Return the exit code and the output of on_a_gpu.sh."""
    defaults = {"PYTHON": sys.executable, "OUT": "", "STATE": "", "WHEELS": "", "ARGS": ""}
    done = subprocess.run(
        ["bash", SCRIPT, *map(str, words)], env=os.environ | defaults | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "The parts;"),
        (["--wheels"], "The parts;"),
        (["--nonsense", "setup"], "The parts;"),
        (["--wheels", "/nonexistent", "setup"], "/nonexistent: there is no such folder"),
    ],
)
def test_script_rejects_invalid_arguments(words, expected):
    code, output = start(*words)
    assert code == 2 and expected in output


def test_archive_has_the_reason_why_no_part_ran(tmp_path):
    """The folder has no MPI wheel."""
    (tmp_path / "wheels").mkdir()
    code, output = start("--wheels", tmp_path / "wheels", "--state", tmp_path / "state",
                         "--out", tmp_path / "out", "all")  # fmt: skip
    assert code == 1
    with tarfile.open(tmp_path / "out" / "on_a_gpu.tar.gz") as archive:
        summary = archive.extractfile("results/summary.txt").read().decode()
    for each in (output, summary):
        assert "NOT RUN  mpich: there is no wheel of it" in each
        assert "FAILED   there is no MPI: nothing can run" in each


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_measurements_continue_after_the_time_limit(tmp_path):
    """In an environment without MPI and scikit-learn, whose mpiexec writes empty results."""
    root, venv = GPU.parent.parent, tmp_path / "state" / "mpich"
    python = f'exec "{sys.executable}" "$@"'
    write_program(tmp_path / "image", f'case "$*" in *no_gpu*) exit;; esac; {python}')
    write_program(venv / "bin" / "python", f'case "$*" in *sklearn*) exit 1;; esac; {python}')
    launch = f'echo "$*" >> "{tmp_path}/launched"; for last; do :; done; echo "{{}}" > "$last"'
    write_program(venv / "bin" / "mpiexec", launch)
    summed = "cat pyproject.toml mpicoll/kernels/src/* | cksum"
    (venv / "ready").write_text(subprocess.check_output(summed, shell=True, text=True, cwd=root))
    (tmp_path / "wheels").mkdir()
    words = ["--wheels", tmp_path / "wheels", "--state", tmp_path / "state"]
    for limit, code in ((45, 3), (570, 0), (570, 0)):
        found, output = start(
            *words, "--limit", limit, "bench-mpich", "jobs-mpich", PYTHON=str(tmp_path / "image")
        )
        assert found == code, output
        assert "NOT RUN  jobs-mpich: there is no scikit-learn" in output
    launched = (tmp_path / "launched").read_text().splitlines()
    assert len(launched) == len(set(launched)) > 50
    with tarfile.open(tmp_path / "state" / "on_a_gpu.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"all_reduce-bfloat16-4.json", "all_to_all_single-float-2.json"} <= names
    assert {"training-2.json", "training-2.log", "bench-mpich.log"} <= names


def test_machine_prints_versions_and_gpus():
    done = subprocess.run(
        [sys.executable, str(GPU / "machine.py")], capture_output=True, text=True, check=True
    )
    assert "mpi4py 4" in done.stdout and "GPU: " in done.stdout


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


def planned(gpu_run, monkeypatch, *words):
    """Return the suite, route and number of ranks of each launch if all routes are available."""
    site = gpu_run.Site("mpich", Path(sys.executable), Path("mpiexec"))
    monkeypatch.setattr(gpu_run, "sites_of", lambda *_: [site])
    monkeypatch.setattr(gpu_run, "has", lambda *_: True)
    monkeypatch.setattr(gpu_run, "routes_of", lambda *_: dict.fromkeys(gpu_run.ROUTES, ""))
    monkeypatch.setattr(sys, "argv", ["run.py", "mpich=x", *words])
    tasks = gpu_run.plan(gpu_run.parse_arguments(), [])
    return {(task.suite.name, task.route, task.ranks) for task in tasks}


def test_routes_option_selects_the_tests_of_the_route(gpu_run, monkeypatch):
    facade = {("facade", "peer", ranks) for ranks in (1, 2, 4)}
    about = {("peer", "auto", ranks) for ranks in (2, 4)}
    assert planned(gpu_run, monkeypatch, "--routes", "peer") == facade | about
    found = planned(gpu_run, monkeypatch, "--routes", "hierarchical", "--ranks", "4")
    assert found == {("levels", "auto", 4)}


def test_every_route_has_tests(gpu_run, monkeypatch):
    from mpicoll.routes import registry

    assert {*gpu_run.ROUTES} == {"auto", *registry.DEVICE}
    found = planned(gpu_run, monkeypatch)
    assert {suite for suite, _, _ in found} == {suite.name for suite in gpu_run.SUITES}
    for suite in gpu_run.SUITES:
        for word in suite.tests:
            assert not word.startswith("tests/") or (GPU.parent.parent / word).exists(), word


def test_host_option_selects_tests_without_a_gpu(gpu_run, monkeypatch):
    found = planned(gpu_run, monkeypatch, "--host")
    assert {suite for suite, _, _ in found} == {"facade", "backend", "load", "pytorch", "jobs"}
    assert not {route for _, route, _ in found} & {"peer", "nccl", "hierarchical"}
