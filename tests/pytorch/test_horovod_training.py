"""Training with Horovod's API, compared with one process that has the batches of all ranks."""

from __future__ import annotations

import contextlib
import copy
import warnings

import numpy as np
import pytest
import torch

import mpicoll.horovod.torch as hvd
from mpicoll.horovod.torch import optimizer as module

pytestmark = pytest.mark.up_to_3


@pytest.fixture(scope="module", autouse=True)
def horovod():
    hvd.init()
    yield
    hvd.shutdown()


def of(rank, *shape, dtype=torch.float64):
    """The data of a rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


#: BatchNorm classes by the number of dimensions of a sample.
BATCH_NORM = {
    1: torch.nn.BatchNorm1d,
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm2d,
    4: torch.nn.BatchNorm3d,
}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 2e-5)])
@pytest.mark.parametrize(
    "shape, options",
    [
        ((3,), {}),
        ((3, 5), {"affine": False, "eps": 0.1}),
        ((3, 4, 2), {"momentum": None}),
        ((3, 2, 2, 2), {"track_running_stats": False, "momentum": 0.7}),
    ],
)
def test_sync_batch_norm_equals_batch_norm_of_the_whole_batch(shape, options, dtype, tolerance):
    """Batches have different lengths on each rank, and a large mean."""
    sizes = [2 * rank + 1 for rank in range(hvd.size())]
    if hvd.size() == 1:
        sizes = [3]
    alone = BATCH_NORM[len(shape)](3, **options).to(dtype)
    own = hvd.SyncBatchNorm(3, **options).to(dtype)
    if alone.affine:
        with torch.no_grad():
            for each in alone, own:
                each.weight.copy_(torch.tensor([1.0, 2.0, -1.0]))
                each.bias.copy_(torch.tensor([0.5, 0.0, 1.0]))
    for turn in range(2):
        parts = [
            of(10 * turn + rank, size, *shape, dtype=dtype) + 5 + rank
            for rank, size in enumerate(sizes)
        ]
        whole = torch.cat(parts).requires_grad_()
        mine = parts[hvd.rank()].clone().requires_grad_()
        expected, got = alone(whole), own(mine)
        place = slice(sum(sizes[: hvd.rank()]), sum(sizes[: hvd.rank() + 1]))
        close(got, expected[place], tolerance)
        expected.pow(3).sum().backward()
        got.pow(3).sum().backward()
        close(mine.grad, whole.grad[place], 10 * tolerance)
    for name, value in alone.state_dict().items():
        close(own.state_dict()[name], value, tolerance)
    if alone.affine:
        close(hvd.allreduce(own.weight.grad, op=hvd.Sum), alone.weight.grad, 100 * tolerance)
        close(hvd.allreduce(own.bias.grad, op=hvd.Sum), alone.bias.grad, 100 * tolerance)
    own.eval()
    alone.eval()
    if options.get("track_running_stats", True):
        close(own(parts[0]), alone(parts[0]), tolerance)
    else:  # statistics of the batch of all ranks
        close(own(parts[hvd.rank()]), alone(torch.cat(parts))[place], tolerance)


def test_sync_batch_norm_with_empty_batches():
    last = hvd.size() - 1
    own = hvd.SyncBatchNorm(2).double()
    x = of(0, 4 if hvd.rank() == last else 0, 2).requires_grad_()
    got = own(x)
    got.pow(3).sum().backward()
    alone, whole = torch.nn.BatchNorm1d(2).double(), of(0, 4, 2).requires_grad_()
    expected = alone(whole)
    expected.pow(3).sum().backward()
    close(own.running_var, alone.running_var)
    if hvd.rank() == last:
        close(got, expected)
        close(x.grad, whole.grad)
    else:
        assert x.grad.shape == (0, 2)


def test_sync_batch_norm_rejects_invalid_inputs():
    with pytest.raises(ValueError, match="two dimensions or more, got 1"):
        hvd.SyncBatchNorm(3)(torch.ones(3))
    if hvd.size() > 1:
        x = torch.ones(int(hvd.rank() == 0), 3)
        with pytest.raises(ValueError, match="2 or more values per channel"):
            hvd.SyncBatchNorm(3)(x)


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


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16])
def test_training_equals_one_process(compression):
    model = network()
    if hvd.rank():
        torch.nn.init.zeros_(model[0].weight)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(distributed(model, compression=compression), model, own_batches())
    same(model, alone(), 1e-10 if compression is hvd.Compression.none else 2e-3)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_gradient_predivide_factor(factor):
    model = network()
    train(distributed(model, gradient_predivide_factor=factor), model, own_batches())
    same(model, alone())
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        distributed(model, gradient_predivide_factor=2.0, op=hvd.Sum)


def test_optimizer_with_sum():
    model = network()
    train(distributed(model, op=hvd.Sum), model, own_batches(), averages=hvd.size())
    same(model, alone())


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


@pytest.mark.parametrize(
    "groups, operations",
    [
        (0, 6),
        (1, 1),
        (4, 4),
        (50, 6),
        ([[0, 3], [5]], 5),
        ([[2], []], 6),
        ([[5, 4, 3, 2, 1, 0]], 1),
    ],
)
def test_each_gradient_group_is_one_operation(groups, operations, monkeypatch):
    """The result does not depend on the groups, only the number of operations does."""
    begun = []

    def begin(tensors, **options):
        begun.append(len(tensors))
        return hvd.grouped_allreduce_async_(tensors, **options)

    monkeypatch.setattr(module, "grouped_allreduce_async_", begin)
    model = network()
    chosen = groups
    if isinstance(groups, list):
        parameters = list(model.parameters())
        chosen = [[parameters[index] for index in group] for group in groups]
    train(distributed(model, groups=chosen), model, own_batches())
    same(model, alone())
    if hvd.size() > 1:
        assert len(begun) == 3 * operations and sum(begun) == 3 * 6


def test_missing_gradient_in_a_group_counts_as_zero():
    """One rank skips a layer. The group is reduced anyway."""
    model, expected = network(), network()
    optimizer = distributed(model, groups=1)
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


@pytest.mark.parametrize(
    "groups, words",
    [
        (-1, "0 or more"),
        ("abc", "list of lists"),
        ([1], "list of lists"),
        ([["x"]], "list of lists"),
    ],
)
def test_invalid_groups_are_rejected(groups, words):
    with pytest.raises(ValueError, match=f"groups: .*{words}"):
        distributed(network(), groups=groups)


def test_groups_reject_duplicate_parameters():
    model = network()
    first = next(model.parameters())
    with pytest.raises(ValueError, match="each parameter once"):
        distributed(model, groups=[[first], [first]])
    with pytest.warns(DeprecationWarning, match="num_groups"):
        distributed(model, num_groups=2)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    """Rows of several ranks are added; rows without a gradient are unchanged."""
    torch.manual_seed(5)
    own = torch.nn.Embedding(7, 3, sparse=True).double()
    whole = copy.deepcopy(own)
    rows = [torch.tensor([rank, rank, 4, 5 - rank]) for rank in range(hvd.size())]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.5), own.named_parameters(), sparse_as_dense=as_dense
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


#: Optimizers that need a closure: LBFGS calls it several times per step and reads the loss.
CLOSURES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.2, "max_iter": 4}),
    "search": (torch.optim.LBFGS, {"max_iter": 6, "line_search_fn": "strong_wolfe"}),
    "loose": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 20, "tolerance_change": 1e-2}),
}

#: Closure variants: number of backward passes, whether the closure calls synchronize, and whether
#: the step runs in skip_synchronize.
WAYS = {
    "plain": (1, False, False),
    "passes": (2, False, False),
    "synchronized": (1, True, False),
    "skipped": (1, False, True),
    "both": (2, True, True),
}


def step_by_closure(optimizer, model, batch, passes=1, synchronize=False):
    """Take a step; return the loss and the number of closure calls."""
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        losses = [(model(part) - 1).square().mean() / passes for part in batch.chunk(passes)]
        for loss in losses:
            loss.backward()
        if synchronize:
            optimizer.synchronize()
        return sum(losses).detach()

    return optimizer.step(closure), calls


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CLOSURES)
def test_optimizer_with_a_closure(kind, way):
    """All ranks call the closure equally often, although their local losses differ."""
    passes, synchronize, skip = WAYS[way]
    make, options = CLOSURES[kind]
    model, expected = network(), network()
    reference = make(expected.parameters(), **options)
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters(), **options),
        model.named_parameters(),
        backward_passes_per_step=passes,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning about a repeated reduction
        for whole, own in zip(whole_batches(), own_batches(), strict=True):
            with optimizer.skip_synchronize() if skip else contextlib.nullcontext():
                found = step_by_closure(optimizer, model, own, passes, synchronize)
            wanted = step_by_closure(reference, expected, whole)
            close(found[0], wanted[0])
            assert found[1] == wanted[1]
            same(model, expected, 1e-8)


@pytest.mark.parametrize("loss", [None, 0.5, np.float32(0.5), torch.tensor(0.5), "a tuple"])
def test_closure_loss_is_averaged(loss):
    """The mean of the losses; a rank may return None."""
    model = network()
    mine = loss if hvd.rank() == 0 else 1.5

    def closure():
        optimizer.zero_grad()
        model(of(hvd.rank(), 6, 4)).square().mean().backward()
        return mine

    optimizer = distributed(model)
    found = optimizer.step(closure)
    if mine is None or isinstance(mine, str):
        assert found is mine
    else:
        first = 0.0 if loss is None or isinstance(loss, str) else 0.5
        assert float(found) == pytest.approx((first + 1.5 * (hvd.size() - 1)) / hvd.size())


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_before_the_closure_are_reduced(op):
    """They are reduced when the step begins (as SAM needs), and only once."""
    model, expected, n = network(), network(), 1 if op == hvd.Average else hvd.size()
    optimizer = distributed(model, op=op)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1 * n, momentum=0.9)
    for each, by, batch in (
        (model, optimizer, own_batches()),
        (expected, reference, whole_batches()),
    ):
        for x in batch:
            by.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                by.step(lambda loss=loss: loss)
    same(model, expected)


def test_closure_must_not_zero_pending_gradients():
    model = network()
    optimizer = distributed(model)
    model(of(0, 2, 4)).sum().backward()
    if hvd.size() > 1:
        with optimizer.skip_synchronize(), pytest.raises(AssertionError, match="zero_grad"):
            step_by_closure(optimizer, model, of(0, 2, 4))
    optimizer.synchronize()


def weights(rank, *shape):
    """The weights that multiply a rank's result in its loss."""
    return of(50 + rank, *shape)


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
    gathered = hvd.allgather(x)
    (weights(me, *gathered.shape) * gathered).sum().backward()
    mean = torch.stack([weights(rank, sum(rows), 2) for rank in range(n)]).mean(0)
    close(x.grad, mean[sum(rows[:me]) : sum(rows[: me + 1])])


def test_gradients_of_broadcast():
    me, root = hvd.rank(), hvd.size() - 1
    x = of(me, 4).requires_grad_()
    (weights(me, 4) * hvd.broadcast(x, root)).sum().backward()
    mean = torch.stack([weights(rank, 4) for rank in range(hvd.size())]).mean(0)
    close(x.grad, mean if me == root else torch.zeros(4, dtype=torch.float64))


def test_gradients_of_alltoall():
    """The gradient of a row comes from its receiver. Rows that are not sent have zeros."""
    me, n = hvd.rank(), hvd.size()
    x = of(me, (me + 1) * n + 2, 2).requires_grad_()
    got, received = hvd.alltoall(x, splits=torch.tensor([me + 1] * n))
    assert received.tolist() == [rank + 1 for rank in range(n)]
    (weights(me, *got.shape) * got).sum().backward()
    before = sum(range(1, me + 1))
    parts = [weights(rank, len(got), 2)[before : before + me + 1] for rank in range(n)]
    close(x.grad, torch.cat([*parts, torch.zeros(2, 2, dtype=torch.float64)]))


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradients_of_reducescatter(op):
    """As in Horovod, gradients of Sum are multiplied by the number of ranks."""
    me, n = hvd.rank(), hvd.size()
    x = of(me, n + 1, 2).requires_grad_()
    own = hvd.reducescatter(x, op=op)
    rows = [2] + [1] * (n - 1)
    assert len(own) == rows[me]
    (weights(me, *own.shape) * own).sum().backward()
    whole = torch.cat([weights(rank, rows[rank], 2) for rank in range(n)])
    close(x.grad, whole * (n if op == hvd.Sum else 1))


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
