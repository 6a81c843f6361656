"""Groups and Works return the same values as Gloo's."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import not_gloo
from inputs import equal
from torch.distributed.distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

from mpicoll.torch.backend import HAS_PYTHON_BACKENDS

C = torch._C._distributed_c10d
CPU = torch.device("cpu")
#: OpType of Works for which Gloo sets none.
UNKNOWN = 100


@pytest.fixture(scope="module")
def pair(world):
    """Two groups of all ranks: mpicoll and Gloo."""
    not_gloo("the reference of this test")
    made = [dist.new_group(backend=name, timeout=timedelta(seconds=77)) for name in ("", "gloo")]
    yield made
    for group in made:
        dist.destroy_process_group(group)


def tensors(count, size=4):
    return [torch.ones(size) for _ in range(count)]


def sparse():
    return torch.sparse_coo_tensor([[0]], [1.0], size=(4,), check_invariants=True)


def method(group, *names):
    """The first existing method of these names: of torch 2.13 or newer, then older."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


METHODS = {
    "broadcast": lambda g, n: g.broadcast(tensors(1), BroadcastOptions()),
    "allreduce": lambda g, n: g.allreduce(tensors(1)),
    "allreduce of a sparse tensor": lambda g, n: g.allreduce([sparse()]),
    "allreduce_coalesced": lambda g, n: g.allreduce_coalesced(tensors(2)),
    "reduce": lambda g, n: g.reduce(tensors(1), ReduceOptions()),
    "allgather": lambda g, n: g.allgather([tensors(n)], tensors(1)),
    "_allgather_base": lambda g, n: g._allgather_base(torch.ones(4 * n), torch.ones(4)),
    "allgather_coalesced": lambda g, n: g.allgather_coalesced(
        [tensors(2) for _ in range(n)], tensors(2)
    ),
    "all_gather_single_coalesced": lambda g, n: method(
        g, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
    )(tensors(2, 4 * n), tensors(2)),
    "gather": lambda g, n: g.gather(
        [tensors(n)] if g.rank() == 0 else [], tensors(1), GatherOptions()
    ),
    "scatter": lambda g, n: g.scatter(
        tensors(1), [tensors(n)] if g.rank() == 0 else [], ScatterOptions()
    ),
    "reduce_scatter": lambda g, n: g.reduce_scatter(tensors(1), [tensors(n)]),
    "_reduce_scatter_base": lambda g, n: g._reduce_scatter_base(torch.ones(4), torch.ones(4 * n)),
    "reduce_scatter_single_coalesced": lambda g, n: method(
        g, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    )(tensors(2), tensors(2, 4 * n)),
    "all_to_all_single": lambda g, n: method(g, "all_to_all_single", "alltoall_base")(
        torch.ones(n), torch.ones(n), [], []
    ),
    "barrier": lambda g, n: g.barrier(),
}
#: Expected OpTypes where Gloo sets none.
NAMELESS = {
    "reduce_scatter": C.OpType.REDUCE_SCATTER,
    "_reduce_scatter_base": C.OpType._REDUCE_SCATTER_BASE,
    "reduce_scatter_single_coalesced": C.OpType.REDUCE_SCATTER_TENSOR_COALESCED,
}


@pytest.mark.parametrize("name", METHODS)
def test_works_have_the_op_type_and_timeout_of_gloo_works(world, pair, name):
    own, gloo = (METHODS[name](group, world.size) for group in pair)
    own.wait(), gloo.wait()
    wanted = gloo._get_op_type()
    assert own._get_op_type() == (int(NAMELESS[name]) if wanted == UNKNOWN else wanted)
    if hasattr(dist.Work, "timeout") and wanted != UNKNOWN:  # from torch 2.15 on
        assert own.timeout == gloo.timeout == timedelta(seconds=77)


def test_synchronous_works_have_the_op_type_of_asynchronous_ones(world, pair):
    for synchronous in dist.AllreduceOptions(), dist.BarrierOptions():
        synchronous.asyncOp = False
        is_barrier = isinstance(synchronous, dist.BarrierOptions)
        works = [
            group.barrier(synchronous) if is_barrier else group.allreduce(tensors(1), synchronous)
            for group in pair
        ]
        assert len({work._get_op_type() for work in works}) == 1


def test_works_of_messages_have_the_op_type_of_gloo(world, pair):
    partner, found = world.me ^ 1, []
    for group in pair:
        received = [torch.zeros(4) for _ in range(2)]
        works = [
            group.recv(received[:1], partner, 1),
            group.send(tensors(1), partner, 1),
            group.recv_anysource(received[1:], 2),
            group.send(tensors(1), partner, 2),
        ]
        for work in works:
            work.wait()
        found.append([work._get_op_type() for work in works])
        equal(torch.stack(received), torch.ones(2, 4))
        dist.barrier()
    own, gloo = found
    assert [a for a, b in zip(own, gloo, strict=True) if b != UNKNOWN] == [
        b for b in gloo if b != UNKNOWN
    ]
    assert own == [int(C.OpType.RECV), int(C.OpType.SEND), int(C.OpType.RECVANYSOURCE), own[1]]


def test_a_batch_has_the_op_type_coalesced(pair):
    own, _ = pair
    own._start_coalescing(CPU)
    own.allreduce(tensors(1))
    work = own._end_coalescing(CPU)
    work.wait()
    assert work._get_op_type() == int(C.OpType.COALESCED)


#: Properties and methods of a group and its backend that take no arguments. Excludes features that
#: only mpicoll supports.
ANSWERS = (
    "rank", "size", "bound_device_id", "group_desc", "use_pg_for_symm_mem_rendezvous", "_has_hooks",
    "supports_tensor_alloc", "supports_completion_hooks", "supports_coalescing",
    "supports_splitting", "_enable_collectives_timing", "_set_sequence_number_for_group",
)  # fmt: skip


def answer(asked, name):
    """The value, or the type of the error; None if the object has no such attribute."""
    try:
        found = getattr(asked, name, None)
        if callable(found):
            found = found(CPU) if name == "supports_tensor_alloc" else found()
    except RuntimeError:
        return RuntimeError
    return found


def has(asked, name):
    try:
        return hasattr(asked, name)
    except RuntimeError:  # torch raises it if a backend does not support the attribute
        return False


@pytest.mark.parametrize("name", ANSWERS)
def test_groups_and_backends_return_the_same_values_as_gloo(pair, name):
    own, gloo = pair
    for ours, theirs in ((own, gloo), (own._get_backend(CPU), gloo._get_backend(CPU))):
        if hasattr(type(theirs), name):
            assert answer(ours, name) == answer(theirs, name), type(ours)


def test_groups_and_backends_have_all_attributes_of_gloos(pair):
    own, gloo = pair
    compared = [(dist.ProcessGroup, own, gloo)]
    if HAS_PYTHON_BACKENDS:  # in older versions the group is its own backend
        compared.append((C.Backend, own._get_backend(CPU), gloo._get_backend(CPU)))
    for base, ours, theirs in compared:
        missing = {name for name in dir(base) if has(theirs, name)} - set(dir(ours))
        assert not missing


@pytest.mark.parametrize("settings", [{}, {"group_name": "joined", "group_desc": "both"}])
def test_merged_groups_have_the_names_and_timeout_of_gloos(pair, settings):
    """Groups of one rank, because Gloo merges several only in the order of the job."""
    found = []
    for group in pair:
        # torch 2.13 does not set the counter in the default description.
        alone = group.split_group([group.rank()], group_name="alone", group_desc="one")
        one = alone.merge_remote_group(dist.HashStore(), 1, timedelta(seconds=40), **settings)
        timeout = one._get_backend(CPU).options._timeout
        found.append((one.size(), one.group_name, one.group_desc, timeout))
    assert found[0] == found[1]


def test_groups_on_several_ranks_merge(world, pair):
    alone = pair[0].split_group([world.me])
    for number in range(2):
        store = dist.PrefixStore(f"merge {number}", pair[0].get_group_store())
        one = alone.merge_remote_group(store, world.size, timedelta(seconds=40))
        ranks = torch.zeros(world.size, dtype=torch.int64)
        dist.all_gather_single(ranks, torch.tensor([one.rank()]), group=one)
        assert ranks.tolist() == list(range(world.size))
        x = torch.tensor([world.me + 1.0])
        dist.all_reduce(x, group=one)
        assert x.item() == world.size * (world.size + 1) / 2
        one.shutdown()


def test_merge_with_missing_members_times_out(world, pair):
    alone = pair[0].split_group([world.me])
    with pytest.raises(RuntimeError, match="1 of 2 processes called"):
        alone.merge_remote_group(dist.HashStore(), 2, timedelta(seconds=0.2))


def test_a_store_is_used_for_one_merge_only(pair):
    alone = pair[0].split_group([pair[0].rank()])
    store = dist.HashStore()
    alone.merge_remote_group(store, 1).shutdown()
    with pytest.raises(ValueError, match="expected the number of calling processes, got 1"):
        alone.merge_remote_group(store, 1)


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="needs torch 2.15")
def test_groups_of_several_backends_merge(world, pair):
    """torch's ProcessGroup calls the merge of its backends."""
    mixed = dist.new_group(backend="cpu:mpicoll,cuda:gloo")
    half = mixed.split_group([mixed.rank()], timeout=timedelta(seconds=33))
    assert half._get_backend(CPU).options._timeout == timedelta(seconds=33)
    store = dist.PrefixStore("mixed", mixed.get_group_store())
    both = half.merge_remote_group(store, world.size, timedelta(seconds=44))
    assert both._get_backend(CPU).options._timeout == timedelta(seconds=44)
    x = torch.ones(1)
    dist.all_reduce(x, group=both)
    assert x.item() == world.size
    dist.destroy_process_group(mixed)


@pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="older torch rejects a CPU device_id")
def test_groups_keep_their_device_id(world):
    device = torch.device("cpu:0")
    bound = dist.new_group(device_id=device)
    assert bound.bound_device_id == device
    assert bound._get_backend(CPU).bound_device_id == device
    x = torch.ones(1)
    dist.all_reduce(x, group=bound)
    dist.barrier(bound)
    assert x.item() == world.size
    dist.destroy_process_group(bound)
