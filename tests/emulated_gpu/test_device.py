"""The rules of the emulated device: lazy streams, events, memory, IPC, capture and errors.

They need the environment that build.py makes:

    VENV/bin/python tests/emulated_gpu/build.py FOLDER
    . FOLDER/env.sh && VENV/bin/python -m pytest tests/emulated_gpu/test_device.py
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
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

N = 1000

SOURCE = r"""
extern "C" __global__ void store(int* array, int value, int index) { array[index] = value; }
extern "C" __global__ void fill(int* array, int value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) array[i] = value;
}
extern "C" __global__ void add(int* array, int value, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) array[i] += value;
}
extern "C" __global__ void wait(volatile int* flag, int value, int* seen) {
    int found;
    do asm volatile("ld.acquire.sys.s32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
    while (found != value);
    *seen = found;
}
"""
module = cupy.RawModule(code=SOURCE)
store, fill, add, wait = map(module.get_function, ("store", "fill", "add", "wait"))
for kernel in (store, fill, add, wait):
    kernel.compile()


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


def enqueue_fill(array, value, stream, kernel=fill):
    with stream:
        kernel((4,), (256,), (array, np.int32(value), np.int32(array.size)))


def enqueue_copy(host, array, stream):
    runtime.memcpyAsync(
        host.ctypes.data, array.data.ptr, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr
    )


@contextlib.contextmanager
def error(number):
    """Expect a CUDA error; 0: none."""
    status = 0
    try:
        yield
    except (runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as found:
        status = found.status
    assert status == number


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


# ---- streams, events and capture -----------------------------------------------------------------


GLOBAL, THREAD_LOCAL, RELAXED = range(3)
#: Statements, as functions of a script and of their arguments.
STATEMENTS = {
    "fill": lambda script, stream, value: enqueue_fill(script.array, int(value), stream),
    "add": lambda script, stream: enqueue_fill(script.array, 1, stream, add),
    "copy": lambda script, stream: enqueue_copy(script.host, script.array, stream),
    "copy_to_pageable": lambda script, stream: enqueue_copy(script.pageable, script.array, stream),
    "memset": lambda script, stream: runtime.memsetAsync(script.array.data.ptr, 0, 4, stream.ptr),
    "record": lambda script, stream: script.event.record(stream),
    "wait": lambda script, stream: stream.wait_event(script.event),
    "sync": lambda script, stream: stream.synchronize(),
    "sync_event": lambda script: script.event.synchronize(),
    "sync_device": lambda script: runtime.deviceSynchronize(),
    "query": lambda script, stream: runtime.check_status(runtime.streamQuery(stream.ptr)),
    "query_event": lambda script: runtime.check_status(runtime.eventQuery(script.event.ptr)),
    "malloc": lambda script: runtime.free(runtime.malloc(8)),
    "malloc_pinned": lambda script: runtime.hostAlloc(8, 0),
    "free": lambda script: runtime.free(script.array.data.ptr),
    "begin": lambda script, stream: runtime.streamBeginCapture(stream.ptr, GLOBAL),
    "end": lambda script, stream: setattr(script, "graph", stream.end_capture()),
    "launch": lambda script, stream: script.graph.launch(stream),
    "forget_graph": lambda script: setattr(script, "graph", None),
}


class Script:
    """Runs statements such as "fill a 7; copy a; host 0", where the last one is a check.

    Streams: a, b: not blocking; A: blocking; 0: legacy; t: of the thread. There is one array, one
    event and one graph. "-> 900" after a statement: it fails with this CUDA error.
    """

    def __init__(self):
        self.array, self.host, self.pageable = zeros(), pinned(), np.zeros(N, np.int32)
        self.event, self.graph = cupy.cuda.Event(disable_timing=True), None
        self.streams = {
            "0": cupy.cuda.Stream.null, "t": cupy.cuda.Stream.ptds, "A": cupy.cuda.Stream(),
            "a": new_stream(), "b": new_stream(),
        }  # fmt: skip

    def run(self, script):
        for statement in script.split("; "):
            call, _, number = statement.partition(" -> ")
            match call.split():
                case ["host" | "pageable" as memory, value]:
                    time.sleep(0.01)
                    assert (getattr(self, memory) == int(value)).all()
                case ["capturing", stream, expected]:
                    assert self.streams[stream].is_capturing() == bool(int(expected))
                case ["destroy", stream]:
                    del self.streams[stream]
                case [name, *arguments]:
                    with error(int(number or 0)):
                        STATEMENTS[name](self, *(self.streams.get(one, one) for one in arguments))


@pytest.mark.parametrize(
    "script",
    [
        "fill a 7; copy a; host 0; sync a; host 7",
        "fill a 7; copy b; sync b; host 0; record a; wait b; copy b; sync b; host 7",
        # A wait for an event does not include later work or later records.
        "fill a 7; record a; fill a 8; sync_event; copy b; sync b; host 7",
        "fill a 7; record a; wait b; fill a 8; record a; copy b; sync b; host 7",
        # The legacy stream and blocking streams wait for each other.
        "fill A 7; copy 0; sync 0; host 7",
        "fill 0 7; copy A; sync A; host 7",
        "fill t 7; copy 0; sync 0; host 7",
        "fill 0 7; copy t; sync t; host 7",
        "fill a 7; copy 0; sync 0; host 0",
        "fill 0 7; copy a; sync a; host 0",
        # Without a wait by the stream, some calls of the host wait.
        "fill a 7; copy_to_pageable a; pageable 7",
        "fill a 7; record a; query_event -> 600; malloc; query_event",
        "fill a 7; record a; destroy a; sync_event; copy b; sync b; host 7",
        # A graph runs at each launch, also when it is destroyed after the launch.
        "begin a; add a; copy a; capturing a 1; end a; capturing a 0; sync a; host 0; launch a; "
        "launch a; launch a; host 0; sync a; host 3; launch a; forget_graph; sync a; host 4",
        # Illegal calls invalidate a capture.
        *(
            f"begin a; {call}; end a -> 901; capturing a 0"
            for call in (
                "sync a -> 900", "query a -> 900", "sync_device -> 900", "malloc -> 900",
                "free -> 900", "malloc_pinned -> 900", "copy_to_pageable a -> 900",
                "record b; sync_event -> 900", "record b; wait a -> 905", "record a -> 801",
                "sync a -> 900; fill a 1 -> 901",
            )
        ),
        "begin A; memset 0 -> 906; end A -> 901",
        "begin a; memset 0; end a",
        "begin 0 -> 900",
        "end a -> 401; begin a; begin a -> 401; end a",
        "begin a; destroy a; malloc",
    ],
)  # fmt: skip
def test_script(script):
    Script().run(script)


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


def test_module_cannot_be_loaded_in_capture():
    stream = new_stream()
    other = cupy.RawModule(code='extern "C" __global__ void other(int* x) { *x = 12345; }')
    stream.begin_capture(GLOBAL)
    with error(900):
        other.get_function("other")
    with error(901):
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


def allocate():
    runtime.free(runtime.malloc(8))


def allocate_relaxed():
    """Allocate with the thread's capture mode relaxed."""
    mode = ctypes.c_int(RELAXED)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == GLOBAL
    allocate()


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_unsafe_call_by_another_thread_in_capture(mode):
    stream = new_stream()
    stream.begin_capture(mode)
    assert in_thread(allocate_relaxed) == 0
    assert in_thread(allocate) == (900 if mode == GLOBAL else 0)
    assert in_thread(stream.end_capture) == (0 if mode == RELAXED else 908)
    if mode != RELAXED:
        with error(901 if mode == GLOBAL else 0):
            stream.end_capture()


# ---- memory --------------------------------------------------------------------------------------


def attribute(which, address, kind=ctypes.c_uint64):
    value = kind()
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuPointerGetAttribute(ctypes.byref(value), which, ctypes.c_uint64(address))
    return None if failed else value.value


def test_pointer_attributes():
    plain, managed = cupy.cuda.Memory(N), cupy.cuda.ManagedMemory(N)
    stream_ordered, host = cupy.cuda.MemoryAsync(N, new_stream()), pinned()
    rows = [  # memory type, exportable, managed, pool
        (plain.ptr, runtime.memoryTypeDevice, 1, 0, 0),
        (managed.ptr, runtime.memoryTypeManaged, 0, 1, 0),
        (stream_ordered.ptr, runtime.memoryTypeDevice, 0, 0, 1),
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


def test_copy_beyond_an_allocation_is_refused(capfd):
    array, host = zeros(), pinned(2 * N)
    with error(1):
        runtime.memcpy(host.ctypes.data, array.data.ptr, 8 * N, runtime.memcpyDeviceToHost)
    assert f"({4 * N} bytes at {array.data.ptr:#x}), offset 0" in capfd.readouterr().err


def test_new_memory_contains_garbage():
    memory, host = cupy.cuda.Memory(4 * N), pinned()
    runtime.memcpy(host.ctypes.data, memory.ptr, 4 * N, runtime.memcpyDeviceToHost)
    assert host.any()


def test_memory_is_counted():
    free, total = runtime.memGetInfo()
    with error(2):
        runtime.malloc(total + 1)
    memory = cupy.cuda.Memory(64 << 20)
    assert runtime.memGetInfo() == (free - (64 << 20), total)
    del memory
    assert runtime.memGetInfo() == (free, total)


def test_stream_ordered_memory_is_freed_in_stream_order():
    stream = new_stream()
    address = runtime.mallocAsync(4 * N, stream.ptr)
    with stream:
        fill((4,), (256,), (address, np.int32(7), np.int32(N)))
    runtime.freeAsync(address, stream.ptr)
    assert attribute(8, address) == 0
    stream.synchronize()
    assert attribute(8, address) is None


def fault(prepare, index, number):
    """Return code with an invalid access. Its error is sticky, and the process goes on."""
    return f"""
array = zeros()
address = array.data.ptr
{prepare}
store((1,), (1,), (address, np.int32(1), np.int32({index})))
for _ in range(2):
    with error({number}): runtime.deviceSynchronize()
with error({number}): runtime.malloc(8)
"""


SAME_ADDRESS = "address = zeros().data.ptr\nassert (zeros().data.ptr == address) == "


@pytest.mark.parametrize(
    ("code", "report", "variables"),
    [
        (fault("", N + 100, 700), f"4000 bytes at .*, offset {4 * (N + 100)}", {}),
        (fault("", -1024, 700), "invalid write at .* offset -4096", {}),
        (fault("del array", 3, 700), "offset 12, which was freed", {}),
        (fault("address = 8", 0, 700), "not device memory", {}),
        (fault("address += 2", 0, 716), "cudaErrorMisalignedAddress", {}),
        ("""
         array = zeros(10)  # ends 24 bytes before a multiple of 64
         store((1,), (1,), (array, np.int32(1), np.int32(10)))
         runtime.deviceSynchronize()
         with error(700): runtime.free(array.data.ptr)
         array.data.mem.ptr = 0
         """, "earlier write outside of the allocation", {}),
        ("""
         first, second = new_stream(), new_stream()
         address = runtime.mallocAsync(4 * N, first.ptr)
         with second:
             store((1,), (1,), (address, np.int32(1), np.int32(0)))
         with error(700): second.synchronize()
         """, "stream-ordered allocation", {}),
        ("""
         child = os.fork()
         if child == 0:
             with error(3): runtime.malloc(8)
             os._exit(0)
         assert os.waitpid(child, 0)[1] == 0
         """, "", {}),
        (f"{SAME_ADDRESS}False", "", {}),
        (f"{SAME_ADDRESS}True", "", {"EMULATED_GPU_REUSE": "1"}),
        ("""
         assert runtime.getDeviceCount() == 3
         assert runtime.deviceGetPCIBusId(0) == "0000:04:00.0"
         assert [runtime.deviceCanAccessPeer(0, peer) for peer in (0, 1, 2)] == [0, 1, 1]
         runtime.deviceEnablePeerAccess(1)
         with error(704): runtime.deviceEnablePeerAccess(1)
         """, "", {"EMULATED_GPU_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "3,0,1"}),
    ],
    ids=[
        "access beyond the end", "access before the start", "access after free", "no device memory",
        "misaligned", "canary", "stream order", "fork", "new addresses", "reused addresses",
        "visible devices and peers",
    ],
)  # fmt: skip
def test_process(code, report, variables):
    assert re.search(report, Process(code, **variables).end()[1])


def test_access_by_the_host_after_free_ends_the_process():
    process = Process(
        "address = zeros().data.ptr\nctypes.memset(address, 0, 4)", PYTHONFAULTHANDLER=""
    )
    assert "which was freed" in process.end(-11)[1]


# ---- devices -------------------------------------------------------------------------------------


def test_copy_between_devices():
    with cupy.cuda.Device(1):
        other = zeros()
        other.fill(7)
        runtime.deviceSynchronize()
    array = zeros()
    runtime.memcpy(array.data.ptr, other.data.ptr, array.nbytes, runtime.memcpyDefault)
    assert (array == 7).all()
    assert runtime.pointerGetAttributes(other.data.ptr).device == 1


def test_kernel_in_a_stream_of_another_device_is_refused():
    with cupy.cuda.Device(1):
        stream = new_stream()
    with error(400):
        store((1,), (1,), (zeros(), np.int32(1), np.int32(0)), stream=stream)


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


def test_handles_that_are_refused():
    for memory in (cupy.cuda.ManagedMemory(N), cupy.cuda.MemoryAsync(N, new_stream())):
        with error(1):
            runtime.ipcGetMemHandle(memory.ptr)
    array = zeros()
    with error(201):
        runtime.ipcOpenMemHandle(runtime.ipcGetMemHandle(array.data.ptr))
    with error(1):
        runtime.eventCreateWithFlags(runtime.eventInterprocess)
    with error(400):
        runtime.ipcGetEventHandle(cupy.cuda.Event(disable_timing=True).ptr)
    with error(201):
        runtime.ipcOpenEventHandle(runtime.ipcGetEventHandle(interprocess_event()))


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
