"""CUDA contexts of the process's threads, with a fake CUDA.

``FakeCuda`` models the context stack of each thread, the devices with contexts, and the calls that
invalidate a graph capture. Its methods are CuPy's functions and the driver library's functions.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from mpicoll.core.progress import Poller, Worker
from mpicoll.cuda import runtime, threads
from mpicoll.cuda.runtime import Memory, Runtime
from mpicoll.cuda.streams import DeviceContext
from mpicoll.errors import DeviceMemoryError, MpicollError, UnsupportedError

pytestmark = pytest.mark.any_mpi

RELAXED = 2


class FakeCuda:
    """Two devices. Context 100 + i is the primary context of device i.

    created:       devices with contexts.
    capturing:     True while a thread captures a graph.
    invalidations: calls that have invalidated the capture.
    acquired, released: handles that were created and destroyed.
    """

    def __init__(self) -> None:
        self.own = threading.local()
        self.created: set[int] = set()
        self.capturing = False
        self.invalidations: list[str] = []
        self.acquired: list[int] = []
        self.released: list[int] = []

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.own, "stack"):
            self.own.stack = []
        return self.own.stack

    # --- driver library; results are ctypes references

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, into, index):
        into._obj.value = index
        return 0 if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, into, device):
        self.created.add(device.value)
        into._obj.value = 100 + device.value
        return 0

    def cuCtxGetCurrent(self, into):
        into._obj.value = self.stack[-1] if self.stack else None
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, into):
        into._obj.value = self.stack.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        mode._obj.value, self.own.mode = self.mode, mode._obj.value
        return 0

    @property
    def mode(self):
        return getattr(self.own, "mode", 0)

    def cuPointerGetAttribute(self, into, which, address):
        into._obj.value = {9: 1, 10: 1, 8: 0}[which]
        return 0 if address.value else 1

    def cuMemHostGetDevicePointer_v2(self, into, address, flags):
        assert self.stack and flags == 0
        into._obj.value = (address.value or 0) + (1 << 40)
        return 0 if address.value else 1

    def cuDeviceGetUuid_v2(self, into, device):
        into._obj[:] = [device.value] * 16
        return 0

    # --- cupy.cuda.runtime

    is_hip = False
    streamNonBlocking, eventDisableTiming = 1, 2

    def _enter(self, call, unsafe=False):
        """Give a thread without a context one on device 0, as the CUDA runtime does."""
        if not self.stack:
            self.setDevice(0)
        if unsafe and self.capturing and self.mode != RELAXED:
            self.invalidations.append(call)

    def setDevice(self, index):
        self.created.add(index)
        self.stack[-1:] = [100 + index]

    def _make(self, call, unsafe=False):
        self._enter(call, unsafe)
        self.acquired.append(1000 + len(self.acquired))
        return self.acquired[-1]

    def _destroy(self, number, unsafe=False):
        self._enter("destroy", unsafe)
        assert number in self.acquired and number not in self.released
        self.released.append(number)

    def streamCreateWithFlags(self, flags):
        return self._make("streamCreate")

    def eventCreateWithFlags(self, flags):
        return self._make("eventCreate")

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status):
            super().__init__(f"error {status}")
            self.status = status

    room = 1 << 40

    def malloc(self, nbytes):
        if nbytes > self.room:
            raise self.CUDARuntimeError(2 if nbytes < 1 << 50 else 700)
        return self._make("malloc", unsafe=True)

    def memGetInfo(self):
        self._enter("memGetInfo", unsafe=True)
        return self.room, 1 << 40

    streamDestroy = eventDestroy = _destroy

    def free(self, address):
        self._destroy(address, unsafe=True)

    def ipcOpenMemHandle(self, handle):
        return self._make("ipcOpenMemHandle", unsafe=True)

    ipcCloseMemHandle = free

    def eventRecord(self, event, stream):
        self._enter("eventRecord")

    def streamWaitEvent(self, stream, event):
        self._enter("streamWaitEvent")

    def eventSynchronize(self, event):
        self._enter("eventSynchronize", unsafe=True)

    def eventQuery(self, event):
        self._enter("eventQuery", unsafe=True)
        return self.status

    status = 600  # cudaErrorNotReady

    def check_status(self, status):
        if status:
            raise self.CUDARuntimeError(status)

    def memcpyAsync(self, *arguments):
        self._enter("memcpyAsync")

    memcpyDefault = 4
    registered = None

    def hostRegister(self, *arguments):
        self._enter("hostRegister", unsafe=True)
        self.registered = arguments

    def hostUnregister(self, address):
        self._enter("hostUnregister", unsafe=True)
        assert self.registered[0] == address
        self.registered = None

    def deviceSynchronize(self):
        self._enter("deviceSynchronize", unsafe=True)
        self.waited = [*self.stack]

    def getDeviceCount(self):
        return 2

    def deviceGetPCIBusId(self, index):
        return "0000:3b:00.0"  # two MIG instances of one GPU

    def getDeviceProperties(self, index):
        return {"name": b"a GPU"}


@pytest.fixture
def world(monkeypatch) -> FakeCuda:
    made = FakeCuda()
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        runtime=made,
        is_available=lambda: True,
        Device=lambda index: types.SimpleNamespace(use=lambda: made.setDevice(index)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


@pytest.fixture
def cuda(world, monkeypatch) -> Iterator[Runtime]:
    made = Runtime()
    monkeypatch.setattr(runtime, "_runtime", made)
    monkeypatch.setattr(threads, "_device", None)
    yield made


def on_a_thread(task) -> None:
    """Run a task on a new thread and raise its error."""
    errors = []

    def run():
        try:
            task()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def work(cuda: Runtime, index: int) -> None:
    """Make every device call of a collective and free all resources."""
    context = DeviceContext(cuda, index)
    context.scratch(100)
    context.after(context.work, context.to_host)
    cuda.copy(index, 1, 2, 3, context.work)
    assert not cuda.is_done(context.record())
    context.synchronize(context.work)
    assert cuda.device_of(5) == 1 and cuda.is_plain(5)
    context.close()


def test_no_context_on_unused_devices(world, cuda):
    """Work on GPU 1 from a new thread does not create a context on GPU 0."""
    on_a_thread(lambda: work(cuda, 1))
    gc.collect()
    assert world.created == {1}
    assert sorted(world.released) == world.acquired, "not all handles were released"


def test_releasing_on_another_thread_creates_no_context(world, cuda):
    held: list[Memory] = []
    on_a_thread(lambda: held.append(cuda.allocate(1, 10)))
    on_a_thread(held.clear)
    gc.collect()
    assert world.created == {1} and world.released == world.acquired


def test_on_restores_the_context_stack(world, cuda):
    def task(before):
        world.stack[:] = before
        with cuda.on(1):
            assert world.stack[-1] == 101
            with cuda.on(1), cuda.on(0):
                assert world.stack[-1] == 100
            assert world.stack[-1] == 101
            work(cuda, 0)
        assert world.stack == before

    for before in ([], [100], [101], [7]):
        on_a_thread(lambda before=before: task(before))


def test_on_restores_the_context_after_an_error(world, cuda):
    with pytest.raises(ZeroDivisionError), cuda.on(1):
        1 / 0  # noqa: B018
    assert not world.stack
    with pytest.raises(MpicollError, match=r"cuDeviceGet: .*101"), cuda.on(2):
        pass


class Polled:
    """A task that the poller calls until ``stops`` is true."""

    def __init__(self, task) -> None:
        self.task, self.stops = task, False

    def poll(self) -> bool:
        self.task()
        return self.stops


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_progress_threads_use_the_device_of_the_process(world, cuda):
    """MPI may access device memory on any thread. No context is created before the first use."""
    seen: dict[str, int | None] = {}

    def record_context(name):
        seen[name] = world.stack[-1] if world.stack else None

    poller, worker = Poller(), Worker("mpicoll-test")
    polled = Polled(lambda: record_context("poller"))
    poller.add(polled.poll)
    worker.submit(lambda: record_context("worker"))
    wait_for(lambda: len(seen) == 2)
    assert seen == {"poller": None, "worker": None} and not world.created
    context = DeviceContext(cuda, 1)
    worker.submit(lambda: record_context("worker"))
    wait_for(lambda: seen == {"poller": 101, "worker": 101})
    worker.submit(lambda: work(cuda, 0))
    worker.submit(lambda: record_context("worker"))
    worker.stop(30)
    assert seen["worker"] == 101, "a call on another device has changed the context"
    polled.stops = True
    poller.stop()
    assert threading.current_thread() is threading.main_thread() and not world.stack
    context.close()


@pytest.mark.parametrize("first", [True, False])
def test_progress_threads_do_not_invalidate_a_graph_capture(world, cuda, first):
    """first: the thread makes the first device call."""
    if not first:
        context = DeviceContext(cuda, 1)
    world.capturing = True
    worker, poller = Worker("mpicoll-test"), Poller()
    worker.submit(lambda: work(cuda, 1))
    worker.stop(30)
    done = Polled(lambda: work(cuda, 1))
    done.stops = True
    poller.add(done.poll)
    poller.stop()
    assert not world.invalidations
    work(cuda, 1)
    assert world.invalidations, "the fake does not detect invalidations"
    if not first:
        context.close()


def test_memory_may_be_released_on_a_thread_that_captures_a_graph(world, cuda):
    """The garbage collector runs on any thread."""
    held = [cuda.allocate(1, 10), cuda.open(1, b""), cuda.register(1, 1 << 20, 4096)]
    world.capturing = True
    held.clear()
    gc.collect()
    assert len(world.released) == 2 and world.registered is None
    assert not world.invalidations and world.mode == 0


def test_captured_call_may_query_the_memory(world, cuda):
    """CuPy calls cudaMemGetInfo at a thread's first launch."""
    context = DeviceContext(cuda, 1)
    world.capturing = True
    with context.capturing(7):
        world.memGetInfo()
    assert not world.invalidations and world.mode == 0
    world.capturing = False
    context.close()


def test_kernels_are_loaded_by_the_driver_if_it_can(world, cuda, monkeypatch):
    """cuFuncLoad needs CUDA 12.4."""
    loaded = []
    cuda._driver.load_kernel(5)
    monkeypatch.setattr(world, "cuFuncLoad", lambda it: loaded.append(it.value) or 0, raising=False)
    cuda._driver.load_kernel(5)
    assert loaded == [5]


class Stream:
    """CuPy's Stream: ``with`` restores the stream of an outer ``with``, not that of use()."""

    def __init__(self, number):
        self.ptr = number

    def use(self):
        Stream.current = self
        return self

    def __enter__(self):
        Stream.stack.append(self)
        Stream.current = self

    def __exit__(self, *error):
        Stream.stack.pop()
        Stream.current = Stream.stack[-1]

    @staticmethod
    def from_external(given):
        return Stream(given.__cuda_stream__()[1])


def test_the_users_current_stream_is_restored(cuda, monkeypatch):
    """Also after Stream.use(), and within the context if the caller enters another stream."""
    null = Stream(0)
    monkeypatch.setattr(Stream, "stack", [null], raising=False)
    monkeypatch.setattr(Stream, "current", null, raising=False)
    found = sys.modules["cupy"].cuda
    found.Stream, found.get_current_stream = Stream, lambda index: Stream.current
    used = Stream(4711).use()
    with cuda.using(1, 5):
        assert cuda.current_stream(1) == 5
        with Stream(6):
            pass
        assert cuda.current_stream(1) == 5
    assert Stream.current is used
    with pytest.raises(ZeroDivisionError), cuda.using(1, 5):
        1 / 0  # noqa: B018
    assert Stream.current is used and Stream.stack == [null]


def test_mig_instances_of_one_gpu_have_different_identities(cuda):
    assert cuda.pci_bus_id(0) == cuda.pci_bus_id(1)
    assert cuda.identity(0) != cuda.identity(1)
    assert cuda.identity(1) == "0000:3b:00.0 01010101-0101-0101-0101-010101010101"


def test_cupy_for_rocm_is_not_supported(world, monkeypatch):
    monkeypatch.setattr(world, "is_hip", True)
    with pytest.raises(UnsupportedError, match="built for ROCm, which is not supported"):
        Runtime()


def test_cupy_without_the_driver_raises(world, monkeypatch):
    def absent(name, mode=0):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(UnsupportedError, match=r"CUDA driver's library, .* libcuda.*cannot"):
        Runtime()


def test_cupy_import_error_raises_unsupported(monkeypatch):
    """CuPy creates its cache folder when it is imported."""

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "cupy":
                raise PermissionError("/root/.cupy")

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(UnsupportedError, match=r"cannot be loaded.*/root/.cupy"):
        Runtime()


def test_memory_pools_are_emptied_if_memory_is_short(world, cuda, monkeypatch):
    emptied = []

    def empty(name):
        emptied.append((name, world.stack[-1]))
        world.room = 1 << 30

    pool = types.SimpleNamespace(free_all_blocks=lambda: empty("cupy"))
    sys.modules["cupy"].get_default_memory_pool = lambda: pool
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(
        is_initialized=lambda: True, empty_cache=lambda: empty("torch")
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    world.room = 1 << 20
    held = runtime.allocate(cuda, 1, 1 << 30)
    assert emptied == [("torch", 101), ("cupy", 101)] and held.nbytes == 1 << 30
    with pytest.raises(DeviceMemoryError, match=r"GPU 1 .* 2048 MiB are needed, 1024 of 1048576"):
        runtime.allocate(cuda, 1, 2 << 30)
    with pytest.raises(RuntimeError, match="error 700"):  # not out of memory
        runtime.allocate(cuda, 1, 1 << 60)
    assert len(emptied) == 4


def test_device_of_unknown_memory_raises(cuda):
    with pytest.raises(UnsupportedError, match="does not know the memory"):
        cuda.device_of(0)
    assert not cuda.is_plain(0)


def test_reach_returns_the_device_address_of_host_memory(world, cuda):
    assert cuda.reach(1, 4096) == 4096 + (1 << 40)
    assert not world.stack and world.created == {1}
    with pytest.raises(MpicollError, match=r"cuMemHostGetDevicePointer_v2: .* error 1"):
        cuda.reach(1, 0)


def test_is_done_raises_the_error_of_a_failed_device(world, cuda):
    context = DeviceContext(cuda, 1)
    event = context.record()
    world.status = 700  # cudaErrorIllegalAddress
    with pytest.raises(world.CUDARuntimeError, match="700"):
        cuda.is_done(event)


def test_register_pins_and_maps_host_memory(world, cuda):
    portable, mapped = 1, 2
    kept = cuda.register(1, 1 << 20, 4096)
    assert world.registered == (1 << 20, 4096, portable | mapped)
    del kept
    assert world.registered is None


def test_synchronize_device_creates_no_other_context(world, cuda):
    on_a_thread(lambda: cuda.synchronize_device(1))
    assert world.waited == [101] and world.created == {1}
