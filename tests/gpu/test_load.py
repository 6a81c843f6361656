"""Arrays on devices under load: large sizes, late ranks, freed arrays and little free memory."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from device_arrays import LIBRARIES, devices, forced, routes
from driver import NAMES
from driver import team as group_of
from test_devices import got, uploaded

import mpicoll as dist
from mpicoll.dtypes import DTYPES, Kind

MIB = 1 << 20
NARROW = [row for row in DTYPES if row.kind is Kind.NARROW_FLOAT]


@pytest.fixture(scope="module", params=LIBRARIES)
def arrays(request):
    with devices(request.param) as made:
        yield made


@pytest.fixture(scope="module", params=routes("auto", "staged"))
def selected(request, arrays):
    with forced(request.param):
        yield request.param
    gc.collect()


@pytest.fixture(scope="module")
def world(selected):
    dist.init_process_group(timeout=60)
    yield group_of("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def working(arrays):
    with arrays.working():
        yield
    arrays.release()


class Ramps:
    """Calls on numbers that the device creates and checks.

    Element i of rank r's input is ``i % PERIOD + r``, so that misplaced data is found.
    """

    def __init__(self, arrays, world, dtype, nbytes):
        self.arrays, self.n, self.me = arrays, world.size, world.me
        self.dtype = np.dtype(dtype)
        self.block = nbytes // self.dtype.itemsize // self.n - 5  # not a multiple of a slot
        self.all = sum(range(self.n))

    def array(self, count, slope, start, long=False):
        """Return an array that a kernel fills with delay."""
        host = np.zeros(count, self.dtype)  # never touched, so the OS allocates no memory
        made = self.arrays.make(host, kind=self.arrays.pooled)
        made.fill(slope, start, long)
        return made

    def check(self, array, what, slope, start, begin=0, end=None, first=0):
        end = array.host.size if end is None else end
        wrong = array.count_wrong(slope, start, begin, end, first)
        assert not wrong, f"{what}: {wrong} of {end - begin} elements differ from element {begin}"

    def all_reduce(self, late):
        mine = self.array(self.block * self.n, 1, self.me, late)
        dist.all_reduce(mine.given)
        self.check(mine, "all_reduce", self.n, self.all)

    def broadcast(self, late):
        root = self.n - 1
        mine = self.array(self.block * self.n, 1, self.me, late)
        dist.broadcast(mine.given, root)
        self.check(mine, "broadcast", 1, root)

    def all_gather_single(self, late):
        mine = self.array(self.block, 1, self.me, late)
        output = self.array(self.block * self.n, 0, 99)
        dist.all_gather_single(output.given, mine.given)
        for r in range(self.n):
            begin = r * self.block
            self.check(output, f"block {r}", 1, r, begin, begin + self.block)

    def reduce_scatter_single(self, late):
        mine = self.array(self.block * self.n, 1, self.me, late)
        output = self.array(self.block, 0, 99)
        dist.reduce_scatter_single(output.given, mine.given)
        self.check(output, "my block", self.n, self.all, first=self.me * self.block)
        self.check(mine, "the input", 1, self.me)

    def all_to_all_single(self, late):
        mine = self.array(self.block * self.n, 1, self.me, late)
        output = self.array(self.block * self.n, 0, 99)
        dist.all_to_all_single(output.given, mine.given)
        for r in range(self.n):
            begin = r * self.block
            self.check(output, f"block {r}", 1, r, begin, begin + self.block, self.me * self.block)


CALLS = [name for name in vars(Ramps) if name in NAMES]
#: Dtype and late rank.
SKEWED = [(np.float32, 0), (np.float16, 1), (np.uint8, 2)]


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
        ramps = Ramps(arrays, world, dtype, nbytes)
        if world.me == late:
            time.sleep(0.2)
        getattr(ramps, name)(world.me == (late + 1) % world.size)
        del ramps
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
            assert (got(array) == sum(range(world.size)) + each * world.size).all()
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
        assert (got(output) == expected).all(), f"turn {turn}"
        assert (got(other) == 77).all(), f"turn {turn}"


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
        assert (got(array) == sum(range(world.size))).all()
    dist.destroy_process_group(group)
    mpi.Barrier()
    assert route_of(arrays, world) == usual


def route_of(arrays, world):
    """Return the first route of a new group."""
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32))
    dist.all_reduce(array.given, group=group)
    assert (got(array) == sum(range(world.size))).all()
    found = group.resources.find("devices").names[0]
    dist.destroy_process_group(group)
    return found
