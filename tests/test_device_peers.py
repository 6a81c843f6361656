"""Kernels that several devices run together, without a device: threads are the threads of every
rank's blocks, and workspaces are memory of the host. And by NVRTC, where it is there.

A CuPy that is no more than what ``device_kernels.py`` uses of it keeps what is launched; ``run``
then carries out the launches of all ranks at once, each rank's in order, as streams do. The oracle
is the NumPy implementation of ``reduction.py``, which shares no conversion with the kernels.
"""

import ctypes
import functools
import itertools
import re
import subprocess
import sys
import threading
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from test_device_kernels import (
    COMPILER,
    assert_same_bits,
    in_memory,
    is_wide,
    place,
    random_bits,
)

from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels import device_kernels, peers, reduction
from mpicoll.kernels.device_kernels import DeviceKernels
from mpicoll.kernels.peers import ALL, FAILED, HEADER, LATE, Collective, Failure, Peers

#: A compiler runs for each kernel.
pytestmark = [pytest.mark.any_mpi, pytest.mark.slow]

# ---- A CuPy of the host --------------------------------------------------------------------------

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

AFTER = """
template <class... P, size_t... I>
static void thread(void (*kernel)(P...), void **arguments, std::index_sequence<I...>)
{
    kernel(*(P *)arguments[I]...);
}

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

FLAGS = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]


@functools.cache
def library(code, name, folder):
    """One kernel as a library of the host; what has no meaning in C++ ends the process."""
    source = folder / f"{abs(hash(code))}.cpp"
    source.write_text(BEFORE + code + AFTER.replace("NAME", name))
    made = source.with_suffix(".so")
    checks = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-fno-sanitize=vptr"]
    command = [COMPILER, *FLAGS, *checks, "-fPIC", "-shared", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


class Launch:
    """A launch that is to be carried out."""

    def __init__(self, loaded, name, grid, block, arguments):
        self.library = loaded
        self.name, self.blocks, self.threads = name, grid[0], block[0]
        self.arguments = [in_memory(argument) for argument in arguments]

    def carry_out(self):
        addresses = [each.__array_interface__["data"][0] for each in self.arguments]
        given = (ctypes.c_void_p * len(addresses))(*addresses)
        assert self.library.run(0, 0, given) == len(addresses)
        self.library.run(self.blocks, self.threads, given)


class FakeCupy(types.ModuleType):
    """What device_kernels.py uses of CuPy for collectives."""

    def __init__(self, folder):
        super().__init__("cupy")
        self.streams = {}  # by handle, what was launched there
        fake, current = self, []

        class Current:
            def __init__(self, what):
                self.what = what

            def __enter__(self):
                current.append(self.what)

            def __exit__(self, *_):
                current.pop()

        class Stream:
            @staticmethod
            def from_external(stream):
                return Current(stream.__cuda_stream__()[1])

        class RawModule:
            def __init__(self, *, code, options):
                self.code = code

            def get_function(self, name):
                loaded = library(self.code, name, folder)

                def kernel(grid, block, arguments):
                    launch = Launch(loaded, name, grid, block, arguments)
                    fake.streams.setdefault(current[-1], []).append(launch)

                kernel.num_regs = 1
                return kernel

        self.RawModule = RawModule
        self.cuda = types.SimpleNamespace(Stream=Stream)

    def run(self):
        """Carry out what is in all streams."""
        streams, self.streams = self.streams, {}
        running = [
            threading.Thread(target=lambda s=s: [each.carry_out() for each in s], daemon=True)
            for s in streams.values()
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
            assert not thread.is_alive(), "the kernels wait for each other"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("peers")


@pytest.fixture
def cupy(folder, monkeypatch):
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    fake = FakeCupy(folder)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(reduction, "_compiled", None)
    monkeypatch.setattr(device_kernels, "_PEER_THREADS", 3)
    monkeypatch.setattr(peers, "BLOCK_MIN_BYTES", 64)
    monkeypatch.setattr(peers, "ONE_SHOT_MAX_BYTES", 600)
    return fake


class Ranks:
    """Ranks with workspaces; the stream of each is its number."""

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
    """Arrays of the ranks, each somewhere in memory; the memory around them may not change."""

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


def calls_of(dtype, op, n):
    """The kind, and what Collective needs of an array at addresses."""
    by = reduction.find_loop(op, dtype)
    return by, dtype.itemsize // by.elements, n if op is ReduceOp.AVG else 1


def reduce_in_place(ranks, dtype, op, count, root, seed):
    by, width, divisor = calls_of(dtype, op, ranks.n)
    placed = ranks.place(dtype, [count] * ranks.n, seed)
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "all_reduce", by, width, 0, placed.address(r), count=count * by.elements, root=root,
            divisor=divisor,
        ))  # fmt: skip
    expected = combined(op, dtype, placed.given, divisor)

    def look():
        for r in range(ranks.n):
            wanted = expected if root in (ALL, r) else placed.given[r]
            placed.check(r, wanted, is_wide(dtype) and root in (ALL, r))

    return look


def reduce_scatter(ranks, dtype, op, counts, seed):
    by, width, divisor = calls_of(dtype, op, ranks.n)
    send = ranks.place(dtype, [sum(counts)] * ranks.n, seed)
    recv = ranks.place(dtype, counts, seed + 9)
    starts = [0, *itertools.accumulate(counts)]
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "reduce_scatter", by, width, send.address(r), recv.address(r),
            starts=[each * by.elements for each in starts], divisor=divisor,
        ))  # fmt: skip
    expected = combined(op, dtype, send.given, divisor)

    def look():
        for r in range(ranks.n):
            send.check(r, send.given[r])
            recv.check(r, expected[starts[r] : starts[r + 1]], is_wide(dtype))

    return look


def all_gather(ranks, width, counts, seed):
    dtype = by_name[f"uint{8 * width}"]
    send = ranks.place(dtype, counts, seed)
    recv = ranks.place(dtype, [sum(counts)] * ranks.n, seed + 9)
    starts = [0, *itertools.accumulate(counts)]
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "all_gather", None, width, send.address(r), recv.address(r), starts=starts
        ))  # fmt: skip

    def look():
        for r in range(ranks.n):
            send.check(r, send.given[r])
            recv.check(r, np.concatenate(send.given))

    return look


def broadcast(ranks, width, count, root, seed):
    placed = ranks.place(by_name[f"uint{8 * width}"], [count] * ranks.n, seed)
    for r in range(ranks.n):
        ranks.enqueue(r, Collective(
            "broadcast", None, width, 0, placed.address(r), count=count, root=root
        ))  # fmt: skip

    def look():
        for r in range(ranks.n):
            placed.check(r, placed.given[root])

    return look


# ---- Results -------------------------------------------------------------------------------------


def test_the_structures_are_those_of_the_kernels(cupy, folder):
    by = reduction.find_loop(ReduceOp.SUM, by_name["float32"])
    call = Collective("all_reduce", by, 4, 0, 0)
    code = f"{device_kernels._source(*device_kernels._PEERS)}\n{call.line()}\n"
    loaded = library(code, "all_reduce", folder)
    assert loaded.size_of_header() == HEADER.itemsize
    assert loaded.size_of_peers() == len(Peers((1, 2), 0, 0, 0, 0, 0).pack(0))


#: Each size, each way through a format, each operation: test_device_kernels.py has all of them.
ROWS = [
    ("AVG", "float32"), ("MIN", "float64"), ("AVG", "bfloat16"), ("PRODUCT", "float16"),
    ("SUM", "float8_e4m3fn"), ("BXOR", "int8"), ("MAX", "uint16"), ("SUM", "int64"),
    ("BOR", "bool"), ("SUM", "complex64"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "name"), ROWS)
def test_reductions(cupy, op, name):
    """One shot and two, one chunk and several, with a rest; one call behind the other."""
    op, dtype = getattr(ReduceOp, op), by_name[name]
    ranks, looks = Ranks(cupy, 3), []
    for turn, count in enumerate((1, 61, 333)):
        root = (ALL, 1, ALL)[turn]
        looks.append(reduce_in_place(ranks, dtype, op, count, root, 3 * turn))
        looks.append(reduce_scatter(ranks, dtype, op, [count // 2, 0, count], 3 * turn))
    cupy.run()
    for look in looks:
        look()


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_numbers_of_ranks(cupy, n):
    dtype, ranks, looks = by_name["float32"], Ranks(cupy, n), []
    for turn, count in enumerate((1, 7, 150, 151, 1201, 40)):
        looks.append(reduce_in_place(ranks, dtype, ReduceOp.SUM, count, ALL, turn))
        looks.append(reduce_in_place(ranks, dtype, ReduceOp.SUM, count, turn % n, turn))
        looks.append(reduce_scatter(ranks, dtype, ReduceOp.SUM, [count] * n, turn))
    cupy.run()
    for look in looks:
        look()


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [2, 3])
def test_moves(cupy, n, width):
    ranks, looks = Ranks(cupy, n), []
    for turn, count in enumerate((1, 7, 150, 151, 1201, 40)):
        looks.append(all_gather(ranks, width, [count, 0, 2 * count][:n], turn))
        looks.append(broadcast(ranks, width, count, turn % n, turn))
    cupy.run()
    for look in looks:
        look()


def test_nothing_is_launched_for_nothing(cupy):
    ranks = Ranks(cupy, 2)
    all_gather(ranks, 4, [0, 0], 0)
    broadcast(ranks, 4, 0, 0, 0)
    assert not cupy.streams


def test_steps_are_numbered_on(cupy):
    """What a graph replays has the same arguments again, and finds the next steps."""
    ranks, dtype = Ranks(cupy, 2), by_name["int32"]
    placed = Placed(dtype, [50, 50], 0)
    for array in placed.arrays:
        array[...] = 1
    by, width, _ = calls_of(dtype, ReduceOp.SUM, 2)
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


# ---- Ranks that do not come ----------------------------------------------------------------------


def test_a_rank_that_is_missing(cupy):
    """The others give up, and it too when it comes."""
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
    cupy.run()  # at once


def test_calls_that_differ(cupy):
    """All see it, whatever the limit."""
    ranks = Ranks(cupy, 3, limit=1000)
    placed = Placed(by_name["float32"], [200] * 3, 0)
    by, width, _ = calls_of(by_name["float32"], ReduceOp.SUM, 3)
    for r in range(3):
        ranks.enqueue(r, Collective(
            "all_reduce", by, width, 0, placed.address(r), count=200 if r else 20, call=5 + (r > 0)
        ))  # fmt: skip
    cupy.run()
    for report in map(Failure.unpack, ranks.reports.tolist()):
        assert report.why == peers.DIFFERS and 0 in (report.rank, report.other)
        assert report.call == 5 + (report.rank > 0), "the call of whom has found it"


def test_a_host_that_ends_kernels(cupy):
    """Those that wait, those that come later, and those that a graph replays, whatever the limit;
    what the host has said is left as it is.
    """
    ranks, dtype = Ranks(cupy, 3, limit=1000), by_name["float32"]
    said = Failure(0, FAILED, 2, 0).pack()
    ending = threading.Timer(0.3, lambda: ranks.reports.fill(said))
    reduce_in_place(ranks, dtype, ReduceOp.SUM, 300, ALL, 0)
    cupy.streams.pop(102)  # it has failed
    waiting = {stream: list(launches) for stream, launches in cupy.streams.items()}
    ending.start()
    cupy.run()
    assert not ending.is_alive(), "nothing else has ended them"
    cupy.streams = waiting
    cupy.run()
    reduce_in_place(ranks, dtype, ReduceOp.SUM, 300, ALL, 1)
    cupy.run()
    assert (ranks.reports == said).all()


def test_reasons_are_packed():
    """In 64 bits, each as large as can be."""
    for reason in (Failure(0xFFFF, 1, 15, 0), Failure(0, 4, 0, 15), Failure(0x8000, 3, 1, 2)):
        word = np.zeros(1, np.uint64)
        word[0] = reason.pack()
        assert Failure.unpack(int(word[0])) == reason


# ---- ThreadSanitizer -----------------------------------------------------------------------------

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


def test_there_are_no_races(folder):
    """ThreadSanitizer knows what releases, acquires and barriers order."""
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
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


# ---- NVRTC, which needs no GPU -------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc():
    """NVIDIA's compiler, from its wheel; torch's wheels bring one along."""
    spec = find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for name in ("builtins", ""):  # the compiler loads the former by its name alone
        pattern = f"libnvrtc-{name}.so.*[0-9]" if name else "libnvrtc.so.*"
        found = sorted(str(each) for p in places for each in Path(p).rglob(pattern))
        if not found:
            pytest.skip("there is no NVRTC")
        loaded = ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
    return loaded


def ptx(nvrtc, line, architecture):
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    code = f"{device_kernels._source(*device_kernels._PEERS)}\n{line}\n".encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), code, b"k.cu", 0, None, None)
    options = [
        *device_kernels._OPTIONS, "-ftz=true", "--device-as-default-execution-space",
        f"-arch=compute_{architecture}",
    ]  # fmt: skip
    given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    for length, text in (
        [(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)]
        if failed
        else [(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)]
    ):
        length(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        text(program, buffer)
    assert not failed, buffer.value.decode()
    return buffer.value.decode()


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    "line",
    ["ALL_REDUCE(float32, 0)", "ALL_REDUCE(bfloat16, 0)", "REDUCE_SCATTER(int64, 6)",
     "REDUCE_SCATTER(float8_e4m3fn, 3)", "ALL_GATHER(uint64_t)", "BROADCAST(uint8_t)"],
)  # fmt: skip
def test_nvrtc(nvrtc, line, architecture):
    """Flags are released and acquired; data is read and written in pieces, and not by the path of
    memory that never changes.
    """
    text = ptx(nvrtc, line, architecture)
    assert "st.release.sys.u64" in text and "ld.acquire.sys.u64" in text
    assert re.search(r"ld\.(global\.)?v[24]\.", text) and re.search(r"st\.(global\.)?v[24]\.", text)
    assert "ld.global.nc" not in text and "fma.rn.f" not in text
    assert "bar.sync" in text or "barrier.sync" in text
