"""Point-to-point messages: tags, any source, batches, and invalid arguments."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from conftest import members
from inputs import DTYPES, equal, normal, whole

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def neighbours(team):
    """Group ranks of the next and the previous rank."""
    return (team.me + 1) % team.size, (team.me - 1) % team.size


@EACH_DTYPE
def test_send_and_recv(world, dtype):
    """Even ranks send first."""
    partner = world.me ^ 1
    mine, theirs = whole(dtype, world.me, 3, 2), torch.zeros(3, 2, dtype=dtype)
    if world.me % 2 == 0:
        assert dist.send(mine, partner) is None
        assert dist.recv(theirs, partner) == partner
    else:
        assert dist.recv(theirs, partner) == partner
        assert dist.send(mine, partner) is None
    equal(theirs, whole(dtype, partner, 3, 2))


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
def test_messages_in_a_ring(teams, count):
    for team in members(teams, 2):
        after, before = neighbours(team)
        mine, theirs = normal(team.me, count), torch.zeros(count)
        for work in (
            dist.irecv(theirs, group_src=before, group=team.group),
            dist.isend(mine, group_dst=after, group=team.group),
        ):
            work.wait()
            assert work.is_completed()
        equal(theirs, normal(before, count))
        theirs = torch.zeros(count)  # the same with global ranks
        taken = dist.irecv(theirs, team.ranks[before], team.group)
        dist.send(mine, team.ranks[after], team.group)
        taken.wait()
        equal(theirs, normal(before, count))


def test_messages_are_matched_by_tag(world):
    """Received in the opposite order."""
    partner = world.me ^ 1
    tags = [5, 0, 70, 32_000]
    sent = [dist.isend(normal(world.me, 4, key=tag), partner, tag=tag) for tag in tags]
    for tag in reversed(tags):
        theirs = torch.zeros(4)
        dist.recv(theirs, partner, tag=tag)
        equal(theirs, normal(partner, 4, key=tag))
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


def test_messages_of_groups_are_separate(teams):
    """The same partner and tag in two groups, received in the opposite order."""
    world, _, reordered = teams
    partner = world.me ^ 1
    if world.size == 4:
        first, second = world.group, reordered.group
    else:
        first, second = reordered.group, world.group
    sent = [
        dist.isend(torch.full((2,), 1.0), partner, first, tag=4),
        dist.isend(torch.full((2,), 2.0), partner, second, tag=4),
    ]
    for group, value in ((second, 2.0), (first, 1.0)):
        theirs = torch.zeros(2)
        dist.recv(theirs, partner, group, tag=4)
        equal(theirs, torch.full((2,), value))
    for work in sent:
        work.wait()


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


def test_invalid_message_arguments_are_rejected(world):
    n, me = world.size, world.me
    with pytest.raises(ValueError):
        dist.send(torch.zeros(1), me)
    with pytest.raises(ValueError):
        dist.isend(torch.zeros(1), 0, group_dst=0)
    with pytest.raises(ValueError):
        dist.irecv(torch.zeros(1), 0, group_src=0)
    for call in (dist.send, dist.recv, dist.isend, dist.irecv):
        with pytest.raises((ValueError, RuntimeError)):
            call(torch.zeros(1), n + 3)
    dist.barrier()


def test_transposed_messages(world):
    partner = world.me ^ 1
    for theirs in (torch.zeros(3, 4).t(), torch.zeros(4, 3)):  # the sender's layout, another one
        taken = dist.irecv(theirs, partner)
        dist.send(normal(world.me, 3, 4).t(), partner)
        taken.wait()
        equal(theirs, normal(partner, 3, 4).t())
