"""Route ``shared_gpu``: ranks share a simulated GPU, and rank 0 enqueues the work of all ranks."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest
import simulated
import test_device_trouble
from test_devices import got, uploaded

import mpicoll as dist
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.failures import consistency
from mpicoll.routes.device import shared_gpu, user_buffers, workspaces

on = test_device_trouble.on
pytestmark = pytest.mark.on_3

#: Number of float32 elements of a call that is not small.
LARGE = shared_gpu.SMALL // 4 + 100


def check_all_reduce(arrays, me, n, count=LARGE, array=None):
    numbers = np.arange(count, dtype=np.float32) % 61
    if array is None:
        array = uploaded(arrays, numbers * (me + 1))
    dist.all_reduce(array)
    assert (got(array) == numbers * (n * (n + 1) // 2)).all()
    return array


@pytest.fixture
def shared(request, on, mpi):
    """Arrays, rank, number of ranks, and the state of the route in the default group."""
    if mpi.size == 1:
        pytest.skip("needs two ranks")
    arrays, me, n = on("shared_gpu")
    for _ in range(getattr(request, "param", 1)):
        check_all_reduce(arrays, me, n, 5)
    return arrays, me, n, dist.group.WORLD.resources.find("devices").states["shared_gpu"]


@pytest.mark.parametrize("apart", [False, True])
def test_route_is_selected_if_all_arrays_are_on_one_gpu(on, apart):
    arrays, me, n = on()
    array = uploaded(arrays, np.full(10, me, np.float32), int(apart and me == n - 1))
    dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    agreed = dist.group.WORLD.resources.find("devices")
    if n == 1:
        return
    own = ("peer",) if n == 2 else ("hierarchical",)
    assert agreed.names == (
        (*own, "copy_engine", "ipc", "staged") if apart else ("shared_gpu", "staged")
    )
    why = agreed.describe()["shared_gpu"]
    assert why == (f"rank {n - 1} has its arrays on another GPU than rank 0" if apart else "")


@pytest.mark.parametrize("what", ["create_shared_event", "open_event", "open"])
def test_route_is_off_if_ipc_fails_on_one_rank(on, what):
    """All ranks use another route, and rank 0 warns."""
    arrays, me, n = on()
    if n == 1:
        return
    array = uploaded(arrays, np.full(10, me, np.float32))
    with (
        simulated.Fault(arrays.cuda, what, me == (what == "open_event")) as fault,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        dist.all_reduce(array)
    assert fault.error is None
    assert any("shared_gpu is off: " in str(one.message) for one in caught) == (me == 0)
    assert (got(array) == sum(range(n))).all()
    agreed = dist.group.WORLD.resources.find("devices")
    assert agreed.names == ("copy_engine", "ipc", "staged")
    assert "injected failure" in agreed.missing["shared_gpu"]


def test_rank_0_enqueues_one_kernel_without_host_synchronization(shared, monkeypatch):
    """The kernel has n inputs and n outputs. The other ranks enqueue nothing."""
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    names = ("combine", "copy", "synchronize", "is_done")
    seen = simulated.record_calls(monkeypatch, arrays.cuda, *names)
    dist.all_reduce(array)
    seen = [*seen]  # without the calls of got()
    assert [name for name, *_ in seen] == (["combine"] if me == 0 else [])
    if me == 0:
        _, _, _, sources, outs, count, *_ = seen[0]
        assert list(sources) == list(outs) and len(set(outs)) == n and count == LARGE
        assert array.memory.address in outs
    assert (got(array) == sum(range(n))).all()


def test_data_is_copied_once(shared, monkeypatch):
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    output = uploaded(arrays, np.zeros((n, LARGE), np.float32))
    seen = simulated.record_calls(monkeypatch, arrays.cuda, "combine", "copy", "synchronize")
    dist.all_gather_single(output, array)
    dist.broadcast(array, n - 1)
    seen = [*seen]  # without the calls of got()
    assert [name for name, *_ in seen] == (["copy"] * (n * n + n - 1) if me == 0 else [])
    assert (got(output) == np.arange(n)[:, None]).all() and (got(array) == n - 1).all()


@pytest.mark.parametrize("small", [False, True])
def test_number_of_synchronizations(shared, monkeypatch, small):
    """A small call has one, a large call has two."""
    arrays, me, n, part = shared
    array = uploaded(arrays, np.full(100 if small else LARGE, me, np.float32))
    group, calls, agreed = dist.group.WORLD, [], []
    exchange = part._exchange
    monkeypatch.setattr(
        part, "_exchange", lambda *arguments: calls.append(arguments) or exchange(*arguments)
    )
    seen = simulated.record_calls(monkeypatch, arrays.cuda, "combine", "record_again")
    dist.all_reduce(array)
    assert len(calls) == (1 if small else 2) and bool(seen) is not small
    assert (got(array) == sum(range(n))).all()
    monkeypatch.setattr(consistency, "FIRST", 1)  # the route compares later calls
    dist.all_reduce(array)
    assert group.compared
    agree = group.agree
    monkeypatch.setattr(
        group, "agree", lambda *arguments: agreed.append(arguments) or agree(*arguments)
    )
    dist.all_reduce(array)
    assert len(agreed) == (2 if small else 3)  # the comparison and the synchronizations
    assert (got(array) == sum(range(n)) * n**2).all()


@pytest.mark.parametrize("slow", [0, 1])
def test_late_rank_reads_before_other_ranks_overwrite(shared, monkeypatch, slow):
    arrays, me, n, _ = shared
    original = shared_gpu._on_host

    def late(*arguments):
        if me == slow:
            time.sleep(0.02)
        return original(*arguments)

    monkeypatch.setattr(shared_gpu, "_on_host", late)
    made = []
    for turn in range(6):
        for count in (10, 11, LARGE)[: 1 + turn % 3]:
            given = uploaded(arrays, np.full(count, me + turn, np.float32))
            output = uploaded(arrays, np.zeros((n, count), np.float32))
            dist.all_gather_single(output, given)
            dist.broadcast(given, turn % n)
            made.append((turn, given, output))
    for turn, given, output in made:
        assert (got(output) == np.arange(n)[:, None] + turn).all()
        assert (got(given) == turn % n + turn).all()


def test_late_device_of_a_receiving_rank_does_not_lose_data(shared):
    arrays, me, *_ = shared
    made = [uploaded(arrays, np.full(100, me + turn, np.float32)) for turn in range(6)]
    for array in made:
        dist.broadcast(array, 0)
    for turn, array in enumerate(made):
        assert (got(array) == turn).all()


def test_number_of_open_allocations_is_limited(shared, monkeypatch):
    """Memory is not closed while a kernel may use it. No kernel runs before the end of the test."""
    arrays, me, n, part = shared
    monkeypatch.setattr(user_buffers, "OPEN", 4)
    kept = [uploaded(arrays, np.full(LARGE + turn, me + turn, np.float32)) for turn in range(16)]
    for _ in range(2):
        for array in kept:
            dist.all_reduce(array)
    assert len(part._opened) <= (4 * n if me == 0 else 0) and len(part._handles) <= 4
    for turn, array in enumerate(kept):
        assert (got(array) == n * (sum(range(n)) + n * turn)).all()
    check_all_reduce(arrays, me, n)
    assert len(arrays.cuda.opened) <= (5 * n if me == 0 else 0)
    dist.destroy_process_group()
    assert not arrays.cuda.opened


def test_destroyed_groups_release_handles_and_streams(shared):
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    streams, left_behind = len(arrays.cuda.streams), len(user_buffers._left_behind)
    for _ in range(3):
        group = dist.new_group()
        array.host[...] = me
        array.upload()
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(n))).all()
        dist.destroy_process_group(group)
        assert not arrays.cuda.opened and len(user_buffers._left_behind) == left_behind
    assert len(arrays.cuda.streams) == streams


@pytest.mark.parametrize("rank", [0, -1])
def test_memory_that_cannot_be_exported_is_copied_on_its_rank(shared, rank):
    arrays, me, n, _ = shared
    kind = "pool" if me == rank % n else "plain"
    for layout in ("C", "1", "third"):
        numbers = np.arange(LARGE, dtype=np.float32)
        array = arrays.make(numbers * (me + 1), layout=layout, kind=kind)
        output = arrays.make(np.zeros((n, LARGE), np.float32), kind=kind)
        for one in (array, output):
            one.upload()
        dist.all_gather_single(output, array)
        assert (got(output) == np.outer(np.arange(n) + 1, numbers)).all()
        dist.all_reduce(array)
        assert (got(array) == numbers * (n * (n + 1) // 2)).all()


def test_memory_that_cannot_be_opened_is_copied(shared, monkeypatch):
    """The call is repeated with a copy in memory that can be opened."""
    arrays, me, n, part = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    original, seen, fail_always = arrays.cuda.open, [], []

    def fail(index, handle):
        seen.append(handle)
        if len(seen) % 2 or fail_always:  # each rank's array, but not its copy
            raise RuntimeError("this one cannot be opened")
        return original(index, handle)

    monkeypatch.setattr(arrays.cuda, "open", fail)
    dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    assert len(part._refused) == (me != 0) and len(seen) == (2 * (n - 1) if me == 0 else 0)
    array.host[...] = me
    array.upload()
    dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    fail_always.append(True)
    other = uploaded(
        arrays, np.full(workspaces.BLOCK // 4, me, np.float32)
    )  # larger than open scratch
    with pytest.raises(DistBackendError, match=r"cannot map rank 1's|another rank failed"):
        dist.all_reduce(other)
    monkeypatch.setattr(arrays.cuda, "open", original)
    check_all_reduce(arrays, me, n)


def test_arrays_on_another_device_are_copied_to_the_groups_device(shared):
    arrays, me, n, _ = shared
    for index in (1, me % 2, 0):
        array = uploaded(arrays, np.full(LARGE, me, np.float32), index)
        dist.all_reduce(array)
        assert (got(array) == sum(range(n))).all()


def test_input_inside_the_output(shared):
    arrays, me, n, _ = shared
    output = uploaded(arrays, np.full((n, LARGE), me, np.float32))
    block = arrays.make(np.zeros(LARGE, np.float32))
    block.memory, block.offset, block.number = output.memory, 4 * LARGE * me, output.number
    dist.all_gather_single(output, block)
    assert (got(output) == np.arange(n)[:, None]).all()


@pytest.mark.parametrize("eager", [0, 1, 2])
def test_devices_that_run_ahead_do_not_corrupt_data(shared, eager):
    arrays, me, n, _ = shared
    arrays.cuda.eager = me == eager
    array = uploaded(arrays, np.ones(LARGE, np.float32))
    for _ in range(4):
        dist.all_reduce(array)
        array.double()
    assert (got(array) == (2.0 * n) ** 4).all()


def test_input_may_be_overwritten_in_stream_order(shared):
    """torch's allocator reuses memory in stream order, possibly before rank 0 has started."""
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me + 1, np.float32))
    other = uploaded(arrays, np.zeros((n, LARGE), np.float32))
    dist.all_gather_single(other, array)
    array.host[...] = 99  # another array with this memory and stream
    array.upload()
    assert (got(other) == np.arange(n)[:, None] + 1).all()


def test_two_groups_with_different_first_ranks_do_not_block(shared):
    arrays, me, n, _ = shared
    back = dist.new_group(list(range(n))[::-1])
    array, other = (uploaded(arrays, np.full(LARGE, me, np.float32)) for _ in range(2))
    for _ in range(5):
        dist.all_reduce(array)
        dist.all_reduce(other, group=back)
        array.double()
    expected = sum(range(n)) * n**4 * 2.0**5
    assert (got(array) == expected).all() and (got(other) == sum(range(n)) * n**4).all()


CALLS = ["all_reduce", "all_gather_single", "all_to_all_single"]


#: Number of earlier calls. From the 65th call on, calls are compared in shared memory.
@pytest.mark.parametrize("shared", [1, 66], indirect=True)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "what",
    ["find_allocation", "export_allocation", "load", "record_again", "wait", "copy",
     "combine", "allocate"],
)  # fmt: skip
def test_failure_of_one_rank(shared, mpi, what, failing, name):
    """The call fails on all ranks at once. Later calls succeed."""
    arrays, me, n, part = shared
    given = uploaded(arrays, np.full(LARGE // n * n, me, np.float32))
    output = uploaded(arrays, np.zeros(given.host.size * (n if "gather" in name else 1), "f4"))
    third = arrays.make(given.host, layout="third")
    third.upload()

    def counts(*arguments):
        return what != "wait" or arguments[1] == part.context.work

    with simulated.Fault(arrays.cuda, what, me == failing, counts=counts) as fault:
        if name == "all_reduce":
            dist.all_reduce(third if what in ("copy_strided", "allocate") else given)
        else:
            getattr(dist, name)(output, third if what == "allocate" else given)
    error = fault.error
    if (what, failing) != ("wait", 1):  # this wait follows the last synchronization
        assert len(set(mpi.allgather(error is not None))) == 1
    if me == failing:  # memory that cannot be exported is copied
        assert (error is not None) == (fault.failed and what != "export_allocation")
        assert error is None or "injected failure" in str(error)
    else:
        assert error is None or "another rank failed" in str(error)
    for count in (10, LARGE):
        check_all_reduce(arrays, me, n, count)


def test_mismatch(shared):
    arrays, me, n, _ = shared
    for _ in range(66):
        check_all_reduce(arrays, me, n, 7)
    for first, second in ((10, LARGE), (LARGE, 2 * LARGE)):
        array = uploaded(arrays, np.zeros(second if me else first, np.float32))
        with pytest.raises(MismatchError):
            dist.all_reduce(array)
    for count in (10, LARGE):
        check_all_reduce(arrays, me, n, count)


@pytest.mark.parametrize("where", ["load", "open"])
def test_arrays_of_ranks_that_timed_out_are_not_written(shared, monkeypatch, where):
    """Rank 0 is late. It finds that the other ranks have timed out and enqueues nothing."""
    arrays, me, n, _ = shared
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared by messages
    monkeypatch.setattr(user_buffers, "_in_use", [])
    group = dist.new_group(timeout=1.0)
    for _ in range(3):
        array = uploaded(arrays, np.full(LARGE, me + 1, np.float32))
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(n + 1))).all()
    array = uploaded(arrays, np.full(LARGE, me + 1, np.float32))
    original = getattr(arrays.cuda, where)

    def late(*arguments):
        time.sleep(2.5)
        return original(*arguments)

    monkeypatch.setattr(arrays.cuda, where, late if me == 0 else original)
    error = None
    try:
        dist.all_reduce(array, group=group)
    except DistBackendError as caught:
        error = caught
    monkeypatch.setattr(arrays.cuda, where, original)
    if me:
        kept = [view.address for views in user_buffers._in_use for view in views if view]
        assert array.memory.address in kept
        array.host[...] = 7
        array.upload()
        assert (got(array) == 7).all()
        time.sleep(2.5)
    else:  # run all enqueued work
        context = group.resources.find("devices").space.context
        context.synchronize(context.work)
    assert me == 0 or (got(array) == 7).all(), "written by another process"
    assert "within its timeout" in str(error)
    dist.destroy_process_group(group)
