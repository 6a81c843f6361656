"""Route ``peer`` on GPUs: sizes, alignments, graphs, timeouts and failures.

Every rank runs every test.
"""

from __future__ import annotations

import os
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

#: Too slow on the emulated device.
HUGE = () if "EMULATED_GPU_CACHE" in os.environ else (20_000_001,)


@pytest.fixture(scope="module")
def n():
    """The number of ranks of a default group that uses ``peer``."""
    dist.init_process_group(timeout=60)
    binding.bind()
    dist.all_reduce(cupy.ones(1, cupy.float32))
    names = dist.group.WORLD.resources.find("devices").names
    if names[0] != "peer":
        dist.destroy_process_group()
        pytest.skip(f"route {names[0]} is used: ranks share a GPU or have no peer access")
    yield dist.get_world_size()
    dist.destroy_process_group()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
def test_sizes(n, kind, offset):
    """Sizes around the limits of the algorithms, at any alignment."""
    me = dist.get_rank()
    for count in (1, 7, 4096, 65_536, 65_537, 262_145, 1_000_003, *HUGE):
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
def test_graph_replays_between_other_calls(n, count):
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


def test_kernels_time_out_if_a_rank_is_missing(n, monkeypatch):
    if n == 1:
        pytest.skip("needs two ranks")
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared
    group, me = dist.new_group(timeout=3), dist.get_rank()
    array = cupy.ones(1000, cupy.float32)
    for _ in range(2):
        dist.all_reduce(array, group=group)
    start = time.monotonic()
    if me:
        dist.all_reduce(array, group=group)
    cupy.cuda.Device().synchronize()
    assert time.monotonic() - start < 30
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DistBackendError, match="for rank 0"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("via", ["call", "barrier", "wait", "exception", "destroy"])
def test_failure_of_one_rank_aborts_waiting_kernels(n, monkeypatch, via):
    """The other ranks get the error with the result, or in their next call."""
    if n == 1:
        pytest.skip("needs two ranks")
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared
    group, me, start = dist.new_group(timeout=300), dist.get_rank(), time.monotonic()
    array, work = cupy.ones(1_000_000, cupy.float32), None
    dist.all_reduce(array, group=group)
    if me:
        work = dist.all_reduce(array, group=group, async_op=True)
    MPI.COMM_WORLD.Barrier()
    if me == 0:
        runtime = group.resources.find("devices").states["peer"].context.runtime
        monkeypatch.setattr(runtime, "collective", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(array, group=group)
        monkeypatch.undo()
        dist.destroy_process_group(group)
        return
    with pytest.raises(DistBackendError, match="rank 0 failed in call 2, all_reduce: ZeroDivision"):
        while not work.is_completed():
            assert time.monotonic() - start < 60, "the kernels hang"
        cupy.cuda.Device().synchronize()
        if via == "call":
            dist.all_reduce(array, group=group)
        elif via == "barrier":
            dist.barrier(group=group)
        elif via == "wait":
            work.wait()
        elif via == "exception":
            raise work.exception()
        else:
            dist.destroy_process_group(group)
    if group.closed is None:
        dist.destroy_process_group(group)


def test_kernels_are_aborted_while_a_thread_waits_in_the_driver(n, monkeypatch):
    if n == 1:
        pytest.skip("needs two ranks")
    monkeypatch.setattr(consistency, "FIRST", 1)
    group, me = dist.new_group(timeout=300), dist.get_rank()
    array, start = cupy.ones(1000, cupy.float32), time.monotonic()
    dist.all_reduce(array, group=group)
    MPI.COMM_WORLD.Barrier()
    if me == 0:
        time.sleep(2)
        peers = group.resources.find("devices").states["peer"]
        peers.end_kernels(FAILED, "aborted by the test")
    else:
        memory = cupy.cuda.runtime.malloc(1 << 20)
        dist.all_reduce(array, group=group)
        cupy.cuda.runtime.free(memory)  # waits for the device
    assert time.monotonic() - start < 60
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(DistBackendError, match="aborted by the test"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)
