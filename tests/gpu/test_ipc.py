"""Route ``ipc`` on GPUs: one GPU per rank, or all ranks on GPU 0. Every rank runs every test."""

from __future__ import annotations

import time

import cupy
import pytest
import real
from device_arrays import check_route_is_off, forced
from mpi4py import MPI

import mpicoll as dist
from mpicoll.cuda import binding
from mpicoll.cuda.runtime import get_runtime
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.failures import consistency
from mpicoll.routes.device import ipc

#: Numbers of float32: of a call that takes long, and of a shorter one.
LARGE, MEDIUM = 200_000, 1500


@pytest.fixture(scope="module", params=["own GPUs", "one GPU"])
def n(request):
    """The number of ranks of a default group with the route."""
    with forced("ipc"):
        dist.init_process_group(timeout=60)
        if request.param == "own GPUs":
            binding.bind()
        else:
            cupy.cuda.Device(0).use()
        yield dist.get_world_size()
        dist.destroy_process_group()


@pytest.fixture
def me(n):
    return dist.get_rank()


def values(count, rank):
    return cupy.arange(count, dtype=cupy.float32) % 1009 + rank


def check_all_gather(n, given, added=0, group=None):
    """Fill an array with delay, gather it and overwrite it."""
    real.late(given, values(given.size, dist.get_rank() + added), real.SHORT_NS)
    output = cupy.empty((n, given.size), cupy.float32)
    dist.all_gather_single(output, given, group=group)
    given[...] = -1
    assert (output == cupy.stack([values(given.size, r + added) for r in range(n)])).all()


def check_all_reduce(n, count=MEDIUM, group=None):
    array = real.made(count, dist.get_rank())
    dist.all_reduce(array, group=group)
    assert (array == sum(range(n))).all()


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 1000, LARGE])
def test_calls(n, me, count, offset):
    """Arrays at any alignment. Inputs are overwritten and freed directly after the call."""

    def array(count, rank=None):
        made = cupy.full(count + offset, -1, cupy.float32)[offset:]
        if rank is not None:
            real.late(made, values(count, rank), real.SHORT_NS)
        return made

    for turn in range(3):
        one, many, gathered, exchanged, total = (
            array(count, me), array(n * count, me), array(n * count), array(n * count),
            array(count, me),
        )  # fmt: skip
        dist.all_gather_single(gathered, one)
        dist.all_to_all_single(exchanged, many)
        dist.all_reduce(total)
        one[...] = many[...] = -2
        doubled, total[...] = total * 2, -2
        sent = array(count, me)
        dist.broadcast(sent, turn % n)
        own = gathered[count * me :][:count]
        dist.all_gather_single(gathered, own)  # in place
        part = array(count)
        dist.scatter(part, [array(count, rank) for rank in range(n)] if me == turn % n else None,
                     src=turn % n)  # fmt: skip
        del one, many, total
        cupy.full(2 * n * count, -3, cupy.float32)
        expected = cupy.concatenate([values(count, rank) for rank in range(n)])
        assert (gathered == expected).all()
        blocks = [values(n * count, rank)[me * count :][:count] for rank in range(n)]
        assert (exchanged == cupy.concatenate(blocks)).all()
        assert (sent == values(count, turn % n)).all() and (part == values(count, me)).all()
        assert (doubled == 2 * (n * values(count, 0) + sum(range(n)))).all()


@pytest.mark.parametrize("late", [0, 1])
def test_late_rank(n, me, late):
    """One rank is late, on the host or on the device. The others overwrite what it reads."""
    outputs = []
    for turn in range(4):
        given, output = cupy.empty(LARGE, cupy.float32), cupy.empty((n, LARGE), cupy.float32)
        if turn % 2 and me == late:
            time.sleep(0.05)
        real.late(given, values(LARGE, me + turn), real.LONG_NS if me == late else 0)
        dist.all_gather_single(output, given)
        given[...] = 0
        dist.broadcast(given, turn % n)
        given[...] = -1
        outputs.append(output)
    for turn, output in enumerate(outputs):
        for rank in range(n):
            assert (output[rank] == values(LARGE, rank + turn)).all()


def test_two_groups_with_different_first_ranks(n, me):
    """On one GPU, rank 0 of each group does the work of its calls."""
    back = dist.new_group(list(range(n))[::-1], sort_ranks=False)
    array, other = real.made(LARGE, me), real.made(LARGE, me)
    for _ in range(5):
        dist.all_reduce(array)
        dist.all_reduce(other, group=back)
        array *= 2
    expected = sum(range(n)) * n**4
    assert (array == expected * 2.0**5).all() and (other == expected).all()
    dist.destroy_process_group(back)


# ---- Memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["first", "last", "all"])
def test_memory_that_cannot_be_exported(n, me, ranks):
    """Managed memory and memory of cudaMallocAsync, on some ranks."""
    plain = {"first": me != 0, "last": me != n - 1, "all": False}[ranks]
    for allocate in (cupy.cuda.malloc_managed, cupy.cuda.malloc_async):
        take = real.plain if plain else allocate
        given = cupy.ndarray((LARGE,), cupy.float32, take(4 * LARGE))
        output = cupy.ndarray((n, LARGE), cupy.float32, take(4 * n * LARGE))
        given[...] = values(LARGE, me)
        dist.all_gather_single(output, given)
        dist.broadcast(given, 1)
        assert (output == cupy.stack([values(LARGE, rank) for rank in range(n)])).all()
        assert (given == values(LARGE, 1)).all()
        real.late(given[1:], me + 1)
        dist.all_reduce(given[1:])
        assert (given[1:] == n * (n + 1) / 2).all() and given[0] == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_is_copied_if_its_export_fails(n, me, monkeypatch, failing):
    """The driver reports that it can be exported."""
    given = cupy.ndarray((MEDIUM,), cupy.float32, real.plain(4 * MEDIUM))
    export = get_runtime().export_allocation

    def fail(index, found):
        if me == failing and found.base == given.data.ptr:
            raise RuntimeError("no handle of this one")
        return export(index, found)

    monkeypatch.setattr(get_runtime(), "export_allocation", fail)
    for turn in range(3):
        check_all_gather(n, given, turn)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("count", [100, LARGE])
def test_memory_freed_and_allocated_again(n, monkeypatch, count, groups):
    """The driver often returns the same address, also for another size. The group or another group
    of the process may still map the old memory.
    """
    monkeypatch.setenv("EMULATED_GPU_REUSE", "1")
    other = dist.new_group()
    for turn in range(12):
        size = count + 1000 * (turn % 3)
        given = cupy.ndarray((size,), cupy.float32, real.plain(4 * size))
        check_all_gather(n, given, turn, other if turn % groups else None)
    dist.destroy_process_group(other)


def test_more_memory_than_the_limit_of_open_allocations(n, monkeypatch):
    """Memory is not closed while the device may use it: nothing runs before the end."""
    monkeypatch.setattr(ipc, "OPEN", 3)
    group = dist.new_group()
    for _ in range(2):
        kept = [cupy.ndarray((LARGE // 8,), cupy.float32, real.plain(LARGE)) for _ in range(12)]
        outputs = [cupy.empty((n, LARGE // 8), cupy.float32) for _ in kept]
        for turn, (array, output) in enumerate(zip(kept, outputs, strict=True)):
            real.late(array, dist.get_rank() + turn)
            dist.all_gather_single(output, array, group=group)
        for turn, output in enumerate(outputs):
            assert (output == cupy.arange(n)[:, None] + turn).all()
        del kept, array
    dist.destroy_process_group(group)


def test_group_is_destroyed_before_its_calls_have_run(n, me):
    """Memory stays mapped until then."""
    group, array = dist.new_group(), real.made(LARGE, me)
    dist.all_reduce(array, group=group)
    dist.destroy_process_group(group)
    assert (array == sum(range(n))).all()


def test_memory_pool_can_be_emptied_while_other_ranks_map_it(n):
    pool = cupy.get_default_memory_pool()
    for turn in range(5):
        check_all_gather(n, cupy.empty(LARGE + turn, cupy.float32))
        pool.free_all_blocks()


# ---- Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["create_shared_event", "open_event", "open"])
def test_route_is_off_if_ipc_fails_on_one_rank(n, me, monkeypatch, what):
    """Forcing the route raises."""
    with monkeypatch.context() as patch:
        if me == 1:
            patch.setattr(get_runtime(), what, lambda *arguments: 1 / 0)
        group = dist.new_group()
        with pytest.raises(UnsupportedError, match=r"ipc: rank 1: .*division.*; unset it"):
            check_all_reduce(n, group=group)
        dist.destroy_process_group(group)
        with forced("auto"):
            group = dist.new_group()
            check_route_is_off(
                "ipc", "rank 1: .*division", lambda: check_all_reduce(n, group=group), group
            )
    dist.destroy_process_group(group)


@pytest.mark.parametrize(  # after 64 calls, later ones are compared in shared memory
    ("earlier", "async_op"), [pytest.param(1, False, marks=pytest.mark.nightly), (66, True)]
)
@pytest.mark.parametrize(
    "what",
    ["find_allocation", "export_allocation", "open", "load", "record_again", "wait", "copy",
     "combine", "allocate"],
)  # fmt: skip
def test_failure_of_one_rank(n, me, what, earlier, async_op):
    """The call fails on all ranks, or only on the rank that fails after the last exchange. Later
    calls succeed.
    """
    group = dist.new_group()
    for _ in range(earlier):
        check_all_reduce(n, 10, group)
    step = 2 if what == "allocate" else 1  # packing needs scratch memory
    for name in ("all_reduce", "broadcast", "all_to_all_single"):
        for failing in (0, 1):
            count = n * LARGE if what == "allocate" else n * MEDIUM
            array = cupy.ndarray((count * step,), cupy.float32, real.plain(4 * count * step))
            given, output = real.late(array[::step], me), cupy.empty(count, cupy.float32)
            extra = {"all_to_all_single": (output, given), "broadcast": (given, 1)}
            group.resources.find(("device", cupy.cuda.Device().id))._blocks.clear()
            group.resources.find(("device", cupy.cuda.Device().id))._since.clear()
            with real.Fault(what, me == failing) as fault:
                work = getattr(dist, name)(*extra.get(name, (given,)), group=group,
                                           async_op=async_op)  # fmt: skip
                if async_op:
                    work.wait()
            outcomes = MPI.COMM_WORLD.allgather(str(fault.error or ""))
            case = name, failing, outcomes
            if any(outcomes) and what != "wait":
                assert all(outcomes), case
            for rank, outcome in enumerate(outcomes):
                expected = "injected failure" if rank == failing else "another rank failed"
                assert not outcome or expected in outcome, case
            if not any(outcomes) and name == "broadcast":
                assert (given == 1).all()
            for count in (10, MEDIUM):
                check_all_reduce(n, count, group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("earlier", [1, 66])  # later calls are compared in shared memory
def test_mismatch(n, me, earlier):
    """All ranks raise, before anything is written. Later calls succeed."""
    group = dist.new_group()
    for _ in range(earlier):
        check_all_reduce(n, 10, group)
    for first, others in ((10, MEDIUM), (MEDIUM, MEDIUM + 1)):
        array = real.made(others if me else first, 5)
        with pytest.raises(MismatchError):
            dist.all_reduce(array, group=group)
        assert (array == 5).all()
    with pytest.raises(MismatchError, match="src 1"):
        dist.broadcast(real.made(MEDIUM, 5), 0 if me else 1, group=group)
    receives = [MEDIUM] * n
    sends = [MEDIUM + (me == 0 != rank) for rank in range(n)]
    given, output = (real.made(sum(counts), 0) for counts in (sends, receives))
    message = "other ranks' block" if me == 0 else f"expected {MEDIUM} elements from rank 0"
    with pytest.raises(MismatchError, match=message):
        dist.all_to_all_single(output, given, receives, sends, group=group)
    check_all_reduce(n, MEDIUM, group)
    dist.destroy_process_group(group)


def test_arrays_of_ranks_that_timed_out_are_not_written(n, me, monkeypatch):
    """Rank 0 is late. It finds that the other ranks have timed out and enqueues nothing."""
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared by messages
    monkeypatch.setattr(ipc, "_in_use", [])
    group = dist.new_group(timeout=1.0)
    for _ in range(3):
        check_all_reduce(n, MEDIUM, group)
    array, runtime = real.made(MEDIUM, me + 1), get_runtime()
    load = runtime.load
    if me == 0:
        monkeypatch.setattr(runtime, "load", lambda *each: (time.sleep(2.5), load(*each)))
    with pytest.raises(DistBackendError, match="within its timeout"):
        dist.all_reduce(array, group=group)
    if me:
        kept = [view.address for views in ipc._in_use for view in views if view]
        assert array.data.ptr in kept
        array[...] = 7
        assert (array == 7).all()
    MPI.COMM_WORLD.Barrier()
    cupy.cuda.Device().synchronize()
    MPI.COMM_WORLD.Barrier()
    assert not me or (array == 7).all(), "written by another process"
    dist.destroy_process_group(group)
