"""Which calls on devices block the host and which only order streams.

Simulated devices execute nothing before a synchronization.
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
from mpicoll.routes.device import ipc, nccl

pytestmark = pytest.mark.on_3

COUNT = 1000


class OfCurrentStream(DeviceArray):
    """An array without a stream, as CuPy's: work uses the thread's current stream."""

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

    def start(self, array):
        """Return the Work of an all_reduce that the progress thread has enqueued."""
        work = dist.all_reduce(array, async_op=True)
        while not work.has_ended():
            time.sleep(1e-3)
        return work

    @property
    def total(self):
        return sum(range(self.n)) + self.n


@pytest.fixture
def on(monkeypatch):
    """Create the default group with a forced route."""

    def begin(route):
        arrays = simulated.Arrays()
        # Simulated devices work when they are polled. Do not poll.
        monkeypatch.setattr(nccl, "_INTERVAL", 1e9)
        monkeypatch.setattr(ipc, "SLOT", 64 * 1024)  # dozens of groups, whose memory may be kept
        if route == "nccl":
            arrays.cuda = WithNccl(MPI.COMM_WORLD.rank)
        cupy = types.ModuleType("cupy")
        cupy.ndarray = OfCurrentStream
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
        monkeypatch.setattr(capabilities, "_known", None)
        monkeypatch.setattr(streams, "_unfinished", streams.deque())
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", "full")
        if route != "nccl":
            monkeypatch.setenv("MPICOLL_DEVICE_ROUTE", route)
        return World(arrays, "nccl" if route == "nccl" else "mpi")

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()
    streams._unfinished.clear()
    gc.collect()  # memory of the simulated devices


ROUTES = ["ipc", "nccl", "staged", "direct", "mpi"]


@pytest.mark.parametrize("async_op", [False, True])
def test_call_and_wait_do_not_block_the_host(on, async_op):
    """They return while the stream is blocked. Later work in the stream sees the result."""
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
@pytest.mark.parametrize("route", ROUTES)
def test_host_does_not_wait_for_the_last_device_work(on, route, async_op):
    """The host may wait for MPI or slots, but not for the device work after them."""
    world = on(route)
    if world.n == 1 and route == "mpi":
        pytest.skip("MPI writes a contiguous row in place, so no device work follows")
    columns = world.arrays.make(np.full((world.n, 10), -1, np.float32), layout="F")
    columns.upload()
    work = dist.all_gather_single(columns, world.made(1 + world.me, 10), async_op=async_op)
    if async_op:
        assert work.wait()
    assert (columns._numpy() != np.arange(1, world.n + 1)[:, None]).all(), "the host has waited"
    columns.double()
    assert (got(columns) == 2 * np.arange(1, world.n + 1)[:, None]).all()


@pytest.mark.parametrize("route", ["ipc", "nccl"])
def test_asynchronous_call_does_not_block_the_stream_before_wait(on, route):
    world = on(route)
    array, passed = world.made(1 + world.me), []
    work = world.start(array)
    world.cuda.enqueue(0, array.number, lambda: passed.append(array._numpy().copy()))
    world.cuda.synchronize(world.cuda.record(0, array.number))
    assert (passed[0] == 1 + world.me).all(), "the stream has waited for the call"
    work.wait()
    assert (got(array) == world.total).all()


@pytest.mark.parametrize("async_op", [False, True])
def test_host_waits_for_arrays_without_streams(on, async_op):
    """The stream of later work is unknown."""
    world = on("nccl")
    array = DeviceArray(world.cuda, np.full(9, 1 + world.me, "f4"), 0, simulated.LEGACY, "C", "")
    array.upload()
    array.number = None
    work = dist.all_reduce(array, async_op=async_op)
    if async_op:
        assert work.wait()
    assert (array._numpy() == world.total).all()


@pytest.mark.parametrize("route", ROUTES)
def test_synchronous_call_after_an_asynchronous_call_keeps_stream_order(on, route):
    """The progress thread makes the call, ordered after the caller's stream."""
    world = on(route)
    first, second = world.made(1 + world.me), world.made(1 + world.me)
    work = dist.all_reduce(first, async_op=True)
    dist.all_reduce(second)
    second.double()
    assert (got(second) == 2 * world.total).all()
    work.wait()
    assert (got(first) == world.total).all()


@pytest.mark.parametrize("route", ROUTES)
def test_wait_orders_the_stream_that_is_current_at_the_wait(on, route):
    world = on(route)
    for _ in range(2):
        one, other = world.new_stream(), world.new_stream()
        with world.in_stream(one):
            array = world.of_current_stream(1 + world.me)
            work = dist.all_reduce(array, async_op=True)
        with world.in_stream(other):
            work.wait()
            array.double()
            assert (got(array) == 2 * world.total).all()


def test_is_completed_queries_the_device(on):
    world = on("ipc")
    array = world.made(1 + world.me)
    work = world.start(array)
    assert not work.is_completed(), "completed without a synchronization"
    work.wait()
    assert (got(array) == world.total).all()
    assert work.is_completed() and work.is_success() and work.exception() is None


@pytest.mark.parametrize("route", ["ipc", "nccl"])
def test_wait_with_a_timeout_synchronizes_the_device(on, monkeypatch, route):
    world = on(route)
    array = world.made(1 + world.me)
    assert dist.all_reduce(array, async_op=True).wait(timeout=TIMEOUT)
    assert (array._numpy() == world.total).all(), "the host has not waited"
    array = world.made(1 + world.me)
    work = world.start(array)
    with monkeypatch.context() as patch:
        patch.setattr(world.cuda, "is_done", lambda event: False)
        with pytest.raises(CollectiveTimeoutError):
            work.wait(0.02)
    assert work.wait()
    assert (got(array) == world.total).all()


@pytest.mark.parametrize("route", ROUTES)
def test_callbacks_keep_stream_order(on, route):
    """A callback's kernels run after the call, and wait() orders them before later work."""
    world = on(route)
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


@pytest.mark.parametrize("how", ["waited for", "in another stream", "never"])
def test_arrays_are_kept_while_the_device_uses_them(on, how):
    """After a wait in the stream of the call they may be freed, because stream order protects their
    memory. Otherwise they are kept until the device has finished. The host does not wait.
    """
    world = on("ipc")
    one, other = world.new_stream(), world.new_stream()
    with world.in_stream(one):
        array = world.of_current_stream(1 + world.me)
        memory = weakref.ref(array.memory)
        work = world.start(array)
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
        assert (got(last) == world.total).all()  # both calls have finished
        for _ in range(2):  # the first query of an event returns "not ready"
            dist.all_reduce(world.of_current_stream(0))
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("route", ["ipc", "staged"])
def test_arrays_of_a_dropped_work_are_kept_until_the_device_has_finished(on, monkeypatch, route):
    """torch drops a Work before the progress thread has made its call."""
    world = on(route)
    monkeypatch.setattr(streams, "_unfinished", streams.deque())
    gate, group = threading.Event(), dist.group.WORLD
    world.start(world.made(1 + world.me)).wait()
    group.give(gate.wait)  # blocks the progress thread
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
    assert memory() is not None, "freed while the device may use it"
    for event in order.events:
        world.cuda.synchronize(event)
    streams.release_finished_arrays()
    gc.collect()
    assert memory() is None


def test_work_collected_during_another_call(on, monkeypatch):
    """Garbage collection can drop a Work at any allocation."""
    world = on("ipc")
    array, record = world.made(1 + world.me), streams.DeviceContext.record

    class Cycle:
        pass

    def collects(context):
        event = record(context)
        gc.collect()
        return event

    world.start(array).wait()
    gc.disable()
    try:
        for _ in range(3):
            one = Cycle()
            one.itself, one.work = one, world.start(array)
        del one
        monkeypatch.setattr(streams.DeviceContext, "record", collects)
        world.start(array).wait(timeout=TIMEOUT / 2)
    finally:
        gc.enable()


@pytest.mark.parametrize("route", ["ipc", "nccl"])
def test_ranks_may_mix_mpi_and_mpicoll_operations(on, monkeypatch, route):
    """MPI.SUM and ReduceOp.SUM have the same call signature."""
    world = on(route)
    monkeypatch.setattr(consistency, "FIRST", 1)
    names = [dist.ReduceOp.SUM, MPI.SUM, dist.ReduceOp.SUM, MPI.SUM]
    for op in names if world.me else sorted(names, key=names.index):
        array = world.made(1 + world.me)
        dist.all_reduce(array, op)
        assert (got(array) == world.total).all()


def test_wait_raises_the_error_of_the_call(on, monkeypatch):
    world = on("ipc")
    dist.all_reduce(world.made(0))

    def fail(*arguments):
        raise RuntimeError("the device is broken")

    array = world.made(1 + world.me)
    with monkeypatch.context() as patch:
        patch.setattr(world.cuda, "combine", fail)
        work = dist.all_reduce(array, async_op=True)
        with pytest.raises(RuntimeError, match="the device is broken"):
            work.wait()
    assert isinstance(work.exception(), RuntimeError)
    assert work.is_completed() and not work.is_success()


def test_wait_in_a_captured_stream_raises(on):
    """The capture stays valid, and a later wait succeeds."""
    world = on("ipc")
    array = world.made(1 + world.me)
    work = dist.all_reduce(array, async_op=True)
    with world.arrays.capturing(array), pytest.raises(UnsupportedError, match="captured"):
        work.wait()
    work.wait()
    assert (got(array) == world.total).all()


def test_nccl_calls_run_inline(on, monkeypatch):
    """On the caller's thread, asynchronous or not, except calls that are compared."""
    world = on("nccl")
    monkeypatch.setattr(consistency, "STRIDE", 8)
    for _ in range(consistency.FIRST):
        dist.barrier()
    for _ in range(2):
        dist.all_reduce(world.made(1))
    enqueue, threads = world.cuda.enqueue, []

    def recording_enqueue(index, stream, task):
        threads.append(threading.current_thread())
        enqueue(index, stream, task)

    array = world.made(1 + world.me)
    others, here = 0, threading.current_thread()
    for turn in range(24):
        monkeypatch.setattr(world.cuda, "enqueue", recording_enqueue)
        work = dist.all_reduce(array, dist.ReduceOp.MAX, async_op=True)
        work.wait()
        monkeypatch.setattr(world.cuda, "enqueue", enqueue)
        others += threads.pop() is not here
        assert not threads, turn
    assert others <= 24 // 8 + 1
    assert (got(array) == world.n).all()


def test_group_of_one_rank_has_no_progress_thread(on):
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


def test_mismatch_of_nccl_calls_is_found_at_the_next_comparison(on, monkeypatch):
    world = on("nccl")
    if world.n == 1:
        pytest.skip("needs two ranks")
    monkeypatch.setattr(consistency, "STRIDE", 8)
    for _ in range(consistency.FIRST):
        dist.barrier()
    for count in (10, 20):
        dist.all_reduce(world.made(1, count))
    with pytest.raises(MismatchError):
        for turn in range(16):
            count = 20 if turn == 3 and world.me == 0 else 10
            monkeypatch.setattr(world.cuda, "enqueue", lambda *arguments: None)
            dist.all_reduce(world.made(1, count), async_op=True).wait()
