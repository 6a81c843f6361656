"""The PyTorch backend on CUDA tensors: stream order, futures, training.

Tensors are filled with delay over garbage, so that missing stream order gives wrong values. Every
rank runs every test. tests/pytorch has every function of the backend, and torch.compile.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import batch, batches, loss_of, make
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

LARGE = 5_000_000
STEPS = 4
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
@pytest.mark.parametrize("count", [1, 1000, LARGE])
def test_all_reduce(device, dtype, count):
    n, me = dist.get_world_size(), dist.get_rank()
    tensor = filled(device, count, me + 1, dtype)
    dist.all_reduce(tensor)
    doubled = tensor * 2  # a consumer in the same stream
    assert (doubled == n * (n + 1)).all()


@pytest.mark.parametrize("count", [1000, LARGE])
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


# ---- Futures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 1000, LARGE])
def test_callbacks_read_the_result(device, count):
    """On the host and in a kernel. The current stream waits for the callback's result."""
    n, me = dist.get_world_size(), dist.get_rank()
    work = dist.all_reduce(filled(device, count, me + 1), async_op=True)
    future = work.get_future()
    seen = future.then(lambda done: done.value()[0].double().mean().item())
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert seen.wait() == n * (n + 1) / 2
    assert (doubled.wait() + 1 == n * (n + 1) + 1).all()


@pytest.mark.parametrize("count", [1, LARGE])
def test_callback_of_a_synchronous_call(device, count):
    """torch's C++ code, such as DDP, also gets a Future from the Work of a synchronous call."""
    n, me = dist.get_world_size(), dist.get_rank()
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = dist.group.WORLD.allreduce([filled(device, count, me + 1)], options)
    found = work.get_future().then(lambda done: done.value()[0].clone()).wait()
    found = found[0] if isinstance(found, list) else found
    assert (found * 2 == n * (n + 1)).all()


def test_callback_that_makes_a_call(device):
    """DDP hooks make calls in callbacks, in the same order on all ranks."""
    n, me = dist.get_world_size(), dist.get_rank()
    tensor = filled(device, 1000, me + 1)
    group = dist.new_group()

    def again(done):
        dist.all_reduce(done.value()[0], group=group)
        return done.value()[0] * 1

    found = dist.all_reduce(tensor, async_op=True).get_future().then(again).wait()
    assert (found == n * n * (n + 1) / 2).all()
    dist.destroy_process_group(group)


# ---- Training ------------------------------------------------------------------------------------


def gradients(model, pair, device):
    model.zero_grad()
    loss_of(model, *(part.to(device) for part in pair)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def check_gradients(model, device, pairs=None, rtol=None):
    """Compare the gradients of each step with those of one process on the batches of all ranks.

    rtol: tolerance of a hook that rounds, also relative to the largest gradient.
    """
    n, me = dist.get_world_size(), dist.get_rank()
    for step, pair in enumerate(pairs or [batch(me, step) for step in range(STEPS)]):
        expected = gradients(make().to(device), batches(n, step), device)
        largest = max(one.abs().max().item() for one in expected)
        atol = rtol * largest if rtol else 1e-6
        for found, wanted in zip(gradients(model, pair, device), expected, strict=True):
            full = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(full, wanted, rtol=rtol or 1e-4, atol=atol)


def own(state, bucket):
    """Reduce with SUM, and divide in the callback after another kernel."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def divide(done):
        late(bucket.buffer().device)
        return done.value()[0] / dist.get_world_size()

    return future.then(divide)


def unnamed(hook):
    """Hide the name of a hook, because DDP requires NCCL for the bfloat16 hook by name."""
    return lambda state, bucket: hook(state, bucket)


HOOKS = {
    "none": (None, None),
    "allreduce": (default_hooks.allreduce_hook, None),
    "float16": (default_hooks.fp16_compress_hook, 5e-3),
    "bfloat16": (unnamed(default_hooks.bf16_compress_hook), 4e-2),
    "own": (own, None),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize(
    "buckets", [{}, {"bucket_cap_mb": 0.0005}], ids=["one bucket", "many buckets"]
)
def test_ddp_hooks(device, name, buckets):
    hook, rtol = HOOKS[name]
    model = DDP(make().to(device), **buckets)
    if hook is not None:
        model.register_comm_hook(None, hook)
    check_gradients(model, device, rtol=rtol)


def test_fsdp(device):
    model = make().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    check_gradients(fully_shard(model, mesh=mesh), device)


class Batches(Dataset):
    """The batches of this rank."""

    def __len__(self):
        return STEPS

    def __getitem__(self, step):
        if step >= STEPS:
            raise IndexError(step)
        return batch(dist.get_rank(), step)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_loaders_in_forked_processes(device, pinned):
    """The loaders are forked from a process that uses its GPU."""
    model = DDP(make().to(device))
    for _ in range(2):
        loader = DataLoader(
            Batches(), batch_size=None, num_workers=2, pin_memory=pinned,
            multiprocessing_context="fork",
        )  # fmt: skip
        check_gradients(model, device, pairs=loader)
    total = torch.ones(1000, device=device)
    dist.all_reduce(total)
    assert (total == dist.get_world_size()).all()
