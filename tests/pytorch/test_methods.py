"""Methods of a process group, under the names used by torch 2.11 to 2.15.

torch.distributed, FSDP2, DTensor, the reducer of DDP and third-party libraries call them with an
Options object. These tests cover names, argument forms and return values; ``test_collectives.py``
covers results.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from inputs import combined, equal, normal
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


@pytest.fixture
def group(world):
    return dist.distributed_c10d._get_default_group()


def options(kind, async_op, **values):
    made = kind()
    made.asyncOp = async_op
    for name, value in values.items():
        setattr(made, name, value)
    return made


def method(group, *names):
    """Return the method under each of its names that this torch version has."""
    found = [getattr(group, name) for name in names if hasattr(group, name)]
    assert found
    return found


def finish(work):
    """Wait for a Work, which every method returns."""
    assert isinstance(work, dist.Work)
    work.wait()
    # Not work.is_completed(). Under the older names torch returns a Work that only has a future.
    assert work.get_future().done()


def parts_of(world, *shape, key=0):
    return [normal(rank, *shape, key=key) for rank in range(world.size)]


def test_error_messages_equal_those_of_gloo(world, group):
    """PyTorch's tests of Gloo match these messages. All errors are raised before data is sent."""
    n, me = world.size, world.me
    one, other, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], size=(4,), check_invariants=True)

    def at(kind, root, tensor=0):
        made = options(kind, True, rootRank=root)
        if tensor:
            made.rootTensor = tensor
        return made

    product = options(AllreduceOptions, True, reduceOp=ReduceOp.PRODUCT)
    refused = [
        ("invalid root rank: -1", lambda: group.broadcast([one], at(BroadcastOptions, -1))),
        (f"invalid root rank: {n}", lambda: group.reduce([one], at(ReduceOptions, n))),
        ("invalid root tensor: -1", lambda: group.broadcast([one], at(BroadcastOptions, 0, -1))),
        ("invalid root tensor: 1", lambda: group.broadcast([one], at(BroadcastOptions, 0, 1))),
        ("invalid root tensor: 1", lambda: group.reduce([one], at(ReduceOptions, 0, 1))),
        ("requires a single-element", lambda: group.reduce([one, one], at(ReduceOptions, 0))),
        ("tensors must all have the same type", lambda: group.allreduce_coalesced([one, other])),
        ("unsupported reduction operation", lambda: group.allreduce([sparse], product)),
    ]
    for words, wrong, root in (
        ("invalid tensor type", other, me), ("invalid tensor size", two, me),
        ("requires empty {} on non-root", one, (me + 1) % n),
    ):  # fmt: skip
        to, of = at(GatherOptions, root), at(ScatterOptions, root)
        refused += [
            (words.format("input"), partial(group.scatter, [one], [[wrong] * n], of)),
            (words.format("output"), partial(group.gather, [[wrong] * n], [one], to)),
        ]
    for words, call in refused:
        with pytest.raises(RuntimeError, match=words):
            call()
    for call in (
        lambda: group.allreduce_coalesced([]),
        lambda: group.allgather_coalesced([[]] * n, []),
        lambda: group.reduce_scatter_tensor_coalesced([], []),
        lambda: group.allgather_into_tensor_coalesced([], []),
    ):
        with pytest.raises(RuntimeError, match="|".join(EMPTY)):
            call()


#: Messages for an empty list; with Gloo torch's dispatcher raises the error.
EMPTY = "requires non-empty tensor list", "expected at least one array", "no tensor arguments"


def calls(world, group, async_op):
    """Yield the Work, the output and its expected value of each call."""
    n, me = world.size, world.me
    parts = parts_of(world, 2 * n, 3)
    mine, total = parts[me], sum(parts)
    gathered, own = options(AllgatherOptions, async_op), total.chunk(n)[me]
    for arguments, name in ((ReduceOp.MAX,), "MAX"), ((), "SUM"):
        x = mine.clone()
        yield group.allreduce(x, *arguments), x, combined(name, parts)
    x = mine.clone()
    yield group.broadcast(x, 1), x, parts[1]
    outputs = [torch.zeros_like(mine) for _ in parts]
    yield group.allgather(outputs, mine), outputs, parts
    for call in method(group, "_allgather_base", "all_gather_single"):
        output = torch.zeros(2 * n * n, 3)
        yield call(output, mine, gathered), output, torch.cat(parts)
        # As FSDP2 calls it: the input is this rank's block of the output.
        output = torch.zeros(2 * n * n, 3)
        block = output.chunk(n)[me].copy_(mine)
        yield call(output, block, gathered), output, torch.cat(parts)
    names = "allgather_into_tensor_coalesced", "all_gather_single_coalesced"
    for call in method(group, *names):
        outputs = [torch.zeros(2 * n * n, 3), torch.zeros(n)]
        inputs = [mine, torch.full((1,), float(me))]
        wanted = [torch.cat(parts), torch.arange(float(n))]
        yield call(outputs, inputs, gathered), outputs, wanted
    for call in method(group, "_reduce_scatter_base", "reduce_scatter_single"):
        for op, wanted in (ReduceOp.SUM, own), (ReduceOp.AVG, own / n):
            output = torch.zeros(2, 3)
            opts = options(ReduceScatterOptions, async_op, reduceOp=op)
            yield call(output, mine, opts), output, wanted
    names = "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"
    for call in method(group, *names):
        outputs, opts = [torch.zeros(2, 3), torch.zeros(1)], options(ReduceScatterOptions, async_op)
        yield call(outputs, [mine, torch.ones(n)], opts), outputs, [own, torch.full((1,), float(n))]
    opts = options(AllToAllOptions, async_op)
    wanted = torch.cat([part.chunk(n)[me] for part in parts])
    outputs = [torch.zeros(2, 3) for _ in parts]
    yield group.alltoall(outputs, list(mine.chunk(n)), opts), outputs, list(wanted.chunk(n))
    for call in method(group, "alltoall_base", "all_to_all_single"):
        output = torch.zeros(2 * n, 3)
        yield call(output, mine, [], [], opts), output, wanted
        # Rank r sends its first d + 1 rows to rank d.
        rows = parts_of(world, n * (n + 1) // 2, 2)
        sent, received = [d + 1 for d in range(n)], [me + 1] * n
        output = torch.zeros(n * (me + 1), 2)
        work = call(output, rows[me], received, sent, opts)
        yield work, output, torch.cat([one.split(sent)[me] for one in rows])


@ASYNC
def test_separate_arguments_and_older_names(world, group, async_op):
    for work, found, wanted in calls(world, group, async_op):
        finish(work)
        torch.testing.assert_close(found, wanted)


@ASYNC
def test_gather_single(world, group, async_op):
    """torch.distributed has it from 2.15 on. Ranks other than the root have no output."""
    for root in range(world.size):
        parts = parts_of(world, 3, 2, key=root)
        at_root = world.me == root
        for shape in (3 * world.size, 2), (6 * world.size,), (world.size, 3, 2):
            output = torch.zeros(shape if at_root else 0)
            mine = parts[world.me].t().contiguous().t()  # not contiguous
            finish(
                group.gather_single(output, mine, options(GatherOptions, async_op, rootRank=root))
            )
            equal(output.flatten(), torch.cat(parts).flatten() if at_root else torch.zeros(0))
    short = options(GatherOptions, async_op, rootRank=world.me)
    for wrong in torch.zeros(5), torch.zeros(6, world.size).t():
        with pytest.raises(ValueError, match="gather_single: gather_tensor: expected a contiguous"):
            group.gather_single(wrong, torch.zeros(6), short)
    if hasattr(dist, "gather_single"):
        output = torch.zeros(world.size) if world.me == 0 else None
        dist.gather_single(torch.full((1,), float(world.me)), output)
        if world.me == 0:
            equal(output, torch.arange(world.size).float())


def test_group_properties(world, group):
    assert dist.is_initialized()
    assert group.rank() == dist.get_rank() == world.me
    assert group.size() == dist.get_world_size() == world.size
    assert dist.get_backend() == dist.get_backend(group) == group.name() == "mpicoll"
    assert "mpicoll" in dist.get_backend_config(group)
    assert dist.get_process_group_ranks(group) == list(range(world.size))
    assert isinstance(group.group_name, str)
    assert dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert dist.is_backend_available("mpicoll")
    other = dist.new_group(group_desc="a description")
    assert other.group_desc == "a description"
    assert other.group_name != group.group_name
    dist.destroy_process_group(other)


def test_sequence_numbers_count_collectives(world, group, mpi):
    """Equally on all ranks, for every call path."""
    x = torch.ones(2)
    for each in (group, dist.new_group(list(range(world.size)))):
        each._set_sequence_number_for_group()
        numbers = [each._get_sequence_number_for_group()]
        for call in (
            lambda each: dist.all_reduce(x, group=each),
            lambda each: dist.broadcast(x, 0, each, async_op=True).wait(),
            lambda each: dist.barrier(each),
            lambda each: dist.all_reduce(x, group=each, async_op=True).wait(),
        ):
            call(each)
            numbers.append(each._get_sequence_number_for_group())
        assert numbers == sorted(set(numbers))
        assert all(numbers == theirs for theirs in mpi.allgather(numbers))


def test_messages_do_not_change_sequence_numbers(world, group, mpi):
    if world.me == 0:
        dist.send(torch.ones(1), 1)
    elif world.me == 1:
        dist.recv(torch.ones(1), 0)
    dist.all_reduce(torch.ones(1))
    assert len(set(mpi.allgather(group._get_sequence_number_for_group()))) == 1
