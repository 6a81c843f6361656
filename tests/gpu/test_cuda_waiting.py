"""How long calls of the PyTorch backend on CUDA tensors block the host: reported, not asserted.

Every rank runs every test.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from late import late
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

pytestmark = pytest.mark.on_a_gpu


def measure(begin, record_property, what):
    """Three times, what ``begin`` does: returns a function that waits, and one that checks."""
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
        if turn:  # the first one compiles and allocates
            took.append((called - start, waited - called, clock() - start))
        check()
    call, wait, all_of_it = (min(column) * 1e3 for column in zip(*took, strict=True))
    record_property(
        what, f"call {call:.3f} ms, wait() {wait:.3f} ms, device done {all_of_it:.3f} ms"
    )


@pytest.mark.parametrize("async_op", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("count", [1000, 5_000_000, 100_000_000])
def test_a_call(device, count, async_op, record_property):
    """Behind 50 ms of other work. Where waiting belongs to streams, both take microseconds."""
    n, me = dist.get_world_size(), dist.get_rank()

    def begin():
        tensor = torch.full((count,), float(me + 1), device=device)
        work = dist.all_reduce(tensor, async_op=async_op)

        def check():
            assert (tensor * 2 == n * (n + 1)).all()

        return (lambda: None) if work is None else work.wait, check

    measure(begin, record_property, f"all_reduce of {count} elements")


def test_a_step_of_ddp(device, record_property):
    """Its run-ahead: backward() returns before the device has done it, where nothing blocks."""
    model = DDP(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device))
    x = torch.randn(64, 1024, device=device)

    def begin():
        model.zero_grad()
        model(x).sum().backward()

        def check():
            assert all(one.grad.isfinite().all() for one in model.parameters())

        return lambda: None, check

    measure(begin, record_property, "forward and backward")
