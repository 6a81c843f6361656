"""The PyTorch backend on CUDA tensors: collectives and streams.

Every rank runs every test.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from late import filled

from mpicoll.core.groups import default_group


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 1000, 5_000_000])
def test_all_reduce(device, dtype, count):
    n, me = dist.get_world_size(), dist.get_rank()
    tensor = filled(device, count, me + 1, dtype)
    dist.all_reduce(tensor)
    doubled = tensor * 2  # a consumer in the same stream
    assert (doubled == n * (n + 1)).all()


def test_asynchronous(device):
    n, me = dist.get_world_size(), dist.get_rank()
    tensors = [filled(device, 1000, me + k) for k in range(4)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    futures = [work.get_future() for work in works]
    for work in works:
        work.wait()
    for k, each in enumerate(tensors):
        assert (each * 2 == 2 * (sum(range(n)) + n * k)).all()
    assert all(future.done() for future in futures)


def test_side_stream(device):
    n, me = dist.get_world_size(), dist.get_rank()
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        tensor = filled(device, 1_000_000, me + 1)
        dist.all_reduce(tensor)
        tensor.mul_(3)
    torch.cuda.current_stream(device).wait_stream(side)
    assert (tensor == 3 * n * (n + 1) / 2).all()


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


def test_capture_raises_for_routes_that_cannot_be_captured(device):
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    names = default_group().resources.find("devices").names
    if dist.get_world_size() > 1 and names[0] == "peer":
        pytest.skip("test_peer.py tests captures")
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph, capture_error_mode="relaxed"),
        pytest.raises(RuntimeError, match="captured"),
    ):
        dist.all_reduce(tensor)
