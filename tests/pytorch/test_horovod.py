"""Horovod functions: calls are matched by name, in any order."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import needs_2_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import mpicoll as dist
import mpicoll.horovod.torch as hvd
from mpicoll.horovod.torch import engine, implementations, mpi_ops

pytestmark = [pytest.mark.up_to_3, pytest.mark.usefixtures("horovod")]


def of(rank, *shape):
    """The tensor of a rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def everybody(*shape):
    return torch.stack([of(rank, *shape) for rank in range(hvd.size())])


@pytest.mark.parametrize(
    "op, combine",
    [
        (hvd.Sum, lambda x: x.sum(0)),
        (hvd.Average, lambda x: x.mean(0)),
        (hvd.Min, lambda x: x.amin(0)),
        (hvd.Max, lambda x: x.amax(0)),
        (hvd.Product, lambda x: x.prod(0)),
    ],
)
def test_allreduce(op, combine):
    own = of(hvd.rank(), 3, 5)
    got = hvd.allreduce(own, op=op, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(got, combine(everybody(3, 5) * 0.5) * 3.0)
    assert torch.equal(own, of(hvd.rank(), 3, 5))
    assert hvd.allreduce_(own, op=op) is own
    torch.testing.assert_close(own, combine(everybody(3, 5)))


def test_integer_averages_round_towards_zero():
    got = hvd.allreduce(torch.tensor([hvd.rank(), -hvd.rank(), 4]))
    half = (hvd.size() - 1) // 2
    assert got.tolist() == [half, -half, 4] and got.dtype == torch.int64


def test_average_supports_complex_and_rejects_bool():
    whole = torch.full((2,), complex(hvd.rank(), 2))
    mean = hvd.allreduce(whole)
    assert mean.tolist() == [complex((hvd.size() - 1) / 2, 2)] * 2
    assert hvd.reducescatter(torch.ones(hvd.size(), 1, dtype=torch.complex64)).tolist() == [[1]]
    for call in hvd.allreduce, hvd.reducescatter:
        with pytest.raises(ValueError, match=r"Average: expected numbers, got torch\.bool"):
            call(torch.tensor([True] * hvd.size()))
    assert hvd.allreduce(torch.tensor([True]), op=hvd.Sum).item() is True


def test_rejected_calls_do_not_consume_a_name():
    """The next call matches the calls of the other ranks."""
    if hvd.rank() == 0:
        for refused in hvd.allgather, hvd.allgather_async:
            with pytest.raises(ValueError, match="expected one dimension or more"):
                refused(torch.tensor(1.0))
    assert hvd.allgather(torch.ones(1)).tolist() == [1] * hvd.size()


@pytest.mark.parametrize("at_once", [False, True])
def test_named_calls_match_in_any_order(at_once):
    """Rank 0 may wait for each call before it begins the next one."""
    names = [f"t{i}" for i in range(6)]
    order = names if hvd.rank() % 2 == 0 else names[::-1]
    begun = {}
    for name in order:
        begun[name] = hvd.allreduce_async(torch.full((2,), int(name[1])), name=name, op=hvd.Sum)
        if at_once and hvd.rank() == 0:
            hvd.synchronize(begun[name])
    for name in order:
        assert hvd.synchronize(begun[name]).tolist() == [int(name[1]) * hvd.size()] * 2
        assert hvd.poll(begun[name])


def test_different_operations_may_share_a_name():
    total = hvd.allreduce_async(torch.ones(2), name="weight", op=hvd.Sum)
    first = hvd.broadcast_async(torch.full((1,), hvd.rank()), 0, name="weight")
    assert hvd.synchronize(first).item() == 0
    assert hvd.synchronize(total).tolist() == [hvd.size()] * 2


@needs_2_ranks
@pytest.mark.parametrize(
    "kind", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
)
def test_duplicate_name_is_rejected(kind):

    def begin():
        root = {"root_rank": 0} if kind == "broadcast" else {}
        return getattr(hvd, f"{kind}_async")(torch.ones(hvd.size()), name="twice", **root)

    if hvd.rank() == 0:
        begun = begin()
        with pytest.raises(ValueError, match=rf"an operation named {kind}\.twice is pending"):
            begin()
        hvd.barrier()
    else:
        hvd.barrier()
        begun = begin()
    hvd.synchronize(begun)
    hvd.synchronize(begin())  # the name is available again


def test_barrier_waits_for_all_ranks(tmp_path):
    file = Path(hvd.broadcast_object(str(tmp_path / "file"), 0))
    if hvd.rank() == 0:
        time.sleep(0.3)
        file.touch()
    hvd.barrier()
    assert file.exists()
    hvd.barrier()  # pytest then removes the folder of rank 0


@needs_2_ranks
def test_stall_warning_names_a_missing_rank(monkeypatch):
    """Each rank waits for an operation that no other rank begins before the warning."""
    warned = threading.Event()
    said = []

    def warn(text, **options):
        said.append(text)
        warned.set()

    monkeypatch.setattr(engine, "_STALL_WARNING_S", 0.05)
    monkeypatch.setattr(engine.warnings, "warn", warn)
    begun = {hvd.rank(): hvd.allreduce_async(torch.ones(1), name=f"of {hvd.rank()}", op=hvd.Sum)}
    assert warned.wait(60)
    dist.barrier()
    for rank in set(range(hvd.size())) - begun.keys():
        begun[rank] = hvd.allreduce_async(torch.ones(1), name=f"of {rank}", op=hvd.Sum)
    assert [hvd.synchronize(each).item() for each in begun.values()] == [hvd.size()] * hvd.size()
    others = ", ".join(str(rank) for rank in range(hvd.size()) if rank != hvd.rank())
    assert f"horovod: allreduce.of {hvd.rank()} waits for rank" in said[0]
    assert f" {others}, which" in said[0]


@pytest.mark.parametrize("wrong", [0.5, "0", b"0", None, torch.tensor(0.5), [0]])
def test_root_ranks_must_be_integers(wrong):
    """The error is raised before data is sent, and the next call works."""
    for call in (hvd.broadcast, hvd.broadcast_):
        with pytest.raises(TypeError, match="root_rank: expected an int"):
            call(torch.ones(1), root_rank=wrong)
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    for call, what in ((hvd.broadcast_object, 1), (hvd.broadcast_optimizer_state, optimizer)):
        with pytest.raises(TypeError, match="root_rank: expected an int"):
            call(what, root_rank=wrong)
    got = hvd.broadcast(torch.full((2,), float(hvd.rank())), root_rank=torch.tensor(0))
    assert got.tolist() == [0.0, 0.0]


@needs_2_ranks
def test_mismatch_raises_on_all_ranks_and_the_next_call_works():
    for tensor in (
        torch.ones(3 + hvd.rank()),
        torch.ones(3, dtype=[torch.int32, torch.float32][hvd.rank() % 2]),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="differ"):
            hvd.allreduce(tensor)
    with pytest.raises(hvd.HorovodInternalError, match="root"):
        hvd.broadcast(torch.ones(1), root_rank=hvd.rank())
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_grouped_and_gathered():
    n, me = hvd.size(), hvd.rank()
    sums = hvd.grouped_allreduce([torch.ones(2), torch.full((3,), me)], op=hvd.Sum)
    assert [x.tolist() for x in sums] == [[n] * 2, [sum(range(n))] * 3]
    rows = hvd.allgather(torch.full((me, 2), me))
    assert rows[:, 0].tolist() == [r for r in range(n) for _ in range(r)]
    assert torch.equal(hvd.broadcast(of(me, 4), n - 1), of(n - 1, 4))
    assert mpi_ops.size is hvd.size and mpi_ops.alltoall is hvd.alltoall  # scripts import from both
    out, received = hvd.alltoall(torch.arange(n * (me + 1)), splits=[me + 1] * n)
    assert received.tolist() == [r + 1 for r in range(n)]
    assert out.tolist() == [me * (r + 1) + i for r in range(n) for i in range(r + 1)]
    mine = hvd.reducescatter(torch.arange(n + 1), op=hvd.Sum)
    assert mine.tolist() == [x * n for x in ([0, 1] if me == 0 else [me + 1])]


def test_zeros_of_a_joined_rank_are_on_its_gpu():
    """The engine thread creates them, and its current device can differ from the program's."""
    facts = {
        "operation": "allreduce",
        "shapes": [[2]],
        "dtypes": ["torch.float32"],
        "device": "cuda",
    }
    with FakeTensorMode():
        (zeros,) = implementations.Request.placeholder(facts, 3).inputs
        assert zeros.device == torch.device("cuda:3")
    on_host = implementations.Request.placeholder(facts | {"device": "cpu"}, 3).inputs[0]
    assert on_host.tolist() == [0, 0]


@pytest.mark.skipif(not hasattr(torch, "float8_e4m3fn"), reason="needs float8 in torch")
def test_float8_allreduce_applies_scale_factors():
    ones = torch.ones(4).to(torch.float8_e4m3fn)
    found = hvd.allreduce(ones, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert found.float().tolist() == [hvd.size()] * 4


@pytest.mark.parametrize("name", ["uneven", None])
def test_calls_match_after_an_uneven_join(name):
    """Joined ranks contribute zeros."""
    for _ in range(hvd.rank()):
        hvd.allreduce(torch.ones(2), name=name, op=hvd.Sum)
    assert hvd.join() == hvd.size() - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_objects():
    assert hvd.broadcast_object({"rank": hvd.rank()}, 0) == {"rank": 0}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_broadcast_optimizer_state():
    root = hvd.size() - 1
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5 + hvd.rank()))
    if hvd.rank() == root:
        weight.sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root)
    state, (group,) = optimizer.state[weight], optimizer.param_groups
    assert group["lr"].item() == 0.5 + root and group["betas"] == (0.9, 0.999)
    torch.testing.assert_close(state["exp_avg"], torch.full((2,), 0.1))  # (1 - 0.9) * gradient
    assert state["step"].item() == 1


def test_scheduler_of_the_wrapped_optimizer_stays_effective():
    """Also after broadcast_optimizer_state."""
    weight = torch.nn.Parameter(torch.zeros(1))
    wrapped = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, step_size=1, gamma=0.1)
    optimizer = hvd.DistributedOptimizer(wrapped)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for _ in range(2):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    torch.testing.assert_close(weight.detach(), torch.tensor([-1 - 0.1 * 1.9]))


def test_destroying_the_default_group_shuts_horovod_down():
    threads = threading.active_count()
    dist.destroy_process_group()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert threading.active_count() <= threads


def test_missing_names_have_a_remedy():
    with pytest.raises(AttributeError, match=r"no ProcessSet: .*mpicoll\.new_group"):
        _ = hvd.ProcessSet
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hvd.nothing
