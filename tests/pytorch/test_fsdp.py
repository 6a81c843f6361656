"""FSDP2 (fully_shard) in float32 and mixed precision, on one- and two-dimensional meshes."""

from __future__ import annotations

import pytest
import torch
from inputs import equal, near
from models import (
    batch,
    batches,
    loss_of,
    make,
    optimizer_of,
    same_parameters,
    train,
    trained_alone,
)
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor

STEPS = 4


def sharded(model=None, **settings):
    """Shard each linear layer separately, then the remaining parameters."""
    model = model or make()
    for child in model.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, **settings)
    return fully_shard(model, **settings)


@pytest.mark.parametrize("reshard", [True, False, 2], ids=["reshard", "keep", "reshard-to-2"])
def test_fsdp_trains_like_one_process(world, mesh, reshard):
    model = sharded(mesh=mesh, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().numel() <= -(-parameter.numel() // world.size) * 2
    losses = train(model, world.me, STEPS)
    same_parameters(model, trained_alone(world.size, STEPS))
    alone = make()
    near(torch.tensor(losses[0]), loss_of(alone, *batch(world.me, 0)).detach())


def test_hybrid_sharding_trains_like_one_process(world, grid):
    """Sharded along one mesh dimension and replicated along the second."""
    model = sharded(mesh=grid)
    train(model, world.me, STEPS)
    same_parameters(model, trained_alone(world.size, STEPS))


def test_user_defined_gradient_divide_factor(world, mesh):
    """FSDP2 uses PREMUL_SUM, or SUM between two divisions."""
    model = sharded(mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(5.0)
    loss_of(model, *batch(world.me, 0)).backward()
    alone = make()
    loss_of(alone, *batches(world.size, 0)).backward()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        near(found.grad.full_tensor(), wanted.grad * world.size / 5)


def bfloat16_gradients(world, reduced_in):
    """The mean over ranks of bfloat16 gradients, computed in another dtype."""
    each = []
    for rank in range(world.size):
        alone = make().to(torch.bfloat16)
        x, y = batch(rank, 0)
        loss_of(alone, x.to(torch.bfloat16), y).backward()
        each.append([parameter.grad.to(reduced_in) for parameter in alone.parameters()])
    means = []
    for parts in zip(*each, strict=True):
        means.append((sum(part.double() for part in parts) / world.size).to(reduced_in).float())
    return means


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["bfloat16", "float32"])
def test_bfloat16(world, mesh, reduce_dtype):
    """Parameters are gathered in bfloat16 and stored in float32; a gradient is rounded once."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = sharded(mesh=mesh, mp_policy=policy)
    x, y = batch(world.me, 0)
    output = model(x)
    assert output.dtype is torch.bfloat16
    alone = make().to(torch.bfloat16)
    equal(output.detach(), alone(x.to(torch.bfloat16)).detach())
    nn.functional.mse_loss(output.float(), y).backward()
    wanted = bfloat16_gradients(world, reduce_dtype or torch.bfloat16)
    rounding = {} if reduce_dtype else {"rtol": 0.02, "atol": 1e-3}
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.dtype is parameter.grad.dtype is torch.float32
        near(parameter.grad.full_tensor(), gradient, **rounding)
    train(model, world.me, STEPS)
    full = trained_alone(world.size, STEPS)
    same_parameters(model, full, rtol=0.2, atol=0.05)


@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
    ids=lambda strategy: strategy.name,
)
def test_fsdp1_trains_like_one_process(world, strategy):
    model = FullyShardedDataParallel(
        make(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
    )
    train(model, world.me, STEPS, optimizer_of(model))
    alone = trained_alone(world.size, STEPS)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    for name, wanted in alone.state_dict().items():
        near(state[name], wanted)
