"""Waiting belongs to streams: what blocks the host in calls on devices, and what does not; on
simulated devices, where nothing is done before somebody asks for it.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from mpi4py import MPI
from simulated import DeviceArray
from test_devices import got, uploaded
from test_nccl import WithNccl

import mpicoll as dist
from mpicoll.cuda import capabilities, runtime, streams
from mpicoll.errors import CollectiveTimeoutError, MismatchError, UnsupportedError
from mpicoll.failures import consistency
from mpicoll.routes import registry
from mpicoll.routes.device import ipc, nccl

pytestmark = pytest.mark.on_3

COUNT = 1000


class OfCurrentStream(DeviceArray):
    """In the place of CuPy's arrays, which belong to no stream: programs work in the thread's
    current one.
    """

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.memory.address)

    @property
    def number(self):
        return self.cuda.current_stream(self.index)

    @number.setter
    def number(self, stream):
        pass


class World:
    def __init__(self, arrays, backend):
        self.arrays, self.cuda = arrays, arrays.cuda
        dist.init_process_group(backend, timeout=TIMEOUT)
        self.me, self.n = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD

    def made(self, value, count=COUNT):
        return uploaded(self.arrays, np.full(count, value, np.float32))

    def of_current_stream(self, value, count=COUNT):
        array = OfCurrentStream(self.cuda, np.full(count, value, np.float32), 0, 0, "C", "plain")
        array.upload()
        return array

    def in_stream(self, stream):
        return self.cuda.using(0, stream)

    def new_stream(self):
        return self.cuda.create_stream(0)

    def begun(self, array):
        """The Work of an all_reduce, which the group's thread has put into streams."""
        work = dist.all_reduce(array, async_op=True)
        while not work.has_ended():
            time.sleep(1e-3)
        return work

    @property
    def total(self):
        return sum(range(self.n)) + self.n


@pytest.fixture
def on(monkeypatch):
    """Makes the default group, whose calls take a route."""

    def begin(road):
        arrays = simulated.Arrays()
        # Devices that are not there do their work when somebody asks for it; here nobody may.
        monkeypatch.setattr(nccl, "_INTERVAL", 1e9)
        monkeypatch.setattr(ipc, "SLOT", 64 * 1024)  # dozens of groups, whose memory may stay
        if road == "nccl":
            arrays.cuda = WithNccl(MPI.COMM_WORLD.rank)
        cupy = types.ModuleType("cupy")
        cupy.ndarray = OfCurrentStream
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
        monkeypatch.setattr(capabilities, "_known", None)
        monkeypatch.setattr(streams, "_in_use", streams.deque())
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", "full")
        if road != "nccl":
            monkeypatch.setenv("MPICOLL_DEVICE_ROUTE", road)
        return World(arrays, "nccl" if road == "nccl" else "mpi")

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()
    streams._in_use.clear()
    gc.collect()  # the memory of devices that are not there any more


ROADS = ["ipc", "nccl", "staged", "direct", "mpi"]


@pytest.mark.parametrize("async_op", [False, True])
def test_the_host_goes_on(on, async_op):
    """The call and wait() return while the stream is held up; what comes after finds the result."""
    world = on("nccl")
    for _ in range(3):
        array, passed = world.made(1 + world.me), []
        world.cuda.enqueue(0, array.number, lambda passed=passed: passed.append(True))
        work = dist.all_reduce(array, async_op=async_op)
        if async_op:
            assert work.wait()
        assert not passed, "the host has waited for the stream"
        array.double()
        assert (got(array) == 2 * world.total).all() and passed


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("road", ROADS)
def test_the_last_step_is_the_streams(on, road, async_op):
    """Where MPI or slots move the data the host waits for that, but not for what the device does
    then.
    """
    world = on(road)
    if world.n == 1 and road == "mpi":
        pytest.skip("one row is contiguous: MPI writes where it belongs, and nothing is left to do")
    columns = world.arrays.make(np.full((world.n, 10), -1, np.float32), layout="F")
    columns.upload()
    work = dist.all_gather_single(columns, world.made(1 + world.me, 10), async_op=async_op)
    if async_op:
        assert work.wait()
    assert (columns._numpy() != np.arange(1, world.n + 1)[:, None]).all(), "the host has waited"
    columns.double()
    assert (got(columns) == 2 * np.arange(1, world.n + 1)[:, None]).all()


@pytest.mark.parametrize("road", ["ipc", "nccl"])
def test_no_stream_is_held_up_before_the_wait(on, road):
    """What is put into the stream of an asynchronous call meanwhile goes on beside it."""
    world = on(road)
    array, passed = world.made(1 + world.me), []
    work = world.begun(array)
    world.cuda.enqueue(0, array.number, lambda: passed.append(array._numpy().copy()))
    world.cuda.synchronize(world.cuda.record(0, array.number))
    assert (passed[0] == 1 + world.me).all(), "the stream has waited for the call"
    work.wait()
    assert (got(array) == world.total).all()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_library_without_streams(on, async_op):
    """Nobody knows what comes after the call: the host waits until the device is done."""
    world = on("nccl")
    array = DeviceArray(world.cuda, np.full(9, 1 + world.me, "f4"), 0, simulated.LEGACY, "C", "")
    array.upload()
    array.number = None
    work = dist.all_reduce(array, async_op=async_op)
    if async_op:
        assert work.wait()
    assert (array._numpy() == world.total).all()


@pytest.mark.parametrize("road", ROADS)
def test_a_synchronous_call_behind_another(on, road):
    """It is ordered behind the current stream though the group's thread makes it."""
    world = on(road)
    first, second = world.made(1 + world.me), world.made(1 + world.me)
    work = dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    second.double()
    assert (got(second) == 2 * world.total).all()
    work.wait()
    assert (got(first) == world.total).all()


@pytest.mark.parametrize("road", ROADS)
def test_the_stream_that_is_current_at_the_wait(on, road):
    """It goes on after the call, whichever stream that was made in."""
    world = on(road)
    for _ in range(2):
        one, other = world.new_stream(), world.new_stream()
        with world.in_stream(one):
            array = world.of_current_stream(1 + world.me)
            work = dist.all_reduce(array, async_op=True)
        with world.in_stream(other):
            work.wait()
            array.double()
            assert (got(array) == 2 * world.total).all()


def test_is_completed_asks_the_device(on):
    world = on("ipc")
    array = world.made(1 + world.me)
    work = world.begun(array)
    assert not work.is_completed(), "nobody has waited for the device"
    work.wait()
    assert (got(array) == world.total).all()
    assert work.is_completed() and work.is_success() and work.exception() is None


@pytest.mark.parametrize("road", ["ipc", "nccl"])
def test_a_wait_with_a_timeout_waits_for_the_device(on, monkeypatch, road):
    world = on(road)
    array = world.made(1 + world.me)
    assert dist.all_reduce(array, async_op=True).wait(timeout=TIMEOUT)
    assert (array._numpy() == world.total).all(), "the host has to wait"
    array = world.made(1 + world.me)
    work = world.begun(array)
    with monkeypatch.context() as patch:
        patch.setattr(world.cuda, "is_done", lambda event: False)
        with pytest.raises(CollectiveTimeoutError):
            work.wait(0.02)
    assert work.wait()
    assert (got(array) == world.total).all()


@pytest.mark.parametrize("road", ROADS)
def test_callbacks_work_in_streams(on, road):
    """A callback's kernels come after the call, and its result is there for who waits for it."""
    world = on(road)
    stream = world.new_stream()
    with world.in_stream(stream):
        array = world.of_current_stream(1 + world.me)
        seen = []

        def double(done):
            seen.append(world.cuda.current_stream(0))
            done.value()[0].double()
            return done.value()[0]

        future = dist.all_reduce(array, async_op=True).get_future()
        doubled = future.then(double)
        again = doubled.then(lambda done: (done.value().double(), done.value())[1])
    other = world.new_stream()
    with world.in_stream(other):
        again.wait()
        assert (got(array) == 4 * world.total).all()
        assert future.done() and len(seen) == 1
        future.then(double).wait()
        assert (got(array) == 8 * world.total).all()


# ---- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["waited for", "in another stream", "never"])
def test_arrays_live_as_long_as_they_are_used(on, how):
    """Waited for in the stream of the call they may go, as what gets their memory comes after; else
    they stay until the device is done, which holds up nobody.
    """
    world = on("ipc")
    one, other = world.new_stream(), world.new_stream()
    with world.in_stream(one):
        array = world.of_current_stream(1 + world.me)
        memory = weakref.ref(array.memory)
        work = world.begun(array)
    if how != "never":
        with world.in_stream(one if how == "waited for" else other):
            work.wait()
    del array, work
    gc.collect()
    if how == "waited for":
        assert memory() is None
        return
    assert memory() is not None
    with world.in_stream(other):
        last = world.of_current_stream(1 + world.me)
        dist.all_reduce(last)
        assert memory() is not None
        assert (got(last) == world.total).all()  # the device has done both
        for _ in range(2):  # asked for the first time, an event has not come
            dist.all_reduce(world.of_current_stream(0))
    gc.collect()
    assert memory() is None


# ---- What goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["ipc", "staged"])
def test_a_work_that_is_dropped_before_its_call(on, monkeypatch, road):
    """As by torch's front, which drops it at once: the arrays live until the device is done."""
    world = on(road)
    monkeypatch.setattr(streams, "_in_use", streams.deque())
    gate, group = threading.Event(), dist.group.WORLD
    world.begun(world.made(1 + world.me)).wait()
    group.give(gate.wait)  # the group's thread is at something else
    array = world.made(1 + world.me)
    work, memory = dist.all_reduce(array, async_op=True), weakref.ref(array.memory)
    (order,) = work.orders
    work.drop()
    work.outputs = ()
    del array
    gate.set()
    while not work.has_ended() or group.busy():
        time.sleep(1e-3)
    gc.collect()
    assert memory() is not None, "the device may still be at it"
    for event in order.events:
        world.cuda.synchronize(event)
    streams.release_finished_arrays()
    gc.collect()
    assert memory() is None


def test_a_work_that_is_collected_in_a_call(on, monkeypatch):
    """The collector of garbage drops one wherever Python allocates: in the midst of another."""
    world = on("ipc")
    array, record = world.made(1 + world.me), streams.DeviceContext.record

    class Cycle:
        pass

    def collects(context):
        event = record(context)
        gc.collect()
        return event

    world.begun(array).wait()
    gc.disable()
    try:
        for _ in range(3):
            one = Cycle()
            one.itself, one.work = one, world.begun(array)
        del one
        monkeypatch.setattr(streams.DeviceContext, "record", collects)
        world.begun(array).wait(timeout=TIMEOUT / 2)
    finally:
        gc.enable()


@pytest.mark.parametrize("road", ["ipc", "nccl"])
def test_an_operation_by_other_names(on, monkeypatch, road):
    """Ranks may name it differently, and in another order: it is the same kind of call."""
    world = on(road)
    monkeypatch.setattr(consistency, "FIRST", 1)
    names = [dist.ReduceOp.SUM, MPI.SUM, dist.ReduceOp.SUM, MPI.SUM]
    for op in names if world.me else sorted(names, key=names.index):
        array = world.made(1 + world.me)
        dist.all_reduce(array, op)
        assert (got(array) == world.total).all()


def test_errors_come_with_the_wait(on, monkeypatch):
    """And the streams go on after what was begun."""
    world = on("ipc")
    dist.all_reduce(world.made(0))

    def broken(*what):
        raise RuntimeError("the device is broken")

    array = world.made(1 + world.me)
    with monkeypatch.context() as patch:
        patch.setattr(world.cuda, "combine", broken)
        work = dist.all_reduce(array, async_op=True)
        with pytest.raises(RuntimeError, match="the device is broken"):
            work.wait()
    assert isinstance(work.exception(), RuntimeError)
    assert work.is_completed() and not work.is_success()


def test_a_stream_that_is_captured_cannot_wait(on):
    """The capture goes on, and the Work can be waited for later."""
    world = on("ipc")
    array = world.made(1 + world.me)
    work = dist.all_reduce(array, async_op=True)
    with world.arrays.capturing(array), pytest.raises(UnsupportedError, match="captured"):
        work.wait()
    work.wait()
    assert (got(array) == world.total).all()


# ---- NCCL ----------------------------------------------------------------------------------------


def test_nccl_is_called_at_once(on, monkeypatch):
    """By the thread that makes the call, asynchronous or not, but where the ranks' calls are
    compared.
    """
    world = on("nccl")
    monkeypatch.setattr(consistency, "STRIDE", 8)
    for _ in range(consistency.FIRST):
        dist.barrier()
    for _ in range(2):
        dist.all_reduce(world.made(1))
    enqueue, threads = world.cuda.enqueue, []

    def noted(index, stream, task):
        threads.append(threading.current_thread())
        enqueue(index, stream, task)

    array = world.made(1 + world.me)
    others, here = 0, threading.current_thread()
    for turn in range(24):
        monkeypatch.setattr(world.cuda, "enqueue", noted)
        work = dist.all_reduce(array, dist.ReduceOp.MAX, async_op=True)
        work.wait()
        monkeypatch.setattr(world.cuda, "enqueue", enqueue)
        others += threads.pop() is not here
        assert not threads, turn
    assert others <= 24 // 8 + 1
    assert (got(array) == world.n).all()


def test_a_rank_alone_needs_no_thread(on):
    """Its calls are put into streams at once, whatever the route of other groups."""
    world = on("nccl")
    world.cuda.has_nccl = lambda: False
    group = dist.new_group([world.me], use_local_synchronization=True)
    dist.all_reduce(world.made(1), group=group)
    array = world.made(1 + world.me)
    work = dist.all_reduce(array, group=group, async_op=True)
    assert work.has_ended() and group.worker is None
    work.wait()
    array.double()
    assert (got(array) == 2 + 2 * world.me).all()


def test_calls_by_nccl_that_differ(on, monkeypatch):
    """They are found with a stride of calls."""
    world = on("nccl")
    if world.n == 1:
        pytest.skip("there is nobody to differ from")
    monkeypatch.setattr(consistency, "STRIDE", 8)
    for _ in range(consistency.FIRST):
        dist.barrier()
    for count in (10, 20):
        dist.all_reduce(world.made(1, count))
    with pytest.raises(MismatchError):
        for turn in range(16):
            count = 20 if turn == 3 and world.me == 0 else 10
            monkeypatch.setattr(world.cuda, "enqueue", lambda *what: None)
            dist.all_reduce(world.made(1, count), async_op=True).wait()


# ---- What routes say -----------------------------------------------------------------------------


def test_each_route_says_what_blocks_the_host():
    assert all(route.policy.host_waits_for is not None for route in registry.DEVICE.values())
    assert all(route.policy.host_waits_for is None for route in registry.HOST.values())
