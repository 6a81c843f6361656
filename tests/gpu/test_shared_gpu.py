"""Ranks that share a GPU: the memory of the others that the first rank has mapped, on a GPU.

Every rank runs every test, on GPU 0.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="make test-gpu starts it, and lets it find tests/mpi")
from device_arrays import forced

import mpicoll as dist
from mpicoll.cuda.runtime import get_runtime

pytestmark = pytest.mark.on_a_gpu

LARGE = 5_000_000


@pytest.fixture(scope="module")
def n():
    """The number of ranks, in a default group of two or more."""
    with forced("shared_gpu"):
        dist.init_process_group(timeout=60)
        ranks = dist.get_world_size()
        if ranks > 1:
            yield ranks
        dist.destroy_process_group()
    if ranks == 1:
        pytest.skip("one rank shares its GPU with nobody")


def total(n, array):
    array[...] = dist.get_rank()
    dist.all_reduce(array)
    array += 1
    assert (array.get() == sum(range(n)) + 1).all()


def allocated(nbytes):
    """Memory by cudaMalloc, which goes back to the driver when it is freed."""
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)


def test_buffer_ids(n):
    """No two allocations have the same; parts of one have its base and size."""
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
def test_memory_that_is_freed_and_allocated_again(n, count):
    """At the same address, as the driver likes to give it, and in other sizes."""
    for turn in range(30):
        size = count + 1000 * (turn % 3)
        array = cupy.ndarray((size,), cupy.float32, allocated(4 * size))
        total(n, array)
        del array


def test_small_allocations_of_one_block(n):
    """The driver puts them into one block, which a handle opens as a whole."""
    count = 20_000
    arrays = [cupy.ndarray((count,), cupy.float32, allocated(4 * count)) for _ in range(8)]
    for array in arrays * 2:
        total(n, array)


def test_more_memory_than_stays_open(n):
    for _ in range(2):
        kept = [cupy.ndarray((LARGE // 8,), cupy.float32, allocated(LARGE)) for _ in range(100)]
        for array in kept:
            total(n, array)
        del kept, array


def test_free_blocks_go_back(n):
    """What the first rank has mapped does not stop a program that empties its pool."""
    pool = cupy.get_default_memory_pool()
    for turn in range(10):
        total(n, cupy.empty(LARGE + turn, cupy.float32))
        pool.free_all_blocks()


@pytest.mark.parametrize("nbytes", [4, 1 << 16, 1 << 20, 256 << 20])
def test_how_long_calls_take(n, nbytes, record_property):
    """With the wait for the stream: reported, not asserted."""
    array, other = cupy.zeros(nbytes // 4, cupy.float32), cupy.empty(nbytes // 4, cupy.float32)
    stream, took, copied = cupy.cuda.get_current_stream(), [], []
    for _ in range(30 if nbytes < 1 << 24 else 8):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(array)
        stream.synchronize()
        took.append(time.perf_counter() - begin)
        dist.barrier()
        begin = time.perf_counter()
        cupy.copyto(other, array)
        stream.synchronize()
        copied.append(time.perf_counter() - begin)
    median, copy = (float(np.median(column)) * 1e6 for column in (took, copied))
    record_property(f"all_reduce of {nbytes} B", f"{median:.1f} us; a copy by each: {copy:.1f} us")
