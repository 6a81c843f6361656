"""The NCCL route, on simulated devices with an NCCL emulated over MPI."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import types
import weakref

import numpy as np
import pytest
import simulated
from conftest import TIMEOUT, Team, team
from driver import MOVES, NAMES, REDUCTIONS, legal_operations
from mpi4py import MPI
from simulated import Simulated, elements
from test_devices import DeviceCall, UnevenDeviceCall, got, uploaded

import mpicoll as dist
from mpicoll.cuda import capabilities, runtime
from mpicoll.dtypes import by_name
from mpicoll.errors import CollectiveTimeoutError, DistBackendError, UnsupportedError
from mpicoll.failures import consistency
from mpicoll.routes import registry
from mpicoll.routes.device import copy_engine, nccl

pytestmark = pytest.mark.any_mpi

#: Dtypes by ncclDataType_t.
KINDS = [
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16",
]  # fmt: skip
#: ncclUniqueId as returned by CuPy: bytes since version 14.
IDENTITY = bytes(range(128))
SERVED = registry.DEVICE["nccl"].serves.primitives
#: Operations by ncclRedOp_t.
OPS = ["SUM", "PRODUCT", "MAX", "MIN", "AVG"]


class WithNccl(Simulated):
    """Simulated devices with NCCL. Each rank's device has a different identity."""

    def __init__(self, me: int) -> None:
        super().__init__()
        self.me = me
        self.open_group = None
        self.call_count = 0

    def is_done(self, event):
        """Poll without blocking the host: an emulated NCCL kernel may wait for another rank."""
        done = event.stream.done >= event.place
        if not done:
            run = threading.Thread(target=self._run, args=(event.stream, event.place), daemon=True)
            run.start()
        return done

    def pci_bus_id(self, index):
        return f"{self.me}-{index}"

    def has_nccl(self):
        return True

    def nccl_unique_id(self):
        return IDENTITY

    def create_nccl(self, index, n, identity, rank):
        assert identity == IDENTITY
        # NCCL matches ranks by the identity. The emulation uses all ranks of the job.
        return Communicator(self, index, MPI.COMM_WORLD.Split(0, rank))

    @contextlib.contextmanager
    def nccl_group(self):
        self.open_group = []
        yield
        messages, self.open_group = self.open_group, None
        if messages:
            comm, index, stream = messages[0][:3]

            def task():
                requests = []
                for _, _, _, sends, memory, rank in messages:
                    begin = comm.Isend if sends else comm.Irecv
                    requests.append(begin([memory, MPI.BYTE], rank))
                MPI.Request.Waitall(requests)

            self.enqueue(index, stream, task)


class Communicator:
    def __init__(self, cuda, index, comm):
        self.cuda, self.index, self.comm = cuda, index, comm
        self.aborted = threading.Event()
        self.async_error = ""
        self.rank_missing = False  # a rank is missing, so NCCL blocks

    def _elements(self, address, count, kind):
        return elements(address, by_name[KINDS[kind]].numpy, count)

    def _enqueue(self, stream, task):
        self.cuda.call_count += 1
        if self.rank_missing:
            task = self.aborted.wait
        self.cuda.enqueue(self.index, stream, task)

    def _reduced(self, address, count, kind, op):
        mine = self._elements(address, count, kind)
        gathered = np.empty((self.comm.size, mine.nbytes), np.uint8)
        self.comm.Allgather(mine.view(np.uint8), gathered)
        every = gathered.view(mine.dtype)
        if mine.dtype.kind == "f":
            every = every.astype(np.float64)
        with np.errstate(all="ignore"):
            found = {
                "SUM": np.sum, "PRODUCT": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean,
            }[OPS[op]](every, axis=0)  # fmt: skip
            return found.astype(mine.dtype)

    def allReduce(self, send, recv, count, kind, op, stream):
        self.reduce(send, recv, count, kind, op, self.comm.rank, stream)

    def reduce(self, send, recv, count, kind, op, root, stream):
        def task():
            found = self._reduced(send, count, kind, op)
            if self.comm.rank == root:
                self._elements(recv, count, kind)[...] = found

        self._enqueue(stream, task)

    def reduceScatter(self, send, recv, count, kind, op, stream):
        def task():
            n, me = self.comm.size, self.comm.rank
            found = self._reduced(send, count * n, kind, op).reshape(n, count)
            self._elements(recv, count, kind)[...] = found[me]

        self._enqueue(stream, task)

    def broadcast(self, send, recv, count, kind, root, stream):
        assert send == recv
        self._enqueue(stream, lambda: self.comm.Bcast(self._elements(recv, count, kind), root))

    def allGather(self, send, recv, count, kind, stream):
        def task():
            whole = self._elements(recv, count * self.comm.size, kind)
            self.comm.Allgather(self._elements(send, count, kind), whole)

        self._enqueue(stream, task)

    def send(self, address, count, kind, rank, stream):
        self._message(address, count, kind, rank, stream, True)

    def recv(self, address, count, kind, rank, stream):
        self._message(address, count, kind, rank, stream, False)

    def _message(self, address, count, kind, rank, stream, sends):
        self.cuda.call_count += 1
        memory = self._elements(address, count, kind).view(np.uint8)
        self.cuda.open_group.append((self.comm, self.index, stream, sends, memory, rank))

    def check_async_error(self):
        if isinstance(self.async_error, int):
            raise KeyError(self.async_error)  # a number that CuPy does not know
        if self.async_error:
            raise RuntimeError(self.async_error)

    def destroy(self):
        assert not self.aborted.is_set()
        self.comm.Free()

    def abort(self):
        """Cancel enqueued work on this rank only, as ncclCommAbort does."""
        assert not self.aborted.is_set()
        self.aborted.set()


class Arrays(simulated.Arrays):
    """Arrays on the given devices."""

    def __init__(self, cuda):
        self.cuda = cuda


@pytest.fixture(scope="module")
def arrays(mpi_world):
    return mpi_world[0]


@pytest.fixture
def cuda(arrays):
    return arrays.cuda


@pytest.fixture(scope="module")
def mpi_world():
    with pytest.MonkeyPatch.context() as patch:
        found = Arrays(WithNccl(MPI.COMM_WORLD.rank))
        patch.setattr(runtime, "_runtime", found.cuda)
        patch.setattr(capabilities, "_known", None)
        dist.init_process_group("nccl", timeout=TIMEOUT)
        yield found, team("world", range(dist.get_world_size()))
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(mpi_world) -> Team:
    return mpi_world[1]


def exact(dtype, op):
    """True if the result needs no rounding and no NaN rule."""
    return dtype.kind.value == "integer" and op.name in OPS


@pytest.mark.parametrize("name", [name for name in MOVES if NAMES[name].name in SERVED])
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e5m2", "complex128", "int32"])
def test_data_movement_through_nccl(arrays, cuda, world, name, dtype):
    before = cuda.call_count
    for count in (0, 1, 7, 1000):
        DeviceCall(arrays, name, world, by_name[dtype], count, None, count % world.size).run()
    assert cuda.call_count > before, "another route was used"


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if NAMES[name].name in SERVED])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_reductions_through_nccl(arrays, cuda, world, name, dtype):
    before = cuda.call_count
    row = by_name[dtype]
    for op in (op for op in legal_operations(row) if exact(row, op)):
        for count in (0, 1, 7, 1000):
            DeviceCall(arrays, name, world, row, count, op, count % world.size).run()
    assert cuda.call_count > before, "another route was used"


def test_average_of_floats_through_nccl(arrays, cuda, world):
    for dtype in ("float32", "float64", "float16"):
        call = DeviceCall(arrays, "all_reduce", world, by_name[dtype], 8, dist.ReduceOp.AVG)
        for array in call.made:
            array.host[...] = world.me
        before = cuda.call_count
        call.start()
        call.made[0].download()
        assert (call.made[0].host == (world.size - 1) / 2).all() and cuda.call_count > before


def test_nccl_has_priority_for_any_size(arrays, cuda, world):
    """Also for sizes at which another route would be selected."""
    for count in (1000, copy_engine.MIN_BYTES // 4):
        given = uploaded(arrays, np.full(count, world.me, np.float32))
        output = uploaded(arrays, np.zeros((world.size, count), np.float32))
        before = cuda.call_count
        dist.all_gather_single(output, given)
        assert (got(output) == np.arange(world.size)[:, None]).all()
        assert cuda.call_count > before, "another route was used"


def test_forked_child_does_not_destroy_the_communicator(arrays, world):
    group = dist.new_group()
    array = uploaded(arrays, np.full(9, 1, np.int32))
    dist.all_reduce(array, group=group)
    assert (got(array) == world.size).all()
    comm = weakref.ref(group.resources.find("devices").states["nccl"].comm)
    group = weakref.ref(group)
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(int(comm() is None))
    _, status = os.waitpid(child, 0)
    assert status == 0
    dist.destroy_process_group(group())


def test_unsupported_reductions_use_another_route(arrays, cuda, world):
    for dtype, op in (("bool", "SUM"), ("int32", "BXOR"), ("float8_e5m2", "SUM"), ("int16", "SUM")):
        before = cuda.call_count
        row, operation = by_name[dtype], getattr(dist.ReduceOp, op)
        DeviceCall(arrays, "all_reduce", world, row, 100, operation).run()
        assert cuda.call_count == before
    for name in ("scan", "exscan"):
        before = cuda.call_count
        DeviceCall(arrays, name, world, by_name["int32"], 100, dist.ReduceOp.SUM).run()
        assert cuda.call_count == before


def test_uneven_reduce_scatter_through_nccl(arrays, cuda, world):
    before = cuda.call_count
    for name in ("SUM", "MAX"):
        call = by_name["int32"], [3, 0, 1000, 5], getattr(dist.ReduceOp, name)
        UnevenDeviceCall(arrays, world, *call).run_and_check()
    assert cuda.call_count > before, "another route was used"


def test_uneven_all_to_all(arrays, world):
    n, me = world.size, world.me
    sends = [me + r for r in range(n)]
    given = np.concatenate([np.full(count, 10 * me + r) for r, count in enumerate(sends)])
    output = uploaded(arrays, np.zeros(sum(sends), given.dtype))
    dist.all_to_all_single(output, uploaded(arrays, given), sends, sends)
    expected = np.concatenate([np.full(me + r, 10 * r + me) for r in range(n)])
    assert (got(output) == expected).all()


def test_ranks_that_share_a_gpu_use_another_route(world, monkeypatch):
    """NCCL does not support several ranks on one GPU."""
    if world.size == 1:
        return
    shared = WithNccl(0)
    monkeypatch.setattr(runtime, "_runtime", shared)
    group = dist.new_group()
    one_gpu, row = Team("one_gpu", group, world.ranks, world.me), by_name["int32"]
    DeviceCall(Arrays(shared), "all_reduce", one_gpu, row, 9, dist.ReduceOp.SUM, index=0).run()
    assert shared.call_count == 0
    dist.destroy_process_group(group)


def test_forcing_nccl_without_nccl_raises(world, monkeypatch):
    monkeypatch.setenv("MPICOLL_DEVICE_ROUTE", "nccl")
    monkeypatch.setattr(capabilities, "_known", None)
    without = Simulated()
    monkeypatch.setattr(runtime, "_runtime", without)
    group = dist.new_group()
    forced, row = Team("forced", group, world.ranks, world.me), by_name["int32"]
    call = DeviceCall(Arrays(without), "all_reduce", forced, row, 9, dist.ReduceOp.SUM)
    with pytest.raises(UnsupportedError, match=r"MPICOLL_DEVICE_ROUTE=nccl: .*lacks NCCL"):
        call.start()
    dist.destroy_process_group(group)


class Alone:
    """A communicator that was created on this rank only."""

    aborted = False

    def abort(self):
        self.aborted = True


def test_nccl_failure_on_one_rank_disables_the_route(arrays, cuda, world, monkeypatch):
    """All ranks use another route, and communicators created on other ranks are aborted."""
    made = Alone()
    monkeypatch.setattr(cuda, "create_nccl", lambda *arguments: 1 / 0 if world.me == 0 else made)
    group = dist.new_group()
    array = uploaded(arrays, np.full(9, world.me, np.int32))
    before = cuda.call_count
    dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all() and cuda.call_count == before
    assert group.resources.find("devices").missing["nccl"] == "rank 0: division by zero"
    assert made.aborted == (world.me != 0)
    dist.destroy_process_group(group)


def test_ranks_blocked_in_nccl_initialization_are_released(arrays, cuda, world, monkeypatch, mpi):
    """The rank on which initialization failed raises the cause."""
    if world.size == 1:
        pytest.skip("needs 2 ranks")
    monkeypatch.setattr(nccl, "_INIT_TIMEOUT_S", TIMEOUT if world.me else 0.2)
    comm = mpi.Dup()

    def block(*arguments):
        comm.Barrier()
        if world.me == 0:
            raise RuntimeError("no network")
        comm.Barrier()  # until rank 0 has raised
        raise RuntimeError("released")

    monkeypatch.setattr(cuda, "create_nccl", block)
    group = dist.new_group()
    found = simulated.Simulated.create_stream(cuda, 0)
    context = types.SimpleNamespace(runtime=cuda, index=0, work=found)
    agreed = types.SimpleNamespace(group=group, context=context)
    if world.me == 0:
        with pytest.raises(DistBackendError, match=r"rank 0: no network; .* in ncclCommInitRank"):
            nccl.ROUTE.negotiate(agreed)
        comm.Barrier()
    else:
        assert "rank 0: no network" in nccl.ROUTE.negotiate(agreed)
    comm.Free()
    dist.destroy_process_group(group)


def group_after_a_call(arrays, world, patch):
    """Return a group after its first call, its NCCL state, and an array."""
    if world.size == 1:
        pytest.skip("needs 2 ranks")
    patch.setattr(consistency, "FIRST", 1)  # later calls do not synchronize the hosts
    group = dist.new_group(timeout=TIMEOUT)
    array = uploaded(arrays, np.full(9, world.me, np.int32))
    dist.all_reduce(array, group=group)
    assert (got(array) == sum(range(world.size))).all()
    return group, group.resources.find("devices").states["nccl"], array


def wait_until_failed(group):
    """Wait until the watchdog thread has failed the group."""
    end = time.monotonic() + TIMEOUT / 2
    while group.error is None:
        assert time.monotonic() < end, "the group has not failed in time"
        time.sleep(0.01)


@pytest.mark.parametrize("via", ["call", "destroy", "wait", "exception"])
def test_missing_rank_times_out_and_aborts_nccl(arrays, world, monkeypatch, via):
    """The error that the caller gets names the call."""
    group, part, array = group_after_a_call(arrays, world, monkeypatch)
    group.timeout = 1.0  # for the following calls
    if world.me == 0:  # does not make the call, and is notified
        wait_until_failed(group)
        with pytest.raises(DistBackendError, match=r"rank [1-9] (failed in|has left|has closed)"):
            dist.all_reduce(array, group=group)
        dist.destroy_process_group(group)
        return
    part.comm.rank_missing = True
    work = dist.all_reduce(array, group=group, async_op=True)
    if via != "destroy":
        wait_until_failed(group)
    message = (
        rf"all_reduce of 9 elements of int32, SUM, on a device, on rank {world.me} of .*, call 2: "
        r"timed out: NCCL has not done it within the group's timeout of 1 s|"
        r"rank [1-9] (failed in|has left|has closed)"
    )
    with pytest.raises(DistBackendError, match=message) as caught:
        if via == "call":
            dist.all_reduce(array, group=group)
        elif via == "destroy":
            dist.destroy_process_group(group)
        elif via == "wait":
            work.wait(TIMEOUT)
        else:
            raise work.exception()
    first = isinstance(caught.value, CollectiveTimeoutError)
    assert part.comm.aborted.wait(TIMEOUT) and (first or world.size > 2)
    if group.closed is None:
        dist.destroy_process_group(group)


def test_nccl_async_error_fails_the_group_on_all_ranks(arrays, world, monkeypatch):
    group, part, array = group_after_a_call(arrays, world, monkeypatch)
    part.comm.rank_missing = True
    dist.all_reduce(array, group=group)
    if world.me == 0:
        part.comm.async_error = "a remote process has exited"
    wait_until_failed(group)
    # Rank 2 may be notified by rank 1 instead of rank 0.
    message = "NCCL failed: a remote process has exited" if world.me == 0 else "rank [01] .*fail"
    with pytest.raises(DistBackendError, match=message):
        dist.all_reduce(array, group=group)
    got(array)
    assert part.comm.aborted.wait(TIMEOUT)
    dist.destroy_process_group(group)


def test_nccl_in_progress_is_not_an_error(arrays, world, monkeypatch):
    group, part, array = group_after_a_call(arrays, world, monkeypatch)
    part.comm.async_error = 7  # ncclInProgress
    dist.all_reduce(array, group=group)
    got(array)
    assert part.find_failure(wait=True) is None
    part.comm.async_error = ""
    dist.destroy_process_group(group)


def test_failure_before_the_nccl_call_fails_the_group(arrays, world, monkeypatch):
    """The other ranks are blocked in NCCL kernels until they are notified."""
    group, part, _ = group_after_a_call(arrays, world, monkeypatch)
    part.comm.rank_missing = True
    third = arrays.make(np.ones(50, np.float32), 0, "third")
    third.upload()
    if world.me == 0:
        # drop the scratch memory that the group keeps
        part.context._blocks, part.context._since = [], []
        monkeypatch.setattr(arrays.cuda, "allocate", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dist.all_reduce(third, group=group)
    else:
        dist.all_reduce(third, group=group)
        got(third)
    # rank 1 may forward the notification
    with pytest.raises(DistBackendError, match=r"rank [01] .*call 2.*"):
        wait_until_failed(group)
        dist.all_reduce(third, group=group)
    monkeypatch.undo()
    dist.destroy_process_group(group)
