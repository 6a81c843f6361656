"""Route ``ipc`` on GPUs: one GPU per rank, or all ranks on GPU 0. Every rank runs every test."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="run it with make test-gpu")
from device_arrays import forced

import mpicoll as dist
from mpicoll.cuda import binding
from mpicoll.cuda.runtime import get_runtime
from mpicoll.routes.device.ipc import MIN_BYTES

pytestmark = pytest.mark.on_a_gpu

LARGE = 5_000_000
with_own_gpus = pytest.mark.parametrize("placed", ["own GPUs"], indirect=True)


@pytest.fixture(scope="module", params=["own GPUs", "one GPU"])
def placed(request):
    """A default group with two or more ranks and the route."""
    with forced("ipc"):
        dist.init_process_group(timeout=60)
        if request.param == "own GPUs":
            binding.bind()
        else:
            cupy.cuda.Device(0).use()
        ranks = dist.get_world_size()
        if ranks > 1:
            yield
        dist.destroy_process_group()
    if ranks == 1:
        pytest.skip("needs two ranks")


@pytest.fixture
def n(placed):
    """The number of ranks."""
    return dist.get_world_size()


def values(count, rank):
    return cupy.arange(count, dtype=cupy.float32) % 1009 + rank


def check_all_gather(n, given, added=0):
    """Fill an array and gather it."""
    given[...] = values(given.size, dist.get_rank() + added)
    output = cupy.empty((n, given.size), cupy.float32)
    dist.all_gather_single(output, given)
    given[...] = -1
    assert (output == cupy.stack([values(given.size, r + added) for r in range(n)])).all()


def allocated(nbytes):
    """Allocate with cudaMalloc, without a pool."""
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 1000, 65_537, LARGE])
def test_calls(n, count, offset):
    """Arrays at any alignment. Inputs are overwritten and freed directly after the call."""
    me = dist.get_rank()

    def array(count, rank=None):
        made = cupy.full(count + offset, -1, cupy.float32)[offset:]
        if rank is not None:
            made[...] = values(count, rank)
        return made

    for turn in range(3):
        one, many, gathered, exchanged = (
            array(count, me), array(n * count, me), array(n * count), array(n * count)
        )  # fmt: skip
        dist.all_gather_single(gathered, one)
        dist.all_to_all_single(exchanged, many)
        one[...] = many[...] = -2
        sent = array(count, me)
        dist.broadcast(sent, turn % n)
        part = array(count)
        dist.scatter(part, [array(count, rank) for rank in range(n)] if me == turn % n else None,
                     src=turn % n)  # fmt: skip
        del one, many
        cupy.full(2 * n * count, -3, cupy.float32)
        expected = cupy.concatenate([values(count, rank) for rank in range(n)])
        assert (gathered == expected).all()
        blocks = [values(n * count, rank)[me * count :][:count] for rank in range(n)]
        assert (exchanged == cupy.concatenate(blocks)).all()
        assert (sent == values(count, turn % n)).all() and (part == values(count, me)).all()


def test_late_rank(n):
    """One rank is late, on the host and on the device."""
    me = dist.get_rank()
    outputs = []
    for turn in range(2 * n):
        if turn % n == me:
            time.sleep(0.05)
            for _ in range(20):
                cupy.ones(LARGE, cupy.float32).sum()
        given, output = values(LARGE, me + turn), cupy.empty((n, LARGE), cupy.float32)
        dist.all_gather_single(output, given)
        given[...] = 0
        outputs.append(output)
    for turn, output in enumerate(outputs):
        for rank in range(n):
            assert (output[rank] == values(LARGE, rank + turn)).all()


def test_memory_that_cannot_be_exported(n):
    """Managed memory and memory of cudaMallocAsync."""
    me = dist.get_rank()
    for allocate in (cupy.cuda.malloc_managed, cupy.cuda.malloc_async):
        given = cupy.ndarray((LARGE,), cupy.float32, allocate(4 * LARGE))
        output = cupy.ndarray((n, LARGE), cupy.float32, allocate(4 * n * LARGE))
        given[...] = values(LARGE, me)
        dist.all_gather_single(output, given)
        dist.broadcast(given, 1)
        assert (output == cupy.stack([values(LARGE, rank) for rank in range(n)])).all()
        assert (given == values(LARGE, 1)).all()


@pytest.mark.parametrize("count", [100, LARGE])
def test_memory_freed_and_allocated_again(n, count):
    """The driver often returns the same address, also for another size."""
    for turn in range(30):
        size = count + 1000 * (turn % 3)
        check_all_gather(n, cupy.ndarray((size,), cupy.float32, allocated(4 * size)), turn)


@with_own_gpus
def test_captured_large_calls_use_peer(n):
    """Needs one GPU per rank."""
    with forced("auto"):
        group = dist.new_group()
        me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True)
        count = 2 * MIN_BYTES // 4
        with stream:
            given, output = values(count, me), cupy.empty((n, count), cupy.float32)
            dist.all_gather_single(output, given, group=group)
            if "peer" not in group.resources.find("devices").names:
                pytest.skip("two ranks share a GPU")
            stream.begin_capture()
            given += 1
            dist.all_gather_single(output, given, group=group)
            graph = stream.end_capture()
            for _ in range(10):
                graph.launch(stream)
            dist.all_gather_single(output, given, group=group)
            stream.synchronize()
        for rank in range(n):
            assert (output[rank] == values(count, rank) + 10).all()
        dist.destroy_process_group(group)


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


def test_small_allocations_of_one_block(n):
    """The driver puts them into one block. A handle maps the whole block."""
    count = 20_000
    arrays = [cupy.ndarray((count,), cupy.float32, allocated(4 * count)) for _ in range(8)]
    for array in arrays * 2:
        check_all_gather(n, array)


def test_more_memory_than_the_limit_of_open_allocations(n):
    for _ in range(2):
        kept = [cupy.ndarray((LARGE // 8,), cupy.float32, allocated(LARGE)) for _ in range(100)]
        for array in kept:
            check_all_gather(n, array)
        del kept, array


def test_memory_pool_can_be_emptied_while_rank_0_maps_it(n):
    pool = cupy.get_default_memory_pool()
    for turn in range(10):
        check_all_gather(n, cupy.empty(LARGE + turn, cupy.float32))
        pool.free_all_blocks()
