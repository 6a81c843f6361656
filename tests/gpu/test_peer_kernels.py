"""Kernels of route ``peer`` on one GPU. Each rank is a stream of this process. The GPU runs the
blocks of all ranks at the same time.

Calls and expected results come from tests/test_device_peers.py, which compiles the same source for
the host. tests/gpu/test_peer.py tests the route, which needs one GPU per rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy

sys.path.append(str(Path(__file__).resolve().parent.parent))
import test_device_peers as on_host

from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels import device_kernels
from mpicoll.kernels.device_kernels import DeviceKernels
from mpicoll.kernels.peers import ALL, FAILED, HEADER, LATE, PIECE, Failure, Peers

#: Blocks of a rank: 4 ranks have 8 blocks of 512 threads together.
BLOCKS = 2
#: Size of an area. A long call uses several.
AREA_BYTES = 16 * 1024
#: Timeout of kernels.
TIMEOUT_S = 60
#: One block; two blocks, one-shot; one-shot or two-shot, depending on the dtype; two-shot.
COUNTS = (7, 20_000, 100_003, 300_007)

#: Appended to the source: one grid for all ranks. The second index of a block is its rank. The
#: arguments of each rank are in memory.
TOGETHER = """
#undef __grid_constant__
#define __grid_constant__
#undef PEER_KERNEL
#define PEER_KERNEL(NAME) static __device__ void NAME
LINE

template <int... I> struct Places {};
template <int n, int... I> struct Upto : Upto<n - 1, n - 1, I...> {};
template <int... I> struct Upto<0, I...> { typedef Places<I...> places; };

template <class... P, int... I>
static __device__ void call(void (*part)(P...), void *const *arguments, Places<I...>)
{
    part(*(const P *)arguments[I]...);
}

template <class... P>
static __device__ void unpack(void (*part)(P...), void *const *arguments)
{
    const int n = sizeof...(P);
    call(part, arguments + blockIdx.y * n, typename Upto<n>::places());
}

extern "C" __global__ void __launch_bounds__(512) together(void *const *arguments)
{
    unpack(PART, arguments);
}
"""


class Together(DeviceKernels):
    """One launch for all ranks. It also works if a tool serializes kernels."""

    def __init__(self, n):
        super().__init__(0)
        self.n, self.parts, self.held = n, [], []

    def _kernel(self, name, line, sources):
        """Return a function that collects the ranks' arguments and launches after the last rank."""
        if line not in self._kernels:
            code = device_kernels._source(*sources)
            code += TOGETHER.replace("LINE", line).replace("PART", name)
            module = cupy.RawModule(code=code, options=device_kernels._OPTIONS)
            self._kernels[line] = module.get_function("together")

        def part(grid, block, arguments, *, stream):
            self.parts.append([on_host.in_memory(each) for each in arguments])
            if len(self.parts) == self.n:
                with stream:
                    self._kernels[line]((*grid, self.n), block, (self._on_device(),))
                self.parts = []

        return part

    def _on_device(self):
        """Copy the arguments to the device. Return a table of their addresses, rank by rank."""
        words = [each.tobytes() for part in self.parts for each in part]
        words = [word + bytes(-len(word) % PIECE) for word in words]
        values = cupy.asarray(np.frombuffer(b"".join(words), np.uint8))
        starts = np.cumsum([0, *map(len, words[:-1])]).astype(np.uint64)
        table = cupy.asarray(starts + np.uint64(values.data.ptr))
        self.held += [values, table]
        return table


def allocated(nbytes):
    """Allocate with cudaMalloc, because compute-sanitizer does not check pool memory."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
    return cupy.ndarray((nbytes,), np.uint8, memory)


class Placed(on_host.Placed):
    """Device copies of the ranks' arrays with the same alignment."""

    def __init__(self, dtype, counts, seed):
        super().__init__(dtype, counts, seed)
        self.held = []
        for memory in self.memory:
            shift = memory.ctypes.data % PIECE
            held = allocated(shift + memory.nbytes)[shift:]
            held.set(memory)
            self.held.append(held)
        cupy.cuda.get_current_stream().synchronize()  # the ranks' streams are not ordered after it

    def address(self, rank):
        offset = self.arrays[rank].ctypes.data - self.memory[rank].ctypes.data
        return self.held[rank].data.ptr + offset

    def check(self, rank, expected, any_nan=False):
        self.memory[rank][...] = self.held[rank].get()
        super().check(rank, expected, any_nan)


class Ranks:
    """Ranks with workspaces and streams on one GPU."""

    def __init__(self, kernels, n, limit=TIMEOUT_S):
        self.kernels, self.n = kernels, n
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(n)]
        nbytes = HEADER.itemsize + 2 * n * BLOCKS * AREA_BYTES
        self.workspaces = [allocated(nbytes) for _ in range(n)]
        for workspace in self.workspaces:
            workspace.fill(0)
        self.pinned = cupy.cuda.alloc_pinned_memory(8 * n)
        self.reports = np.frombuffer(self.pinned, np.uint64, n)
        self.reports.fill(0)
        addresses = tuple(each.data.ptr for each in self.workspaces)
        self.peers = [
            Peers(addresses, r, self.pinned.ptr + 8 * r, int(limit * 1e9), AREA_BYTES, BLOCKS)
            for r in range(n)
        ]
        cupy.cuda.get_current_stream().synchronize()

    def place(self, dtype, counts, seed):
        return Placed(dtype, counts, seed)

    def enqueue(self, rank, collective):
        self.kernels.collective(self.peers[rank], collective, self.streams[rank].ptr)

    def run(self):
        """Synchronize all streams. Return the failure words of the ranks."""
        for stream in self.streams:
            stream.synchronize()
        return self.reports.tolist()

    def check(self, checks):
        failures = [Failure.unpack(word) for word in self.run() if word]
        assert not failures, f"kernels have failed: {failures}"
        for check in checks:
            check()


@pytest.fixture(params=[2, 4])
def n(request):
    return request.param


@pytest.fixture(params=["streams", "together"])
def ranks(request, n):
    return Ranks(DeviceKernels(0) if request.param == "streams" else Together(n), n)


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_reductions(ranks, name, op):
    """One-shot and two-shot, at any alignment, several calls in order."""
    op, dtype, n, checks = getattr(ReduceOp, op), by_name[name], ranks.n, []
    if dtype.kind not in op.kinds:
        pytest.skip("integers have no averages")
    for turn, count in enumerate(COUNTS):
        for root in (ALL, turn % n):
            checks.append(on_host.reduce_in_place(ranks, dtype, op, count, root, 10 * turn))
        counts = [count // 2, 0, count, 5][:n]
        checks.append(on_host.reduce_scatter(ranks, dtype, op, counts, 10 * turn))
    ranks.check(checks)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_data_movement(ranks, width):
    n, checks = ranks.n, []
    for turn, count in enumerate(COUNTS):
        checks.append(on_host.all_gather(ranks, width, [count, 0, 2 * count, 5][:n], turn))
        checks.append(on_host.broadcast(ranks, width, count, turn % n, turn))
    ranks.check(checks)


def without_the_last(ranks):
    """Enqueue an all_reduce on all ranks except the last one."""
    dtype = by_name["float32"]
    by, width, _ = on_host.loop_of(dtype, ReduceOp.SUM, ranks.n)
    placed = ranks.place(dtype, [1000] * ranks.n, 0)
    for r in range(ranks.n - 1):
        ranks.enqueue(r, on_host.Collective(
            "all_reduce", by, width, 0, placed.address(r), count=1000
        ))  # fmt: skip
    return placed


def test_kernels_time_out_if_a_rank_is_missing(n):
    ranks = Ranks(DeviceKernels(0), n, limit=2)
    held = without_the_last(ranks)
    *failures, last = ranks.run()
    assert last == 0 and held
    for failure in map(Failure.unpack, failures):
        assert failure.why == LATE and failure.other == n - 1


def test_host_aborts_waiting_kernels(n):
    """By a store to host memory. The kernels keep the host's failure word."""
    ranks = Ranks(DeviceKernels(0), n)
    held = without_the_last(ranks)
    aborted = Failure(0, FAILED, n - 1, 0).pack()
    ranks.reports.fill(aborted)
    assert ranks.run() == [aborted] * n and held
