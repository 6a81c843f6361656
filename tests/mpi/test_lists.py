"""Lists of arrays that are packed piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import team as group_of
from driver import Call, legal_operations

import mpicoll as dist
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes import tuning
from mpicoll.routes.host import lists

LISTS = [row for row in PRIMITIVES if row.listed and row.even]


#: The extents of what was packed at a time.
extents = []


@pytest.fixture(scope="module")
def small(world):
    """A group that packs a few elements at a time, for MPI, which takes no lists."""
    rows = {kind: {"node": ((0, "mpi"),)} for kind in tuning.KINDS}
    build = lists.packed

    def watched(kind, route, takes):
        def run(send, recv, extent, root):
            extents.append(extent)
            route(send, recv, extent, root)

        return build(kind, run, takes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "LISTED", 160 * world.size)
        patch.setattr(lists, "packed", watched)
        patch.setattr(tuning.job, "table", tuning.Table(openmpi=False, measured={1: rows}))
        yield group_of("small pieces", range(world.size))


@pytest.mark.parametrize("dtype", [by_name["float32"], by_name["bfloat16"]], ids=repr)
@pytest.mark.parametrize("row", LISTS, ids=repr)
def test_pieces(small, row, dtype):
    """Sizes around their borders; on every rank no more is packed at a time."""
    step = 160 // dtype.itemsize
    for count in (0, 1, step - 1, step, step + 1, 5 * step + 3):
        for op in legal_operations(dtype) if row.reduces else [None]:
            extents.clear()
            Call(row.name, small, dtype, count, op, count % small.size).run()
            assert extents == [min(step, count - at) for at in range(0, max(count, 1), step)]


def test_arrays_that_lie_apart(small):
    """Transposed ones in a list are filled at the end."""
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
def test_outputs_among_the_inputs(small, shift):
    """What is received, into an array that is sent, comes after it was sent."""
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
