"""Route ``hierarchical`` with several ranks on each of several GPUs.

Every rank runs every test on its own GPU. tests/mpi/test_device_hierarchical.py tests the route on
simulated devices and nodes.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="run it with make test-gpu")
from device_arrays import forced

import mpicoll as dist
from mpicoll.cuda import binding
from mpicoll.errors import UnsupportedError
from mpicoll.routes.device.hierarchical import MIN_BYTES

pytestmark = pytest.mark.on_a_gpu

#: The smallest call, a call with a remainder, and a call of several chunks of 64 MiB.
COUNTS = [MIN_BYTES // 4, 1_000_003, 40_000_000]


@pytest.fixture(scope="module")
def n():
    """The number of ranks of a default group with the forced route."""
    missing = ""
    with forced("hierarchical"):
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
