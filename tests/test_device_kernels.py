"""CUDA kernels without a GPU: compiled for the host, and by NVRTC if it is installed.

A fake CuPy compiles the source with the C++ compiler and runs one thread after another on NumPy
arrays. The NumPy implementation in ``reduction.py`` gives the expected results. It shares no code
with the kernels.
"""

import ctypes
import functools
import itertools
import platform
import re
import shutil
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mpicoll.dtypes import DTYPES, OPERATIONS, Kind, ReduceOp, by_name, by_numpy
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.kernels import device_kernels, reduction
from mpicoll.kernels.device_kernels import DeviceKernels

# A compiler runs for each kernel.
pytestmark = [pytest.mark.any_mpi, pytest.mark.slow]

COMPILER = shutil.which("c++") or shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread"]
STREAM = 4711
#: Guard bytes before and after every array.
GUARD_BYTES = 64

by_row = pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for op, dtype in itertools.product(OPERATIONS, DTYPES)
        if op is not ReduceOp.PREMUL_SUM
        and dtype.kind in op.kinds
        and reduction.find_loop(op, dtype) is not None
    ],
    ids=repr,
)
NARROW = [
    dtype
    for dtype in DTYPES
    if dtype.kind is Kind.NARROW_FLOAT and reduction.find_loop(ReduceOp.SUM, dtype) is not None
]


BEFORE = """
#include <stdint.h>
#include <string.h>
#include <utility>
#ifdef __SSE__
#include <xmmintrin.h>
#endif
#define __global__
#define __grid_constant__
#define __launch_bounds__(THREADS)
static struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;
"""

THREAD = """
template <class... P, size_t... I>
static void thread(void (*kernel)(P...), void **arguments, std::index_sequence<I...>)
{
    kernel(*(P *)arguments[I]...);
}
"""

AFTER = (
    THREAD
    + """
template <class... P> static int arguments_of(void (*)(P...)) { return sizeof...(P); }

template <class... P> static void launch(void (*kernel)(P...), void **arguments)
{
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            thread(kernel, arguments, std::index_sequence_for<P...>());
}

extern "C" int count_arguments() { return arguments_of(NAME); }

extern "C" void run(unsigned blocks, unsigned threads, void **arguments, int flush)
{
    gridDim.x = blocks;
    blockDim.x = threads;
#ifdef __SSE__
    const unsigned before = _mm_getcsr();
    _mm_setcsr(flush ? before | 0x8040 : before);
#endif
    launch(NAME, arguments);
#ifdef __SSE__
    _mm_setcsr(before);
#endif
}
"""
)


@functools.cache
def compile_library(code, folder):
    """Compile code for the host. Undefined behavior aborts the process."""
    source = folder / f"{abs(hash(code))}.cpp"
    source.write_text(code)
    made = source.with_suffix(".so")
    checks = ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error", "-fno-sanitize=vptr"]
    command = [COMPILER, *FLAGS, *checks, "-fPIC", "-shared", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(made))


def in_memory(argument):
    """Return a kernel argument (a Python or NumPy number or a structure) as an array."""
    if isinstance(argument, int):
        return np.array(argument, np.int64)
    assert isinstance(argument, (np.generic, np.ndarray)), type(argument)
    assert argument.size == 1
    return np.ascontiguousarray(argument)


def addresses_of(arguments):
    """Return the addresses of arrays as a C array."""
    addresses = [each.__array_interface__["data"][0] for each in arguments]
    return (ctypes.c_void_p * len(arguments))(*addresses)


class FakeCupy(types.ModuleType):
    """The part of CuPy that device_kernels.py uses. ``test_cupy_api`` checks the names."""

    before, after = BEFORE, AFTER

    def __init__(self, folder):
        super().__init__("cupy")
        self.multiprocessors, self.flush = 1, False
        self.launched, self.loaded = [], []
        fake = self

        class Device:
            def __init__(self, index):
                self.attributes = {"MultiProcessorCount": fake.multiprocessors}

        class Stream:
            @staticmethod
            def from_external(stream):
                return stream.__cuda_stream__()[1]

        class RawModule:
            def __init__(self, *, code, options):
                assert "--fmad=false" in options
                self.code = code

            def get_function(self, name):
                code = fake.before + self.code + fake.after.replace("NAME", name)
                loaded = compile_library(code, folder)

                def kernel(grid, block, arguments, *, stream):
                    fake.launch(loaded, name, grid[0], block[0], arguments, stream)

                kernel.num_regs, kernel.kernel = 1, types.SimpleNamespace(ptr=name)
                return kernel

        self.RawModule = RawModule
        self.cuda = types.SimpleNamespace(Device=Device, Stream=Stream)

    def launch(self, loaded, name, blocks, threads, arguments, stream):
        """Run a kernel."""
        assert stream == STREAM
        assert loaded.count_arguments() == len(arguments)
        held = [in_memory(argument) for argument in arguments]
        self.launched.append((name, blocks, *arguments[-3:]))
        loaded.run(blocks, threads, addresses_of(held), self.flush)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def installed(fake, monkeypatch):
    """Use a fake CuPy."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(reduction, "_compiled", None)
    return fake


@pytest.fixture
def cupy(folder, monkeypatch):
    return installed(FakeCupy(folder), monkeypatch)


@pytest.fixture
def kernels(cupy):
    return DeviceKernels(3, cupy.loaded.append)


def place(dtype, count, offset):
    """Return an array ``offset`` numbers after a multiple of 16 bytes, and its memory."""
    size = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    memory = np.full(count * dtype.itemsize + offset * size + 3 * GUARD_BYTES, 0xA5, np.uint8)
    start = -memory.ctypes.data % 16 + GUARD_BYTES + offset * size
    return memory[start : start + count * dtype.itemsize].view(dtype), memory


def random_bits(array, seed):
    """Fill with random bits, including NaN, infinities, subnormals and both zeros."""
    rng = np.random.default_rng(seed)
    array.view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, np.uint8)
    if array.dtype == bool:
        array.view(np.uint8)[:] *= rng.integers(0, 2, array.size, np.uint8)
    elif array.dtype.char in "fdFD":  # random bits rarely give these
        parts = array.view(array.real.dtype)
        extremes = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(parts.dtype).smallest_subnormal]
        parts[::3] = rng.choice(np.array(extremes, parts.dtype), parts[::3].size)
    elif (
        by_numpy[array.dtype].kind is Kind.NARROW_FLOAT
    ):  # zeros, of both signs if the dtype has them
        words = array.view(f"u{array.itemsize}")
        words[::3] = rng.choice([0, 1 << 8 * array.itemsize - 1], words[::3].size)


def tame(array, seed):
    """Fill with numbers whose results are finite and need rounding."""
    values = 1 + np.random.default_rng(seed).random(array.size) / 2
    with np.errstate(all="ignore"):
        array[:] = values.astype(np.float32).astype(array.dtype)


def assert_same_bits(got, expected, any_nan):
    """Compare bits. ``any_nan``: all NaN are equal."""
    if any_nan:
        parts = got.real.dtype
        got, expected = got.view(parts).copy(), expected.view(parts).copy()
        for array in (got, expected):
            array[np.isnan(array)] = np.nan
    differ = np.flatnonzero(got.view(np.uint8) != expected.view(np.uint8)) // got.itemsize
    where = np.unique(differ)[:5]
    assert not differ.size, f"at {where}: {got[where]}, expected {expected[where]}"


def is_wide(dtype):
    return dtype.kind in (Kind.FLOAT, Kind.COMPLEX)


def check(kernels, op, dtype, n, count, offsets, fill, outs=None, divisor=1):
    """Check one call. Array k is at ``offsets[k]``. The first n are sources; ``outs`` (n) are
    outputs.
    """
    outs = [n] if outs is None else outs
    placed = [place(dtype.numpy, count, offsets[k]) for k in range(max(n, *(k + 1 for k in outs)))]
    for seed, (array, _) in enumerate(placed):
        fill(array, seed)
    expected = np.empty(count, dtype.numpy)
    reduction.combine(op, dtype, [array for array, _ in placed[:n]], expected, divisor)
    before = [memory.copy() for _, memory in placed]
    addresses = [array.ctypes.data for array, _ in placed]
    kernels.combine(
        reduction.find_loop(op, dtype), addresses[:n], [addresses[k] for k in outs], count,
        divisor, STREAM,
    )  # fmt: skip
    for k, ((array, memory), old) in enumerate(zip(placed, before, strict=True)):
        if k in outs:
            assert_same_bits(array.copy(), expected, is_wide(dtype))
            start = array.ctypes.data - memory.ctypes.data
            array.view(np.uint8)[:] = old[start : start + array.nbytes]
        assert np.array_equal(memory, old), "memory outside of the results was written"


ALIKE, SHIFTED, UNLIKE = [0] * 200, [1] * 200, [0, 1, 2, 3, 5] * 40


@by_row
def test_combine(kernels, op, dtype):
    layouts = ALIKE, SHIFTED, UNLIKE
    sizes = [*itertools.product((1, 2, 3, 5), (1, 61, 1001))]
    cases = [(*size, offsets, random_bits) for size in sizes for offsets in layouts]
    # Each size once. Every layout with each number of sources and each count.
    cases += [(*size, layouts[(i + i // 3) % 3], tame) for i, size in enumerate(sizes)]
    for n, count, offsets, fill in cases:
        for divisor in (1, n, 7) if op is ReduceOp.AVG else (1,):
            check(kernels, op, dtype, n, count, offsets, fill, None, divisor)


@by_row
def test_out_may_be_a_source(kernels, op, dtype):
    for n, offsets in itertools.product((1, 2, 5), (SHIFTED, UNLIKE)):
        for aliased in range(n):
            check(kernels, op, dtype, n, 77, offsets, random_bits, [aliased])


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2", "float32", "complex128", "int16"])
@pytest.mark.parametrize("n", [16, 17, 128])
def test_many_sources(kernels, name, n):
    dtype = by_name[name]
    averaged = dtype.kind in ReduceOp.AVG.kinds
    op = ReduceOp.AVG if averaged else ReduceOp.SUM
    check(kernels, op, dtype, n, 133, ALIKE, tame, [0], n if averaged else 1)


@pytest.mark.parametrize("n", [499, 500, 3999])
def test_very_many_sources(kernels, n):
    check(kernels, ReduceOp.AVG, by_name["bfloat16"], n, 19, [0, 1] * n, tame, [n], n)


@pytest.mark.parametrize(
    ("op", "name"),
    [("SUM", "float32"), ("AVG", "bfloat16"), ("PRODUCT", "float8_e5m2"), ("MAX", "int8"),
     ("SUM", "complex64"), ("MIN", "float64"), ("BXOR", "bool")],
)  # fmt: skip
def test_several_outputs(kernels, op, name):
    """A sample of dtypes and operations; ``test_combine`` covers all of them."""
    op, dtype = getattr(ReduceOp, op), by_name[name]
    for turn, (n, count) in enumerate(itertools.product((1, 2, 5), (1, 61, 1001))):
        for m, aliased in ((1, ()), (0, range(n)), (2, (n - 1,))):
            offsets = (ALIKE, SHIFTED, UNLIKE, [1] * n + [0] * 9)[(turn + m) % 4]
            outs, divisor = [*range(n, n + m), *aliased], n if op is ReduceOp.AVG else 1
            check(kernels, op, dtype, n, count, offsets, random_bits, outs, divisor)


def test_vector_loads_need_equal_alignment_of_the_sources_only(kernels, cupy):
    dtype = by_name["float32"]
    for offsets, pieces in (([1] * 4, 1024), ([1, 1, 0, 2], 1024), ([1, 0, 1, 1], 0)):
        check(kernels, ReduceOp.SUM, dtype, 2, 4099, offsets, random_bits, [2, 3])
        assert cupy.launched[-1][-2] == pieces
    check(kernels, ReduceOp.SUM, dtype, 12, 50, [0, 1] * 12, random_bits, range(12))


def test_more_elements_than_threads(kernels, cupy):
    cupy.multiprocessors = 1
    for name, offsets in (("float16", ALIKE), ("float16", UNLIKE), ("float64", SHIFTED)):
        check(kernels, ReduceOp.SUM, by_name[name], 2, 100_003, offsets, random_bits)
    assert all(blocks == 32 for _, blocks, *_ in cupy.launched)


def test_arrays_of_equal_alignment_use_vector_loads(kernels, cupy):
    for name, length in (("int8", 16), ("bfloat16", 8), ("float32", 4), ("complex64", 4)):
        dtype, numbers = by_name[name], 4096 * (2 if name == "complex64" else 1)
        for offsets, head in ((ALIKE, 0), (SHIFTED, length - 1)):
            check(kernels, ReduceOp.SUM, dtype, 2, 4096, offsets, tame)
            expected = head, (numbers - head) // length, numbers
            assert cupy.launched[-1][-3:] == expected
        check(kernels, ReduceOp.SUM, dtype, 2, 4096, UNLIKE, tame)
        assert cupy.launched[-1][-2] == 0
    source, out = (place(np.dtype(kind), 4096, 0)[0] for kind in (np.float32, np.float16))
    kernels.narrow(by_name["float16"], source.ctypes.data, out.ctypes.data, 4096, STREAM)
    assert cupy.launched[-1][-3:] == (0, 1024, 4096)


def test_no_launch_without_elements(kernels, cupy):
    by = reduction.find_loop(ReduceOp.SUM, by_name["float32"])
    kernels.combine(by, [64, 64], [64], 0, 1, STREAM)
    kernels.scale(by_name["float32"], 64, 2.0, 64, 0, STREAM)
    kernels.narrow(by_name["float16"], 64, 64, 0, STREAM)
    assert not cupy.launched


def test_loaded_kernels_are_not_compiled_again(kernels, cupy):
    by = reduction.find_loop(ReduceOp.SUM, by_name["float32"])
    kernels.load(by, 4)
    assert cupy.loaded == ["combine"] and not cupy.launched
    check(kernels, ReduceOp.SUM, by_name["float32"], 3, 100, [0, 0, 0, 0], tame)
    assert cupy.loaded == ["combine"] and cupy.launched
    with pytest.raises(UnsupportedError, match="4000 arrays at most, got 4001"):
        kernels.load(by, 4001)


def scaled(kernels, dtype, factor, count, offsets, fill):
    source, _ = place(dtype.numpy, count, offsets[0])
    out, memory = place(dtype.accumulate, count, offsets[1])
    fill(source, 0)
    before = memory.copy()
    kernels.scale(dtype, source.ctypes.data, factor, out.ctypes.data, count, STREAM)
    got = out.copy()
    out[:] = before[out.ctypes.data - memory.ctypes.data :][: out.nbytes].view(out.dtype)
    assert np.array_equal(memory, before), "memory outside of the result was written"
    return source, got


@pytest.mark.parametrize("offsets", [(0, 0), (4, 4), (1, 2)])
@pytest.mark.parametrize(
    "dtype",
    [row for row in DTYPES if row.kind is not Kind.BOOL and reduction.find_loop(ReduceOp.SUM, row)],
    ids=repr,
)
def test_scale(kernels, dtype, offsets):
    integers = (3, -1, 255, -(1 << 70) - 5)
    factors = integers if dtype.kind is Kind.INTEGER else (1 / 3, -2, 0.0, float("inf"), 1e300)
    for factor, count, fill in itertools.product(factors, (1, 3, 1001), (random_bits, tame)):
        source, got = scaled(kernels, dtype, factor, count, offsets, fill)
        expected = np.empty_like(got)
        reduction.scale(dtype, source, factor, expected)
        assert_same_bits(got, expected, dtype.kind is not Kind.INTEGER)
        if dtype.numpy == dtype.accumulate:  # in place
            address = source.ctypes.data
            kernels.scale(dtype, address, factor, address, count, STREAM)
            assert_same_bits(source.copy(), expected, dtype.kind is not Kind.INTEGER)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
@pytest.mark.parametrize("offsets", [(0, 0), (1, 1), (2, 0)])
def test_scale_by_a_complex_factor(kernels, name, offsets):
    dtype, factor = by_name[name], 0.3 - 1.7j
    for count, fill in itertools.product((1, 501), (random_bits, tame)):
        source, got = scaled(kernels, dtype, factor, count, offsets, fill)
        number = dtype.numpy.type(factor)
        c, d, a, b = number.real, number.imag, source.real, source.imag
        with np.errstate(all="ignore"):
            expected = np.stack([a * c - b * d, a * d + b * c], axis=1).view(dtype.numpy).ravel()
        assert_same_bits(got, expected, True)


@pytest.mark.parametrize("flush", [False, True], ids=["", "flush"])
@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_narrow(kernels, cupy, dtype, flush):
    """Also if subnormal float32 numbers are flushed to zero, as CuPy compiles kernels."""
    if flush and platform.machine() != "x86_64":
        pytest.skip("flushing subnormals is only implemented for x86-64")
    cupy.flush = flush
    for count, offsets in itertools.product((1, 2, 3001), ((0, 0), (4, 4), (1, 2))):
        source, _ = place(np.dtype(np.float32), count, offsets[0])
        out, _ = place(dtype.numpy, count, offsets[1])
        for fill in (random_bits, tame):
            fill(source, 0)
            source.view(np.uint32)[: count // 9] &= 0x80FFFFFF  # subnormal or slightly larger
            expected = np.empty_like(out)
            reduction.narrow(source, expected)
            kernels.narrow(dtype, source.ctypes.data, out.ctypes.data, count, STREAM)
            assert_same_bits(out.copy(), expected, False)


@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_widening_is_exact_if_subnormals_are_flushed(kernels, cupy, dtype):
    """Only bfloat16 has numbers that are subnormal in float32."""
    cupy.flush = dtype.name != "bfloat16" and platform.machine() == "x86_64"
    bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}")
    out = np.empty(bits.size, np.float32)
    kernels.scale(dtype, bits.ctypes.data, 1.0, out.ctypes.data, bits.size, STREAM)
    assert_same_bits(out, bits.view(dtype.numpy).astype(np.float32), True)


def test_invalid_arguments_raise(kernels):
    add = reduction.find_loop(ReduceOp.SUM, by_name["float32"])
    for sources, outs in (([], [64]), ([64], [])):
        with pytest.raises(ArgumentError, match="one array to combine and one output"):
            kernels.combine(add, sources, outs, 1, 1, STREAM)
    with pytest.raises(ArgumentError, match="multiple of 4 bytes"):
        kernels.combine(add, [64, 66], [64], 1, 1, STREAM)
    with pytest.raises(UnsupportedError, match="4000 arrays at most, got 4001"):
        kernels.combine(add, [64] * 4000, [64], 1, 1, STREAM)
    integers = reduction.find_loop(ReduceOp.SUM, by_name["int32"])
    with pytest.raises(UnsupportedError, match="AVG is not defined for"):
        kernels.combine(integers, [64], [64], 1, 2, STREAM)
    for name in ("bool", "float8_e8m0fnu"):
        with pytest.raises(UnsupportedError, match="no kernel scales"):
            kernels.scale(by_name[name], 64, 1, 64, 1, STREAM)
    with pytest.raises(ArgumentTypeError):
        kernels.scale(by_name["int32"], 64, 0.5, 64, 1, STREAM)
    with pytest.raises(ArgumentTypeError):
        kernels.scale(by_name["float16"], 64, 1j, 64, 1, STREAM)
    with pytest.raises(ArgumentError, match="multiple of 8 bytes"):
        kernels.scale(by_name["complex128"], 68, 1j, 64, 1, STREAM)
    for name in ("float32", "float8_e8m0fnu"):
        with pytest.raises(UnsupportedError, match="no kernel rounds"):
            kernels.narrow(by_name[name], 64, 64, 1, STREAM)


@functools.cache
def nvrtc():
    """Return NVRTC from its wheel, a dependency of CuPy's and torch's CUDA wheels, or skip."""
    spec = find_spec("nvidia")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    for pattern in ("libnvrtc-builtins.so.*[0-9]", "libnvrtc.so.*"):  # it loads the first by name
        found = sorted(str(each) for p in places for each in Path(p).rglob(pattern))
        if not found:
            pytest.skip("NVRTC is not installed")
        loaded = ctypes.CDLL(found[0], mode=ctypes.RTLD_GLOBAL)
    return loaded


def ptx(source, line, architecture):
    """Compile a kernel for a GPU."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    code = f"{source}\n{line}\n".encode()
    assert not library.nvrtcCreateProgram(ctypes.byref(program), code, b"k.cu", 0, None, None)
    options = [
        *device_kernels._OPTIONS, "-ftz=true", "--device-as-default-execution-space",
        f"-arch=compute_{architecture}",
    ]  # fmt: skip
    given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
    failed = library.nvrtcCompileProgram(program, len(options), given)
    result = "ProgramLog" if failed else "PTX"
    getattr(library, f"nvrtcGet{result}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{result}")(program, buffer)
    assert not failed, f"{line}: {buffer.value.decode()}"
    return buffer.value.decode()


LINES = [
    *(f"COMBINE({dtype.name}, 0, 17)" for dtype in NARROW),
    *(f"COMBINE({name}, {op}, 17)" for name in ("float32", "float64") for op in range(4)),
    *(f"COMBINE({name}, {op}, 17)" for name in ("int8", "uint64") for op in range(7)),
    *(f"COMBINE(bool, {op}, 17)" for op in (4, 5, 6)),
    *(f"COMBINE(float32, 0, {capacity})" for capacity in (500, 4000)),
    *(f"SCALE({name})" for name in ("bfloat16", "float8_e4m3fn", "float64", "int16")),
    *(f"SCALE_COMPLEX({name})" for name in ("float32", "float64")),
    *(f"NARROW({name})" for name in ("bfloat16", "float16", "float8_e5m2fnuz")),
]


@pytest.mark.parametrize("architecture", [75, 80, 90])
def test_nvrtc_generates_the_expected_instructions(architecture):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    for line in LINES:
        text = ptx(device_kernels._source(), line, architecture)
        assert "fma.rn.f" not in text, line
        if line != "SCALE_COMPLEX(float64)":  # one element fills a vector
            assert re.search(r"ld\.global\.v[24]\.", text), line
            assert re.search(r"st\.global\.v[24]\.", text), line
        if "float8" not in line and "float16" not in line.replace("bfloat16", ""):
            # Only conversions of the float64 divisor and tests for NaN may flush subnormals.
            flushing = set(re.findall(r"\S+\.ftz\S*", text))
            assert flushing <= {"cvt.rn.ftz.f32.f64", "setp.nan.ftz.f32", "setp.neu.ftz.f32"}, line
        if line.startswith("COMBINE(float32, 0"):
            assert "add.rn.f32" in text and "div.rn.f32" in text
            assert "setp.lt.f32" in text or ", 2, " not in line


def test_cupy_api():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    assert callable(cupy.RawModule.get_function) and hasattr(cupy.RawKernel, "num_regs")
    assert isinstance(cupy.cuda.Device.attributes, types.GetSetDescriptorType | property)
    assert callable(cupy.cuda.Stream.from_external)
    assert "code" in cupy.RawModule.__doc__ and "options" in cupy.RawModule.__doc__
    assert "cudaDevAttrMultiProcessorCount" in vars(cupy.cuda.runtime)
    stream = cupy.cuda.Stream.from_external(device_kernels._Handle(STREAM))
    assert stream.ptr == STREAM
