"""CuPy's streams, threads and graphs beside calls, and groups that come and go, on a GPU.

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

pytest.importorskip("device_arrays", reason="make test-gpu starts it, and lets it find tests/mpi")
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
    """The number of ranks, in a default group; this rank's GPU is CuPy's current one."""
    with forced(request.param):
        dist.init_process_group(timeout=60)
        binding.bind()
        yield dist.get_world_size()
        dist.destroy_process_group()


def late(array, value, nanoseconds=real.LONG):
    """Fill an array in the current stream, after a while, over garbage."""
    array.fill(77)
    real.spin((1,), (1,), (np.uint64(nanoseconds),))
    array.fill(value)
    return array


def made(count, value):
    return late(cupy.empty(count, cupy.float32), value)


# ---- Streams that are another one in each thread -------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("name", ["null", "ptds"])
def test_default_streams(n, name, count, async_op):
    """CUDA's legacy and its per-thread default stream are the caller's current one."""
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
    """Each thread calls in a group of its own, in its own default stream."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI lets one thread call at a time")
    me, errors = dist.get_rank(), []
    groups = [dist.new_group(), dist.new_group()]
    index = cupy.cuda.Device().id

    def work(which):
        try:
            with cupy.cuda.Device(index), cupy.cuda.Stream.ptds:
                for turn in range(10):
                    array = late(cupy.empty(1000, cupy.float32), me + which, real.SHORT)
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


def test_streams_that_end(n):
    """Each call in a stream of its own, which is gone when the next one is made."""
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


# ---- Graphs --------------------------------------------------------------------------------------

MODES = ["Global", "ThreadLocal", "Relaxed"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [False, True], ids=["later call", "first call"])
def test_a_graph_that_another_thread_captures(n, mode, first):
    """A call goes on meanwhile, on the group's thread, and may allocate; the capture is not
    disturbed, and holds nothing of the call.
    """
    me, index = dist.get_rank(), cupy.cuda.Device().id
    group = dist.new_group()
    if not first:
        dist.all_reduce(made(LARGE, 1), group=group)
    array = made(LARGE, me + 1)
    captured, stream = cupy.ones(1000, cupy.float32), cupy.cuda.Stream(non_blocking=True)
    captured *= 1  # the kernels are loaded: loading is forbidden while a stream is captured
    captured += 0
    cupy.cuda.Device().synchronize()
    begun, go_on, graphs, errors = threading.Event(), threading.Event(), [], []

    def capture():
        nonlocal captured
        try:
            with cupy.cuda.Device(index), stream:
                stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
                captured *= 3
                begun.set()
                assert go_on.wait(50)
                captured += 1
                graphs.append(stream.end_capture())
        except Exception as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(50)
    try:
        dist.all_reduce(array, group=group, async_op=True).wait()
    finally:
        go_on.set()
        thread.join()
    assert not errors, errors
    array *= 2
    assert (array.get() == n * (n + 1)).all()
    for _ in range(2):
        graphs[0].launch(stream)
    stream.synchronize()
    assert (captured.get() == 13).all()
    dist.destroy_process_group(group)


# ---- Groups that come and go ---------------------------------------------------------------------


def test_groups_in_a_loop(n):
    """Nothing of the GPU is left of groups that were destroyed."""
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
        """Once all ranks have let go of what others of them map."""
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
    assert lost < 48 * MIB, f"30 groups have kept {lost // MIB} MiB of device memory"


# ---- Waiting -------------------------------------------------------------------------------------


def blocks(group=None):
    """What the route of a group's calls makes the host wait for, "" for nothing."""
    return registry.DEVICE[
        (group or default_group()).resources.find("devices").names[0]
    ].policy.host_waits_for


#: Longer than any host takes to make a call.
A_SECOND = 1_000_000_000


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [1000, LARGE])
def test_the_host_goes_on(n, count, async_op):
    """Where the route says so: the call and wait() return while the stream is held up."""
    me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.empty(count, cupy.float32)
        for _ in range(70):  # in the first 64 calls of a group the hosts compare each
            dist.all_reduce(array)
        if blocks():
            pytest.skip(f"the host waits {blocks()}")
        dist.barrier()
        late(array, me + 1, A_SECOND)
        passed = stream.record()
        work = dist.all_reduce(array, async_op=async_op)
        if async_op:
            work.wait()
        assert not passed.done, "the host has waited for the stream"
        array *= 2
        assert (array.get() == n * (n + 1)).all()


@pytest.mark.parametrize("count", [1000, LARGE])
def test_the_stream_that_is_current_at_the_wait(n, count):
    """It goes on after the call, whichever stream that was made in."""
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


def test_a_wait_with_a_timeout(n):
    """It waits on the host until the device is done, and is_completed() asks the device."""
    me = dist.get_rank()
    with cupy.cuda.Stream(non_blocking=True):
        array = made(LARGE, me + 1)
        work = dist.all_reduce(array, async_op=True)
        assert work.wait(timeout=50) and work.is_completed() and work.is_success()
    with cupy.cuda.Stream(non_blocking=True):  # which waits for nothing
        assert (array.get() == n * (n + 1) / 2).all()


def test_callbacks(n):
    """Their kernels come after the call, in a stream of their own, and its result for who waits."""
    me = dist.get_rank()
    for turn in range(5):
        with cupy.cuda.Stream(non_blocking=True):
            future = dist.all_reduce(made(LARGE, me + turn), async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        with cupy.cuda.Stream(non_blocking=True):
            found = doubled.wait() + 1
            assert (found.get() == 2 * (sum(range(n)) + n * turn) + 1).all()


@pytest.mark.parametrize("wait", [False, True])
def test_arrays_that_are_dropped(n, wait):
    """Right after the call, or after a wait in another stream: who gets their memory disturbs no
    call that goes on.
    """
    me, other = dist.get_rank(), cupy.cuda.Stream(non_blocking=True)
    for turn in range(10):
        output = cupy.zeros((n, LARGE), cupy.float32)
        given = made(LARGE, me + turn)
        work = dist.all_gather_single(output, given, async_op=True)
        del given
        if wait:
            with other:
                work.wait()
        garbage = cupy.full(LARGE, 99, cupy.float32)
        work.wait()
        assert (output == cupy.arange(n)[:, None] + turn).all() and (garbage == 99).all()


@pytest.mark.parametrize("count", [1000, LARGE, 20 * LARGE])
def test_how_long_the_host_is_blocked(n, count, record_property):
    """By the call and by wait(), behind 50 ms of other work: reported, not asserted."""
    me, clock = dist.get_rank(), time.perf_counter
    stream = cupy.cuda.Stream(non_blocking=True)
    for async_op in (False, True):
        took = []
        for turn in range(4):
            with stream:
                array = cupy.full(count, me + 1, cupy.float32)
                stream.synchronize()
                dist.barrier()
                late(array, me + 1, 50_000_000)
                begin = clock()
                work = dist.all_reduce(array, async_op=async_op)
                called = clock()
                if async_op:
                    work.wait()
                waited = clock()
                stream.synchronize()
                if turn:  # the first one compiles and allocates
                    took.append((called - begin, waited - called, clock() - begin))
                assert (array.get() == n * (n + 1) / 2).all()
        call, wait, all_of_it = (min(column) * 1e3 for column in zip(*took, strict=True))
        record_property(
            f"{'asynchronous' if async_op else 'synchronous'}, {count} elements",
            f"call {call:.3f} ms, wait() {wait:.3f} ms, device done {all_of_it:.3f} ms",
        )
