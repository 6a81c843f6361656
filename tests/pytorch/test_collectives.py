"""Collectives of torch.distributed: dtypes, operations, layouts, sizes, invalid arguments."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from conftest import members
from inputs import DTYPES, NAMES, combined, equal, legal, near, normal, reduce_op, whole

ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
EACH_OPERATION = pytest.mark.parametrize("name", NAMES)


def done(work, async_op):
    """Wait for a synchronous or asynchronous call."""
    if not async_op:
        assert work is None
        return
    assert isinstance(work, dist.Work)
    work.wait()
    assert work.is_completed()


def inputs(team, dtype, *shape, key=0):
    return [whole(dtype, rank, *shape, key=key) for rank in range(team.size)]


def check(name, found, wanted):
    """Compare exactly, except for AVG."""
    (near if name == "AVG" else equal)(found, wanted)


def each(teams, name=""):
    """Groups of this rank with every dtype that supports the operation."""
    for team in members(teams):
        for dtype in DTYPES:
            if not name or legal(name, dtype):
                yield team, dtype


@ASYNC
@EACH_OPERATION
def test_all_reduce(teams, name, async_op):
    for team, dtype in each(teams, name):
        parts = inputs(team, dtype, 5, 3)
        mine = parts[team.me].clone()
        done(dist.all_reduce(mine, reduce_op(name, dtype), team.group, async_op), async_op)
        check(name, mine, combined(name, parts))


@ASYNC
@EACH_OPERATION
def test_reduce(teams, name, async_op):
    for team, dtype in each(teams, name):
        for root in range(team.size):
            parts = inputs(team, dtype, 7)
            mine = parts[team.me].clone()
            work = dist.reduce(
                mine, team.ranks[root], reduce_op(name, dtype), group=team.group, async_op=async_op
            )
            done(work, async_op)
            if team.me == root:  # the contents are undefined on other ranks
                check(name, mine, combined(name, parts))


@ASYNC
@EACH_OPERATION
def test_reduce_scatter(teams, name, async_op):
    for team, dtype in each(teams, name):
        parts = inputs(team, dtype, team.size, 4, 2)
        wanted = combined(name, parts)[team.me]
        whole_input = parts[team.me].flatten(0, 1)
        for call, given in (
            (dist.reduce_scatter, list(parts[team.me].clone())),
            (dist.reduce_scatter_single, whole_input),
            (dist.reduce_scatter_tensor, whole_input),
        ):
            output = torch.zeros(4, 2, dtype=dtype)
            done(call(output, given, reduce_op(name, dtype), team.group, async_op), async_op)
            check(name, output, wanted)
        equal(whole_input, parts[team.me].flatten(0, 1))


@ASYNC
def test_broadcast(teams, async_op):
    for team, dtype in each(teams):
        for root in range(team.size):
            parts = inputs(team, dtype, 3, 4)
            mine = parts[team.me].clone()
            if root % 2:
                work = dist.broadcast(mine, group_src=root, group=team.group, async_op=async_op)
            else:
                work = dist.broadcast(mine, team.ranks[root], team.group, async_op)
            done(work, async_op)
            equal(mine, parts[root])


@ASYNC
def test_all_gather(teams, async_op):
    for team, dtype in each(teams):
        parts = inputs(team, dtype, 3, 2)
        outputs = [torch.zeros(3, 2, dtype=dtype) for _ in parts]
        done(dist.all_gather(outputs, parts[team.me], team.group, async_op), async_op)
        for output, part in zip(outputs, parts, strict=True):
            equal(output, part)
        for call in (dist.all_gather_single, dist.all_gather_into_tensor):
            joined = torch.zeros(3 * team.size, 2, dtype=dtype)
            done(call(joined, parts[team.me], team.group, async_op), async_op)
            equal(joined, torch.cat(parts))


@ASYNC
def test_all_gather_stacks(teams, async_op):
    """If the output has an additional dimension."""
    for team in members(teams):
        parts = inputs(team, torch.float32, 3, 2)
        for call in (dist.all_gather_single, dist.all_gather_into_tensor):
            stacked = torch.zeros(team.size, 3, 2)
            done(call(stacked, parts[team.me], team.group, async_op), async_op)
            equal(stacked, torch.stack(parts))


@ASYNC
def test_all_gather_of_uneven_parts(teams, async_op):
    for team in members(teams):
        parts = [whole(torch.float32, rank, 3 * rank, 2) for rank in range(team.size)]
        outputs = [torch.zeros_like(part) for part in parts]
        done(dist.all_gather(outputs, parts[team.me], team.group, async_op), async_op)
        for output, part in zip(outputs, parts, strict=True):
            equal(output, part)


@ASYNC
def test_gather(teams, async_op):
    for team, dtype in each(teams):
        for root in range(team.size):
            parts = inputs(team, dtype, 2, 3)
            outputs = [torch.zeros(2, 3, dtype=dtype) for _ in parts] if team.me == root else None
            work = dist.gather(
                parts[team.me], outputs, group_dst=root, group=team.group, async_op=async_op
            )
            done(work, async_op)
            for output, part in zip(outputs or parts, parts, strict=True):
                equal(output, part)


@ASYNC
def test_scatter(teams, async_op):
    for team, dtype in each(teams):
        for root in range(team.size):
            parts = inputs(team, dtype, 2, 3, key=root)
            output = torch.zeros(2, 3, dtype=dtype)
            blocks = parts if team.me == root else None
            work = dist.scatter(
                output, blocks, src=team.ranks[root], group=team.group, async_op=async_op
            )
            done(work, async_op)
            equal(output, parts[team.me])


@ASYNC
def test_all_to_all_single(teams, async_op):
    for team, dtype in each(teams):
        parts = inputs(team, dtype, team.size, 2, 3)
        output = torch.zeros(2 * team.size, 3, dtype=dtype)
        mine = parts[team.me].flatten(0, 1)
        done(dist.all_to_all_single(output, mine, group=team.group, async_op=async_op), async_op)
        equal(output, torch.cat([part[team.me] for part in parts]))


def block(sender, receiver, width=2, dtype=torch.float32):
    """A rank's block for another rank. Its length depends on both ranks and may be 0."""
    return whole(dtype, sender, (sender + 2 * receiver) % 4, width, key=receiver)


@ASYNC
def test_all_to_all_single_with_splits(teams, async_op):
    for team in members(teams):
        ranks = range(team.size)
        sent = [block(team.me, other) for other in ranks]
        received = [block(other, team.me) for other in ranks]
        output = torch.full_like(torch.cat(received), -9.0)
        splits = [len(one) for one in received], [len(one) for one in sent]
        work = dist.all_to_all_single(output, torch.cat(sent), *splits, team.group, async_op)
        done(work, async_op)
        equal(output, torch.cat(received))


@ASYNC
def test_all_to_all(teams, async_op):
    for team, dtype in each(teams):
        ranks = range(team.size)
        sent = [block(team.me, other, dtype=dtype) for other in ranks]
        received = [block(other, team.me, dtype=dtype) for other in ranks]
        outputs = [torch.zeros_like(one) for one in received]
        done(dist.all_to_all(outputs, sent, team.group, async_op), async_op)
        for output, wanted in zip(outputs, received, strict=True):
            equal(output, wanted)


@ASYNC
def test_no_rank_leaves_a_barrier_before_all_have_entered(teams, folder, async_op):
    for team in members(teams):
        place = folder / team.name
        place.mkdir(exist_ok=True)
        for late in range(team.size):
            if team.me == late:
                time.sleep(0.02)
            (place / f"{late}-{team.me}").touch()
            done(dist.barrier(team.group, async_op), async_op)
            assert len(list(place.glob(f"{late}-*"))) == team.size


@ASYNC
def test_transposed_and_strided_tensors(world, async_op):
    """Elements are matched by index, independent of the memory layout."""
    parts = [normal(rank, 4, 6) for rank in range(world.size)]
    for layout in range(3):
        mine = parts[world.me].clone()
        if world.me == 0 and layout == 1:
            mine = mine.t().contiguous().t()
        elif layout == 2:
            room = torch.full((8, 12), -5.0)
            room[::2, ::2] = mine
            mine = room[::2, ::2]
        done(dist.all_reduce(mine, async_op=async_op), async_op)
        near(mine, sum(parts))
        if layout == 2:
            assert (room[1::2] == -5).all()
            assert (room[:, 1::2] == -5).all()
        target = torch.zeros(6, 4).t()
        outputs = [target if rank == 0 else torch.zeros(4, 6) for rank in range(world.size)]
        done(dist.all_gather(outputs, mine, async_op=async_op), async_op)
        for output in outputs:
            equal(output, mine.contiguous())
        mine = parts[world.me].clone().t()
        done(dist.broadcast(mine, 1, async_op=async_op), async_op)
        equal(mine, parts[1].t())


def refusals(n):
    """Calls that every rank rejects."""
    four, large = torch.zeros(4), torch.zeros(4 * n + 1)
    return {
        "all_gather, too few outputs": lambda: dist.all_gather([four] * (n - 1), four),
        "all_gather, output of another size": lambda: dist.all_gather([torch.zeros(3)] * n, four),
        "all_gather_single, output too small": lambda: dist.all_gather_single(large[:-2], four),
        "all_gather_single, another dtype": lambda: dist.all_gather_single(
            large[:-1].double(), four
        ),
        "reduce_scatter, too few inputs": lambda: dist.reduce_scatter(four, [four] * (n - 1)),
        "reduce_scatter_single, input too large": lambda: dist.reduce_scatter_single(four, large),
        "all_to_all_single, not divisible": lambda: dist.all_to_all_single(large, large.clone()),
        "all_to_all_single, wrong sum": lambda: dist.all_to_all_single(
            four, four, [1] * (n - 1) + [9], [1] * (n - 1) + [9]
        ),
        "all_to_all, too few outputs": lambda: dist.all_to_all([four] * (n - 1), [four] * (n - 1)),
        # On ranks other than the root, any list is rejected.
        "scatter, too few inputs": lambda: dist.scatter(four, [four] * (n - 1)),
        "gather, too few outputs": lambda: dist.gather(four, [four] * (n - 1)),
        "broadcast, no such root": lambda: dist.broadcast(four, group_src=n),
        "reduce, no such root": lambda: dist.reduce(four, group_dst=n),
        "all_reduce, BAND of floats": lambda: dist.all_reduce(four, dist.ReduceOp.BAND),
        "all_reduce, MAX of complex": lambda: dist.all_reduce(four.cfloat(), dist.ReduceOp.MAX),
        "all_gather, mixed dtypes": lambda: dist.all_gather([four.double()] * n, four),
    }


@pytest.mark.parametrize("name", list(refusals(2)))
def test_invalid_arguments_raise_on_every_rank(world, name):
    """The group stays usable."""
    call = refusals(world.size)[name]
    with pytest.raises((RuntimeError, ValueError)) as caught:
        call()
    assert str(caught.value)
    one = torch.ones(3)
    dist.all_reduce(one)
    equal(one, torch.full((3,), float(world.size)))
