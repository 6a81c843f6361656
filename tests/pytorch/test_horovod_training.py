"""Training with Horovod's API, compared with one process that has the batches of all ranks."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import mpicoll.horovod.torch as hvd

pytestmark = [pytest.mark.up_to_3, pytest.mark.usefixtures("horovod")]


def of(rank, *shape, dtype=torch.float64):
    """The data of a rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def network():
    torch.manual_seed(3)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
    return torch.nn.Sequential(*layers).double()


def train(optimizer, model, batches, passes=1, averages=1):
    """Take one step per batch, with several backward passes each."""
    for batch in batches:
        optimizer.zero_grad()
        for part in batch.chunk(passes):
            (model(part).square().mean() / averages).backward()
        optimizer.step()


def whole_batches(steps=3, rows=6):
    return [
        torch.cat([of(100 * step + rank, rows, 4) for rank in range(hvd.size())])
        for step in range(steps)
    ]


def own_batches(steps=3, rows=6):
    return [of(100 * step + hvd.rank(), rows, 4) for step in range(steps)]


def alone():
    """Train one process on the batches of all ranks."""
    model = network()
    train(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, whole_batches())
    return model


def same(model, expected, tolerance=1e-10):
    for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        close(got, wanted, tolerance)


def distributed(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


@pytest.mark.parametrize(
    "options, tolerance",
    [
        ({}, 1e-10),
        ({"compression": hvd.Compression.fp16}, 2e-3),
        ({"gradient_predivide_factor": 3.0}, 1e-10),
        ({"op": hvd.Sum}, 1e-10),
    ],
    ids=str,
)
def test_training_equals_one_process(options, tolerance):
    model = network()
    if hvd.rank():
        torch.nn.init.zeros_(model[0].weight)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    averages = hvd.size() if "op" in options else 1
    train(distributed(model, **options), model, own_batches(), averages=averages)
    same(model, alone(), tolerance)


def test_gradient_predivide_factor_requires_average():
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        distributed(network(), gradient_predivide_factor=2.0, op=hvd.Sum)


def test_several_backward_passes_per_step():
    model = network()
    optimizer = distributed(model, backward_passes_per_step=3)
    train(optimizer, model, own_batches(), passes=3, averages=3)
    same(model, alone())
    optimizer.set_backward_passes_per_step(2)
    x = of(0, 2, 4)
    for _ in range(2):
        model(x).sum().backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="more backward passes than"):
            model(x).sum().backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
    optimizer.synchronize()


def test_missing_gradient_counts_as_zero():
    """One rank skips a layer."""
    model, expected = network(), network()
    optimizer = distributed(model, groups=1)  # ignored
    x = of(hvd.rank(), 6, 4)
    optimizer.zero_grad()
    (model(x) if hvd.rank() == 0 else model[0](x)).square().mean().backward()
    optimizer.step()
    losses = [
        (expected(of(r, 6, 4)) if r == 0 else expected[0](of(r, 6, 4))).square().mean()
        for r in range(hvd.size())
    ]
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    torch.stack(losses).mean().backward()
    reference.step()
    same(model, expected)


def test_sparse_gradients():
    """Rows of several ranks are added; rows without a gradient are unchanged."""
    torch.manual_seed(5)
    own = torch.nn.Embedding(7, 3, sparse=True).double()
    whole = copy.deepcopy(own)
    rows = [torch.tensor([rank, rank, 4, 5 - rank]) for rank in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.5), own.named_parameters(), sparse_as_dense=True
    )
    reference = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        own(rows[hvd.rank()]).square().sum().backward()
        assert own.weight.grad.is_sparse
        optimizer.step()
        reference.zero_grad()
        (whole(torch.cat(rows)).square().sum() / hvd.size()).backward()
        reference.step()
    assert own.weight.grad.is_sparse
    close(own.weight, whole.weight)


def test_unsupported_steps_are_rejected():
    own = torch.nn.Embedding(7, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(own.parameters(), lr=0.5))
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="sparse_as_dense=True"):
            own(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="closure: not supported"):
        optimizer.step(lambda: 0.0)


def test_invalid_parameter_names_are_rejected():
    model = network()
    with pytest.raises(ValueError, match=r"given twice: 0\.weight"):
        named = [("0.weight", p) for p in model.parameters()]
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), named)
    with pytest.raises(ValueError, match="has no name"):
        named = list(model.named_parameters())[1:]
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), named)
    with pytest.raises(ValueError, match="tuples"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), model.parameters())
    train(hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)), model, [])


def test_step_after_synchronize_warns():
    model = network()
    optimizer = distributed(model)
    model(of(0, 2, 4)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="reduced once more"):
        optimizer.step()


def weights(rank, *shape):
    """The weights that multiply a rank's result in its loss."""
    return of(50 + rank, *shape)


def check_gradient(x, result, expected):
    """Check the gradient of the loss that multiplies the result by this rank's weights."""
    (weights(hvd.rank(), *result.shape) * result).sum().backward()
    close(x.grad, expected)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_allreduce(op, grouped):
    me, n = hvd.rank(), hvd.size()
    x = [of(me, 3).requires_grad_(), of(me, 2, 2).requires_grad_()]
    if grouped:
        results = hvd.grouped_allreduce(x, op=op, prescale_factor=0.5, postscale_factor=3.0)
    else:
        results = [
            hvd.allreduce(each, op=op, prescale_factor=0.5, postscale_factor=3.0) for each in x
        ]
    sum((weights(me, *each.shape) * each).sum() for each in results).backward()
    for each in x:
        total = sum(weights(rank, *each.shape) for rank in range(n))
        close(each.grad, 1.5 * total / (n if op == hvd.Average else 1))


def test_gradients_of_allgather():
    me, n = hvd.rank(), hvd.size()
    rows = [rank + 1 for rank in range(n)]
    x = of(me, rows[me], 2).requires_grad_()
    mean = torch.stack([weights(rank, sum(rows), 2) for rank in range(n)]).mean(0)
    check_gradient(x, hvd.allgather(x), mean[sum(rows[:me]) : sum(rows[: me + 1])])


def test_gradients_of_broadcast():
    me, root = hvd.rank(), hvd.size() - 1
    x = of(me, 4).requires_grad_()
    mean = torch.stack([weights(rank, 4) for rank in range(hvd.size())]).mean(0)
    check_gradient(x, hvd.broadcast(x, root), mean if me == root else 0 * mean)


def test_gradients_of_alltoall():
    """The gradient of a row comes from its receiver. Rows that are not sent have zeros."""
    me, n = hvd.rank(), hvd.size()
    x = of(me, (me + 1) * n + 2, 2).requires_grad_()
    got, received = hvd.alltoall(x, splits=torch.tensor([me + 1] * n))
    assert received.tolist() == [rank + 1 for rank in range(n)]
    before = sum(range(1, me + 1))
    parts = [weights(rank, len(got), 2)[before : before + me + 1] for rank in range(n)]
    check_gradient(x, got, torch.cat([*parts, torch.zeros(2, 2, dtype=torch.float64)]))


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradients_of_reducescatter(op):
    """As in Horovod, gradients of Sum are multiplied by the number of ranks."""
    me, n = hvd.rank(), hvd.size()
    x = of(me, n + 1, 2).requires_grad_()
    own = hvd.reducescatter(x, op=op)
    rows = [2] + [1] * (n - 1)
    assert len(own) == rows[me]
    whole = torch.cat([weights(rank, rows[rank], 2) for rank in range(n)])
    check_gradient(x, own, whole * (n if op == hvd.Sum else 1))


def test_allreduce_with_compression_has_gradients():
    x = of(hvd.rank(), 3, dtype=torch.float32).requires_grad_()
    out = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    half = sum(of(rank, 3, dtype=torch.float32).half().float() for rank in range(hvd.size()))
    assert out.dtype == torch.float32
    close(out, half.half().float(), 2e-3)
    out.sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.tolist() == [hvd.size()] * 3


def test_build_information():
    assert hvd.mpi_built() and hvd.mpi_enabled() and hvd.mpi_threads_supported() in (True, False)
    assert not any([hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built()])
    assert hvd.nccl_built() == 0
    assert hvd.cuda_built() == torch.backends.cuda.is_built()
