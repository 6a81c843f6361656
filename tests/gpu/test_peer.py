"""Route ``peer`` on GPUs: graphs, timeouts and failures. test_peer_kernels.py has its sizes.

Every rank runs every test.
"""

from __future__ import annotations

import threading
import time
import warnings
from dataclasses import replace

import cupy
import numpy as np
import pytest
import real
from device_arrays import check_route_is_off, forced
from mpi4py import MPI

import mpicoll as dist
from mpicoll.api import lifecycle
from mpicoll.core.work import Work
from mpicoll.cuda import binding
from mpicoll.cuda.runtime import get_runtime
from mpicoll.dispatch import execute
from mpicoll.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    MismatchError,
    MPIError,
    UnsupportedError,
)
from mpicoll.failures import consistency
from mpicoll.routes.device import peer

LIMIT_S = 30


@pytest.fixture(scope="module")
def n():
    """The number of ranks of a default group that uses ``peer``."""
    dist.init_process_group(timeout=60)
    binding.bind()
    dist.all_reduce(cupy.ones(1, cupy.float32))
    names = dist.group.WORLD.resources.find("devices").names
    if names[0] != "peer" or dist.get_world_size() == 1:
        dist.destroy_process_group()
        pytest.skip(f"route {names[0]} is used: one rank, shared GPUs or no peer access")
    yield dist.get_world_size()
    dist.destroy_process_group()


@pytest.fixture
def me(n):
    return dist.get_rank()


def test_host_does_not_wait_for_other_ranks(n, me, group):
    array = cupy.full(1000, me, cupy.float32)
    for turn in (0, 1):
        MPI.COMM_WORLD.Barrier()
        for _ in range(3 if (me == 0) == (turn == 0) else 0):
            dist.all_reduce(array, group=group)
    assert (array == sum(range(n)) * n**2).all()


# ---- Graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [16, 500_000])
def test_graph_replays_between_other_calls(n, me, count):
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.full(count, 1, cupy.int64)
        dist.all_reduce(array)
        array //= n
        stream.begin_capture()
        array += me
        dist.all_reduce(array)
        array //= n
        graph = stream.end_capture()
        for turn in range(30):
            if turn == 3 * me:
                time.sleep(0.02)
            graph.launch(stream)
            if turn % 10 == 0:
                dist.all_reduce(cupy.ones(1, cupy.float32))
        value = 1
        for _ in range(30):
            value = (n * value + n * (n - 1) // 2) // n
        stream.synchronize()
        assert (array.get() == value).all()


@pytest.mark.parametrize("failed", [False, True])
def test_graph_that_runs_while_its_group_is_destroyed(n, me, failed):
    """The kernels run in a stream of the program. They end before the workspaces are freed."""
    group = dist.new_group()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.full(1000, me, cupy.float32)
        dist.all_reduce(array, group=group)
        stream.begin_capture()
        dist.all_reduce(array, group=group)
        graph = stream.end_capture()
        real.spin((1,), (1,), (np.uint64(300_000_000 if me == 0 else 0),))
        graph.launch(stream)
        MPI.COMM_WORLD.Barrier()  # all ranks have made their calls
        group.error = DistBackendError("failed") if failed else None
        dist.destroy_process_group(group)
        assert (array.get() == sum(range(n)) * n).all() or failed


def test_capture_directly_after_wait(n, me, monkeypatch):
    """The progress thread may still be finishing the asynchronous call."""
    finish = Work.finish

    def finish_late(work, error=None):
        finish(work, error)
        if threading.current_thread().name.startswith("mpicoll"):
            time.sleep(0.05)

    group = dist.new_group()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.full(9, me, cupy.float32)
        dist.all_reduce(array, group=group)
        monkeypatch.setattr(execute, "_should_run_inline", lambda *call: False)
        monkeypatch.setattr(Work, "finish", finish_late)
        dist.all_reduce(array, group=group, async_op=True).wait()
        stream.synchronize()
        stream.begin_capture()
        dist.all_reduce(array, group=group)
        stream.end_capture().launch(stream)
        assert (array.get() == sum(range(n)) * n**2).all()
    dist.destroy_process_group(group)


def test_calls_that_cannot_be_captured_raise(n):
    """The capture stays valid."""
    group = dist.new_group()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array, third = cupy.ones(50, cupy.float32), cupy.ones(150, cupy.float32)[::3]
        narrow = cupy.ones(50, cupy.uint16)  # no other test compiles its kernel
        dist.all_reduce(array)
        dist.all_reduce(third)
        stream.begin_capture()
        array *= 2
        with pytest.raises(UnsupportedError, match="captured"):
            dist.all_reduce(array, group=group)  # the first call of a group
        with pytest.raises(UnsupportedError, match=r"captured .* without async_op"):
            dist.all_reduce(array, async_op=True)
        with pytest.raises(UnsupportedError, match=r"captured .* contiguous"):
            dist.all_reduce(third)
        with pytest.raises(UnsupportedError, match="captured"):
            dist.isend(array, 0)
        with pytest.raises(UnsupportedError, match="captured"):
            dist.all_reduce(narrow, dist.ReduceOp.BXOR)
        stream.end_capture().launch(stream)
        dist.all_reduce(narrow, dist.ReduceOp.BXOR)
        assert (narrow.get() == n % 2).all() and (array.get() == 2 * n).all()
    dist.destroy_process_group(group)


# ---- Selection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrong", "late", "fails", "cannot be mapped", "no shared memory"])
def test_route_is_off_if_its_trial_call_fails(n, me, monkeypatch, how):
    monkeypatch.setattr(peer, "TRY_LIMIT", 60 if how == "fails" else 0.3)
    cuda, last = get_runtime(), n - 1
    collective = cuda.collective

    def fail(*arguments):
        raise RuntimeError("no peer access")

    faults = {
        "wrong": ("collective", lambda i, p, call, s: collective(
            i, p, replace(call, send=call.recv), s), "memory is wrong"),
        "late": ("collective", lambda *arguments: None, "did not arrive within"),
        "fails": ("collective", fail, f"rank {last}: no peer|rank 0: another rank failed"),
        "no shared memory": ("register", fail,
                             f"rank {last}: no memory for the failure word: no peer"),
        "cannot be mapped": ("open", fail, "no peer access"),
    }  # fmt: skip
    name, fault, reason = faults[how]
    if me == last:
        monkeypatch.setattr(cuda, name, fault)
    group, array = dist.new_group(), cupy.full(10, me, cupy.float32)
    check_route_is_off("peer", reason, lambda: dist.all_reduce(array, group=group), group)
    assert (array == sum(range(n))).all()
    dist.destroy_process_group(group)


def test_ranks_that_share_a_gpu_use_another_route(n, me):
    """A warning that is an error does not block the other ranks. Forcing the route raises."""
    with cupy.cuda.Device(0):
        array, group = cupy.full(10, me, cupy.float32), dist.new_group()
        with warnings.catch_warnings(action="error"):
            if me == 0:
                with pytest.raises(RuntimeWarning, match="share GPU"):
                    dist.all_reduce(array, group=group)
            else:
                dist.all_reduce(array, group=group)
        assert (array == sum(range(n))).all()
        agreed = group.resources.find("devices")
        assert agreed.names[0] == "ipc" and "peer" not in agreed.names
        names, reasons = agreed.names, agreed.describe()
        assert reasons["peer"] == f"ranks {', '.join(map(str, range(n)))} share a GPU"
        assert {name for name, why in reasons.items() if not why} == set(names)
        dist.destroy_process_group(group)
        group = dist.new_group()
        with forced("peer"), pytest.raises(UnsupportedError, match="share a GPU; unset it"):
            dist.all_reduce(array, group=group)
        dist.destroy_process_group(group)


# ---- Failures ------------------------------------------------------------------------------------


@pytest.fixture
def group(n, monkeypatch):
    """A group that has made a call."""
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared
    group = dist.new_group(timeout=300)
    dist.all_reduce(cupy.ones(1000, cupy.float32), group=group)
    yield group
    if group.closed is None:
        dist.destroy_process_group(group)


def observe(via, group, array, work, future=None):
    """Get the result of a call, in one of the ways that a program has."""
    if via == "call":
        dist.all_reduce(array, group=group)
    elif via == "barrier":
        dist.barrier(group=group)
    elif via == "wait":
        work.wait()
    elif via == "future":
        future.then(lambda done: None).wait(LIMIT_S)
    elif via == "destroy":
        dist.destroy_process_group(group)
    else:
        assert work.is_completed() and not work.is_success()
        if via == "exception":
            raise work.exception()
        work.synchronize()


@pytest.mark.parametrize("via", ["call", "barrier", "destroy"])
def test_kernels_time_out_if_a_rank_is_missing(n, me, group, via):
    """The group fails on all ranks, also on the rank that has not called."""
    group.timeout, start = 2.0, time.monotonic()
    array = cupy.ones(10, cupy.float32)
    if me:
        dist.all_reduce(array, group=group)
    if via != "destroy":
        cupy.cuda.Device().synchronize()
        MPI.COMM_WORLD.Barrier()
    while not me and group.error is None:
        time.sleep(0.01)
        assert time.monotonic() - start < LIMIT_S
    message = r"rank \d's GPU has waited 2\S* s for rank 0"
    for _ in range(1 if via == "destroy" else 2):
        with pytest.raises(CollectiveTimeoutError, match=message):
            observe(via if me or via == "destroy" else "call", group, array, None)


@pytest.mark.parametrize("how", ["packs", "compiles", "runs", "aborts"])
@pytest.mark.parametrize(
    "via", ["call", "barrier", "wait", "future", "destroy", "exception", "synchronize"]
)
def test_failure_of_one_rank_aborts_waiting_kernels(n, me, group, how, via):
    """Rank 0 fails before its kernel is enqueued, or aborts the group. The other ranks get the
    error with the result, or in their next call. A Work that has succeeded keeps its result.
    """
    start, work, future = time.monotonic(), None, None
    array = cupy.ones(2000, cupy.float32)[:: 2 if how == "packs" else 1]
    succeeded = dist.all_reduce(cupy.ones(50, cupy.float32), group=group, async_op=True)
    assert succeeded.wait(LIMIT_S)
    if me:
        work = dist.all_reduce(array, group=group, async_op=True)
        future = work.get_future().then(lambda done: None)
    MPI.COMM_WORLD.Barrier()
    if me == 0 and how == "aborts":
        lifecycle.abort(group)
    elif me == 0:
        what = {"packs": "copy_strided", "compiles": "load_collective", "runs": "collective"}[how]
        with real.Fault(what, True) as fault:
            dist.all_reduce(array, group=group)
        assert "injected failure" in str(fault.error)
    else:
        message = "rank 0 failed in call 3, all_reduce: RuntimeError: injected"
        with pytest.raises(DistBackendError, match="was aborted" if how == "aborts" else message):
            while not work.is_completed():
                assert time.monotonic() - start < LIMIT_S, "the kernels hang"
            observe(via, group, array, work, future)
    assert succeeded.exception() is None and succeeded.is_success() and succeeded.wait()


def test_failure_aborts_kernels_of_a_graph(n, me, group):
    """Rank 0 fails instead of launching its graph."""
    with cupy.cuda.Stream(non_blocking=True) as stream:
        array = cupy.ones(50, cupy.float32)
        dist.all_reduce(array, group=group)
        stream.begin_capture()
        dist.all_reduce(array, group=group)
        graph = stream.end_capture()
        MPI.COMM_WORLD.Barrier()  # all ranks have captured the graph
        start = time.monotonic()
        if me:
            graph.launch(stream)
            stream.synchronize()
        else:
            with real.Fault("collective", True):
                dist.all_reduce(array, group=group)
        assert time.monotonic() - start < LIMIT_S
        MPI.COMM_WORLD.Barrier()
        with pytest.raises(DistBackendError, match="rank 0 failed in call 4"):
            dist.all_reduce(array, group=group)


@pytest.mark.parametrize("error", [CollectiveTimeoutError, MPIError])
def test_kernels_are_aborted_while_a_thread_waits_in_the_driver(n, me, group, error):
    """Rank 0 fails the group."""
    array, start = cupy.ones(1000, cupy.float32), time.monotonic()
    memory = cupy.cuda.runtime.malloc(1 << 20)
    if me == 0:
        MPI.COMM_WORLD.Barrier()
        time.sleep(0.5)
        group.fail(error("another failure"))
        group.resources.leave()
    else:
        dist.all_reduce(array, group=group)
        MPI.COMM_WORLD.Barrier()
        cupy.cuda.runtime.free(memory)  # waits for the device
    assert time.monotonic() - start < LIMIT_S
    MPI.COMM_WORLD.Barrier()
    expected = error if error is CollectiveTimeoutError else DistBackendError
    with pytest.raises(expected, match="another failure"):
        dist.all_reduce(array, group=group)


def test_kernels_find_a_mismatch_that_the_hosts_have_not_compared(n, me, group):
    array, start = cupy.ones(10, cupy.float32), time.monotonic()
    found = group.resources.find("devices").states["peer"]
    call = peer._tried(array.data.ptr, array.data.ptr, n)
    found.carry_out(replace(call, starts=[4 * k for k in range(n + 1)], call=me + 1))
    found.context.synchronize(found.context.work)
    assert time.monotonic() - start < LIMIT_S, "the kernel was ended by its timeout"
    with pytest.raises(MismatchError, match="collective mismatch"):
        dist.all_reduce(array, group=group)
