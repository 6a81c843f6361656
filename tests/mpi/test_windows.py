"""Windows: puts, signals, argument errors, timeouts and destruction.

Data depends on the sender's rank, so each rank can compute the data that it should receive.
"""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta

import numpy as np
import pytest
from conftest import members, needs_2_ranks, team

import mpicoll as dist
from mpicoll.api import windows
from mpicoll.api.windows import Window
from mpicoll.dtypes import DTYPES


def numbers(rank, count, dtype=np.float64, turn=0):
    """The data that a rank puts: different for each rank, index and turn."""
    return ((np.arange(count) * 7 + 13 * rank + 3 * turn) % 120).astype(dtype)


@pytest.fixture
def new_window(world):
    """Create windows, ``new_window(memory, group=the default group)``, for one test."""
    made = []

    def create(memory, group=world.group):
        made.append(Window(group))
        made[-1].register(memory)
        return made[-1]

    yield create
    for window in made:
        window.deregister()


@pytest.fixture
def window(world, new_window):
    """A window of 1000 float64 per rank, this rank's memory, the next and the previous rank."""
    memory = np.full(1000, -1.0)
    return new_window(memory), memory, (world.me + 1) % world.size, (world.me - 1) % world.size


@pytest.mark.parametrize("async_op", [False, True])
def test_puts_in_a_ring(teams, new_window, async_op):
    """Each rank repeatedly puts its data into its own part of the next rank's memory."""
    for one in members(teams):
        n, me, count = one.size, one.me, 33
        left, right = (me - 1) % n, (me + 1) % n
        memory = np.full(n * count, -1, np.int32)
        window = new_window(memory, one.group)
        for turn in range(5):
            works = [
                window.put(numbers(me, count, np.int32, turn), right, me * count, async_op),
                window.signal(right, async_op),
                window.wait_signal(left, async_op),
            ]
            for work in works:
                assert work is None or work.wait()
            expected = np.full(n * count, -1, np.int32)
            expected[left * count : (left + 1) * count] = numbers(left, count, np.int32, turn)
            assert (memory == expected).all()
            dist.barrier(one.group)  # keeps the next turn's put out of the comparison


def test_puts_between_all_pairs_of_ranks(world, new_window):
    """Windows have different sizes and shapes. Memory outside the puts is unchanged."""
    n, me = world.size, world.me
    memory = np.full((n, 5 + me), -1, np.int64)
    window = new_window(memory)
    for r in range(n):
        window.put(numbers(me, 5 + r, np.int64).reshape(-1, 1), r, me * (5 + r), False)
        window.signal(r, False)
    for r in range(n):
        window.wait_signal(r, False)
    for r in range(n):
        assert (memory[r] == numbers(r, 5 + me, np.int64)).all()


@pytest.mark.parametrize("row", DTYPES, ids=repr)
def test_dtypes(world, new_window, row):
    size = row.itemsize
    source = (np.arange(10 * size) % 2).astype(np.uint8)  # bytes that are also valid bools
    memory = np.zeros(12 * size, np.uint8)
    window = new_window(memory.view(row.numpy))
    peer = (world.me + 1) % world.size
    window.put(source.view(row.numpy), peer, 2, False)
    window.signal(peer, False)
    window.wait_signal((world.me - 1) % world.size, False)
    assert memory.tolist() == [0] * (2 * size) + [i % 2 for i in range(10 * size)]


def test_noncontiguous_and_empty_puts(world, window):
    """A noncontiguous array is put in index order; an empty array may have any offset."""
    made, memory, right, left = window
    made.put(numbers(world.me, 60).reshape(6, 10).T[::2], right, 100, False)
    made.put(np.empty(0), right, 1000, False)
    made.signal(right, False)
    made.wait_signal(left, False)
    expected = np.full(1000, -1.0)
    for i in range(5):
        for j in range(6):
            expected[100 + 6 * i + j] = (7 * (10 * j + 2 * i) + 13 * left) % 120
    assert (memory == expected).all()


@needs_2_ranks
def test_puts_complete_while_the_target_computes(world, window, new_window):
    """The target makes no call. Also for a large put."""
    made, memory, *_ = window
    large = np.zeros(1 << 20)
    second = new_window(large)
    store = world.size - 1
    if world.me == 0:
        made.put(numbers(0, 1000), store, 0, False)
        second.put(numbers(0, 1 << 20), store, 0, False)
        made.signal(store, False)
    if world.me == store:
        end = time.monotonic() + 60
        while large[-1] != numbers(0, 1 << 20)[-1] or memory[-1] != numbers(0, 1000)[-1]:
            assert sum(range(100)) == 4950
            assert time.monotonic() < end, "no progress"
        made.wait_signal(0, False)
        assert (large == numbers(0, 1 << 20)).all()
        assert (memory == numbers(0, 1000)).all()


def test_puts_and_signals_while_waits_are_pending(world, window):
    """Waits complete in their order."""
    made, memory, right, left = window
    waits = [made.wait_signal(left, True) for _ in range(3)]
    for turn in range(3):
        made.put(numbers(world.me, 10, turn=turn), right, 10 * turn, False)
        made.signal(right, False)
    waits[2].wait()
    assert waits[0].is_success() and waits[1].is_success()
    for turn in range(3):
        assert (memory[10 * turn : 10 * turn + 10] == numbers(left, 10, turn=turn)).all()


def test_signal_arrives_after_earlier_puts(world, window, new_window):
    """Large asynchronous puts, followed immediately by a signal."""
    made, _, right, left = window
    me = world.me
    big = np.zeros(1 << 19)
    second = new_window(big)
    for turn in range(1, 4):
        work = second.put(numbers(me, 1 << 19, turn=turn), right, 0, True)
        second.signal(right, False)
        assert work.is_success()
        second.wait_signal(left, False)
        assert (big == numbers(left, 1 << 19, turn=turn)).all()
        dist.barrier()
    made.signal(me, True)
    made.wait_signal(me, True).wait()


def test_each_wait_consumes_one_signal_of_its_rank(world, window):
    """Deregister discards the signals without a wait."""
    made, memory, right, left = window
    for _ in range(4):
        made.signal(right, True)
    if world.size > 2:
        with pytest.raises(dist.CollectiveTimeoutError):
            made.wait_signal(right, False, 0.2)
    for _ in range(4):
        made.wait_signal(left, False)
    with pytest.raises(dist.CollectiveTimeoutError, match=f"rank {left} .* not signalled"):
        made.wait_signal(left, False, 0.2)
    dist.barrier()
    made.signal(right, False)
    made.deregister()
    made.register(memory)
    with pytest.raises(dist.CollectiveTimeoutError):
        made.wait_signal(left, False, 0.2)


def test_windows_are_independent(world, window, new_window):
    """Neither memory nor signals are shared between windows."""
    made, memory, right, left = window
    space = np.zeros(1000)
    other = new_window(space)
    other.put(numbers(world.me, 1000), right, 0, False)
    other.signal(right, False)
    with pytest.raises(dist.CollectiveTimeoutError):
        made.wait_signal(left, False, 0.2)
    other.wait_signal(left, False)
    assert (memory == -1).all()
    assert (space == numbers(left, 1000)).all()


def test_wait_signal_can_be_repeated_after_a_timeout(world, window):
    made, memory, right, left = window
    work = made.wait_signal(left, True, 0.2)
    with pytest.raises(dist.CollectiveTimeoutError):
        work.wait(timedelta(seconds=30))
    dist.barrier()  # no rank has signalled yet
    made.put(numbers(world.me, 5), right, 0, False, 30.0)
    made.signal(right, False, 30.0)
    made.wait_signal(left, False, 30.0)
    assert (memory[:5] == numbers(left, 5)).all()


def test_window_keeps_registered_memory_alive(world):
    """Until deregister. If the window does not own the memory, the caller must keep it alive."""
    window = Window(world.group)
    for owning in (True, False):
        array = np.zeros(10)
        held = weakref.ref(array)
        window.register(array, owning)
        dist.barrier()
        if owning:
            del array
            gc.collect()
            assert held() is not None
        window.deregister()
        array = None
        gc.collect()
        assert held() is None


def test_argument_errors_are_raised_locally(world, window):
    """Before data is sent: the memory of all ranks is unchanged. See also test_arguments.py."""
    made, memory, *_ = window
    x = np.zeros(10)
    empty = Window(world.group)
    no_tensor = "tensor_register"
    for call, words in (
        (lambda: made.put(x, 0, 991, True), "cannot write 10 elements at element 991"),
        (lambda: made.put(x.astype("f4"), 0, 0, False), "float64.*float32"),
        (lambda: made.register(x), "has a tensor already"),
        (lambda: empty.put(x, 0, 0, False), no_tensor),
        (lambda: empty.signal(0, False), no_tensor),
        (lambda: empty.wait_signal(0, False), no_tensor),
        (empty.deregister, no_tensor),
        (lambda: empty.register(np.zeros((4, 4)).T[::2]), "contiguous"),
    ):
        with pytest.raises(dist.UsageError, match=words):
            call()
    dist.barrier()
    assert (memory == -1).all()


def test_destroying_a_group_closes_its_windows(world):
    """Registered or not."""
    part = team("part", range(world.size))
    window, unused = Window(part.group), Window(part.group)
    window.register(np.zeros(10))
    window.signal(part.me, False)
    dist.destroy_process_group(part.group)
    for one in window, unused:
        with pytest.raises(dist.ArgumentError, match="was destroyed"):
            one.put(np.zeros(1), 0, 0, False)
    assert window not in windows.windows


def test_many_windows(world):
    for i in range(100):
        window = Window(world.group)
        window.register(np.zeros(10))
        window.put(np.full(1, float(i)), 0, 0, False)
        window.deregister()
        window.free()
