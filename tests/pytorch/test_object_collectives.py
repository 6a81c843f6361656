"""Object collectives and messages, which torch pickles and the backend transfers."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from conftest import members
from inputs import equal, normal


def thing(rank):
    """An object whose size depends on the rank."""
    return {"rank": rank, "text": "x" * (1000 * rank), "tensor": normal(rank, 3), "none": None}


def same(found, ranks):
    """Compare with the objects of these ranks."""
    for one, rank in zip(found, ranks, strict=True):
        equal(one.pop("tensor"), normal(rank, 3))
        assert one == {"rank": rank, "text": "x" * (1000 * rank), "none": None}


def test_object_collectives_with_every_root(teams):
    for team in members(teams):
        ranks = range(team.size)
        objects = [None] * team.size
        dist.all_gather_object(objects, thing(team.me), team.group)
        same(objects, ranks)
        for root in ranks:
            at_root = team.me == root
            objects = [None] * team.size if at_root else None
            dist.gather_object(thing(team.me), objects, group=team.group, group_dst=root)
            same(objects or [], ranks if at_root else [])
            objects = [thing(root), (), "text"] if at_root else [None] * 3
            dist.broadcast_object_list(objects, src=team.ranks[root], group=team.group)
            same(objects[:1], [root])
            assert objects[1:] == [(), "text"]
            objects = [thing(rank) for rank in ranks] if at_root else None
            output = [None]
            dist.scatter_object_list(output, objects, group=team.group, group_src=root)
            same(output, [team.me])


@pytest.mark.parametrize("use_batch", [False, True])
def test_object_messages(world, use_batch):
    """From even ranks to their partners, then back."""
    partner = world.me ^ 1
    for sender in (0, 1):
        if world.me % 2 == sender:
            dist.send_object_list([thing(world.me), 5], partner, use_batch=use_batch)
        else:
            objects = [None, None]
            assert dist.recv_object_list(objects, partner, use_batch=use_batch) == partner
            same(objects[:1], [partner])
            assert objects[1] == 5
