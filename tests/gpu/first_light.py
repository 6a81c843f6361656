"""Check what mpicoll needs from a GPU, in one minute, without MPI and without an installation.

    PYTHONPATH=. python3 tests/gpu/first_light.py [NAME...]

NAME selects checks: first_light.py ipc runs check_ipc alone. Every check prints PASS or FAIL and
the next one runs. Needs CuPy, numpy, ml_dtypes, and for one check torch. Exit code: 0 if no check
failed.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
import traceback
from pathlib import Path

import cupy
import numpy as np

from mpicoll.cuda import runtime
from mpicoll.cuda.runtime import StridedMemory
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels.peers import HEADER, Collective, Peers
from mpicoll.kernels.reduction import find_loop

BEGIN = time.monotonic()
#: Timeout in seconds for the other process of check_ipc, and for kernels that wait for each other.
TIMEOUT_S = 20
#: Loop of the kernel that most checks run.
SUM = find_loop(ReduceOp.SUM, by_name["float32"])

cuda = runtime.get_runtime()


def finish(stream: int) -> None:
    """Block until the present work of a stream is done."""
    cuda.synchronize(cuda.record(0, stream))


def ready_stream() -> int:
    """Wait for CuPy's work, because a new stream is not ordered after it. Return a new stream."""
    cupy.cuda.Device(0).synchronize()
    return cuda.create_stream(0)


def float_array(address: int, count: int, owner: object) -> cupy.ndarray:
    """Return a CuPy array of device memory that ``owner`` keeps."""
    memory = cupy.cuda.UnownedMemory(address, 4 * count, owner, 0)
    return cupy.ndarray((count,), "f4", cupy.cuda.MemoryPointer(memory, 0))


def check_versions() -> str:
    """Names and versions of the GPUs and of CUDA. CuPy's runtime follows the driver's context."""
    last = cuda.count() - 1
    with cuda.on(last):
        assert cupy.cuda.runtime.getDevice() == last
    kind = cupy.cuda.Device(0).compute_capability
    return (
        f"{cuda.count()} x {cuda.name(0)}, {cuda.identity(0)}, sm_{kind}, "
        f"{cuda.multiprocessors(0)} multiprocessors, NCCL: {cuda.has_nccl()}; "
        f"{cuda.driver_version()}"
    )


def check_memory_attributes() -> str:
    """The driver reports base, size and kind of memory."""
    large, small = cupy.cuda.Memory(3 << 20), cupy.cuda.Memory(512)
    found = cuda.find_allocation(large.ptr + 4096)
    assert found is not None and (found.base, found.nbytes) == (large.ptr, 3 << 20), found
    assert cuda.device_of(large.ptr) == 0 and cuda.is_plain(large.ptr)
    for allocate in (cupy.cuda.malloc_managed, cupy.cuda.malloc_async):
        memory = allocate(512)
        assert cuda.find_allocation(memory.ptr) is None, allocate
        assert not cuda.is_plain(memory.ptr), allocate
    return f"512 bytes are reported as {cuda.find_allocation(small.ptr)}"


def check_kernel() -> str:
    """NVRTC compiles a kernel of mpicoll, and its results are right, also of subnormal numbers."""
    start = time.monotonic()
    cuda.load(0, SUM, 3)
    seconds = time.monotonic() - start
    numbers = np.arange(1003, dtype="f4")
    numbers[:5] = 1e-45, 1e-40, np.nan, np.inf, -0.0
    one, other = cupy.asarray(numbers), cupy.asarray(3 * numbers)
    out = cupy.zeros(1003, "f4")
    stream = ready_stream()
    addresses = [one.data.ptr, other.data.ptr]
    cuda.combine(0, SUM, addresses, [out.data.ptr], 1003, 4.0, stream)
    finish(stream)
    np.testing.assert_array_equal(out.get(), numbers)
    return f"compiled in {seconds:.2f} s"


def check_layouts() -> str:
    """CuPy copies between layouts in a stream of mpicoll. The stream of Stream.use() stays."""
    source, out = cupy.arange(60, dtype="f4").reshape(6, 10).T, cupy.zeros((10, 6), "f4")
    stream, used = ready_stream(), cupy.cuda.Stream(non_blocking=True)
    places = (StridedMemory(each.data.ptr, each.strides) for each in (out, source))
    used.use()
    try:
        cuda.copy_strided(0, *places, (10, 6), 4, stream)
        assert cupy.cuda.get_current_stream() == used, "a copy has changed it"
        cuda.combine(0, SUM, [out.data.ptr] * 2, [out.data.ptr], 60, 1.0, stream)
        assert cupy.cuda.get_current_stream() == used, "a kernel has changed it"
    finally:
        cupy.cuda.Stream.null.use()
    finish(stream)
    assert (out == 2 * source).all(), out
    return ""


def check_registered_memory() -> str:
    """The GPU writes to pinned pages of the host."""
    pages = mmap.mmap(-1, 1 << 16)
    host = np.frombuffer(pages, np.uint8)
    held = cuda.register(0, host.ctypes.data, host.nbytes)
    reached = cuda.reach(0, host.ctypes.data)
    array = cupy.full(100, 7, "u1")
    stream = ready_stream()
    cuda.copy(0, reached, array.data.ptr, 100, stream)
    finish(stream)
    assert (host[:100] == 7).all() and held is not None
    return f"the same address on the device: {reached == host.ctypes.data}"


def check_peer_kernels() -> str:
    """Two kernels that wait for each other run at the same time in two streams."""
    n, count, area, blocks = 2, 50_000, 16 * 1024, 2
    spaces = [cupy.zeros(HEADER.itemsize + 2 * n * blocks * area, "u1") for _ in range(n)]
    pinned = cupy.cuda.alloc_pinned_memory(8 * n)
    reports = np.frombuffer(pinned, np.uint64, n)
    reports[:] = 0
    arrays = [cupy.full(count, rank + 1, "f4") for rank in range(n)]
    calls = [Collective("all_reduce", SUM, 4, 0, array.data.ptr, count=count) for array in arrays]
    start = time.monotonic()
    cuda.load_collective(0, calls[0])
    seconds = time.monotonic() - start
    streams = [ready_stream() for _ in range(n)]
    addresses = tuple(space.data.ptr for space in spaces)
    for rank in range(n):
        report = pinned.ptr + 8 * rank
        peers = Peers(addresses, rank, report, TIMEOUT_S * 10**9, area, blocks)
        cuda.collective(0, peers, calls[rank], streams[rank])
    for stream in streams:
        finish(stream)
    assert not reports.any(), f"failure words: {reports}"
    assert all((array.get() == 3).all() for array in arrays)
    return f"compiled in {seconds:.1f} s"


def check_ipc() -> str:
    """Another process maps memory and opens an event. Both directions of waiting."""
    process = subprocess.Popen(
        ["timeout", str(TIMEOUT_S), sys.executable, __file__, "--other-process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    memory = cuda.allocate(0, 1 << 21)
    array = float_array(memory.address, 1000, memory)
    stream, event = cuda.create_stream(0), cuda.create_shared_event(0)
    found = cuda.find_allocation(memory.address)
    assert found is not None
    handles = cuda.export_allocation(0, found).hex(), cuda.export_event(event).hex()
    print(*handles, file=process.stdin, flush=True)
    theirs = cuda.open_event(0, bytes.fromhex(process.stdout.readline()))
    with cuda.using(0, stream):
        array.fill(5)
    cuda.record_again(0, stream, event)
    print("filled", file=process.stdin, flush=True)
    assert process.stdout.readline() == "recorded\n"
    cuda.wait(0, stream, theirs)
    finish(stream)
    values = array.get()
    said, _ = process.communicate("read\n")
    assert (values == 6).all(), values
    return said.strip()


def other_process() -> None:
    """Map the memory of check_ipc, wait for its event, add one, and record an event."""
    memory_handle, event_handle = map(bytes.fromhex, sys.stdin.readline().split())
    memory, theirs = cuda.open(0, memory_handle), cuda.open_event(0, event_handle)
    stream, event = cuda.create_stream(0), cuda.create_shared_event(0)
    print(cuda.export_event(event).hex(), flush=True)
    assert sys.stdin.readline() == "filled\n"
    array = float_array(memory.address, 1000, memory)
    cuda.wait(0, stream, theirs)
    with cuda.using(0, stream):
        array += 1
    cuda.record_again(0, stream, event)
    print("recorded", flush=True)
    assert sys.stdin.readline() == "read\n"
    print("mapped memory is reported as", cuda.find_allocation(memory.address), flush=True)


def check_torch() -> str:
    """Tensors give their address and stream. Which memory of torch can be exported."""
    import torch

    from mpicoll.arrays.adapters import build_view

    tensor, stream = torch.ones(4, 6, device="cuda"), torch.cuda.Stream()
    view = build_view(tensor, True, "x")
    assert (view.address, view.stream) == (tensor.data_ptr(), runtime.LEGACY), view
    with torch.cuda.stream(stream):
        assert build_view(tensor, True, "x").stream == stream.cuda_stream
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        expandable = torch.ones(1 << 22, device="cuda")
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    plain, pieces = (cuda.find_allocation(one.data_ptr()) for one in (tensor, expandable))
    return f"torch {torch.__version__}, plain: {plain}, expandable: {pieces}"


def check_graph() -> str:
    """A kernel of mpicoll runs in a graph. The capture is in the strictest mode."""
    array = cupy.ones(1000, "f4")
    cuda.load(0, SUM, 3)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device(0).synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        assert cuda.is_captured(0, stream.ptr)
        cuda.combine(0, SUM, [array.data.ptr] * 2, [array.data.ptr], array.size, 1.0, stream.ptr)
        graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
    assert (array.get() == 4).all(), array
    return ""


def main() -> int:
    names = sys.argv[1:]
    if names == ["--other-process"]:
        other_process()
        return 0
    failed = 0
    for name, check in list(globals().items()):
        if not name.startswith("check_") or (names and name.removeprefix("check_") not in names):
            continue
        start = time.monotonic()
        try:
            result, said = "PASS", check()
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            result, said = "FAIL", f"{type(error).__name__}: {str(error)[:500]} ({place})"
        print(f"{result} {time.monotonic() - start:5.1f} s  {name[6:]}: {said}", flush=True)
    print(f"{failed} checks failed, {time.monotonic() - BEGIN:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
