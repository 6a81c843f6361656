"""Arrays on devices under load: large sizes, late ranks, freed arrays and little free memory."""

from __future__ import annotations

import gc
import time

import cupy
import numpy as np
import pytest
from driver import NAMES
from driver import team as group_of
from test_devices import uploaded

import mpicoll as dist
from mpicoll.cuda import runtime
from mpicoll.errors import DeviceMemoryError

MIB = 1 << 20


@pytest.fixture(scope="module")
def world(route):
    dist.init_process_group(timeout=60)
    yield group_of("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def working(arrays):
    with arrays.working():
        yield
    arrays.release()


IN_PLACE = ("all_reduce", "broadcast")
CALLS = (*IN_PLACE, "all_gather_single", "reduce_scatter_single", "all_to_all_single")
#: Dtype and late rank.
SKEWED = [(np.float32, 0), (np.float16, 1), (np.uint8, 2)]


def check_call(arrays, world, name, dtype, nbytes, late):
    """Make a call on numbers that the device creates, with delay on a late rank, and checks.

    Element i of rank r's input is ``i % PERIOD + r``, so that misplaced data is found.
    """
    n, me = world.size, world.me
    block = nbytes // np.dtype(dtype).itemsize // n - 5  # not a multiple of a slot

    def filled(blocks, slope, start, late=False):
        host = np.zeros(blocks * block, dtype)  # never touched, so the OS allocates no memory
        made = arrays.make(host, kind=arrays.pooled)
        made.fill(slope, start, late)
        return made

    mine = output = filled(1 if name == "all_gather_single" else n, 1, me, late)
    if name in IN_PLACE:
        getattr(dist, name)(mine.given, *([n - 1] if name == "broadcast" else []))
    else:
        output = filled(1 if name == "reduce_scatter_single" else n, 0, 99)
        getattr(dist, name)(output.given, mine.given)
        assert not mine.count_wrong(1, me, 0, mine.host.size, 0), "the input was written"
    parts = [(1, r) for r in range(n)]  # slope and start of each part of the output
    if name in IN_PLACE or NAMES[name].reduces:
        parts = [(1, n - 1) if name == "broadcast" else (n, sum(range(n)))]
    first = me * block if name in ("reduce_scatter_single", "all_to_all_single") else 0
    size = output.host.size // len(parts)
    for k, ramp in enumerate(parts):
        wrong = output.count_wrong(*ramp, k * size, (k + 1) * size, first)
        assert not wrong, f"{name}: {wrong} of {size} elements of part {k} are wrong"


@pytest.mark.parametrize("name", CALLS)
def test_sizes(arrays, world, mpi, name):
    """Several chunks of the default size. One rank is late: its host and device, or only its
    device.
    """
    for place, nbytes in enumerate(arrays.sizes):
        dtype, late = SKEWED[(place + CALLS.index(name)) % len(SKEWED)]
        if mpi.bcast(arrays.free_bytes()) < 3 * world.size * nbytes:
            break
        late %= world.size
        if world.me == late:
            time.sleep(0.2)
        check_call(arrays, world, name, dtype, nbytes, world.me == (late + 1) % world.size)
        arrays.release()


def test_concurrent_calls_of_two_groups(arrays, world):
    """Ranks start the calls of the groups in different orders."""
    groups = [dist.new_group(), dist.new_group()]
    order = (0, 1) if world.me % 2 else (1, 0)
    for turn in range(4):
        started = []
        for which in order:
            for count in (10, 700_000 + turn):
                value = 1 + world.me + 10 * which + turn
                array = uploaded(arrays, np.full(count, value, np.float32))
                work = dist.all_reduce(array.given, group=groups[which], async_op=True)
                started.append((work, array, which))
        for work, array, which in started if turn % 2 else reversed(started):
            work.wait()
            each = 1 + 10 * which + turn
            assert (array.download() == sum(range(world.size)) + each * world.size).all()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("how", ["synchronous", "asynchronous", "dropped"])
@pytest.mark.parametrize("count", [100, 300_000])
def test_input_may_be_freed_when_the_call_returns(arrays, world, how, count):
    """Its memory is released to the driver or reused. "dropped": the Work is also dropped."""
    for turn in range(6):
        value = world.me + turn
        source = arrays.make(np.full(count, value, np.float32), kind=arrays.pooled)
        source.upload(long=turn == 0)
        output = arrays.make(np.zeros((world.size, count), np.float32), kind=arrays.pooled)
        output.upload()
        work = dist.all_gather_single(output.given, source.given, async_op=how != "synchronous")
        del source
        if turn % 2:
            arrays.release()
        other = arrays.make(np.full(count, 77, np.float32), kind=arrays.pooled)
        other.upload()
        if how == "asynchronous":
            work.wait()
        elif how == "dropped":
            del work
            gc.collect()
            dist.broadcast(output.given, turn % world.size)  # a group's calls go in order
        expected = np.arange(world.size)[:, None] + turn
        assert (output.download() == expected).all(), f"turn {turn}"
        assert (other.download() == 77).all(), f"turn {turn}"


def fill_pool(left):
    """Fill CuPy's pool with unused memory until ``left`` bytes are free."""
    pool = cupy.get_default_memory_pool()
    held, size = [], 16 << 30
    while size >= 16 * MIB:
        free = cupy.cuda.runtime.memGetInfo()[0]
        if free - size < left:
            size //= 2
            continue
        try:
            held.append(pool.malloc(size))
        except cupy.cuda.memory.OutOfMemoryError:
            size //= 2
    held.clear()
    assert pool.free_bytes() > 0


def test_memory_pools_are_emptied_if_memory_is_short(arrays, world, mpi):
    """The error of a full GPU has the needed size. Later calls succeed."""
    cuda, needed = runtime.get_runtime(), 1024 * MIB
    for rank in range(world.size):  # one after another, because ranks may share a GPU
        if rank == world.me:
            fill_pool(needed // 2)
            assert arrays.free_bytes() < needed, "the pool is too small for this test"
            assert runtime.allocate(cuda, 0, needed).nbytes == needed
            size = cupy.cuda.runtime.memGetInfo()[1] + MIB
            with pytest.raises(DeviceMemoryError, match=f"{size >> 20} MiB are needed"):
                runtime.allocate(cuda, 0, size)
        mpi.Barrier()
    arrays.release()
    route_of(arrays, world)


@pytest.mark.parametrize("left", [4 * MIB, 24 * MIB])
def test_groups_without_memory_for_workspaces_use_another_route(arrays, world, mpi, left):
    """Groups that are created after memory was freed use the best route again."""
    usual = route_of(arrays, world)
    small = arrays.make(np.full(1000, world.me, np.float32))
    large = arrays.make(np.full(1_000_000, world.me, np.float32))
    columns = arrays.make(np.full((1000, 30), world.me, np.float32), layout="F")
    group = dist.new_group()
    for array in (small, large, columns):
        array.upload()
    with arrays.full(left):
        mpi.Barrier()  # all ranks have occupied their memory
        for array in (small, large, columns):
            dist.all_reduce(array.given, group=group)
        mpi.Barrier()
    for array in (small, large, columns):
        assert (array.download() == sum(range(world.size))).all()
    dist.destroy_process_group(group)
    mpi.Barrier()
    assert route_of(arrays, world) == usual


def route_of(arrays, world):
    """Return the first route of a new group."""
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32))
    dist.all_reduce(array.given, group=group)
    assert (array.download() == sum(range(world.size))).all()
    found = group.resources.find("devices").names[0]
    dist.destroy_process_group(group)
    return found
