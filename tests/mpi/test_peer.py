"""The route of GPUs that reach each other's memory, one for each rank: on simulated devices."""

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


class Arrays(simulated.Arrays):
    """Of four devices: each rank has one of its own."""

    devices = 4


@pytest.fixture(scope="module")
def arrays():
    with pytest.MonkeyPatch.context() as patch, forced("auto"):
        made = Arrays()
        patch.setattr(runtime, "_runtime", made.cuda)
        patch.setenv("MPICOLL_CUDA_AWARE", "none")
        # Seams everywhere: several chunks of each block, and both ways for few elements.
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


def taken(group):
    """The routes of a group that has called."""
    return group.resources.find("devices").names


@pytest.mark.parametrize("name", PRIMITIVES)
def test_calls(arrays, teams, name):
    """All that it serves, by the route that mpicoll chooses; any layout, synchronous or not."""
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
                ).complete(async_op)  # fmt: skip
    for team in teams:
        assert team.size == 1 or taken(team.group)[0] == "peer"


def test_blocks_of_different_sizes(arrays, world):
    for dtype in SOME:
        for turn, op in enumerate(legal_operations(dtype)):
            for sizes in ([5, 0, 3, 17], [0, 700, 0, 1], [300, 1, 2000, 40]):
                UnevenDeviceCall(arrays, world, dtype, sizes, op).complete(turn % 2 == 1)
    counts = [5, 0, 300, 17][: world.size]
    given = uploaded(arrays, np.full(counts[world.me], world.me + 1, "i8"), world.me)
    outputs = [uploaded(arrays, np.zeros(count, "i8"), world.me) for count in counts]
    dist.all_gather(outputs, given)
    for rank, output in enumerate(outputs):
        assert (got(output) == rank + 1).all()


def test_the_host_meets_nobody(arrays, world, mpi):
    """A rank goes on while the others have not made the call."""
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


def test_ranks_that_share_a_gpu(arrays, world):
    """Take another route, without a warning."""
    if world.size == 1:
        return
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32))
    dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all()
    assert "peer" not in taken(group)
    why = group.resources.find("devices").describe()["peer"]
    assert why == f"ranks {', '.join(map(str, range(world.size)))} share a GPU"
    dist.destroy_process_group(group)
    with forced("peer"), pytest.raises(UnsupportedError, match="share a GPU; unset it"):
        dist.all_reduce(array, group=dist.new_group())


@pytest.mark.parametrize("kept", [True, False])
def test_workspaces_go_with_their_group(arrays, world, kept):
    """Though the program keeps the group's object, and without the help of the collector."""
    if world.size == 1:
        pytest.skip("one rank goes by another route")
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


# ---- Graphs --------------------------------------------------------------------------------------


def test_graphs(arrays, world):
    """Calls are captured and replayed, among others; nothing happens in the capture itself."""
    if world.size == 1:
        pytest.skip("one rank goes by another route")
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


@pytest.mark.parametrize("how", ["destroy", "a look that waits"])
def test_graphs_that_are_under_way_at_the_end(arrays, world, monkeypatch, mpi, how):
    """Their kernels, which are in no stream of the group's, are done before it gives anything back;
    so they are at the end of the program, which looks whether devices have failed.
    """
    if world.size == 1:
        pytest.skip("one rank goes by another route")
    group = dist.new_group()
    array = uploaded(arrays, np.full(100, world.me, np.float32), world.me)
    dist.all_reduce(array, group=group)
    got(array)
    with arrays.capturing(array) as graph:
        dist.all_reduce(array, group=group)
    monkeypatch.setattr(simulated, "DELAY", 1000.0)  # no kernel begins by itself
    stream, under_way = arrays.cuda._find(world.me, array.number), []
    close = workspaces.Workspaces.close

    def end_of_use(*how):
        under_way.append(stream.end - stream.done)
        arrays.cuda._run(stream, stream.end)  # else the process would end
        mpi.Barrier()
        close(*how)

    monkeypatch.setattr(workspaces.Workspaces, "close", end_of_use)
    mpi.Barrier()
    graph.launch()
    assert stream.end > stream.done
    if how != "destroy":
        group.check_device_errors(wait=True)
        assert stream.end == stream.done
        graph.launch()
        group.device_error = None  # as of a group that is broken
    dist.destroy_process_group(group)
    assert set(under_way) == {0}
    launched = 1 if how == "destroy" else 2
    assert (got(array) == sum(range(world.size)) * world.size**launched).all()


def test_a_capture_right_behind_an_asynchronous_call(arrays, world, monkeypatch):
    """Whose Work has been waited for, while the group's thread still is at its end."""
    if world.size == 1:
        pytest.skip("one rank goes by another route")
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


def test_what_cannot_be_captured(arrays, world):
    """Is refused by name, on all ranks, and the capture goes on."""
    if world.size == 1:
        pytest.skip("one rank goes by another route")
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


# ---- Trouble -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wrong", "late", "cannot be mapped", "fails", "no shared memory"])
def test_a_try_that_fails(arrays, world, monkeypatch, how):
    """All take another route, and the first rank says why."""
    if world.size == 1:
        return
    monkeypatch.setattr(peer, "TRY_LIMIT", TIMEOUT if how == "fails" else 0.3)
    last = world.size - 1
    works = {name: getattr(arrays.cuda, name) for name in ("collective", "open")}
    if world.me == last:
        if how == "wrong":
            monkeypatch.setattr(
                arrays.cuda, "collective",
                lambda i, p, call, s: works["collective"](i, p, replace(call, send=call.recv), s),
            )  # fmt: skip
        elif how == "late":
            monkeypatch.setattr(arrays.cuda, "collective", lambda *what: None)
        elif how == "fails":
            monkeypatch.setattr(arrays.cuda, "collective", lambda *what: 1 / 0)
        elif how == "no shared memory":
            monkeypatch.setattr(arrays.cuda, "register", lambda *what: 1 / 0)
        else:

            def refuse(*what):
                raise RuntimeError("no peer access")

            monkeypatch.setattr(arrays.cuda, "open", refuse)
    group = dist.new_group()
    array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    words = {
        "wrong": "memory is wrong",
        "late": "did not arrive within",
        "fails": f"rank {last}: division by zero|rank 0: another rank failed",
        "no shared memory": f"rank {last}: no memory for the failure word: division",
    }.get(how, "no peer access")
    if world.me == 0:
        with pytest.warns(RuntimeWarning, match=words):
            dist.all_reduce(array, group=group)
    else:
        dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all() and "peer" not in taken(group)
    dist.destroy_process_group(group)


@pytest.fixture
def broken(arrays, world, monkeypatch):
    """A group that has called, and is to be broken."""
    if world.size == 1:
        pytest.skip("a rank waits for nobody")
    monkeypatch.setattr(consistency, "FIRST", 1)  # from then on the hosts do not meet in each call
    group = dist.new_group(timeout=TIMEOUT)
    mine = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    dist.all_reduce(mine, group=group)
    assert (got(mine) == sum(range(world.size))).all()
    yield group
    if group.closed is None:
        dist.destroy_process_group(group)


def finds(look, group, array, work):
    """Looks for the result of a call, in one of the ways of a program."""
    if look == "call":
        dist.all_reduce(array, group=group)
    elif look == "barrier":
        dist.barrier(group=group)
    elif look == "wait":
        work.wait(timeout=TIMEOUT / 2)
    elif look == "future":
        work.get_future().wait()
    elif look == "destroy":
        dist.destroy_process_group(group)
    else:
        assert work.is_completed() and not work.is_success()
        if look == "exception":
            raise work.exception()
        work.synchronize()


@pytest.mark.parametrize(
    "look", ["call", "barrier", "wait", "future", "destroy", "exception", "synchronize"]
)
@pytest.mark.parametrize("how", ["packs", "compiles", "leaves"])
def test_a_rank_that_fails_alone(arrays, world, broken, monkeypatch, mpi, how, look):
    """Before its kernel is in a stream, or it leaves the group: kernels of the others that wait for
    it end at once, and whoever looks for a result, or is late, learns why.
    """
    group, last, begun = broken, world.size - 1, time.monotonic()
    failing = {"packs": "allocate", "compiles": "load_collective"}.get(how)
    array = arrays.make(np.full(50, 1, np.float32), world.me, "third" if how == "packs" else "C")
    array.upload()
    work = None
    if world.me not in (last, 0) or (world.me == 0 and how == "leaves"):  # else 0 has not begun
        work = dist.all_reduce(array, group=group, async_op=True)
    mpi.Barrier()
    if world.me == last and failing:
        works = getattr(arrays.cuda, failing)

        def fails(*what):
            raise RuntimeError("it cannot be done")

        monkeypatch.setattr(arrays.cuda, failing, fails)
        context = group.resources.find(("device", world.me))
        context._blocks, context._since = [], []  # a group keeps its scratch
        with pytest.raises(RuntimeError, match="cannot be done"):
            dist.all_reduce(array, group=group)
        monkeypatch.setattr(arrays.cuda, failing, works)
        with pytest.raises(DistBackendError, match=f"rank {last} failed in call 2"):
            dist.all_reduce(array, group=group)
    elif world.me == last:
        lifecycle.abort(group)
    else:
        while work is not None and not work.orders[0].is_done():
            assert time.monotonic() - begun < TIMEOUT / 2, "it is not the time that ends this"
        mpi.Barrier()
        found = look if work is not None else "call"
        words = f"rank {last} failed in call 2, all_reduce: RuntimeError: it cannot be done"
        with pytest.raises(DistBackendError, match="was aborted" if how == "leaves" else words):
            finds(found, group, array, work)
        if group.closed is None:
            dist.destroy_process_group(group)
    if world.me == last:
        mpi.Barrier()
        if group.closed is None:
            dist.destroy_process_group(group)


def test_whose_failure_it_is(arrays, world, broken, monkeypatch, mpi):
    """That of the call that has ended without its result, of the Futures that come after it, and of
    a wait that has begun before; not that of a Work that is known to have ended well.
    """
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    well = dist.all_reduce(array, group=broken, async_op=True)
    future = well.get_future()
    assert well.wait(TIMEOUT) and (got(array) == world.size).all()
    mpi.Barrier()
    if world.me == 0:
        time.sleep(0.3)  # the others wait by now
        monkeypatch.setattr(arrays.cuda, "load_collective", lambda *what: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(array, group=broken)
    else:
        work = dist.all_reduce(array, group=broken, async_op=True)
        late = work.get_future()
        follows = [late.then(lambda done: None)]
        with pytest.raises(DistBackendError, match="rank 0 failed in call 3"):
            work.wait(TIMEOUT / 2)
        follows.append(late.then(lambda done: None))
        for one in (*follows, follows[0].then(lambda done: None)):
            with pytest.raises(DistBackendError, match="rank 0 failed in call 3"):
                one.wait(TIMEOUT)
    assert well.exception() is None and well.is_success() and well.wait() and well.wait(TIMEOUT)
    assert future.wait(TIMEOUT)[0] is array
    with pytest.raises(DistBackendError, match="rank 0 failed in call 3"):
        dist.all_reduce(array, group=broken)


def test_graphs_end_too(arrays, world, broken, monkeypatch, mpi):
    """Kernels of a graph wait for a rank that fails instead of launching it."""
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    dist.all_reduce(array, group=broken)
    with arrays.capturing(array) as graph:
        dist.all_reduce(array, group=broken)
    mpi.Barrier()  # all have captured it
    begun = time.monotonic()
    if world.me:
        graph.launch()
        got(array)
    else:
        monkeypatch.setattr(arrays.cuda, "load_collective", lambda *what: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(array, group=broken)
    assert time.monotonic() - begun < TIMEOUT / 2
    mpi.Barrier()
    with pytest.raises(DistBackendError, match="rank 0 failed in call 4"):
        dist.all_reduce(array, group=broken)


def test_what_is_refused_ends_nothing(arrays, world, broken):
    """On all ranks alike; no kernel waits."""
    third = arrays.make(np.ones(50, np.float32), world.me, "third")
    third.upload()
    with arrays.capturing(third), pytest.raises(UnsupportedError, match="captured"):
        dist.all_reduce(third, group=broken)
    dist.all_reduce(third, group=broken)
    assert (got(third) == world.size).all()


@pytest.mark.parametrize("how", ["a timeout", "an error"])
def test_a_group_that_is_broken(arrays, world, broken, mpi, how):
    """By whatever, on one rank: kernels that wait for it end, with an error of that kind."""
    array = uploaded(arrays, np.full(50, 1, np.float32), world.me)
    begun, kind = time.monotonic(), CollectiveTimeoutError if how == "a timeout" else MPIError
    if world.me:
        dist.all_reduce(array, group=broken)
    mpi.Barrier()
    if world.me == 0:
        broken.fail(kind("something else has gone wrong"))
        broken.resources.leave()
    got(array)
    assert time.monotonic() - begun < TIMEOUT / 2
    mpi.Barrier()
    expected = CollectiveTimeoutError if how == "a timeout" else DistBackendError
    with pytest.raises(expected, match="something else has gone wrong"):
        dist.all_reduce(array, group=broken)


@pytest.mark.parametrize("look", ["call", "barrier", "exception"])
def test_ranks_that_give_up(arrays, world, monkeypatch, mpi, look):
    """All learn it, also who has not called, with the name of the call; the group is of no use any
    more.
    """
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
    words = (
        r"all_reduce of 10 elements of float32, SUM, on a device, .*"
        r"rank \d's GPU has waited 2\S* s for rank 0"
    )
    for turn in range(2):
        # The rank that has not called knows no such call, but who waits for whom.
        with pytest.raises(CollectiveTimeoutError, match=words if world.me else words[-30:]):
            finds(look if world.me and not turn else "call", group, mine, work)
    dist.destroy_process_group(group)


def test_calls_that_differ(arrays, world):
    """The kernels compare what the hosts have not."""
    if world.size == 1:
        return
    group = dist.new_group(timeout=30)
    array = uploaded(arrays, np.full(10, world.me, np.float32), world.me)
    for _ in range(3):
        dist.all_reduce(array, group=group)
    found, begun = group.resources.find("devices").states["peer"], time.monotonic()
    call = peer._tried(array.memory.address, array.memory.address, world.size)
    found.carry_out(replace(call, starts=[4 * k for k in range(world.size + 1)], call=world.me + 1))
    found.context.synchronize(found.context.work)
    assert time.monotonic() - begun < 20, "it is not the time that has ended this"
    with pytest.raises(MismatchError, match="collective mismatch"):
        dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)
