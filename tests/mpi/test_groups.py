"""Groups: how they are made and ended, what they answer, and what a rank outside gets."""

from __future__ import annotations

import resource
import warnings
from datetime import timedelta

import numpy as np
import pytest

import mpicoll as dist

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def total(group):
    """The sum over a group of the global ranks."""
    x = np.array([dist.get_rank()])
    dist.all_reduce(x, group=group)
    return int(x[0])


def ended(*groups):
    for group in groups:
        dist.destroy_process_group(group)


def test_ranks_of_groups(teams):
    for team in teams:
        if team.me is None:
            assert team.group == OUTSIDE
            assert dist.get_rank(team.group) == dist.get_world_size(team.group) == -1
            continue
        group = team.group
        assert dist.get_rank(group) == group.rank() == team.me
        assert dist.get_world_size(group) == group.size() == team.size
        assert dist.get_process_group_ranks(group) == list(team.ranks)
        for i, rank in enumerate(team.ranks):
            assert dist.get_group_rank(group, rank) == i
            assert dist.get_global_rank(group, i) == rank
        with pytest.raises(ValueError, match="get_global_rank"):
            dist.get_global_rank(group, team.size)
        with pytest.raises(ValueError, match="get_group_rank"):
            dist.get_group_rank(group, 99)
        assert total(group) == sum(team.ranks)


def test_the_default_group(world):
    assert dist.group.WORLD is dist.GroupMember.WORLD
    assert dist.get_process_group_ranks(None) == list(range(world.size))
    assert dist.get_rank(dist.group.WORLD) == dist.get_rank() == world.me
    assert dist.is_initialized()
    with pytest.raises(ValueError, match="exists already"):
        dist.init_process_group()


def test_backends(world):
    assert dist.get_backend() == "mpi" == dist.Backend.MPI
    assert dist.get_backend_config() == "cpu:mpi,cuda:mpi"
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == group.name() == "gloo"
    ended(group)
    with pytest.raises(ValueError, match="ucc"):
        dist.new_group(backend="ucc")


def test_new_groups_are_sorted_unless_told(world):
    ranks = list(range(world.size))[::-1]
    up, down = dist.new_group(ranks), dist.new_group(ranks, sort_ranks=False)
    assert dist.get_process_group_ranks(up) == sorted(ranks)
    assert dist.get_process_group_ranks(down) == ranks
    assert dist.get_rank(down) == world.size - 1 - world.me
    out = np.zeros(world.size, int)
    dist.all_gather_single(out, np.array([world.me]), group=down)
    assert out.tolist() == ranks
    ended(up, down)


def test_bad_ranks(world):
    for ranks in ([0, 0], [world.size], [-1]):
        with pytest.raises(ValueError, match="new_group"):
            dist.new_group(ranks)
    with pytest.raises(TypeError, match="new_group"):
        dist.new_group(["zero"])
    for bad in (None, []):
        with pytest.raises(ValueError, match="ranks_per_subgroup_list"):
            dist.new_subgroups_by_enumeration(bad)
    with pytest.raises(TypeError, match="timeout"):
        dist.new_group(timeout="3")
    with pytest.raises(ValueError, match="timeout"):
        dist.new_group(timeout=-3)
    assert total(None) == sum(range(world.size))


def test_timeouts(world):
    for given, seconds in ((2.5, 2.5), (timedelta(minutes=2), 120), (None, 60)):
        group = dist.new_group(timeout=given)
        assert group.timeout == seconds
        ended(group)


def test_local_synchronization_leaves_the_others_alone(world):
    before = dist.get_pg_count()
    if world.me == 0:  # nobody else calls
        group = dist.new_group([0], use_local_synchronization=True)
        assert total(group) == 0
        again = dist.new_group([0], use_local_synchronization=True)
        assert again.group_name != group.group_name
        ended(group, again)
    if world.size > 1:
        assert dist.new_group([1], use_local_synchronization=True) is None or world.me == 1
    group = dist.new_group()
    assert total(group) == sum(range(world.size))
    ended(group)
    assert dist.get_pg_count() == before + (world.me == 1)
    dist.barrier()


def test_nested_and_overlapping_groups(world):
    n = world.size
    whole = dist.new_group()
    rings = [dist.new_group(sorted({r, (r + 1) % n})) for r in range(n)]
    mine = [(r, g) for r, g in enumerate(rings) if g != OUTSIDE]
    assert (
        len(mine) == len({frozenset({r, (r + 1) % n}) for r in range(n)}) - max(0, n - 2) or n < 3
    )
    for r, group in mine:
        assert total(group) == sum({r, (r + 1) % n})
    assert total(whole) == sum(range(n))
    ended(whole, *(group for _, group in mine))


# ---- subgroups ---------------------------------------------------------------------------------


def test_new_subgroups(world):
    n = world.size
    for size in [s for s in range(1, n + 1) if n % s == 0]:
        mine, all_of_them = dist.new_subgroups(size)
        first = world.me // size * size
        assert dist.get_process_group_ranks(mine) == list(range(first, first + size))
        assert len(all_of_them) == n // size and mine in all_of_them
        assert [g == OUTSIDE for g in all_of_them].count(False) == 1
        assert total(mine) == sum(range(first, first + size))
        ended(*all_of_them)
    mine, _ = dist.new_subgroups()  # by node: all ranks are on this one
    assert dist.get_process_group_ranks(mine) == list(range(n))
    ended(mine)
    for size in (0, -1, n + 1, *([2] if n == 3 else [])):
        with pytest.raises(ValueError, match="group_size"):
            dist.new_subgroups(size)


def test_subgroups_by_enumeration(world):
    n = world.size
    before = dist.get_pg_count()
    mine, both = dist.new_subgroups_by_enumeration([[0], list(range(2, n))] if n > 2 else [[0]])
    if world.me == 1:
        assert mine is None
    else:
        assert total(mine) == (0 if world.me == 0 else sum(range(2, n)))
    ended(*both)
    if n > 1:
        with pytest.raises(ValueError, match="rank 0"):
            dist.new_subgroups_by_enumeration([[0, 1], [0]])
    assert dist.get_pg_count() == before


def test_split_group(world):
    n = world.size
    parent = dist.new_group(list(range(n))[::-1], sort_ranks=False)
    lists = [list(range(0, n, 2)), list(range(1, n, 2))][: 2 if n > 1 else 1]
    mine = dist.split_group(parent, lists, timeout=7)
    own = next(ranks for ranks in lists if parent.rank() in ranks)
    # Ranks of the parent are meant: its rank r is global rank n - 1 - r.
    assert dist.get_process_group_ranks(mine) == [n - 1 - r for r in own]
    assert mine.timeout == 7 and mine.group_desc
    assert total(mine) == sum(n - 1 - r for r in own)
    partial = dist.split_group(parent, [[0]])
    assert (partial is None) == (parent.rank() != 0)
    for bad in (None, [], [[]], [[0, 0]], [[n]], [[0], [0]]):
        with pytest.raises(ValueError, match="split_group"):
            dist.split_group(parent, bad)
    ended(*([partial] if partial else []), mine, parent)


def test_shrink_group(world):
    n = world.size
    if n == 1:
        with pytest.raises(ValueError, match="cannot shrink"):
            dist.shrink_group([0])
        return
    group = dist.new_group()
    for bad, error in (
        ([], ValueError), ((1,), TypeError), ([n], ValueError), ([1, 1], ValueError),
        (list(range(n)), ValueError), (["1"], TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match="shrink_group"):
            dist.shrink_group(bad, group)
    with pytest.raises(ValueError, match="shrink_flags"):
        dist.shrink_group([1], group, shrink_flags=2)
    if world.me == n - 1:
        with pytest.raises(RuntimeError, match="excluded"):
            dist.shrink_group([n - 1], group)
    else:
        smaller = dist.shrink_group([n - 1], group)
        assert dist.get_process_group_ranks(smaller) == list(range(n - 1))
        assert total(smaller) == sum(range(n - 1))
        with pytest.raises(ValueError, match="destroyed"):
            total(group)
        ended(smaller)
    dist.barrier()
    if world.me == n - 1:
        dist.destroy_process_group(group)


# ---- outside -----------------------------------------------------------------------------------


def test_what_a_rank_outside_gets(world):
    x = np.zeros(2)
    silent = [
        (lambda: dist.all_reduce(x, group=OUTSIDE), None),
        (lambda: dist.all_reduce(x, group=OUTSIDE, async_op=True), None),
        (lambda: dist.all_gather([x], x, group=OUTSIDE), None),
        (lambda: dist.all_gather_single(x, x, group=OUTSIDE), None),
        (lambda: dist.reduce_scatter_single(x, x, group=OUTSIDE), None),
        (lambda: dist.all_to_all_single(x, x, group=OUTSIDE), None),
        (lambda: dist.all_reduce_coalesced([x], group=OUTSIDE), None),
        (lambda: dist.gather(x, group=OUTSIDE, group_dst=0), None),
        (lambda: dist.broadcast(x, group=OUTSIDE, group_src=0), None),
        (lambda: dist.barrier(OUTSIDE), None),
        (lambda: dist.monitored_barrier(OUTSIDE), None),
        (lambda: dist.all_gather_object([None], 1, group=OUTSIDE), None),
        (lambda: dist.irecv(x, group=OUTSIDE), None),
        (lambda: dist.recv(x, group=OUTSIDE), -1),
        (lambda: dist.recv_object_list([None], group=OUTSIDE), -1),
    ]
    for call, answer in silent:
        with pytest.warns(UserWarning, match=f"global rank {world.me} is not in the group"):
            assert call() == answer
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dist.get_rank(OUTSIDE) == dist.get_world_size(OUTSIDE) == -1
        assert dist.destroy_process_group(OUTSIDE) is None
    for call in (
        lambda: dist.broadcast(x, src=0, group=OUTSIDE),
        lambda: dist.reduce(x, dst=0, group=OUTSIDE),
        lambda: dist.scatter(x, group=OUTSIDE),
        lambda: dist.gather_object(1, group=OUTSIDE),
        lambda: dist.broadcast_object_list([1], src=0, group=OUTSIDE),
        lambda: dist.send(x, 0, group=OUTSIDE),
        lambda: dist.isend(x, 0, group=OUTSIDE),
        lambda: dist.get_group_rank(OUTSIDE, 0),
        lambda: dist.get_backend(OUTSIDE),
    ):
        with pytest.raises(ValueError, match=r"\w+: "):
            call()


def test_what_is_no_group(world):
    for bad in ("world", 5, object()):
        with pytest.raises(TypeError, match="group"):
            dist.all_reduce(np.zeros(1), group=bad)
    with pytest.raises(ValueError, match="not a group that is alive"):
        dist.destroy_process_group("world")


# ---- ends --------------------------------------------------------------------------------------


def test_a_group_that_was_destroyed(world):
    group = dist.new_group()
    assert total(group) == sum(range(world.size))
    dist.destroy_process_group(group)
    x = np.zeros(1)
    for call in (
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.barrier(group),
        lambda: dist.all_gather_object([None] * world.size, 1, group=group),
        lambda: dist.irecv(x, group=group),
        lambda: dist.destroy_process_group(group),
        lambda: dist.get_backend(group),
    ):
        with pytest.raises(ValueError, match=r"destroyed|not a group"):
            call()


def test_destroy_takes_unmatched_receives_back(world):
    group = dist.new_group()
    box = np.zeros(3)
    work = dist.irecv(box, group=group)
    dist.destroy_process_group(group)
    assert work.is_completed()
    with pytest.raises(dist.CollectiveTimeoutError, match="destroyed"):
        work.wait()


def grown(step, times):
    """KiB by which the greatest size of this process grows in ``times`` repetitions of a step,
    after as many to warm up.
    """
    for _ in range(times):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(times):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_thousands_of_groups_one_after_another(world):
    """More than any MPI has communicators for at a time, each used, with its thread."""

    def step():
        group = dist.new_group()
        x = np.ones(10)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    count = 1500 if world.size == 2 else 100
    assert grown(step, count) < 8 * 1024
    assert dist.get_pg_count() >= 1


def test_thousands_of_works(world):
    x = np.ones(100)
    peer = (world.me + 1) % world.size

    def step():
        for _ in range(10):
            dist.all_reduce(np.zeros(100), async_op=True)  # dropped at once, with its array
        dist.isend(x, peer)
        dist.irecv(np.zeros(100), (world.me - 1) % world.size).wait()
        dist.barrier()

    assert grown(step, 300) < 8 * 1024
    dist.barrier()
