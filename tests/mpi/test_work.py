"""Asynchronous calls: order, progress, lifetime, and the methods of Work and Future."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from conftest import members, needs_2_ranks
from driver import NAMES, Call, legal_operations, wait_for_all

import mpicoll as dist
from mpicoll.dispatch import execute
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import Layout

#: Timeout in seconds for any step here, even on a busy machine.
DEADLINE = 60


def until(condition):
    """Compute in Python until ``condition`` holds. Makes no other mpicoll call."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert sum(range(100)) == 4950
        assert time.monotonic() < end, "no progress"


def test_synchronous_and_async_calls_keep_their_order(teams):
    """Each call reads the output of the previous call."""
    for team in members(teams):
        n, root = team.size, team.size - 1
        for way in range(8):
            x = np.full(1001, team.me + 1.0)
            dist.all_reduce(x, group=team.group, async_op=bool(way & 1))  # 1 + ... + n
            if team.me != root and way & 2:  # ranks may differ in async_op
                dist.broadcast(x, group_src=root, group=team.group, async_op=True)
            else:
                dist.broadcast(x, group_src=root, group=team.group)
            work = dist.all_reduce(x, ReduceOp.MAX, team.group, async_op=bool(way & 4))
            last = dist.all_reduce(x, group=team.group, async_op=True)
            last.wait()
            assert work is None or work.is_completed()
            assert (x == n * n * (n + 1) / 2).all()


def test_chain_of_all_primitives(world):
    """Each call uses the output of the previous call, without waiting."""
    n, me = world.size, world.me
    x = np.arange(n, dtype=np.int64) + 10 * me
    whole, back = np.zeros(n * n, np.int64), np.zeros(n, np.int64)
    dist.all_gather_single(whole, x, async_op=True)  # whole[r n + i] = i + 10 r
    dist.all_reduce(whole, async_op=True)  # times n
    dist.reduce_scatter_single(back, whole, async_op=True)  # times n again, row me
    dist.barrier(async_op=True)
    dist.broadcast(back, 0, async_op=True)  # row 0
    turned = np.zeros(n, np.int64)
    dist.all_to_all_single(turned, back, async_op=True)  # of each rank element me
    parts = [np.zeros(1, np.int64) for _ in range(n)]
    dist.all_gather(parts, turned[:1], async_op=True)  # of each rank r element r of row 0
    dist.scatter(turned[:1], parts if me == n - 1 else None, n - 1, async_op=True)
    dist.reduce(turned, 0, async_op=True)
    dist.all_reduce(turned[:0])  # synchronous: runs after all pending calls
    assert [int(part[0]) for part in parts] == [n * n * r for r in range(n)]
    assert (back == n * n * np.arange(n)).all()
    if me == 0:
        assert turned.tolist() == [n * n * sum(range(n))] * n
    else:
        assert turned.tolist() == [n * n * me] * n


def test_hundreds_of_pending_calls(world):
    """Wait for a part of them, in any order."""
    n = world.size
    arrays = [np.full(64, float(i)) for i in range(400)]
    works = [dist.all_reduce(one, async_op=True) for one in arrays]
    for work in [*works[300:], *works[299::-2], works[1]]:
        assert work.wait() is True
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all((one == i * n).all() for i, one in enumerate(arrays))


@needs_2_ranks
def test_groups_make_progress_independently(teams, mpi):
    """A pending call on one group does not block calls on another."""
    world, *_, reordered = teams
    x, y = np.ones(3), np.ones(3)
    early = dist.all_reduce(x, async_op=True) if world.me else None
    dist.all_reduce(y, group=reordered.group)  # returns before rank 0 has joined the pending call
    assert (y == world.size).all()
    assert early is None or not early.is_completed()
    wait_for_all(mpi)
    (early or dist.all_reduce(x, async_op=True)).wait()
    assert (x == world.size).all()


@pytest.mark.parametrize("count", [1, 2**20])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_collectives_progress_while_python_computes(world, name, count):
    """No rank calls wait."""
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        call = Call("all_reduce", world, by_name[name], count, op)
        work = call.start(async_op=True)
        until(work.is_completed)
        call.check()


def test_messages_progress_while_python_computes(world):
    after, before = (world.me + 1) % world.size, (world.me - 1) % world.size
    for count in (1, 2**20):
        got = np.zeros(count)
        works = [dist.irecv(got, before), dist.isend(np.arange(count) + float(world.me), after)]
        until(lambda works=works: all(work.is_completed() for work in works))
        assert (got == np.arange(count) + before).all()


class Owner(np.ndarray):
    """An array that supports weak references."""


def test_dropped_works_complete_and_are_collected(world):
    """The caller keeps neither the Work nor the array. Other ranks still receive the data."""
    refs = []
    for i in range(30):
        x = np.full(50000, i + 1.0).view(Owner)
        refs.append(weakref.ref(x))
        work = dist.all_reduce(x, async_op=True)
        refs.append(weakref.ref(work))
        del x, work
        gc.collect(0)
    out = np.zeros(world.size * 50000)
    for i in range(10):
        dist.all_gather_single(out, np.full(50000, i + 10.0 * world.me), async_op=True)
    dist.barrier()
    for r in range(world.size):
        assert (out[r * 50000 : (r + 1) * 50000] == 9 + 10 * r).all()

    def gone():
        gc.collect()
        return all(ref() is None for ref in refs)

    until(gone)


@pytest.fixture
def late(world, mpi):
    """A call that rank 0 joins late: the Work, the array, and a function that lets rank 0 join."""
    x = np.full(5, 2.0)
    works = [dist.all_reduce(x, async_op=True)] if world.me else []

    def join():
        wait_for_all(mpi)
        if not works:
            works.append(dist.all_reduce(x, async_op=True))
        return works[0]

    yield works[0] if works else None, x, join
    dist.barrier()


def test_wait_times_out_and_can_be_repeated(world, late):
    """The call continues after the timeout."""
    work, x, join = late
    if work is not None:
        for timeout in (0.05, timedelta(milliseconds=20)):
            start = time.monotonic()
            with pytest.raises(dist.CollectiveTimeoutError, match=r"all_reduce on rank .*within"):
                work.wait(timeout)
            assert time.monotonic() - start >= 0.02
        with pytest.raises(TimeoutError):
            work.get_future().wait(0.01)
        assert not work.is_completed() and not work.is_success()
        assert work.exception() is None
        assert "pending" in repr(work)
    work = join()
    assert work.wait(timedelta(seconds=DEADLINE)) is True
    assert work.wait() is True and work.wait(0) is True
    assert (x == 2 * world.size).all()
    assert "done" in repr(work)
    for wrong in ("1", [1], True):
        with pytest.raises(TypeError, match="timeout"):
            work.wait(wrong)
    with pytest.raises(ValueError, match="timeout"):
        work.wait(-1)


def test_work_returns_the_outputs(teams):
    """For every primitive with arrays: the objects that were passed."""
    for team in members(teams):
        for name, row in NAMES.items():
            if row.layout is Layout.EMPTY:
                continue
            dtype = by_name["float32"]
            call = Call(name, team, dtype, 3, legal_operations(dtype)[0] if row.reduces else None)
            work = call.start(async_op=True)
            assert work.wait() is True
            assert work.is_completed() and work.is_success() and work.exception() is None
            work.synchronize()
            work.block_current_stream()
            given = call.arguments.get(row.output)
            outputs = given if isinstance(given, list) else [] if given is None else [given]
            for found in (work.result(), work.get_future().wait(), work.get_future().value()):
                assert isinstance(found, list) and len(found) == len(outputs)
                assert all(a is b for a, b in zip(found, outputs, strict=True))
            with pytest.raises(ValueError, match="source rank"):
                work.source_rank()
            call.check()


def test_future_callbacks_run_once(world, late):
    """After the result is available, or at once if the Future is done."""
    work, x, join = late
    seen = []
    if work is not None:
        future = work.get_future()
        assert future is work.get_future() and not future.done()
        with pytest.raises(ValueError, match="not available yet"):
            future.value()
        before = future.then(lambda done: done.value()[0].sum())
        twice = before.then(lambda done: 2 * done.value())
        future.add_done_callback(lambda done: seen.append(done.value()[0][0]))
    work = join()
    future = work.get_future()
    total = 10.0 * world.size
    assert future.wait()[0] is x
    after = future.then(lambda done: done.value()[0].sum())
    assert after.done() and after.value() == total == after.wait()
    if world.me:
        assert before.wait(DEADLINE) == total and twice.wait(DEADLINE) == 2 * total
        until(lambda: seen)
        assert seen == [2.0 * world.size]
    future.add_done_callback(lambda done: seen.append("now"))
    assert seen[-1] == "now"


def test_exceptions_in_callbacks_do_not_fail_the_work(world, capsys):
    """An exception in ``then`` is stored in its Future; in a done callback it is printed."""

    def fail(done):
        raise KeyError("from a callback")

    for _ in range(2):
        x = np.ones(2)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future()
        broken = future.then(fail)
        after = broken.then(lambda done: done.value())
        rescued = broken.then(lambda done: "rescued")
        with pytest.raises(KeyError, match="from a callback"):
            broken.wait(DEADLINE)
        with pytest.raises(KeyError, match="from a callback"):
            after.wait(DEADLINE)
        assert rescued.wait(DEADLINE) == "rescued"
        assert work.wait() and future.wait(DEADLINE)[0] is x
        assert (x == world.size).all()
        future.add_done_callback(lambda done: None)
    own = dist.Future()
    own.add_done_callback(fail)
    own.set_result(1)
    assert own.value() == 1 and "KeyError: 'from a callback'" in capsys.readouterr().err


def test_user_created_futures():
    """A Future completes once, and wakes up waiting threads."""
    future = dist.Future()
    found = []
    thread = threading.Thread(target=lambda: found.append(future.wait(DEADLINE)))
    thread.start()
    future.set_result(7)
    thread.join(DEADLINE)
    assert found == [7] and future.done()
    with pytest.raises(ValueError, match="already has a value"):
        future.set_result(8)
    failed = dist.Future()
    failed.set_exception(OSError("gone"))
    for ask in (failed.wait, failed.value):
        with pytest.raises(OSError, match="gone"):
            ask()


def test_callback_may_wait_for_a_later_work(world):
    """Callbacks run on the progress thread, which then runs the later call first."""
    started = threading.Event()
    execute.submit(world.group, lambda: started.wait(DEADLINE) and None, "held up", ())
    first = dist.all_reduce(np.ones(2), async_op=True)
    later = []

    def wait(done):
        return later[0].wait()

    future = first.get_future().then(wait)
    y = np.ones(3)
    later.append(dist.all_reduce(y, async_op=True))
    third = dist.all_reduce(np.ones(1), async_op=True)
    started.set()
    assert future.wait(DEADLINE) is True
    assert (y == world.size).all()
    third.wait(DEADLINE)
