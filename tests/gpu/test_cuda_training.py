"""Training with the PyTorch backend on CUDA tensors: DDP, FSDP2, futures, torch.compile, loaders.

Every rank runs every test.
"""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from test_cuda_tensors import filled, late
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

LARGE = 5_000_000
#: Several buckets for the gradients of the model.
BUCKETS = {"bucket_cap_mb": 0.01}
STEPS = 4


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


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 64, generator=generator), torch.randn(8, 4, generator=generator)


def whole(step):
    """Return the batches of all ranks, concatenated."""
    parts = zip(*(batch(rank, step) for rank in range(dist.get_world_size())), strict=True)
    return [torch.cat(part) for part in parts]


def network(device):
    torch.manual_seed(7)
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4)]
    return nn.Sequential(*layers).to(device)


def gradients(model, pair, device):
    model.zero_grad()
    x, y = (part.to(device) for part in pair)
    nn.functional.mse_loss(model(x), y).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def close(found, expected, rtol=1e-4, atol=1e-6):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


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
    "none": (None, 1e-4),
    "allreduce": (default_hooks.allreduce_hook, 1e-4),
    "float16": (default_hooks.fp16_compress_hook, 5e-3),
    "bfloat16": (unnamed(default_hooks.bf16_compress_hook), 4e-2),
    "own": (own, 1e-4),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("buckets", [{}, BUCKETS], ids=["one bucket", "many buckets"])
def test_hooks(device, name, buckets):
    hook, rtol = HOOKS[name]
    model = DDP(network(device), **buckets)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for step in range(STEPS):
        found = gradients(model, batch(dist.get_rank(), step), device)
        expected = gradients(network(device), whole(step), device)
        largest = max(one.abs().max().item() for one in expected)
        close(found, expected, rtol, rtol * largest)


def test_fsdp(device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(STEPS):
        found = gradients(model, batch(dist.get_rank(), step), device)
        expected = gradients(network(device), whole(step), device)
        close([each.full_tensor() for each in found], expected)


class Numbers(Dataset):
    """The batches of a rank."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return STEPS

    def __getitem__(self, step):
        return batch(self.rank, step)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_loaders_in_forked_processes(device, pinned):
    """The loaders are forked from a process that uses its GPU."""
    model, alone = DDP(network(device)), network(device)
    for _ in range(2):
        loader = DataLoader(
            Numbers(dist.get_rank()), batch_size=None, num_workers=2, pin_memory=pinned,
            multiprocessing_context="fork",
        )  # fmt: skip
        for step, pair in enumerate(loader):
            close(gradients(model, pair, device), gradients(alone, whole(step), device))
    total = torch.ones(1000, device=device)
    dist.all_reduce(total)
    assert (total == dist.get_world_size()).all()


COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not (shutil.which("cc") and shutil.which("g++")),
            reason="inductor needs a C and a C++ compiler",
        ),
    ),
]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled(device, compiler):
    """Functional collectives in one graph, with kernels between them."""
    n, me = dist.get_world_size(), dist.get_rank()
    ranks = list(range(n))

    def layer(x):
        total = funcol.all_reduce(torch.sin(x), "sum", ranks)
        gathered = funcol.all_gather_tensor(total * x, 0, ranks)
        return funcol.reduce_scatter_tensor(gathered + 1, "sum", 0, ranks).relu()

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=compiler, fullgraph=True)
    for key in range(2):
        inputs = [torch.linspace(-1, 1 + key, 60, device=device) * (r + 1) for r in range(n)]
        total = sum(torch.sin(x) for x in inputs)
        late(device)
        torch.testing.assert_close(
            compiled(inputs[me]), ((total * inputs[me] + 1) * n).relu(), rtol=1e-4, atol=1e-5
        )
    dist.barrier()
