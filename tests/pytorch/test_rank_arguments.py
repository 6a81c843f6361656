"""Every function of torch.distributed with a rank argument, and the methods of a process group.

Integers of NumPy and torch are ranks. Anything else raises an error on every rank before anything
is sent, and the group remains usable.
"""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import BACKEND
from inputs import equal

from mpicoll import MpicollError

#: The last rank, as a program may compute it.
INTEGERS = {
    "NumPy's scalar": np.int64,
    "NumPy's array": np.array,
    "tensor": torch.tensor,
    "tensor of one dimension": lambda rank: torch.tensor([rank]),
    "argmax": lambda rank: torch.eye(rank + 1)[rank].argmax(),
}
#: torch converts a floating-point tensor to an integer before the backend receives it.
NO_RANKS = [1.5, "1", b"1", [1], np.array([0, 1]), object(), 99, -1, 2**70]

#: The arguments that name one rank of a group.
NAMES = ("src", "dst", "peer", "group_src", "group_dst", "group_peer")


def value(world, rank=None):
    return torch.full((2,), 1.0 + (world.me if rank is None else rank))


def values(world):
    return [value(world, rank) for rank in range(world.size)]


def zeros(world):
    return [torch.zeros(2) for _ in range(world.size)]


def broadcast(world, function, **root):
    mine = value(world)
    function(mine, **root)
    equal(mine, value(world, world.size - 1))


def reduce(world, function, **root):
    mine = value(world)
    function(mine, **root)
    if world.me == world.size - 1:
        equal(mine, sum(values(world)))


def gather(world, function, *, fits=True, **root):
    at_root = fits and world.me == world.size - 1
    into = zeros(world) if at_root else None
    function(value(world), into, **root)
    if at_root:
        equal(torch.stack(into), torch.stack(values(world)))


def gather_single(world, function, *, fits=True, **root):
    at_root = fits and world.me == world.size - 1
    into = torch.zeros(world.size, 2) if at_root else None
    function(value(world), into, **root)
    if at_root:
        equal(into, torch.stack(values(world)))


def scatter(world, function, *, fits=True, **root):
    mine = torch.zeros(2)
    function(mine, values(world) if fits and world.me == world.size - 1 else None, **root)
    equal(mine, value(world))


def broadcast_object_list(world, function, **root):
    objects = [world.me]
    function(objects, **root)
    assert objects == [world.size - 1]


def gather_object(world, function, *, fits=True, **root):
    at_root = fits and world.me == world.size - 1
    into = [None] * world.size if at_root else None
    function(world.me, into, **root)
    if at_root:
        assert into == list(range(world.size))


def scatter_object_list(world, function, *, fits=True, **root):
    into = [None]
    at_root = fits and world.me == world.size - 1
    function(into, list(range(world.size)) if at_root else None, **root)
    assert into == [world.me]


def send(world, function, *, fits=True, **peer):
    """Rank 0 sends to the last rank; with a wrong rank every rank calls."""
    if world.me == 0 or not fits:
        work = function(value(world), **peer)
        if work is not None:
            work.wait()
    elif world.me == world.size - 1:
        mine = torch.zeros(2)
        dist.recv(mine, 0)
        equal(mine, value(world, 0))


def recv(world, function, *, fits=True, **peer):
    mine = torch.zeros(2)
    if world.me == 0 or not fits:
        work = function(mine, **peer)
        if isinstance(work, dist.Work):
            work.wait()
        equal(mine, value(world, world.size - 1))
    elif world.me == world.size - 1:
        dist.send(value(world), 0)


def send_object_list(world, function, *, fits=True, **peer):
    if world.me == 0 or not fits:
        function([5], **peer)
    elif world.me == world.size - 1:
        objects = [None]
        dist.recv_object_list(objects, 0)
        assert objects == [5]


def recv_object_list(world, function, *, fits=True, **peer):
    objects = [None]
    if world.me == 0 or not fits:
        function(objects, **peer)
        assert objects == [5]
    elif world.me == world.size - 1:
        dist.send_object_list([5], 0)


def p2p(world, function, **peer):
    """A batch with one message."""

    def batch(tensor, **peer):
        (work,) = dist.batch_isend_irecv([function(dist.isend, tensor, **peer)])
        return work

    send(world, batch, **peer)


#: A call of each function, with the last rank as root or peer. With ``fits=False`` the rank is
#: wrong and no rank passes a list, because torch itself compares a list with the rank.
CALLS = {
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "gather_single": gather_single,  # from torch 2.15 on, and so is its older name
    "gather_into_tensor": gather_single,
    "scatter": scatter,
    "broadcast_object_list": broadcast_object_list,
    "gather_object": gather_object,
    "scatter_object_list": scatter_object_list,
    "send": send,
    "isend": send,
    "recv": recv,
    "irecv": recv,
    "send_object_list": send_object_list,
    "recv_object_list": recv_object_list,
    "P2POp": p2p,
}
CALLS = {name: call for name, call in CALLS.items() if hasattr(dist, name)}


def rank_arguments(function):
    return [name for name in inspect.signature(function).parameters if name in NAMES]


def test_every_function_with_a_rank_argument_has_a_row():
    public = {name: made for name, made in vars(dist).items() if not name.startswith("_")}
    functions = {n: f for n, f in public.items() if inspect.isfunction(f) or f is dist.P2POp}
    assert {name for name, function in functions.items() if rank_arguments(function)} == {*CALLS}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", INTEGERS)
def test_ranks_may_be_numpy_or_torch_integers(world, name, kind):
    function = getattr(dist, name)
    for argument in rank_arguments(function):
        CALLS[name](world, function, **{argument: INTEGERS[kind](world.size - 1)})
    check_usable(world)


@pytest.mark.parametrize("name", CALLS)
def test_invalid_rank_leaves_the_group_usable(world, name):
    function = getattr(dist, name)
    call = CALLS[name]
    fits = (
        {"fits": False} if "fits" in inspect.signature(call).parameters or name == "P2POp" else {}
    )
    for argument in rank_arguments(function):
        for wrong in NO_RANKS:
            with pytest.raises((TypeError, ValueError)):
                call(world, function, **fits, **{argument: wrong})
            check_usable(world)


def methods(group, world):
    """The methods of a process group with a rank, called with it."""
    mine = value(world)
    empty = torch.zeros(0)
    return {
        "broadcast": lambda root: group.broadcast([mine], root),
        "broadcast by name": lambda root: group.broadcast(mine, root=root),
        "reduce": lambda root: group.reduce([mine], root),
        "gather": lambda root: group.gather([], [mine], root),
        "scatter": lambda root: group.scatter([mine], [], root),
        "send": lambda peer: group.send([empty], peer, 0),
        "recv": lambda peer: group.recv([empty], peer, 0),
    }


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo's methods take Options only")
def test_group_methods_reject_invalid_ranks(world):
    group = dist.distributed_c10d._get_default_group()
    for name, call in methods(group, world).items():
        for wrong in [*NO_RANKS, torch.tensor(1.5), np.float32(1)]:
            with pytest.raises((TypeError, ValueError), match=name.split()[0]) as caught:
                call(wrong)
            assert isinstance(caught.value, MpicollError), (name, wrong, caught.value)
            check_usable(world)
    mine = value(world)
    group.broadcast([mine], torch.tensor(world.size - 1)).wait()
    equal(mine, value(world, world.size - 1))


def check_usable(world):
    one = torch.ones(3)
    dist.all_reduce(one)
    equal(one, torch.full((3,), float(world.size)))
