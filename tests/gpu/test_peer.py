"""Kernels that wait for each other, a GPU for each rank: sizes, addresses, graphs, and giving up.

Every rank runs every test.
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("cupy")
import cupy
from mpi4py import MPI

import mpicoll as dist
from mpicoll.cuda import binding
from mpicoll.errors import DistBackendError
from mpicoll.failures import consistency
from mpicoll.kernels.peers import FAILED

pytestmark = pytest.mark.on_a_gpu


@pytest.fixture(scope="module")
def n():
    """The number of ranks, in a default group that goes by ``peer``."""
    dist.init_process_group(timeout=60)
    binding.bind()
    dist.all_reduce(cupy.ones(1, cupy.float32))
    names = dist.group.WORLD.resources.find("devices").names
    if names[0] != "peer":
        dist.destroy_process_group()
        pytest.skip(f"calls go by {names[0]}: two ranks share a GPU, or cannot reach each other's")
    yield dist.get_world_size()
    dist.destroy_process_group()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_sizes(n, kind, offset):
    """Around those at which something changes, wherever the arrays lie."""
    me = dist.get_rank()
    for count in (1, 7, 4096, 65_536, 65_537, 262_145, 1_000_003, 20_000_001):
        whole = cupy.full(count + offset + 8, 77, kind)
        array = whole[offset : offset + count]
        array[...] = cupy.arange(count) % 3 + me
        dist.all_reduce(array)
        expected = cupy.arange(count) % 3 * n + n * (n - 1) // 2
        assert (array == expected.astype(kind)).all(), count
        assert (whole[:offset] == 77).all() and (whole[offset + count :] == 77).all(), count
        block = cupy.full(count, me, kind)
        output = cupy.empty(n * count, kind)
        dist.all_gather_single(output, block)
        assert (output.reshape(n, count) == cupy.arange(n)[:, None].astype(kind)).all(), count
        dist.broadcast(block, n - 1)
        assert (block == n - 1).all(), count


@pytest.mark.parametrize("count", [16, 5_000_000])
def test_graphs(n, count):
    """A graph is replayed many times, among other calls."""
    me, stream = dist.get_rank(), cupy.cuda.Stream(non_blocking=True)
    with stream:
        array = cupy.full(count, 1, cupy.int64)
        dist.all_reduce(array)
        array //= n
        stream.begin_capture()
        array += me
        dist.all_reduce(array)
        array //= n
        graph = stream.end_capture()
        for turn in range(100):
            graph.launch(stream)
            if turn % 10 == 0:
                dist.all_reduce(cupy.ones(1, cupy.float32))
        value = 1
        for _ in range(100):
            value = (n * value + n * (n - 1) // 2) // n
        stream.synchronize()
        assert (array.get() == value).all()


def test_giving_up(n, monkeypatch):
    """No GPU hangs for a rank that does not come."""
    if n == 1:
        pytest.skip("a rank waits for nobody")
    monkeypatch.setattr(consistency, "FIRST", 1)  # from then on the hosts do not meet in each call
    group, me = dist.new_group(timeout=3), dist.get_rank()
    array = cupy.ones(1000, cupy.float32)
    for _ in range(2):
        dist.all_reduce(array, group=group)
    begun = time.monotonic()
    if me:
        dist.all_reduce(array, group=group)
    cupy.cuda.Device().synchronize()
    assert time.monotonic() - begun < 30
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DistBackendError, match="for rank 0"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("look", ["call", "barrier", "wait", "exception", "destroy"])
def test_a_rank_that_fails_alone(n, monkeypatch, look):
    """The kernels of the others end at once, and whoever looks learns why."""
    if n == 1:
        pytest.skip("a rank waits for nobody")
    monkeypatch.setattr(consistency, "FIRST", 1)  # from then on the hosts do not meet in each call
    group, me, begun = dist.new_group(timeout=300), dist.get_rank(), time.monotonic()
    array, work = cupy.ones(1_000_000, cupy.float32), None
    dist.all_reduce(array, group=group)
    if me:
        work = dist.all_reduce(array, group=group, async_op=True)
    MPI.COMM_WORLD.Barrier()
    if me == 0:
        runtime = group.resources.find("devices").states["peer"].context.runtime
        monkeypatch.setattr(runtime, "collective", lambda *what: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(array, group=group)
        monkeypatch.undo()
        dist.destroy_process_group(group)
        return
    with pytest.raises(DistBackendError, match="rank 0 failed in call 2, all_reduce: ZeroDivision"):
        while not work.is_completed():
            assert time.monotonic() - begun < 60, "the kernels do not end"
        cupy.cuda.Device().synchronize()
        if look == "call":
            dist.all_reduce(array, group=group)
        elif look == "barrier":
            dist.barrier(group=group)
        elif look == "wait":
            work.wait()
        elif look == "exception":
            raise work.exception()
        else:
            dist.destroy_process_group(group)
    if group.closed is None:
        dist.destroy_process_group(group)


def test_kernels_are_ended_while_the_driver_waits(n, monkeypatch):
    """By a store of the host, though another thread waits inside the driver for the kernel."""
    if n == 1:
        pytest.skip("a rank waits for nobody")
    monkeypatch.setattr(consistency, "FIRST", 1)
    group, me = dist.new_group(timeout=300), dist.get_rank()
    array, begun = cupy.ones(1000, cupy.float32), time.monotonic()
    dist.all_reduce(array, group=group)
    MPI.COMM_WORLD.Barrier()
    if me == 0:
        time.sleep(2)
        peers = group.resources.find("devices").states["peer"]
        peers.end_kernels(FAILED, "the test has ended them")
    else:
        memory = cupy.cuda.runtime.malloc(1 << 20)
        dist.all_reduce(array, group=group)
        cupy.cuda.runtime.free(memory)  # waits for the device
    assert time.monotonic() - begun < 60
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DistBackendError, match="the test has ended them"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)


def test_latency(n, record_property):
    """Of a call, on the device: reported, not asserted."""
    for nbytes in (4, 1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 26):
        array = cupy.zeros(nbytes // 4, cupy.float32)
        for _ in range(10):
            dist.all_reduce(array)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(50):
            dist.all_reduce(array)
        end.record()
        end.synchronize()
        micros = cupy.cuda.get_elapsed_time(begin, end) * 1000 / 50
        rate = 2 * (n - 1) / n * nbytes / micros / 1e3
        record_property(f"all_reduce of {nbytes} B", f"{micros:.1f} us, busbw {rate:.1f} GB/s")
