"""Streams, threads, graphs and new groups with CuPy on a GPU.

Every rank runs every test.
"""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("device_arrays", reason="run it with make test-gpu")
import real
from device_arrays import forced, routes
from mpi4py import MPI

import mpicoll as dist
from mpicoll.core.groups import default_group
from mpicoll.cuda import binding
from mpicoll.routes import registry

pytestmark = pytest.mark.on_a_gpu

LARGE = 5_000_000
MIB = 1 << 20


@pytest.fixture(scope="module", params=routes("auto", "staged"))
def n(request):
    """The number of ranks of a default group. CuPy's current device is this rank's GPU."""
    with forced(request.param):
        dist.init_process_group(timeout=60)
        binding.bind()
        yield dist.get_world_size()
        dist.destroy_process_group()


def late(array, value, nanoseconds=real.LONG_NS):
    """Fill an array with garbage, then with a value after a delay, in the current stream."""
    array.fill(77)
    real.spin((1,), (1,), (np.uint64(nanoseconds),))
    array.fill(value)
    return array


def made(count, value):
    return late(cupy.empty(count, cupy.float32), value)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("name", ["null", "ptds"])
def test_default_streams(n, name, count, async_op):
    """The current stream is the legacy or the per-thread default stream."""
    me = dist.get_rank()
    with getattr(cupy.cuda.Stream, name):
        for turn in range(5):
            array = made(count, me + turn)
            work = dist.all_reduce(array, async_op=async_op)
            if async_op:
                work.wait()
            array *= 2
            assert (array.get() == 2 * (sum(range(n)) + n * turn)).all()


def test_default_streams_of_two_threads(n):
    """Each thread uses its own group and its per-thread default stream."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI_THREAD_MULTIPLE")
    me, errors = dist.get_rank(), []
    groups = [dist.new_group(), dist.new_group()]
    index = cupy.cuda.Device().id

    def work(which):
        try:
            with cupy.cuda.Device(index), cupy.cuda.Stream.ptds:
                for turn in range(10):
                    array = late(cupy.empty(1000, cupy.float32), me + which, real.SHORT_NS)
                    dist.all_reduce(array, group=groups[which])
                    array += turn
                    expected = sum(range(n)) + n * which + turn
                    assert (array.get() == expected).all(), (which, turn)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for group in groups:
        dist.destroy_process_group(group)


def test_stream_of_use_stays_current(n):
    """Without a ``with``: CuPy's contexts do not restore such a stream."""
    me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True).use()
    try:
        array = made(LARGE, me)
        future = dist.all_reduce(array, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2).wait()
        dist.all_reduce(array)
        assert cupy.cuda.get_current_stream() == stream
        assert (doubled.get() == 2 * sum(range(n))).all()
    finally:
        stream.synchronize()
        cupy.cuda.Stream.null.use()


def test_stream_may_be_destroyed_after_the_call(n):
    me = dist.get_rank()
    kept = []
    for turn in range(20):
        with cupy.cuda.Stream(non_blocking=True):
            array = made(1000, me + turn)
            kept.append((array, dist.all_reduce(array, async_op=bool(turn % 2))))
        gc.collect()
    for _, work in kept[1::2]:
        work.wait()
    cupy.cuda.Device().synchronize()
    for turn, (array, _) in enumerate(kept):
        assert (array.get() == sum(range(n)) + n * turn).all(), turn


MODES = ["Global", "ThreadLocal", "Relaxed"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [False, True], ids=["later call", "first call"])
def test_call_during_the_capture_of_another_thread(n, mode, first):
    """The call runs on the progress thread and may allocate. The capture stays valid and does not
    contain the call.
    """
    me, index = dist.get_rank(), cupy.cuda.Device().id
    group = dist.new_group()
    if not first:
        dist.all_reduce(made(LARGE, 1), group=group)
    array = made(LARGE, me + 1)
    captured, stream = cupy.ones(1000, cupy.float32), cupy.cuda.Stream(non_blocking=True)
    captured *= 1  # loads the kernels, which is not allowed in a capture
    captured += 0
    cupy.cuda.Device().synchronize()
    started, resume, graphs, errors = threading.Event(), threading.Event(), [], []

    def capture():
        nonlocal captured
        try:
            with cupy.cuda.Device(index), stream:
                stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
                captured *= 3
                started.set()
                assert resume.wait(50)
                captured += 1
                graphs.append(stream.end_capture())
        except Exception as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert started.wait(50)
    try:
        dist.all_reduce(array, group=group, async_op=True).wait()
    finally:
        resume.set()
        thread.join()
    assert not errors, errors
    array *= 2
    assert (array.get() == n * (n + 1)).all()
    for _ in range(2):
        graphs[0].launch(stream)
    stream.synchronize()
    assert (captured.get() == 13).all()
    dist.destroy_process_group(group)


def test_destroyed_groups_free_device_memory(n):
    me = dist.get_rank()

    def one():
        group = dist.new_group()
        for count in (10, LARGE):
            array = made(count, me)
            dist.all_reduce(array, group=group)
            array *= 2
            assert (array.get() == 2 * sum(range(n))).all()
        dist.all_reduce(array, group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    def free():
        """Return the free memory after all ranks have closed their mappings."""
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        cupy.cuda.Device().synchronize()
        MPI.COMM_WORLD.Barrier()
        found = cupy.cuda.runtime.memGetInfo()[0]
        MPI.COMM_WORLD.Barrier()
        return found

    for _ in range(2):
        one()
    before = free()
    for _ in range(30):
        one()
    lost = before - free()
    assert lost < 48 * MIB, f"30 groups have not freed {lost // MIB} MiB of device memory"


def blocks(group=None):
    """Return the reason why the group's route blocks the host, or ""."""
    return registry.DEVICE[
        (group or default_group()).resources.find("devices").names[0]
    ].policy.host_waits_for


#: Longer than the host needs for a call.
LONG_DELAY_NS = 1_000_000_000


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [1000, LARGE])
def test_call_and_wait_do_not_block_the_host(n, count, async_op):
    """With a route that only enqueues work, they return while the stream is blocked."""
    me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.empty(count, cupy.float32)
        for _ in range(70):  # the first 64 calls of a group are compared on the host
            dist.all_reduce(array)
        if blocks():
            pytest.skip(f"the host waits {blocks()}")
        dist.barrier()
        late(array, me + 1, LONG_DELAY_NS)
        passed = stream.record()
        work = dist.all_reduce(array, async_op=async_op)
        if async_op:
            work.wait()
        assert not passed.done, "the host has waited for the stream"
        array *= 2
        assert (array.get() == n * (n + 1)).all()


@pytest.mark.parametrize("count", [1000, LARGE])
def test_wait_orders_the_stream_that_is_current_at_the_wait(n, count):
    me = dist.get_rank()
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for turn in range(5):
        with one:
            array = made(count, me + turn)
            work = dist.all_reduce(array, async_op=True)
        with other:
            work.wait()
            array *= 2
            assert (array.get() == 2 * (sum(range(n)) + n * turn)).all()


def test_wait_with_a_timeout_synchronizes_the_device(n):
    """is_completed() queries the device."""
    me = dist.get_rank()
    with cupy.cuda.Stream(non_blocking=True):
        array = made(LARGE, me + 1)
        work = dist.all_reduce(array, async_op=True)
        assert work.wait(timeout=50) and work.is_completed() and work.is_success()
    with cupy.cuda.Stream(non_blocking=True):  # not ordered after other streams
        assert (array.get() == n * (n + 1) / 2).all()


def test_callbacks_keep_stream_order(n):
    """A callback's kernels run after the call, and wait() orders them before later work."""
    me = dist.get_rank()
    for turn in range(5):
        with cupy.cuda.Stream(non_blocking=True):
            future = dist.all_reduce(made(LARGE, me + turn), async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        with cupy.cuda.Stream(non_blocking=True):
            found = doubled.wait() + 1
            assert (found.get() == 2 * (sum(range(n)) + n * turn) + 1).all()


def test_work_in_a_reference_cycle(n):
    """The garbage collector may destroy the Work's events before the Work."""
    array = made(LARGE, 1)
    gc.disable()
    try:
        cycle = [dist.all_reduce(array, async_op=True)]
        cycle.append(cycle)
        while not cycle[0].has_ended():
            time.sleep(1e-3)
        del cycle
        gc.collect()
    finally:
        gc.enable()
    dist.all_reduce(array)  # releases the arrays of finished calls
    cupy.cuda.runtime.deviceSynchronize()
    dist.all_reduce(array)
    assert (array.get() == n**3).all()
