"""hvd.elastic without lost processes: states, samplers, and causes of a restart.

tests/test_horovod_losses.py kills ranks.
"""

from __future__ import annotations

import pytest
import torch
from conftest import needs_2_ranks

import mpicoll as dist
import mpicoll.horovod.torch as hvd

pytestmark = [pytest.mark.up_to_3, pytest.mark.usefixtures("horovod")]


def trained(steps):
    """A model and its optimizer after some steps."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, steps)
    return model, optimizer


def step(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_state_can_be_restored_twice():
    """The optimizer must not share saved tensors, especially its momentum."""
    model, optimizer = trained(2)
    state = hvd.elastic.TorchState(model, optimizer, seen=[1])
    state.commit()
    for _ in range(2):
        step(model, optimizer, 3)
        state.seen.append(2)
        state.restore()
        expected, its = trained(2)
        assert same(model, expected) and state.seen == [1]
    step(model, optimizer)
    step(expected, its)
    assert same(model, expected)


def test_sync_uses_and_saves_the_state_of_rank_0():
    model, optimizer = trained(1 + hvd.rank())
    state = hvd.elastic.TorchState(model, optimizer, epoch=hvd.rank(), extra={"r": hvd.rank()})
    state.epoch += 5  # not committed
    state.sync()
    expected, its = trained(1)
    assert same(model, expected) and (state.epoch, state.extra) == (0, {"r": 0})
    step(model, optimizer)
    step(expected, its)
    assert same(model, expected)
    state.restore()
    assert same(model, trained(1)[0]) and state.epoch == 0


def test_assigned_model_is_saved():
    state = hvd.elastic.TorchState(model=trained(1)[0])
    state.model = trained(3)[0]
    torch.nn.init.zeros_(state.model.weight)
    state.restore()
    assert same(state.model, trained(3)[0])


def test_function_restarts_after_an_internal_error():
    calls = []

    @hvd.elastic.run
    def train(state, to, *, by):
        calls.append((state.step, len(dist.get_process_group_ranks(dist.group.WORLD))))
        while state.step < to:
            state.step += by
            if state.step == 2:
                state.commit()
            if state.step == 3 and len(calls) == 1:
                raise hvd.HorovodInternalError("as of a lost rank")
        return hvd.allreduce(torch.tensor([state.step]), op=hvd.Sum).item()

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    sizes = []
    state.register_reset_callbacks([lambda: sizes.append(hvd.size())])
    before = dist.group.WORLD
    assert train(state, 5, by=1) == 5 * hvd.size()
    assert calls == [(0, hvd.size()), (2, hvd.size())] and sizes == [hvd.size()]
    assert dist.group.WORLD is before


@pytest.mark.parametrize("others_return", [False, True])
def test_error_on_one_rank_restarts_all_ranks(others_return):
    """Other ranks wait for the failed rank, or have completed the function."""
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        if len(calls) == 1 and hvd.rank() == hvd.size() - 1:
            raise hvd.HorovodInternalError("on one rank")
        return hvd.size() if others_return else hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=4)
    assert train(state) == hvd.size() and calls == [4, 4]


def test_restart_cancels_pending_gradients():
    """Neighbor ranks have started reductions of different gradients, which never complete."""
    model, _ = trained(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    failed = []

    @hvd.elastic.run
    def train(state):
        for p in model.parameters():
            p.requires_grad_(True)
        optimizer.zero_grad()
        if not failed:
            failed.append(1)
            [model.weight, model.bias][hvd.rank() % 2].requires_grad_(False)
            model(torch.ones(1, 2)).sum().backward()
            raise hvd.HorovodInternalError("as of a lost rank")
        step(model, optimizer)

    train(hvd.elastic.TorchState(model, optimizer))
    expected, _ = trained(0)
    step(expected, torch.optim.SGD(expected.parameters(), lr=0.1))
    torch.testing.assert_close(model.weight, expected.weight)


@needs_2_ranks
def test_user_error_is_raised():
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(1)
        hvd.allreduce(torch.ones(1 + hvd.rank()))

    with pytest.raises(hvd.HorovodInternalError, match="differ"):
        train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
    assert len(calls) == 2


def test_function_may_fail_repeatedly_between_commits():
    """Each restart has newer state."""

    @hvd.elastic.run
    def train(state):
        state.step += 1
        state.commit()
        if state.step < 4:
            raise hvd.HorovodInternalError("as of a lost rank")
        return state.step

    assert train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)) == 4


@pytest.mark.parametrize("shuffle", [False, True])
def test_sampler_distributes_remaining_samples(shuffle):
    n = hvd.size()
    data = list(range(5 * n + 1))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=shuffle, seed=3)
    state = hvd.elastic.TorchState(sampler=sampler)

    def everybody(count=None):
        return [i for own in hvd.allgather_object(list(sampler)[:count]) for i in own]

    first = everybody()
    assert set(first) == set(data) and len(first) == 6 * n and len(sampler) == 6
    taken = everybody(2)
    sampler.record_batch(0, 2)
    state.commit()
    state.on_reset()
    state.sync()
    rest = everybody()
    assert len(sampler) == 4 and set(rest) == set(data) - set(taken)
    sampler.set_epoch(1)
    assert set(everybody()) == set(data) and (everybody() == first) == (not shuffle)
