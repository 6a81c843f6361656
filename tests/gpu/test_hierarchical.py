"""Route ``hierarchical`` on two nodes: the first two ranks, and the others."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="run it with make test-gpu")
from device_arrays import forced
from mpi4py import MPI

import mpicoll as dist
from mpicoll.cuda import binding, capabilities
from mpicoll.errors import UnsupportedError
from mpicoll.routes.device import hierarchical
from mpicoll.routes.device.hierarchical import MIN_BYTES

pytestmark = pytest.mark.on_a_gpu

#: The smallest call, and a call of several chunks with a remainder.
COUNTS = [MIN_BYTES // 4, 1_000_003]


@pytest.fixture(scope="module")
def n():
    """The number of ranks of a default group with the forced route."""
    missing = ""
    with forced("hierarchical"), pytest.MonkeyPatch.context() as patch:
        node = "0" if MPI.COMM_WORLD.rank < 2 else "1"
        patch.setattr(capabilities, "node", lambda: node)
        patch.setattr(hierarchical, "CHUNK", 1 << 20)
        dist.init_process_group(timeout=60)
        binding.bind()
        try:
            dist.all_reduce(cupy.ones(MIN_BYTES, cupy.float32))
        except UnsupportedError as error:
            missing = str(error)
        else:
            yield dist.get_world_size()
        dist.destroy_process_group()
    if missing:
        pytest.skip(missing)


def ramp(count, rank):
    return cupy.arange(count, dtype=cupy.float32) % 1009 + rank


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_results(n, count, async_op):
    me = dist.get_rank()

    def call(function, *arguments, **options):
        work = function(*arguments, async_op=async_op, **options)
        if async_op:
            work.wait()

    array = ramp(count, me)
    call(dist.all_reduce, array)
    assert (array == n * ramp(count, 0) + sum(range(n))).all()
    array = ramp(count, me)
    call(dist.broadcast, array, src=n - 1)
    assert (array == ramp(count, n - 1)).all()
    array = ramp(count, me)
    call(dist.reduce, array, dst=1)
    if me == 1:
        assert (array == n * ramp(count, 0) + sum(range(n))).all()
    if n % 2:  # some ranks are on no rail
        return
    output, given = cupy.empty((n, count), cupy.float32), ramp(count, me)
    call(dist.all_gather_single, output, given)
    assert all((output[rank] == ramp(count, rank)).all() for rank in range(n))
    given = cupy.concatenate([ramp(count, me + block) for block in range(n)])
    output = cupy.empty(count, cupy.float32)
    call(dist.reduce_scatter_single, output, given)
    assert (output == n * ramp(count, me) + sum(range(n))).all()
