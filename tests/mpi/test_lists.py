"""Lists of arrays that are packed in chunks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import needs_2_ranks
from conftest import team as group_of
from driver import Call, legal_operations, use_route

import mpicoll as dist
from mpicoll.arrays.adapters import build_view
from mpicoll.arrays.views import find_conflict
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes.host import lists

LISTS = [row for row in PRIMITIVES if row.listed and row.even]


#: Extent of each packed chunk.
extents = []


@pytest.fixture(scope="module")
def small(world):
    """A group with small pack buffers and the MPI route, which needs contiguous memory."""
    build = lists.packed

    def watched(kind, route, takes):
        def run(send, recv, extent, root):
            extents.append(extent)
            route(send, recv, extent, root)

        return build(kind, run, takes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "LISTED", 160 * world.size)
        patch.setattr(lists, "packed", watched)
        use_route(patch, "mpi")
        yield group_of("small pieces", range(world.size))


@pytest.mark.parametrize("dtype", [by_name["float32"], by_name["bfloat16"]], ids=repr)
@pytest.mark.parametrize("row", LISTS, ids=repr)
def test_lists_are_packed_in_chunks(small, row, dtype):
    """Sizes around multiples of a chunk. No rank packs more than a chunk at a time."""
    step = 160 // dtype.itemsize
    for count in (0, 1, step - 1, step, step + 1, 5 * step + 3):
        for op in legal_operations(dtype) if row.reduces else [None]:
            extents.clear()
            Call(row.name, small, dtype, count, op, count % small.size).run()
            assert extents == [min(step, count - at) for at in range(0, max(count, 1), step)]


def test_lists_may_contain_noncontiguous_arrays(small):
    """Transposed outputs are written after the call."""
    n, me = small.size, small.me
    mine = np.arange(600.0).reshape(20, 30) + 1000 * me
    got = [np.zeros((30, 20)).T if rank % 2 else np.zeros((20, 30)) for rank in range(n)]
    dist.all_gather(got, mine, group=small.group)
    for rank, one in enumerate(got):
        np.testing.assert_array_equal(one, np.arange(600.0).reshape(20, 30) + 1000 * rank)
    turned = np.asfortranarray(mine)
    out = np.zeros((30, 20)).T
    dist.reduce_scatter(out, [turned * (r + 1) for r in range(n)], group=small.group)
    everybody = sum(np.arange(600.0).reshape(20, 30) + 1000 * rank for rank in range(n))
    np.testing.assert_array_equal(out, everybody * (me + 1))


@pytest.mark.parametrize("shift", [0, 7, -7])
def test_reduce_scatter_output_may_overlap_the_inputs(small, shift):
    """An input is sent before the output is written over it."""
    n, me = small.size, small.me
    memory = np.arange(3000.0) + 10000 * me
    values = [np.arange(500.0) + 500 + 7 * r + 10000 * np.arange(n)[:, None] for r in range(n)]
    inputs = [memory[500 + 7 * r : 1000 + 7 * r] for r in range(n)]
    output = memory[500 + 7 * me + shift :][:500]
    dist.reduce_scatter(output, inputs, ReduceOp.SUM, small.group)
    np.testing.assert_array_equal(output, values[me].sum(0))
    memory = np.arange(2000.0) + 10000 * me
    outputs = [np.zeros(500) for _ in range(n)]
    outputs[me] = memory[500:1000]
    dist.all_gather(outputs, memory[500 + shift : 1000 + shift], small.group)
    for rank, one in enumerate(outputs):
        np.testing.assert_array_equal(one, np.arange(500.0) + 500 + shift + 10000 * rank)


@needs_2_ranks
@pytest.mark.parametrize("name", ["all_gather", "gather", "all_to_all"])
def test_outputs_that_share_memory_are_rejected(world, name):
    """Also by the native fast path. Interleaved outputs without overlap are accepted."""
    n, me = world.size, world.me

    def run(outputs):
        if name == "all_gather":
            dist.all_gather(outputs, np.full(4, me, np.float32))
        elif name == "gather":
            dist.gather(np.full(4, me, np.float32), outputs if me == 0 else None, dst=0)
        else:
            dist.all_to_all(outputs, [np.full(4, me, np.float32)] * n)

    one = np.zeros(4 * n, np.float32)
    columns = np.zeros((4, n), np.float32)
    apart = {
        "new arrays": [np.zeros(4, np.float32) for _ in range(n)],
        "a slice each": np.split(one, n),
        "backwards": np.split(one, n)[::-1],
        "columns": list(columns.T),
    }
    shared = [one[:4]] * n, [one[i : i + 4] for i in range(n)], [columns[:, 0]] * n
    for _ in range(3):
        for how, outputs in apart.items():
            run(outputs)
            if name != "gather" or me == 0:
                assert all((part == r).all() for r, part in enumerate(outputs)), how
        if name == "gather" and me != 0:
            continue
        for outputs in shared:
            with pytest.raises(
                dist.ArgumentError, match=rf"^{name}: \S+: outputs \[0\] and \[1\] share memory"
            ):
                run(outputs)


def test_overlap_check_agrees_with_numpy():
    """Random blocks of one table: rows, columns (which have a separate code path) and both."""
    random = np.random.default_rng(3)
    found = set()
    for _ in range(300):
        table = np.zeros((4, 12), np.float32)
        blocks = []
        for _ in range(random.integers(2, 5)):
            first, last = sorted(random.integers(0, 13, 2))
            rows = (
                slice(None) if random.random() < 0.7 else slice(*sorted(random.integers(0, 5, 2)))
            )
            blocks.append(table[rows, first:last])
        pairs = {
            (i, j)
            for i, j in itertools.combinations(range(len(blocks)), 2)
            if np.shares_memory(blocks[i], blocks[j])
        }
        views = [build_view(block, True, "block") for block in blocks]
        shared = find_conflict(list(enumerate(views)), ())
        assert (shared in pairs) if pairs else shared is None, [block.shape for block in blocks]
        found.add(shared is None)
    assert found == {True, False}


def test_errors_state_counts_and_suggest_swapped_arguments(world):
    x, out = np.zeros(1), np.zeros(world.size + 2)
    with pytest.raises(dist.ArgumentError, match=r"has 1 element[ ,;]"):
        dist.all_gather_single(x, out)
    if world.size > 1:
        with pytest.raises(dist.ArgumentError, match=r"the output comes first"):
            dist.all_gather_single(x, np.zeros(world.size))
        with pytest.raises(dist.ArgumentError, match=r"the output comes first"):
            dist.reduce_scatter_single(np.zeros(world.size), x)
