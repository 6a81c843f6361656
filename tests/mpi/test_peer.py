"""Route ``peer`` on simulated devices, one GPU per rank."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from conftest import team as group_of
from device_arrays import forced
from driver import DTYPES, NAMES, legal_operations
from test_devices import SOME, DeviceCall, UnevenDeviceCall, got, uploaded

import mpicoll as dist
from mpicoll.api import lifecycle
from mpicoll.core.work import Work
from mpicoll.cuda import runtime
from mpicoll.dispatch import execute
from mpicoll.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    MismatchError,
    MPIError,
    UnsupportedError,
)
from mpicoll.failures import consistency
from mpicoll.kernels import peers
from mpicoll.routes import registry
from mpicoll.routes.device import peer, workspaces

pytestmark = pytest.mark.on_3

PRIMITIVES = registry.DEVICE["peer"].serves.primitives


@pytest.fixture(scope="module")
def arrays():
    with pytest.MonkeyPatch.context() as patch, forced("auto"):
        made = simulated.Arrays(4)
        patch.setattr(runtime, "_runtime", made.cuda)
        patch.setenv("MPICOLL_CUDA_AWARE", "none")
        # Several chunks of each block, and both algorithms with few elements.
        patch.setattr(peer, "WORKSPACE", 16 * 1024)
        patch.setattr(peers, "BLOCK_MIN_BYTES", 256)
        patch.setattr(peers, "ONE_SHOT_MAX_BYTES", 2048)
        yield made
    gc.collect()


@pytest.fixture(scope="module")
def teams(arrays):
    dist.init_process_group(timeout=TIMEOUT)
    n = dist.get_world_size()
    yield [group_of("world", range(n)), group_of("reordered", range(n)[::-1])]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(teams):
    return teams[0]


def routes_of(group):
    return group.resources.find("devices").names


@pytest.mark.parametrize("name", PRIMITIVES)
def test_calls(arrays, teams, name):
    """Every primitive of the route, in any layout, with automatic selection."""
    cases = itertools.cycle([("C", False), ("third", True), ("1", False), ("C", True)])
    for dtype in SOME if name == "broadcast" else DTYPES:
        reduces = NAMES[name].reduces
        ops = legal_operations(dtype) if reduces else [None]
        for op in ops if dtype in SOME else ops[:1]:
            for count, (layout, async_op) in zip((1, 100, 3001), cases, strict=False):
                team = teams[count % 2]
                DeviceCall(
                    arrays, name, team, dtype, count, op, count % team.size
                    if NAMES[name].root else 0, layout=layout,
                ).run_and_check(async_op)  # fmt: skip
    for team in teams:
        assert team.size == 1 or routes_of(team.group)[0] == "peer"


def test_blocks_of_different_sizes(arrays, world):
    for dtype in SOME:
        for turn, op in enumerate(legal_operations(dtype)):
            for sizes in ([5, 0, 3, 17], [0, 700, 0, 1], [300, 1, 2000, 40]):
                UnevenDeviceCall(arrays, world, dtype, sizes, op).run_and_check(turn % 2 == 1)
    counts = [5, 0, 300, 17][: world.size]
    given = uploaded(arrays, np.full(counts[world.me], world.me + 1, "i8"), world.me)
    outputs = [uploaded(arrays, np.zeros(count, "i8"), world.me) for count in counts]
    dist.all_gather(outputs, given)
    for rank, output in enumerate(outputs):
        assert (got(output) == rank + 1).all()


def test_host_does_not_wait_for_other_ranks(arrays, world, mpi):
    array = uploaded(arrays, np.full(1000, world.me, np.float32), world.me)
    mpi.Barrier()
    if world.me == 0:
        for _ in range(3):
            dist.all_reduce(array)
    mpi.Barrier()
    if world.me:
        for _ in range(3):
            dist.all_reduce(array)
    assert (got(array) == sum(range(world.size)) * world.size**2).all()


def test_ranks_that_share_a_gpu_use_another_route(arrays, world):
    if world.size == 1:
        return
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32))
    dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all()
    assert "peer" not in routes_of(group)
    why = group.resources.find("devices").describe()["peer"]
    assert why == f"ranks {', '.join(map(str, range(world.size)))} share a GPU"
    dist.destroy_process_group(group)
    with forced("peer"), pytest.raises(UnsupportedError, match="share a GPU; unset it"):
        dist.all_reduce(array, group=dist.new_group())


@pytest.mark.parametrize("kept", [True, False])
def test_destroy_frees_workspaces_without_garbage_collection(arrays, world, kept):
    """kept: the program keeps a reference to the group."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    gc.disable()
    try:
        group = dist.new_group()
        array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(world.size))).all()
        own = weakref.ref(group.resources.find("devices").states["peer"]._workspaces._own)
        assert own() is not None
        dist.destroy_process_group(group)
        if not kept:
            del group
        assert own() is None
    finally:
        gc.enable()


def test_capture_and_replay(arrays, world):
    if world.size == 1:
        pytest.skip("needs two ranks")
    count = 700
    array = uploaded(arrays, np.full(count, world.me + 1, np.int64), world.me)
    small = uploaded(arrays, np.full(3, 1, np.float32), world.me)
    output = uploaded(arrays, np.zeros((world.size, 3), np.float32), world.me)
    for other in (small, output):
        other.number = array.number  # one stream
        other.upload()
    dist.all_reduce(array)
    dist.all_gather_single(output, small)
    total = sum(range(1, world.size + 1))
    assert (got(array) == total).all()
    with arrays.capturing(array) as graph:
        dist.all_reduce(array)
        array.double()
        dist.all_gather_single(output, small)
    assert (got(array) == total).all() and len(graph.tasks) == 3
    for turn in range(4):
        if turn == world.me:
            time.sleep(0.01)
        graph.launch()
        total *= 2 * world.size
        if turn % 2:
            dist.all_reduce(array)
            total *= world.size
    assert (got(array) == total).all() and (got(output) == 1).all()


@pytest.mark.parametrize("how", ["destroy", "check_device_errors"])
def test_running_graphs_finish_before_resources_are_freed(arrays, world, monkeypatch, mpi, how):
    """The kernels of a graph run in a stream of the program. check_device_errors waits for them."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    group = dist.new_group()
    array = uploaded(arrays, np.full(100, world.me, np.float32), world.me)
    dist.all_reduce(array, group=group)
    got(array)
    with arrays.capturing(array) as graph:
        dist.all_reduce(array, group=group)
    monkeypatch.setattr(simulated, "KERNEL_DELAY_S", 1000.0)  # kernels start only when polled
    stream, pending = arrays.cuda._find(world.me, array.number), []
    close = workspaces.Workspaces.close

    def end_of_use(*arguments):
        pending.append(stream.end - stream.done)
        arrays.cuda._run(stream, stream.end)  # otherwise the process exits
        mpi.Barrier()
        close(*arguments)

    monkeypatch.setattr(workspaces.Workspaces, "close", end_of_use)
    mpi.Barrier()
    graph.launch()
    assert stream.end > stream.done
    if how != "destroy":
        group.check_device_errors(wait=True)
        assert stream.end == stream.done
        graph.launch()
        group.device_error = None  # as in a failed group
    dist.destroy_process_group(group)
    assert set(pending) == {0}
    launched = 1 if how == "destroy" else 2
    assert (got(array) == sum(range(world.size)) * world.size**launched).all()


def test_capture_directly_after_wait(arrays, world, monkeypatch):
    """The progress thread may still be finishing the asynchronous call."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    group = dist.new_group()
    array = uploaded(arrays, np.full(9, world.me, np.float32), world.me)
    dist.all_reduce(array, group=group)
    got(array)
    monkeypatch.setattr(execute, "_should_run_inline", lambda *call: False)
    finish = Work.finish

    def finish_late(work, error=None):
        finish(work, error)
        if threading.current_thread().name.startswith("mpicoll"):
            time.sleep(0.05)

    monkeypatch.setattr(Work, "finish", finish_late)
    dist.all_reduce(array, group=group, async_op=True).wait()
    with arrays.capturing(array) as graph:
        dist.all_reduce(array, group=group)
    graph.launch()
    assert (got(array) == sum(range(world.size)) * world.size**2).all()
    dist.destroy_process_group(group)


def test_calls_that_cannot_be_captured_raise(arrays, world):
    """The capture stays valid."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    narrow = uploaded(arrays, np.full(50, 1, np.int16), world.me)
    third = arrays.make(np.ones(50, np.float32), world.me, "third")
    for other in (narrow, third):
        other.number = array.number
        other.upload()
    group = dist.new_group()
    dist.all_reduce(array)
    dist.all_reduce(third)
    arrays.cuda.loaded = {line for line in arrays.cuda.loaded if "int16" not in line}
    with arrays.capturing(array):
        with pytest.raises(UnsupportedError, match="captured"):
            dist.all_reduce(array, group=group)  # the first call of a group
        with pytest.raises(UnsupportedError, match=r"captured .* without async_op"):
            dist.all_reduce(array, async_op=True)
        with pytest.raises(UnsupportedError, match=r"captured .* contiguous"):
            dist.all_reduce(third)
        with pytest.raises(UnsupportedError, match="captured"):
            dist.isend(array, 0)
    dist.all_reduce(narrow)
    arrays.cuda.loaded = set()
    with (
        arrays.capturing(array),
        pytest.raises(UnsupportedError, match=r"captured .* not compiled yet"),
    ):
        dist.all_reduce(narrow)
    dist.all_reduce(narrow)
    assert (got(narrow) == world.size**2).all() and (got(array) == world.size).all()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("how", ["wrong", "late", "cannot be mapped", "fails", "no shared memory"])
def test_route_is_off_if_its_test_call_fails(arrays, world, monkeypatch, how):
    """All ranks use another route, and rank 0 warns."""
    if world.size == 1:
        return
    monkeypatch.setattr(peer, "TRY_LIMIT", TIMEOUT if how == "fails" else 0.3)
    last = world.size - 1
    original = {name: getattr(arrays.cuda, name) for name in ("collective", "open")}
    if world.me == last:
        if how == "wrong":
            monkeypatch.setattr(
                arrays.cuda, "collective",
                lambda i, p, call, s: original["collective"](
                    i, p, replace(call, send=call.recv), s
                ),
            )  # fmt: skip
        elif how == "late":
            monkeypatch.setattr(arrays.cuda, "collective", lambda *arguments: None)
        elif how == "fails":
            monkeypatch.setattr(arrays.cuda, "collective", lambda *arguments: 1 / 0)
        elif how == "no shared memory":
            monkeypatch.setattr(arrays.cuda, "register", lambda *arguments: 1 / 0)
        else:

            def refuse(*arguments):
                raise RuntimeError("no peer access")

            monkeypatch.setattr(arrays.cuda, "open", refuse)
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    message = {
        "wrong": "memory is wrong",
        "late": "did not arrive within",
        "fails": f"rank {last}: division by zero|rank 0: another rank failed",
        "no shared memory": f"rank {last}: no memory for the failure word: division",
    }.get(how, "no peer access")
    if world.me == 0:
        with pytest.warns(RuntimeWarning, match=message):
            dist.all_reduce(array, group=group)
    else:
        dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all() and "peer" not in routes_of(group)
    dist.destroy_process_group(group)


@pytest.fixture
def group_to_fail(arrays, world, monkeypatch):
    """A group that has made a call."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared
    group = dist.new_group(timeout=TIMEOUT)
    mine = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    dist.all_reduce(mine, group=group)
    assert (got(mine) == sum(range(world.size))).all()
    yield group
    if group.closed is None:
        dist.destroy_process_group(group)


def observe(via, group, array, work):
    """Get the result of a call, in one of the ways that a program has."""
    if via == "call":
        dist.all_reduce(array, group=group)
    elif via == "barrier":
        dist.barrier(group=group)
    elif via == "wait":
        work.wait(timeout=TIMEOUT / 2)
    elif via == "future":
        work.get_future().wait()
    elif via == "destroy":
        dist.destroy_process_group(group)
    else:
        assert work.is_completed() and not work.is_success()
        if via == "exception":
            raise work.exception()
        work.synchronize()


@pytest.mark.parametrize(
    "via", ["call", "barrier", "wait", "future", "destroy", "exception", "synchronize"]
)
@pytest.mark.parametrize("how", ["packs", "compiles", "aborts"])
def test_failure_of_one_rank_aborts_waiting_kernels(
    arrays, world, group_to_fail, monkeypatch, mpi, how, via
):
    """The rank fails before its kernel is enqueued, or aborts the group. The other ranks get the
    error with the result, or in their next call.
    """
    group, last, start = group_to_fail, world.size - 1, time.monotonic()
    failing = {"packs": "allocate", "compiles": "load_collective"}.get(how)
    array = arrays.make(np.full(50, 1, np.float32), world.me, "third" if how == "packs" else "C")
    array.upload()
    work = None
    if world.me not in (last, 0) or (
        world.me == 0 and how == "aborts"
    ):  # otherwise rank 0 has not called yet
        work = dist.all_reduce(array, group=group, async_op=True)
    mpi.Barrier()
    if world.me == last and failing:
        original = getattr(arrays.cuda, failing)

        def fail(*arguments):
            raise RuntimeError("injected failure")

        monkeypatch.setattr(arrays.cuda, failing, fail)
        context = group.resources.find(("device", world.me))
        context._blocks, context._since = [], []  # force an allocation
        with pytest.raises(RuntimeError, match="injected failure"):
            dist.all_reduce(array, group=group)
        monkeypatch.setattr(arrays.cuda, failing, original)
        with pytest.raises(DistBackendError, match=f"rank {last} failed in call 2"):
            dist.all_reduce(array, group=group)
    elif world.me == last:
        lifecycle.abort(group)
    else:
        while work is not None and not work.orders[0].is_done():
            assert time.monotonic() - start < TIMEOUT / 2, "the kernel was ended by its timeout"
        mpi.Barrier()
        found = via if work is not None else "call"
        message = f"rank {last} failed in call 2, all_reduce: RuntimeError: injected failure"
        with pytest.raises(DistBackendError, match="was aborted" if how == "aborts" else message):
            observe(found, group, array, work)
        if group.closed is None:
            dist.destroy_process_group(group)
    if world.me == last:
        mpi.Barrier()
        if group.closed is None:
            dist.destroy_process_group(group)


def test_failed_call_and_its_futures_raise(arrays, world, group_to_fail, monkeypatch, mpi):
    """Also a wait that started before the failure. A Work that has succeeded keeps its result."""
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    succeeded = dist.all_reduce(array, group=group_to_fail, async_op=True)
    future = succeeded.get_future()
    assert succeeded.wait(TIMEOUT) and (got(array) == world.size).all()
    mpi.Barrier()
    if world.me == 0:
        time.sleep(0.3)  # until the other ranks wait
        monkeypatch.setattr(arrays.cuda, "load_collective", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(array, group=group_to_fail)
    else:
        work = dist.all_reduce(array, group=group_to_fail, async_op=True)
        late = work.get_future()
        follows = [late.then(lambda done: None)]
        with pytest.raises(DistBackendError, match="rank 0 failed in call 3"):
            work.wait(TIMEOUT / 2)
        follows.append(late.then(lambda done: None))
        for one in (*follows, follows[0].then(lambda done: None)):
            with pytest.raises(DistBackendError, match="rank 0 failed in call 3"):
                one.wait(TIMEOUT)
    assert succeeded.exception() is None and succeeded.is_success()
    assert succeeded.wait() and succeeded.wait(TIMEOUT)
    assert future.wait(TIMEOUT)[0] is array
    with pytest.raises(DistBackendError, match="rank 0 failed in call 3"):
        dist.all_reduce(array, group=group_to_fail)


def test_failure_aborts_kernels_of_a_graph(arrays, world, group_to_fail, monkeypatch, mpi):
    """Rank 0 fails instead of launching its graph."""
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    dist.all_reduce(array, group=group_to_fail)
    with arrays.capturing(array) as graph:
        dist.all_reduce(array, group=group_to_fail)
    mpi.Barrier()  # all ranks have captured the graph
    start = time.monotonic()
    if world.me:
        graph.launch()
        got(array)
    else:
        monkeypatch.setattr(arrays.cuda, "load_collective", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(array, group=group_to_fail)
    assert time.monotonic() - start < TIMEOUT / 2
    mpi.Barrier()
    with pytest.raises(DistBackendError, match="rank 0 failed in call 4"):
        dist.all_reduce(array, group=group_to_fail)


@pytest.mark.parametrize("how", ["a timeout", "an error"])
def test_failing_the_group_on_one_rank_aborts_waiting_kernels(
    arrays, world, group_to_fail, mpi, how
):
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    start, kind = time.monotonic(), CollectiveTimeoutError if how == "a timeout" else MPIError
    if world.me:
        dist.all_reduce(array, group=group_to_fail)
    mpi.Barrier()
    if world.me == 0:
        group_to_fail.fail(kind("another failure"))
        group_to_fail.resources.leave()
    got(array)
    assert time.monotonic() - start < TIMEOUT / 2
    mpi.Barrier()
    expected = CollectiveTimeoutError if how == "a timeout" else DistBackendError
    with pytest.raises(expected, match="another failure"):
        dist.all_reduce(array, group=group_to_fail)


@pytest.mark.parametrize("via", ["call", "barrier", "exception"])
def test_kernel_timeout_fails_the_group_on_all_ranks(arrays, world, monkeypatch, mpi, via):
    """Also on the rank that has not called. The error names the call. Later calls fail."""
    if world.size == 1:
        return
    monkeypatch.setattr(consistency, "FIRST", 1)
    group = dist.new_group(timeout=TIMEOUT)
    mine = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    dist.all_reduce(mine, group=group)
    assert (got(mine) == sum(range(world.size))).all()
    group.timeout, work = 2.0, None
    if world.me:  # rank 0 does not call
        work = dist.all_reduce(mine, group=group, async_op=True)
        while not work.orders[0].is_done():
            time.sleep(0.01)
    mpi.Barrier()
    message = (
        r"all_reduce of 10 elements of float32, SUM, on a device, .*"
        r"rank \d's GPU has waited 2\S* s for rank 0"
    )
    for turn in range(2):
        # The rank that has not called reports only which rank waits for which.
        with pytest.raises(CollectiveTimeoutError, match=message if world.me else message[-30:]):
            observe(via if world.me and not turn else "call", group, mine, work)
    dist.destroy_process_group(group)


def test_kernels_find_a_mismatch_that_the_hosts_have_not_compared(arrays, world):
    if world.size == 1:
        return
    group = dist.new_group(timeout=30)
    array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    for _ in range(3):
        dist.all_reduce(array, group=group)
    found, start = group.resources.find("devices").states["peer"], time.monotonic()
    call = peer._tried(array.memory.address, array.memory.address, world.size)
    found.carry_out(replace(call, starts=[4 * k for k in range(world.size + 1)], call=world.me + 1))
    found.context.synchronize(found.context.work)
    assert time.monotonic() - start < 20, "the kernel was ended by its timeout"
    with pytest.raises(MismatchError, match="collective mismatch"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)
