"""hvd.elastic after ranks are killed: training continues from the last commit, or the job ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from survivable_jobs import launch, needs_survival

pytest.importorskip("torch")
pytestmark = [pytest.mark.waits, pytest.mark.slow, needs_survival]

#: Loses rank 0 between two commits, later the last rank. A batch is spread over all ranks, so the
#: parameters must equal the result of one process that makes each step once.
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
lost_ranks = {(7, 3): 0, (11, 2): 1}  # by step and number of ranks
resets = []

@hvd.elastic.run
def train(state, more):
    while state.step < len(batches):
        batch = batches[state.step][hvd.rank() :: hvd.size()]
        state.optimizer.zero_grad()
        loss = state.model(batch).square().mean()
        if lost_ranks.get((state.step, hvd.size())) == hvd.rank():
            time.sleep(0.3)  # until the other ranks wait for its gradients
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
open(sys.argv[1], "w").write("completed")
"""
TIMEOUT_S = 240
JOB = Path(__file__).resolve().parent.parent / "jobs" / "train_digits_horovod.py"


@pytest.mark.parametrize("survives", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_training_continues_from_the_last_commit_if_the_job_survives(survives, tmp_path):
    job, completed = tmp_path / "job.py", tmp_path / "completed"
    job.write_text(TRAINING)
    done = launch(3, job, completed, timeout_s=TIMEOUT_S, survives=survives)
    assert completed.exists() == survives, done.stdout + done.stderr
    if survives:
        assert done.stderr.count("mpicoll: lost: ") == 2
    else:
        assert done.returncode != 0
        assert "mpicoll: lost: rank 0 of 3" in done.stderr, done.stderr


@pytest.mark.any_mpi
def test_job_with_a_lost_rank_has_the_losses_of_one_rank(tmp_path):
    """To the four digits that the job prints."""
    pytest.importorskip("sklearn")
    losses = []
    for ranks, options in (3, ["--kill-at", "35"]), (1, []):
        words = JOB, "--epochs", "3", "--target", "0", *options
        done = launch(ranks, *words, timeout_s=TIMEOUT_S)
        left = min(ranks, 2)
        assert f" on {left} ranks: the target" in done.stdout, done.stdout + done.stderr
        assert done.stderr.count("mpicoll: lost: rank 2 of 3") == ranks // 3
        losses.append([float(x) for x in re.findall(r"^epoch .* loss ([\d.]+)", done.stdout, re.M)])
    assert len(losses[0]) >= len(losses[1]) == 3
    assert losses[0][-3:] == pytest.approx(losses[1], abs=1.01e-4)
