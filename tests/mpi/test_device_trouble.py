"""Failures of calls on simulated devices, the calls after them, and leaks."""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT
from test_devices import got, uploaded

import mpicoll as dist
from mpicoll.core.plan import Implementation
from mpicoll.cuda import capabilities, mpi_support, probe, runtime, streams
from mpicoll.cuda.probe import OK, ProbeOutcome
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.routes.device import ipc, staged, workspaces
from mpicoll.routes.host import select

pytestmark = pytest.mark.on_3


@pytest.fixture
def on(monkeypatch):
    """Create the default group with a forced route. Return arrays, rank and number of ranks."""
    made = simulated.Arrays()

    def begin(route=None, cuda="full"):
        if route is not None:
            monkeypatch.setenv("MPICOLL_DEVICE_ROUTE", route)
        monkeypatch.setenv("MPICOLL_CUDA_AWARE", cuda)
        monkeypatch.setattr(runtime, "_runtime", made.cuda)
        monkeypatch.setattr(capabilities, "_known", None)
        dist.init_process_group(timeout=TIMEOUT)
        return made, dist.get_rank(), dist.get_world_size()

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()


def check_all_reduce(arrays, me, n, count=10, group=None):
    array = uploaded(arrays, np.full(count, me, np.float32))
    dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(n))).all()


@pytest.mark.parametrize("count", [10, 2000])
@pytest.mark.parametrize("call", [1, 2, 5, 9, 14, 30])
@pytest.mark.parametrize("what", ["load", "copy", "combine", "synchronize"])
def test_error_of_one_rank(on, monkeypatch, what, call, count):
    """All ranks return, with an error or a correct result. Later calls succeed."""
    monkeypatch.setattr(ipc, "SLOT", 512)
    monkeypatch.setattr(ipc, "WHOLE", 64)
    arrays, me, n = on("ipc")
    check_all_reduce(arrays, me, n)
    array = uploaded(arrays, np.full(count, me, np.float32))
    with simulated.Fault(arrays.cuda, what, me == 0, call) as fault:
        dist.all_reduce(array)
    error, seen = fault.error, str(fault.error)
    if me == 0:
        assert (error is not None) == fault.failed == ("injected failure" in seen)
    elif error is not None:
        assert isinstance(error, DistBackendError) and "another rank failed" in seen
    if error is None:
        assert (got(array) == sum(range(n))).all()
    if what == "load" and call == 1:
        assert error is not None, "a failure before the first round must fail on all ranks"
    for length in (3, count, 700):
        check_all_reduce(arrays, me, n, length)


def test_mismatch_after_the_first_calls(on, monkeypatch):
    """The first calls are compared by messages. Later calls succeed."""
    monkeypatch.setattr(ipc, "SLOT", 4096)
    monkeypatch.setattr(ipc, "WHOLE", 64)
    arrays, me, n = on("ipc")
    for _ in range(66):
        check_all_reduce(arrays, me, n)
    if n > 1:
        for _ in range(2):
            with pytest.raises(MismatchError, match=rf"broadcast on rank {me} of .*src 1"):
                dist.broadcast(uploaded(arrays, np.full(10, 1.0)), 0 if me else 1)
        with pytest.raises(MismatchError, match="4000 elements of float32, SUM"):
            dist.all_reduce(uploaded(arrays, np.zeros(4000 if me else 10, np.float32)))
    for _ in range(3):
        check_all_reduce(arrays, me, n, 3000)


@pytest.mark.parametrize("eager", [0, 1])
def test_devices_that_run_ahead_do_not_overwrite_unread_data(on, monkeypatch, eager):
    monkeypatch.setattr(ipc, "SLOT", 512)
    monkeypatch.setattr(ipc, "WHOLE", 0)
    arrays, me, n = on("ipc")
    arrays.cuda.eager = me % 2 == eager
    for count in (10, 200, 1500, 3, 1500, 700):
        numbers = np.arange(count, dtype=np.float32)
        array = uploaded(arrays, numbers * (me + 1))
        given, output = uploaded(arrays, numbers + me), uploaded(arrays, np.zeros((n, count), "f4"))
        dist.all_reduce(array)
        dist.all_gather_single(output, given)
        assert (got(array) == numbers * (n * (n + 1) // 2)).all()
        assert (got(output) == numbers + np.arange(n)[:, None]).all()


@pytest.mark.parametrize("route", ["direct", "mpi", None])
@pytest.mark.parametrize("reduces", [True, False])
def test_forced_mpi_routes_probe_mpi(on, monkeypatch, tmp_path, route, reduces):
    """MPI reports support for device memory. Routes that need it probe it first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mpi_support, "QUERIES", {"query": lambda: 1})
    monkeypatch.setattr(mpi_support, "SWITCHES", ())
    probes = []

    def run_probe(*arguments):
        probes.append(arguments)
        return ProbeOutcome(2, OK, OK, OK if reduces else "crashed (SIGSEGV)")

    monkeypatch.setattr(probe, "run_probe", run_probe)
    arrays, me, n = on(route, cuda="")
    if route == "mpi" and not reduces:
        with pytest.raises(UnsupportedError, match="SIGSEGV"):
            check_all_reduce(arrays, me, n)
    else:
        check_all_reduce(arrays, me, n)
        assert dist.group.WORLD.resources.find("devices").names[0] == (
            route or ("direct" if n == 1 else "shared_gpu")
        )
    assert len(probes) == (route is not None and me == 0)


def test_unsupported_calls_do_not_leak(on):
    arrays, _, _ = on("mpi")
    before = len(streams._retained)
    for _ in range(5):
        array = uploaded(arrays, np.zeros(9, np.float16))
        with pytest.raises(UnsupportedError, match="mpi does not serve"):
            dist.all_reduce(array)
    assert len(streams._retained) == before


@pytest.mark.parametrize("whole", [True, False], ids=["open", "failed"])
def test_scratch_of_failed_calls_is_freed_with_the_group(on, monkeypatch, whole):
    """If the group has failed it is kept, because MPI may still use it."""
    arrays, me, n = on("ipc")
    group = dist.new_group()
    check_all_reduce(arrays, me, n, group=group)
    third = arrays.make(np.ones(5000, np.float32), 0, "third")
    combine = arrays.cuda.combine
    monkeypatch.setattr(arrays.cuda, "combine", lambda *arguments: 1 / 0)
    before = len(streams._retained)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(third, group=group)
    context = group.resources.find(("device", 0))
    kept = [weakref.ref(block) for blocks, _ in context._failed_scratch for block in blocks]
    del context
    assert len(kept) >= 3 and len(streams._retained) == before
    monkeypatch.setattr(arrays.cuda, "combine", combine)
    if not whole:
        group.fail(DistBackendError("a call has timed out"))
    dist.destroy_process_group(group)
    gc.collect()
    assert [one() is None for one in kept] == [whole] * len(kept)
    del streams._retained[before:]


def test_unaligned_elements_raise_before_anything_is_sent(on):
    arrays, me, n = on()
    array = uploaded(arrays, np.zeros(9, np.float32))
    array.dtype = np.dtype(np.float64)
    array.shape, array.offset = (2,), 4
    with pytest.raises(UnsupportedError, match=r"all_reduce: tensor: .*aligned to their size"):
        dist.all_reduce(array)
    check_all_reduce(arrays, me, n)


@pytest.mark.parametrize("route", ["ipc", "staged", "direct"])
def test_per_thread_default_stream_is_the_callers(on, route):
    """Stream 2 differs in each thread, and the progress thread is not the caller's thread."""
    arrays, me, n = on(route)
    cuda, mine, find = arrays.cuda, {}, arrays.cuda._find

    def of_thread(index, stream):
        if stream != 2:
            return find(index, stream)
        key = index, threading.get_ident()
        if key not in mine:
            mine[key] = cuda.streams[index, -1 - len(mine)] = simulated.Stream(index)
        return mine[key]

    cuda._find = of_thread

    def made(host):
        array = arrays.make(host)
        array.number = 2
        array.upload()
        return array

    for i in range(10):
        first = made(np.full(20000, me, np.float32))
        array = made(np.full(100, me + i, np.float32))
        work = dist.all_reduce(first, async_op=True)
        dist.all_reduce(array)
        assert (got(array) == sum(range(n)) + n * i).all()
        work.wait()


def test_error_between_chunks_keeps_stream_order(on, monkeypatch):
    """Copies that are already enqueued run before the caller's next work."""
    arrays, me, _ = on("staged")
    monkeypatch.setattr(staged, "CHUNK", 400)
    choose, calls = select.choose, []

    def breaking(kind):
        route = choose(kind)

        def broken(send, recv, extent, root):
            calls.append(recv)
            if len(calls) == 2:
                raise RuntimeError("the second of three chunks fails on all ranks")
            route.run(send, recv, extent, root)

        return Implementation(broken)

    monkeypatch.setattr(select, "choose", breaking)
    array = uploaded(arrays, np.full(300, me, np.float32))
    with pytest.raises(RuntimeError, match="second of three chunks"):
        dist.all_reduce(array)
    array.host[...] = 7
    array.upload()
    assert (got(array) == 7).all()
    for stream in list(arrays.cuda.streams.values()):
        arrays.cuda._run(stream, stream.end)
    assert (array._numpy() == 7).all()


class Pool:
    """A pool of pinned memory that reuses freed memory at once, as CuPy's does."""

    def __init__(self):
        self.free = {}

    def __call__(self, index, nbytes):
        size = 1 << max(9, (nbytes - 1).bit_length())
        free = self.free.setdefault(size, [])
        array = free.pop() if free else np.full(size, 0xCD, np.uint8)
        memory = runtime.Memory(array.ctypes.data, nbytes, self)
        memory._owner = _Piece(free, array)
        return memory


class _Piece:
    def __init__(self, free, array):
        self.free, self.array = free, array

    def __del__(self):
        self.free.append(self.array)


def test_staging_buffers_are_not_freed_while_in_use(on):
    arrays, me, n = on("staged")
    arrays.cuda.allocate_pinned = Pool()

    def overwrite():
        gc.collect()
        taken = [arrays.cuda.allocate_pinned(0, nbytes) for nbytes in (400, 400, 4000, 4000)]
        for one in taken:
            one.on_host()[...] = 0x11

    small, large = (uploaded(arrays, np.full(k, me, np.float32)) for k in (100, 100_000))
    dist.all_reduce(small)
    dist.all_reduce(large)
    overwrite()
    assert (got(small) == sum(range(n))).all()
    group = dist.new_group()
    last = uploaded(arrays, np.full(100, me, np.float32))
    dist.all_reduce(last, group=group)
    dist.destroy_process_group(group)
    overwrite()
    assert (got(last) == sum(range(n))).all() and (got(large) == sum(range(n))).all()


def test_warning_as_error_does_not_block_other_ranks(on):
    """Rank 0 warns about idle GPUs when no other rank waits for it."""
    arrays, me, n = on()
    array = uploaded(arrays, np.full(10, me, np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if n > 1 and me == 0:
            with pytest.raises(RuntimeWarning, match="share GPU"):
                dist.all_reduce(array)
        else:
            dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()


@pytest.mark.parametrize("can_map", [True, False])
def test_destroyed_groups_release_memory_and_streams(on, monkeypatch, can_map):
    arrays, me, n = on()
    if not can_map:

        def refuse(index, handle):
            raise RuntimeError("no IPC here")

        monkeypatch.setattr(arrays.cuda, "open", refuse)
    monkeypatch.setattr(ipc, "SLOT", 4096)
    array = arrays.make(np.full(10, me, np.float32))

    def round():
        group = dist.new_group()
        array.host[...] = me
        array.upload()
        dist.all_reduce(array, group=group)
        assert (got(array) == sum(range(n))).all()
        dist.destroy_process_group(group)

    mapped = len(workspaces.mapped)
    round()
    streams = len(arrays.cuda.streams)
    for _ in range(20):
        round()
    assert (len(arrays.cuda.streams), len(workspaces.mapped)) == (streams, mapped)


@pytest.fixture
def apart(on, monkeypatch):
    """As ``on``, with one node per rank."""

    def begin(route=None, **options):
        made = on(route, **options)
        monkeypatch.setattr(capabilities, "node", lambda: f"node {made[1]}")
        return made

    return begin


@pytest.mark.parametrize("route", [None, "direct"])
def test_messages_between_nodes_are_probed_before_use(apart, monkeypatch, route):
    """A probe in two processes of one node does not test the network."""
    arrays, me, n = apart(route)
    sizes, fill = [], probe.ProbeDevice.fill

    def filled(place, values):
        sizes.append(values.nbytes)
        return fill(place, values)

    monkeypatch.setattr(probe.ProbeDevice, "fill", filled)
    before = len(arrays.cuda.streams)
    check_all_reduce(arrays, me, n)
    assert dist.group.WORLD.resources.find("devices").names[0] == "direct"
    assert set(sizes) == (set() if n == 1 else {64, 4 << 20})
    sizes.clear()
    check_all_reduce(arrays, me, n)
    assert not sizes
    # Two arrays, the group, and a probe.
    assert len(arrays.cuda.streams) <= before + 4


@pytest.mark.parametrize("route", [None, "direct"])
@pytest.mark.parametrize("how", ["wrong", "failed", "hung"])
def test_failed_messages_between_nodes(apart, monkeypatch, route, how):
    """All ranks use another route, or raise an error that names the rank if the route is forced."""
    arrays, me, n = apart(route)
    monkeypatch.setattr(capabilities, "BETWEEN_NODES_TIMEOUT_S", 1.0)
    exchange, values = probe.exchange_messages, probe._values

    def wrong_values(nbytes, rank):
        found = values(nbytes, rank)
        if nbytes > 64 and rank == me:
            found[-1] += 1
        return found

    def failing_exchange(place, partners, limit):
        if me == n - 1 and how == "failed":
            raise RuntimeError("no such link")
        if me == n - 1 and how == "hung":
            return "hung"
        return exchange(place, partners, limit)

    monkeypatch.setattr(probe, "exchange_messages", failing_exchange)
    if me == n - 1 and how == "wrong":
        monkeypatch.setattr(probe, "_values", wrong_values)
    if n == 1:
        return
    word = {"wrong": "moved wrong data", "failed": f"no such link (rank {n - 1})", "hung": "hung"}
    if route is None:
        check_all_reduce(arrays, me, n)
        assert dist.group.WORLD.resources.find("devices").names == ("staged",)
    else:
        with pytest.raises(UnsupportedError, match=re.escape(word[how])):
            check_all_reduce(arrays, me, n)


def test_partners():
    """Partners are mutual and on different nodes."""
    for nodes in ("ab", "aab", "abab", "aabb", "aaabbc", "abbb", "abcabcab"):
        found = [capabilities.find_partners(nodes, rank) for rank in range(len(nodes))]
        for rank, partners in enumerate(found):
            assert partners, nodes
            assert all(nodes[one] != nodes[rank] and rank in found[one] for one in partners)
        if len(set(map(nodes.count, nodes))) == 1:
            assert max(map(len, found)) <= 2


def agreed():
    return dist.group.WORLD.resources.find("devices")


def test_memory_pools_are_emptied_if_memory_is_short(on):
    arrays, me, n = on()
    array = uploaded(arrays, np.full(10, me, np.float32))
    arrays.cuda.room, arrays.cuda.cached = 1 << 30, 1 << 30
    dist.all_reduce(array)
    assert agreed().names[0] == ("direct" if n == 1 else "shared_gpu")
    third = arrays.make(np.full(10, me, np.float32), layout="third")
    third.upload()
    arrays.cuda.cached = 1 << 30
    dist.all_reduce(third)  # needs scratch
    assert (got(array) == sum(range(n))).all() and (got(third) == sum(range(n))).all()


def test_rank_without_memory_for_a_workspace(on):
    """All ranks use another route. Rank 0 warns, and ``describe`` has the reason."""
    arrays, me, n = on(cuda="none")
    array = uploaded(arrays, np.full(10, me, np.float32), me % 2)
    if me == n - 1:
        arrays.cuda.room = workspaces.BLOCK  # enough for the test whether memory can be mapped
    first = "peer" if n == 2 else "ipc"  # a GPU each
    taken = ("copy_engine", "staged")  # need no workspace
    if n > 2:
        taken = ("hierarchical", *taken)  # its last rank needs no workspace
    why = rf"{first} is off: rank {n - 1}: no workspace: \d+ bytes are too many"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "mpicoll: ranks .* share GPU")
        if me == 0 and n > 1:
            with pytest.raises(RuntimeWarning, match=f"use {', '.join(taken)}, because {why}"):
                dist.all_reduce(array)
        else:
            dist.all_reduce(array)
    assert (got(array) == sum(range(n))).all()
    if n > 1:
        assert agreed().names == taken
        assert re.match(why, f"{first} is off: {agreed().describe()[first]}")


def test_why_routes_are_off(on):
    arrays, me, n = on(cuda="none")
    check_all_reduce(arrays, me, n)
    reasons = agreed().describe()
    assert {name for name, why in reasons.items() if not why} == set(agreed().names)
    assert "lacks NCCL" in reasons["nccl"]
    if n > 1:
        assert "MPICOLL_CUDA_AWARE=none" in reasons["direct"]


def test_forced_route_that_is_off_raises(on, monkeypatch):
    arrays, me, n = on("ipc")

    def refuse(index, handle):
        raise RuntimeError("no ipc access")

    monkeypatch.setattr(arrays.cuda, "open", refuse)
    if n > 1:
        words = r"MPICOLL_DEVICE_ROUTE=ipc: rank 0: cannot map another .*no ipc access; unset it"
        with pytest.raises(UnsupportedError, match=words):
            check_all_reduce(arrays, me, n)


def test_group_of_one_rank_does_not_map_stage_or_synchronize(on, monkeypatch):
    arrays, me, _ = on(cuda="none")
    group = dist.new_group([me], use_local_synchronization=True)
    for name in ("synchronize", "export", "allocate_pinned"):
        monkeypatch.setattr(arrays.cuda, name, lambda *arguments: pytest.fail("called"))
    numbers = np.arange(3_000_000, dtype=np.float32)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM(2.0)):
        array, output = uploaded(arrays, numbers), uploaded(arrays, 0 * numbers)
        dist.all_reduce(array, op, group=group)
        dist.reduce(array, me, group=group)
        dist.broadcast(array, me, group=group)
        dist.reduce_scatter_single(output, array, op, group=group)
        for stream in list(arrays.cuda.streams.values()):
            arrays.cuda._run(stream, stream.end)
        factor = 2 if op.factor else 1
        assert (array._numpy() == factor * numbers).all()
        assert (output._numpy() == factor * factor * numbers).all()
    monkeypatch.undo()
    assert group.resources.find("devices").names == ("direct", "staged")
    assert sum(block.nbytes for block in group.resources.find(("device", 0))._blocks) < 40 << 20


@pytest.mark.parametrize("slot", [512, 8 << 20])
def test_workspace_size_is_a_multiple_of_2_mib(on, monkeypatch, slot):
    """The driver puts small allocations into one block. An IPC handle maps the whole block."""
    monkeypatch.setattr(ipc, "SLOT", slot)
    arrays, me, n = on("ipc")
    check_all_reduce(arrays, me, n)
    assert agreed().states["ipc"]._workspaces.all[me].nbytes % (2 << 20) == 0


def test_large_scratch_is_freed_after_some_unused_calls(on, monkeypatch):
    """Freeing it synchronizes the device."""
    arrays, *_ = on()
    context = streams.DeviceContext(arrays.cuda, 0)
    seen = simulated.record_calls(monkeypatch, arrays.cuda, "allocate")
    context.LARGE_BYTES, large = 1000, 5000
    for turn in range(6):
        context.begin()
        context.scratch(10)
        if turn % 2 == 0:
            context.scratch(large)
    assert [nbytes for *_, nbytes in seen] == [10, large]
    for _ in range(context.UNUSED_COUNT + 1):
        context.begin()
        context.scratch(10)
    assert [block.nbytes for block in context._blocks] == [10, 0]
    context.begin()
    context.scratch(10)
    assert context.scratch(large).nbytes == large and len(seen) == 3
    context.close()


def test_messages_do_not_wait_for_the_device(on, monkeypatch):
    """isend returns before the array is complete. Later messages stay behind it."""
    arrays, me, n = on()
    if n == 1:
        return
    right, left = (me + 1) % n, (me - 1) % n
    array = uploaded(arrays, np.full(1000, me, np.float32))
    is_done, late = arrays.cuda.is_done, threading.Event()
    monkeypatch.setattr(arrays.cuda, "is_done", lambda event: late.is_set() and is_done(event))
    works = [dist.isend(array, right)]
    works += [dist.isend(np.full(1000, me + k, "f4"), right) for k in (10, 20)]
    assert arrays.cuda.streams[0, array.number].waiting, "the host has waited for the stream"
    assert not any(work.is_completed() for work in works)
    received = [np.zeros(1000, "f4") for _ in range(3)]
    works += [dist.irecv(one, left) for one in received]
    on_device = uploaded(arrays, np.zeros(7, "f4"))
    works.append(dist.irecv(on_device, left, tag=1))
    late.set()
    works.append(dist.isend(np.full(7, me, "f4"), right, tag=1))
    for work in works:
        work.wait()
    assert [one[-1] for one in received] == [left, left + 10, left + 20]
    assert (got(on_device) == left).all()
    assert not dist.group.WORLD.held_back


def test_message_that_was_not_started_can_be_abandoned(on, monkeypatch):
    arrays, me, n = on()
    if n == 1:
        return
    array = uploaded(arrays, np.full(10, me, np.float32))
    monkeypatch.setattr(arrays.cuda, "is_done", lambda event: False)
    work = dist.isend(array, (me + 1) % n)
    with pytest.raises(dist.CollectiveTimeoutError):
        work.wait(0.05)
    work.abandon(RuntimeError("abandoned"))
    assert work.is_completed() and not dist.group.WORLD.held_back


@pytest.mark.parametrize("layout", ["C", "F"])
def test_messages_of_any_size_use_one_chunk_of_pinned_memory(on, monkeypatch, layout):
    monkeypatch.setattr(staged, "CHUNK", 1000)
    arrays, me, n = on()
    if n == 1:
        return
    seen = simulated.record_calls(monkeypatch, arrays.cuda, "allocate_pinned")
    for count in (10, 250, 251, 376, 3000):
        numbers = np.arange(2 * count, dtype=np.float32).reshape(2, count)
        given = arrays.make(numbers + me, layout=layout)
        taken = arrays.make(0 * numbers, layout=layout)
        for array in (given, taken):
            array.upload()
        works = [dist.isend(given, (me + 1) % n), dist.irecv(taken, (me - 1) % n)]
        for work in works:
            work.wait()
        assert (got(taken) == numbers + (me - 1) % n).all()
    assert max(nbytes for *_, nbytes in seen) <= 1000


@pytest.mark.parametrize("route", ["ipc", "shared_gpu"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", ["all_reduce", "all_to_all_single", "premultiplied"])
def test_failure_of_one_rank_before_the_first_synchronization(on, route, first, name):
    """Packing or scaling fails, also in the first call on device memory. The call fails on all
    ranks. Later calls succeed.
    """
    arrays, me, n = on(route)
    if n == 1:
        return
    op = dist.ReduceOp.SUM if name == "all_reduce" else dist.ReduceOp.PREMUL_SUM(2.0)
    if not first:
        check_all_reduce(arrays, me, n)
    array = arrays.make(np.full(n * 100, me, np.float32), layout="third")
    array.upload()
    output = uploaded(arrays, np.zeros(n * 100, np.float32))
    context = dist.group.WORLD.resources.find(("device", 0))
    if context is not None:
        context._blocks, context._since = [], []
    with simulated.Fault(arrays.cuda, "allocate", me == n - 1) as fault:
        if name == "all_to_all_single":
            dist.all_to_all_single(output, array)
        else:
            dist.all_reduce(array, op)
    message = "injected failure" if me == n - 1 else "another rank failed"
    assert message in str(fault.error), fault.error
    for count in (3, 20000):
        check_all_reduce(arrays, me, n, count)
