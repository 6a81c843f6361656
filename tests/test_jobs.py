"""The jobs of jobs/ and the example of the README under mpiexec."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from whole_jobs import MPIEXEC, needs_mpiexec, run_program

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "jobs" / "train_digits.py"
TRAIN_DDP = ROOT / "jobs" / "train_digits_ddp.py"
TRAIN_HOROVOD = ROOT / "jobs" / "train_digits_horovod.py"
JOBS = [TRAIN, TRAIN_DDP, TRAIN_HOROVOD]

pytestmark = [pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow, needs_mpiexec]


def launch(ranks: int, *program: str | Path) -> subprocess.CompletedProcess[str]:
    return run_program(*MPIEXEC, "-n", str(ranks), sys.executable, *program, timeout=120)


def train(ranks: int, file: Path, *options: str) -> tuple[dict[str, np.ndarray], str]:
    pytest.importorskip("sklearn")
    done = launch(ranks, TRAIN, "--save", file, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(file) as parameters:
        return dict(parameters), done.stdout


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Compare parameters, which differ by the order in which gradients are added.

    That is about 1e-16 per step in float64, about 1e-13 in total. A wrong share of a batch, a lost
    gradient or a wrong factor changes parameters by 1e-3 or more.
    """
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-10, err_msg=name)


def test_training_is_the_same_on_one_and_three_ranks(tmp_path: Path) -> None:
    one, _ = train(1, tmp_path / "one.npz")
    three, output = train(3, tmp_path / "three.npz")
    assert_same(three, one)
    assert len(re.findall(r"^epoch ", output, re.MULTILINE)) == 20
    assert len(re.findall(r"^rank \d", output, re.MULTILINE)) == 3
    assert_accurate(output)


def assert_accurate(output: str) -> None:
    accuracy = re.search(r"^held-out accuracy ([\d.]+)%", output, re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 95.0


def skip_without_packages(job: Path) -> None:
    pytest.importorskip("sklearn")
    if job != TRAIN:
        pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("job", "options", "code", "words"),
    [
        *((job, "--epochs 1 --target 1.0", 1, "MISSED") for job in JOBS),
        (TRAIN, "--batch-size 0", 2, "--batch-size must be at least 1"),
        (TRAIN_DDP, "--device cuda", 2, "--device cuda: torch finds no GPU"),
        (TRAIN_DDP, "--backend glue", 1, "glue"),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_missed_target_or_invalid_option_fails(
    job: Path, options: str, code: int, words: str
) -> None:
    skip_without_packages(job)
    if "cuda" in options and importlib.import_module("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    done = launch(2, job, *options.split())
    assert done.returncode == code and words in done.stdout + done.stderr, done


class Training:
    """Output and parameters of a run of train_digits_ddp.py or train_digits_horovod.py."""

    def __init__(
        self, file: Path, start: Sequence[str | Path], *options: str, job: Path = TRAIN_DDP
    ) -> None:
        skip_without_packages(job)
        import torch

        done = run_program(*start, job, "--save", file, *options, timeout=120)
        self.output = done.stdout
        assert done.returncode == 0, done.stdout + done.stderr
        self.parameters = torch.load(file, weights_only=True)
        losses = re.findall(r"^epoch .* loss ([\d.]+) ", done.stdout, re.MULTILINE)
        self.losses = [float(loss) for loss in losses]

    def assert_same(self, other: Training) -> None:
        """Compare losses and parameters, which differ by rounding: about 1e-7 in float32."""
        # Losses are printed with four digits.
        np.testing.assert_allclose(self.losses, other.losses, rtol=0, atol=1.01e-4)
        assert self.parameters.keys() == other.parameters.keys()
        for name, parameter in self.parameters.items():
            np.testing.assert_allclose(
                parameter, other.parameters[name], rtol=0, atol=1e-5, err_msg=name
            )


def ranks(number: int) -> list[str]:
    return [*MPIEXEC, "-n", str(number), sys.executable]


# Batches of 205, not a multiple of 4 ranks. The last batch of 3 leaves one rank without samples.
SHORT = ["--epochs", "2", "--target", "0", "--batch-size", "205"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("short") / "one.pt", ranks(1), *SHORT)


@pytest.mark.parametrize(
    ("job", "options"), [(TRAIN_DDP, []), (TRAIN_HOROVOD, ["--fp16"])], ids=["ddp", "horovod"]
)
def test_training_reaches_the_target(job: Path, options: list[str], tmp_path: Path) -> None:
    training = Training(tmp_path / "two.pt", ranks(2), *options, job=job)
    assert len(training.losses) == 10
    assert_accurate(training.output)


def test_ddp_is_the_same_on_any_number_of_ranks(short: Training, tmp_path: Path) -> None:
    training = Training(tmp_path / "ddp.pt", ranks(4), *SHORT)
    assert "on 4 ranks, DDP over mpicoll\n" in training.output
    training.assert_same(short)


@pytest.mark.parametrize("number", [1, 3])
def test_horovod_is_the_same_as_ddp(number: int, short: Training, tmp_path: Path) -> None:
    training = Training(tmp_path / "horovod.pt", ranks(number), *SHORT, job=TRAIN_HOROVOD)
    assert f"on {number} ranks, Horovod's API\n" in training.output
    training.assert_same(short)


def test_readme_example_prints_the_sum(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example
    program = tmp_path / "hello.py"
    program.write_text(example[1])
    done = launch(4, program)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(4):
        assert f"rank {rank} of 4: [10. 10. 10.]" in done.stdout
