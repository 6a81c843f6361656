"""Kernels of route ``peer`` on one GPU. Each rank is a stream of this process. The GPU runs the
blocks of all ranks at the same time.

tests/gpu/test_peer.py tests the route, which needs one GPU per rank.
tests/sanitize/device_peers_test.cpp searches for races.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("cupy")
import cupy

pytest.importorskip("oracle", reason="run it with make test-gpu")
from oracle import operands
from test_kernels import OnDevice, assert_same

from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels import device_kernels, peers, reduction
from mpicoll.kernels.device_kernels import DeviceKernels
from mpicoll.kernels.peers import ALL, PIECE, Collective, Failure, Peers

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
            self.parts.append([np.asarray(each) for each in arguments])
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


class Placed:
    """One array per rank on the device, at different alignments."""

    def __init__(self, op, dtype, counts, seed):
        self.dtype = dtype
        self.given = [operands(op, dtype, count, seed + r) for r, count in enumerate(counts)]
        number = dtype.itemsize // (2 if dtype.numpy.kind == "c" else 1)
        self.held = [
            OnDevice(array, number * offset)
            for array, offset in zip(self.given, (0, 1, 5, 2), strict=False)
        ]

    def address(self, rank):
        return self.held[rank].address

    def check(self, rank, expected):
        assert_same(self.held[rank].got(), expected, self.dtype.kind, f"rank {rank}")


class Ranks:
    """Ranks with workspaces and streams on one GPU."""

    def __init__(self, kernels, n, limit=TIMEOUT_S):
        self.kernels, self.n = kernels, n
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(n)]
        nbytes = peers.HEADER.itemsize + 2 * n * BLOCKS * AREA_BYTES
        self.workspaces = [OnDevice(np.zeros(nbytes, np.uint8)) for _ in range(n)]
        self.pinned = cupy.cuda.alloc_pinned_memory(8 * n)
        self.reports = np.frombuffer(self.pinned, np.uint64, n)
        self.reports.fill(0)
        addresses = tuple(each.address for each in self.workspaces)
        self.peers = [
            Peers(addresses, r, self.pinned.ptr + 8 * r, int(limit * 1e9), AREA_BYTES, BLOCKS)
            for r in range(n)
        ]

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


def expected_of(op, placed, divisor):
    expected = np.empty_like(placed.given[0])
    with np.errstate(all="ignore"):
        reduction.combine(op, placed.dtype, placed.given, expected, divisor)
    return expected


def loop_of(dtype, op, n):
    """Return the loop, the width of a number in bytes and the divisor."""
    by = reduction.find_loop(op, dtype)
    return by, dtype.itemsize // by.elements, n if op is ReduceOp.AVG else 1


def reduce_in_place(ranks, dtype, op, count, root, seed):
    by, width, divisor = loop_of(dtype, op, ranks.n)
    placed = Placed(op, dtype, [count] * ranks.n, seed)
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "all_reduce", by, width, 0, placed.address(r), count=count * by.elements, root=root,
            divisor=divisor,
        ))  # fmt: skip
    expected = expected_of(op, placed, divisor)

    def check():
        for r in range(ranks.n):
            placed.check(r, expected if root in (ALL, r) else placed.given[r])

    return check


def reduce_scatter(ranks, dtype, op, counts, seed):
    by, width, divisor = loop_of(dtype, op, ranks.n)
    send = Placed(op, dtype, [sum(counts)] * ranks.n, seed)
    recv = Placed(op, dtype, counts, seed + 9)
    starts = [0, *itertools.accumulate(counts)]
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "reduce_scatter", by, width, send.address(r), recv.address(r),
            starts=[each * by.elements for each in starts], divisor=divisor,
        ))  # fmt: skip
    expected = expected_of(op, send, divisor)

    def check():
        for r in range(ranks.n):
            send.check(r, send.given[r])
            recv.check(r, expected[starts[r] : starts[r + 1]])

    return check


def all_gather(ranks, width, counts, seed):
    dtype = by_name[f"uint{8 * width}"]
    send = Placed(ReduceOp.SUM, dtype, counts, seed)
    recv = Placed(ReduceOp.SUM, dtype, [sum(counts)] * ranks.n, seed + 9)
    starts = [0, *itertools.accumulate(counts)]
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "all_gather", None, width, send.address(r), recv.address(r), starts=starts
        ))  # fmt: skip

    def check():
        for r in range(ranks.n):
            send.check(r, send.given[r])
            recv.check(r, np.concatenate(send.given))

    return check


def broadcast(ranks, width, count, root, seed):
    placed = Placed(ReduceOp.SUM, by_name[f"uint{8 * width}"], [count] * ranks.n, seed)
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "broadcast", None, width, 0, placed.address(r), count=count, root=root
        ))  # fmt: skip

    def check():
        for r in range(ranks.n):
            placed.check(r, placed.given[root])

    return check


@pytest.fixture(params=[1, 2, 3, 4])
def n(request):
    return request.param


@pytest.fixture(params=["streams", "together"])
def ranks(request, n):
    return Ranks(DeviceKernels(0) if request.param == "streams" else Together(n), n)


#: A sample with each size, format and operation. test_kernels.py covers all of them.
ROWS = [
    ("SUM", "float32"), ("AVG", "bfloat16"), ("MIN", "float64"), ("PRODUCT", "float16"),
    ("SUM", "float8_e4m3fn"), ("BXOR", "int8"), ("MAX", "uint16"), ("SUM", "int64"),
    ("BOR", "bool"), ("SUM", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_reductions(ranks, op, name):
    """One-shot and two-shot, at any alignment, several calls in order."""
    op, dtype, n, checks = getattr(ReduceOp, op), by_name[name], ranks.n, []
    for turn, count in enumerate(COUNTS):
        for root in (ALL, turn % n):
            checks.append(reduce_in_place(ranks, dtype, op, count, root, 10 * turn))
        counts = [count // 2, 0, count, 5][:n]
        checks.append(reduce_scatter(ranks, dtype, op, counts, 10 * turn))
    ranks.check(checks)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_data_movement(ranks, width):
    n, checks = ranks.n, []
    for turn, count in enumerate(COUNTS):
        checks.append(all_gather(ranks, width, [count, 0, 2 * count, 5][:n], turn))
        checks.append(broadcast(ranks, width, count, turn % n, turn))
    ranks.check(checks)


def without(ranks, missing, shorter=None):
    """Enqueue an all_reduce on all ranks but one. Another rank makes a shorter call."""
    dtype = by_name["float32"]
    by, width, _ = loop_of(dtype, ReduceOp.SUM, ranks.n)
    placed = Placed(ReduceOp.SUM, dtype, [1000] * ranks.n, 0)
    for r in {*range(ranks.n)} - {missing}:
        ranks.enqueue(r, Collective(
            "all_reduce", by, width, 0, placed.address(r), count=20 if r == shorter else 1000,
            call=5 + (r == shorter),
        ))  # fmt: skip
    return placed


@pytest.mark.parametrize("n", [2, 4])
def test_kernels_time_out_if_a_rank_is_missing(n):
    ranks = Ranks(DeviceKernels(0), n, limit=2)
    held = without(ranks, n - 1)
    *failures, last = ranks.run()
    assert last == 0 and held
    for failure in map(Failure.unpack, failures):
        assert failure.why == peers.LATE and failure.other == n - 1


@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_report_calls_that_differ(n):
    ranks = Ranks(DeviceKernels(0), n)
    held = without(ranks, None, shorter=1)
    for failure in map(Failure.unpack, ranks.run()):
        assert failure.why == peers.DIFFERS and 1 in (failure.rank, failure.other) and held
        assert failure.call == 5 + (failure.rank == 1), "not the call of the reporting rank"


@pytest.mark.parametrize("n", [2, 4])
def test_host_aborts_waiting_and_later_kernels(n):
    """By a store to host memory. The kernels keep the host's failure word."""
    ranks = Ranks(DeviceKernels(0), n)
    held = [without(ranks, n - 1)]
    aborted = Failure(0, peers.FAILED, n - 1, 0).pack()
    ranks.reports.fill(aborted)
    assert ranks.run() == [aborted] * n and held
    held.append(without(ranks, None))
    assert ranks.run() == [aborted] * n
