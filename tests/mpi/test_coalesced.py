"""Coalesced calls: results, which arrays are fused, and failures.

Lists are built from the calls of driver.py, each of which checks its own result. Operations without
a public coalesced function are called through ``execute.run_all``, as the PyTorch backend does.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import check_usable, members, needs_2_ranks, pass_first_calls
from conftest import team as group_of
from driver import (
    COALESCED,
    Call,
    by_dtype,
    check_same_bits,
    guarded,
    legal_operations,
    together,
    use_route,
    wait_for_all,
)
from test_arrays import column, maker, transposed
from test_shared import sharing_team

import mpicoll as dist
from mpicoll.dispatch import execute, fusing
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import MismatchError
from mpicoll.failures import consistency
from mpicoll.kernels import calls as short
from mpicoll.primitives import by_name as primitives
from mpicoll.routes import tuning

pytestmark = pytest.mark.on_3

DEADLINE = 60
#: Block shapes. With 16-byte elements some blocks are too large to fuse and the rest need several
#: fused calls; with 1-byte elements all blocks are small.
SHAPES = [(3,), (0,), (1000,), (1,), (30, 7), (2, 0, 3), (), (5000,)]
SHAPES += [(900 + i,) for i in range(40)]


def by_buffer(shape, dtype):
    """A memoryview of the dtype, or the array itself if buffers have no format for the dtype."""
    array = np.zeros(shape, dtype.numpy)
    return (memoryview(array) if dtype.buffers else array), array


def by_torch(shape, dtype):
    torch = pytest.importorskip("torch")
    array = np.zeros(shape, dtype.numpy)
    try:
        return torch.from_numpy(array), array
    except TypeError:
        return array, array


MAKERS = [guarded, maker(column), maker(transposed), by_buffer, by_torch, guarded]


def entries(name, team, dtype, op, shapes=SHAPES, makers=MAKERS):
    """One call per shape. Ranks use different kinds of arrays at the same index."""
    found = []
    for i, shape in enumerate(shapes):
        make = makers[(i + team.me) % len(makers)]
        count = int(np.prod(shape))
        found.append(Call(name, team, dtype, count, op, make=make, shape=shape, stacked=i % 2 == 0))
    return found


@by_dtype
@pytest.mark.parametrize("name", COALESCED)
def test_coalesced_results_equal_single_calls(teams, mpi, name, dtype):
    """Every dtype, operation and kind of array, with calls pending on all groups at once."""
    for i, op in enumerate(legal_operations(dtype) if primitives[name].reduces else [None]):
        pending = []
        for team in members(teams):
            calls = entries(name, team, dtype, op, SHAPES if team is teams[0] else SHAPES[:9])
            async_op = (i + dtype.code + len(team.name)) % 2 == 0
            work = together(name, calls, async_op)
            assert (work is not None) == async_op
            pending.append((work, calls))
        wait_for_all(mpi)
        for work, calls in pending:
            if work is not None:
                work.wait(DEADLINE)
            for call in calls:
                call.check()
        if name == "all_reduce":
            check_same_bits(
                mpi, [call for _, calls in pending for call in calls if call.count < 10**4]
            )


def test_uneven_blocks_are_not_fused(world):
    """Calls with uneven blocks run separately, between fused calls."""
    n, me = world.size, world.me
    widths = [[3] * n, list(range(1, n + 1)), [2] * n, [5] + [0] * (n - 1)]
    inputs = [np.arange(row[me]) + 10 * me for row in widths]
    outputs = [[np.zeros(row[rank], int) for row in widths] for rank in range(n)]
    dist.all_gather_coalesced(outputs, inputs)
    for rank in range(n):
        for row, one in zip(widths, outputs[rank], strict=True):
            assert (one == np.arange(row[rank]) + 10 * rank).all()


def test_coalesced_calls_keep_their_order(world):
    """They run after pending calls and before later ones, in synchronous and asynchronous mode."""
    n = world.size
    first = np.ones(60000)
    arrays = [first[:3], np.ones(4), first[10:]]
    for async_op in (False, True):
        first[...] = arrays[1][...] = 1
        dist.all_reduce(first, async_op=True)
        mine = async_op if world.me else not async_op
        dist.all_reduce_coalesced(arrays, async_op=mine)
        dist.all_reduce(first, ReduceOp.MAX)
        assert (first[:3] == n * n).all() and (first[3:10] == n).all()
        assert (first[10:] == n * n).all() and (arrays[1] == n).all()


def test_pending_coalesced_call_owns_its_arrays(world):
    """The caller drops its references at once, while an earlier call is still running."""
    n = world.size
    slow = dist.all_reduce(np.ones(2**20), async_op=True)
    future = dist.all_reduce_coalesced([np.full(700, 1.0 + i) for i in range(50)], async_op=True)
    rubbish = [np.full(700, 77.0) for _ in range(50)]
    slow.wait()
    for i, one in enumerate(future.wait(DEADLINE)):
        assert (one == n * (i + 1.0)).all()
    assert all((one == 77).all() for one in rubbish)


@pytest.fixture(scope="module")
def apart(world):
    """A group without shared memory, where MPI needs one contiguous buffer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOLL_SHARED_MEMORY", "0")
        made = group_of("lists apart", range(world.size))
        # the first call selects the route
        dist.all_reduce_coalesced([np.ones(70000)], group=made.group)
    yield made
    dist.destroy_process_group(made.group)


@pytest.mark.parametrize("async_op", [False, True])
def test_small_arrays_are_packed_and_large_arrays_are_not(apart, async_op):
    n, limit = apart.size, fusing.SMALL // 4
    counts = [1, limit, limit + 1, 100, 70000, 0, *[1024] * 200]
    arrays = [np.ones(count, np.float32) for count in counts]
    before = apart.group.sequence
    future = dist.all_reduce_coalesced(arrays, group=apart.group, async_op=async_op)
    if async_op:
        future.wait(DEADLINE)
    # The call record of the list, two large arrays, and two packed calls of at most 512 KiB
    assert apart.group.sequence == before + 5
    assert all((one == n).all() for one in arrays)
    before = apart.group.sequence
    limit //= n  # the larger of input and output counts
    inputs = [np.full(count, apart.me, np.float32) for count in (1, limit, limit + 1, 100)]
    outputs = [[np.zeros_like(one) for one in inputs] for _ in range(n)]
    dist.all_gather_coalesced(outputs, inputs, apart.group)
    assert apart.group.sequence == before + 3
    assert all((one == rank).all() for rank in range(n) for one in outputs[rank])


@pytest.fixture
def sharing(world):
    """A new group with shared memory, past its first (compared) calls."""
    with pytest.MonkeyPatch.context() as patch:
        use_route(patch, "shared")
        made = sharing_team("lists in memory", world)
        yield made
    dist.destroy_process_group(made.group)


#: Element counts of lists: some fit one round of shared memory, some need several, some fill one
#: exactly.
LISTS = [
    [3],
    [1, 1, 1],
    [5, 0, 700, 256, 257, 1],
    [1000 + 3 * k for k in range(300)],
    [70000, 2, 150000, 31, 1024],
]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "int8"])
@pytest.mark.parametrize("counts", LISTS, ids=len)
def test_shared_memory_does_not_pack_arrays(sharing, counts, dtype, async_op):
    """Any sizes run as one call, with or without the native fast path."""
    n, me, row = sharing.size, sharing.me, by_name[dtype]
    whole = np.arange(sum(counts)) % 5

    def parts(of):
        ends = np.cumsum(counts)[:-1]
        return [part.copy() for part in np.split(of.astype(row.numpy), ends)]

    arrays = parts(whole + me)
    for _ in range(2):  # the second call uses the native fast path
        for one, fresh in zip(arrays, parts(whole + me), strict=True):
            one[...] = fresh
        before = sharing.group.sequence
        done = dist.all_reduce_coalesced(arrays, group=sharing.group, async_op=async_op)
        if async_op:
            done.wait(DEADLINE)
        assert sharing.group.sequence == before + 2  # the list's call record and one fused call
        expected = parts(n * whole + n * (n - 1) // 2)
        assert all((a == b).all() for a, b in zip(arrays, expected, strict=True))
    inputs, outputs = parts(whole + me), [parts(0 * whole) for _ in range(n)]
    dist.all_gather_coalesced(outputs, inputs, sharing.group)
    for rank in range(n):
        for one, expected in zip(outputs[rank], parts(whole + rank), strict=True):
            assert (one == expected).all()


def test_each_large_array_of_a_list_moves_in_the_fastest_way_for_its_size(world, monkeypatch):
    monkeypatch.setattr(tuning.job, "choose", "")
    team = sharing_team("a list of large arrays", world)
    inputs = [np.full(count, team.me) for count in (100_000, 3, 400_000)]
    outputs = [[np.full_like(one, -1) for one in inputs] for _ in range(team.size)]
    for _ in range(8):
        dist.all_gather_coalesced(outputs, inputs, team.group)
    for rank, row in enumerate(outputs):
        assert all((one == rank).all() for one in row)
    (sizes,) = team.group.resources.find("shared").ways._measured().values()
    assert {*sizes} == {
        (8 * one.size * team.size).bit_length() - 1 for one in inputs if one.size > 3
    }


@pytest.mark.skipif(short._module is None, reason="needs the compiled module")
@pytest.mark.parametrize(
    ("name", "odd"),
    [
        *itertools.product(["all_reduce", "all_gather"], ["none", "a view", "async"]),
        ("all_gather", "a list that overlaps"),
    ],
)
def test_native_and_python_paths_interoperate(sharing, monkeypatch, name, odd):
    """One rank's list needs the Python implementation; the other ranks use the native fast path."""
    n, me, group, make, by_python = sharing.size, sharing.me, sharing.group, fusing.Entries, []
    row = primitives["all_gather_single"]
    arrays = [np.zeros(count) for count in (5, 3000, 70000)]
    outputs = [np.zeros(n * array.size) for array in arrays]

    def counting(name, *others, **more):
        by_python.append(name)
        return make(name, *others, **more)

    def run(async_op=False):
        for array in arrays:
            array[:] = me + 1
        if name == "all_reduce":
            work = dist.all_reduce_coalesced(arrays, group=group, async_op=async_op)
        else:
            work = execute.run_all("gather", row, group, async_op, outputs, arrays, None)
        if async_op:
            work.wait(DEADLINE)

    run()
    run()
    monkeypatch.setattr(fusing, "Entries", counting)
    unusual = me == 0 and odd != "none"
    if unusual and odd == "a view":
        arrays[1] = np.zeros((3000, 2))[:, 0]
    elif unusual and odd == "a list that overlaps":
        arrays[2] = outputs[2][7:70007]  # not this rank's block of the output
    run(unusual and odd == "async")
    assert bool(by_python) == unusual, by_python
    for array, output in zip(arrays, outputs, strict=True):
        if name == "all_reduce":
            assert (array == n * (n + 1) / 2).all()
        else:
            assert (output.reshape(n, -1) == np.arange(1, n + 1)[:, None]).all()


@needs_2_ranks
def test_coalesced_calls_do_not_change_which_calls_are_compared(world, new_team, monkeypatch):
    """One call in a stride is compared, regardless of coalesced calls in between."""
    # shared memory compares coalesced calls differently
    monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    team = new_team("lists and others")
    pass_first_calls(team.group)
    mine = np.full(4, 1.5, np.float32) if world.me == 0 else np.zeros(4, np.int32)
    with pytest.raises(MismatchError, match="broadcast"):
        for _ in range(2 * consistency.STRIDE):
            dist.all_reduce_coalesced([np.ones(4, np.float32)], group=team.group)
            dist.broadcast(mine, group=team.group, group_src=0)


@pytest.mark.parametrize("size", [100, 5000])
def test_coalesced_call_mismatches_a_single_call(new_team, size):
    """With shared memory the mismatch is found immediately, and the group stays usable."""
    team = new_team(f"lists against others, {size}")
    pass_first_calls(team.group)
    array, whole = np.ones(size, np.float32), np.ones(5000, np.float32)
    dist.all_reduce(whole, group=team.group)
    if not team.group.resources.find("shared"):  # MPI would block
        return
    for odd in range(team.size):
        lists = [array] if team.me == odd else [array, array.copy()]
        with pytest.raises(MismatchError, match=f"1 x {size} elements.*2 x {size} elements|"
                           f"2 x {size} elements.*1 x {size} elements"):  # fmt: skip
            dist.all_reduce_coalesced(lists, group=team.group)
        with pytest.raises(MismatchError, match="a list of float32 with 1 x 5000 elements, SUM"):
            if team.me == odd:
                dist.all_reduce_coalesced([whole], group=team.group)
            else:
                dist.all_reduce(whole, group=team.group)
        whole[:] = 1
        dist.all_reduce_coalesced([array, whole], group=team.group)
        assert (whole == team.size).all()


def test_invalid_array_in_a_list_is_rejected(world):
    """No data is sent and no array is modified."""
    frozen = np.ones(3)
    frozen.flags.writeable = False
    expanded = np.broadcast_to(np.ones(1), (3,))
    for wrong, message in (
        (frozen, r"all_reduce_coalesced: \[40\]: .*read-only"),
        (expanded, "read-only"),
        ([1.0, 2.0], "expected an array"),
        (np.ones(3, ">f8"), "byte order"),
        (
            np.ones(3, np.float32),
            r"different dtypes in one list: \[0\] is float64, \[40\] is float32",
        ),
    ):
        arrays = [np.ones(3) for _ in range(80)]
        before = dist.group.WORLD.sequence
        with pytest.raises(dist.DistError, match=message):
            dist.all_reduce_coalesced([*arrays[:40], wrong, *arrays[40:]])
        assert dist.group.WORLD.sequence == before
        assert all((one == 1).all() for one in arrays)
    with pytest.raises(ValueError, match="AVG is not supported"):
        dist.all_reduce_coalesced([np.ones(2, int), np.ones(2, int)], ReduceOp.AVG)
    n = world.size
    with pytest.raises(ValueError, match=f"expected {n} x 3"):
        outputs, inputs = [np.ones(n * 3), np.ones(n * 3 + 1)], [np.ones(3)] * 2
        row = primitives["all_gather_single"]
        execute.run_all("gather", row, None, False, outputs, inputs, None)
    check_usable()


@needs_2_ranks
@pytest.mark.parametrize("async_op", [False, True])
def test_lists_that_differ_between_ranks_raise_on_all_ranks(world, new_team, async_op):
    """They differ in a count, the order, the length, the dtype or the operation."""
    group = new_team("lists that differ").group
    last = world.me == world.size - 1

    def reduce(arrays, message, op=ReduceOp.SUM):
        with pytest.raises(dist.MismatchError, match=message):
            dist.all_reduce_coalesced(arrays, op, group, async_op).wait(DEADLINE)

    pass_first_calls(group)
    for mine, others, message in (
        ([5, 1024, 7], [5, 1025, 7], "1 x 5, 1 x 1024, 1 x 7 elements, SUM"),
        ([5, 7, 7], [7, 5, 7], "1 x 5, 2 x 7 elements"),
        ([9] * 3, [9] * 4, "a list of float64 with 3 x 9 elements"),
        ([9], [9] * 2, "a list of float64 with 1 x 9 elements"),
        ([20000], [2] * 3, "20000"),
    ):
        arrays = [np.ones(count) for count in (mine if last else others)]
        reduce(arrays, message)
        assert all((one == 1).all() for one in arrays)
    arrays = [np.ones(3, np.int32 if last else np.float32) for _ in range(3)]
    reduce(arrays, "int32")
    reduce(arrays, "MAX", ReduceOp.MAX if last else ReduceOp.SUM)
    check_usable(group)


def columns(n):
    """Columns of one table: interleaved memory without overlap."""
    return list(np.ones((4, n), np.float32).T)


LISTS_THAT_SHARE = {
    "one array twice": lambda one: [one[:4], one[8:12], one[:4]],
    "slices that overlap": lambda one: [one[:4], one[8:12], one[3:7]],
    "one lies in another": lambda one: [one, one[12:], one[5:6]],
    "backwards": lambda one: [one[8:12], one[:4], one[6:9]],
    "not contiguous": lambda one: [one[::2], one[1::2], one[2:6:2]],
}


@pytest.mark.parametrize("case", LISTS_THAT_SHARE)
def test_all_reduce_coalesced_rejects_arrays_that_share_memory(world, case):
    one = np.ones(16, np.float32)
    apart = [one[:4], one[4:4], one[4:8], one[8:12]], columns(3), [one[::2], one[1::2]]
    words = r"^all_reduce_coalesced: the arrays at \[\d\] and \[2\] sh"
    for _ in range(3):  # later calls use the native fast path
        for arrays in apart:
            before = [array.copy() for array in arrays]
            dist.all_reduce_coalesced(arrays)
            for array, was in zip(arrays, before, strict=True):
                assert (array == world.size * was).all()
        one[:] = 1
        for async_op in (False, True):
            with pytest.raises(dist.ArgumentError, match=words):
                dist.all_reduce_coalesced(LISTS_THAT_SHARE[case](one), async_op=async_op)
        assert (one == 1).all()


@pytest.mark.parametrize("name", ["all_gather", "all_gather_single", "reduce_scatter_single"])
def test_coalesced_calls_reject_inputs_that_another_call_writes(world, name):
    """An input may be a part of the output of the same call."""
    n = world.size
    scatters = name == "reduce_scatter_single"
    group = dist.group.WORLD

    def run(outputs, inputs):
        outs = [np.split(one, n) for one in outputs] if name == "all_gather" else outputs
        op = ReduceOp.SUM if scatters else None
        execute.run_all(name, primitives[name], group, False, outs, inputs, op)

    def make():
        memory = np.zeros(20 * n, np.float32)
        wide = [memory[4 * n * i : 4 * n * (i + 1)] for i in range(5)]
        return (wide, [w[:4] for w in wide]) if not scatters else ([w[:4] for w in wide], wide)

    for _ in range(3):
        outputs, inputs = make()
        for array in inputs:
            array[:] = world.me + 1
        run(outputs[:2], inputs[:2])  # each input lies within its own output, or the reverse
        for output in outputs[:2]:
            ranks = np.repeat(np.arange(1, n + 1), 4)
            assert (output == (n * (n + 1) / 2 if scatters else ranks)).all()
        for wrong in (
            ([outputs[0], outputs[1]], [inputs[1], inputs[0]]),
            ([outputs[0], outputs[0]], [inputs[2], inputs[3]]),
        ):
            with pytest.raises(dist.ArgumentError, match="share memory"):
                run(*wrong)
        same = [inputs[2], inputs[2]]  # reading an array twice is allowed
        run([outputs[3], outputs[4]], same)
    check_usable()
