"""Work and Future: order, callbacks, timeouts, and Works that are dropped."""

from __future__ import annotations

import gc
import inspect
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from inputs import collectives, equal

#: Timeout in seconds for any step here, even on a busy machine.
DEADLINE = 60


def test_dropped_works_complete(world):
    kept = torch.full((1000,), 1.0)
    for i in range(50):
        dist.all_reduce(torch.full((10_000,), float(i)), async_op=True)
        dist.all_gather_single(torch.zeros(world.size * 100), torch.ones(100), async_op=True)
        dist.broadcast(torch.zeros(300), 0, async_op=True)
        if i == 25:
            dist.all_reduce(kept, async_op=True)
        gc.collect(0)
    # Allocate again, which reuses memory that was freed too early.
    filled = [torch.full((10_000,), 7.0) for _ in range(20)]
    dist.barrier()
    for one in filled:
        equal(one, torch.full((10_000,), 7.0))
    equal(kept, torch.full((1000,), float(world.size)))


@pytest.mark.parametrize("first", [True, False], ids=["attached-first", "attached-late"])
def test_chained_callbacks(world, first):
    """As in DDP hooks: divide, then cast; each uses the value of the previous callback."""
    value = torch.full((5,), world.me + 1.0)
    future = dist.all_reduce(value, async_op=True).get_future()
    if not first:
        future.wait()
    chain = future.then(lambda done: done.value()[0] / world.size).then(
        lambda done: done.value().to(torch.bfloat16)
    )
    equal(chain.wait(), torch.full((5,), (world.size + 1) / 2, dtype=torch.bfloat16))


def test_future_of_every_collective_holds_the_outputs(world):
    for name, (arguments, outputs) in collectives(world.size, world.me).items():
        work = getattr(dist, name)(*arguments, async_op=True)
        found = work.get_future().wait()
        assert work.wait(timedelta(seconds=DEADLINE)) in (True, None)
        assert work.exception() is None and work.is_success()
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in outputs], name
        assert work.is_completed()


def test_wait_times_out_and_can_be_repeated(world, mpi):
    """The call continues after the timeout."""
    value = torch.ones(3)
    if world.me == 0:
        work = dist.all_reduce(value, async_op=True)
        with pytest.raises(RuntimeError):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
    mpi.Barrier()
    if world.me:
        work = dist.all_reduce(value, async_op=True)
    work.wait()
    equal(value, torch.full((3,), float(world.size)))


@pytest.mark.skipif(
    "timeout" not in inspect.signature(dist.barrier).parameters,
    reason="barrier has a timeout argument from torch 2.13 on",
)
def test_barrier_timeout_overrides_the_group_timeout(world, mpi):
    group = dist.new_group(timeout=timedelta(seconds=DEADLINE))
    if world.me == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.barrier(group, timeout=timedelta(seconds=0.2))
        assert time.monotonic() - start < DEADLINE
    mpi.Barrier()
    if world.me:
        dist.barrier(group)
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    assert value.item() == world.size


@pytest.mark.parametrize("count, tensors", [(1_000_000, 1), (1000, 50)], ids=["one", "coalesced"])
def test_pending_call_uses_the_original_memory(world, mpi, count, tensors):
    """The tensors get other memory while the call is pending, until rank 0 makes the call."""
    mine = [torch.full((count,), 1.0 + i) for i in range(tensors)]

    def call():
        if tensors > 1:
            return dist.all_reduce_coalesced(mine, async_op=True)
        return dist.all_reduce(mine[0], async_op=True)

    dist.all_reduce(mine[0].clone())  # registers the native fast path
    if world.me:
        work = call()
        for one in mine:
            one.data = torch.empty(0)
    others = [torch.full((count,), 77.0) for _ in range(tensors + 2)]  # reuse freed addresses
    mpi.Barrier()
    if world.me == 0:
        work = call()
    work.wait()
    for one in others:
        equal(one, torch.full((count,), 77.0))
    if world.me == 0:
        for i, one in enumerate(mine):
            equal(one, torch.full((count,), world.size * (1.0 + i)))
