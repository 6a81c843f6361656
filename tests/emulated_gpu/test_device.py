"""The rules of the emulated device: lazy streams, events, memory, IPC, capture and errors.

They need the environment that build.py makes:

    python tests/emulated_gpu/build.py VENV FOLDER
    . FOLDER/env.sh && VENV/bin/python -m pytest tests/emulated_gpu/test_device.py
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

if "EMULATED_GPU_CACHE" not in os.environ:
    pytest.skip("needs the variables that build.py writes", allow_module_level=True)
import cupy
from cupy.cuda import runtime

NOT_READY = 600
N = 1000

SOURCE = r"""
__device__ int variable = 5;
extern "C" __global__ void read(int* array) { array[0] = variable; }
extern "C" __global__ void store(int* array, int value, int index) { array[index] = value; }
extern "C" __global__ void fill(int* array, int value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) array[i] = value;
}
extern "C" __global__ void wait(volatile int* flag, int value, int* seen) {
    int found;
    do asm volatile("ld.acquire.sys.s32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    while (found != value);
    *seen = found;
}
"""
module = cupy.RawModule(code=SOURCE)
store, fill, wait = map(module.get_function, ("store", "fill", "wait"))
for kernel in (store, fill, wait):
    kernel.compile()


@pytest.fixture(autouse=True)
def collected():
    """Free the arrays of earlier tests, because the collector must not do so during a capture."""
    gc.collect()


def new_stream():
    return cupy.cuda.Stream(non_blocking=True)


def zeros(count=N):
    """Return an array of zeros outside of CuPy's pool."""
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(4 * count), 0)
    array = cupy.ndarray((count,), np.int32, pointer)
    array.fill(0)
    runtime.deviceSynchronize()
    return array


def pinned(count=N):
    """Return pinned host memory of zeros as a NumPy array."""
    memory = cupy.cuda.alloc_pinned_memory(4 * count)
    array = np.frombuffer(memory, np.int32, count)
    array[...] = 0
    return array


def enqueue_fill(array, value, stream):
    with stream:
        fill((4,), (256,), (array, np.int32(value), np.int32(array.size)))


def enqueue_copy(host, array, stream):
    runtime.memcpyAsync(
        host.ctypes.data, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr
    )


@contextlib.contextmanager
def error(number):
    """Expect a CUDA error."""
    with pytest.raises(runtime.CUDARuntimeError) as found:
        yield
    assert found.value.status == number


class Process:
    """A Python process that runs statements with the names of this module."""

    def __init__(self, *statements, **variables):
        code = "from test_device import *\n" + "\n".join(map(textwrap.dedent, statements))
        path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def read(self):
        return self.process.stdout.readline().strip()

    def write(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self, code=0):
        """Wait for the process and check its exit code. Return its output and error output."""
        output, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == code, errors
        return output, errors


# ---- lazy streams --------------------------------------------------------------------------------


def test_new_memory_contains_garbage():
    memory = cupy.cuda.Memory(4 * N)
    host = pinned()
    runtime.memcpy(host.ctypes.data, memory.ptr, 4 * N, runtime.memcpyDeviceToHost)
    assert host.any()


def test_host_reads_old_data_without_a_wait():
    array, host, stream = zeros(), pinned(), new_stream()
    enqueue_fill(array, 7, stream)
    enqueue_copy(host, array, stream)
    time.sleep(0.02)
    assert (host == 0).all()
    stream.synchronize()
    assert (host == 7).all()


def test_other_stream_reads_old_data_without_a_wait():
    array, host, first, second = zeros(), pinned(), new_stream(), new_stream()
    enqueue_fill(array, 7, first)
    enqueue_copy(host, array, second)
    second.synchronize()
    assert (host == 0).all()
    event = first.record()
    second.wait_event(event)
    enqueue_copy(host, array, second)
    second.synchronize()
    assert (host == 7).all()


def test_wait_for_an_event_does_not_include_later_work():
    array, host, first, second = zeros(), pinned(), new_stream(), new_stream()
    enqueue_fill(array, 7, first)
    event = first.record()
    enqueue_fill(array, 8, first)
    event.synchronize()
    enqueue_copy(host, array, second)
    second.synchronize()
    assert (host == 7).all()


def test_wait_refers_to_the_record_before_the_wait():
    array, host, first, second = zeros(), pinned(), new_stream(), new_stream()
    event = cupy.cuda.Event(disable_timing=True)
    enqueue_fill(array, 7, first)
    event.record(first)
    second.wait_event(event)
    enqueue_fill(array, 8, first)
    event.record(first)
    enqueue_copy(host, array, second)
    second.synchronize()
    assert (host == 7).all()


def test_legacy_stream_and_blocking_streams_wait_for_each_other():
    legacy = cupy.cuda.Stream.null
    for stream, expected in (
        (cupy.cuda.Stream(), 7),
        (new_stream(), 0),
        (cupy.cuda.Stream.ptds, 7),
    ):
        for first, second in ((stream, legacy), (legacy, stream)):
            array, host = zeros(), pinned()
            enqueue_fill(array, 7, first)
            enqueue_copy(host, array, second)
            second.synchronize()
            assert (host == expected).all()
            first.synchronize()


def test_polling_ends():
    array, stream = zeros(), new_stream()
    enqueue_fill(array, 7, stream)
    event = stream.record()
    assert not event.done
    deadline = time.monotonic() + 10
    while not event.done:
        assert time.monotonic() < deadline
        time.sleep(1e-4)
    assert stream.done


def test_kernel_that_polls_memory_starts_unasked():
    flag, seen, host, stream = pinned(1), zeros(1), pinned(1), new_stream()
    with stream:
        wait((1,), (1,), (flag.ctypes.data, np.int32(5), seen))
    event = stream.record()
    time.sleep(0.02)
    assert not event.done
    flag[0] = 5
    event.synchronize()
    enqueue_copy(host, seen, stream)
    stream.synchronize()
    assert host[0] == 5


def test_kernel_that_polls_memory_runs_beside_other_streams():
    flag, seen, first, second = zeros(1), zeros(1), new_stream(), new_stream()
    with first:
        wait((1,), (1,), (flag, np.int32(5), seen))
    enqueue_fill(flag, 5, second)
    second.synchronize()
    first.synchronize()


@pytest.mark.parametrize(
    ("allocate_source", "expected"),
    [(lambda: np.zeros(N, np.int32), 7), (lambda: pinned(), 8)],
    ids=["pageable memory at once", "pinned memory later"],
)
def test_copy_to_the_device_reads(allocate_source, expected):
    array, source, host, stream = zeros(), allocate_source(), pinned(), new_stream()
    source[...] = 7
    runtime.memcpyAsync(
        array.data.ptr, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream.ptr
    )
    source[...] = 8
    enqueue_copy(host, array, stream)
    stream.synchronize()
    assert (host == expected).all()


def test_copy_to_pageable_memory_waits():
    array, host, stream = zeros(), np.zeros(N, np.int32), new_stream()
    enqueue_fill(array, 7, stream)
    enqueue_copy(host, array, stream)
    assert (host == 7).all()


def test_free_waits_for_the_device():
    array, stream = zeros(), new_stream()
    enqueue_fill(zeros_kept := zeros(), 7, stream)
    event = stream.record()
    assert not event.done
    del array
    assert event.done and zeros_kept is not None


def test_destroyed_stream_finishes_its_work():
    array, host, stream = zeros(), pinned(), new_stream()
    enqueue_fill(array, 7, stream)
    event = stream.record()
    del stream
    event.synchronize()
    enqueue_copy(host, array, other := new_stream())
    other.synchronize()
    assert (host == 7).all()


# ---- memory --------------------------------------------------------------------------------------


def attribute(which, address, kind=ctypes.c_uint64):
    value = kind()
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuPointerGetAttribute(ctypes.byref(value), which, ctypes.c_uint64(address))
    return None if failed else value.value


def test_pointer_attributes():
    plain, managed = cupy.cuda.Memory(N), cupy.cuda.ManagedMemory(N)
    stream_ordered, host = cupy.cuda.MemoryAsync(N, new_stream()), pinned()
    pool = runtime.deviceGetDefaultMemPool(0)
    rows = [  # memory type, exportable, managed, pool
        (plain.ptr, runtime.memoryTypeDevice, 1, 0, 0),
        (managed.ptr, runtime.memoryTypeManaged, 0, 1, 0),
        (stream_ordered.ptr, runtime.memoryTypeDevice, 0, 0, pool),
        (host.ctypes.data, runtime.memoryTypeHost, 0, 0, 0),
    ]
    for address, kind, exportable, is_managed, handle in rows:
        assert runtime.pointerGetAttributes(address + 1).type == kind
        assert attribute(10, address) == exportable
        assert attribute(8, address) == is_managed
        assert (attribute(17, address) or 0) == handle
        assert attribute(9, address, ctypes.c_int) == 0
    assert attribute(11, plain.ptr + 10) == plain.ptr and attribute(12, plain.ptr) == N
    assert attribute(7, plain.ptr) not in (0, attribute(7, managed.ptr))
    unknown = np.zeros(1)
    assert runtime.pointerGetAttributes(unknown.ctypes.data).type == runtime.memoryTypeUnregistered
    assert attribute(7, unknown.ctypes.data) is None


def test_registered_host_memory():
    array = np.zeros(4096, np.int32)
    runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
    with error(712):
        runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
    assert runtime.pointerGetAttributes(array.ctypes.data).type == runtime.memoryTypeHost
    runtime.hostUnregister(array.ctypes.data)
    with error(713):
        runtime.hostUnregister(array.ctypes.data)


def test_memory_is_limited():
    free, total = runtime.memGetInfo()
    with error(2):
        runtime.malloc(total + 1)
    memory = cupy.cuda.Memory(64 << 20)
    assert runtime.memGetInfo() == (free - (64 << 20), total)
    del memory
    assert runtime.memGetInfo() == (free, total)
    process = Process(
        "assert runtime.memGetInfo()[1] == 1 << 20\nwith error(2): runtime.malloc(2 << 20)",
        EMULATED_GPU_MEMORY_BYTES=str(1 << 20),
    )
    process.end()


def test_copy_beyond_an_allocation_is_refused(capfd):
    array, host = zeros(), pinned(2 * N)
    with error(1):
        runtime.memcpy(host.ctypes.data, array.data.ptr, 8 * N, runtime.memcpyDeviceToHost)
    assert f"({4 * N} bytes at {array.data.ptr:#x}), offset 0" in capfd.readouterr().err


FAULT = """
array = zeros()
address = array.data.ptr
{prepare}
with cupy.cuda.Stream.null:
    store((1,), (1,), (address, np.int32(1), np.int32({index})))
for _ in range(2):
    with error({error}): runtime.deviceSynchronize()
with error({error}): runtime.malloc(8)
print("survived")
"""


@pytest.mark.parametrize(
    ("prepare", "index", "report"),
    [
        ("", N + 100, f"(4000 bytes at {{address}}), offset {4 * (N + 100)}"),
        ("", -1024, "offset -4096"),
        ("del array", 3, "offset 12, which was freed"),
        ("address = 8", 0, "not device memory"),
    ],
    ids=["beyond the end", "before the start", "after free", "not device memory"],
)
def test_invalid_access_by_a_kernel_is_reported(prepare, index, report):
    """The error is sticky, and the process goes on."""
    process = Process("print(hex(0))", FAULT.format(prepare=prepare, index=index, error=700))
    output, errors = process.end()
    assert output.endswith("survived\n")
    assert report.split("{address}")[0] in errors and report.split("{address}")[-1] in errors
    assert "invalid write" in errors or "not device" in errors


def test_misaligned_access_by_a_kernel_is_reported():
    process = Process(FAULT.format(prepare="address += 2", index=0, error=716))
    process.end()


def test_free_reports_a_write_beside_the_allocation():
    process = Process(
        """
        array = zeros(10)  # ends 24 bytes before a multiple of 64
        store((1,), (1,), (array, np.int32(1), np.int32(10)))
        runtime.deviceSynchronize()
        with error(700): runtime.free(array.data.ptr)
        array.data.mem.ptr = 0
        """
    )
    assert "earlier write outside of the allocation" in process.end()[1]


def test_access_by_the_host_after_free_ends_the_process():
    process = Process(
        "address = zeros().data.ptr\nctypes.memset(address, 0, 4)", PYTHONFAULTHANDLER=""
    )
    assert "which was freed" in process.end(-11)[1]


def test_stream_ordered_memory_is_freed_in_stream_order():
    stream, host = new_stream(), pinned()
    address = runtime.mallocAsync(4 * N, stream.ptr)
    with stream:
        fill((4,), (256,), (address, np.int32(7), np.int32(N)))
    runtime.freeAsync(address, stream.ptr)
    assert attribute(8, address) == 0
    stream.synchronize()
    assert attribute(8, address) is None and host is not None


def test_stream_ordered_memory_cannot_be_used_before_its_stream_order():
    process = Process(
        """
        first, second = new_stream(), new_stream()
        address = runtime.mallocAsync(4 * N, first.ptr)
        with second:
            store((1,), (1,), (address, np.int32(1), np.int32(0)))
        with error(700): second.synchronize()
        """
    )
    assert "stream-ordered allocation" in process.end()[1]


def test_addresses_are_reused_on_request():
    code = "address = zeros().data.ptr\nprint(zeros().data.ptr == address)"
    assert Process(code).end()[0] == "False\n"
    assert Process(code, EMULATED_GPU_REUSE="1").end()[0] == "True\n"


def test_variable_of_a_module():
    pointer, array, host = module.get_global("variable"), zeros(1), pinned(1)
    value = np.full(1, 7, np.int32)
    runtime.memcpy(pointer.ptr, value.ctypes.data, 4, runtime.memcpyHostToDevice)
    module.get_function("read")((1,), (1,), (array,))
    enqueue_copy(host, array, cupy.cuda.Stream.null)
    runtime.deviceSynchronize()
    assert host[0] == 7


# ---- devices -------------------------------------------------------------------------------------


def test_visible_devices_and_peer_access():
    process = Process(
        """
        assert runtime.getDeviceCount() == 3
        assert runtime.deviceGetPCIBusId(0) == "0000:04:00.0"
        assert runtime.deviceCanAccessPeer(0, 1) == 1 and runtime.deviceCanAccessPeer(0, 2) == 0
        runtime.deviceEnablePeerAccess(1)
        with error(704): runtime.deviceEnablePeerAccess(1)
        with error(217): runtime.deviceEnablePeerAccess(2)
        """,
        EMULATED_GPU_DEVICES="4", CUDA_VISIBLE_DEVICES="3,0,1", EMULATED_GPU_PEERS="0-3,1-2",
    )  # fmt: skip
    process.end()


def test_copy_between_devices():
    with cupy.cuda.Device(1):
        other = zeros()
        other.fill(7)
        runtime.deviceSynchronize()
    array = zeros()
    runtime.memcpyPeer(array.data.ptr, 0, other.data.ptr, 1, array.nbytes)
    assert (array == 7).all()
    assert runtime.pointerGetAttributes(other.data.ptr).device == 1


def test_kernel_that_accesses_another_device_needs_peer_access():
    """Processors without memory protection keys do not check it."""
    statements = """
        array = zeros()
        with cupy.cuda.Device(1):
            {before}
            store((1,), (1,), (np.uint64(array.data.ptr), np.int32(7), np.int32(0)))
            {after}
        """
    enable = "runtime.deviceEnablePeerAccess(0)"
    process = Process(statements.format(before=enable, after="runtime.deviceSynchronize()"))
    process.end()
    refused = "with error(700): runtime.deviceSynchronize()"
    process = Process(statements.format(before="", after=refused))
    assert "access without peer access" in process.end()[1]


def test_access_by_the_host_is_refused():
    process = Process(
        """
        array = zeros()
        ctypes.memset(array.data.ptr, 0, 4)
        """
    )
    errors = process.end(-11)[1]
    assert "access by the host at" in errors and "device allocation" in errors


def test_kernel_in_a_stream_of_another_device_is_refused():
    with cupy.cuda.Device(1):
        stream = new_stream()
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_HANDLE"):
        store((1,), (1,), (zeros(), np.int32(1), np.int32(0)), stream=stream)


def test_forked_process_cannot_use_the_device():
    process = Process(
        """
        child = os.fork()
        if child == 0:
            with error(3): runtime.malloc(8)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    process.end()


# ---- IPC -----------------------------------------------------------------------------------------

OPEN = """
memory = runtime.ipcOpenMemHandle(bytes.fromhex(input()))
array = cupy.ndarray((N,), np.int32, cupy.cuda.MemoryPointer(
    cupy.cuda.UnownedMemory(memory, 4 * N, None), 0))
print("open", flush=True)
"""


def test_memory_of_another_process():
    array = zeros()
    array.fill(7)
    runtime.deviceSynchronize()
    handle = runtime.ipcGetMemHandle(array.data.ptr)
    process = Process(
        "line = input()\nmemory = runtime.ipcOpenMemHandle(bytes.fromhex(line))",
        "assert runtime.ipcOpenMemHandle(bytes.fromhex(line)) == memory",
        "assert attribute(10, memory) == 0 and attribute(9, memory) == 0",
        "view = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(memory, 4 * N, None), 0)",
        "array = cupy.ndarray((N,), np.int32, view)",
        "assert (array == 7).all()\narray.fill(8)\nruntime.deviceSynchronize()",
        "runtime.ipcCloseMemHandle(memory)\nassert attribute(9, memory) == 0",
        "runtime.ipcCloseMemHandle(memory)\nassert attribute(9, memory) is None",
        "with error(1): runtime.ipcCloseMemHandle(memory)",
    )
    process.write(handle.hex())
    process.end()
    assert (array == 8).all()


def test_memory_that_cannot_be_exported():
    for memory in (cupy.cuda.ManagedMemory(N), cupy.cuda.MemoryAsync(N, new_stream())):
        with error(1):
            runtime.ipcGetMemHandle(memory.ptr)
    array = zeros()
    with error(201):
        runtime.ipcOpenMemHandle(runtime.ipcGetMemHandle(array.data.ptr))


def test_access_to_memory_that_its_process_has_freed_is_reported():
    array = zeros()
    process = Process(OPEN, "input()\narray.fill(8)\nwith error(700): runtime.deviceSynchronize()")
    process.write(runtime.ipcGetMemHandle(array.data.ptr).hex())
    assert process.read() == "open"
    del array
    process.write("freed")
    assert "access to memory that its process has freed" in process.end()[1]


def test_access_to_a_closed_mapping_is_reported():
    array = zeros()
    process = Process(
        OPEN,
        "array.fill(8)\nruntime.ipcCloseMemHandle(memory)",
        "with error(700): runtime.deviceSynchronize()",
    )
    process.write(runtime.ipcGetMemHandle(array.data.ptr).hex())
    assert "imported allocation" in process.end()[1]


def interprocess_event():
    return runtime.eventCreateWithFlags(runtime.eventDisableTiming | runtime.eventInterprocess)


@pytest.mark.parametrize("ordered", [True, False], ids=["with a wait", "without a wait"])
def test_stream_waits_for_an_event_of_a_blocked_process(ordered):
    """This process blocks in input(), and its stream runs up to the event all the same."""
    process = Process(
        """
        array, stream, event = zeros(), new_stream(), interprocess_event()
        enqueue_fill(array, 7, stream)
        runtime.eventRecord(event, stream.ptr)
        enqueue_fill(array, 8, stream)
        print(runtime.ipcGetMemHandle(array.data.ptr).hex(), flush=True)
        print(runtime.ipcGetEventHandle(event).hex(), flush=True)
        input()
        """
    )
    memory = runtime.ipcOpenMemHandle(bytes.fromhex(process.read()))
    event = runtime.ipcOpenEventHandle(bytes.fromhex(process.read()))
    stream, host = new_stream(), pinned()
    if ordered:
        runtime.streamWaitEvent(stream.ptr, event)
    runtime.memcpyAsync(
        host.ctypes.data, memory, host.nbytes, runtime.memcpyDeviceToHost, stream.ptr
    )
    stream.synchronize()
    assert (host == (7 if ordered else 0)).all()
    runtime.eventSynchronize(event)
    assert runtime.eventQuery(event) == 0
    runtime.ipcCloseMemHandle(memory)
    process.write("")
    process.end()


def test_event_handles_that_are_refused():
    with error(1):
        runtime.eventCreateWithFlags(runtime.eventInterprocess)
    with error(400):
        runtime.ipcGetEventHandle(cupy.cuda.Event(disable_timing=True).ptr)
    with error(201):
        runtime.ipcOpenEventHandle(runtime.ipcGetEventHandle(interprocess_event()))


def test_event_of_a_killed_process_counts_as_complete():
    process = Process(
        """
        stream, event = new_stream(), interprocess_event()
        enqueue_fill(zeros(), 7, stream)
        runtime.eventRecord(event, stream.ptr)
        print(runtime.ipcGetEventHandle(event).hex(), flush=True)
        input()
        """
    )
    event = runtime.ipcOpenEventHandle(bytes.fromhex(process.read()))
    process.process.kill()
    process.end(-9)
    runtime.eventSynchronize(event)


# ---- capture -------------------------------------------------------------------------------------

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
CAPTURE_UNSUPPORTED, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED = range(
    900, 908
)


@contextlib.contextmanager
def invalidated(stream, mode=GLOBAL):
    """Capture a stream, and expect that the body invalidates the capture."""
    stream.begin_capture(mode)
    yield
    with error(INVALIDATED):
        stream.end_capture()
    assert not stream.is_capturing()


def test_graph_runs_at_each_launch():
    array, host, stream = zeros(), pinned(), new_stream()
    stream.begin_capture()
    with stream:
        array += 1
    enqueue_copy(host, array, stream)
    assert stream.is_capturing()
    graph = stream.end_capture()
    stream.synchronize()
    assert (host == 0).all()
    for _ in range(3):
        graph.launch(stream)
    graph.upload(stream)
    assert (host == 0).all()
    stream.synchronize()
    assert (host == 3).all()
    graph.launch(stream)
    del graph
    stream.synchronize()
    assert (host == 4).all()


def test_capture_includes_streams_that_are_joined_by_events():
    array, host, stream, side = zeros(), pinned(), new_stream(), new_stream()
    stream.begin_capture()
    enqueue_fill(array, 7, stream)
    side.wait_event(stream.record())
    with side:
        array += 1
    assert side.is_capturing()
    stream.wait_event(side.record())
    enqueue_copy(host, array, stream)
    graph = stream.end_capture()
    assert not side.is_capturing()
    graph.launch(stream)
    stream.synchronize()
    assert (host == 8).all()


def test_stream_that_is_not_joined():
    array, stream, side = zeros(), new_stream(), new_stream()
    stream.begin_capture()
    enqueue_fill(array, 7, stream)
    side.wait_event(stream.record())
    enqueue_fill(array, 8, side)
    with error(UNMATCHED):
        side.end_capture()
    with error(UNJOINED):
        stream.end_capture()
    assert not side.is_capturing()


def query(event):
    runtime.check_status(runtime.eventQuery(event.ptr))


@pytest.mark.parametrize(
    ("number", "call"),
    [
        (CAPTURE_UNSUPPORTED, lambda stream: stream.synchronize()),
        (CAPTURE_UNSUPPORTED, lambda stream: runtime.check_status(runtime.streamQuery(stream.ptr))),
        (CAPTURE_UNSUPPORTED, lambda stream: runtime.deviceSynchronize()),
        (CAPTURE_UNSUPPORTED, lambda stream: runtime.malloc(8)),
        (CAPTURE_UNSUPPORTED, lambda stream: runtime.free(DEVICE.data.ptr)),
        (CAPTURE_UNSUPPORTED, lambda stream: runtime.hostAlloc(8, 0)),
        (CAPTURE_UNSUPPORTED, lambda stream: enqueue_copy(PAGEABLE, DEVICE, stream)),
        (CAPTURE_UNSUPPORTED, lambda stream: OUTSIDE.synchronize()),
        (ISOLATION, lambda stream: stream.wait_event(OUTSIDE)),
        (CAPTURED, lambda stream: stream.record().synchronize()),
        (CAPTURED, lambda stream: query(stream.record())),
    ],
    ids=[
        "synchronize", "query", "device synchronize", "malloc", "free", "pinned memory",
        "pageable copy", "event outside", "wait for an event outside", "captured event",
        "query a captured event",
    ],
)  # fmt: skip
def test_illegal_call_in_capture(number, call):
    stream = new_stream()
    with invalidated(stream), error(number):
        call(stream)


DEVICE, PAGEABLE, OUTSIDE = zeros(), np.zeros(N, np.int32), cupy.cuda.Event()
OUTSIDE.record(new_stream())


def test_work_after_an_invalid_call_is_refused():
    stream = new_stream()
    with invalidated(stream):
        with error(CAPTURE_UNSUPPORTED):
            stream.synchronize()
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALIDATED"):
            enqueue_fill(DEVICE, 1, stream)


def test_legacy_stream_in_capture():
    blocking = cupy.cuda.Stream()
    with invalidated(blocking), error(IMPLICIT):
        runtime.memsetAsync(DEVICE.data.ptr, 0, 4, 0)
    stream = new_stream()
    stream.begin_capture()
    runtime.memsetAsync(DEVICE.data.ptr, 0, 4, 0)
    stream.end_capture()
    with error(CAPTURE_UNSUPPORTED):
        runtime.streamBeginCapture(0, GLOBAL)


def test_module_cannot_be_loaded_in_capture():
    stream = new_stream()
    other = cupy.RawModule(code='extern "C" __global__ void other(int* x) { *x = 12345; }')
    unsupported = pytest.raises(cupy.cuda.driver.CUDADriverError, match="CAPTURE_UNSUPPORTED")
    with invalidated(stream), unsupported:
        other.get_function("other")


def test_merge_of_captures():
    first, second = new_stream(), new_stream()
    with invalidated(first), invalidated(second), error(MERGE):
        second.wait_event(first.record())


def test_begin_and_end_in_wrong_states():
    stream = new_stream()
    with error(401):
        stream.end_capture()
    stream.begin_capture()
    with error(401):
        stream.begin_capture()
    stream.end_capture()


def in_thread(function):
    """Run a function in a thread. Return the CUDA error, or 0."""
    found = []

    def run():
        try:
            function()
            found.append(0)
        except runtime.CUDARuntimeError as failure:
            found.append(failure.status)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def relaxed(function):
    """Run a function with the thread's capture mode relaxed."""
    mode = ctypes.c_int(RELAXED)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == GLOBAL
    try:
        function()
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def allocate():
    runtime.free(runtime.malloc(8))


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_call_by_another_thread(mode):
    stream = new_stream()
    stream.begin_capture(mode)
    assert in_thread(lambda: relaxed(allocate)) == 0
    status = in_thread(allocate)
    assert status == (CAPTURE_UNSUPPORTED if mode == GLOBAL else 0)
    if mode == GLOBAL:
        with error(INVALIDATED):
            stream.end_capture()
    else:
        assert in_thread(stream.end_capture) == (0 if mode == RELAXED else 908)
        if mode == THREAD_LOCAL:
            stream.end_capture()


def test_destroyed_stream_ends_its_capture():
    stream = new_stream()
    stream.begin_capture()
    del stream
    allocate()
