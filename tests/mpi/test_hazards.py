"""Known hazards of MPI programs: mpicoll gives a correct result or an error.

After a failure, or calls in an unusual order, the next call is correct.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from conftest import check_usable, needs_2_ranks, on_2_ranks, run_threads
from mpi4py import MPI

import mpicoll as dist
from mpicoll.routes.host import select


@pytest.fixture
def pair(world):
    """A new group of all ranks, for tests that count its calls or leave it failed."""
    if world.size == 1:
        pytest.skip("needs 2 ranks")
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def brief(pair):
    """A new group of all ranks with a timeout of 0.5 s."""
    pair.timeout = 0.5
    return pair


def test_threads_with_separate_groups_run_concurrently(world):
    """As api.md recommends. The ranks start their threads in different orders."""
    groups = [dist.new_group() for _ in range(4)]
    wrong = []

    def work(i):
        try:
            for turn in range(30):
                x = np.full(1000, 100.0 * i + turn)
                dist.all_reduce(x, group=groups[i])
                assert (x == (100 * i + turn) * world.size).all()
                y = np.full(1000, world.me + i, ml_dtypes.bfloat16)
                dist.all_reduce(y, dist.ReduceOp.MAX, group=groups[i])
                assert (y == world.size - 1 + i).all()
                objects = [(i, turn)] if world.me == turn % world.size else [None]
                dist.broadcast_object_list(objects, turn % world.size, groups[i])
                assert objects == [(i, turn)]
        except BaseException as error:
            wrong.append(error)

    run_threads(*(partial(work, (i + world.me) % 4) for i in range(4)))
    assert not wrong
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.any_mpi
@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_missing_ranks(pair, world, mpi, wait_all):
    late = list(range(1, world.size))
    for _ in range(2):  # messages left over from the first call must not count in the second
        mpi.Barrier()
        if world.me in late:
            time.sleep(1.5)
            with pytest.raises(RuntimeError, match="monitored_barrier"):
                dist.monitored_barrier(pair, timeout=20, wait_all_ranks=wait_all)
        else:
            named = ", ".join(map(str, late)) if wait_all else "1"
            with pytest.raises(
                RuntimeError, match=rf"Ranks? {named} failed to pass.*did not arrive"
            ):
                dist.monitored_barrier(pair, timeout=0.5, wait_all_ranks=wait_all)
        mpi.Barrier()
        dist.monitored_barrier(pair, timeout=30)


@pytest.mark.any_mpi
def test_monitored_barrier_names_a_missing_rank_0(pair, world, mpi):
    if world.me == 0:
        mpi.Barrier()
    else:
        with pytest.raises(dist.CollectiveTimeoutError, match="rank 0"):
            dist.monitored_barrier(pair, timeout=0.1)
        mpi.Barrier()


def test_ranks_may_join_after_a_barrier_timed_out(pair, world, mpi):
    if world.me == 0:
        with pytest.raises(TimeoutError, match="barrier"):
            dist.barrier(pair, timeout=0.3)
    mpi.Barrier()
    if world.me:
        dist.barrier(pair)
    check_usable(pair)


@needs_2_ranks
def test_unreceived_messages_are_drained_when_a_group_is_destroyed(world, mpi):
    """Otherwise MPI could deliver them to a later group that reuses the communicator's context."""
    group = dist.new_group()
    for comm, nbytes in ((group.inner, 16), (group.messages, 8)):
        if world.me == 1:
            comm.Isend(np.ones(nbytes, np.uint8), 0, 1).Free()
    mpi.Barrier()
    dist.destroy_process_group(group)
    later = [dist.new_group() for _ in range(3)]
    for one in later:
        for comm in (one.inner, one.messages):
            assert not comm.Iprobe(0 if world.me else 1, 1)
    for one in later:
        dist.destroy_process_group(one)


def test_timed_out_receive_does_not_match_a_later_message(brief, world, mpi):
    if world.me == 0:
        dropped, kept = np.zeros(3), np.zeros(3)
        with pytest.raises(dist.CollectiveTimeoutError, match="recv"):
            dist.recv(dropped, 1, group=brief)
        mpi.Barrier()
        assert dist.recv(kept, 1, group=brief) == 1
        assert (kept == 7).all() and not dropped.any()
    else:
        mpi.Barrier()
        if world.me == 1:
            dist.send(np.full(3, 7.0), 0, group=brief)


def test_timed_out_send_is_delivered_intact(brief, world, mpi):
    if MPI.get_vendor()[0] == "Intel MPI":
        pytest.skip("it buffers messages of any size")
    count = 1 << 22  # large enough that every other MPI waits for the receiver
    if world.me == 0:
        with pytest.raises(dist.CollectiveTimeoutError, match="send"):
            dist.send(np.full((count, 2), 7.0)[:, 0], 1, group=brief)
        rubbish = [np.full(count, 3.0) for _ in range(4)]  # overwrites the memory of a freed copy
        mpi.Barrier()
        del rubbish
    else:
        mpi.Barrier()
        if world.me == 1:
            x = np.zeros(count)
            dist.recv(x, 0, group=brief)
            assert (x == 7).all()
    mpi.Barrier()


def test_calls_of_callbacks_run_before_later_calls(world):
    """A slow callback on one rank must not let the calls of its main thread run first."""
    group = dist.new_group()
    for i in range(60):
        x, y, z = np.ones(2), np.full(2, 1.0), np.full(2, 100.0)

        def call(_, y=y):
            if world.me == 0:
                time.sleep(0.002)
            dist.all_reduce(y, group=group)

        # A pending call gives all ranks time to add their callback.
        first = dist.all_reduce(np.ones(200000), group=group, async_op=True)
        work = dist.all_reduce(x, group=group, async_op=True)
        after = work.get_future().then(call)
        first.wait()
        work.wait()
        dist.all_reduce(z, group=group)
        after.wait()
        assert (y == world.size).all() and (z == 100 * world.size).all(), i
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", ["coalesced", "barrier", "async", "objects"])
def test_callbacks_may_make_blocking_calls(world, name):
    y, found = np.ones(2), [None] * world.size
    calls = {
        "coalesced": lambda: dist.all_reduce_coalesced([y]),
        "barrier": lambda: dist.barrier(timeout=20),
        "async": lambda: dist.all_reduce(y, async_op=True).wait(),
        "objects": lambda: dist.all_gather_object(found, world.me),
    }
    first = dist.all_reduce(np.ones(200000), async_op=True)
    first.get_future().then(lambda _: calls[name]()).wait(20)
    assert (y == (world.size if name in ("coalesced", "async") else 1)).all()
    assert found == (list(range(world.size)) if name == "objects" else [None] * world.size)


@on_2_ranks
def test_shorter_block_than_expected_raises(world):
    """Rank 1 expects two rows and rank 0 sends one. Only shared memory reports it to the sender."""
    shares = select.place(dist.group.WORLD) == "node"
    if world.me == 0:
        words = "other ranks' block sizes differ"
        with pytest.raises(dist.MismatchError, match=words) if shares else nullcontext():
            dist.all_to_all_single(np.zeros(2), np.ones(2), [1, 1], [1, 1])
    else:
        with pytest.raises(dist.MismatchError, match="expected 2 elements from rank 0"):
            dist.all_to_all_single(np.zeros(3), np.ones(2), [2, 1], [1, 1])
    check_usable()


def test_broadcast_root_may_pass_a_read_only_array(world):
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


class Matrix(np.ndarray):
    """Stays two-dimensional after reshape, as numpy.matrix does."""

    def reshape(self, *shape):
        return super().reshape(1, -1)


def test_ndarray_subclasses_are_treated_as_arrays(world):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN):
        for dtype in (np.float16, np.float32):
            x = np.full((2, 3), world.me + 1, dtype).view(Matrix)
            dist.all_reduce(x, op)
            expected = sum(range(1, world.size + 1)) if op is dist.ReduceOp.SUM else 1
            assert x.shape == (2, 3) and (np.asarray(x) == expected).all()


def test_average_of_complex_infinity(world):
    x = np.array([complex(np.inf, 0), 2 + 4j], np.complex64)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x[0].real == np.inf and x[0].imag == 0 and x[1] == 2 + 4j


def test_timeout_of_monitored_barrier_may_exceed_the_group_timeout(brief, world):
    """The group timeout is 0.5 s, and the watchdog thread polls every second."""
    if world.me == 0:
        time.sleep(2.5)
    dist.monitored_barrier(brief, timeout=30)
