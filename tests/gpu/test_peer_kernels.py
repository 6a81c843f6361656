"""The kernels that GPUs carry out together, on one GPU: each rank is a stream of this process, and
so few blocks that the GPU holds those of all ranks at once.

Calls and oracle are those of tests/test_device_peers.py, which has the same source compiled for the
host. tests/gpu/test_peer.py has the route, which takes a GPU for each rank.
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

pytestmark = pytest.mark.on_a_gpu

#: Blocks of a rank: 4 ranks have 8 blocks of 512 threads together.
BLOCKS = 2
#: Bytes of an area, of which a long call takes several.
ROOM = 16 * 1024
#: Seconds after which kernels give up.
LIMIT = 60
#: One block; both, in one shot; one shot or two, by the dtype; two shots.
COUNTS = (7, 20_000, 100_003, 300_007)

#: Behind the kernels' source: the parts of all ranks as one grid. The second index of a block is
#: its rank, and the arguments of each rank are in memory.
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
    """All ranks' parts of a call as one launch, which goes well even where kernels run one by one,
    as something that watches them may have it (compute-sanitizer).
    """

    def __init__(self, n):
        super().__init__(0)
        self.n, self.parts, self.held = n, [], []

    def _kernel(self, name, line, sources):
        """What takes a rank's part, and launches when it has those of all."""
        if line not in self._kernels:
            code = device_kernels._source(*sources)
            code += TOGETHER.replace("LINE", line).replace("PART", name)
            module = cupy.RawModule(code=code, options=device_kernels._OPTIONS)
            self._kernels[line] = module.get_function("together")

        def part(grid, block, arguments):
            self.parts.append([on_host.in_memory(each) for each in arguments])
            if len(self.parts) == self.n:
                self._kernels[line]((*grid, self.n), block, (self._on_device(),))
                self.parts = []

        return part

    def _on_device(self):
        """The parts' arguments in memory of the device: addresses of each, rank by rank."""
        words = [each.tobytes() for part in self.parts for each in part]
        words = [word + bytes(-len(word) % PIECE) for word in words]
        values = cupy.asarray(np.frombuffer(b"".join(words), np.uint8))
        starts = np.cumsum([0, *map(len, words[:-1])]).astype(np.uint64)
        table = cupy.asarray(starts + np.uint64(values.data.ptr))
        self.held += [values, table]
        return table


def allocated(nbytes):
    """Bytes by cudaMalloc: around those of a pool compute-sanitizer sees nothing wrong."""
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
    return cupy.ndarray((nbytes,), np.uint8, memory)


class Placed(on_host.Placed):
    """Arrays of the ranks on the device, which lie there modulo a piece as they do on the host."""

    def __init__(self, dtype, counts, seed):
        super().__init__(dtype, counts, seed)
        self.held = []
        for memory in self.memory:
            shift = memory.ctypes.data % PIECE
            held = allocated(shift + memory.nbytes)[shift:]
            held.set(memory)
            self.held.append(held)
        cupy.cuda.get_current_stream().synchronize()  # the ranks' streams do not wait for it

    def address(self, rank):
        offset = self.arrays[rank].ctypes.data - self.memory[rank].ctypes.data
        return self.held[rank].data.ptr + offset

    def check(self, rank, expected, any_nan=False):
        self.memory[rank][...] = self.held[rank].get()
        super().check(rank, expected, any_nan)


class Ranks:
    """Ranks with workspaces on one GPU, each with a stream."""

    def __init__(self, kernels, n, limit=LIMIT):
        self.kernels, self.n = kernels, n
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(n)]
        nbytes = HEADER.itemsize + 2 * n * BLOCKS * ROOM
        self.workspaces = [allocated(nbytes) for _ in range(n)]
        for workspace in self.workspaces:
            workspace.fill(0)
        self.pinned = cupy.cuda.alloc_pinned_memory(8 * n)
        self.reports = np.frombuffer(self.pinned, np.uint64, n)
        self.reports.fill(0)
        addresses = tuple(each.data.ptr for each in self.workspaces)
        self.peers = [
            Peers(addresses, r, self.pinned.ptr + 8 * r, int(limit * 1e9), ROOM, BLOCKS)
            for r in range(n)
        ]
        cupy.cuda.get_current_stream().synchronize()

    def place(self, dtype, counts, seed):
        return Placed(dtype, counts, seed)

    def enqueue(self, rank, collective):
        self.kernels.collective(self.peers[rank], collective, self.streams[rank].ptr)

    def run(self):
        """Wait until all is done; returns what the ranks have said of failures."""
        for stream in self.streams:
            stream.synchronize()
        return self.reports.tolist()

    def check(self, looks):
        said = [Failure.unpack(word) for word in self.run() if word]
        assert not said, f"kernels have given up: {said}"
        for look in looks:
            look()


@pytest.fixture(params=[2, 4])
def n(request):
    return request.param


@pytest.fixture(params=["streams", "together"])
def ranks(request, n):
    return Ranks(DeviceKernels(0) if request.param == "streams" else Together(n), n)


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_reductions(ranks, name, op):
    """One shot and two, wherever the arrays lie; one call behind the other."""
    op, dtype, n, looks = getattr(ReduceOp, op), by_name[name], ranks.n, []
    if dtype.kind not in op.kinds:
        pytest.skip("integers have no averages")
    for turn, count in enumerate(COUNTS):
        for root in (ALL, turn % n):
            looks.append(on_host.reduce_in_place(ranks, dtype, op, count, root, 10 * turn))
        counts = [count // 2, 0, count, 5][:n]
        looks.append(on_host.reduce_scatter(ranks, dtype, op, counts, 10 * turn))
    ranks.check(looks)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_moves(ranks, width):
    n, looks = ranks.n, []
    for turn, count in enumerate(COUNTS):
        looks.append(on_host.all_gather(ranks, width, [count, 0, 2 * count, 5][:n], turn))
        looks.append(on_host.broadcast(ranks, width, count, turn % n, turn))
    ranks.check(looks)


# ---- Ranks that do not come ----------------------------------------------------------------------


def without_the_last(ranks):
    """An all_reduce that all ranks but one are in, whose kernels are on the GPU."""
    dtype = by_name["float32"]
    by, width, _ = on_host.calls_of(dtype, ReduceOp.SUM, ranks.n)
    placed = ranks.place(dtype, [1000] * ranks.n, 0)
    for r in range(ranks.n - 1):
        ranks.enqueue(r, on_host.Collective(
            "all_reduce", by, width, 0, placed.address(r), count=1000
        ))  # fmt: skip
    return placed


def test_a_rank_that_is_missing(n):
    ranks = Ranks(DeviceKernels(0), n, limit=2)
    held = without_the_last(ranks)
    *said, nothing = ranks.run()
    assert nothing == 0 and held
    for failure in map(Failure.unpack, said):
        assert failure.why == LATE and failure.other == n - 1


def test_a_host_that_ends_kernels(n):
    """By a store to memory of its own; what it has said is left as it is."""
    ranks = Ranks(DeviceKernels(0), n)
    held = without_the_last(ranks)
    said = Failure(0, FAILED, n - 1, 0).pack()
    ranks.reports.fill(said)
    assert ranks.run() == [said] * n and held
