"""Streams, threads, graphs and new groups with CuPy on a GPU.

Every rank runs every test.
"""

from __future__ import annotations

import gc
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import cupy
import numpy as np
import pytest
from device_arrays import forced
from mpi4py import MPI
from real import SHORT_NS, Fault, late, made, spin

import mpicoll as dist
from mpicoll.core.groups import default_group
from mpicoll.cuda.runtime import get_runtime
from mpicoll.errors import CollectiveTimeoutError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import staged

LARGE = 500_000
MIB = 1 << 20


def all_reduce(array, async_op):
    """Make a call, and order the current stream after it."""
    work = dist.all_reduce(array, async_op=async_op)
    assert not async_op or work.wait()


def start_all_reduce(array):
    """Start a call, and wait until the host has done its part. Return its Work."""
    work = dist.all_reduce(array, async_op=True)
    while not work.has_ended():
        time.sleep(1e-3)
    return work


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [10, LARGE])
@pytest.mark.parametrize("name", ["null", "ptds"])
def test_default_streams(n, name, count, async_op):
    """The current stream is the legacy or the per-thread default stream."""
    me = dist.get_rank()
    with getattr(cupy.cuda.Stream, name):
        for turn in range(5):
            array = made(count, me + turn)
            all_reduce(array, async_op)
            array *= 2
            assert (array.get() == 2 * (sum(range(n)) + n * turn)).all()


def test_default_streams_of_two_threads(n):
    """Each thread uses its own group and its per-thread default stream."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI_THREAD_MULTIPLE")
    me, index = dist.get_rank(), cupy.cuda.Device().id
    groups = [dist.new_group(), dist.new_group()]

    def work(which):
        with cupy.cuda.Device(index), cupy.cuda.Stream.ptds:
            for turn in range(10):
                array = late(cupy.empty(1000, cupy.float32), me + which, SHORT_NS)
                dist.all_reduce(array, group=groups[which])
                array += turn
                assert (array.get() == sum(range(n)) + n * which + turn).all(), (which, turn)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))  # raises their errors
    for group in groups:
        dist.destroy_process_group(group)


def test_stream_of_use_stays_current(n):
    """Without a ``with``: CuPy's contexts do not restore such a stream."""
    me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True).use()
    try:
        array = made(LARGE, me)
        future = dist.all_reduce(array, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2).wait()
        dist.all_reduce(array[::2])  # also copies between layouts
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


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
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
    started, resume = threading.Event(), threading.Event()

    def capture():
        nonlocal captured
        with cupy.cuda.Device(index), stream:
            stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
            captured *= 3
            started.set()
            assert resume.wait(50)
            captured += 1
            return stream.end_capture()

    with ThreadPoolExecutor(1) as pool:
        captures = pool.submit(capture)
        assert started.wait(50)
        try:
            dist.all_reduce(array, group=group, async_op=True).wait()
        finally:
            resume.set()
        graph = captures.result()
    array *= 2
    assert (array.get() == n * (n + 1)).all()
    for _ in range(2):
        graph.launch(stream)
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
    for _ in range(10):
        one()
    lost = before - free()
    assert lost < 16 * MIB, f"10 groups have not freed {lost // MIB} MiB of device memory"


def blocks():
    """Return why the route blocks the host until the device has done earlier work, or ""."""
    route = registry.DEVICE[default_group().resources.find("devices").names[0]]
    waits_for = route.policy.host_waits_for
    return "" if waits_for.endswith("and not for the device") else waits_for


@pytest.fixture
def only_orders_streams(n):
    """Skip routes with which the host waits for the device."""
    dist.all_reduce(cupy.ones(1, cupy.float32))
    if blocks():
        pytest.skip(f"the host waits {blocks()}")


#: Longer than the host needs for a call.
LONG_DELAY_NS = 1_000_000_000


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("count", [1000, LARGE])
@pytest.mark.usefixtures("only_orders_streams")
def test_call_and_wait_do_not_block_the_host(n, count, async_op):
    """They return while the stream is blocked."""
    me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.empty(count, cupy.float32)
        for _ in range(70):  # the first 64 calls of a group are compared on the host
            dist.all_reduce(array)
        dist.barrier()
        late(array, me + 1, LONG_DELAY_NS)
        passed = stream.record()
        all_reduce(array, async_op)
        assert not passed.done, "the host has waited for the stream"
        array *= 2
        assert (array.get() == n * (n + 1)).all()


def test_wait_orders_the_stream_that_is_current_at_the_wait(n):
    me = dist.get_rank()
    one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for turn in range(6):
        with one:
            array = made(LARGE if turn % 2 else 1000, me + turn)
            work = dist.all_reduce(array, async_op=True)
        with other:
            work.wait()
            array *= 2
            assert (array.get() == 2 * (sum(range(n)) + n * turn)).all()


def test_wait_with_a_timeout_synchronizes_the_device(n):
    """After a timeout, wait() can be repeated. is_completed() queries the device."""
    me = dist.get_rank()
    dist.all_reduce(cupy.ones(1, cupy.float32))
    with cupy.cuda.Stream(non_blocking=True):
        array = late(cupy.empty(LARGE, cupy.float32), me + 1, LONG_DELAY_NS)
        work = start_all_reduce(array)
        if not blocks():
            with pytest.raises(CollectiveTimeoutError):
                work.wait(0.02)
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
        cycle = [start_all_reduce(array)]
        cycle.append(cycle)
        del cycle
        gc.collect()
    finally:
        gc.enable()
    dist.all_reduce(array)  # releases the arrays of finished calls
    cupy.cuda.runtime.deviceSynchronize()
    dist.all_reduce(array)
    assert (array.get() == n**3).all()


@pytest.mark.usefixtures("only_orders_streams")
def test_asynchronous_call_does_not_block_the_stream_before_wait(n):
    """Rank 0's stream continues while another rank's array is not ready."""
    me = dist.get_rank()
    array = late(cupy.empty(1000, cupy.float32), me + 1, LONG_DELAY_NS if me else 0)
    work = start_all_reduce(array)
    seen = array.copy()
    assert me or n == 1 or ((seen.get() == 1).all() and not work.is_completed())
    work.wait()
    assert (array.get() == n * (n + 1) / 2).all()


def test_callback_in_the_stream_of_its_array(n):
    """An array that names its stream: a callback may use that stream."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array, copied = made(LARGE, dist.get_rank() + 1), cupy.zeros(LARGE, cupy.float32)
        named = types.SimpleNamespace(__cuda_array_interface__=array.__cuda_array_interface__)

    def copy(future):
        with stream:
            copied[...] = array

    dist.all_reduce(named, async_op=True).get_future().then(copy).wait()
    with stream:
        assert (copied.get() == n * (n + 1) / 2).all()


def without_stream(array):
    """Return an array with the CUDA array interface, without a stream."""
    entries = {**array.__cuda_array_interface__}
    del entries["stream"]
    return types.SimpleNamespace(array=array, __cuda_array_interface__=entries)


@pytest.mark.parametrize("async_op", [False, True])
def test_host_waits_for_arrays_without_streams(n, async_op):
    """The stream of later work is unknown."""
    array = made(LARGE, dist.get_rank() + 1)
    all_reduce(without_stream(array), async_op)
    with cupy.cuda.Stream(non_blocking=True):  # not ordered after other streams
        assert (array.get() == n * (n + 1) / 2).all()


class Owner:
    """Memory that a weak reference can follow."""

    def __init__(self, nbytes):
        self.memory = cupy.cuda.Memory(nbytes)


@pytest.mark.usefixtures("only_orders_streams")
@pytest.mark.parametrize("how", ["waited for", "never"])
def test_arrays_are_kept_while_the_device_uses_them(n, how):
    """After a wait in the stream of the call they may be freed, because stream order protects their
    memory. Otherwise they are kept until the device has finished. The host does not wait.
    """
    count, owner, other = 1000, Owner(4000), cupy.ones(1, cupy.float32)
    memory = cupy.cuda.UnownedMemory(owner.memory.ptr, 4 * count, owner)
    array = cupy.ndarray((count,), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
    kept = weakref.ref(owner)
    late(array, 1, LONG_DELAY_NS)
    work = start_all_reduce(array)
    if how == "waited for":
        held = owner.memory  # freeing it waits for the device
        work.wait()
    del array, memory, owner, work
    for _ in range(2):  # releases only the arrays of finished calls
        dist.all_reduce(other)
    gc.collect()
    assert (kept() is None) == (how == "waited for")
    cupy.cuda.Device().synchronize()
    for _ in range(2):
        dist.all_reduce(other)
    gc.collect()
    assert kept() is None
    held = None  # noqa: F841


def test_wait_in_a_captured_stream_raises(n):
    """The capture stays valid, and a later wait succeeds."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = made(1000, 1)
        work = start_all_reduce(array)
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        with pytest.raises(UnsupportedError, match="captured"):
            work.wait()
        stream.end_capture()
        work.wait()
        assert (array.get() == n).all()


def test_group_of_one_rank(n):
    """Its calls block neither the host nor the stream of other work."""
    me = dist.get_rank()
    group = dist.new_group([me], use_local_synchronization=True)
    factor = dist.ReduceOp.PREMUL_SUM(2.0)
    for op, expected in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.AVG, 3), (factor, 6)):
        array, output = made(LARGE, 0), made(LARGE, 0)
        dist.all_reduce(array, op, group=group)  # the first call allocates
        late(array, 3, LONG_DELAY_NS)
        passed = cupy.cuda.get_current_stream().record()
        work = dist.all_reduce(array, op, group=group, async_op=True)
        work.wait()
        dist.broadcast(array, me, group=group)
        dist.reduce_scatter_single(output, array, group=group)
        assert blocks() or not passed.done, "the host has waited"
        assert (array.get() == expected).all() and (output.get() == expected).all()
    dist.destroy_process_group(group)


# ---- Host memory between devices -----------------------------------------------------------------


@pytest.fixture
def through_the_host(n):
    with forced("staged"):
        group = dist.new_group()
        dist.all_reduce(cupy.ones(1, cupy.float32), group=group)
        yield group
        dist.destroy_process_group(group)


def test_error_between_chunks_keeps_stream_order(through_the_host, monkeypatch):
    """Copies that are already enqueued run before the caller's next work."""
    monkeypatch.setattr(staged, "CHUNK", 400)
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        array = made(300, dist.get_rank())
    dist.all_reduce(array, group=through_the_host)  # allocates the buffers
    with Fault("synchronize", True, number=2) as fault:
        dist.all_reduce(array, group=through_the_host)
    assert fault.failed, "the call has one chunk"
    array[...] = 7
    assert (array.get() == 7).all()
    del array, fault  # the frames of its error hold the array
    gc.collect()
    cupy.cuda.get_current_stream().synchronize()  # frees the memory
    cupy.cuda.Device().synchronize()


def overwrite_pinned_pool():
    """Overwrite the memory that CuPy's pool allocates next."""
    sizes = (400, 400, 4000, 4000, 8000, 400_000)
    for memory in [cupy.cuda.alloc_pinned_memory(nbytes) for nbytes in sizes]:
        np.frombuffer(memory, np.uint8)[...] = 0x11


def test_staging_buffers_are_not_reused_while_in_use(n, through_the_host):
    """The copies to the device may run after the call."""
    small, large = made(100, 1), made(100_000, 1)
    for array in (small, large):
        dist.all_reduce(array, group=through_the_host)
    overwrite_pinned_pool()
    assert (small.get() == n).all() and (large.get() == n).all()


@pytest.mark.parametrize("grows", [False, True])
def test_staging_buffers_are_freed_after_their_last_use(n, monkeypatch, grows):
    """The group is destroyed, or replaces its buffer by a larger one."""
    array, runtime = made(1000, 1), get_runtime()
    allocate = runtime.allocate_pinned
    with forced("staged"):
        group = dist.new_group()
        dist.all_reduce(array, group=group)
        if grows:
            monkeypatch.setattr(
                runtime, "allocate_pinned", lambda *each: overwrite_pinned_pool() or allocate(*each)
            )
            dist.all_reduce(made(LARGE, 1), group=group)
        dist.destroy_process_group(group)
    overwrite_pinned_pool()
    assert (array.get() == n).all()


def test_messages_that_wait_for_earlier_kernels_can_be_abandoned(n):
    """One is not sent. One that has arrived is copied to its array after the kernels."""
    if n == 1:
        pytest.skip("needs two ranks")
    right, left = ((dist.get_rank() + step) % n for step in (1, -1))
    array, last = late(cupy.empty(10), 1, 2 * LONG_DELAY_NS), np.zeros(10)
    sent, received = dist.isend(array, right), dist.irecv(array, left)
    for work in (sent, received):
        with pytest.raises(CollectiveTimeoutError):
            work.wait(0.05)
        work.abandon(RuntimeError("abandoned"))
        assert work.is_completed()
        if work is sent:
            dist.send(np.full(10, 5.0), right)
            dist.send(np.full(10, 6.0), right)
            dist.recv(last, left)  # so the first message has arrived
    assert (last == 6).all() and (array.get() == 5).all()


def test_messages_are_sent_after_earlier_kernels(n):
    """Messages of host arrays that are sent later do not overtake them."""
    me = dist.get_rank()
    if n == 1:
        return
    right, left = (me + 1) % n, (me - 1) % n
    array = cupy.full(1000, 77, cupy.float32)
    spin((1,), (1,), (np.uint64(1_000_000_000),))
    array.fill(me)
    works = [dist.isend(array, right)]
    works += [dist.isend(np.full(1000, me + k, np.float32), right) for k in (10, 20)]
    assert not any(work.is_completed() for work in works)
    received = [np.zeros(1000, np.float32) for _ in range(3)]
    for work in [*[dist.irecv(one, left) for one in received], *works]:
        work.wait()
    for one, added in zip(received, (0, 10, 20), strict=True):
        assert (one == left + added).all()
