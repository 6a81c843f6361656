"""Routes ``shared_gpu`` and ``copy_engine`` on simulated GPUs, which work on the ranks' arrays."""

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
from device_arrays import forced
from test_devices import got

import mpicoll as dist
from mpicoll.cuda import capabilities, runtime
from mpicoll.cuda.runtime import HANDLE_BYTES
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.failures import consistency
from mpicoll.routes import registry
from mpicoll.routes.device import copy_engine, ipc, peer, shared_gpu, user_buffers, workspaces

pytestmark = pytest.mark.on_3

ROUTE = registry.DEVICE["copy_engine"]
#: Minimum size in bytes of calls that use copy_engine; maximum size of small calls of shared_gpu.
#: A number of float32 above them.
MIN_BYTES, SMALL = 1000, 1024
LARGE = 1500
#: Route and number of GPUs.
PLACES = {
    "shared_gpu": ("shared_gpu", 2), "a GPU each": ("copy_engine", 4),
    "two GPUs": ("copy_engine", 2),
}  # fmt: skip
on_one_gpu = pytest.mark.parametrize("world", ["shared_gpu"], indirect=True)
on_gpus = pytest.mark.parametrize("world", ["a GPU each", "two GPUs"], indirect=True)
on_own_gpus = pytest.mark.parametrize("world", ["a GPU each"], indirect=True)
in_turn = pytest.mark.parametrize("world", ["shared_gpu", "a GPU each"], indirect=True)


@pytest.fixture(params=PLACES)
def world(request, mpi, monkeypatch):
    if mpi.size == 1:
        pytest.skip("needs two ranks")
    if mpi.size == 2 and request.param == "two GPUs":
        pytest.skip("the same as a GPU each")
    route, devices = PLACES[request.param]
    arrays = simulated.Arrays(devices)
    monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "none")
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(shared_gpu, "SMALL", SMALL)
    monkeypatch.setattr(copy_engine, "LINE", 64)
    monkeypatch.setattr(copy_engine, "MIN_BYTES", MIN_BYTES)
    monkeypatch.setattr(copy_engine, "LANES", 3)
    monkeypatch.setattr(peer, "WORKSPACE", 64 * 1024)
    monkeypatch.setattr(ipc, "SLOT", 4096)
    policy = replace(ROUTE.policy, min_bytes=dict.fromkeys(ROUTE.policy.min_bytes, MIN_BYTES))
    monkeypatch.setitem(registry.DEVICE, "copy_engine", replace(ROUTE, policy=policy))
    dist.init_process_group(timeout=TIMEOUT)
    made = World(arrays, route)
    made.check_all_gather(10)
    made.part = made.agreed().states[route]
    yield made
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # frees the frames of caught errors
    assert not arrays.cuda.opened


class World:
    """Arrays on this rank's device.

    part:  the state of the route in the default group.
    reads: this rank maps the memory of other ranks.
    """

    def __init__(self, arrays, route):
        self.arrays, self.cuda, self.route = arrays, arrays.cuda, route
        self.me, self.n = dist.get_rank(), dist.get_world_size()
        self.shares = route == "shared_gpu"
        self.index = 0 if self.shares else self.me % arrays.devices
        self.reads = not self.shares or self.me == 0

    def agreed(self, group=None):
        return (group or dist.group.WORLD).resources.find("devices")

    def array(self, values, beside=None, **options):
        """Return an array with values, in the stream of ``beside``."""
        made = self.arrays.make(np.array(values), self.index, **options)
        if beside is not None:
            made.number = beside.number
        made.upload()
        return made

    def full(self, value, count=LARGE, **options):
        return self.array(np.full(count, value, np.float32), **options)

    def rows(self, count=LARGE, **options):
        return self.array(np.zeros((self.n, count), np.float32), **options)

    def check_all_gather(self, count=LARGE, group=None, **options):
        given, output = self.array(numbers(count, self.me), **options), self.rows(count, **options)
        dist.all_gather_single(output, given, group=group)
        self.check_rows(output)

    def check_rows(self, output, added=0):
        expected = [numbers(output.shape[1], rank) + added for rank in range(self.n)]
        assert (got(output) == expected).all()

    def inside(self, array, start):
        """Return an array of LARGE elements in the memory and stream of another."""
        block = self.arrays.make(np.zeros(LARGE, np.float32), self.index)
        block.memory, block.offset, block.number = array.memory, 4 * start, array.number
        return block


def numbers(count, rank):
    return (np.arange(count) % 61 + 100 * rank).astype(np.float32)


# ---- Selection -----------------------------------------------------------------------------------


@on_gpus
def test_copy_engine_serves_data_movement(world, monkeypatch):
    """Large calls only, except for primitives that route ``peer`` does not serve."""
    me, n, calls = world.me, world.n, []
    original = world.part._run
    monkeypatch.setattr(
        world.part, "_run", lambda kind, *arguments: calls.append(kind.primitive.name)
        or original(kind, *arguments)
    )  # fmt: skip
    for count in (2, LARGE):
        one, many = (world.full(me, k * count) for k in (1, n))
        rows, output = [world.full(0, count) for _ in range(n)], one
        dist.all_reduce(one)
        dist.reduce_scatter_single(one, many)
        dist.broadcast(one)
        dist.all_gather(rows, rows[me])
        dist.all_gather_single(many, one)
        dist.gather(rows[0], rows if me == 0 else None)
        dist.scatter(output, rows if me == 0 else None)
        dist.all_to_all(rows, [world.full(0, count) for _ in range(n)])
        dist.all_to_all_single(many, world.rows(count))
    always = ["gather", "scatter", "all_to_all", "all_to_all_single"]
    assert calls == [*always, "broadcast", "all_gather", "all_gather_single", *always]
    first = "peer" if world.arrays.devices > 2 or n == 2 else "hierarchical"
    assert world.agreed().names == (first, "copy_engine", "ipc", "staged")
    assert world.agreed().describe()["copy_engine"] == ""


@on_one_gpu
def test_shared_gpu_is_selected_if_all_arrays_are_on_one_gpu(world):
    assert world.agreed().names == ("shared_gpu", "staged")
    assert world.agreed().describe()["shared_gpu"] == ""
    group, n = dist.new_group(), world.n
    world.index = int(world.me == n - 1)
    world.check_all_gather(10, group)
    own = "peer" if n == 2 else "hierarchical"
    assert world.agreed(group).names == (own, "copy_engine", "ipc", "staged")
    why = world.agreed(group).describe()["shared_gpu"]
    assert why == f"rank {n - 1} has its arrays on another GPU than rank 0"


@on_gpus
def test_group_of_one_rank_does_not_use_the_route(world):
    groups = [dist.new_group([rank]) for rank in range(world.n)]
    given, output = world.array(numbers(LARGE, world.me)), world.array(numbers(LARGE, 9))
    dist.all_gather_single(output, given, group=groups[world.me])
    assert (got(output) == numbers(LARGE, world.me)).all()
    agreed = world.agreed(groups[world.me])
    assert "copy_engine" not in {*agreed.states, *agreed.names}


@on_gpus
def test_forced_route_raises_for_reductions(world):
    with forced("copy_engine"):
        group = dist.new_group()
        world.check_all_gather(3, group)
        with pytest.raises(UnsupportedError, match="=copy_engine does not serve SUM of float32"):
            dist.all_reduce(world.full(0), group=group)
        world.check_all_gather(LARGE, group)


@in_turn
@pytest.mark.parametrize("what", ["create_shared_event", "open_event", "open"])
def test_route_is_off_if_ipc_fails_on_one_rank(world, what):
    """All ranks use another route, and rank 0 warns. Forcing the route raises."""
    failing, route = 0 if what == "open" and world.shares else 1, world.route
    with forced(route):
        group = dist.new_group()
        message = rf"{route}: rank {failing}: .*injected failure"
        with (
            simulated.Fault(world.cuda, what, world.me == failing),
            pytest.raises(UnsupportedError, match=message),
        ):
            world.check_all_gather(group=group)
    group = dist.new_group()
    with (
        simulated.Fault(world.cuda, what, world.me == failing) as fault,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        world.check_all_gather(group=group)
    assert fault.error is None
    if what == "open" and not world.shares:  # route peer fails instead
        return
    warned = [str(one.message) for one in caught]
    assert any(f"{route} is off: rank {failing}" in one for one in warned) == (world.me == 0)
    agreed = world.agreed(group)
    assert route not in agreed.names and "injected failure" in agreed.describe()[route]


# ---- Work ----------------------------------------------------------------------------------------

_WORK = ("copy", "copy_strided", "combine", "collective")


def test_data_is_copied_once_without_host_synchronization(world, monkeypatch):
    """By rank 0 or by each rank, from the next rank's array first."""
    me, n = world.me, world.n
    array, output = world.full(me, n * 300), world.rows(n * 300)
    seen = simulated.record_calls(monkeypatch, world.cuda, *_WORK, "synchronize", "is_done")
    dist.all_gather_single(output, array)
    dist.broadcast(array, n - 1)
    seen = [*seen]  # without the calls of got()
    assert {name for name, *_ in seen} <= {"copy"}
    if world.shares:
        assert len(seen) == (n * n + n - 1 if me == 0 else 0)
    else:
        moved = [(into, nbytes) for _, _, into, _, nbytes, _ in seen]
        gathered, rest = moved[:n], moved[n:]
        first, block = output.memory.address, n * 1200
        assert gathered == [(first + (me + k + 1) % n * block, block) for k in range(n)]
        assert sum(nbytes for _, nbytes in rest) == (0 if me == n - 1 else block)
        assert len(rest) == (0 if me == n - 1 else 1 if n == 2 else n)
    assert (got(output) == np.arange(n)[:, None]).all() and (got(array) == n - 1).all()


@on_one_gpu
def test_rank_0_enqueues_one_kernel_without_host_synchronization(world, monkeypatch):
    """The kernel has n inputs and n outputs. The other ranks enqueue nothing."""
    me, n, array = world.me, world.n, world.full(world.me)
    names = "combine", "copy", "synchronize", "is_done"
    seen = simulated.record_calls(monkeypatch, world.cuda, *names)
    dist.all_reduce(array)
    seen = [*seen]
    assert [name for name, *_ in seen] == (["combine"] if me == 0 else [])
    if me == 0:
        _, _, _, sources, outs, count, *_ = seen[0]
        assert list(sources) == list(outs) and len(set(outs)) == n and count == LARGE
        assert array.memory.address in outs
    assert (got(array) == sum(range(n))).all()


@on_gpus
def test_large_copies_use_several_streams(world, monkeypatch):
    """Each stream waits until the arrays are ready. Small copies use one stream."""
    n, work = world.n, world.part.context.work
    seen = simulated.record_calls(monkeypatch, world.cuda, "copy", "wait")
    for count in (10, LARGE):
        given, output = world.full(world.me, (n, count)), world.rows(count)
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
                and one[-1].stream is world.cuda.streams[one[1], work]
            )  # fmt: skip
            assert begun > max(ready)
        assert (got(output) == np.arange(n)[:, None]).all()


def test_number_of_synchronizations(world, monkeypatch):
    """A call has two, a small call of shared_gpu one, a broadcast by copies to several ranks three.
    Calls are compared once more after the first ones of a group.
    """
    exchange, calls, agreed = world.part._exchange, [], []
    monkeypatch.setattr(world.part, "_exchange", lambda *a: calls.append(a) or exchange(*a))
    world.check_all_gather()
    assert len(calls) == 2
    dist.broadcast(world.full(0))
    assert len(calls) == 2 + (2 if world.n == 2 or world.shares else 3)
    if not world.shares:
        return
    calls.clear()
    world.check_all_gather(10)
    assert len(calls) == 1
    monkeypatch.setattr(consistency, "FIRST", 1)  # the route compares later calls
    world.check_all_gather(10)
    group = dist.group.WORLD
    agree = group.agree
    monkeypatch.setattr(group, "agree", lambda *a: agreed.append(a) or agree(*a))
    for count, expected in ((10, 2), (LARGE, 3)):
        agreed.clear()
        world.check_all_gather(count)
        assert group.compared and len(agreed) == expected


@on_gpus
def test_ranks_wait_only_for_ranks_that_they_exchange_data_with(world, monkeypatch):
    me, n, root = world.me, world.n, world.n - 1
    given, outputs = world.array(numbers(LARGE, me)), [world.full(0) for _ in range(n)]
    seen = simulated.record_calls(monkeypatch, world.cuda, "wait")
    events = world.part._events

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


# ---- Order ---------------------------------------------------------------------------------------


def everything(world, turn, made):
    """Make calls and overwrite their inputs. Append outputs and expected results to ``made``."""
    me, n = world.me, world.n
    for count in (LARGE, 10):
        spread = np.repeat(np.arange(n), count)
        given, many, sent = (world.full(me + turn, count * k) for k in (1, n, 1))
        gathered, exchanged = (world.full(0, n * count) for _ in range(2))
        dist.all_gather_single(gathered, given)
        dist.all_to_all_single(exchanged, many)
        dist.broadcast(sent, turn % n)
        copied = world.full(0, count)
        copied.number = sent.number  # a consumer in its stream
        places = copied.memory.address, sent.memory.address
        world.cuda.copy(world.index, *places, 4 * count, sent.number)
        for array in (given, many, sent):
            array.host[...] = -99
            array.upload()
        made += [(gathered, spread + turn), (exchanged, spread + turn), (copied, turn % n + turn)]


@pytest.mark.parametrize("slow, eager", [(0, 1), (1, 0), (0, 0), (None, None)])
def test_late_hosts_and_devices_that_run_ahead_do_not_corrupt_data(world, slow, eager):
    world.cuda.eager = world.me == eager
    made = []
    for turn in range(4):
        if world.me == slow:
            time.sleep(0.01)
        everything(world, turn, made)
    for array, expected in made if world.me % 2 else made[::-1]:
        assert (got(array) == expected).all()


@on_one_gpu
@pytest.mark.parametrize("slow", [0, 1])
def test_late_rank_reads_before_other_ranks_overwrite(world, monkeypatch, slow):
    me, n, original = world.me, world.n, shared_gpu._on_host

    def late(*arguments):
        if me == slow:
            time.sleep(0.02)
        return original(*arguments)

    monkeypatch.setattr(shared_gpu, "_on_host", late)
    made = []
    for turn in range(6):
        for count in (10, 11, LARGE)[: 1 + turn % 3]:
            given, output = world.full(me + turn, count), world.rows(count)
            dist.all_gather_single(output, given)
            dist.broadcast(given, turn % n)
            made.append((turn, given, output))
    for turn, given, output in made:
        assert (got(output) == np.arange(n)[:, None] + turn).all()
        assert (got(given) == turn % n + turn).all()


@in_turn
def test_chain_of_calls_and_kernels_in_one_stream(world):
    me, n = world.me, world.n
    array = world.full(me + 1)
    output = world.full(0, n * LARGE, beside=array)
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


def test_input_inside_the_output_which_is_then_overwritten(world):
    me, n = world.me, world.n
    output = world.array(np.repeat(np.full((1, LARGE), me, np.float32), n, 0))
    dist.all_gather_single(output, world.inside(output, LARGE * me))
    later = world.rows()
    dist.all_gather_single(later, world.inside(output, LARGE * me))
    output.host[...] = 99
    output.upload()
    assert (got(later) == np.arange(n)[:, None]).all()


@on_one_gpu
def test_two_groups_with_different_first_ranks_do_not_block(world):
    me, n = world.me, world.n
    back = dist.new_group(list(range(n))[::-1])
    array, other = world.full(me), world.full(me)
    for _ in range(5):
        dist.all_reduce(array)
        dist.all_reduce(other, group=back)
        array.double()
    expected = sum(range(n)) * n**4 * 2.0**5
    assert (got(array) == expected).all() and (got(other) == sum(range(n)) * n**4).all()


# ---- Memory --------------------------------------------------------------------------------------


@on_own_gpus
def test_allocation_is_opened_once(world, monkeypatch):
    """Arrays in one allocation share a handle. Outputs need no handle."""
    first = world.array(numbers(2 * LARGE, world.me))
    second = world.inside(first, LARGE)
    second.host[...] = numbers(LARGE, world.me)
    seen = simulated.record_calls(monkeypatch, world.cuda, "open", "export_allocation")
    for given in (first, second, first, second):
        given.upload()
        output = world.rows(given.host.size)
        dist.all_gather_single(output, given)
        world.check_rows(output)
    names = [name for name, *_ in seen]
    assert names.count("open") == world.n - 1 and names.count("export_allocation") == 1


def test_memory_freed_and_allocated_again_at_the_same_address(world):
    """It has another buffer id, so it is opened again."""
    given, output = world.array(numbers(LARGE, world.me)), world.rows()
    dist.all_gather_single(output, given)
    got(output)
    before = len(world.cuda.opened)
    for turn in range(3):
        simulated.replace_memory(world.arrays, given.memory)
        given.host[...] = numbers(LARGE, world.me) + turn
        given.upload()
        dist.all_gather_single(output, given)
        world.check_rows(output, turn)
    assert len(world.cuda.opened) <= before + world.n
    del given, output
    for _ in range(20):  # freed memory is closed
        world.check_all_gather()


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


@on_gpus
@pytest.mark.parametrize("mapped_by", ["the same group", "another group", "a new group"])
def test_memory_at_an_address_that_is_still_mapped(world, monkeypatch, mapped_by):
    """The old mapping is closed, also if another group of the process has opened it. The memory is
    the user's or a new group's workspace.
    """
    me, cuda, whole = world.me, world.cuda, workspaces.BLOCK
    reject_mapped_addresses(monkeypatch, cuda)
    other = dist.new_group()
    world.check_all_gather(LARGE, other)
    given, output = world.array(numbers(whole // 4, me)), world.rows(whole // 4)
    groups = {"another group": [other, None]}.get(mapped_by, [None])
    for turn in range(4):
        dist.all_gather_single(output, given, group=groups[turn % len(groups)])
        world.check_rows(output, turn)
        simulated.replace_memory(world.arrays, given.memory)
        given.host[...] = numbers(whole // 4, me) + turn + 1
        given.upload()
    made = [world.agreed(other).states["copy_engine"], world.part]
    if mapped_by == "a new group":
        allocate, again = cuda.allocate, [given.memory]

        def allocate_again(index, nbytes):
            return again.pop() if again and nbytes <= whole else allocate(index, nbytes)

        monkeypatch.setattr(cuda, "allocate", allocate_again)
        group = dist.new_group()
        world.check_all_gather(LARGE, group)
        assert not again and not world.agreed(group).missing
        made.append(world.agreed(group).states["copy_engine"])
    assert not any(part._refused for part in made)


@on_own_gpus
def test_close_unused_does_not_close_memory_during_a_call_of_another_thread(world):
    part = world.part
    world.check_all_gather()
    kept = len(part._opened)
    with part._lock, ThreadPoolExecutor(1) as pool:
        assert pool.submit(part.close_unused).result() is False
    assert len(part._opened) == kept > 0
    assert part.close_unused() and not part._opened
    world.check_all_gather()


def recording(function, results):
    """Return the function with its results added to ``results``."""

    def call(*arguments):
        result = function(*arguments)
        results.add(result)
        return result

    return call


@on_own_gpus  # no other events
@pytest.mark.parametrize("fails", [False, True])
def test_opened_events_are_closed_before_they_are_destroyed(world, monkeypatch, fails):
    """When the group is destroyed, and if the ranks cannot map memory."""
    group, opened, made, seen = dist.new_group(), weakref.WeakSet(), weakref.WeakSet(), []
    for name, into in (("open_event", opened), ("create_shared_event", made)):
        monkeypatch.setattr(world.cuda, name, recording(getattr(world.cuda, name), into))
    timed_barrier = user_buffers.timed_barrier
    if fails and world.me == 0:
        monkeypatch.setattr(user_buffers, "open_memory", lambda *arguments: 1 / 0)
    monkeypatch.setattr(
        user_buffers, "timed_barrier",
        lambda *arguments: seen.append((len(opened), len(made))) or timed_barrier(*arguments),
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):
        world.check_all_gather(LARGE, group)
    assert len(opened) == (0 if fails else 3 * (world.n - 1))
    dist.destroy_process_group(group)
    assert seen == [(0, 3)]
    end = time.monotonic() + TIMEOUT
    while made:  # the last references are released a moment later
        assert time.monotonic() < end, "events were not destroyed"
        time.sleep(1e-3)


def test_number_of_open_allocations_is_limited(world, monkeypatch):
    """Memory is not closed while the device may use it. It runs nothing before the end."""
    monkeypatch.setattr(user_buffers, "OPEN", 4)
    me, n, part = world.me, world.n, world.part
    kept = [world.array(numbers(LARGE + turn, me)) for turn in range(12)]
    outputs = [world.rows(LARGE + turn) for turn in range(12)]
    for _ in range(2):
        for given, output in zip(kept, outputs, strict=True):
            dist.all_gather_single(output, given)
    assert len(part._opened) <= (4 * n if world.reads else 0) and len(part._handles) <= 4
    for output in outputs:
        world.check_rows(output)
    world.check_all_gather()
    # The two arrays per rank of the last call may have replaced mappings that are still in use.
    assert not world.shares or len(world.cuda.opened) <= (6 * n if me == 0 else 0)


@on_one_gpu
def test_destroyed_groups_release_handles_and_streams(world):
    cuda, array = world.cuda, world.full(world.me)
    dist.all_reduce(array)
    got(array)
    world.part.close_unused()
    opened, streams, left_behind = len(cuda.opened), len(cuda.streams), [*user_buffers._left_behind]
    for _ in range(3):
        group = dist.new_group()
        array.host[...] = world.me
        array.upload()
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(world.n))).all()
        dist.destroy_process_group(group)
        assert len(cuda.opened) == opened and user_buffers._left_behind == left_behind
    assert len(cuda.streams) == streams


@pytest.mark.parametrize("rank", [0, -1])
def test_memory_that_cannot_be_exported_is_copied_on_its_rank(world, monkeypatch, rank):
    me, n = world.me, world.n
    kind = "pool" if me == rank % n else "plain"
    given, output = world.array(numbers(LARGE, me), kind=kind), world.rows(kind=kind)
    sent = world.array(numbers(n * LARGE, me), kind=kind)
    seen = simulated.record_calls(monkeypatch, world.cuda, "copy")
    dist.all_gather_single(output, given)
    assert world.shares or len(seen) == n + (kind == "pool")
    dist.broadcast(sent, 1)
    world.check_rows(output)
    assert (got(sent) == numbers(n * LARGE, 1)).all()
    if world.shares:
        for layout in ("1", "third"):
            array = world.full(me + 1, layout=layout, kind=kind)
            dist.all_reduce(array)
            assert (got(array) == n * (n + 1) // 2).all()


@in_turn
@pytest.mark.parametrize("name", ["all_gather_single", "broadcast"])
def test_memory_that_cannot_be_opened_is_copied(world, mpi, monkeypatch, name):
    """The call is repeated with a copy in memory that can be opened."""
    me, n, part = world.me, world.n, world.part
    original, bad = world.cuda.open, set()

    def fail(index, handle):
        if handle in bad or "all" in bad:
            raise RuntimeError("this one cannot be opened")
        return original(index, handle)

    def call(count=LARGE):
        given, output = world.array(numbers(count, me)), world.rows(count)
        if "all" not in bad:
            found = world.cuda.find_allocation(given.memory.address)
            bad.update(mpi.allgather(world.cuda.export_allocation(0, found)))
        if name == "broadcast":
            dist.broadcast(given, 1)
            assert (got(given) == numbers(count, 1)).all()
        else:
            dist.all_gather_single(output, given)
            world.check_rows(output)

    monkeypatch.setattr(world.cuda, "open", fail)
    for turn in (1, 2):
        call()
        shows = me != 0 if world.shares else name != "broadcast" or n > 2 or me == 1
        assert len(part._refused) == (turn if shows else 0)
    bad.add("all")
    part.close_unused()  # also closes scratch memory
    with pytest.raises(DistBackendError, match=r"cannot map rank \d's|another rank failed"):
        call()
    monkeypatch.setattr(world.cuda, "open", original)
    call()


@on_own_gpus
def test_scratch_that_cannot_be_opened_is_replaced(world, mpi, monkeypatch):
    part, original, bad = world.part, world.cuda.open, set()

    def fail(index, handle):
        if handle in bad:
            raise RuntimeError("this one cannot be opened")
        return original(index, handle)

    monkeypatch.setattr(world.cuda, "open", fail)
    for turn in range(3):
        part.context.begin()
        memory, (_, handle) = part._scratch(LARGE)  # the scratch of the next call
        bad.update(mpi.allgather(handle))
        assert memory.nbytes % workspaces.BLOCK == 0
        world.check_all_gather(kind="pool")
        assert len(part._refused) == turn + 1
    world.check_all_gather()


@on_own_gpus
@pytest.mark.parametrize("failing", [0, 1])
def test_memory_is_copied_if_its_export_fails(world, monkeypatch, failing):
    """The driver reports that it can be exported. Later calls copy it without another try."""
    original, failed = world.cuda.export_allocation, []
    given, output = world.array(numbers(LARGE, world.me)), world.rows()

    def fail(index, found):
        if world.me == failing and found.base == given.memory.address:
            failed.append(found)
            raise RuntimeError("no handle of this one")
        return original(index, found)

    monkeypatch.setattr(world.cuda, "export_allocation", fail)
    copies = simulated.record_calls(monkeypatch, world.cuda, "copy")
    for _ in range(3):
        copies.clear()
        dist.all_gather_single(output, given)
        assert len(copies) == world.n + (world.me == failing)
        world.check_rows(output)
    assert len(failed) == (world.me == failing)


def test_arrays_on_another_device_are_copied_to_the_groups_device(world):
    home = world.index
    for index in (1, world.me % 2, home):
        world.index = index
        world.check_all_gather()


# ---- Failures ------------------------------------------------------------------------------------


@in_turn
@pytest.mark.parametrize(
    ("name", "earlier"),  # from the 65th call on, calls are compared in shared memory
    [("all_reduce", 0), ("all_reduce", 66), ("broadcast", 0), ("all_to_all_single", 66)],
)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    "what",
    ["find_allocation", "export_allocation", "open", "load", "record_again", "wait", "copy",
     "combine", "allocate"],
)  # fmt: skip
def test_failure_of_one_rank(world, mpi, what, failing, name, earlier):
    """The call fails on all ranks at once. Later calls succeed."""
    me, n, part = world.me, world.n, world.part
    if name == "all_reduce" and not world.shares:
        pytest.skip("uses another route")
    for _ in range(earlier):
        world.check_all_gather(300)
    layout = "third" if what == "allocate" else "C"
    given, output = world.full(me, LARGE // n * n, layout=layout), world.full(0, LARGE // n * n)

    def counts(*arguments):
        return what not in ("wait", "copy") or part.context.work in arguments

    with simulated.Fault(world.cuda, what, me == failing, counts=counts) as fault:
        if name == "broadcast":
            dist.broadcast(given, 1)
        elif name == "all_reduce":
            dist.all_reduce(given)
        else:
            dist.all_to_all_single(output, given)
    error = fault.error
    copied = what in ("open", "export_allocation")  # such memory is copied
    late = what == "wait" and (failing == 1 or not world.shares)  # after the last synchronization
    if not late:
        assert len(set(mpi.allgather(error is not None))) == 1
    if me == failing:
        assert (error is not None) == (fault.failed and not copied)
        assert error is None or "injected failure" in str(error)
    else:
        assert error is None or "another rank failed" in str(error)
    for count in (10, LARGE):
        world.check_all_gather(count)


def test_mismatch(world):
    for _ in range(66):  # from the 65th call on, calls are compared in shared memory
        world.check_all_gather(300)
    me, n = world.me, world.n
    sizes = [(10, LARGE), (LARGE, 2 * LARGE)] if world.shares else [(LARGE + 1, LARGE)]
    for first, others in sizes:
        with pytest.raises(MismatchError):
            dist.broadcast(world.full(0, others if me else first))
    receives = [LARGE] * n
    sends = [LARGE + (me == 0 != rank) for rank in range(n)]
    given, output = (world.full(0, sum(counts)) for counts in (sends, receives))
    message = (
        "other ranks' block" if me == 0 else f"expected {LARGE} elements from rank 0, which sen"
    )
    with pytest.raises(MismatchError, match=message):
        dist.all_to_all_single(output, given, receives, sends)
    for count in (10, LARGE):
        world.check_all_gather(count)


@on_own_gpus
def test_captured_calls_use_kernels(world, monkeypatch):
    """Large calls outside of a capture load these kernels."""
    me, n = world.me, world.n
    given = world.array(numbers(LARGE, me))
    output = world.rows(beside=given)
    world.cuda.loaded.clear()
    seen = simulated.record_calls(monkeypatch, world.cuda, "collective", "copy")
    dist.all_gather_single(output, given)
    dist.broadcast(given, 1)
    assert {name for name, *_ in seen} == {"copy"} or (me == 1 and n == 2)
    given.upload()
    output.host[...] = 0
    output.upload()
    with world.arrays.capturing(given) as graph:
        dist.all_gather_single(output, given)
        dist.broadcast(given, 1)
    assert len(graph.tasks) == 2 and (got(output) == 0).all()
    for turn in range(3):
        graph.launch()
        if turn == 1:
            dist.broadcast(given, 0)
    assert (got(output) == numbers(LARGE, 1)).all() and (got(given) == numbers(LARGE, 1)).all()


@on_one_gpu
@pytest.mark.parametrize("where", ["load", "open"])
def test_arrays_of_ranks_that_timed_out_are_not_written(world, monkeypatch, where):
    """Rank 0 is late. It finds that the other ranks have timed out and enqueues nothing."""
    me, n, cuda = world.me, world.n, world.cuda
    monkeypatch.setattr(consistency, "FIRST", 1)  # later calls are not compared by messages
    monkeypatch.setattr(user_buffers, "_in_use", [])
    group = dist.new_group(timeout=1.0)
    for _ in range(3):
        array = world.full(me + 1)
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(n + 1))).all()
    array = world.full(me + 1)
    original = getattr(cuda, where)

    def late(*arguments):
        time.sleep(2.5)
        return original(*arguments)

    monkeypatch.setattr(cuda, where, late if me == 0 else original)
    with pytest.raises(DistBackendError, match="within its timeout"):
        dist.all_reduce(array, group=group)
    monkeypatch.setattr(cuda, where, original)
    if me:
        kept = [view.address for views in user_buffers._in_use for view in views if view]
        assert array.memory.address in kept
        array.host[...] = 7
        array.upload()
        assert (got(array) == 7).all()
        time.sleep(2.5)
        assert (got(array) == 7).all(), "written by another process"
    else:  # run all enqueued work
        context = world.agreed(group).space.context
        context.synchronize(context.work)
    dist.destroy_process_group(group)
