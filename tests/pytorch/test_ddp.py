"""DistributedDataParallel: parameters are as after training in one process on all data."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from inputs import equal, near
from models import (
    batch,
    batches,
    loss_of,
    make,
    moved,
    optimizer_of,
    same_parameters,
    train,
    trained_alone,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4

#: Small enough that the model's gradients need several buckets.
BUCKETS = {"bucket_cap_mb": 0.0005}


def same_on_all_ranks(tensors):
    """Check that tensors have equal bits on all ranks."""
    for tensor in tensors:
        outputs = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(outputs, tensor.detach())
        for output in outputs:
            equal(output, tensor.detach())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        BUCKETS,
        {"static_graph": True},
        {"static_graph": True, **BUCKETS},
        {"gradient_as_bucket_view": True, **BUCKETS},
        {"find_unused_parameters": True, **BUCKETS},
        {"broadcast_buffers": False, "init_sync": False},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_ddp_trains_like_one_process(world, settings):
    model = DDP(make(), **settings)
    train(model, world.me, STEPS)
    same_parameters(model.module, trained_alone(world.size, STEPS))
    same_on_all_ranks(model.parameters())
    assert moved(model.module, make())


def test_ddp_broadcasts_parameters_and_buffers_of_rank_0(world):
    torch.manual_seed(world.me)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(world.me + 1.0)
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DDP(model)
    same_parameters(model.module, wanted, rtol=0, atol=0)
    equal(model.module[1].running_mean, torch.ones(4))


def test_ddp_rejects_different_models(world):
    """DDP compares the parameters of all ranks in its constructor."""
    with pytest.raises(RuntimeError, match=r"params|shape|size"):
        DDP(nn.Linear(3, 3, bias=world.me == 0))
    dist.barrier()


def test_accumulation_with_no_sync(world):
    """The first two backward passes are not reduced; the third reduces the sum of all."""
    model = DDP(make(), **BUCKETS)
    alone = make()
    ours, theirs = optimizer_of(model), optimizer_of(alone)
    for step in range(STEPS):
        ours.zero_grad()
        theirs.zero_grad()
        for part in range(3):
            key = 10 * step + part
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                loss_of(model, *batch(world.me, key)).backward()
            loss_of(alone, *batches(world.size, key)).backward()
        ours.step()
        theirs.step()
    same_parameters(model.module, alone)
    same_on_all_ranks(model.parameters())


class Branching(nn.Module):
    """Each call uses one of several branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))

    def forward(self, x, which):
        return self.branches[0](x) + self.branches[which](x)


def test_unused_parameters(world):
    """A gradient is averaged over the ranks that used the parameter; some parameters have none."""
    n = world.size
    model = DDP(make(Branching), find_unused_parameters=True, **BUCKETS)
    alone = make(Branching)
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        which = [1 + (rank + step) % 2 for rank in range(n)]  # never 3 and 4
        x, y = batch(world.me, step)
        nn.functional.mse_loss(model(x, which[world.me]), y).backward()
        for rank in range(n):
            x, y = batch(rank, step)
            (nn.functional.mse_loss(alone(x, which[rank]), y) / n).backward()
        for found, wanted in zip(model.module.parameters(), alone.parameters(), strict=True):
            assert (found.grad is None) == (wanted.grad is None)
            if wanted.grad is not None:
                near(found.grad, wanted.grad)


@pytest.mark.parametrize("by_active", [False, True], ids=["all-ranks", "active-ranks"])
def test_uneven_inputs(world, by_active):
    """Ranks without data join the reductions of the other ranks.

    Gradients are divided by the number of all ranks or of ranks that still have data.
    """
    n = world.size
    steps = [2 + rank for rank in range(n)]
    model = DDP(make(), **BUCKETS)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model], divide_by_initial_world_size=not by_active):
        for step in range(steps[world.me]):
            ours.zero_grad()
            loss_of(model, *batch(world.me, step)).backward()
            ours.step()
    alone = make()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(max(steps)):
        theirs.zero_grad()
        active = [rank for rank in range(n) if step < steps[rank]]
        for rank in active:
            (loss_of(alone, *batch(rank, step)) / (len(active) if by_active else n)).backward()
        theirs.step()
    same_parameters(model.module, alone)
    same_on_all_ranks(model.parameters())


def gradients(model, rank):
    model.zero_grad()
    loss_of(model, *batch(rank, 0)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def gradients_of(ranks):
    """The mean over ranks of the local gradients."""
    each = [gradients(make(), rank) for rank in range(ranks)]
    return [sum(parts) / ranks for parts in zip(*each, strict=True)]


@pytest.mark.parametrize(
    "dtype, hook",
    [
        (torch.float16, default_hooks.fp16_compress_hook),
        (torch.bfloat16, default_hooks.bf16_compress_hook),
        (torch.float16, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ],
    ids=["float16", "bfloat16", "wrapper"],
)
def test_compression_to_half(world, dtype, hook):
    """The mean of gradients rounded to the dtype, which is also rounded."""
    model = DDP(make(), **BUCKETS)
    # In a lambda, because DDP rejects the bfloat16 hook by name without NCCL.
    model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    found = gradients(model, world.me)
    exact = gradients_of(world.size)
    rounding = torch.finfo(dtype).eps
    for gradient, wanted in zip(found, exact, strict=True):
        assert gradient.dtype is torch.float32
        equal(gradient, gradient.to(dtype).float())  # it was converted to the dtype
        near(gradient, wanted, rtol=4 * rounding, atol=2 * rounding * wanted.abs().max().item())
    assert any(not torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    same_on_all_ranks(found)


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
@pytest.mark.parametrize("settings", [{}, BUCKETS], ids=["plain", "buckets"])
def test_builtin_hooks_train_as_with_gloo(world, kind, settings):
    trained = []
    for backend in "mpicoll", "gloo":
        model = DDP(make(), process_group=dist.new_group(backend=backend), **settings)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        train(model, world.me, STEPS)
        same_on_all_ranks(model.parameters())
        with pytest.raises(RuntimeError, match="can only be called once"):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        trained.append(model.module)
    # Gloo rounds each partial sum to half, mpicoll only the result: equal on two ranks.
    exact = kind == "ALLREDUCE" or world.size == 2
    tolerance = {} if exact else {"rtol": 1e-2, "atol": 1e-3}
    same_parameters(*trained, **tolerance)
    if kind == "FP16_COMPRESS":  # it was converted to half
        with pytest.raises(AssertionError):
            same_parameters(trained[0], trained_alone(world.size, STEPS), rtol=0, atol=1e-6)


def test_zero_redundancy_optimizer(world):
    """Each rank keeps a part of the optimizer state."""
    model = DDP(make())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, world.me, STEPS, optimizer)
    same_parameters(model.module, trained_alone(world.size, STEPS))
    optimizer.consolidate_state_dict(0)
    if world.me == 0:
        state = optimizer.state_dict()["state"]
        assert len(state) == len(list(model.parameters()))
    kept = sum(len(group["params"]) for group in optimizer.optim.param_groups)
    assert kept < len(list(model.parameters()))


def test_zero_within_the_hook(world):
    """The optimizer step overlaps with the backward pass."""
    model = DDP(make(), static_graph=False)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
    )
    model.register_comm_hook(
        None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer)
    )
    steps = 5
    for step in range(steps):
        loss_of(model, *batch(world.me, step)).backward()
        optimizer.step()
        model.zero_grad()
    # DDP uses the first two backward passes to determine the order of buckets.
    alone = make()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(2, steps):
        theirs.zero_grad()
        loss_of(alone, *batches(world.size, step)).backward()
        theirs.step()
    same_parameters(model.module, alone)
