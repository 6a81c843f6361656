"""The backend as a C++ Backend of torch, supported from torch 2.15 on."""

from __future__ import annotations

import gc
import json
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import team
from torch._subclasses import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor.debug import CommDebugMode

from mpicoll.errors import ArgumentError
from mpicoll.torch.backend import HAS_PYTHON_BACKENDS

C = torch._C._distributed_c10d
pytestmark = pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="needs torch 2.15")


@pytest.fixture
def group(world):
    return c10d._get_default_group()


@pytest.fixture
def backend(group):
    return dist.get_backend_impl(group, torch.device("cpu"))


def total(group=None):
    """Check the sum of rank + 1 over the group."""
    x = torch.tensor([dist.get_rank(group) + 1.0])
    dist.all_reduce(x, group=group)
    n = dist.get_world_size(group)
    assert x.item() == n * (n + 1) / 2


def test_backend_is_a_torch_backend(group, backend):
    assert isinstance(backend, C.Backend)
    assert (backend.rank(), backend.size()) == (dist.get_rank(), dist.get_world_size())
    assert backend.name() == dist.get_backend() == "mpicoll"
    assert backend.options.backend == "mpicoll"
    assert backend.options.global_ranks_in_group == list(range(group.size()))
    assert backend.get_error() == C.ErrorType.SUCCESS
    assert "cpu" in [device.type for device in group._device_types]


def test_all_supports_properties_return_a_bool(group, backend):
    """If a Python class does not define a property, torch recurses without end."""
    for each in group, backend:
        asked = [name for name in dir(each) if name.lstrip("_").startswith("supports_")]
        asked.remove("supports_tensor_alloc") if "supports_tensor_alloc" in asked else None
        assert asked
        for name in asked:
            assert isinstance(getattr(each, name), bool), name
    assert not backend.supports_tensor_alloc(torch.device("cpu"))


CALLS = {
    "allreduce": lambda g, x, many: g.allreduce([x]),
    "allreduce_coalesced": lambda g, x, many: g.allreduce_coalesced(many),
    "broadcast": lambda g, x, many: g.broadcast([x]),
    "reduce": lambda g, x, many: g.reduce([x]),
    "allgather": lambda g, x, many: g.allgather([many], [x]),
    "all_gather_single": lambda g, x, many: g.all_gather_single(torch.cat(many), x),
    "all_gather_single_coalesced": lambda g, x, many: g.all_gather_single_coalesced(
        [torch.cat(many)], [x]
    ),
    "_allgather_base": lambda g, x, many: g._allgather_base(torch.cat(many), x),
    "reduce_scatter": lambda g, x, many: g.reduce_scatter([x], [many]),
    "reduce_scatter_single": lambda g, x, many: g.reduce_scatter_single(x, torch.cat(many)),
    "reduce_scatter_single_coalesced": lambda g, x, many: g.reduce_scatter_single_coalesced(
        [x], [torch.cat(many)]
    ),
    "all_to_all_single": lambda g, x, many: g.all_to_all_single(
        torch.cat(many), torch.cat(many), [], []
    ),
    "alltoall": lambda g, x, many: g.alltoall([y.clone() for y in many], many),
    "barrier": lambda g, x, many: g.barrier(),
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_return_the_python_work(world, group, monkeypatch, name, watched):
    """torch would wrap it in a C++ Work. Covers observed groups and groups without hooks."""
    monkeypatch.setattr(type(group), "is_observed", lambda self: watched)
    x, many = torch.ones(2), [torch.ones(2) for _ in range(world.size)]
    work = CALLS[name](group, x, many)
    work.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert len(work.result()) == len(work.get_future().value())


def test_recv_anysource_returns_the_sender(world, group):
    x = torch.zeros(1)
    if world.me == 0:
        work = group.recv_anysource([x], 5)
        work.wait()
        assert (work._source_rank(), x.item()) == (1, 7.0)
    elif world.me == 1:
        group.send([torch.full((1,), 7.0)], 0, 5).wait()


def test_exceptions_keep_their_type_through_cpp(world, group, monkeypatch):
    monkeypatch.setattr(type(group), "is_observed", lambda self: True)
    with pytest.raises(ArgumentError, match="not in the group"):
        group.broadcast([torch.ones(1)], _rooted(world.size))
    total()


def _rooted(rank):
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def test_fake_tensors_send_no_data(world, group):
    """Outputs have the right shapes."""
    begun = group.core.begun
    with FakeTensorMode():
        x, out = torch.ones(3), torch.empty(3 * world.size)
        dist.all_reduce(x)
        dist.all_gather_single(out, x)
        dist.broadcast(x, 0, async_op=True).wait()
        dist.barrier()
        assert x.shape == (3,) and out.shape == (3 * world.size,)
    assert group.core.begun == begun
    total()


def test_comm_debug_mode_counts_calls(world, group):
    with CommDebugMode() as mode:
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.all_gather_single(torch.empty(2 * world.size), x)
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    assert counts == {"c10d.allreduce_": 2, "c10d.broadcast_": 1, "c10d._allgather_base_": 1}


def test_pre_and_post_hooks(world, group):
    before, after = [], []
    group.register_pre_hook(7, lambda args: before.append((args.name, args.op_id)))
    group.register_post_hook(7, lambda args: after.append((args.name, args.op_id)))
    total()
    dist.barrier()
    group.unregister_pre_hook(7)
    group.unregister_post_hook(7)
    total()
    assert [name for name, _ in before] == [C.HookOpName.ALLREDUCE, C.HookOpName.BARRIER]
    assert before == after


def test_hooks_may_make_calls(world, group):
    """On another group with any backend, also the same operation."""
    outer, watched = dist.new_group(), dist.new_group()
    mixed = dist.new_group(backend="cpu:mpicoll,cuda:gloo")
    watched.register_pre_hook(1, lambda args: None)
    inner = []
    for other in mixed, watched, None:
        big, small = torch.ones(1 << 18), torch.ones(2)

        def hook(args, small=small, other=other):
            inner.append(dist.all_reduce(small, group=other, async_op=True))

        outer.register_pre_hook(1, hook)
        outer.register_post_hook(1, hook)
        work = dist.all_reduce(big, group=outer, async_op=True)
        outer.unregister_pre_hook(1)
        outer.unregister_post_hook(1)
        work.wait()
        assert work.is_completed() and work.result()[0] is big
        assert (big == world.size).all()
        for each in inner:
            each.wait()
        assert (small == world.size**2).all()


def test_nan_check_variable_is_supported(world, monkeypatch):
    """torch attaches its check to every group if the variable is set."""
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    checked = dist.new_group(list(range(world.size)))
    monkeypatch.delenv("TORCH_DIST_NAN_CHECK")
    total(checked)
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]), group=checked)
    total(checked)


def test_attached_nan_check_finds_nan(world):
    checked, n = dist.new_group(), world.size
    hook = C.NanCheckHook.attach(checked)
    bad, root = torch.tensor([float("nan")]), dist.GatherOptions()
    for call in (
        lambda: checked.allreduce([bad]),
        lambda: checked.allgather([[torch.ones(1)] * n], [bad]),
        lambda: checked.gather_single(torch.ones(n), bad, root),
        lambda: dist.gather_single(bad, torch.ones(n) if world.me == 0 else None, group=checked),
        lambda: checked.send([bad], world.me ^ 1, 1),
    ):
        with pytest.raises(RuntimeError, match="NaN"):
            call()
    total(checked)
    output = torch.zeros(n)
    checked.gather_single(output, torch.ones(1), root).wait()
    assert output.tolist() == [float(world.me == 0)] * n
    hook.remove()
    assert not checked.is_observed()
    dist.all_reduce(bad, group=checked)
    total(checked)


def test_attached_flight_recorder_records_calls(world):
    recorded = dist.new_group()
    C._reset_fr_trace(backend="mpicoll")
    hook = C.FlightRecorderHook.attach(recorded, list(range(world.size)))
    dist.all_reduce(torch.ones(3, 2), group=recorded)
    recorded.gather_single(torch.zeros(2 * world.size), torch.ones(2), dist.GatherOptions()).wait()
    # torch's hooks do not cover it, with Gloo neither.
    recorded.monitored_barrier(timedelta(seconds=20))
    hook.remove()
    total(recorded)
    entries = json.loads(C._dump_fr_trace_json(backend="mpicoll"))["entries"]
    assert [(each["profiling_name"], each["input_sizes"]) for each in entries] == [
        ("mpicoll:all_reduce", [[3, 2]]),
        ("mpicoll:gather", [[2]]),
    ]


def test_destroyed_groups_are_collected(world, group):
    for backend in "mpicoll", "cpu:mpicoll,cuda:gloo":
        one = dist.new_group(backend=backend)
        alive = weakref.ref(dist.get_backend_impl(one, torch.device("cpu")))
        x = torch.ones(1000)
        held = weakref.ref(x)
        dist.all_reduce(x, group=one)
        dist.destroy_process_group(one)
        del x, one
        gc.collect()
        assert alive() is None and held() is None


def test_torch_flight_recorder_records_calls(world, group, monkeypatch):
    """For groups that are created while TORCH_FR_BUFFER_SIZE is set."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    recorded = dist.new_group(list(range(world.size)))
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    plain = dist.new_group(list(range(world.size)))
    assert recorded.is_observed() and not plain.is_observed() and not group.is_observed()
    C._reset_fr_trace(backend="mpicoll")
    for each in plain, recorded, group:
        dist.all_reduce(torch.ones(3, 2), group=each)
        dist.broadcast(torch.ones(5), 1, group=each)
    entries = json.loads(C._dump_fr_trace_json(backend="mpicoll"))["entries"]
    assert [each["profiling_name"] for each in entries] == [
        "mpicoll:all_reduce",
        "mpicoll:broadcast",
    ]
    assert [each["input_sizes"] for each in entries] == [[[3, 2]], [[5]]]
    first, second = [each["collective_seq_id"] for each in entries]
    assert second == first + 1


def test_dispatcher_is_bypassed_without_observers(world, group):
    assert not group.is_observed()
    with CommDebugMode():
        assert group.is_observed()
    assert not group.is_observed()


def test_functional_collectives_with_out_argument(world, group):
    """These are C++ functions that call the backend."""
    ops, name, n = torch.ops._c10d_functional, group.group_name, world.size
    x, out = torch.full((2,), world.me + 1.0), torch.zeros(2 * n)
    ops.wait_tensor(ops.all_gather_into_tensor_out(x, n, name, out=out))
    assert out.tolist() == [rank + 1.0 for rank in range(n) for _ in range(2)]


def test_split_group(world, group):
    halves = [list(range(world.size // 2))[::-1], list(range(world.size // 2, world.size))]
    half = dist.split_group(None, halves, group_desc="half")
    mine = next(ranks for ranks in halves if world.me in ranks)
    assert dist.get_process_group_ranks(half) == mine
    assert dist.get_rank(half) == mine.index(world.me)
    total(half)
    again = dist.split_group(half, [[0]])
    if dist.get_rank(half) == 0:
        total(again)
        dist.destroy_process_group(again)
    else:
        assert again == dist.GroupMember.NON_GROUP_MEMBER
    dist.destroy_process_group(half)
    total()


def test_group_with_one_backend_per_device(world):
    """It is torch's ProcessGroup, with mpicoll for the CPU."""
    mixed = dist.new_group(backend="cpu:mpicoll,cuda:gloo")
    assert type(mixed) is dist.ProcessGroup
    total(mixed)
    dist.monitored_barrier(mixed, timedelta(seconds=20))
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    work = dist.all_reduce(torch.ones(2), group=mixed, async_op=True)
    work.wait()
    assert work.get_future().done()
    half = dist.split_group(mixed, [[0], list(range(1, world.size))])
    total(half)
    dist.destroy_process_group(half)
    other = dist.new_group(backend="cpu:gloo,cuda:mpicoll")
    total(other)
    assert dist.get_backend_impl(other, torch.device("cuda")).name() == "mpicoll"
    dist.destroy_process_group(other)
    dist.destroy_process_group(mixed)
    total()


def test_abort_hooks(world):
    called = []
    gone = dist.new_group(list(range(world.size)))
    for number in (1, 2):
        gone.register_abort_hook(number, lambda number=number: called.append(number))
    gone.unregister_abort_hook(1)
    total(gone)
    gone.abort()
    assert called == [2]
    total(team("after", range(world.size)).group)
