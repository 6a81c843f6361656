"""Collectives with autograd and torch.compile."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as autograd
from inputs import equal, near, normal
from models import make, same_parameters, train, trained_alone


def leaves(world, *shape):
    """Inputs of all ranks for the reference, and this rank's input."""
    everyone = [normal(rank, *shape, key="leaf").requires_grad_() for rank in range(world.size)]
    return everyone, normal(world.me, *shape, key="leaf").requires_grad_()


def weights(rank, *shape):
    """The weights that multiply a rank's output before it is summed. They are its gradient."""
    return normal(rank, *shape, key="weight")


def check_gradient(world, call, alone, shape=(4, 3)):
    """Check the gradient of the sum of all ranks' losses with respect to this rank's input.

    call(x): this rank's output. alone(inputs): outputs of all ranks, computed from all inputs
    without communication.
    """
    everyone, mine = leaves(world, *shape)
    output = call(mine)
    outputs = alone(everyone)
    near(output.detach(), outputs[world.me].detach())
    (output * weights(world.me, *output.shape)).sum().backward()
    sum((one * weights(rank, *one.shape)).sum() for rank, one in enumerate(outputs)).backward()
    wanted = everyone[world.me].grad  # None if no output depends on this rank
    near(mine.grad, torch.zeros(shape) if wanted is None else wanted)


def differentiable(n, me):
    """Arguments of check_gradient by function. For reduce and gather only the root has a loss."""
    sent = [d + 1 for d in range(n)]  # rank r sends d + 1 rows to rank d

    def zeros():
        return [torch.zeros(2, 3) for _ in range(n)]

    def turned(inputs):
        return [torch.cat([x.chunk(n)[rank] for x in inputs]) for rank in range(n)]

    def at(root, value):
        return [value if rank == root else torch.zeros_like(value) for rank in range(n)]

    def of_root(root):
        return {
            "broadcast": (lambda x: autograd.broadcast(x.clone(), root), lambda xs: [xs[root]] * n),
            "reduce": (
                lambda x: autograd.reduce(x.clone(), root) * (me == root),
                lambda xs: at(root, sum(xs)),
            ),
            "gather": (
                lambda x: torch.stack(autograd.gather(x, root)) * (me == root),
                lambda xs: at(root, torch.stack(xs)),
            ),
            "scatter": (
                lambda x: autograd.scatter(list(x.clone()), root), lambda xs: xs[root], (n, 3),
            ),
        }  # fmt: skip

    return {
        "all_reduce": (autograd.all_reduce, lambda xs: [sum(xs)] * n),
        "all_gather": (
            lambda x: torch.cat(autograd.all_gather(x)), lambda xs: [torch.cat(xs)] * n,
        ),
        "reduce_scatter": (
            lambda x: autograd.reduce_scatter(torch.zeros(2, 3), list(x.chunk(n))),
            lambda xs: sum(xs).chunk(n), (2 * n, 3),
        ),
        "all_to_all": (
            lambda x: torch.cat(autograd.all_to_all(zeros(), list(x.chunk(n)))), turned, (2 * n, 3),
        ),
        "all_to_all_single": (
            lambda x: autograd.all_to_all_single(torch.zeros(2 * n, 3), x), turned, (2 * n, 3),
        ),
        "all_to_all_single uneven": (
            lambda x: autograd.all_to_all_single(
                torch.zeros(n * (me + 1), 3), x, [me + 1] * n, list(sent)
            ),
            lambda xs: [torch.cat([x.split(sent)[rank] for x in xs]) for rank in range(n)],
            (sum(sent), 3),
        ),
        **{f"{name} {root}": row for root in (0, 1) for name, row in of_root(root).items()},
    }  # fmt: skip


@pytest.mark.parametrize("name", differentiable(2, 0))
def test_gradients(world, name):
    check_gradient(world, *differentiable(world.size, world.me)[name])


def eager(n, me):
    """Calls and their results, from the inputs of all ranks. ``network`` makes other calls."""
    parts = [normal(rank, 2 * n, 3) for rank in range(n)]
    group, split = list(range(n)), [d + 1 for d in range(n)]
    mine, rows = parts[me], [normal(rank, sum(split), 2) for rank in range(n)]
    following = [(rank + 1) % n for rank in range(n)]
    return {
        "all_reduce avg": (lambda: funcol.all_reduce(mine, "avg", group), sum(parts) / n),
        "all_reduce max": (
            lambda: funcol.all_reduce(mine, "max", group), torch.stack(parts).amax(0),
        ),
        "broadcast": (lambda: funcol.broadcast(mine, 1, group), parts[1]),
        "all_gather dim 1": (
            lambda: funcol.all_gather_tensor(mine, 1, group), torch.cat(parts, 1),
        ),
        "reduce_scatter dim 1": (
            lambda: funcol.reduce_scatter_tensor(mine.t(), "sum", 1, group),
            sum(parts).t().chunk(n, 1)[me],
        ),
        "all_to_all_single uneven": (
            lambda: funcol.all_to_all_single(rows[me], [me + 1] * n, split, group),
            torch.cat([one.split(split)[me] for one in rows]),
        ),
        "permute": (
            lambda: funcol.permute_tensor(mine.flatten(), following, group),
            parts[(me - 1) % n].flatten(),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", eager(2, 0))
def test_functional_collectives(world, name):
    call, wanted = eager(world.size, world.me)[name]
    output = call()
    near(funcol.wait_tensor(output) if type(output) is torch.Tensor else output + 0, wanted)


def test_functional_coalesced(world):
    n, me = world.size, world.me
    group = list(range(n))
    parts = [[normal(rank, n * (i + 1), key=i) for rank in range(n)] for i in range(3)]
    mine, totals = [part[me] for part in parts], [sum(part) for part in parts]
    scattered = funcol.reduce_scatter_tensor_coalesced(mine, "sum", [0] * 3, group)
    for found, wanted in (
        (funcol.all_reduce_coalesced(mine, "sum", group), totals),
        (funcol.all_gather_into_tensor_coalesced(mine, group), [torch.cat(one) for one in parts]),
        (scattered, [total.chunk(n)[me] for total in totals]),
    ):
        for one, other in zip(found, wanted, strict=True):
            near(one + 0, other)


def test_unused_functional_results(world):
    """The results are never waited for, and the inputs are dropped at once."""
    for i in range(30):
        funcol.all_reduce(torch.full((1000,), float(i)), "sum", list(range(world.size)))
    one = funcol.all_reduce(torch.ones(3), "sum", list(range(world.size)))
    equal(funcol.wait_tensor(one) + 0, torch.full((3,), float(world.size)))
    dist.barrier()


COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            shutil.which("g++") is None or "torch_kernels" in sys.modules,
            reason="inductor needs a C++ compiler, and a device that runs its kernels",
        ),
    ),
]


def network(x, weight, group, n):
    """Collectives with computation in between."""
    hidden = torch.tanh(x @ weight)
    total = funcol.all_reduce(hidden, "sum", group)
    gathered = funcol.all_gather_tensor(total * hidden, 0, group)
    piece = funcol.reduce_scatter_tensor(gathered + 1, "sum", 0, group)
    turned = funcol.all_to_all_single(piece, None, None, group)
    return (turned * 2 + piece).relu()


def network_alone(inputs, weight, me):
    n = len(inputs)
    hidden = [torch.tanh(x @ weight) for x in inputs]
    gathered = torch.cat([sum(hidden) * one for one in hidden]) + 1
    pieces = (gathered * n).chunk(n)
    turned = torch.cat([piece.chunk(n)[me] for piece in pieces])
    return (turned * 2 + pieces[me]).relu()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_collectives(world, compiler):
    """In one graph, called twice; the second call does not compile."""
    n, me = world.size, world.me
    group = list(range(n))
    torch._dynamo.reset()
    compiled = torch.compile(network, backend=compiler, fullgraph=True)
    weight = normal(9, 3, 3)
    for key in range(2):
        inputs = [normal(rank, 2 * n, 3, key=key) for rank in range(n)]
        found = compiled(inputs[me], weight, group, n)
        near(found, network_alone(inputs, weight, me), rtol=1e-4, atol=1e-5)
    dist.barrier()


def test_compile_supports_in_place_collectives(world):
    """Dynamo rewrites them as functional collectives."""

    def call(x):
        y = x * 2
        dist.all_reduce(y)
        outputs = torch.zeros(world.size * len(x))
        dist.all_gather_into_tensor(outputs, y + 1)
        return outputs

    torch._dynamo.reset()
    found = torch.compile(call, backend="aot_eager", fullgraph=True)(normal(world.me, 4))
    total = sum(normal(rank, 4) * 2 for rank in range(world.size)) + 1
    near(found, total.repeat(world.size))
    dist.barrier()


def test_compiled_collectives_have_gradients(world):
    n = world.size
    group = list(range(n))
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x):
        return funcol.all_gather_tensor_autograd(torch.sin(x), 0, group) * 3

    check_gradient(world, call, lambda inputs: [torch.cat([torch.sin(x) for x in inputs]) * 3] * n)


def test_compiled_ddp_trains_like_one_process(world):
    """Gradients are reduced during the compiled backward pass."""
    torch._dynamo.reset()
    model = torch.nn.parallel.DistributedDataParallel(make())
    compiled = torch.compile(model, backend="aot_eager")
    train(compiled, world.me, 3)
    same_parameters(model.module, trained_alone(world.size, 3))


def test_pending_functional_results_are_valid_inputs(world):
    """A functional collective returns before its result is available. Later calls wait for it."""
    n = world.size
    onward = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    dist.all_reduce(onward)
    equal(onward + 0, torch.full((3,), float(n * n)))
    outputs = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(outputs, funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD))
    for output in outputs:
        equal(output, torch.full((2,), float(n)))
