"""The jobs of jobs/ under mpiexec."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from whole_jobs import MPIEXEC, needs_mpiexec, run_program

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "jobs" / "train_digits.py"
TRAIN_DDP = ROOT / "jobs" / "train_digits_ddp.py"
TRAIN_HOROVOD = ROOT / "jobs" / "train_digits_horovod.py"
MISSED = "--epochs 1 --target 1.0", 1, "MISSED"

pytestmark = [pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow, needs_mpiexec]


def launch(ranks: int, *program: str | Path) -> subprocess.CompletedProcess[str]:
    return run_program(*MPIEXEC, "-n", str(ranks), sys.executable, *program, timeout=120)


def assert_accurate(output: str) -> None:
    accuracy = re.search(r"^held-out accuracy ([\d.]+)%", output, re.MULTILINE)
    assert accuracy and float(accuracy[1]) > 95.0


def skip_without_packages(job: Path) -> None:
    pytest.importorskip("sklearn")
    if job != TRAIN:
        pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("ranks", "job", "options", "code", "words"),
    [
        (2, TRAIN, *MISSED),
        pytest.param(2, TRAIN_DDP, *MISSED, marks=pytest.mark.nightly),
        pytest.param(2, TRAIN_HOROVOD, *MISSED, marks=pytest.mark.nightly),
        (1, TRAIN, "--batch-size 0", 2, "--batch-size must be at least 1"),
        pytest.param(
            1,
            TRAIN_DDP,
            "--device cuda",
            2,
            "--device cuda: torch finds no GPU",
            marks=pytest.mark.nightly,
        ),
        pytest.param(1, TRAIN_DDP, "--backend glue", 1, "glue", marks=pytest.mark.nightly),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_missed_target_or_invalid_option_fails(
    ranks: int, job: Path, options: str, code: int, words: str
) -> None:
    skip_without_packages(job)
    if "cuda" in options and importlib.import_module("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    done = launch(ranks, job, *options.split())
    assert done.returncode == code and words in done.stdout + done.stderr, done


class Training:
    """Output, parameters and losses of a run of a training job on ranks."""

    def __init__(self, ranks: int, file: Path, *options: str, job: Path) -> None:
        skip_without_packages(job)
        done = launch(ranks, job, "--save", file, *options)
        self.output = done.stdout
        assert done.returncode == 0, done.stdout + done.stderr
        if job == TRAIN:
            with np.load(file) as parameters:
                self.parameters = dict(parameters)
        else:
            self.parameters = importlib.import_module("torch").load(file, weights_only=True)
        losses = re.findall(r"^epoch .* loss ([\d.]+) ", done.stdout, re.MULTILINE)
        self.losses = [float(loss) for loss in losses]

    def assert_same(self, other: Training, atol: float = 1e-5) -> None:
        """Compare losses and parameters, which differ by rounding: about 1e-7 in float32."""
        # Losses are printed with four digits.
        np.testing.assert_allclose(self.losses, other.losses, rtol=0, atol=1.01e-4)
        assert self.parameters.keys() == other.parameters.keys()
        for name, parameter in self.parameters.items():
            np.testing.assert_allclose(
                parameter, other.parameters[name], rtol=0, atol=atol, err_msg=name
            )


def test_training_is_the_same_on_one_and_three_ranks(tmp_path: Path) -> None:
    """Parameters differ by the order in which gradients are added: about 1e-13 in float64.

    A wrong share of a batch, a lost gradient or a wrong factor changes them by 1e-3 or more.
    """
    one, three = (Training(n, tmp_path / f"{n}.npz", job=TRAIN) for n in (1, 3))
    three.assert_same(one, atol=1e-10)
    assert len(three.losses) == 20
    assert len(re.findall(r"^rank \d", three.output, re.MULTILINE)) == 3
    assert_accurate(three.output)


# Batches of 359, not a multiple of 3 ranks. The last batch of 2 leaves one rank without samples.
SHORT = ["--epochs", "2", "--target", "0", "--batch-size", "359"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(1, tmp_path_factory.mktemp("short") / "one.pt", *SHORT, job=TRAIN_DDP)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("job", "options"), [(TRAIN_DDP, []), (TRAIN_HOROVOD, ["--fp16"])], ids=["ddp", "horovod"]
)
def test_training_reaches_the_target(job: Path, options: list[str], tmp_path: Path) -> None:
    training = Training(2, tmp_path / "two.pt", *options, job=job)
    assert len(training.losses) == 10
    assert_accurate(training.output)


def test_ddp_is_the_same_on_one_and_three_ranks(short: Training, tmp_path: Path) -> None:
    training = Training(3, tmp_path / "ddp.pt", *SHORT, job=TRAIN_DDP)
    assert "on 3 ranks, DDP over mpicoll\n" in training.output
    training.assert_same(short)


@pytest.mark.nightly
def test_horovod_is_the_same_as_ddp(short: Training, tmp_path: Path) -> None:
    training = Training(3, tmp_path / "horovod.pt", *SHORT, job=TRAIN_HOROVOD)
    assert "on 3 ranks, Horovod's API\n" in training.output
    training.assert_same(short)
