"""Route ``nccl`` on a stand-in for NCCL: the host moves the data with MPI when a call is made.

Every rank runs every test, on its own GPU if there are enough. run.py runs test_devices.py and
test_streams.py with NCCL itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import types
import weakref

import cupy
import numpy as np
import pytest
import real
from device_arrays import forced
from driver import NAMES, legal_operations
from driver import team as group_of
from mpi4py import MPI
from test_devices import DeviceCall, UnevenDeviceCall

import mpicoll as dist
from mpicoll.cuda import capabilities
from mpicoll.cuda.runtime import Runtime, get_runtime
from mpicoll.dtypes import by_name
from mpicoll.errors import CollectiveTimeoutError, DistBackendError, MismatchError, UnsupportedError
from mpicoll.failures import consistency, group_failure
from mpicoll.routes import registry
from mpicoll.routes.device import nccl
from mpicoll.routes.device.state import Unavailable

LIMIT_S = 30
#: Dtypes by ncclDataType_t, operations by ncclRedOp_t, and an ncclUniqueId.
KINDS = [
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16",
]  # fmt: skip
OPS = {"SUM": np.sum, "PRODUCT": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean}
IDENTITY = bytes(range(128))
SERVED = registry.DEVICE["nccl"].serves.primitives

#: A kernel that ends when the host writes to its word.
wait_for_host = cupy.RawKernel(
    'extern "C" __global__ void wait(volatile int *word) { while (!*word) __nanosleep(1000); }',
    "wait",
)


def bytes_at(address, nbytes):
    memory = cupy.cuda.UnownedMemory(address, nbytes, None, cupy.cuda.Device().id)
    return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))


def reduced(every, op):
    wide = every.astype(np.float64) if every.dtype.kind == "f" else every
    with np.errstate(all="ignore"):
        return [*OPS.values()][op](wide, axis=0)


class Communicator:
    """Interface of CuPy's NcclCommunicator.

    rank_missing: the kernels wait for a missing rank, so they end only when they are aborted.
    """

    calls = 0

    def __init__(self, index, n, identity, rank):
        assert identity == IDENTITY
        # NCCL matches ranks by the identity. The stand-in uses all ranks of the job.
        self.comm = MPI.COMM_WORLD.Split(0, rank)
        self.aborted, self.async_error, self.rank_missing = threading.Event(), "", False
        memory = cupy.cuda.alloc_pinned_memory(4)
        self.word, self.pinned = np.frombuffer(memory, np.int32, 1), memory
        self.word[0] = 0

    def _run(self, stream, send, count, recv, kind, task):
        """Write ``task(inputs of all ranks)`` to ``recv``, if given."""
        Communicator.calls += 1
        with cupy.cuda.ExternalStream(stream):
            if self.rank_missing:
                wait_for_host((1,), (1,), (np.uint64(self.pinned.ptr),))
                return
            dtype = by_name[KINDS[kind]].numpy
            mine = bytes_at(send, count * dtype.itemsize).get()
            every = np.empty((self.comm.size, mine.size), np.uint8)
            self.comm.Allgather(mine, every)
            found = np.ravel(task(every.view(dtype))).astype(dtype).view(np.uint8)
            if recv and found.size:
                bytes_at(recv, found.size).set(found)

    def allReduce(self, send, recv, count, kind, op, stream):
        self._run(stream, send, count, recv, kind, lambda every: reduced(every, op))

    def reduce(self, send, recv, count, kind, op, root, stream):
        recv = recv if self.comm.rank == root else None
        self._run(stream, send, count, recv, kind, lambda every: reduced(every, op))

    def reduceScatter(self, send, recv, count, kind, op, stream):
        own = slice(count * self.comm.rank, count * (self.comm.rank + 1))
        total = count * self.comm.size
        self._run(stream, send, total, recv, kind, lambda every: reduced(every, op)[own])

    def broadcast(self, send, recv, count, kind, root, stream):
        assert send == recv
        self._run(stream, send, count, recv, kind, lambda every: every[root])

    def allGather(self, send, recv, count, kind, stream):
        self._run(stream, send, count, recv, kind, lambda every: every)

    def send(self, address, count, kind, rank, stream):
        groups[-1].append((self, address, count, kind, rank, stream, True))

    def recv(self, address, count, kind, rank, stream):
        groups[-1].append((self, address, count, kind, rank, stream, False))

    def check_async_error(self):
        if isinstance(self.async_error, int):
            raise KeyError(self.async_error)  # a number that CuPy does not know
        if self.async_error:
            raise RuntimeError(self.async_error)

    def destroy(self):
        assert not self.aborted.is_set()
        self.comm.Free()
        self.async_error = "the communicator was destroyed"

    def abort(self):
        """Cancel enqueued work on this rank only, as ncclCommAbort does."""
        assert not self.aborted.is_set()
        self.word[0] = 1
        self.aborted.set()


#: The messages of open ncclGroups.
groups = []


@contextlib.contextmanager
def nccl_group():
    groups.append([])
    yield
    requests, received = [], []
    for comm, address, count, kind, rank, stream, sends in groups.pop():
        Communicator.calls += 1
        with cupy.cuda.ExternalStream(stream):
            place = bytes_at(address, count * by_name[KINDS[kind]].itemsize)
            host = place.get()
            requests.append((comm.comm.Isend if sends else comm.comm.Irecv)(host, rank))
            received += [] if sends else [(place, host, cupy.cuda.get_current_stream())]
    MPI.Request.Waitall(requests)
    for place, host, stream in received:
        with stream:
            place.set(host)


class WithNccl(Runtime):
    """The runtime with the stand-in. Each rank's GPU counts as another one."""

    def pci_bus_id(self, index):
        return f"{MPI.COMM_WORLD.rank}-{index}"

    identity = pci_bus_id
    has_nccl = staticmethod(lambda: True)
    nccl_unique_id = staticmethod(lambda: IDENTITY)
    create_nccl = staticmethod(Communicator)
    nccl_group = staticmethod(nccl_group)


@pytest.fixture(scope="module")
def arrays():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real.runtime, "_runtime", WithNccl())
        patch.setattr(capabilities, "_known", None)
        dist.init_process_group("nccl", timeout=60)
        made = real.Arrays("interface")
        cupy.cuda.Device(dist.get_rank() % made.devices).use()
        yield made
        dist.destroy_process_group()


@pytest.fixture
def world(arrays):
    return group_of("world", range(dist.get_world_size()))


@pytest.fixture
def calls_of_nccl(arrays):
    """A function that returns the number of calls of NCCL since the last time."""
    seen = [Communicator.calls]

    def count():
        seen.append(Communicator.calls)
        return seen[-1] - seen[-2]

    return count


@pytest.mark.parametrize("name", [one for one in NAMES if NAMES[one].name in SERVED])
def test_calls(arrays, world, calls_of_nccl, name):
    reduces = NAMES[name].reduces
    kinds = "int8 uint8 int32 int64 uint64" if reduces else "bool bfloat16 float8_e5m2 complex128"
    for row in map(by_name.get, kinds.split()):
        for op in (one for one in legal_operations(row) if one.name in OPS) if reduces else (None,):
            for count in (0, 7, 1000):
                root = count % world.size if NAMES[name].root else 0
                DeviceCall(arrays, name, world, row, count, op, root).run_and_check(count == 7)
    for dtype in ("float32", "float64", "float16") if name == "all_reduce" else ():
        array = cupy.full(8, world.me, dtype)
        dist.all_reduce(array, dist.ReduceOp.AVG)
        assert (array == (world.size - 1) / 2).all()
    assert calls_of_nccl(), "another route was used"


def test_blocks_of_different_sizes(arrays, world, calls_of_nccl):
    sizes = by_name["int32"], [3, 0, 1000, 5]
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        UnevenDeviceCall(arrays, world, *sizes, op).run_and_check()
    n, me = world.size, world.me
    sends = [me + r for r in range(n)]
    given = cupy.concatenate([cupy.full(count, 10 * me + r) for r, count in enumerate(sends)])
    output = cupy.zeros_like(given)
    dist.all_to_all_single(output, given, sends, sends)
    assert (output == cupy.concatenate([cupy.full(me + r, 10 * r + me) for r in range(n)])).all()
    assert calls_of_nccl(), "another route was used"


def test_other_calls_use_another_route(arrays, world, calls_of_nccl):
    for name, dtype, op in (
        ("all_reduce", "bool", "SUM"), ("all_reduce", "int32", "BXOR"), ("scan", "int32", "SUM"),
        ("all_reduce", "float8_e5m2", "SUM"), ("all_reduce", "int16", "SUM"),
    ):  # fmt: skip
        row, operation = by_name[dtype], getattr(dist.ReduceOp, op)
        DeviceCall(arrays, name, world, row, 100, operation).run_and_check()
    assert calls_of_nccl() == 0
    check_all_reduce(None, 1_000_000)  # NCCL has priority for any size
    assert calls_of_nccl() == 1


def check_all_reduce(group, count=9):
    array = cupy.full(count, dist.get_rank(), cupy.int32)
    dist.all_reduce(array, group=group)
    assert (array == sum(range(dist.get_world_size()))).all()


def test_ranks_that_share_a_gpu_use_another_route(arrays, monkeypatch, calls_of_nccl):
    """NCCL does not support several ranks on one GPU."""
    monkeypatch.setattr(WithNccl, "pci_bus_id", lambda *arguments: "one")
    monkeypatch.setattr(WithNccl, "identity", lambda *arguments: "one")
    monkeypatch.setattr(capabilities, "_known", None)
    group = dist.new_group()
    with cupy.cuda.Device(0):
        check_all_reduce(group)
    assert calls_of_nccl() == 0
    dist.destroy_process_group(group)


def test_rank_without_nccl(arrays, monkeypatch):
    """Forcing the route raises."""
    if dist.get_rank() == 0:
        monkeypatch.setattr(WithNccl, "has_nccl", staticmethod(lambda: False))
    group = dist.new_group()
    with forced("nccl"), pytest.raises(UnsupportedError, match=r"ROUTE=nccl: .*lacks NCCL"):
        check_all_reduce(group)
    dist.destroy_process_group(group)


def test_failure_of_one_rank_disables_the_route(arrays, monkeypatch, calls_of_nccl):
    """Communicators that were created on other ranks are aborted."""
    made, me = types.SimpleNamespace(), dist.get_rank()
    made.abort = lambda: setattr(made, "aborted", True)
    monkeypatch.setattr(
        WithNccl, "create_nccl", staticmethod(lambda *arguments: 1 / 0 if me == 0 else made)
    )
    group = dist.new_group()
    check_all_reduce(group)
    assert calls_of_nccl() == 0 and hasattr(made, "aborted") == (me != 0)
    assert group.resources.find("devices").missing["nccl"] == "rank 0: division by zero"
    dist.destroy_process_group(group)


def test_ranks_blocked_in_nccl_initialization_are_released(arrays, monkeypatch):
    """The rank on which initialization failed raises the cause."""
    me, comm = dist.get_rank(), MPI.COMM_WORLD.Dup()
    monkeypatch.setattr(nccl, "_INIT_TIMEOUT_S", 60 if me else 0.2)

    def block(*arguments):
        comm.Barrier()
        if me == 0:
            raise RuntimeError("no network")
        comm.Barrier()  # until rank 0 has raised
        raise RuntimeError("released")

    monkeypatch.setattr(WithNccl, "create_nccl", staticmethod(block))
    group, cuda = dist.new_group(), get_runtime()
    index = cupy.cuda.Device().id
    context = types.SimpleNamespace(runtime=cuda, index=index, work=cuda.create_stream(index))
    agreed = types.SimpleNamespace(group=group, context=context)
    if me == 0:
        with pytest.raises(DistBackendError, match=r"rank 0: no network; .* in ncclCommInitRank"):
            nccl.ROUTE.negotiate(agreed)
        comm.Barrier()
    else:
        with pytest.raises(Unavailable, match="rank 0: no network"):
            nccl.ROUTE.negotiate(agreed)
    comm.Free()
    dist.destroy_process_group(group)


def test_forked_child_does_not_destroy_the_communicator(arrays):
    group = dist.new_group()
    check_all_reduce(group)
    comm = weakref.ref(group.resources.find("devices").states["nccl"].comm)
    group = weakref.ref(group)
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(int(comm() is None))
    _, status = os.waitpid(child, 0)
    assert status == 0
    dist.destroy_process_group(group())


# ---- Failures in calls ---------------------------------------------------------------------------


@pytest.fixture
def group(request, arrays, monkeypatch):
    """A group after its first call. Hosts compare one of 64 later calls, or of the parameter's."""
    monkeypatch.setattr(consistency, "FIRST", 1)
    monkeypatch.setattr(consistency, "STRIDE", getattr(request, "param", 64))
    group = dist.new_group(timeout=60)
    check_all_reduce(group)
    yield group
    if group.closed is None:
        dist.destroy_process_group(group)


@pytest.fixture
def part(group):
    """The NCCL state of the group."""
    return group.resources.find("devices").states["nccl"]


def wait_until_failed(group):
    """Wait until the watchdog thread has failed the group."""
    end = time.monotonic() + LIMIT_S
    while group.error is None:
        assert time.monotonic() < end, "the group has not failed in time"
        time.sleep(0.01)


@pytest.mark.parametrize("via", ["call", "destroy", "wait", "exception"])
def test_missing_rank_times_out_and_aborts_nccl(group, part, via):
    """The error that the caller gets names the call."""
    group.timeout, array = 1.0, cupy.ones(9, cupy.int32)  # for the following calls
    notified = r"rank \d (failed in|has left|has closed)"
    if dist.get_rank() == 0:  # does not make the call, and is notified
        wait_until_failed(group)
        with pytest.raises(DistBackendError, match=notified):
            dist.all_reduce(array, group=group)
        return
    part.comm.rank_missing = True
    work = dist.all_reduce(array, group=group, async_op=True)
    if via != "destroy":
        wait_until_failed(group)
    message = (
        rf"all_reduce of 9 elements of int32, SUM, on a device, on rank {dist.get_rank()} of .*, "
        rf"call 2: timed out: NCCL has not done it within the group's timeout of 1 s|{notified}"
    )
    with pytest.raises(DistBackendError, match=message) as caught:
        if via == "call":
            dist.all_reduce(array, group=group)
        elif via == "destroy":
            dist.destroy_process_group(group)
        elif via == "wait":
            work.wait(60)
        else:
            raise work.exception()
    first = isinstance(caught.value, CollectiveTimeoutError)
    assert part.comm.aborted.wait(60) and (first or dist.get_world_size() > 2)


class FreesMemory:
    """An object of the program in a reference cycle, whose destructor frees device memory."""

    def __init__(self):
        self.memory, self.itself = cupy.cuda.Memory(512), self

    def __del__(self):
        del self.memory


@pytest.mark.parametrize(
    "place",
    ["receive", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("check", "abort"))],
)
def test_destructors_on_the_watchdog_thread_do_not_delay_the_abort(group, part, monkeypatch, place):
    """cudaFree waits for all kernels, also for those that are to be aborted."""
    target, name = {
        "receive": (group_failure, "receive_failures"),
        "check": (part.comm, "check_async_error"),
        "abort": (nccl, "use_process_device"),
    }[place]
    replaced, collecting = getattr(target, name), threading.Event()

    def collect(*arguments):
        if threading.current_thread() is not threading.main_thread() and not collecting.is_set():
            collecting.set()
            gc.collect()
        return replaced(*arguments)

    part.comm.rank_missing, group.timeout = True, 1.0
    gc.disable()
    try:
        garbage = FreesMemory()
        dist.all_reduce(cupy.ones(9, cupy.int32), group=group)
        monkeypatch.setattr(target, name, collect)
        del garbage
        assert part.comm.aborted.wait(LIMIT_S) and collecting.is_set()
    finally:
        gc.enable()
    wait_until_failed(group)
    with pytest.raises(DistBackendError, match=r"timed out: (NCCL has not|rank \d has closed)"):
        dist.all_reduce(cupy.ones(9, cupy.int32), group=group)


def test_error_of_a_destroyed_communicator_is_not_read(group, part):
    """The watchdog thread may check while the group is being destroyed."""
    dist.destroy_process_group(group)
    part._next_look = 0.0
    assert part.find_failure() is None


def test_communicator_that_is_being_destroyed_is_not_aborted(group, part, monkeypatch):
    """The watchdog thread may abort the group at that time."""
    comm, destroy = part.comm, part.comm.destroy
    error = DistBackendError("another rank has failed")
    monkeypatch.setattr(comm, "destroy", lambda: (part.abort(error, alone=True), destroy()))
    dist.destroy_process_group(group)
    assert not comm.aborted.is_set() and comm.async_error == "the communicator was destroyed"


def test_async_error_of_nccl_fails_the_group_on_all_ranks(group, part):
    part.comm.rank_missing = True
    array = cupy.ones(9, cupy.int32)
    dist.all_reduce(array, group=group)
    MPI.COMM_WORLD.Barrier()  # else this call of a late rank raises the error
    if dist.get_rank() == 0:
        part.comm.async_error = "a remote process has exited"
    wait_until_failed(group)
    # Rank 2 may be notified by rank 1 instead of rank 0.
    message = "NCCL failed: a remote proc" if dist.get_rank() == 0 else "rank [01] .*fail"
    with pytest.raises(DistBackendError, match=message):
        dist.all_reduce(array, group=group)
    cupy.cuda.Device().synchronize()
    assert part.comm.aborted.wait(60)


def test_host_call_raises_the_error_of_devices(arrays, monkeypatch):
    """Also after calls of MPI's function by the native fast path, which checks no devices."""
    monkeypatch.setattr(consistency, "FIRST", 1)
    monkeypatch.setattr(consistency, "STRIDE", 1000)
    monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    group, array = dist.new_group(timeout=60), np.ones(1, np.int32)
    for _ in range(3):
        dist.all_reduce(array, group=group)
    check_all_reduce(group)
    part = group.resources.find("devices").states["nccl"]
    part.comm.async_error, part._next_look = "a remote process has exited", 0.0
    with pytest.raises(DistBackendError, match="fail"):
        dist.all_reduce(array, group=group)
    assert part.comm.aborted.wait(60)


def test_nccl_in_progress_is_not_an_error(group, part):
    part.comm.async_error = 7  # ncclInProgress
    check_all_reduce(group)
    assert part.find_failure(wait=True) is None
    part.comm.async_error = ""


def test_failure_before_the_nccl_call_fails_the_group(group, part):
    """The other ranks are blocked in NCCL kernels until they are notified."""
    part.comm.rank_missing = True
    third = cupy.ones(150, cupy.float32)[::3]
    with real.Fault("copy_strided", dist.get_rank() == 0) as fault:
        dist.all_reduce(third, group=group)
    assert (fault.error is not None) == (dist.get_rank() == 0)
    cupy.cuda.Device().synchronize()
    # rank 1 may forward the notification
    with pytest.raises(DistBackendError, match=r"rank [01] .*call 2.*"):
        wait_until_failed(group)
        dist.all_reduce(third, group=group)


@pytest.mark.parametrize("group", [8], indirect=True)
def test_mismatch_is_found_at_the_next_comparison(group, monkeypatch):
    monkeypatch.setattr(Communicator, "_run", lambda *arguments: None)
    with pytest.raises(MismatchError):
        for turn in range(24):
            count = 20 if turn == 3 and dist.get_rank() == 0 else 10
            dist.all_reduce(cupy.ones(count, "f4"), group=group, async_op=True).wait()
