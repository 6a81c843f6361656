"""Coalesced calls: public functions, group methods and the coalescing manager."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from inputs import FLOATS, check_usable, combined, equal, legal, near, normal, reduce_op, whole
from torch.distributed.distributed_c10d import _coalescing_manager

ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])

#: Many small tensors and a few large ones.
SHAPES = [(3,), (2, 5), (), (0,), (1000,), (30000,), *[(i, 40) for i in range(1, 60)]]


def lists(world, dtype):
    """The tensors of each rank."""
    return [
        [whole(dtype, rank, *shape, key=i) for i, shape in enumerate(SHAPES)]
        for rank in range(world.size)
    ]


def laid_out(tensors):
    """Copies of the tensors: contiguous tensors, strided views and parameters."""
    made = []
    for i, one in enumerate(tensors):
        if i % 4 == 1:
            wide = torch.full((*one.shape, 3), 7).to(one.dtype)[..., 1]
            made.append(wide.copy_(one))
        elif i % 4 == 2 and one.is_floating_point():
            made.append(torch.nn.Parameter(one.clone()))
        elif i % 4 == 3 and one.dim() > 1:
            made.append(one.clone().t().contiguous().t())
        else:
            made.append(one.clone())
    return made


def calls_made():
    """Return the number of collectives started on the default group."""
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


@ASYNC
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dtype, name)
        for dtype in (*FLOATS, torch.int32, torch.int8)
        for name in ("SUM", "AVG", "MAX", "PREMUL_SUM")
        if legal(name, dtype)
    ],
    ids=str,
)
def test_all_reduce_coalesced(world, dtype, name, async_op):
    parts = lists(world, dtype)
    mine = laid_out(parts[world.me])
    future = dist.all_reduce_coalesced(mine, reduce_op(name, dtype), async_op=async_op)
    if async_op:
        future.wait()
    for i, found in enumerate(mine):
        near(found.detach(), combined(name, [part[i] for part in parts]))


@ASYNC
def test_all_gather_coalesced(world, async_op):
    parts = lists(world, torch.bfloat16)
    mine = laid_out(parts[world.me])
    outputs = [laid_out([torch.zeros_like(one) for one in parts[0]]) for _ in parts]
    future = dist.all_gather_coalesced(outputs, mine, async_op=async_op)
    if async_op:
        future.wait()
    for found, wanted in zip(outputs, parts, strict=True):
        for one, other in zip(found, wanted, strict=True):
            equal(one.detach(), other)


@ASYNC
@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["", "device"])
def test_coalescing_manager(world, async_op, device):
    """All three supported operations, with and without the older device argument."""
    n, me = world.size, world.me
    counts = [*range(1, 200), 20_000]
    parts = [[normal(rank, n * count) for rank in range(n)] for count in counts]
    mine = [part[me].clone() for part in parts]
    gathered = [torch.zeros(n * len(part[me])) for part in parts]
    # Every second input is a part of its output, the pattern of FSDP.
    inputs = [
        output.chunk(n)[me].copy_(part[me]) if i % 2 else part[me]
        for i, (output, part) in enumerate(zip(gathered, parts, strict=True))
    ]
    scattered = [torch.zeros(count) for count in counts]

    def manager():
        return _coalescing_manager(device=device, async_ops=async_op)

    begun = calls_made()
    with manager() as reductions:
        for one in mine:
            dist.all_reduce(one)
    with manager() as gathers:
        for output, part in zip(gathered, inputs, strict=True):
            dist.all_gather_into_tensor(output, part)
    with manager() as scatters:
        for output, part in zip(scattered, parts, strict=True):
            dist.reduce_scatter_tensor(output, part[me])
    for each in (reductions, gathers, scatters):
        each.wait()
    assert calls_made() < begun + 30
    for i, part in enumerate(parts):
        near(mine[i], sum(part))
        equal(gathered[i], torch.cat(part))
        near(scattered[i], sum(part).chunk(n)[me])


def test_invalid_coalesced_arguments_are_rejected(world):
    """No data is sent, and the ranks still make the same calls."""
    begun = calls_made()
    group = dist.distributed_c10d._get_default_group()
    mine = [torch.ones(3) for _ in range(9)]
    for words, call in (
        ("share memory", lambda: group.allreduce_coalesced([*mine, torch.ones(1).expand(3)])),
        # mpicoll's message or torch's
        ("layout|SparseCPU", lambda: group.allreduce_coalesced([*mine, mine[0].to_sparse()])),
        ("one output for each", lambda: group.allgather_into_tensor_coalesced(mine[:1], mine)),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert calls_made() == begun
    for one in mine:
        equal(one, torch.ones(3))
    check_usable()
