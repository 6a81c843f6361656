"""Route ``copy_engine`` on simulated GPUs: each rank copies from the other ranks' arrays."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from conftest import team as group_of
from device_arrays import forced
from driver import NAMES
from test_devices import SOME, DeviceCall, got

import mpicoll as dist
from mpicoll.cuda import capabilities, runtime
from mpicoll.cuda.runtime import HANDLE_BYTES
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.routes import registry
from mpicoll.routes.device import copy_engine, ipc, peer, user_buffers, workspaces

pytestmark = pytest.mark.on_3

ROUTE = registry.DEVICE["copy_engine"]
#: Minimum size in bytes of calls that use the route; a count of float32 above it.
MIN_BYTES = 1000
LARGE = 1500


@pytest.fixture(params=["a GPU each", "two GPUs"])
def copying(request, mpi, monkeypatch):
    """Arrays, rank, number of ranks, and the state of the route in the default group."""
    if mpi.size == 1:
        pytest.skip("needs two ranks")
    if mpi.size == 2 and request.param == "two GPUs":
        pytest.skip("the same as a GPU each")
    arrays = simulated.Arrays(4 if request.param == "a GPU each" else 2)
    monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "none")
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(copy_engine, "LINE", 64)
    monkeypatch.setattr(copy_engine, "MIN_BYTES", MIN_BYTES)
    monkeypatch.setattr(copy_engine, "LANES", 3)
    monkeypatch.setattr(peer, "WORKSPACE", 64 * 1024)
    monkeypatch.setattr(ipc, "SLOT", 4096)
    policy = replace(ROUTE.policy, min_bytes=dict.fromkeys(ROUTE.policy.min_bytes, MIN_BYTES))
    monkeypatch.setitem(registry.DEVICE, "copy_engine", replace(ROUTE, policy=policy))
    dist.init_process_group(timeout=TIMEOUT)
    me, n = dist.get_rank(), dist.get_world_size()
    made = Made(arrays, me, n)
    made.check_all_gather(10)
    made.part = dist.group.WORLD.resources.find("devices").states["copy_engine"]
    yield made
    dist.destroy_process_group()
    gc.collect()  # frees the frames of caught errors
    assert not arrays.cuda.opened


class Made:
    """Arrays on this rank's device."""

    def __init__(self, arrays, me, n):
        self.arrays, self.cuda, self.me, self.n = arrays, arrays.cuda, me, n
        self.index = me % arrays.devices

    def array(self, values, beside=None, **options):
        """Return an array with values, in the stream of ``beside``."""
        made = self.arrays.make(np.array(values), self.index, **options)
        if beside is not None:
            made.number = beside.number
        made.upload()
        return made

    def check_all_gather(self, count=LARGE, group=None, **options):
        given = self.array(numbers(count, self.me), **options)
        output = self.array(np.zeros((self.n, count), np.float32), **options)
        dist.all_gather_single(output, given, group=group)
        assert (got(output) == [numbers(count, rank) for rank in range(self.n)]).all()


def numbers(count, rank):
    return (np.arange(count) % 61 + 100 * rank).astype(np.float32)


@pytest.mark.parametrize("name", ROUTE.serves.primitives)
def test_calls(copying, name):
    """Small and large calls, in two orders of ranks."""
    n = copying.n
    teams = [group_of("world", range(n)), group_of("back", range(n)[::-1])]
    for turn, dtype in enumerate(SOME):
        cases = (1, "C"), (37, "third"), (LARGE, "1"), (4 * LARGE + 3, "C")
        for count, layout in cases[turn % 2 :: 2]:
            root = (count + turn) % n if NAMES[name].root else 0
            DeviceCall(
                copying.arrays, name, teams[turn // 2 % 2], dtype, count, None, root, layout=layout,
                index=copying.index, kind="pool" if turn % 3 == 2 else "plain",
            ).run_and_check(turn % 3 == 1)  # fmt: skip


def test_route_serves_data_movement(copying, monkeypatch):
    """Large calls only, except for primitives that route ``peer`` does not serve."""
    me, n = copying.me, copying.n
    calls = []
    original = copying.part._run
    monkeypatch.setattr(
        copying.part, "_run", lambda kind, *arguments: calls.append(kind.primitive.name)
        or original(kind, *arguments)
    )  # fmt: skip
    for count in (2, LARGE):
        one, many = (copying.array(np.full(k * count, me, np.float32)) for k in (1, n))
        rows, output = [copying.array(np.zeros(count, np.float32)) for _ in range(n)], one
        dist.all_reduce(one)
        dist.reduce_scatter_single(one, many)
        dist.broadcast(one)
        dist.all_gather(rows, rows[me])
        dist.all_gather_single(many, one)
        dist.gather(rows[0], rows if me == 0 else None)
        dist.scatter(output, rows if me == 0 else None)
        dist.all_to_all(rows, [copying.array(np.zeros(count, np.float32)) for _ in range(n)])
        dist.all_to_all_single(many, copying.array(np.zeros((n, count), np.float32)))
    always = ["gather", "scatter", "all_to_all", "all_to_all_single"]
    assert calls == [*always, "broadcast", "all_gather", "all_gather_single", *always]
    agreed = dist.group.WORLD.resources.find("devices")
    first = "peer" if copying.arrays.devices > 2 or n == 2 else "hierarchical"
    assert agreed.names == (first, "copy_engine", "ipc", "staged")
    assert agreed.describe()["copy_engine"] == ""


def test_blocks_of_different_sizes(copying):
    """all_to_all_single with splits, including 0, and all_gather."""
    me, n = copying.me, copying.n
    for scale in (1, 400):
        sends = [[scale * ((a * 2 + b) % 4) for b in range(n)] for a in range(n)]
        rows = [np.arange(sum(row)).astype(np.float32) + 1000 * a for a, row in enumerate(sends)]
        output = copying.array(np.zeros(sum(row[me] for row in sends), np.float32))
        receives = [row[me] for row in sends]
        dist.all_to_all_single(output, copying.array(rows[me]), receives, sends[me])
        parts = [
            np.split(row, np.cumsum(counts)[:-1])[me]
            for row, counts in zip(rows, sends, strict=True)
        ]
        assert (got(output) == np.concatenate(parts)).all()
        counts = [scale * k for k in (5, 0, 3, 17)][:n]
        outputs = [copying.array(np.zeros(count, np.float32)) for count in counts]
        dist.all_gather(outputs, copying.array(numbers(counts[me], me)))
        for rank, one in enumerate(outputs):
            assert (got(one) == numbers(counts[rank], rank)).all()


def test_group_of_one_rank_does_not_use_the_route(copying):
    groups = [dist.new_group([rank]) for rank in range(copying.n)]
    given, output = copying.array(numbers(LARGE, copying.me)), copying.array(numbers(LARGE, 9))
    dist.all_gather_single(output, given, group=groups[copying.me])
    assert (got(output) == numbers(LARGE, copying.me)).all()
    agreed = groups[copying.me].resources.find("devices")
    assert "copy_engine" not in {*agreed.states, *agreed.names}


def test_forced_route_raises_for_reductions(copying):
    with forced("copy_engine"):
        group = dist.new_group()
        copying.check_all_gather(3, group)
        with pytest.raises(UnsupportedError, match="=copy_engine does not serve SUM of float32"):
            dist.all_reduce(copying.array(numbers(LARGE, 0)), group=group)
        copying.check_all_gather(LARGE, group)


_WORK = ("copy", "copy_strided", "combine", "collective")


def test_data_is_copied_once_without_host_synchronization(copying, monkeypatch):
    me, n = copying.me, copying.n
    array = copying.array(np.full(n * 300, me, np.float32))
    output = copying.array(np.zeros((n, n * 300), np.float32))
    seen = simulated.record_calls(monkeypatch, copying.cuda, *_WORK, "synchronize", "is_done")
    dist.all_gather_single(output, array)
    dist.broadcast(array, n - 1)
    seen = [*seen]
    assert {name for name, *_ in seen} <= {"copy"}
    moved = [(into, nbytes) for _, _, into, _, nbytes, _ in seen]
    gathered, rest = moved[:n], moved[n:]
    first, block = output.memory.address, n * 1200
    places = [first + (me + k + 1) % n * block for k in range(n)]  # the next rank's first
    assert gathered == [(place, block) for place in places]
    assert sum(nbytes for _, nbytes in rest) == (0 if me == n - 1 else block)
    assert len(rest) == (0 if me == n - 1 else 1 if n == 2 else n)
    assert (got(output) == np.arange(n)[:, None]).all() and (got(array) == n - 1).all()


def test_large_copies_use_several_streams(copying, monkeypatch):
    """Each stream waits until the arrays are ready. Small copies use one stream."""
    n, work = copying.n, copying.part.context.work
    seen = simulated.record_calls(monkeypatch, copying.cuda, "copy", "wait")
    for count in (10, LARGE):
        given = copying.array(np.full((n, count), copying.me, np.float32))
        output = copying.array(np.zeros((n, count), np.float32))
        seen.clear()
        dist.all_to_all_single(output, given)
        made = [*seen]
        copies = [(place, one[-1]) for place, one in enumerate(made) if one[0] == "copy"]
        lanes = {stream for _, stream in copies} - {work}
        assert len(copies) == n and len(lanes) == (0 if count == 10 else min(n, 3) - 1)
        first, _ = copies[0]
        ready = [k for k, one in enumerate(made[:first]) if type(one[-1]) is simulated.SharedEvent]
        assert len(ready) == n - 1
        for lane in lanes:
            (begun,) = (
                place for place, one in enumerate(made[:first])
                if one[0] == "wait" and one[2] == lane
                and one[-1].stream is copying.cuda.streams[one[1], work]
            )  # fmt: skip
            assert begun > max(ready)
        assert (got(output) == np.arange(n)[:, None]).all()


def test_number_of_synchronizations(copying, monkeypatch):
    """A call has two, a broadcast to several ranks has three."""
    array = copying.array(np.full(LARGE, copying.me, np.float32))
    exchange, calls = copying.part._exchange, []
    monkeypatch.setattr(copying.part, "_exchange", lambda *a: calls.append(a) or exchange(*a))
    copying.check_all_gather()
    assert len(calls) == 2
    dist.broadcast(array)
    assert len(calls) == 2 + (2 if copying.n == 2 else 3)
    assert (got(array) == 0).all()


def test_ranks_wait_only_for_ranks_that_they_exchange_data_with(copying, monkeypatch):
    me, n, root = copying.me, copying.n, copying.n - 1
    given = copying.array(numbers(LARGE, me))
    outputs = [copying.array(np.zeros(LARGE, np.float32)) for _ in range(n)]
    seen = simulated.record_calls(monkeypatch, copying.cuda, "wait")
    events = copying.part._events

    def waits():
        waited = [each[-1] for each in seen if isinstance(each[-1], simulated.SharedEvent)]
        seen.clear()
        return sorted((place, rank) for place in range(3) for rank in range(n)
                      if any(one is events[place][rank] for one in waited))  # fmt: skip

    dist.gather(given, outputs if me == root else None, dst=root)
    assert waits() == ([(0, rank) for rank in range(root)] if me == root else [(1, root)])
    dist.scatter(given, outputs if me == root else None, src=root)
    assert waits() == ([(1, rank) for rank in range(root)] if me == root else [(0, root)])
    for rank in range(n) if me == root else ():
        assert (got(outputs[rank]) == numbers(LARGE, rank)).all()
    assert (got(given) == numbers(LARGE, me)).all()


def everything(copying, turn, made):
    """Make calls and overwrite their inputs. Append outputs and expected results to ``made``."""
    me, n = copying.me, copying.n
    spread = np.repeat(np.arange(n), LARGE)
    given, many = (copying.array(np.full(LARGE * k, me + turn, np.float32)) for k in (1, n))
    gathered, exchanged = (copying.array(np.zeros(n * LARGE, np.float32)) for _ in range(2))
    sent = copying.array(np.full(LARGE, me + turn, np.float32))
    dist.all_gather_single(gathered, given)
    dist.all_to_all_single(exchanged, many)
    dist.broadcast(sent, turn % n)
    copied = copying.array(np.zeros(LARGE, np.float32))
    copied.number = sent.number  # a consumer in its stream
    copying.cuda.copy(
        copying.index, copied.memory.address, sent.memory.address, 4 * LARGE, sent.number
    )
    for array in (given, many, sent):
        array.host[...] = -99
        array.upload()
    made += [(gathered, spread + turn), (exchanged, spread + turn), (copied, turn % n + turn)]


@pytest.mark.parametrize("slow, eager", [(0, 1), (1, 0), (0, 0), (None, None)])
def test_late_hosts_and_devices_that_run_ahead_do_not_corrupt_data(copying, slow, eager):
    copying.cuda.eager = copying.me == eager
    made = []
    for turn in range(4):
        if copying.me == slow:
            time.sleep(0.01)
        everything(copying, turn, made)
    for array, expected in made if copying.me % 2 else made[::-1]:
        assert (got(array) == expected).all()


def test_chain_of_calls_and_kernels_in_one_stream(copying):
    me, n = copying.me, copying.n
    array = copying.array(np.full(LARGE, me + 1, np.float32))
    output = copying.array(np.zeros(n * LARGE, np.float32), array)
    for turn in range(5):
        dist.broadcast(array, turn % n)
        array.double()
        work = dist.all_gather_single(output, array, async_op=turn % 2 == 1)
        if work is not None:
            work.wait()
        dist.all_reduce(array)
        output.double()
    expected = 2.0**4 * n**4
    assert (got(output) == 4 * expected).all() and (got(array) == 2 * expected * n).all()


def test_output_is_the_next_input_and_is_then_overwritten(copying):
    me, n = copying.me, copying.n
    output = copying.array(np.zeros((n, LARGE), np.float32))
    block = copying.array(np.full(LARGE, me + 1, np.float32), output)
    dist.all_gather_single(output, block)
    again = copying.arrays.make(np.zeros(LARGE, np.float32), copying.index)
    again.memory, again.offset, again.number = output.memory, 4 * LARGE * me, output.number
    later = copying.array(np.zeros((n, LARGE), np.float32))
    dist.all_gather_single(later, again)
    output.host[...] = 99
    output.upload()
    assert (got(later) == np.arange(n)[:, None] + 1).all()


def test_input_inside_the_output(copying):
    me, n = copying.me, copying.n
    output = copying.array(np.full((n, LARGE), me, np.float32))
    block = copying.arrays.make(np.zeros(LARGE, np.float32), copying.index)
    block.memory, block.offset, block.number = output.memory, 4 * LARGE * me, output.number
    dist.all_gather_single(output, block)
    assert (got(output) == np.arange(n)[:, None]).all()


def test_allocation_is_opened_once(copying, monkeypatch):
    """Arrays in one allocation share a handle. Outputs need no handle."""
    me, n = copying.me, copying.n
    first = copying.array(numbers(2 * LARGE, me))
    second = copying.arrays.make(numbers(LARGE, me), copying.index)
    second.memory, second.offset, second.number = first.memory, 4 * LARGE, first.number
    seen = simulated.record_calls(monkeypatch, copying.cuda, "open", "export_allocation")
    for given in (first, second, first, second):
        given.upload()
        output = copying.array(np.zeros((n, given.host.size), np.float32))
        dist.all_gather_single(output, given)
        assert (got(output) == [numbers(given.host.size, rank) for rank in range(n)]).all()
    names = [name for name, *_ in seen]
    assert names.count("open") == n - 1 and names.count("export_allocation") == 1


def test_memory_freed_and_allocated_again_at_the_same_address(copying):
    """It has another buffer id, so it is opened again."""
    me, n = copying.me, copying.n
    given, output = copying.array(numbers(LARGE, me)), copying.array(np.zeros((n, LARGE), "f4"))
    dist.all_gather_single(output, given)
    got(output)
    before = len(copying.cuda.opened)
    for turn in range(3):
        simulated.replace_memory(copying.arrays, given.memory)
        given.host[...] = numbers(LARGE, me) + turn
        given.upload()
        dist.all_gather_single(output, given)
        assert (got(output) == [numbers(LARGE, rank) + turn for rank in range(n)]).all()
    assert len(copying.cuda.opened) <= before + n
    del given, output
    for _ in range(20):  # freed memory is closed
        copying.check_all_gather()


def reject_mapped_addresses(monkeypatch, cuda):
    """Make ``open`` fail while other memory of the process is mapped at the same address."""
    export, open_memory, mapped = cuda.export, cuda.open, []

    def at_its_address(index, memory):
        words = export(index, memory).rstrip(b"\0") + f" {memory.address}".encode()
        return words.ljust(HANDLE_BYTES, b"\0")

    def open_once(index, handle):
        *words, base = handle.rstrip(b"\0").split()
        process, file, size, _ = map(int, words)
        begin, which = int(base), Path(f"/proc/{process}/fd/{file}").stat().st_ino
        mapped[:] = [one for one in mapped if one[0]() is not None]
        for _, exporter, other, start, end in mapped:
            if exporter == process and other != which and begin < end and start < begin + size:
                raise RuntimeError("cudaErrorAlreadyMapped")
        memory = open_memory(index, b" ".join(words).ljust(HANDLE_BYTES, b"\0"))
        mapped.append((weakref.ref(memory._owner), process, which, begin, begin + size))
        return memory

    monkeypatch.setattr(cuda, "export", at_its_address)
    monkeypatch.setattr(cuda, "open", open_once)


@pytest.mark.parametrize("mapped_by", ["the same group", "another group", "a new group"])
def test_memory_at_an_address_that_is_still_mapped(copying, monkeypatch, mapped_by):
    """The old mapping is closed, also if another group of the process has opened it. The memory is
    the user's or a new group's workspace.
    """
    me, n, cuda, whole = copying.me, copying.n, copying.cuda, workspaces.BLOCK
    reject_mapped_addresses(monkeypatch, cuda)
    other = dist.new_group()
    copying.check_all_gather(LARGE, other)
    given = copying.array(numbers(whole // 4, me))
    output = copying.array(np.zeros((n, whole // 4), "f4"))
    groups = {"another group": [other, None]}.get(mapped_by, [None])
    for turn in range(4):
        dist.all_gather_single(output, given, group=groups[turn % len(groups)])
        assert (got(output) == [numbers(whole // 4, rank) + turn for rank in range(n)]).all()
        simulated.replace_memory(copying.arrays, given.memory)
        given.host[...] = numbers(whole // 4, me) + turn + 1
        given.upload()
    made = [other.resources.find("devices").states["copy_engine"], copying.part]
    if mapped_by == "a new group":
        allocate, again = cuda.allocate, [given.memory]

        def allocate_again(index, nbytes):
            return again.pop() if again and nbytes <= whole else allocate(index, nbytes)

        monkeypatch.setattr(cuda, "allocate", allocate_again)
        group = dist.new_group()
        copying.check_all_gather(LARGE, group)
        assert not again
        agreed = group.resources.find("devices")
        assert not agreed.missing
        made.append(agreed.states.get("copy_engine"))
    assert not any(part._refused for part in made)


def test_close_unused_does_not_close_memory_during_a_call_of_another_thread(copying):
    part = copying.part
    copying.check_all_gather()
    kept = len(part._opened)
    with part._lock, ThreadPoolExecutor(1) as pool:
        assert pool.submit(part.close_unused).result() is False
    assert len(part._opened) == kept > 0
    assert part.close_unused() and not part._opened
    copying.check_all_gather()


def recording(function, results):
    """Return the function with its results added to ``results``."""

    def call(*arguments):
        result = function(*arguments)
        results.add(result)
        return result

    return call


@pytest.mark.parametrize("copying", ["a GPU each"], indirect=True)  # no other events
@pytest.mark.parametrize("fails", [False, True])
def test_opened_events_are_closed_before_they_are_destroyed(copying, monkeypatch, fails):
    """When the group is destroyed, and if the ranks cannot map memory."""
    group, opened, made, seen = dist.new_group(), weakref.WeakSet(), weakref.WeakSet(), []
    for name, into in (("open_event", opened), ("create_shared_event", made)):
        monkeypatch.setattr(copying.cuda, name, recording(getattr(copying.cuda, name), into))
    timed_barrier = user_buffers.timed_barrier
    if fails and copying.me == 0:
        monkeypatch.setattr(user_buffers, "open_memory", lambda *arguments: 1 / 0)
    monkeypatch.setattr(
        user_buffers, "timed_barrier",
        lambda *arguments: seen.append((len(opened), len(made))) or timed_barrier(*arguments),
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        copying.check_all_gather(LARGE, group)
    assert len(opened) == (0 if fails else 3 * (copying.n - 1))
    dist.destroy_process_group(group)
    assert seen == [(0, 3)]
    end = time.monotonic() + TIMEOUT
    while made:  # the last references are released a moment later
        assert time.monotonic() < end, "events were not destroyed"
        time.sleep(1e-3)


def test_number_of_open_allocations_is_limited(copying, monkeypatch):
    monkeypatch.setattr(user_buffers, "OPEN", 4)
    me, n, part = copying.me, copying.n, copying.part
    kept = [copying.array(numbers(LARGE + turn, me)) for turn in range(12)]
    outputs = [copying.array(np.zeros((n, LARGE + turn), np.float32)) for turn in range(12)]
    for _ in range(2):
        for given, output in zip(kept, outputs, strict=True):
            dist.all_gather_single(output, given)
    assert len(part._opened) <= 4 * n and len(part._handles) <= 4
    for output in outputs:
        assert (got(output) == [numbers(output.shape[1], rank) for rank in range(n)]).all()


@pytest.mark.parametrize("rank", [0, -1])
def test_input_that_cannot_be_exported_is_copied_on_its_rank(copying, monkeypatch, rank):
    me, n = copying.me, copying.n
    kind = "pool" if me == rank % n else "plain"
    given = copying.array(numbers(LARGE, me), kind=kind)
    output = copying.array(np.zeros((n, LARGE), np.float32), kind=kind)
    sent = copying.array(numbers(n * LARGE, me), kind=kind)
    seen = simulated.record_calls(monkeypatch, copying.cuda, "copy")
    dist.all_gather_single(output, given)
    assert len(seen) == n + (kind == "pool")
    dist.broadcast(sent, 1)
    assert (got(output) == [numbers(LARGE, rank) for rank in range(n)]).all()
    assert (got(sent) == numbers(n * LARGE, 1)).all()


@pytest.mark.parametrize("name", ["all_gather_single", "broadcast"])
def test_memory_that_cannot_be_opened_is_copied(copying, mpi, monkeypatch, name):
    """The call is repeated with a copy in memory that can be opened."""
    me, n, part = copying.me, copying.n, copying.part
    original, bad = copying.cuda.open, set()

    def fail(index, handle):
        if handle in bad or "all" in bad:
            raise RuntimeError("this one cannot be opened")
        return original(index, handle)

    def call(count=LARGE):
        given = copying.array(numbers(count, me))
        output = copying.array(np.zeros((n, count), np.float32))
        if "all" not in bad:
            found = copying.cuda.find_allocation(given.memory.address)
            bad.update(mpi.allgather(copying.cuda.export_allocation(0, found)))
        if name == "broadcast":
            dist.broadcast(given, 1)
            assert (got(given) == numbers(count, 1)).all()
        else:
            dist.all_gather_single(output, given)
            assert (got(output) == [numbers(count, rank) for rank in range(n)]).all()

    monkeypatch.setattr(copying.cuda, "open", fail)
    for turn in (1, 2):
        call()
        assert len(part._refused) == (turn if name != "broadcast" or n > 2 or me == 1 else 0)
    bad.add("all")
    part.close_unused()  # also closes scratch memory
    with pytest.raises(DistBackendError, match=r"cannot map rank \d's|another rank failed"):
        call()
    monkeypatch.setattr(copying.cuda, "open", original)
    call()


def test_scratch_that_cannot_be_opened_is_replaced(copying, mpi, monkeypatch):
    part, original, bad = copying.part, copying.cuda.open, set()

    def fail(index, handle):
        if handle in bad:
            raise RuntimeError("this one cannot be opened")
        return original(index, handle)

    monkeypatch.setattr(copying.cuda, "open", fail)
    for turn in range(3):
        part.context.begin()
        memory, (_, handle) = part._scratch(LARGE)  # the scratch of the next call
        bad.update(mpi.allgather(handle))
        assert memory.nbytes % workspaces.BLOCK == 0
        copying.check_all_gather(kind="pool")
        assert len(part._refused) == turn + 1
    copying.check_all_gather()


@pytest.mark.parametrize("failing", [0, 1])
def test_memory_is_copied_if_its_export_fails(copying, monkeypatch, failing):
    """The driver reports that it can be exported. Later calls copy it without another try."""
    original, failed = copying.cuda.export_allocation, []
    given = copying.array(numbers(LARGE, copying.me))
    output = copying.array(np.zeros((copying.n, LARGE), np.float32))

    def fail(index, found):
        if copying.me == failing and found.base == given.memory.address:
            failed.append(found)
            raise RuntimeError("no handle of this one")
        return original(index, found)

    monkeypatch.setattr(copying.cuda, "export_allocation", fail)
    copies = simulated.record_calls(monkeypatch, copying.cuda, "copy")
    for _ in range(3):
        copies.clear()
        dist.all_gather_single(output, given)
        assert len(copies) == copying.n + (copying.me == failing)
        assert (got(output) == [numbers(LARGE, rank) for rank in range(copying.n)]).all()
    assert len(failed) == (copying.me == failing)


def test_scratch_size_is_a_multiple_of_the_block_size(copying):
    """Also if scratch of another size exists."""
    part = copying.part
    part.context.begin()
    part.context.scratch(workspaces.BLOCK + 100)
    part.context.begin()
    memory, _ = part._scratch(100)
    assert memory.nbytes == 2 * workspaces.BLOCK
    part.context.begin()
    assert part.context.scratch(workspaces.BLOCK + 100) is memory
    copying.check_all_gather()


def test_arrays_on_another_device_are_copied_to_the_groups_device(copying):
    home = copying.index
    for index in (1, 0, home):
        copying.index = index
        copying.check_all_gather()


@pytest.mark.parametrize("copying", ["a GPU each"], indirect=True)
@pytest.mark.parametrize("name", ["broadcast", "all_to_all_single"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "what",
    ["find_allocation", "export_allocation", "open", "record_again", "wait", "copy", "allocate"],
)
def test_failure_of_one_rank(copying, mpi, what, failing, name):
    """The call fails on all ranks at once. Later calls succeed."""
    me, n, part = copying.me, copying.n, copying.part
    layout = "third" if what == "allocate" else "C"
    given = copying.array(np.full(LARGE // n * n, me, np.float32), layout=layout)
    output = copying.array(np.zeros(given.host.size * (n if "gather" in name else 1), "f4"))

    def counts(*arguments):
        return what not in ("wait", "copy") or part.context.work in arguments

    with simulated.Fault(copying.cuda, what, me == failing, counts=counts) as fault:
        if name == "broadcast":
            dist.broadcast(given, 1)
        else:
            getattr(dist, name)(output, given)
    error = fault.error
    copied = what in ("open", "export_allocation")  # such memory is copied
    if what != "wait" and not copied:  # "wait" may follow the last synchronization
        assert len(set(mpi.allgather(error is not None))) == 1
    if me == failing:
        assert (error is not None) == (fault.failed and not copied)
        assert error is None or "injected failure" in str(error)
    else:
        assert error is None or "another rank failed" in str(error)
    for count in (10, LARGE):
        copying.check_all_gather(count)


def test_mismatch(copying):
    for _ in range(66):  # from the 65th call on, calls are compared in shared memory
        copying.check_all_gather(300)
    me, n = copying.me, copying.n
    with pytest.raises(MismatchError):
        dist.broadcast(copying.array(np.zeros(LARGE + (me == 0), np.float32)))
    receives = [LARGE] * n
    sends = [LARGE + (me == 0 != rank) for rank in range(n)]
    given, output = (copying.array(np.zeros(sum(c), np.float32)) for c in (sends, receives))
    message = (
        "other ranks' block" if me == 0 else f"expected {LARGE} elements from rank 0, which sen"
    )
    with pytest.raises(MismatchError, match=message):
        dist.all_to_all_single(output, given, receives, sends)
    copying.check_all_gather()


@pytest.mark.parametrize("what", ["create_shared_event", "open_event", "open"])
def test_route_is_off_if_ipc_fails_on_one_rank(copying, what):
    """All ranks use another route. Rank 0 warns."""
    with forced("copy_engine"):
        group = dist.new_group()
        message = r"copy_engine: rank 1: .*injected failure"
        with (
            simulated.Fault(copying.cuda, what, copying.me == 1),
            pytest.raises(UnsupportedError, match=message),
        ):
            copying.check_all_gather(group=group)
    if what == "create_shared_event":  # no other route needs it
        group = dist.new_group()
        with (
            simulated.Fault(copying.cuda, what, copying.me == 1) as fault,
            warnings.catch_warnings(record=True, action="always") as caught,
        ):
            copying.check_all_gather(group=group)
        assert fault.error is None
        warned = [str(one.message) for one in caught]
        assert any("copy_engine is off: rank 1" in one for one in warned) == (copying.me == 0)
        agreed = group.resources.find("devices")
        assert (
            "copy_engine" not in agreed.names
            and "injected failure" in agreed.describe()["copy_engine"]
        )


def test_captured_calls_use_kernels(copying, monkeypatch):
    """Large calls outside of a capture load these kernels."""
    me, n = copying.me, copying.n
    given = copying.array(numbers(LARGE, me))
    output = copying.array(np.zeros((n, LARGE), np.float32), given)
    if dist.group.WORLD.resources.find("devices").states.get("peer") is None:
        dist.all_gather_single(output, given)
        with copying.arrays.capturing(given), pytest.raises(UnsupportedError, match="captured"):
            dist.all_gather_single(output, given)
        return
    copying.cuda.loaded.clear()
    seen = simulated.record_calls(monkeypatch, copying.cuda, "collective", "copy")
    dist.all_gather_single(output, given)
    dist.broadcast(given, 1)
    assert {name for name, *_ in seen} == {"copy"} or (me == 1 and n == 2)
    given.upload()
    output.host[...] = 0
    output.upload()
    with copying.arrays.capturing(given) as graph:
        dist.all_gather_single(output, given)
        dist.broadcast(given, 1)
    assert len(graph.tasks) == 2 and (got(output) == 0).all()
    for turn in range(3):
        graph.launch()
        if turn == 1:
            dist.broadcast(given, 0)
    first = 1 if n > 1 else 0
    assert (got(output) == numbers(LARGE, first)).all() and (got(given) == numbers(LARGE, 1)).all()
