"""Creation, use and destruction of groups: any ranks, any order, and nested."""

from __future__ import annotations

import contextlib
import warnings
from datetime import timedelta
from itertools import combinations, permutations

import numpy as np
import pytest
from conftest import needs_2_ranks
from mpi4py import MPI

import mpicoll as dist
from mpicoll.api import backends
from mpicoll.core import groups

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER

pytestmark = [pytest.mark.on_4, pytest.mark.usefixtures("world", "swept")]


@pytest.fixture
def swept():
    """Destroy all groups that a test leaves, in the same order on all members."""
    yield
    for group in groups.state.groups[::-1]:
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def assert_works(group, ranks):
    """Check that the members of a group exchange data, in order, and only with each other."""
    me, size = dist.get_rank(), len(ranks)
    assert me in ranks
    assert (dist.get_rank(group), dist.get_world_size(group)) == (ranks.index(me), size)
    assert (group.rank(), group.size()) == (ranks.index(me), size)
    assert dist.get_process_group_ranks(group) == list(ranks)
    for i, rank in enumerate(ranks):
        assert dist.get_group_rank(group, rank) == i
        assert dist.get_global_rank(group, i) == rank
    x = np.array([2.0**me])
    dist.all_reduce(x, group=group)
    assert x[0] == sum(2.0**rank for rank in ranks)
    found = np.zeros(size, np.int32)
    dist.all_gather_single(found, np.array([me], np.int32), group=group)
    assert found.tolist() == list(ranks)
    y = np.array([me])
    dist.broadcast(y, group_src=size - 1, group=group, async_op=True).wait()
    assert y[0] == ranks[-1]


def assert_outside(found, ranks):
    assert dist.get_rank() not in ranks
    assert found == OUTSIDE == -100
    assert (dist.get_rank(found), dist.get_world_size(found)) == (-1, -1)


def test_the_default_group(world):
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    assert group is dist.GroupMember.WORLD
    assert dist.is_initialized()
    assert_works(group, range(world.size))
    assert dist.get_process_group_ranks(None) == list(range(world.size))
    assert dist.get_rank() == world.me and dist.get_world_size() == world.size
    assert dist.get_pg_count() == 1
    assert dist.get_backend() == dist.get_backend(group) == "mpi"
    assert isinstance(dist.get_backend(), dist.Backend)
    assert dist.get_backend_config() == dist.get_backend_config(group) == "cpu:mpi,cuda:mpi"
    assert f"rank {world.me} of {world.size}" in repr(group)


def test_second_init_is_rejected_and_the_group_stays_usable(world):
    with pytest.raises(ValueError, match="exists already"):
        dist.init_process_group()
    assert_works(dist.group.WORLD, range(world.size))


def test_groups_of_every_subset_work_concurrently(world):
    subsets = [s for k in range(1, world.size + 1) for s in combinations(range(world.size), k)]
    made = {ranks: dist.new_group(list(ranks)) for ranks in subsets}
    assert dist.get_pg_count() == 1 + sum(world.me in ranks for ranks in subsets)
    for _ in range(2):
        for ranks, group in made.items():
            if world.me in ranks:
                assert_works(group, ranks)
            else:
                assert_outside(group, ranks)
    assert_works(dist.group.WORLD, range(world.size))


def test_new_group_keeps_the_order_of_ranks(world):
    for ranks in permutations(range(world.size)):
        assert_works(dist.new_group(list(ranks), sort_ranks=False), ranks)
        assert_works(dist.new_group(list(ranks)), range(world.size))


def test_new_group_contains_all_ranks_by_default(world):
    for group in dist.new_group(), dist.new_group(None), dist.new_group(range(world.size)):
        assert group is not dist.group.WORLD
        assert_works(group, range(world.size))
    assert_outside(dist.new_group([]), [])


def test_pg_options_are_ignored_with_one_warning(world, monkeypatch):
    monkeypatch.setattr(backends, "_warned_about_options", False)
    everybody = list(range(world.size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = dist.new_group(pg_options=object())
        split = dist.split_group(None, [everybody], pg_options=object())
    assert [str(one.message)[:33] for one in caught] == ["new_group: pg_options (object) are"[:33]]
    assert caught[0].filename == __file__
    for group in (made, split):
        assert_works(group, everybody)
        dist.destroy_process_group(group)


def test_group_reports_its_backend_and_description(world):
    for backend, config in (("gloo", "cpu:gloo,cuda:gloo"), ("NCCL", "cpu:nccl,cuda:nccl")):
        group = dist.new_group(backend=backend, group_desc="mine")
        assert dist.get_backend(group) == backend.lower() == group.name()
        assert dist.get_backend_config(group) == config
        assert group.group_desc == "mine"
        assert_works(group, range(world.size))
    both = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert dist.get_backend_config(both) == "cpu:gloo,cuda:nccl"
    assert_works(both, range(world.size))
    assert dist.get_backend(dist.new_group()) == "mpi"


def test_group_timeouts(world, mpi):
    assert dist.new_group().timeout == dist.group.WORLD.timeout == 60
    assert dist.new_group(timeout=7).timeout == 7
    assert dist.new_group(timeout=timedelta(minutes=2)).timeout == 120
    group = dist.new_group(timeout=timedelta(milliseconds=300))
    if world.size == 1:
        pytest.skip("needs 2 ranks")
    if world.me == 0:
        work = dist.all_reduce(np.ones(3), group=group, async_op=True)
        with pytest.raises(dist.CollectiveTimeoutError, match=r"all_reduce on rank 0.* 0\.3 s"):
            work.wait()
        with pytest.raises(TimeoutError, match="takes no more calls"):
            dist.recv(np.zeros(2), 1, group=group)
        mpi.Barrier()
        with pytest.raises(dist.CollectiveTimeoutError, match="takes no more calls"):
            work.wait(timedelta(seconds=30))
    else:
        mpi.Barrier()
        with pytest.raises(dist.CollectiveTimeoutError):  # in the first or the second call
            for _ in range(2):
                dist.all_reduce(np.ones(3), group=group)


@needs_2_ranks
def test_only_members_call_new_group_with_local_synchronization(world):
    """Ranks may therefore create different numbers of groups."""
    mine = [r for r in range(world.size) if r % 2 == world.me % 2]
    for _ in range(1 + world.me % 2):  # odd ranks create two groups
        group = dist.new_group(mine, use_local_synchronization=True)
        assert_works(group, mine)
    pair = [0, world.size - 1]
    if world.me in pair:
        again = [dist.new_group(pair, use_local_synchronization=True) for _ in range(3)]
        for one in again:
            assert_works(one, pair)
        # Destroying a group does not affect the next one with the same ranks.
        dist.destroy_process_group(again[1])
        later = dist.new_group(pair, use_local_synchronization=True)
        assert later.group_name not in (again[0].group_name, again[2].group_name)
        assert_works(later, pair)
        assert_works(again[2], pair)
    # A non-member that calls anyway gets the non-member value.
    outside = dist.new_group([0], use_local_synchronization=True)
    assert (outside is None) == (world.me != 0)
    # Numbering of groups created by all ranks is unaffected.
    assert_works(dist.new_group(), range(world.size))


@pytest.fixture
def alone(world, swept):
    """A group of rank 0. All other ranks are outsiders."""
    return dist.new_group([0])


def warned(name, rank, call):
    """Return the result of a call by an outsider. Check its warning, which names this file."""
    with pytest.warns(UserWarning) as caught:
        found = call()
    assert len(caught) == 1 and caught[0].filename == __file__
    text = str(caught[0].message)
    assert text.startswith(f"{name}: ") and f"global rank {rank} is not in the group" in text
    return found


def calls_with(g, n=1, array=np.ones):
    """Calls in a group of n ranks by the name of the function. Rank 0 is the root."""
    x, y, whole, other = array(1), array(1), array(n), array(n)
    xs, ys = [array(1) for _ in range(n)], [array(1) for _ in range(n)]

    def at_root(values):
        return values if dist.get_rank() == 0 else None

    return {
        "all_reduce": lambda: dist.all_reduce(x, group=g),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x], group=g),
        "broadcast": lambda: dist.broadcast(x, group_src=0, group=g),
        "reduce": lambda: dist.reduce(x, group_dst=0, group=g),
        "gather": lambda: dist.gather(x, at_root(ys), group_dst=0, group=g),
        "scatter": lambda: dist.scatter(x, at_root(ys), group_src=0, group=g),
        "all_gather": lambda: dist.all_gather(ys, x, group=g),
        "all_gather_single": lambda: dist.all_gather_single(whole, x, group=g),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[y] for y in ys], [x], group=g),
        "reduce_scatter": lambda: dist.reduce_scatter(x, ys, group=g),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(x, whole, group=g),
        "all_to_all": lambda: dist.all_to_all(xs, ys, group=g),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, other, group=g),
        "scan": lambda: dist.scan(x, y, group=g),
        "exscan": lambda: dist.exscan(x, y, group=g),
        "barrier": lambda: dist.barrier(group=g),
        "monitored_barrier": lambda: dist.monitored_barrier(group=g, timeout=5),
        "irecv": lambda: dist.irecv(y, 0, group=g),
        "isend": lambda: dist.isend(x, group_dst=0, group=g),
        "send": lambda: dist.send(x, group_dst=0, group=g),
        "recv": lambda: dist.recv(y, group=g),
        "all_gather_object": lambda: dist.all_gather_object([None] * n, 1, group=g),
        "gather_object": lambda: dist.gather_object(1, at_root(ys), group_dst=0, group=g),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], group_src=0, group=g),
        "scatter_object_list": lambda: dist.scatter_object_list(
            [1], at_root(ys), group_src=0, group=g
        ),
        "recv_object_list": lambda: dist.recv_object_list([1], group_src=0, group=g),
        "send_object_list": lambda: dist.send_object_list([1], group_dst=0, group=g),
    }


def queries_with(g):
    """Other functions for members of a group."""
    return [
        lambda: dist.get_backend(g), lambda: dist.get_backend_config(g),
        lambda: dist.get_process_group_ranks(g), lambda: dist.get_group_rank(g, 0),
        lambda: dist.get_global_rank(g, 0), lambda: dist.split_group(g, [[0]]),
        lambda: dist.shrink_group([0], g),
    ]  # fmt: skip


@pytest.mark.parametrize("name", calls_with(None))
def test_calls_of_outsiders_warn_and_do_nothing(alone, world, name):
    """Their arrays are not inspected."""
    if world.me == 0:
        assert_works(alone, [0])
        return
    expected = -1 if name.startswith("recv") else None
    call = calls_with(alone, array=lambda count: object())[name]
    assert warned(name, world.me, call) == expected


def test_group_queries_of_outsiders_raise(alone, world):
    if world.me == 0:
        assert_works(alone, [0])
        return
    for ask in (
        *queries_with(alone),
        lambda: dist.broadcast(np.ones(2), 0, group=alone),
        lambda: dist.gather_object(1, None, 0, group=alone),
    ):
        with pytest.raises(ValueError, match=r"that this rank is (not )?in"):
            ask()
    assert dist.destroy_process_group(alone) is None
    assert dist.is_initialized()


@needs_2_ranks
def test_roots_outside_the_group_are_rejected(world):
    group = dist.new_group([0])
    if world.me:
        return
    x = np.ones(2)
    for call, word in (
        (lambda: dist.broadcast(x, 1, group=group), "src: global rank 1"),
        (lambda: dist.broadcast(x, group_src=1, group=group), "group_src: rank 1"),
        (lambda: dist.reduce(x, 1, group=group), "dst: global rank 1"),
        (lambda: dist.broadcast(x, 0, group_src=0, group=group), "not both"),
        (lambda: dist.reduce(x, group=group), "one of dst and group_dst"),
        (lambda: dist.send(x, group=group), "one of dst and group_dst"),
    ):
        with pytest.raises(ValueError, match=word):
            call()
    assert_works(group, [0])


def test_new_subgroups_of_every_size(world):
    for size in range(1, world.size + 1):
        if world.size % size:
            with pytest.raises(ValueError, match=f"{size} does not divide"):
                dist.new_subgroups(size)
            continue
        mine, made = dist.new_subgroups(size, timeout=33, group_desc="part")
        assert len(made) == world.size // size
        for i, group in enumerate(made):
            ranks = list(range(i * size, (i + 1) * size))
            if world.me in ranks:
                assert group is mine
                assert (mine.timeout, mine.group_desc) == (33, "part")
                assert_works(mine, ranks)
            else:
                assert_outside(group, ranks)


def test_new_subgroups_of_nodes_and_of_a_group(world):
    mine, made = dist.new_subgroups()
    assert made == [mine]  # all ranks of these tests are on one node
    assert_works(mine, range(world.size))
    order = list(range(world.size))[::-1]
    group = dist.new_group(order, sort_ranks=False)
    half = world.size // 2 if world.size % 2 == 0 else world.size
    mine, made = dist.new_subgroups(half, group)
    assert len(made) == world.size // half
    assert_works(mine, sorted(order[:half] if world.me in order[:half] else order[half:]))


def test_new_subgroups_by_enumeration(world):
    lists = {1: [[0]], 2: [[1], [0]], 3: [[2, 0]], 4: [[3, 1], [0]]}[world.size]
    mine, made = dist.new_subgroups_by_enumeration(lists, timeout=timedelta(seconds=9))
    assert len(made) == len(lists)
    assert (mine is None) == all(world.me not in ranks for ranks in lists)
    for ranks, group in zip(lists, made, strict=True):
        if world.me in ranks:
            assert group is mine and mine.timeout == 9
            assert_works(group, sorted(ranks))
        else:
            assert_outside(group, ranks)


def test_split_the_default_group(world):
    for lists in ([[r] for r in range(world.size)], [list(range(world.size))], [[0]]):
        group = dist.split_group(split_ranks=lists)
        mine = next((ranks for ranks in lists if world.me in ranks), None)
        if mine is None:
            assert group is None
        else:
            assert_works(group, mine)


@needs_2_ranks
def test_split_ranks_are_group_ranks_of_the_parent(world):
    order = list(range(world.size))[::-1]
    parent = dist.new_group(order, sort_ranks=False, backend="gloo", timeout=44)
    lists = [[0], list(range(1, world.size))]
    group = dist.split_group(parent, lists, group_desc="half")
    ranks = lists[0] if parent.rank() == 0 else lists[1]
    assert_works(group, [order[r] for r in ranks])
    assert (group.timeout, dist.get_backend(group), group.group_desc) == (44, "gloo", "half")
    other = dist.split_group(parent, lists, timeout=5, backend="nccl")
    assert (other.timeout, dist.get_backend(other)) == (5, "nccl")
    # Split a split group; the parents stay usable.
    if parent.rank() == 0:
        assert_works(dist.split_group(group, [[0]]), [world.me])
    assert_works(group, [order[r] for r in ranks])
    assert_works(parent, order)


@needs_2_ranks
@pytest.mark.parametrize("flags", [dist.SHRINK_DEFAULT, dist.SHRINK_ABORT])
def test_shrink_group_excludes_ranks(world, flags):
    """Another job tests the default group, because shrinking it destroys all other groups."""
    order = list(range(world.size))[::-1]
    group = dist.new_group(order, sort_ranks=False, timeout=44, backend="gloo")
    gone = 1 if world.size > 2 else 0  # group ranks
    staying = [rank for i, rank in enumerate(order) if i != gone]
    if group.rank() == gone:
        with pytest.raises(RuntimeError, match=f"rank {gone} is excluded"):
            dist.shrink_group([gone], group)
        return
    made = dist.shrink_group([gone], group, shrink_flags=flags)
    assert_works(made, staying)
    assert (made.timeout, dist.get_backend(made)) == (44, "gloo")
    with pytest.raises(ValueError, match="destroyed"):
        dist.all_reduce(np.ones(1), group=group)
    assert dist.get_pg_count() == 2
    if len(staying) > 1 and made.rank() == 0:
        smaller = dist.shrink_group(list(range(1, len(staying))), made)
        assert_works(smaller, [staying[0]])
    elif len(staying) > 1:
        with pytest.raises(RuntimeError, match="excluded"):
            dist.shrink_group(list(range(1, len(staying))), made)


def test_calls_on_a_destroyed_group_raise(world):
    group = dist.new_group()
    kept = dist.new_group()
    assert_works(group, range(world.size))
    dist.destroy_process_group(group)
    y, peer = np.ones(1), (world.me + 1) % world.size
    calls = calls_with(group, world.size)
    calls = [
        *(call for name, call in calls.items() if "send" not in name),  # to itself
        lambda: dist.all_reduce(y, group=group, async_op=True),
        lambda: dist.broadcast(y, 0, group=group),
        lambda: dist.irecv(y, group=group),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, peer, group)]),
        lambda: dist.new_subgroups(1, group),
        lambda: dist.destroy_process_group(group),
        *queries_with(group),
    ]
    for i, call in enumerate(calls):
        with pytest.raises(ValueError, match=r"destroyed|not an open group|not a group that"):
            call()
            pytest.fail(f"call {i} was not refused")
    assert dist.get_pg_count() == 2
    assert_works(kept, range(world.size))
    assert_works(dist.group.WORLD, range(world.size))


def test_destroy_waits_for_pending_calls(world):
    group = dist.new_group()
    results = [np.ones(1000) for _ in range(20)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in results]
    sent = dist.isend(np.full(3, 5.0), (world.me + 1) % world.size, group=group)
    got = np.zeros(3)
    dist.recv(got, (world.me - 1) % world.size, group=group)
    nobody = dist.irecv(np.zeros(3), world.me, group=group, tag=9)
    dist.destroy_process_group(group)
    assert (got == 5).all() and all((x == world.size).all() for x in results)
    assert all(work.is_completed() and work.wait() for work in [*works, sent])
    with pytest.raises(dist.CollectiveTimeoutError, match="the group was destroyed"):
        nobody.wait()


@pytest.mark.skipif(MPI.get_vendor()[0] != "MPICH", reason="other MPIs have more communicators")
def test_too_many_groups_raise_an_error_with_the_remedy(world):
    made = []
    try:
        with contextlib.suppress(MPI.Exception):
            while len(made) < 1 << 12:
                made.append(MPI.COMM_WORLD.Dup())
        made.pop().Free()  # one free communicator is not enough
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match="groups; destroy unused groups"):
                dist.new_group()
    finally:
        for one in made:
            one.Free()
    dist.destroy_process_group(dist.new_group())
