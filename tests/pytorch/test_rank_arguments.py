"""Rank arguments of torch.distributed and of the methods of a process group.

Integers of NumPy and torch are ranks. Anything else raises an error on every rank before anything
is sent, and the group remains usable.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from inputs import check_usable, equal

from mpicoll import MpicollError

#: Integers as a program may compute them.
INTEGERS = {
    "NumPy's scalar": np.int64,
    "NumPy's array": np.array,
    "tensor": torch.tensor,
    "tensor of one dimension": lambda rank: torch.tensor([rank]),
    "argmax": lambda rank: torch.eye(rank + 1)[rank].argmax(),
}
#: torch converts a floating-point tensor to an integer before the backend receives it.
NO_RANKS = [1.5, "1", b"1", [1], np.array([0, 1]), object(), 99, -1, 2**70]


def functions():
    """Functions of torch.distributed, called with a rank."""
    mine, objects = torch.ones(2), [1]
    return {
        "broadcast src": lambda rank: dist.broadcast(mine, rank),
        "broadcast group_src": lambda rank: dist.broadcast(mine, group_src=rank),
        "reduce": lambda rank: dist.reduce(mine, rank),
        "gather": lambda rank: dist.gather(mine, None, rank),
        "scatter": lambda rank: dist.scatter(mine, None, rank),
        "send": lambda rank: dist.send(mine, rank),
        "irecv": lambda rank: dist.irecv(mine, rank),
        "broadcast_object_list": lambda rank: dist.broadcast_object_list(objects, rank),
        "send_object_list": lambda rank: dist.send_object_list(objects, rank),
    }


@pytest.mark.parametrize("kind", INTEGERS)
def test_ranks_may_be_numpy_or_torch_integers(world, kind):
    root = world.size - 1
    for argument in "src", "group_src":
        mine = torch.full((2,), float(world.me))
        dist.broadcast(mine, **{argument: INTEGERS[kind](root)})
        equal(mine, torch.full((2,), float(root)))
    objects = [world.me]
    dist.broadcast_object_list(objects, INTEGERS[kind](root))
    assert objects == [root]
    mine = torch.full((2,), float(world.me))
    if world.me == 0:
        dist.send(mine, INTEGERS[kind](root))
    elif world.me == root:
        dist.recv(mine, INTEGERS[kind](0))
        equal(mine, torch.zeros(2))


@pytest.mark.parametrize("name", functions())
def test_invalid_rank_leaves_the_group_usable(world, name):
    for wrong in NO_RANKS:
        with pytest.raises((TypeError, ValueError)):
            functions()[name](wrong)
        check_usable()


def methods(group):
    """The methods of a process group with a rank, called with it."""
    mine, empty = torch.ones(2), torch.zeros(0)
    return {
        "broadcast": lambda root: group.broadcast([mine], root),
        "broadcast by name": lambda root: group.broadcast(mine, root=root),
        "reduce": lambda root: group.reduce([mine], root),
        "gather": lambda root: group.gather([], [mine], root),
        "scatter": lambda root: group.scatter([mine], [], root),
        "send": lambda peer: group.send([empty], peer, 0),
        "recv": lambda peer: group.recv([empty], peer, 0),
    }


def test_group_methods_reject_invalid_ranks(world):
    group = dist.distributed_c10d._get_default_group()
    for name, call in methods(group).items():
        for wrong in [*NO_RANKS, torch.tensor(1.5), np.float32(1)]:
            with pytest.raises((TypeError, ValueError), match=name.split()[0]) as caught:
                call(wrong)
            assert isinstance(caught.value, MpicollError), (name, wrong, caught.value)
            check_usable()
