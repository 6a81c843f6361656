"""After something went wrong, or came in an unusual order, the next call is right."""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll as dist
from mpicoll.failures import consistency
from mpicoll.routes.host import select


@pytest.fixture
def pair(world):
    """A new group of all ranks, two at least, with a short timeout."""
    if world.size == 1:
        pytest.skip("takes two ranks")
    group = dist.new_group(timeout=0.5)
    yield group
    if group.closed is None:
        dist.destroy_process_group(group)


# ---- messages that time out --------------------------------------------------------------------


def test_a_receive_that_timed_out_takes_no_later_message(pair, world, mpi):
    if world.me == 0:
        dropped, kept = np.zeros(3), np.zeros(3)
        with pytest.raises(dist.CollectiveTimeoutError, match="recv"):
            dist.recv(dropped, 1, group=pair)
        mpi.Barrier()
        assert dist.recv(kept, 1, group=pair) == 1
        assert (kept == 7).all() and not dropped.any()
    else:
        mpi.Barrier()
        if world.me == 1:
            dist.send(np.full(3, 7.0), 0, group=pair)


def test_a_send_that_timed_out_arrives_whole(pair, world, mpi):
    if MPI.get_vendor()[0] == "Intel MPI":
        pytest.skip("it takes any message before its receiver is there, which calls MPI meanwhile")
    count = 1 << 22  # so much that every other MPI waits for the receiver
    if world.me == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match="send"):
            dist.send(np.full((count, 2), 7.0)[:, 0], 1, group=pair)
        rubbish = [np.full(count, 3.0) for _ in range(4)]  # where a freed copy was
        mpi.Barrier()
        del rubbish
    else:
        mpi.Barrier()
        if world.me == 1:
            x = np.zeros(count)
            dist.recv(x, 0, group=pair)
            assert (x == 7).all()
    mpi.Barrier()


# ---- callbacks ---------------------------------------------------------------------------------


def test_what_a_callback_calls_comes_before_what_queues_behind(world):
    """The slower callback of one rank must not let its main thread go first."""
    group = dist.new_group()
    for i in range(60):
        x, y, z = np.ones(2), np.full(2, 1.0), np.full(2, 100.0)

        def call(_, y=y):
            if world.me == 0:
                time.sleep(0.002)
            dist.all_reduce(y, group=group)

        # Something pending in front, so that all ranks have their callback in place in time.
        first = dist.all_reduce(np.ones(200000), group=group, async_op=True)
        work = dist.all_reduce(x, group=group, async_op=True)
        after = work.get_future().then(call)
        first.wait()
        work.wait()
        dist.all_reduce(z, group=group)
        after.wait()
        assert (y == world.size).all() and (z == 100 * world.size).all(), i
    dist.destroy_process_group(group)


@pytest.mark.parametrize("way", ["coalesced", "barrier", "async", "objects"])
def test_a_callback_may_wait(world, way):
    y, found = np.ones(2), [None] * world.size

    def call(_):
        if way == "coalesced":
            dist.all_reduce_coalesced([y])
        elif way == "barrier":
            dist.barrier(timeout=20)
        elif way == "objects":
            dist.all_gather_object(found, world.me)
        else:
            dist.all_reduce(y, async_op=True).wait()
        return way

    first = dist.all_reduce(np.ones(200000), async_op=True)
    after = first.get_future().then(call)
    assert after.wait(20) == way
    assert (y == (world.size if way in ("coalesced", "async") else 1)).all()
    assert found == (list(range(world.size)) if way == "objects" else [None] * world.size)


# ---- blocks and shapes -------------------------------------------------------------------------


def test_a_block_that_is_shorter_than_expected(world):
    """Two rows expected of rank 0, which sends one; the sender hears of it through memory alone."""
    if world.size != 2:
        pytest.skip("on two ranks")
    shares = select.place(dist.group.WORLD) == "node"
    if world.me == 0:
        words = "other ranks' block sizes differ"
        with pytest.raises(dist.MismatchError, match=words) if shares else nullcontext():
            dist.all_to_all_single(np.zeros(2), np.ones(2), [1, 1], [1, 1])
    else:
        with pytest.raises(dist.MismatchError, match="expected 2 elements from rank 0"):
            dist.all_to_all_single(np.zeros(3), np.ones(2), [2, 1], [1, 1])
    x = np.ones(2)
    dist.all_reduce(x)
    assert (x == 2).all()


def test_lists_of_other_shapes_are_refused(world):
    x = np.zeros((2, 3))
    for call, name in (
        (lambda: dist.gather(x, [np.zeros((3, 2))] * world.size), "gather_list"),
        (lambda: dist.scatter(x, [np.zeros((6, 1))] * world.size), "scatter_list"),
    ):
        if world.me == 0:
            with pytest.raises(ValueError, match=rf"{name}.*different shapes"):
                call()


def test_the_root_of_a_broadcast_may_be_read_only(world):
    for shape in ((4,), (2, 2)):
        x = np.full(shape, world.me + 5.0).T
        if world.me == 0:
            x.flags.writeable = False
        dist.broadcast(x, 0)
        assert (x == 5).all()
        y = np.ones(shape)
        y.flags.writeable = world.me == 0
        dist.reduce(y, 0)
        assert (y == (world.size if world.me == 0 else 1)).all()
    if world.me != 0:
        with pytest.raises(ValueError, match="read-only"):
            y = np.ones(2)
            y.flags.writeable = False
            dist.broadcast(y, 0)


class Matrix(np.ndarray):
    """Stays two-dimensional whatever is done with it, as numpy.matrix does."""

    def reshape(self, *shape):
        return super().reshape(1, -1)


def test_subclasses_of_numpy_are_plain_arrays(world):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN):
        for dtype in (np.float16, np.float32):
            x = np.full((2, 3), world.me + 1, dtype).view(Matrix)
            dist.all_reduce(x, op)
            expected = sum(range(1, world.size + 1)) if op is dist.ReduceOp.SUM else 1
            assert x.shape == (2, 3) and (np.asarray(x) == expected).all()


def test_infinity_has_a_mean(world):
    x = np.array([complex(np.inf, 0), 2 + 4j], np.complex64)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x[0].real == np.inf and x[0].imag == 0 and x[1] == 2 + 4j


# ---- watching ----------------------------------------------------------------------------------


def test_a_level_that_is_set_holds_from_the_next_comparison(world):
    """Not from the next call: ranks that set it in different places would wait for each other."""
    if world.size == 1:
        pytest.skip("takes two ranks")
    group = dist.new_group()
    for _ in range(70):
        dist.barrier(group)
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for _ in range(consistency.STRIDE):
            dist.barrier(group)
        op = dist.ReduceOp.PRODUCT if world.me == 1 else dist.ReduceOp.SUM
        with pytest.raises(dist.MismatchError, match="PRODUCT"):
            dist.all_reduce(np.ones(2), op, group=group)
    finally:
        dist.set_debug_level(before)
    dist.destroy_process_group(group)


def test_a_monitored_barrier_may_take_longer_than_the_group(pair, world):
    """The group's timeout is half a second; the watchdog checks every second."""
    if world.me == 0:
        time.sleep(2.5)
    dist.monitored_barrier(pair, timeout=30)


# ---- groups ------------------------------------------------------------------------------------


def test_a_group_whose_end_timed_out_goes_on(world, mpi, monkeypatch):
    if world.size == 1:
        pytest.skip("takes two ranks")
    from mpicoll.api import lifecycle

    group = dist.new_group()
    x, y = np.ones(2), np.ones(2)
    if world.me == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        with pytest.raises(dist.CollectiveTimeoutError, match="still pending"):
            lifecycle.close_group(group, 0.2)
        mpi.Barrier()
    else:
        mpi.Barrier()
        work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    dist.all_reduce(y, group=group, async_op=True).wait(20)
    assert (x == world.size).all() and (y == world.size).all()
    dist.destroy_process_group(group)


def test_groups_of_the_same_ranks_are_told_apart(world):
    before = dist.get_pg_count()
    first = dist.new_group([world.me], use_local_synchronization=True)
    second = dist.new_group([world.me], use_local_synchronization=True)
    dist.destroy_process_group(first)
    third = dist.new_group([world.me], use_local_synchronization=True)
    assert second.group_name != third.group_name
    assert dist.get_pg_count() == before + 2
    dist.destroy_process_group(second)
    dist.destroy_process_group(third)
    dist.barrier()
