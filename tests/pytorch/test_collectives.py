"""Collectives of torch.distributed: dtypes, operations, layouts, sizes, invalid arguments."""

from __future__ import annotations

import itertools
import time

import oracle
import pytest
import torch
import torch.distributed as dist
from conftest import members
from driver import NAMES, Call
from inputs import DTYPES, equal, factor, legal, near, normal, reduce_op, whole

from mpicoll.dtypes import OPERATIONS, ReduceOp, by_name

ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def done(work, async_op):
    """Wait for a synchronous or asynchronous call."""
    if not async_op:
        assert work is None
        return
    assert isinstance(work, dist.Work)
    work.wait()
    assert work.is_completed()


class TorchCall(Call):
    """A call of torch.distributed with contiguous tensors."""

    api = dist

    def operation(self):
        name = self.op.name
        return reduce_op(name, getattr(torch, self.dtype.name))

    def result(self):
        if self.op is not ReduceOp.PREMUL_SUM:
            return super().result()
        by = [factor(getattr(torch, self.dtype.name))] * self.team.size
        return oracle.reduced(self.op, self.dtype, [self.given(r) for r in self.terms], by)


def tensor(shape, dtype):
    """Return a tensor and NumPy's view of its memory."""
    made = torch.zeros(shape, dtype=getattr(torch, dtype.name))
    carrier = made.view(torch.int16) if dtype.name == "bfloat16" else made
    return made, carrier.numpy().view(dtype.numpy)


#: Functions that torch.distributed also has.
SHARED = [name for name in NAMES if hasattr(dist, name) and name != "barrier"]


@ASYNC
@pytest.mark.parametrize("name", SHARED)
def test_results_equal_the_oracle(teams, name, async_op):
    """Every dtype, operation and root. Blocks are stacked in some calls, or concatenated."""
    row = NAMES[name]
    for team in members(teams):
        for kind in DTYPES:
            dtype = by_name[str(kind).removeprefix("torch.")]
            for op in [op for op in OPERATIONS if legal(op.name, kind)] if row.reduces else [None]:
                for root in range(team.size if row.root else 1):
                    stacked = name.startswith("all_gather") and (dtype.code + root) % 2 == 0
                    call = TorchCall(name, team, dtype, 6, op, root, tensor, (3, 2), stacked)
                    work = call.start(async_op, by_group_rank=root % 2 == 1)
                    if async_op:
                        work.wait()
                        assert work.is_completed()
                    call.check()


@ASYNC
def test_all_gather_of_uneven_parts(teams, async_op):
    for team in members(teams):
        parts = [whole(torch.float32, rank, 3 * rank, 2) for rank in range(team.size)]
        outputs = [torch.zeros_like(part) for part in parts]
        done(dist.all_gather(outputs, parts[team.me], team.group, async_op), async_op)
        for output, part in zip(outputs, parts, strict=True):
            equal(output, part)


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
    for team, dtype in itertools.product(members(teams), DTYPES):
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
