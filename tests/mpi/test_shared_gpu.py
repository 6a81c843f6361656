"""Ranks that share a simulated GPU: the first of them works for all, on the others' arrays."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings

import numpy as np
import pytest
import test_device_trouble
from test_devices import got, uploaded

import mpicoll as dist
from mpicoll.errors import DistBackendError, MismatchError
from mpicoll.failures import consistency
from mpicoll.routes.device import shared_gpu, user_buffers, workspaces

on = test_device_trouble.on
pytestmark = pytest.mark.on_3

#: Elements of float32 that are more than a small call.
LARGE = shared_gpu.SMALL // 4 + 100


def total(arrays, me, n, count=LARGE, array=None):
    numbers = np.arange(count, dtype=np.float32) % 61
    if array is None:
        array = uploaded(arrays, numbers * (me + 1))
    dist.all_reduce(array)
    assert (got(array) == numbers * (n * (n + 1) // 2)).all()
    return array


@pytest.fixture
def shared(request, on, mpi):
    """The arrays, this rank, n, and the group's part of the route."""
    if mpi.size == 1:
        pytest.skip("one rank shares its GPU with nobody")
    arrays, me, n = on("shared_gpu")
    for _ in range(getattr(request, "param", 1)):
        total(arrays, me, n, 5)
    return arrays, me, n, dist.group.WORLD.resources.find("devices").states["shared_gpu"]


def watched(monkeypatch, cuda, *names):
    """What is called of the runtime, in order."""
    seen = []
    for name in names:
        works = getattr(cuda, name)

        def noted(*what, name=name, works=works):
            seen.append((name, *what))
            return works(*what)

        monkeypatch.setattr(cuda, name, noted)
    return seen


# ---- Which groups take it ------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True])
def test_who_takes_it(on, apart):
    """Ranks whose arrays are on one GPU; by their arrays, not by what they see."""
    arrays, me, n = on()
    array = uploaded(arrays, np.full(10, me, np.float32), int(apart and me == n - 1))
    dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    agreed = dist.group.WORLD.resources.find("devices")
    if n == 1:
        return
    own = ("peer",) if n == 2 else ("hierarchical",)  # a GPU each, or levels
    assert agreed.names == (
        (*own, "copy_engine", "ipc", "staged") if apart else ("shared_gpu", "staged")
    )
    why = agreed.describe()["shared_gpu"]
    assert why == (f"rank {n - 1} has its arrays on another GPU than rank 0" if apart else "")


@pytest.mark.parametrize("what", ["create_shared_event", "open_event", "open"])
def test_where_ipc_does_not_work(on, monkeypatch, what):
    """All ranks take another route, and say why."""
    arrays, me, n = on()
    if n == 1:
        return
    works, calls = getattr(arrays.cuda, what), []

    def refuses(*how):
        calls.append(how)
        if len(calls) == 1 and me == (what == "open_event"):
            raise RuntimeError("no such thing here")
        return works(*how)

    monkeypatch.setattr(arrays.cuda, what, refuses)
    array = uploaded(arrays, np.full(10, me, np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(array)
    assert any("shared_gpu is off: " in str(one.message) for one in caught) == (me == 0)
    assert (got(array) == sum(range(n))).all()
    agreed = dist.group.WORLD.resources.find("devices")
    assert agreed.names == ("copy_engine", "ipc", "staged")
    assert "no such thing here" in agreed.missing["shared_gpu"]


# ---- How much moves, and who waits ---------------------------------------------------------------


def test_one_kernel_and_no_wait(shared, monkeypatch):
    """The first rank enqueues one kernel of n inputs and n outputs, the others nothing; no host
    waits for a device.
    """
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    names = ("combine_for_all", "combine", "copy", "synchronize", "is_done")
    seen = watched(monkeypatch, arrays.cuda, *names)
    dist.all_reduce(array)
    seen = [*seen]  # not what follows
    assert [name for name, *_ in seen] == (["combine_for_all"] if me == 0 else [])
    if me == 0:
        _, _, _, sources, outs, count, *_ = seen[0]
        assert list(sources) == list(outs) and len(set(outs)) == n and count == LARGE
        assert array.memory.address in outs
    assert (got(array) == sum(range(n))).all()


def test_moves_are_copied_once(shared, monkeypatch):
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    output = uploaded(arrays, np.zeros((n, LARGE), np.float32))
    seen = watched(monkeypatch, arrays.cuda, "combine_for_all", "copy", "synchronize")
    dist.all_gather_single(output, array)
    dist.broadcast(array, n - 1)
    seen = [*seen]  # not what follows
    assert [name for name, *_ in seen] == (["copy"] * (n * n + n - 1) if me == 0 else [])
    assert (got(output) == np.arange(n)[:, None]).all() and (got(array) == n - 1).all()


@pytest.mark.parametrize("small", [False, True])
def test_two_meetings(shared, monkeypatch, small):
    """One, of small calls."""
    arrays, me, n, part = shared
    array = uploaded(arrays, np.full(100 if small else LARGE, me, np.float32))
    group, met, agreed = dist.group.WORLD, [], []
    works = part._exchange
    monkeypatch.setattr(part, "_exchange", lambda *how: met.append(how) or works(*how))
    seen = watched(monkeypatch, arrays.cuda, "combine_for_all", "record_again")
    dist.all_reduce(array)
    assert len(met) == (1 if small else 2) and bool(seen) is not small
    assert (got(array) == sum(range(n))).all()
    monkeypatch.setattr(consistency, "FIRST", 1)  # from then on each call is compared by itself
    dist.all_reduce(array)
    assert group.compared
    agree = group.agree
    monkeypatch.setattr(group, "agree", lambda *how: agreed.append(how) or agree(*how))
    dist.all_reduce(array)
    assert len(agreed) == (2 if small else 3)  # the call, then the meetings
    assert (got(array) == sum(range(n)) * n**2).all()


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_that_reads_late(shared, monkeypatch, slow):
    """The others, in the next calls, do not write what it has not read."""
    arrays, me, n, _ = shared
    carry_out = shared_gpu._on_host

    def late(*how):
        if me == slow:
            time.sleep(0.02)
        return carry_out(*how)

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


def test_a_rank_that_only_receives(shared):
    """Its device may be late by several calls: what it has not fetched is not written over."""
    arrays, me, *_ = shared
    made = [uploaded(arrays, np.full(100, me + turn, np.float32)) for turn in range(6)]
    for array in made:
        dist.broadcast(array, 0)
    for turn, array in enumerate(made):
        assert (got(array) == turn).all()


# ---- Memory that others have open ----------------------------------------------------------------


def again_at(arrays, memory):
    """Other memory at the same address, as after cudaFree and cudaMalloc."""
    owner, size = memory._owner, memory._owner.size
    file = os.memfd_create("again")
    os.ftruncate(file, size)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed = 0x10  # MAP_FIXED
    libc.mmap(
        memory.address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file, 0
    )
    os.close(owner.file)
    owner.file, owner.buffer = file, next(arrays.cuda.buffers)


def test_memory_is_opened_once(shared, monkeypatch):
    """Two arrays in one allocation, and the same array again, are one opened handle."""
    arrays, me, n, _ = shared
    numbers = np.full(LARGE, me, np.float32)
    first = uploaded(arrays, numbers)
    second = arrays.make(np.full(LARGE // 2, me, np.float32))
    second.memory, second.offset = first.memory, 4 * LARGE // 2
    seen = watched(monkeypatch, arrays.cuda, "open", "export_allocation")
    for array, sent in ((first, LARGE), (second, LARGE // 2)) * 3:
        array.host[...] = me
        array.upload()
        dist.all_reduce(array)
        assert (got(array) == sum(range(n))).all() and array.host.size == sent
    names = [name for name, *_ in seen]
    assert names.count("open") == (n - 1 if me == 0 else 0)
    assert names.count("export_allocation") == (me > 0)


def test_memory_that_is_freed_and_allocated_again(shared):
    """At the same address, which the first rank has open: another buffer id, another handle."""
    arrays, me, n, _ = shared
    array = total(arrays, me, n)
    before = len(arrays.cuda.opened)
    for _ in range(3):
        again_at(arrays, array.memory)
        array.host[...] = np.arange(LARGE) % 61 * (me + 1)
        array.upload()
        total(arrays, me, n, LARGE, array)
    assert len(arrays.cuda.opened) <= before + n
    array = None
    for _ in range(20):  # what is freed for good, too, and part of it allocated anew
        total(arrays, me, n, LARGE)


def test_what_is_open_has_a_bound(shared, monkeypatch):
    """What is closed is not in use any more: no device has done anything before the end."""
    arrays, me, n, part = shared
    monkeypatch.setattr(user_buffers, "OPEN", 4)
    kept = [uploaded(arrays, np.full(LARGE + turn, me + turn, np.float32)) for turn in range(16)]
    for _ in range(2):
        for array in kept:
            dist.all_reduce(array)
    assert len(part._opened) <= (4 * n if me == 0 else 0) and len(part._handles) <= 4
    for turn, array in enumerate(kept):
        assert (got(array) == n * (sum(range(n)) + n * turn)).all()
    total(arrays, me, n)
    assert len(arrays.cuda.opened) <= (5 * n if me == 0 else 0)
    dist.destroy_process_group()
    assert not arrays.cuda.opened


def test_what_cannot_be_there_any_more(shared):
    """A new allocation of a rank's takes the place of those that it overlaps."""
    part = shared[-1]
    part._opened = {(1, 1000): user_buffers._Opened(100, 5, None)}
    for rank, base, nbytes, gone in (
        (1, 1050, 10, 1), (1, 900, 101, 1), (1, 0, 5000, 1), (1, 900, 100, 0), (1, 1100, 10, 0),
        (2, 1050, 10, 0),
    ):  # fmt: skip
        assert part._overlapping(rank, base, nbytes) == [(1, 1000)][:gone]
    part._opened = {}


def test_groups_leave_nothing_open(shared):
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


@pytest.mark.parametrize("whose", [0, -1])
def test_memory_that_cannot_be_exported(shared, whose):
    """It is copied to memory that can, and back, on the rank that has it alone."""
    arrays, me, n, _ = shared
    kind = "pool" if me == whose % n else "plain"
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


def test_memory_that_cannot_be_opened(shared, monkeypatch):
    """As the first rank finds out: the call is made again, through memory that can be."""
    arrays, me, n, part = shared
    array = uploaded(arrays, np.full(LARGE, me, np.float32))
    opens, seen, everything = arrays.cuda.open, [], []

    def refuses(index, handle):
        seen.append(handle)
        if len(seen) % 2 or everything:  # each rank's array, and not what comes in its place
            raise RuntimeError("this one cannot be opened")
        return opens(index, handle)

    monkeypatch.setattr(arrays.cuda, "open", refuses)
    dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    assert len(part._refused) == (me != 0) and len(seen) == (2 * (n - 1) if me == 0 else 0)
    array.host[...] = me
    array.upload()
    dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    everything.append(True)
    other = uploaded(arrays, np.full(workspaces.BLOCK // 4, me, np.float32))  # not in open scratch
    with pytest.raises(DistBackendError, match=r"cannot map rank 1's|another rank failed"):
        dist.all_reduce(other)
    monkeypatch.setattr(arrays.cuda, "open", opens)
    total(arrays, me, n)


def test_arrays_on_another_device(shared):
    """The group is at home on the first device; other arrays are copied there."""
    arrays, me, n, _ = shared
    for index in (1, me % 2, 0):
        array = uploaded(arrays, np.full(LARGE, me, np.float32), index)
        dist.all_reduce(array)
        assert (got(array) == sum(range(n))).all()


def test_an_input_that_is_a_part_of_the_output(shared):
    arrays, me, n, _ = shared
    output = uploaded(arrays, np.full((n, LARGE), me, np.float32))
    block = arrays.make(np.zeros(LARGE, np.float32))
    block.memory, block.offset, block.number = output.memory, 4 * LARGE * me, output.number
    dist.all_gather_single(output, block)
    assert (got(output) == np.arange(n)[:, None]).all()


# ---- Order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [0, 1, 2])
def test_devices_that_are_ahead(shared, eager):
    """Whatever a rank's device has done: nothing is read early, or written late."""
    arrays, me, n, _ = shared
    arrays.cuda.eager = me == eager
    array = uploaded(arrays, np.ones(LARGE, np.float32))
    for _ in range(4):
        dist.all_reduce(array)
        array.double()
    assert (got(array) == (2.0 * n) ** 4).all()


def test_memory_that_is_used_again_at_once(shared):
    """In the order of its stream, as by torch's allocator, while the first rank has not begun."""
    arrays, me, n, _ = shared
    array = uploaded(arrays, np.full(LARGE, me + 1, np.float32))
    other = uploaded(arrays, np.zeros((n, LARGE), np.float32))
    dist.all_gather_single(other, array)
    array.host[...] = 99  # another array, of the same memory and stream
    array.upload()
    assert (got(other) == np.arange(n)[:, None] + 1).all()


def test_groups_with_different_first_ranks(shared):
    """Each works for the other, and neither waits for its host."""
    arrays, me, n, _ = shared
    back = dist.new_group(list(range(n))[::-1])
    array, other = (uploaded(arrays, np.full(LARGE, me, np.float32)) for _ in range(2))
    for _ in range(5):
        dist.all_reduce(array)
        dist.all_reduce(other, group=back)
        array.double()
    expected = sum(range(n)) * n**4 * 2.0**5
    assert (got(array) == expected).all() and (got(other) == sum(range(n)) * n**4).all()


# ---- Failures ------------------------------------------------------------------------------------

CALLS = ["all_reduce", "all_gather_single", "all_to_all_single"]


#: How many calls there are before: from the 65th on, the ranks meet in shared memory.
@pytest.mark.parametrize("shared", [1, 66], indirect=True)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    "what",
    ["find_allocation", "export_allocation", "load_for_all", "record_again", "wait", "copy",
     "combine_for_all", "allocate"],
)  # fmt: skip
def test_a_rank_that_fails(shared, mpi, monkeypatch, what, who, name):
    """All leave the call together and at once; the next call works."""
    arrays, me, n, part = shared
    given = uploaded(arrays, np.full(LARGE // n * n, me, np.float32))
    output = uploaded(arrays, np.zeros(given.host.size * (n if "gather" in name else 1), "f4"))
    third = arrays.make(given.host, layout="third")
    third.upload()
    works = getattr(arrays.cuda, what)
    state = {"failed": False}

    def fails(*how):
        if me == who and not state["failed"] and not (what == "wait" and how[1] != inner):
            state["failed"] = True
            raise RuntimeError(f"{what} cannot be done")
        return works(*how)

    inner = part.context.work
    monkeypatch.setattr(arrays.cuda, what, fails)
    error = None
    try:
        if name == "all_reduce":
            dist.all_reduce(third if what in ("copy_strided", "allocate") else given)
        else:
            source = third if what == "allocate" else given
            getattr(dist, name)(output, source)
    except (RuntimeError, DistBackendError) as caught:
        error = caught
    monkeypatch.setattr(arrays.cuda, what, works)
    if (what, who) != ("wait", 1):  # after the second meeting no rank depends on another
        assert len(set(mpi.allgather(error is not None))) == 1
    if me == who:  # memory that cannot be exported is copied
        assert (error is not None) == (state["failed"] and what != "export_allocation")
        assert error is None or "cannot be done" in str(error)
    else:
        assert error is None or "another rank failed" in str(error)
    for count in (10, LARGE):
        total(arrays, me, n, count)


def test_calls_that_differ(shared):
    arrays, me, n, _ = shared
    for _ in range(66):
        total(arrays, me, n, 7)
    for first, second in ((10, LARGE), (LARGE, 2 * LARGE)):
        array = uploaded(arrays, np.zeros(second if me else first, np.float32))
        with pytest.raises(MismatchError):
            dist.all_reduce(array)
    for count in (10, LARGE):
        total(arrays, me, n, count)


def test_splits_that_do_not_fit(shared):
    arrays, me, n, _ = shared
    receives = [LARGE] * n
    sends = [LARGE + (me == 0 != r) for r in range(n)]
    given = uploaded(arrays, np.zeros(sum(sends), np.float32))
    output = uploaded(arrays, np.zeros(sum(receives), np.float32))
    words = "other ranks' block" if me == 0 else f"expected {LARGE} elements from rank 0, which sen"
    with pytest.raises(MismatchError, match=words):
        dist.all_to_all_single(output, given, receives, sends)
    total(arrays, me, n)


@pytest.mark.parametrize("where", ["load_for_all", "open"])
def test_a_rank_that_has_left_a_call_has_its_array_to_itself(shared, monkeypatch, where):
    """The first rank, which comes late to its work, finds that the others have left, and does not
    begin.
    """
    arrays, me, n, _ = shared
    monkeypatch.setattr(consistency, "FIRST", 1)  # from then on the hosts do not meet before
    monkeypatch.setattr(user_buffers, "_in_use", [])
    group = dist.new_group(timeout=1.0)
    for _ in range(3):
        array = uploaded(arrays, np.full(LARGE, me + 1, np.float32))
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(n + 1))).all()
    array = uploaded(arrays, np.full(LARGE, me + 1, np.float32))
    works = getattr(arrays.cuda, where)

    def late(*what):
        time.sleep(2.5)
        return works(*what)

    monkeypatch.setattr(arrays.cuda, where, late if me == 0 else works)
    error = None
    try:
        dist.all_reduce(array, group=group)
    except DistBackendError as caught:
        error = caught
    monkeypatch.setattr(arrays.cuda, where, works)
    if me:
        kept = [view.address for views in user_buffers._in_use for view in views if view]
        assert array.memory.address in kept
        array.host[...] = 7
        array.upload()
        assert (got(array) == 7).all()
        time.sleep(2.5)
    else:  # the device does what it was given
        context = group.resources.find("devices").space.context
        context.synchronize(context.work)
    assert me == 0 or (got(array) == 7).all(), "written by another process"
    assert "within its timeout" in str(error)
    dist.destroy_process_group(group)
