"""Reduction kernels on a GPU, compared with ``reduction.py`` on the host."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cupy
import numpy as np
import pytest
from oracle import any_bits, operands

from mpicoll.dtypes import DTYPES, OPERATIONS, Kind, ReduceOp, by_name
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.kernels import reduction
from mpicoll.kernels.device_kernels import _OPTIONS, _PEERS, DeviceKernels, _source

PAIRS = [
    pytest.param(op, dtype, id=f"{op.name}-{dtype}")
    for op in OPERATIONS
    for dtype in DTYPES
    if op is not ReduceOp.PREMUL_SUM
    and dtype.kind in op.kinds
    and reduction.find_loop(op, dtype) is not None
]
NARROW = [
    row
    for row in DTYPES
    if row.kind is Kind.NARROW_FLOAT and reduction.find_loop(ReduceOp.SUM, row) is not None
]
#: More elements than a device has threads. The emulated device has fewer threads.
MANY = 100_003 if "EMULATED_GPU_CACHE" in os.environ else 1_000_003
#: Less than a vector, with a remainder, and many.
COUNTS = [1, 7, 1000, MANY]
#: Guard bytes before and after every array; a multiple of 256.
GUARD_BYTES = 256


@pytest.fixture(scope="module")
def kernels():
    return DeviceKernels(0)


class OnDevice:
    """A copy of an array on the device, ``offset`` bytes after a multiple of 256, with guards."""

    def __init__(self, array, offset=0):
        self.dtype = array.dtype
        self.inside = slice(GUARD_BYTES + offset, GUARD_BYTES + offset + array.nbytes)
        self.before = np.full(self.inside.stop + GUARD_BYTES, 0xA5, np.uint8)
        self.before[self.inside] = np.frombuffer(array.tobytes(), np.uint8)
        # Memory of cudaMalloc: compute-sanitizer does not check memory of a pool.
        memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(self.before.size), 0)
        self.memory = cupy.ndarray(self.before.size, "u1", memory)
        self.memory.set(self.before)
        cupy.cuda.get_current_stream().synchronize()  # the tests' streams are not ordered after it
        self.address = self.memory.data.ptr + self.inside.start

    def got(self):
        after = self.memory.get()
        result = after[self.inside].tobytes()
        after[self.inside] = self.before[self.inside]
        assert np.array_equal(after, self.before), "memory outside of the array was written"
        return np.frombuffer(result, self.dtype)


def assert_same(got, expected, kind, case):
    """Compare bits. All NaN are equal, and complex products may be rounded differently."""
    if kind is Kind.COMPLEX:
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=case)
        return
    if kind in (Kind.FLOAT, Kind.NARROW_FLOAT):
        with np.errstate(all="ignore"):
            nan = np.isnan(expected)
            assert (np.isnan(got) == nan).all(), case
        got, expected = got[~nan], expected[~nan]
    assert got.tobytes() == expected.tobytes(), case


@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_combine(kernels, op, dtype):
    """Outputs with the alignment of the sources or another one, then in place."""
    by, stream = reduction.find_loop(op, dtype), cupy.cuda.Stream(non_blocking=True)
    size = dtype.itemsize
    for count in COUNTS:
        for n, outputs, step, shift in (
            (2, 1, 0, 0), (3, 1, size, 0), (17, 1, 0, 0), (2, 2, 0, 0), (3, 3, 0, size),
            (4, 4, size, 0),
        ):  # fmt: skip
            if n == 17 and count > 1000:
                continue
            arrays = [operands(op, dtype, count, rank) for rank in range(n)]
            sources = [OnDevice(array, step * rank) for rank, array in enumerate(arrays)]
            outs = [
                OnDevice(np.zeros(count, dtype.numpy), step * rank + shift)
                for rank in range(outputs)
            ]
            divisor = n if op is ReduceOp.AVG else 1
            expected = np.empty(count, dtype.numpy)
            with np.errstate(all="ignore"):
                reduction.combine(op, dtype, arrays, expected, divisor)
            addresses = [each.address for each in sources]
            for into in ([each.address for each in outs], addresses[:outputs]):
                kernels.combine(by, addresses, into, count, divisor, stream.ptr)
            stream.synchronize()
            case = f"{count} of {n}, step {step}"
            for each in (*outs, *sources[:outputs]):
                assert_same(each.got(), expected, dtype.kind, case)


def check_kernel(kernel, array, expected, kind, offset=0):
    """Call ``kernel(input address, output address, count, stream)`` and compare its output."""
    stream = cupy.cuda.Stream(non_blocking=True)
    source, out = OnDevice(array, offset), OnDevice(np.zeros_like(expected), offset)
    kernel(source.address, out.address, array.size, stream.ptr)
    stream.synchronize()
    assert_same(out.got(), expected, kind, f"offset {offset}")


@pytest.mark.parametrize("dtype", NARROW, ids=repr)
def test_narrow(kernels, dtype):
    wide = any_bits(by_name["float32"], MANY, 0)
    expected = np.empty(wide.size, dtype.numpy)
    with np.errstate(all="ignore"):
        reduction.narrow(wide, expected)
    check_kernel(partial(kernels.narrow, dtype), wide, expected, dtype.kind)


@pytest.mark.parametrize(
    "dtype", [row for row in DTYPES if row.kind in ReduceOp.PREMUL_SUM.kinds], ids=repr
)
def test_scale(kernels, dtype):
    if reduction.find_loop(ReduceOp.PREMUL_SUM, dtype) is None:
        pytest.skip("no kernel for this dtype")
    array = operands(ReduceOp.PREMUL_SUM, dtype, 1003, 0)
    factor = 3 if dtype.kind is Kind.INTEGER else 0.5
    expected = np.empty(array.size, dtype.accumulate)
    with np.errstate(all="ignore"):
        reduction.scale(dtype, array, factor, expected)
    kind = Kind.FLOAT if dtype.kind is Kind.NARROW_FLOAT else dtype.kind
    check_kernel(lambda at, *more: kernels.scale(dtype, at, factor, *more), array, expected, kind)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_scale_by_a_complex_factor(kernels, name):
    dtype, factor = by_name[name], 0.3 - 1.7j
    array = operands(ReduceOp.SUM, dtype, 501, 0)
    for offset in (0, dtype.itemsize // 2):
        check_kernel(
            lambda at, *more: kernels.scale(dtype, at, factor, *more), array,
            array * dtype.numpy.type(factor), dtype.kind, offset,
        )  # fmt: skip


@pytest.mark.parametrize("n", [499, 500, 3999])
def test_many_sources(kernels, n):
    """Up to the capacities of the kernels' arguments."""
    dtype, stream = by_name["bfloat16"], cupy.cuda.Stream(non_blocking=True)
    arrays = [operands(ReduceOp.SUM, dtype, 19, rank % 7) for rank in range(n)]
    held = [OnDevice(array, 2 * (rank % 2)) for rank, array in enumerate(arrays[:7])]
    out, expected = OnDevice(np.zeros(19, dtype.numpy)), np.empty(19, dtype.numpy)
    with np.errstate(all="ignore"):
        reduction.combine(ReduceOp.AVG, dtype, arrays, expected, n)
    by, sources = reduction.find_loop(ReduceOp.AVG, dtype), [held[r % 7].address for r in range(n)]
    kernels.combine(by, sources, [out.address], 19, n, stream.ptr)
    stream.synchronize()
    assert_same(out.got(), expected, dtype.kind, str(n))


def test_invalid_arguments_raise(kernels):
    add = reduction.find_loop(ReduceOp.SUM, by_name["float32"])
    integers = reduction.find_loop(ReduceOp.SUM, by_name["int32"])
    for error, message, method, *arguments in (
        (ArgumentError, "one array to combine and one", kernels.combine, add, [], [64], 1, 1, 0),
        (ArgumentError, "multiple of 4 bytes", kernels.combine, add, [64, 66], [64], 1, 1, 0),
        (UnsupportedError, "got 4001", kernels.combine, add, [64] * 4000, [64], 1, 1, 0),
        (UnsupportedError, "AVG is not defined", kernels.combine, integers, [64], [64], 1, 2, 0),
        (UnsupportedError, "no kernel scales", kernels.scale, by_name["bool"], 64, 1, 64, 1, 0),
        (ArgumentTypeError, None, kernels.scale, by_name["int32"], 64, 0.5, 64, 1, 0),
        (ArgumentTypeError, None, kernels.scale, by_name["float16"], 64, 1j, 64, 1, 0),
        (ArgumentError, "of 8 bytes", kernels.scale, by_name["complex128"], 68, 1j, 64, 1, 0),
        (UnsupportedError, "no kernel rounds", kernels.narrow, by_name["float32"], 64, 64, 1, 0),
    ):
        with pytest.raises(error, match=message):
            method(*arguments)


LINES = [
    *(f"COMBINE({name}, 0, 17)" for name in ("bfloat16", "float32", "float64", "uint8")),
    "COMBINE(float32, 2, 4000)", "SCALE(float64)", "SCALE_COMPLEX(float32)", "NARROW(bfloat16)",
    "ALL_REDUCE(float32, 0)", "ALL_REDUCE(bfloat16, 0)", "REDUCE_SCATTER(int64, 6)",
    "ALL_GATHER(uint64_t)", "BROADCAST(uint8_t)",
]  # fmt: skip


#: Only conversions of the float64 divisor and tests for NaN may flush subnormals, and conversions
#: from and to float16 and float8, whose numbers are not subnormal in float32.
MAY_FLUSH = {"cvt.rn.ftz.f32.f64", "setp.nan.ftz.f32", "setp.neu.ftz.f32"}


def compiled(line, target, *options, log=None):
    """Return the PTX of a kernel, after a check of its instructions."""
    program = cupy.cuda.compiler._NVRTCProgram(f"{_source(*_PEERS)}\n{line}\n")
    options = (*_OPTIONS, "-ftz=true", f"-arch={target}", *options)
    text = program.compile(options, log)[0].decode()
    also = {"add.rn.ftz.f32"} if re.search(r"\(float(16|8)", line) else set()
    assert {*re.findall(r"\S+\.ftz\S*", text)} <= MAY_FLUSH | also and "fma.rn.f" not in text
    return text


@pytest.mark.parametrize("architecture", [75, 80, 90])
@pytest.mark.parametrize("line", LINES)
def test_compiled_instructions(line, architecture):
    """Vector accesses, no contraction, no flushing of subnormals, and few system fences."""
    text = compiled(line, f"compute_{architecture}")
    assert re.search(r"ld\.(global\.)?v[24]\.", text) and re.search(r"st\.(global\.)?v[24]\.", text)
    if line.startswith(("ALL_", "REDUCE_", "BROADCAST")):
        assert 0 < text.count("st.release.sys.u64") < 5 and "ld.acquire.sys.u64" in text
        assert "ld.global.nc" not in text  # other GPUs write to the memory


#: The last operation of each format: MAX of floats, which has the largest kernels.
LAST = {by.format: by.operation for by in (reduction.find_loop(*pair.values) for pair in PAIRS)}


@pytest.mark.parametrize(("name", "operation"), LAST.items())
def test_kernels_are_small(name, operation):
    """A thread converts 16 elements: a conversion that is inlined twice adds hundreds. Registers
    hold everything.
    """
    for line in (f"ALL_REDUCE({name}, {operation})", f"COMBINE({name}, {operation}, 17)"):
        log = io.StringIO()
        text = compiled(line, "sm_90", "--ptxas-options=-v", log=log)
        statements = re.sub("//.*", "", text).split(";")
        start = re.compile(r"([\s{}]|\$\w+:|@!?%p\d+)*[a-z]")
        assert 200 < sum(bool(start.match(each)) for each in statements) < 1500, line
        assert ".local" not in text
        (frame,) = re.findall(r"(\d+) bytes stack.* (\d+) .*stores, (\d+) .*loads", log.getvalue())
        assert frame == ("0", "0", "0"), line


COMPILING = """
import sys
from cupy.cuda.compiler import _NVRTCProgram as Program
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels import device_kernels, reduction

compile, compiled, is_first = Program.compile, [], sys.argv[1] == "first"
def record(program, *arguments):
    if program.src:
        compiled.append(program)
        if is_first:
            print("compiling", flush=True)
            input()
    return compile(program, *arguments)
Program.compile, device_kernels.COMPILE_TIMEOUT_S = record, float(sys.argv[2])
if not is_first:
    print("waiting", flush=True)
device_kernels.DeviceKernels(0).load(reduction.find_loop(ReduceOp.SUM, by_name["uint8"]), 2)
print(len(compiled))
"""


@pytest.mark.parametrize(
    ("n", "first", "limit"),
    [(2, "ends", 600), (4, "ends", 600), (3, "is killed", 600), (3, "hangs", 0.1)],
)
def test_one_process_of_a_node_compiles(tmp_path, n, first, limit):
    """Other processes wait for it, but not if it was killed, and not beyond the limit."""
    jobs = []

    def start(name, says):
        command = [sys.executable, "-c", COMPILING, name, str(limit)]
        environment = os.environ | {"CUPY_CACHE_DIR": str(tmp_path)}
        jobs.append(
            subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )
        assert jobs[-1].stdout.readline() == f"{says}\n"

    try:
        start("first", "compiling")
        for _ in range(n - 1):
            start("other", "waiting")
        time.sleep(0.5)
        if first == "is killed":
            jobs[0].kill()
        ended = jobs[first != "ends" :]
        counts = [int(job.communicate("\n", timeout=100)[0]) for job in ended]
        assert sum(counts) == 1 if first == "ends" else sum(counts) > 0
    finally:
        for job in jobs:
            job.kill()


#: A sample of the tests, because compute-sanitizer is slow.
SAMPLE = (
    "(combine and (SUM or AVG or MAX) and (float32 or bfloat16 or e5m2 or complex64 or int16))"
    " or test_narrow or test_scale"
)
FOLDERS = [f"{folder}/bin" for folder in Path("/usr/local").glob("cuda*")]
SANITIZER = shutil.which(
    "compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
)


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_sample_under_the_sanitizer(tool):
    """compute-sanitizer may serialize kernels, so those of ``peer`` would wait forever: ``make
    sanitize`` tests them.
    """
    done = subprocess.run(
        [SANITIZER, "--tool", tool, "--error-exitcode", "77", sys.executable, "-m", "pytest", "-q",
         "-p", "no:cacheprovider", "-k", SAMPLE, __file__],
        text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240,
    )  # fmt: skip
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:]
