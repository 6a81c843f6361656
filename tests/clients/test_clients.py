"""Unchanged scripts of client libraries on two ranks: ``make test-clients``.

Each script runs under mpiexec, under mpiexec with the variables of srun, and under torchrun. Ray
starts its own ranks. All scripts train the model of scripts/task.py, and this process trains it for
comparison. The number of calls of mpicoll's groups shows that mpicoll ran the collectives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from whole_jobs import run_program

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
BIN = Path(sys.executable).parent
RUN = ["-m", "mpicoll", "run"]
MPIRUN = [str(BIN / "mpiexec"), "-n", "2", sys.executable, *RUN]
SRUN = [str(BIN / "mpiexec"), "-n", "2", sys.executable, str(HERE / "as_srun.py"), *RUN]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *RUN
]  # fmt: skip
PLAIN = [sys.executable, *RUN]
LAUNCHERS = {"mpirun": MPIRUN, "srun": SRUN, "torchrun": TORCHRUN}

Outcomes = list[dict[str, Any]]


def start(
    library: str, launcher: list[str], folder: Path, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script of a library."""
    variables = os.environ | {"OUTCOMES": str(folder), "OMP_NUM_THREADS": "1"} | environment
    script = SCRIPTS / f"with_{library}.py"
    return run_program(*launcher, script, *words, env=variables, timeout=300)


def outcomes(
    library: str, launcher: list[str], folder: Path, *words: str, **environment: str
) -> Outcomes:
    """Run the script of a library, and return the outcomes of both ranks."""
    done = start(library, launcher, folder, *words, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def expected() -> Any:
    """Return the parameters, loss and error after the same steps in this process."""
    sys.path.insert(0, str(SCRIPTS))
    import task

    network = task.network()
    x, y = task.data()
    for _ in range(task.STEPS):
        network.zero_grad()
        loss = ((network(x) - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= task.RATE * parameter.grad
    values = [value for p in network.parameters() for value in p.detach().flatten().tolist()]
    error = ((network(x) - y) ** 2).mean().item()
    return {"parameters": values, "loss": loss.item(), "error": error}


def check(found: Outcomes, expected: dict[str, Any]) -> None:
    assert found[0]["parameters"] == found[1]["parameters"]  # the same bits
    for one in found:
        assert one["ranks"] == 2
        assert one["parameters"] == pytest.approx(expected["parameters"], rel=1e-4)
        assert one["calls"] >= 5, one  # at least one per step
        assert one["backend"] == "gloo"


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> list[str]:
    return LAUNCHERS[request.param]


#: Libraries, and further values of their outcomes; text is a name of ``expected``.
LIBRARIES: dict[str, dict[str, Any]] = {
    "accelerate": {"gathered": 2},
    "transformers": {"evaluated": "error"},
    "lightning": {"mean": 5.0},  # of 4 and 6
    "torchmetrics": {"mean": "loss", "error": "error", "cat": [0, 0, 1]},
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_library(library: str, launcher: list[str], tmp_path: Path, expected: Any) -> None:
    found = outcomes(library, launcher, tmp_path)
    check(found, expected)
    for name, value in LIBRARIES[library].items():
        wanted = pytest.approx(expected[value], rel=1e-4) if isinstance(value, str) else value
        assert [one[name] for one in found] == [wanted] * 2, name


def test_accelerate_with_its_environment_variable(tmp_path: Path, expected: Any) -> None:
    check(outcomes("accelerate", MPIRUN, tmp_path, "alone", ACCELERATE_USE_CPU="1"), expected)


def test_lightning_without_launcher_needs_its_own_environment(
    tmp_path: Path, expected: Any
) -> None:
    """By default Lightning detects MPI, and MPI starts each process as a world of one rank."""
    done = start("lightning", PLAIN, tmp_path)
    assert done.returncode != 0
    assert "plugins=[LightningEnvironment()]" in done.stderr, done.stderr
    check(outcomes("lightning", PLAIN, tmp_path, "plain"), expected)


@pytest.mark.parametrize(
    ("launcher", "stage"),
    [("mpirun", "1"), ("mpirun", "3"), ("srun", "1"), ("torchrun", "1")],
    indirect=["launcher"],
)
def test_deepspeed(launcher: list[str], stage: str, tmp_path: Path, expected: Any) -> None:
    """ZeRO. The first job compiles an operation of DeepSpeed."""
    check(outcomes("deepspeed", launcher, tmp_path, stage), expected)


def test_ray(tmp_path: Path, expected: Any) -> None:
    """Ray starts the ranks."""
    check(outcomes("ray", PLAIN, tmp_path), expected)
