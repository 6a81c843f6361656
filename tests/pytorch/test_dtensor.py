"""DTensor: redistribution, operations on sharded tensors, and tensor-parallel plans."""

from __future__ import annotations

import pytest
import torch
from inputs import near, normal
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

PLACEMENTS = [Shard(0), Shard(1), Replicate(), Partial()]
#: Placements from which torch can redistribute to Partial.
SUMMED = (Partial, Shard) if torch.__version__ >= "2.14" else (Partial,)


def named(placements):
    return "".join(
        f"S{one.dim}" if isinstance(one, Shard) else type(one).__name__[0] for one in placements
    )


def local_part(full, mesh, placements):
    """This rank's part of a tensor: a torch.chunk, or a share of the sum."""
    part = full
    for dim, placement in enumerate(placements):
        size, place = mesh.size(dim), mesh.get_local_rank(dim)
        if isinstance(placement, Shard):
            pieces = part.chunk(size, placement.dim)
            empty = part.narrow(placement.dim, 0, 0)
            part = pieces[place] if place < len(pieces) else empty
        elif isinstance(placement, Partial):
            part = part * (place + 1) * 2 / (size * (size + 1))  # the shares add up to one
    return part.contiguous()


def made(full, mesh, placements):
    return DTensor.from_local(
        local_part(full, mesh, placements),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def reachable(source, target):
    """Return True if torch supports the redistribution. To Partial it is limited."""
    return all(
        not isinstance(after, Partial) or isinstance(before, SUMMED)
        for before, after in zip(source, target, strict=True)
    )


def holds(found, full, placements):
    """Check the placements, and the local part of each rank."""
    assert list(found.placements) == list(placements)
    assert found.shape == full.shape
    if not any(isinstance(placement, Partial) for placement in placements):
        near(found.to_local(), local_part(full, found.device_mesh, placements))
    near(found.full_tensor(), full)


@pytest.mark.parametrize("target", PLACEMENTS, ids=lambda one: named([one]))
@pytest.mark.parametrize("source", PLACEMENTS, ids=lambda one: named([one]))
@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (1, 3)], ids=str)
def test_redistribute_between_all_placements(world, mesh, source, target, shape):
    """Evenly and unevenly divided, and with empty shards."""
    full = normal(0, *shape, key="redistribute")
    tensor = made(full, mesh, [source])
    if not reachable([source], [target]):
        with pytest.raises(RuntimeError, match="Partial"):
            tensor.redistribute(mesh, [target])
        return
    holds(tensor.redistribute(mesh, [target]), full, [target])
    found = tensor.redistribute(mesh, [target], async_op=True)
    near(found.full_tensor(), full)


class Block(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def network():
    torch.manual_seed(11)
    return Network()


def tokens(key, samples=2):
    generator = torch.Generator().manual_seed(key)
    return torch.randint(0, 20, (samples, 8), generator=generator)


PLANS = {
    "megatron": {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    },
    "sequence": {
        "embed": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
}


def step_of(model, optimizer, key, loss=nn.functional.cross_entropy):
    optimizer.zero_grad()
    output = model(tokens(key))
    value = loss(output.flatten(0, 1), tokens(key + 100).flatten())
    value.backward()
    optimizer.step()
    return output.detach(), value.detach()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("name", list(PLANS))
def test_tensor_parallel_training_equals_one_process(world, mesh, name):
    """Outputs, gradients and parameters of three steps."""
    model = parallelize_module(network(), mesh, PLANS[name])
    alone = network()
    ours = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    for key in range(3):
        found, loss = step_of(model, ours, key)
        wanted, exact = step_of(alone, theirs, key)
        near(whole(found), wanted, rtol=1e-4, atol=1e-5)
        near(whole(loss), exact, rtol=1e-4, atol=1e-5)
    divided = 0
    for mine, full in zip(model.parameters(), alone.parameters(), strict=True):
        divided += isinstance(mine, DTensor) and isinstance(mine.placements[0], Shard)
        near(whole(mine.grad), full.grad, rtol=1e-4, atol=1e-5)
        near(whole(mine.detach()), full.detach(), rtol=1e-4, atol=1e-5)
    assert divided


def test_tensor_parallel_inside_fsdp(world, grid):
    """On a two-dimensional mesh: data parallel along rows, tensor parallel along columns."""
    from torch.distributed.fsdp import fully_shard

    model = parallelize_module(network(), grid["columns"], PLANS["megatron"])
    for block in model.blocks:
        fully_shard(block, mesh=grid["rows"])
    fully_shard(model, mesh=grid["rows"])
    rows = grid.size(0)
    ours = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    alone = network()
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    row = grid.get_local_rank("rows")
    for step in range(2):
        step_of(model, ours, 10 * step + row)
        theirs.zero_grad()
        for each in range(rows):
            key = 10 * step + each
            output = alone(tokens(key)).flatten(0, 1)
            (nn.functional.cross_entropy(output, tokens(key + 100).flatten()) / rows).backward()
        theirs.step()
    for mine, full in zip(model.parameters(), alone.parameters(), strict=True):
        near(whole(mine.detach()), full.detach(), rtol=1e-4, atol=1e-5)
