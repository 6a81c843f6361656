"""Route ``copy_engine`` on GPUs: one GPU per rank, or all ranks on one GPU.

Every rank runs every test.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="run it with make test-gpu")
from device_arrays import forced

import mpicoll as dist
from mpicoll.cuda import binding
from mpicoll.routes.device.copy_engine import MIN_BYTES

pytestmark = pytest.mark.on_a_gpu

LARGE = 5_000_000


@pytest.fixture(scope="module")
def n():
    """The number of ranks (two or more) of a default group with the forced route."""
    with forced("copy_engine"):
        dist.init_process_group(timeout=60)
        binding.bind()
        ranks = dist.get_world_size()
        if ranks > 1:
            yield ranks
        dist.destroy_process_group()
    if ranks == 1:
        pytest.skip("needs two ranks")


def values(count, rank):
    return cupy.arange(count, dtype=cupy.float32) % 1009 + rank


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


def test_memory_freed_and_allocated_again(n):
    """The driver often returns the same address, also for another size."""
    me = dist.get_rank()
    for turn in range(30):
        count = LARGE + 1000 * (turn % 3)
        memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(4 * count), 0)
        given = cupy.ndarray((count,), cupy.float32, memory)
        given[...] = values(count, me + turn)
        output = cupy.empty((n, count), cupy.float32)
        dist.all_gather_single(output, given)
        del given, memory
        assert (output == cupy.stack([values(count, rank + turn) for rank in range(n)])).all()
    part = dist.group.WORLD.resources.find("devices").states["copy_engine"]
    assert not part._refused, "memory at an address that had been mapped could not be mapped"


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
