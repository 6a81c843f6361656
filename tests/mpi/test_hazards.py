"""Known hazards of MPI programs: mpicoll gives a correct result or an error."""

from __future__ import annotations

import time
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from conftest import needs_2_ranks, run_threads

import mpicoll as dist


@pytest.fixture
def pair(world):
    """A new group of all ranks, for tests that count its calls or leave it failed."""
    if world.size == 1:
        pytest.skip("needs 2 ranks")
    group = dist.new_group()
    yield group
    dist.destroy_process_group(group)


X = np.float32


def differing(me):
    """Collective mismatches by case: this rank's call, and a part of the error message."""
    last = me == 1
    root = 1 if last else 0
    mpi_sum, mpi_max = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    ones = lambda count=4, dtype=X: np.ones(count, dtype)  # noqa: E731

    def or_all_reduce(call):
        return call if last else lambda g: dist.all_reduce(ones(), group=g)

    return {
        "count": (lambda g: dist.all_reduce(ones(5 if last else 4), group=g), "5 elements"),
        "dtype": (lambda g: dist.all_reduce(ones(4, np.int32 if last else X), group=g), "of int32"),
        "op": (lambda g: dist.all_reduce(ones(), mpi_max if last else mpi_sum, group=g), "MAX"),
        "root": (lambda g: dist.broadcast(ones(), root, group=g), "src 1"),
        "primitive": (or_all_reduce(lambda g: dist.broadcast(ones(), 0, group=g)), "broadcast"),
        "barrier": (or_all_reduce(dist.barrier), "barrier"),
        "objects": (
            or_all_reduce(lambda g: dist.broadcast_object_list([1], 0, group=g)),
            "broadcast_object_list",
        ),
    }


@pytest.mark.parametrize("case", differing(0))
def test_collective_mismatch_raises_on_all_ranks(pair, world, case):
    call, word = differing(world.me)[case]
    with pytest.raises(dist.MismatchError, match="collective mismatch") as caught:
        call(pair)
    text = str(caught.value)
    assert word in text and "rank 1:" in text, text
    after = np.ones(3)
    dist.all_reduce(after, group=pair)  # no data is left over from the failed calls
    assert (after == world.size).all()


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


def test_ranks_may_join_after_barrier_or_wait_timed_out(pair, world, mpi):
    if world.me == 0:
        with pytest.raises(TimeoutError, match="barrier"):
            dist.barrier(pair, timeout=0.3)
        work = dist.all_reduce(np.ones(2), group=pair, async_op=True)
        with pytest.raises(dist.CollectiveTimeoutError, match=r"not complete within 0\.2"):
            work.wait(0.2)
        assert not work.is_completed()
        mpi.Barrier()
        assert work.wait(30)
    else:
        mpi.Barrier()
        dist.barrier(pair)
        dist.all_reduce(np.ones(2), group=pair)


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
