"""Route ``shared_gpu`` on a GPU: mapped memory that is freed or allocated again.

Every rank runs every test on GPU 0.
"""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="run it with make test-gpu")
from device_arrays import forced

import mpicoll as dist
from mpicoll.cuda.runtime import get_runtime

pytestmark = pytest.mark.on_a_gpu

LARGE = 5_000_000


@pytest.fixture(scope="module")
def n():
    """The number of ranks (two or more) of a default group with the forced route."""
    with forced("shared_gpu"):
        dist.init_process_group(timeout=60)
        ranks = dist.get_world_size()
        if ranks > 1:
            yield ranks
        dist.destroy_process_group()
    if ranks == 1:
        pytest.skip("needs two ranks")


def check_all_reduce(n, array):
    array[...] = dist.get_rank()
    dist.all_reduce(array)
    array += 1
    assert (array.get() == sum(range(n)) + 1).all()


def allocated(nbytes):
    """Allocate with cudaMalloc, without a pool."""
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)


def test_buffer_ids(n):
    """Allocations have different buffer IDs. An address inside gives base and size."""
    runtime, seen = get_runtime(), set()
    for _ in range(20):
        memory = allocated(8 << 20)
        found = runtime.find_allocation(memory.ptr + 4096)
        assert found.base == memory.ptr and found.nbytes == 8 << 20
        assert found.buffer not in seen
        seen.add(found.buffer)
        del memory
    managed = cupy.cuda.malloc_managed(1 << 20)
    assert runtime.find_allocation(managed.ptr) is None


@pytest.mark.parametrize("count", [100, LARGE])
def test_memory_freed_and_allocated_again(n, count):
    """The driver often returns the same address, also for another size."""
    for turn in range(30):
        size = count + 1000 * (turn % 3)
        array = cupy.ndarray((size,), cupy.float32, allocated(4 * size))
        check_all_reduce(n, array)
        del array


def test_small_allocations_of_one_block(n):
    """The driver puts them into one block. A handle maps the whole block."""
    count = 20_000
    arrays = [cupy.ndarray((count,), cupy.float32, allocated(4 * count)) for _ in range(8)]
    for array in arrays * 2:
        check_all_reduce(n, array)


def test_more_memory_than_the_limit_of_open_allocations(n):
    for _ in range(2):
        kept = [cupy.ndarray((LARGE // 8,), cupy.float32, allocated(LARGE)) for _ in range(100)]
        for array in kept:
            check_all_reduce(n, array)
        del kept, array


def test_memory_pool_can_be_emptied_while_rank_0_maps_it(n):
    pool = cupy.get_default_memory_pool()
    for turn in range(10):
        check_all_reduce(n, cupy.empty(LARGE + turn, cupy.float32))
        pool.free_all_blocks()
