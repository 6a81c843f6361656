"""Distributed checkpoints: saved by all ranks, loaded with other layouts or by one process."""

from __future__ import annotations

import pytest
import test_fsdp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from inputs import equal, near
from models import batches, loss_of, make, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)


def sharded(constant=None):
    """A sharded model with the weights of make(), or with this value in all parameters."""
    model = make()
    for parameter in model.parameters() if constant is not None else ():
        nn.init.constant_(parameter, constant)
    return test_fsdp.sharded(model)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_training_resumes_from_a_checkpoint(world, mesh, folder, asynchronous):
    """Four steps equal two steps, a checkpoint loaded into a new model, and two more steps."""
    straight = sharded()
    train(straight, world.me, 4, adam(straight))
    first = sharded()
    optimizer = adam(first)
    train(first, world.me, 2, optimizer)
    model_state, optimizer_state = get_state_dict(first, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 2}
    if asynchronous:
        dcp.async_save(state, checkpoint_id=folder / "two").result()
    else:
        dcp.save(state, checkpoint_id=folder / "two")
    dist.barrier()

    second = sharded(constant=3)
    optimizer = adam(second)
    model_state, optimizer_state = get_state_dict(second, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder / "two")
    set_state_dict(
        second, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert state["step"] == 2
    for found, wanted in zip(second.parameters(), first.parameters(), strict=True):
        equal(found.to_local().detach(), wanted.to_local().detach())
    for step in (2, 3):
        optimizer.zero_grad()
        x, y = batches(world.size, step)
        half = len(x) // world.size
        mine = slice(half * world.me, half * (world.me + 1))
        loss_of(second, x[mine], y[mine]).backward()
        optimizer.step()
    for found, wanted in zip(second.parameters(), straight.parameters(), strict=True):
        near(found.full_tensor().detach(), wanted.full_tensor().detach())


def test_full_state_dict_is_gathered_and_broadcast(world, mesh):
    """Gathered on rank 0, then loaded by all ranks into another model."""
    model = sharded()
    train(model, world.me, 2)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    assert bool(state) == (world.me == 0)
    for name, found in state.items():
        assert found.shape == dict(model.named_parameters())[name].shape
    other = sharded(constant=3)
    set_model_state_dict(
        other, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        equal(found.to_local().detach(), wanted.to_local().detach())
