"""Object collectives and messages, which torch pickles and the backend transfers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from conftest import members
from inputs import equal, normal


def thing(rank):
    """An object whose size depends on the rank."""
    return {"rank": rank, "text": "x" * (1000 * rank), "tensor": normal(rank, 3), "none": None}


def same(found, rank):
    assert found.keys() == thing(rank).keys()
    assert found["rank"] == rank
    assert found["text"] == thing(rank)["text"]
    equal(found["tensor"], normal(rank, 3))


def test_all_gather_object(teams):
    for team in members(teams):
        objects = [None] * team.size
        dist.all_gather_object(objects, thing(team.me), team.group)
        for rank, found in enumerate(objects):
            same(found, rank)


def test_gather_object(teams):
    for team in members(teams):
        for root in range(team.size):
            objects = [None] * team.size if team.me == root else None
            dist.gather_object(thing(team.me), objects, group=team.group, group_dst=root)
            for rank, found in enumerate(objects or []):
                same(found, rank)


def test_broadcast_object_list(teams):
    for team in members(teams):
        for root in range(team.size):
            objects = [thing(root), (), "text"] if team.me == root else [None] * 3
            dist.broadcast_object_list(objects, src=team.ranks[root], group=team.group)
            same(objects[0], root)
            assert objects[1:] == [(), "text"]


def test_scatter_object_list(teams):
    for team in members(teams):
        for root in range(team.size):
            objects = [thing(rank) for rank in range(team.size)] if team.me == root else None
            output = [None]
            dist.scatter_object_list(output, objects, group=team.group, group_src=root)
            same(output[0], team.me)


@pytest.mark.parametrize("use_batch", [False, True])
def test_object_messages(world, use_batch):
    """From even ranks to their partners, then back."""
    partner = world.me ^ 1
    for sender in (0, 1):
        if world.me % 2 == sender:
            dist.send_object_list([thing(world.me), 5], partner, use_batch=use_batch)
        else:
            objects = [None, None]
            who = dist.recv_object_list(objects, partner, use_batch=use_batch)
            assert who == partner
            same(objects[0], partner)
            assert objects[1] == 5
