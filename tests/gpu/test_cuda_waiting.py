"""Waits of the PyTorch backend for calls on CUDA tensors, and stream order.

Every rank runs every test.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from late import filled, late


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
