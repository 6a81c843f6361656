"""How long calls of the PyTorch backend on CUDA tensors block the host, and stream order.

Every rank runs every test.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from late import filled, late
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.on_a_gpu


def measure(begin, record_property, name):
    """Report durations of ``begin``, which returns a function that waits and one that checks."""
    took, clock = [], time.perf_counter
    for turn in range(4):
        torch.cuda.synchronize()
        dist.barrier()
        late(torch.device("cuda"), 100_000_000)
        start = clock()
        wait, check = begin()
        called = clock()
        wait()
        waited = clock()
        torch.cuda.synchronize()
        if turn:  # the first run compiles and allocates
            took.append((called - start, waited - called, clock() - start))
        check()
    call, wait, all_of_it = (min(column) * 1e3 for column in zip(*took, strict=True))
    record_property(
        name, f"call {call:.3f} ms, wait() {wait:.3f} ms, device done {all_of_it:.3f} ms"
    )


@pytest.mark.parametrize("async_op", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("count", [1000, 5_000_000, 100_000_000])
def test_report_duration_of_a_call(device, count, async_op, record_property):
    """The stream has 50 ms of earlier work. Routes that only enqueue work take microseconds."""
    n, me = dist.get_world_size(), dist.get_rank()

    def begin():
        tensor = torch.full((count,), float(me + 1), device=device)
        work = dist.all_reduce(tensor, async_op=async_op)

        def check():
            assert (tensor * 2 == n * (n + 1)).all()

        return (lambda: None) if work is None else work.wait, check

    measure(begin, record_property, f"all_reduce of {count} elements")


def ddp(layers):
    return DDP(layers)


def fsdp2(layers):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_report_duration_of_a_training_step(device, wrap, record_property):
    """backward() returns before the device has finished if no call blocks the host."""
    model = wrap(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device))
    x = torch.randn(64, 1024, device=device)

    def begin():
        model.zero_grad()
        model(x).sum().backward()

        def check():
            grads = (one.grad for one in model.parameters())
            parts = (each.to_local() if isinstance(each, DTensor) else each for each in grads)
            assert all(each.isfinite().all() for each in parts)

        return lambda: None, check

    measure(begin, record_property, f"forward and backward of {wrap.__name__}")


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
