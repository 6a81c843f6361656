"""Pipeline parallelism: outputs and gradients are as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from inputs import near, normal
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

BATCH, WIDTH = 16, 6
loss_fn = nn.functional.mse_loss


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Network(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def network(count):
    torch.manual_seed(5)
    return Network(count)


def data(step=0):
    return normal(0, BATCH, WIDTH, key=("x", step)), normal(0, BATCH, WIDTH, key=("y", step))


def alone(count, chunks):
    """Reference output, losses of the microbatches, and gradients of their mean."""
    model = network(count)
    x, y = data()
    output = model(x)
    losses = [
        loss_fn(out, want) for out, want in zip(output.chunk(chunks), y.chunk(chunks), strict=True)
    ]
    torch.stack(losses).mean().backward()
    return model, output.detach(), torch.stack(losses).detach()


def run(schedule, first, last):
    """Run one step; return the output and losses, which only the last stage has."""
    x, y = data()
    losses = []
    ends = {"target": y, "losses": losses} if last else {}
    output = schedule.step(*[x][: int(first)], **ends)
    return output, losses


def check(modules, model, output, losses, wanted, exact):
    """modules: this rank's layers by index."""
    for place, module in modules.items():
        for found, full in zip(module.parameters(), model.layers[place].parameters(), strict=True):
            near(found.grad, full.grad, rtol=1e-4, atol=1e-6)
    if losses:
        near(torch.stack(losses), exact, rtol=1e-4, atol=1e-6)
        near(output, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("chunks", [4, 8])
def test_one_stage_per_rank(world, kind, chunks):
    n, me = world.size, world.me
    model, wanted, exact = alone(n, chunks)
    module = network(n).layers[me]
    stage = PipelineStage(module, me, n, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=chunks, loss_fn=loss_fn)
    for _ in range(2):  # a stage can be reused
        module.zero_grad()
        output, losses = run(schedule, me == 0, me == n - 1)
        assert bool(losses) == (me == n - 1)
        check({me: module}, model, output, losses, wanted, exact)
        dist.barrier()


#: Schedules by the stages of a rank: in turn (me, me + n), or there and back (me, 2 n - 1 - me).
IN_TURN = [ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble]
THERE_AND_BACK = [ScheduleZBVZeroBubble, ScheduleDualPipeV]


@pytest.mark.parametrize("kind", IN_TURN + THERE_AND_BACK, ids=lambda kind: kind.__name__)
def test_two_stages_per_rank(world, kind):
    n, me = world.size, world.me
    count, chunks = 2 * n, 8
    places = [me, count - 1 - me] if kind in THERE_AND_BACK else [me, me + n]
    last = count - 1 in places
    model, wanted, exact = alone(count, chunks)
    mine = {place: network(count).layers[place] for place in places}
    stages = [
        PipelineStage(module, place, count, torch.device("cpu")) for place, module in mine.items()
    ]
    schedule = kind(stages, n_microbatches=chunks, loss_fn=loss_fn)
    output, losses = run(schedule, me == 0, last)
    assert bool(losses) == last
    check(mine, model, output, losses, wanted, exact)
    dist.barrier()
