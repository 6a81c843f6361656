"""hvd.elastic: ranks that are killed in a training that goes on from its last commit, without them,
where MPI outlives that; elsewhere the job ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_losses import MPIEXEC, WAY, WAYS

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.waits,
    pytest.mark.slow,
    pytest.mark.skipif(not WAY, reason="needs an MPI that outlives a lost rank"),
]

#: Rank 0 is lost between two commits, later the last one. The batches are those of all ranks
#: together, so what is learnt is what one process learns that takes each step once.
TRAINING = """
import os, signal, sys, time
import torch
import mpicoll.horovod.torch as hvd

def make(seed):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    model = torch.nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

hvd.init()
model, optimizer = make(hvd.rank())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
batches = torch.randn(16, 12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
dies = {(7, 3): 0, (11, 2): 1}  # by step and number of ranks: who
resets = []

@hvd.elastic.run
def train(state, more):
    while state.step < len(batches):
        batch = batches[state.step][hvd.rank() :: hvd.size()]
        state.optimizer.zero_grad()
        loss = state.model(batch).square().mean()
        if dies.get((state.step, hvd.size())) == hvd.rank():
            time.sleep(0.3)  # the others wait for its gradients
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        state.optimizer.step()
        state.step += more
        state.done.append(state.step)
        if state.step % 3 == 0:
            state.commit()
    return state.step

state = hvd.elastic.TorchState(model, optimizer, step=0, done=[])
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
assert train(state, more=1) == len(batches)
assert state.done == list(range(1, 17)), state.done
assert resets == [2, 1], resets
alone, optimizer = make(0)
for batch in batches:
    optimizer.zero_grad()
    alone(batch).square().mean().backward()
    optimizer.step()
for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
hvd.shutdown()
open(sys.argv[1], "w").write("went on")
"""
LIMIT = 240
JOB = Path(__file__).resolve().parent.parent / "jobs" / "train_digits_horovod.py"


def launch(
    ranks: int, *program: str | Path, survives: bool = True
) -> subprocess.CompletedProcess[str]:
    options, before, settings = WAYS[WAY] if survives else ([], [], {})
    return subprocess.run(
        [*MPIEXEC, *options, "-n", str(ranks), *before, sys.executable, *program],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT,
        check=False,
    )


def train(tmp_path: Path, survives: bool) -> tuple[subprocess.CompletedProcess[str], Path]:
    job, told = tmp_path / "job.py", tmp_path / "told"
    job.write_text(TRAINING)
    return launch(3, job, told, survives=survives), told


def test_training_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    done, told = train(tmp_path, survives=True)
    assert told.exists(), done.stdout + done.stderr
    assert told.read_text() == "went on"
    assert done.stderr.count("mpicoll: lost: ") == 2


def test_elsewhere_the_job_ends(tmp_path: Path) -> None:
    done, told = train(tmp_path, survives=False)
    assert done.returncode != 0 and not told.exists()
    assert "mpicoll: lost: rank 0 of 3" in done.stderr, done.stderr
    assert "to survive a lost rank" in done.stderr


@pytest.mark.any_mpi
def test_the_job_goes_on(tmp_path: Path) -> None:
    """Its losses are those of one rank, to the four digits that are printed."""
    pytest.importorskip("sklearn")
    losses = []
    for ranks, options in (3, ["--kill-at", "35"]), (1, []):
        done = launch(ranks, JOB, "--epochs", "3", "--target", "0", *options)
        left = min(ranks, 2)
        assert f" on {left} ranks: the target" in done.stdout, done.stdout + done.stderr
        assert done.stderr.count("mpicoll: lost: rank 2 of 3") == ranks // 3
        losses.append([float(x) for x in re.findall(r"^epoch .* loss ([\d.]+)", done.stdout, re.M)])
    assert len(losses[0]) >= len(losses[1]) == 3
    assert losses[0][-3:] == pytest.approx(losses[1], abs=1.01e-4)
