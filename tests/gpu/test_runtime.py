"""The runtime interface over CuPy: contexts of threads, captures, identities and errors."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import cupy
import pytest
from machine import find_gpus

from mpicoll.core.progress import Poller, Worker
from mpicoll.cuda import runtime, threads
from mpicoll.cuda.driver import Driver
from mpicoll.cuda.runtime import Runtime
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import MpicollError, UnsupportedError
from mpicoll.kernels.reduction import find_loop

needs_two_gpus = pytest.mark.skipif(find_gpus()[0] < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def cuda() -> Runtime:
    return runtime.get_runtime()


def context_of_thread():
    """Return the address of the thread's current context, or None."""
    found = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found)) == 0
    return found.value


def work(cuda: Runtime, index: int) -> None:
    """Make device calls of a collective and free all resources."""
    context = DeviceContext(cuda, index)
    memory = context.scratch(100)
    context.after(context.work, context.to_host)
    cuda.copy(index, memory.address, memory.address + 50, 50, context.work)
    context.synchronize(context.work)
    assert cuda.device_of(memory.address) == index and cuda.is_plain(memory.address)
    context.close()


@needs_two_gpus
def test_on_restores_the_context(cuda):
    """On a thread with and without a context, and after an error."""
    seen = []

    def task():
        for _ in range(2):
            before = context_of_thread()
            with pytest.raises(ZeroDivisionError), cuda.on(1):
                inside = context_of_thread()
                with cuda.on(1), cuda.on(0):
                    assert context_of_thread() not in (inside, None)
                assert context_of_thread() == inside
                work(cuda, 0)
                1 / 0  # noqa: B018
            assert context_of_thread() == before
            seen.append((before, inside))
            cuda.use(0)
        with pytest.raises(MpicollError, match=r"cuDeviceGet: .*101"), cuda.on(16):
            pass

    with ThreadPoolExecutor(1) as pool:  # a thread without a context
        pool.submit(task).result()
    assert seen[0][0] is None and seen[1][0] is not None and seen[0][1] == seen[1][1]


CONTEXTS = """
import ctypes, gc, threading
from mpicoll.cuda.runtime import get_runtime
cuda, held = get_runtime(), []
for task in (lambda: held.append(cuda.allocate(1, 10)), held.clear, gc.collect,
             lambda: cuda.synchronize_device(1)):
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
driver, device, flags, active = (
    ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0), ctypes.c_uint(), ctypes.c_int(-1))
for index in range(2):
    driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active))
    print(active.value)
"""


@needs_two_gpus
def test_releasing_on_another_thread_creates_no_context():
    assert subprocess.check_output([sys.executable, "-c", CONTEXTS]).split() == [b"0", b"1"]


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


@needs_two_gpus
def test_progress_threads_use_the_device_of_the_process(cuda, monkeypatch):
    """MPI may access device memory on any thread. No context is created before the first use."""
    monkeypatch.setattr(threads, "_device", None)
    seen = {}
    stop = threading.Event()

    def record_context(name):
        seen[name] = context_of_thread()
        return stop.is_set()

    poller, worker = Poller(), Worker("mpicoll-test")
    poller.add(lambda: record_context("poller"))
    worker.submit(lambda: record_context("worker"))
    wait_for(lambda: len(seen) == 2)
    assert seen == {"poller": None, "worker": None}
    with cuda.on(1):
        expected = context_of_thread()
    context = DeviceContext(cuda, 1)
    worker.submit(lambda: record_context("worker"))
    wait_for(lambda: seen == {"poller": expected, "worker": expected})
    worker.submit(lambda: work(cuda, 0))
    worker.submit(lambda: record_context("worker"))
    worker.stop(30)
    assert seen["worker"] == expected, "a call on another device has changed the context"
    stop.set()
    poller.stop()
    context.close()


def test_calls_that_a_capture_allows(cuda):
    """Memory may be released, because the garbage collector runs on any thread, and a captured call
    may make calls that others must not make.
    """
    cuda.use(0)
    context, stream = DeviceContext(cuda, 0), cupy.cuda.Stream(non_blocking=True)
    host = cupy.cuda.alloc_pinned_memory(1)  # not in the capture
    held = [cuda.allocate(0, 10)]
    address = held[0].address
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        held.clear()
        gc.collect()
        with context.capturing(stream.ptr):
            cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(10))
        stream.end_capture()  # raises if the capture is invalid
    assert cuda.find_allocation(address) is None, "the memory was not freed"
    context.close()
    del host


@needs_two_gpus
def test_mig_instances_of_one_gpu_have_different_identities(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "pci_bus_id", lambda index: "0000:3b:00.0")
    assert cuda.identity(0) != cuda.identity(1) and cuda.identity(0).startswith("0000:3b:00.0 ")


def test_unknown_memory(cuda):
    with pytest.raises(UnsupportedError, match="does not know the memory"):
        cuda.device_of(4096)
    assert not cuda.is_plain(4096)
    with pytest.raises(MpicollError, match=r"cuMemHostGetDevicePointer_v2: .* error 1"):
        cuda.reach(0, 4096)


def test_kernels_are_loaded_before_their_first_launch(cuda):
    """A launch that loads its kernel may wait for running kernels."""
    query = getattr(ctypes.CDLL("libcuda.so.1"), "cuFuncIsLoaded", None)
    if query is None:
        pytest.skip("needs CUDA 12.4")
    cuda.load(0, find_loop(ReduceOp.SUM, by_name["int16"]), 3)
    for kernel in cuda._kernels_of(0)._kernels.values():
        state = ctypes.c_int()
        assert query(ctypes.byref(state), ctypes.c_void_p(kernel.kernel.ptr)) == 0 and state.value


def test_kernels_are_loaded_before_cuda_12_4():
    """Without cuFuncLoad, a query of the attributes loads them."""
    Driver(types.SimpleNamespace(cuInit=lambda flags: 0)).load_kernel(5)


FAILING = """
import time
import cupy, numpy
from mpicoll.cuda.runtime import get_runtime
cuda, stream = get_runtime(), cupy.cuda.Stream(non_blocking=True)
write = cupy.RawKernel('extern "C" __global__ void write(int *p) { *p = 1; }', "write")
with stream:
    write((1,), (1,), (numpy.uint64(4096),))
event = cuda.record(0, stream.ptr)
end = time.monotonic() + 30
try:
    while not cuda.is_done(event) and time.monotonic() < end:
        time.sleep(1e-3)
except cupy.cuda.runtime.CUDARuntimeError as error:
    print(error)
"""


def test_is_done_raises_the_error_of_a_failed_kernel():
    output = subprocess.check_output([sys.executable, "-c", FAILING], stderr=subprocess.DEVNULL)
    assert b"cudaErrorIllegalAddress" in output
