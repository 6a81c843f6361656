"""Point-to-point messages: tags, any source and batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import members
from inputs import DTYPES, equal, normal, whole


def neighbours(team):
    """Group ranks of the next and the previous rank."""
    return (team.me + 1) % team.size, (team.me - 1) % team.size


@pytest.mark.parametrize(
    "dtype, count",
    [*((dtype, 6) for dtype in DTYPES), *((torch.float32, count) for count in (0, 1, 300_000))],
    ids=str,
)
def test_messages_in_a_ring(teams, dtype, count):
    """With group ranks and global ranks, between tensors of equal and of different layouts."""
    for team in members(teams, 2):
        after, before = neighbours(team)
        mine, wanted = whole(dtype, team.me, count, 2), whole(dtype, before, count, 2)
        turned = mine.t().contiguous().t()
        for out, like in (mine, mine), (turned, turned), (turned, mine):
            theirs = torch.zeros_like(like)
            for work in (
                dist.irecv(theirs, group_src=before, group=team.group),
                dist.isend(out, group_dst=after, group=team.group),
            ):
                work.wait()
                assert work.is_completed()
            equal(theirs, wanted)
            theirs.zero_()
            taken = dist.irecv(theirs, team.ranks[before], team.group)
            assert dist.send(out, team.ranks[after], team.group) is None
            taken.wait()
            equal(theirs, wanted)


def test_messages_are_matched_by_group_and_tag(teams):
    """Received in the opposite order."""
    world, _, reordered = teams
    partner = world.me ^ 1
    places = [(team.group, tag) for team in (world, reordered) for tag in (5, 0, 70, 32_000)]
    sent = [
        dist.isend(normal(world.me, 4, key=i), partner, group, tag=tag)
        for i, (group, tag) in enumerate(places)
    ]
    for i, (group, tag) in reversed([*enumerate(places)]):
        theirs = torch.zeros(4)
        assert dist.recv(theirs, partner, group, tag=tag) == partner
        equal(theirs, normal(partner, 4, key=i))
    for work in sent:
        work.wait()


@pytest.mark.parametrize("blocking", [True, False], ids=["recv", "irecv"])
def test_receive_from_any_source_returns_the_sender(teams, blocking):
    for team in members(teams, 2):
        if team.me:
            dist.send(normal(team.me, 5), team.ranks[0], team.group, tag=9)
        else:
            senders = []
            for _ in range(team.size - 1):
                theirs = torch.zeros(5)
                if blocking:
                    sender = dist.recv(theirs, group=team.group, tag=9)
                else:
                    work = dist.irecv(theirs, group=team.group, tag=9)
                    work.wait()
                    sender = team.ranks[work._source_rank()]
                equal(theirs, normal(team.ranks.index(sender), 5))
                senders.append(sender)
            assert sorted(senders) == sorted(team.ranks[1:])
        dist.barrier(team.group)


@pytest.mark.parametrize("receives_first", [False, True], ids=["sends-first", "receives-first"])
def test_batch_of_messages(teams, receives_first):
    """In any order, with several messages to the same rank."""
    for team in members(teams, 2):
        after, before = neighbours(team)
        theirs = [torch.zeros(4), torch.zeros(40_000)]
        sends = [
            dist.P2POp(dist.isend, normal(team.me, len(one)), team.ranks[after], team.group)
            for one in theirs
        ]
        receives = [
            dist.P2POp(dist.irecv, one, group=team.group, group_peer=before) for one in theirs
        ]
        calls = receives + sends if receives_first else sends + receives
        works = dist.batch_isend_irecv(calls)
        assert works
        for work in works:
            work.wait()
        for one in theirs:
            equal(one, normal(before, len(one)))
