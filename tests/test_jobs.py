"""The jobs and the README's example, run as a user runs them: by mpiexec."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "jobs" / "train_digits.py"
MPIEXEC = shlex.split(os.environ.get("MPICOLL_TEST_MPIEXEC", ""))

pytestmark = pytest.mark.skipif(not MPIEXEC, reason="MPICOLL_TEST_MPIEXEC names no mpiexec")


def launch(ranks: int, *program: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*MPIEXEC, "-n", str(ranks), sys.executable, *map(str, program)]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def train(ranks: int, file: Path, *options: str) -> tuple[dict[str, np.ndarray], str]:
    pytest.importorskip("sklearn")
    done = launch(ranks, TRAIN, "--save", file, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(file) as parameters:
        return dict(parameters), done.stdout


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """The numbers differ by the order in which the ranks' gradients are added.

    That is some 1e-16 a step in float64, and training is stable, so differences do not grow
    beyond the number of steps times that: about 1e-13. A wrong share of a batch, a lost gradient
    or a factor of the number of ranks shows at 1e-3 and above.
    """
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    parameters, _ = train(1, tmp_path_factory.mktemp("one") / "parameters.npz")
    return parameters


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_is_the_same_on_any_number_of_ranks(
    ranks: int, on_one_rank: dict[str, np.ndarray], tmp_path: Path
) -> None:
    parameters, output = train(ranks, tmp_path / "parameters.npz")
    assert_same(parameters, on_one_rank)
    assert len(re.findall(r"^epoch ", output, re.MULTILINE)) == 20
    assert len(re.findall(r"^rank \d", output, re.MULTILINE)) == ranks
    accuracy = re.search(r"^held-out accuracy (.*)%:", output, re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 95.0


def test_ranks_without_a_share_of_the_batch(tmp_path: Path) -> None:
    # Batches of 3, the last one of 1: on 4 ranks some have nothing to do. Two hidden layers.
    options = shlex.split("--batch-size 3 --lr 0.003 --epochs 2 --hidden 24 16 --target 0")
    one, _ = train(1, tmp_path / "one.npz", *options)
    four, _ = train(4, tmp_path / "four.npz", *options)
    assert sorted(one) == ["bias0", "bias1", "bias2", "weight0", "weight1", "weight2"]
    assert_same(one, four)


def test_a_missed_target_fails_the_job() -> None:
    pytest.importorskip("sklearn")
    done = launch(2, TRAIN, "--epochs", "1", "--target", "1.0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISSED" in done.stdout


def test_a_wrong_option_ends_every_rank() -> None:
    pytest.importorskip("sklearn")
    done = launch(2, TRAIN, "--batch-size", "0")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--batch-size must be at least 1" in done.stderr


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    program = tmp_path / "hello.py"
    program.write_text(example[1])
    done = launch(4, program)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4: [10. 10. 10.]" in done.stdout
