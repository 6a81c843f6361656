"""Kernels of route ``peer`` without a GPU: compiled for the host, and by NVRTC if it is installed.

Each GPU thread of each rank is a host thread, and workspaces are host memory. A fake CuPy records
launches. ``run`` executes the launches of all ranks at the same time and one rank's launches in
order. The NumPy implementation in ``reduction.py`` gives the expected results.
"""

import itertools
import re
import subprocess
import threading

import numpy as np
import pytest
from test_device_kernels import (
    COMPILER,
    FLAGS,
    THREAD,
    FakeCupy,
    addresses_of,
    assert_same_bits,
    compile_library,
    in_memory,
    installed,
    is_wide,
    place,
    ptx,
    random_bits,
)  # fmt: skip

from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels import device_kernels, peers, reduction
from mpicoll.kernels.device_kernels import DeviceKernels
from mpicoll.kernels.peers import ALL, FAILED, HEADER, LATE, Collective, Failure, Peers

# A compiler runs for each kernel.
pytestmark = [pytest.mark.any_mpi, pytest.mark.slow]


BEFORE = """
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <thread>
#include <utility>
#include <vector>
#define __global__
#define __grid_constant__
#define __launch_bounds__(THREADS)
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

struct Barrier { pthread_barrier_t all; int any; };
static thread_local Barrier *barrier;

static void __syncthreads() { pthread_barrier_wait(&barrier->all); }

static int __syncthreads_or(int mine)
{
    if (mine)
        __atomic_store_n(&barrier->any, 1, __ATOMIC_RELAXED);
    __syncthreads();
    const int any = __atomic_load_n(&barrier->any, __ATOMIC_RELAXED);
    __syncthreads();
    if (any && threadIdx.x == 0)
        __atomic_store_n(&barrier->any, 0, __ATOMIC_RELAXED);
    __syncthreads();
    return any;
}

static uint64_t nanoseconds()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void relax() { sched_yield(); }
"""

AFTER = (
    THREAD
    + """
template <class... P>
static int launch(void (*kernel)(P...), unsigned blocks, unsigned threads, void **arguments)
{
    if (!blocks)
        return sizeof...(P);
    std::vector<Barrier> barriers(blocks);
    std::vector<std::thread> running;
    for (auto &each : barriers) {
        pthread_barrier_init(&each.all, 0, threads);
        each.any = 0;
    }
    for (unsigned i = 0; i < blocks * threads; i++)
        running.emplace_back([&, i] {
            threadIdx.x = i % threads, blockIdx.x = i / threads;
            blockDim.x = threads, gridDim.x = blocks;
            barrier = &barriers[blockIdx.x];
            thread(kernel, arguments, std::index_sequence_for<P...>());
        });
    for (auto &each : running)
        each.join();
    for (auto &each : barriers)
        pthread_barrier_destroy(&each.all);
    return sizeof...(P);
}

extern "C" int run(unsigned blocks, unsigned threads, void **arguments)
{
    return launch(NAME, blocks, threads, arguments);
}

extern "C" size_t size_of_header() { return sizeof(Header); }
extern "C" size_t size_of_peers() { return sizeof(Peers); }
"""
)


class Recorder(FakeCupy):
    """Records launches, by stream."""

    before, after = BEFORE, AFTER

    def __init__(self, folder):
        super().__init__(folder)
        self.streams = {}

    def launch(self, loaded, name, blocks, threads, arguments, stream):
        held = [in_memory(argument) for argument in arguments]

        def execute():
            given = addresses_of(held)
            assert loaded.run(0, 0, given) == len(held)
            loaded.run(blocks, threads, given)

        self.streams.setdefault(stream, []).append(execute)

    def run(self):
        """Execute the launches in all streams."""
        streams, self.streams = self.streams, {}
        running = [
            threading.Thread(target=lambda s=s: [execute() for execute in s], daemon=True)
            for s in streams.values()
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
            assert not thread.is_alive(), "the kernels hang"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@pytest.fixture
def cupy(folder, monkeypatch):
    fake = installed(Recorder(folder), monkeypatch)
    monkeypatch.setattr(device_kernels, "_PEER_THREADS", 3)
    monkeypatch.setattr(peers, "BLOCK_MIN_BYTES", 64)
    monkeypatch.setattr(peers, "ONE_SHOT_MAX_BYTES", 600)
    return fake


class Ranks:
    """Ranks with workspaces. Rank r uses stream 100 + r."""

    def __init__(self, cupy, n, room=112, limit=30.0, blocks=2):
        self.cupy, self.n = cupy, n
        self.kernels = DeviceKernels(0)
        nbytes = HEADER.itemsize + 2 * n * blocks * room + 128
        self.memory = [np.zeros(nbytes, np.uint8) for _ in range(n)]
        self.starts = [-each.ctypes.data % 128 for each in self.memory]
        self.reports = np.zeros(n, np.uint64)
        addresses = tuple(
            each.ctypes.data + start for each, start in zip(self.memory, self.starts, strict=True)
        )
        self.peers = [
            Peers(addresses, r, self.reports[r:].ctypes.data, int(limit * 1e9), room, blocks)
            for r in range(n)
        ]
        for memory in self.memory:
            memory[HEADER.itemsize + 128 :] = 0xA5

    def header(self, rank):
        start = self.starts[rank]
        return self.memory[rank][start : start + HEADER.itemsize].view(HEADER)[0]

    def enqueue(self, rank, collective):
        self.kernels.collective(self.peers[rank], collective, 100 + rank)

    def place(self, dtype, counts, seed):
        return Placed(dtype, counts, seed)


def combined(op, dtype, arrays, divisor):
    expected = np.empty_like(arrays[0])
    with np.errstate(all="ignore"):
        reduction.combine(op, dtype, arrays, expected, divisor)
    return expected


class Placed:
    """One array per rank, at different alignments, with guard memory."""

    def __init__(self, dtype, counts, seed, offsets=(0, 1, 5, 2)):
        pairs = [place(dtype.numpy, c, offsets[r % 4]) for r, c in enumerate(counts)]
        self.arrays = [array for array, _ in pairs]
        self.memory = [memory for _, memory in pairs]
        for r, array in enumerate(self.arrays):
            random_bits(array, seed + r)
        self.given = [array.copy() for array in self.arrays]
        self.before = [memory.copy() for memory in self.memory]

    def address(self, rank):
        return self.arrays[rank].ctypes.data

    def check(self, rank, expected, any_nan=False):
        array, memory = self.arrays[rank], self.memory[rank]
        assert_same_bits(array.copy(), expected, any_nan)
        array[...] = self.given[rank]
        assert np.array_equal(memory, self.before[rank]), "memory outside of the result was written"


def loop_of(dtype, op, n):
    """Return the loop, the width of a number in bytes and the divisor."""
    by = reduction.find_loop(op, dtype)
    return by, dtype.itemsize // by.elements, n if op is ReduceOp.AVG else 1


def reduce_in_place(ranks, dtype, op, count, root, seed):
    by, width, divisor = loop_of(dtype, op, ranks.n)
    placed = ranks.place(dtype, [count] * ranks.n, seed)
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "all_reduce", by, width, 0, placed.address(r), count=count * by.elements, root=root,
            divisor=divisor,
        ))  # fmt: skip
    expected = combined(op, dtype, placed.given, divisor)

    def check():
        for r in range(ranks.n):
            expected_here = expected if root in (ALL, r) else placed.given[r]
            placed.check(r, expected_here, is_wide(dtype) and root in (ALL, r))

    return check


def reduce_scatter(ranks, dtype, op, counts, seed):
    by, width, divisor = loop_of(dtype, op, ranks.n)
    send = ranks.place(dtype, [sum(counts)] * ranks.n, seed)
    recv = ranks.place(dtype, counts, seed + 9)
    starts = [0, *itertools.accumulate(counts)]
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "reduce_scatter", by, width, send.address(r), recv.address(r),
            starts=[each * by.elements for each in starts], divisor=divisor,
        ))  # fmt: skip
    expected = combined(op, dtype, send.given, divisor)

    def check():
        for r in range(ranks.n):
            send.check(r, send.given[r])
            recv.check(r, expected[starts[r] : starts[r + 1]], is_wide(dtype))

    return check


def all_gather(ranks, width, counts, seed):
    dtype = by_name[f"uint{8 * width}"]
    send = ranks.place(dtype, counts, seed)
    recv = ranks.place(dtype, [sum(counts)] * ranks.n, seed + 9)
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
    placed = ranks.place(by_name[f"uint{8 * width}"], [count] * ranks.n, seed)
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "broadcast", None, width, 0, placed.address(r), count=count, root=root
        ))  # fmt: skip

    def check():
        for r in range(ranks.n):
            placed.check(r, placed.given[root])

    return check


def test_structures_have_the_size_of_the_kernels_structures(cupy, folder):
    by = reduction.find_loop(ReduceOp.SUM, by_name["float32"])
    call = Collective("all_reduce", by, 4, 0, 0)
    code = f"{device_kernels._source(*device_kernels._PEERS)}\n{call.line()}\n"
    loaded = compile_library(BEFORE + code + AFTER.replace("NAME", "all_reduce"), folder)
    assert loaded.size_of_header() == HEADER.itemsize
    assert loaded.size_of_peers() == len(Peers((1, 2), 0, 0, 0, 0, 0).pack(0))


#: A sample with each size, format and operation. test_device_kernels.py covers all of them.
ROWS = [
    ("AVG", "float32"), ("MIN", "float64"), ("AVG", "bfloat16"), ("PRODUCT", "float16"),
    ("SUM", "float8_e4m3fn"), ("BXOR", "int8"), ("MAX", "uint16"), ("SUM", "int64"),
    ("BOR", "bool"), ("SUM", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_reductions(cupy, op, name):
    """One-shot and two-shot, one or several chunks with a remainder, several calls in order."""
    op, dtype = getattr(ReduceOp, op), by_name[name]
    ranks, checks = Ranks(cupy, 3), []
    for turn, count in enumerate((1, 61, 333)):
        root = (ALL, 1, ALL)[turn]
        checks.append(reduce_in_place(ranks, dtype, op, count, root, 3 * turn))
        checks.append(reduce_scatter(ranks, dtype, op, [count // 2, 0, count], 3 * turn))
    cupy.run()
    for check in checks:
        check()


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_numbers_of_ranks(cupy, n):
    dtype, ranks, checks = by_name["float32"], Ranks(cupy, n), []
    for turn, count in enumerate((1, 7, 150, 151, 1201, 40)):
        checks.append(reduce_in_place(ranks, dtype, ReduceOp.SUM, count, ALL, turn))
        checks.append(reduce_in_place(ranks, dtype, ReduceOp.SUM, count, turn % n, turn))
        checks.append(reduce_scatter(ranks, dtype, ReduceOp.SUM, [count] * n, turn))
    cupy.run()
    for check in checks:
        check()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [2, 3])
def test_data_movement(cupy, n, width):
    ranks, checks = Ranks(cupy, n), []
    for turn, count in enumerate((1, 7, 150, 151, 1201, 40)):
        checks.append(all_gather(ranks, width, [count, 0, 2 * count][:n], turn))
        checks.append(broadcast(ranks, width, count, turn % n, turn))
    cupy.run()
    for check in checks:
        check()


def test_no_launch_without_elements(cupy):
    ranks = Ranks(cupy, 2)
    all_gather(ranks, 4, [0, 0], 0)
    broadcast(ranks, 4, 0, 0, 0)
    assert not cupy.streams


def test_replayed_launches_use_new_step_numbers(cupy):
    """A CUDA graph replays launches with the same arguments."""
    ranks, dtype = Ranks(cupy, 2), by_name["int32"]
    placed = Placed(dtype, [50, 50], 0)
    for array in placed.arrays:
        array[...] = 1
    by, width, _ = loop_of(dtype, ReduceOp.SUM, 2)
    for r in range(2):
        call = Collective("all_reduce", by, width, 0, placed.address(r), count=50)
        for _ in range(5):
            ranks.enqueue(r, call)
    replayed = {stream: list(launches) for stream, launches in cupy.streams.items()}
    cupy.run()
    cupy.streams = replayed
    cupy.run()
    assert all((array == 1 << 10).all() for array in placed.arrays)
    assert (ranks.header(0)["steps"] == ranks.header(1)["steps"]).all()
    assert ranks.header(0)["steps"][0] == 10


def test_kernels_time_out_if_a_rank_is_missing(cupy):
    """The kernel of the missing rank also fails when it starts."""
    ranks, dtype = Ranks(cupy, 3, limit=0.2), by_name["float32"]
    reduce_in_place(ranks, dtype, ReduceOp.SUM, 300, ALL, 0)
    late = cupy.streams.pop(102)
    cupy.run()
    assert ranks.reports[2] == 0
    for report in map(Failure.unpack, ranks.reports[:2].tolist()):
        assert report.why == LATE and report.rank in (0, 1) and report.other == 2
    cupy.streams[102] = late
    cupy.run()
    assert Failure.unpack(int(ranks.reports[2])).why == LATE
    reduce_in_place(ranks, dtype, ReduceOp.SUM, 300, ALL, 0)
    cupy.run()


def test_all_ranks_report_calls_that_differ(cupy):
    ranks = Ranks(cupy, 3, limit=1000)
    placed = Placed(by_name["float32"], [200] * 3, 0)
    by, width, _ = loop_of(by_name["float32"], ReduceOp.SUM, 3)
    for r in range(3):
        ranks.enqueue(r, Collective(
            "all_reduce", by, width, 0, placed.address(r), count=200 if r else 20, call=5 + (r > 0)
        ))  # fmt: skip
    cupy.run()
    for report in map(Failure.unpack, ranks.reports.tolist()):
        assert report.why == peers.DIFFERS and 0 in (report.rank, report.other)
        assert report.call == 5 + (report.rank > 0), "not the call of the reporting rank"


def test_host_aborts_waiting_later_and_replayed_kernels(cupy):
    """The kernels keep the host's failure word."""
    ranks, dtype = Ranks(cupy, 3, limit=1000), by_name["float32"]
    aborted = Failure(0, FAILED, 2, 0).pack()
    ending = threading.Timer(0.3, lambda: ranks.reports.fill(aborted))
    reduce_in_place(ranks, dtype, ReduceOp.SUM, 300, ALL, 0)
    cupy.streams.pop(102)  # rank 2 has failed
    waiting = {stream: list(launches) for stream, launches in cupy.streams.items()}
    ending.start()
    cupy.run()
    assert not ending.is_alive(), "the kernels ended before the abort"
    cupy.streams = waiting
    cupy.run()
    reduce_in_place(ranks, dtype, ReduceOp.SUM, 300, ALL, 1)
    cupy.run()
    assert (ranks.reports == aborted).all()


RACES = """
#include <stdio.h>
#include <stdlib.h>

enum { N = 3, TURNS = 12, ROOM = 96, GRID = 2, THREADS = 2, COUNT = 500 };

int main()
{
    const size_t nbytes = sizeof(Header) + 2 * N * GRID * ROOM;
    uint64_t reports[N] = {0};
    char *of[N];
    float *arrays[N];
    std::vector<std::thread> ranks;

    for (int r = 0; r < N; r++) {
        of[r] = (char *)aligned_alloc(128, (nbytes + 127) / 128 * 128);
        memset(of[r], 0, nbytes);
        arrays[r] = (float *)aligned_alloc(128, 2048);
        for (int i = 0; i < COUNT; i++)
            arrays[r][i] = 1;
    }
    for (int r = 0; r < N; r++)
        ranks.emplace_back([&, r] {
            Peers peers = {{of[0], of[1], of[2]}, &reports[r], 60000000000u, ROOM, 7, N, r};
            for (int turn = 0; turn < TURNS; turn++) {
                float *array = arrays[r];
                double divisor = N;
                int root = -1, shots = 1 + turn % 2;
                int64_t chunk = turn % 3 ? 24 : 8, count = COUNT - turn;
                void *arguments[] = {&peers, &array, &divisor, &root, &shots, &chunk, &count};
                launch(all_reduce, GRID, THREADS, arguments);
            }
        });
    for (auto &each : ranks)
        each.join();
    for (int r = 0; r < N; r++)
        for (int i = 0; i < COUNT; i++)
            if (arrays[r][i] != 1 || reports[r])
                return puts("a wrong result"), 3;
    return 0;
}
"""


def test_no_races_under_thread_sanitizer(folder):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    source = folder / "races.cpp"
    code = device_kernels._source(*device_kernels._PEERS) + "\nALL_REDUCE(float32, 0)\n"
    source.write_text(BEFORE + code + AFTER.replace("NAME", "all_reduce") + RACES)
    made = folder / "races"
    command = [COMPILER, *FLAGS, "-g", "-fsanitize=thread", str(source), "-o", str(made)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("the compiler has no ThreadSanitizer")
    ran = subprocess.run([str(made)], capture_output=True, text=True, timeout=100, check=False)
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert ran.returncode == 0, ran.stdout + ran.stderr[:3000]


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    "line",
    ["ALL_REDUCE(float32, 0)", "ALL_REDUCE(bfloat16, 0)", "REDUCE_SCATTER(int64, 6)",
     "REDUCE_SCATTER(float8_e4m3fn, 3)", "ALL_GATHER(uint64_t)", "BROADCAST(uint8_t)"],
)  # fmt: skip
def test_nvrtc(line, architecture):
    """Flags use release and acquire. Data uses vector accesses, and no cache for constant data."""
    text = ptx(device_kernels._source(*device_kernels._PEERS), line, architecture)
    assert "st.release.sys.u64" in text and "ld.acquire.sys.u64" in text
    assert re.search(r"ld\.(global\.)?v[24]\.", text) and re.search(r"st\.(global\.)?v[24]\.", text)
    assert "ld.global.nc" not in text and "fma.rn.f" not in text
    assert "bar.sync" in text or "barrier.sync" in text
