"""The PyTorch backend on CUDA tensors: collectives, waits and stream order.

Tensors are filled with delay over garbage, so that missing stream order gives wrong values. Every
rank runs every test.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

#: Clock cycles of the kernel before the values are written: about 10 ms.
CYCLES = 20_000_000


def late(device, cycles=CYCLES):
    """Delay the current stream."""
    torch.cuda._sleep(cycles)


def filled(device, count, value, dtype=torch.float32):
    """Return a tensor that is filled with a value, with delay."""
    tensor = torch.full((count,), 77, dtype=dtype, device=device)
    late(device)
    tensor.fill_(value)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 1000, 5_000_000])
def test_all_reduce(device, dtype, count):
    n, me = dist.get_world_size(), dist.get_rank()
    tensor = filled(device, count, me + 1, dtype)
    dist.all_reduce(tensor)
    doubled = tensor * 2  # a consumer in the same stream
    assert (doubled == n * (n + 1)).all()


def test_other_collectives(device):
    n, me = dist.get_world_size(), dist.get_rank()
    tensor = filled(device, 10, me)
    dist.broadcast(tensor, n - 1)
    assert (tensor == n - 1).all()
    gathered = torch.zeros(10 * n, device=device)
    dist.all_gather_into_tensor(gathered, filled(device, 10, me))
    assert (gathered == torch.arange(n, device=device).repeat_interleave(10)).all()
    outputs = [torch.zeros(k + 1, device=device) for k in range(n)]
    dist.all_gather(outputs, filled(device, me + 1, me))
    assert all((each == k).all() for k, each in enumerate(outputs))
    blocks = torch.arange(n, device=device, dtype=torch.float32).repeat_interleave(5) + me
    part = torch.zeros(5, device=device)
    dist.reduce_scatter_tensor(part, blocks, op=dist.ReduceOp.AVG)
    assert (part == me + (n - 1) / 2).all()
    exchanged = torch.zeros(5 * n, device=device)
    dist.all_to_all_single(exchanged, blocks)
    assert (exchanged == me + torch.arange(n, device=device).repeat_interleave(5)).all()
    strided = torch.zeros(6, 4, device=device).t()
    strided.fill_(me)
    dist.all_reduce(strided)
    assert (strided == sum(range(n))).all()
    dist.barrier()


def test_point_to_point(device):
    n, me = dist.get_world_size(), dist.get_rank()
    if n == 1:
        pytest.skip("needs two ranks")
    sent, received = filled(device, 1000, me), torch.zeros(1000, device=device)
    works = [dist.irecv(received, (me - 1) % n), dist.isend(sent, (me + 1) % n)]
    for work in works:
        work.wait()
    assert (received == (me - 1) % n).all()


@pytest.mark.parametrize("count", [1000, 5_000_000])
def test_wait_orders_the_stream_that_is_current_at_the_wait(device, count):
    """Also the wait of a Future."""
    n, me = dist.get_world_size(), dist.get_rank()
    one, other = torch.cuda.Stream(device), torch.cuda.Stream(device)
    for turn in range(6):
        with torch.cuda.stream(one):
            tensor = filled(device, count, float(me + turn))
            work = dist.all_reduce(tensor, async_op=True)
        with torch.cuda.stream(other):
            work.get_future().wait() if turn % 2 else work.wait()
            doubled = tensor * 2
        other.synchronize()
        with torch.cuda.stream(torch.cuda.Stream(device)):  # not ordered after other streams
            assert (doubled == 2 * (sum(range(n)) + n * turn)).all()


def test_wait_with_a_timeout_synchronizes_the_device(device):
    """is_completed() queries the device."""
    n, me = dist.get_world_size(), dist.get_rank()
    tensor = filled(device, 1_000_000, float(me + 1))
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=50)) and work.is_completed() and work.is_success()
    with torch.cuda.stream(torch.cuda.Stream(device)):  # not ordered after other streams
        assert (tensor == n * (n + 1) / 2).all()


def test_future_does_not_block_the_current_stream(device):
    """Only the streams of its callbacks wait for the call."""
    n, me = dist.get_world_size(), dist.get_rank()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        tensor = torch.full((1000,), float(me + 1), device=device)
        late(device, 1_000_000_000)
        work = dist.all_reduce(tensor, async_op=True)
    passed = torch.cuda.Event()
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    passed.record()
    passed.synchronize()
    assert not work.is_completed(), "the current stream has waited for the call"
    assert (future.wait() == n * (n + 1)).all()
