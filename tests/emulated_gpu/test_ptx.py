"""PTX instructions on the emulated device, compared with NumPy and with exact arithmetic.

Run it with `make test-gpu-emulated`, or after build.py with the variables of its env.sh.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if not os.environ.get("EMULATED_GPU_CACHE"):
    pytest.skip("run it with make test-gpu-emulated", allow_module_level=True)

HERE = Path(__file__).resolve().parent
HEADER = ".version 8.5\n.target sm_90\n.address_size 64\n"
COUNT = 2048
THREADS = 128

INVALID_VALUE, NOT_FOUND, INVALID_PTX, NO_BINARY = 1, 500, 218, 209
ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, ASSERTION, MISALIGNED, LAUNCH_FAILURE = 700, 702, 710, 716, 719


class Driver:
    """The driver API of the emulated device."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.check(self.library.cudaSetDevice(0))

    def check(self, code: int) -> None:
        assert code == 0, f"CUDA error {code}"

    def load(self, text: str) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.check(self.library.cuModuleLoadData(ctypes.byref(module), (HEADER + text).encode()))
        return module

    def function(self, module: ctypes.c_void_p, name: str = "kernel") -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self.check(self.library.cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
        return found

    def put(self, array: np.ndarray[Any, Any]) -> int:
        """Return the address of a device copy."""
        place, nbytes = ctypes.c_void_p(), ctypes.c_size_t(array.nbytes)
        self.check(self.library.cudaMalloc(ctypes.byref(place), nbytes))
        self.check(self.library.cudaMemcpy(place, ctypes.c_void_p(array.ctypes.data), nbytes, 1))
        return int(place.value or 0)

    def get(self, address: int, count: int, dtype: Any) -> np.ndarray[Any, Any]:
        found = np.empty(count, dtype)
        into, nbytes = ctypes.c_void_p(found.ctypes.data), ctypes.c_size_t(found.nbytes)
        self.check(self.library.cudaMemcpy(into, ctypes.c_void_p(address), nbytes, 2))
        return found

    def launch(
        self, function: ctypes.c_void_p, addresses: Sequence[int], grid: Any = (1, 1, 1),
        block: Any = (THREADS, 1, 1), shared: int = 0,
    ) -> int:  # fmt: skip
        """Launch a kernel whose parameters are addresses. Return the error code."""
        values = [ctypes.c_uint64(each) for each in addresses]
        table = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        launch = self.library.cuLaunchKernel
        return int(launch(function, *grid, *block, shared, None, table, None))

    def synchronize(self) -> int:
        return int(self.library.cudaDeviceSynchronize())


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


# ---- Instructions on numbers ---------------------------------------------------------------------


def fused(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32, rounded once: the extended product is exact."""
    return (a.astype(np.longdouble) * b + c).astype("f4")


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(f"u{array.itemsize}")


def flushed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    small = np.abs(array) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), array), array)


def with_ftz(oracle: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arrays: flushed(oracle(*map(flushed, arrays)))


def minimum(a: Any, b: Any) -> Any:
    less = (a < b) | ((a == b) & np.signbit(a)) | np.isnan(b)
    return np.where(less & ~np.isnan(a), a, b)


def to_integer(dtype: Any, rounding: Any, of_nan: int) -> Callable[[Any], Any]:
    least, most = map(np.longdouble, (np.iinfo(dtype).min, np.iinfo(dtype).max))

    def oracle(a: Any) -> Any:
        values = np.clip(rounding(a.astype(np.longdouble)), least, most)
        return np.where(np.isnan(a), np.longdouble(of_nan), values).astype(dtype)

    return oracle


def each(function: Callable[..., int]) -> Callable[..., Any]:
    """Return an oracle that applies a function of Python integers. The result wraps around."""

    def oracle(*arrays: Any) -> Any:
        found = [function(*map(int, values)) for values in zip(*arrays, strict=True)]
        return np.array([one % 2**64 for one in found], np.uint64)

    return oracle


def permuted(a: int, b: int, selectors: int) -> int:
    source, result = a | b << 32, 0
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = source >> 8 * (selector & 7) & 255
        result |= ((255 if byte & 128 else 0) if selector & 8 else byte) << 8 * i
    return result


def narrow(a: Any) -> Any:
    """Convert to float16. NVIDIA's NaN has all bits but the sign."""
    found = a.astype(np.float16).view("u2")
    found[np.isnan(a)] = 0x7FFF
    return found


def ordered(test: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: test(a, b) & ~(np.isnan(a) | np.isnan(b))


def unordered(test: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: test(a, b) | np.isnan(a) | np.isnan(b)


def shifted(a: Any, n: Any) -> Any:
    return np.where(n > 31, 0, a << np.minimum(n, 31))


#: PTX on %a, %b and %c with the result in %d; dtypes of the operands and of the result; oracle.
CASES = [
    ("add.s32 %d, %a, %b;", "i4 i4 i4", lambda a, b: a + b),
    ("mul.lo.s64 %d, %a, %b;", "i8 i8 i8", lambda a, b: a * b),
    ("mul.hi.u64 %d, %a, %b;", "u8 u8 u8", each(lambda a, b: a * b >> 64)),
    ("mul.wide.s32 %d, %a, %b;", "i4 i4 i8", each(lambda a, b: a * b)),
    ("mad.lo.s32 %d, %a, %b, %c;", "i4 i4 i4 i4", lambda a, b, c: a * b + c),
    ("div.s32 %d, %a, %b;", "i4 i4 i4",
     each(lambda a, b: -1 if b == 0 else (abs(a) // abs(b) * (1 if a * b > 0 else -1) + 2**31)
          % 2**32 - 2**31)),
    ("rem.u64 %d, %a, %b;", "u8 u8 u8", each(lambda a, b: a % b if b else a)),
    ("max.u32 %d, %a, %b;", "u4 u4 u4", np.maximum),
    ("abs.s32 %d, %a;", "i4 i4", np.abs),
    ("and.b32 %d, %a, %b;", "u4 u4 u4", np.bitwise_and),
    ("not.b32 %d, %a;", "u4 u4", np.invert),
    ("shl.b32 %d, %a, %b;", "u4 s4 u4", shifted),
    ("shr.s32 %d, %a, %b;", "i4 s4 i4", lambda a, n: a >> np.minimum(n, 31)),
    ("popc.b64 %d, %a;", "u8 u4", each(lambda a: a.bit_count())),
    ("clz.b32 %d, %a;", "u4 u4", each(lambda a: 32 - a.bit_length())),
    ("bfi.b32 %d, %a, %b, 9, 6;", "u4 u4 u4",
     each(lambda a, b: b & ~(63 << 9) | (a & 63) << 9)),
    ("prmt.b32 %d, %a, %b, %c;", "u4 u4 u4 u4", each(permuted)),
    # Floats.
    ("add.f32 %d, %a, %b;", "f4 f4 f4", np.add),
    ("add.ftz.f32 %d, %a, %b;", "f4 f4 f4", with_ftz(np.add)),
    ("mul.rn.f64 %d, %a, %b;", "f8 f8 f8", np.multiply),
    ("div.rn.f32 %d, %a, %b;", "f4 f4 f4", np.divide),
    ("rcp.rn.f64 %d, %a;", "f8 f8", lambda a: 1 / a),
    ("sqrt.rn.f32 %d, %a;", "f4 f4", np.sqrt),
    ("fma.rn.f32 %d, %a, %b, %c;", "f4 f4 f4 f4", fused),
    ("min.f32 %d, %a, %b;", "f4 f4 f4", minimum),
    ("max.f64 %d, %a, %b;", "f8 f8 f8", lambda a, b: -minimum(-a, -b)),
    ("abs.f64 %d, %a;", "f8 f8", np.abs),
    # Comparisons.
    *((f"setp.{name}.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", "f4 f4 u4",
       ordered(test))
      for name, test in (("eq", np.equal), ("ne", np.not_equal), ("lt", np.less),
                         ("ge", np.greater_equal))),
    *((f"setp.{name}.f64 %p, %a, %b; selp.b32 %d, 1, 0, %p;", "f8 f8 u4",
       unordered(test))
      for name, test in (("equ", np.equal), ("neu", np.not_equal), ("gtu", np.greater))),
    ("setp.nan.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", "f4 f4 u4",
     lambda a, b: np.isnan(a) | np.isnan(b)),
    ("setp.eq.ftz.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", "f4 f4 u4",
     lambda a, b: flushed(a) == flushed(b)),
    # Conversions.
    ("cvt.s64.s32 %d, %a;", "i4 i8", lambda a: a.astype("i8")),
    ("cvt.u32.u8 %d, %a;", "u4 u4", lambda a: a & 255),
    ("cvt.rzi.s32.f32 %d, %a;", "f4 i4", to_integer("i4", np.trunc, 0)),
    ("cvt.rni.u32.f32 %d, %a;", "f4 u4", to_integer("u4", np.rint, 0)),
    ("cvt.rmi.s64.f64 %d, %a;", "f8 i8", to_integer("i8", np.floor, -(2**63))),
    ("cvt.rn.f32.s64 %d, %a;", "i8 f4", lambda a: a.astype("f4")),
    ("cvt.rn.f32.f64 %d, %a;", "f8 f4", lambda a: a.astype("f4")),
    ("cvt.rn.f16.f32 %d, %a;", "f4 u2", narrow),
    ("cvt.f32.f16 %d, %a;", "u2 f4", lambda a: a.view("f2").astype("f4")),
    ("mov.b32 {%h0, %h1}, %a; mov.b32 %d, {%h1, %h0};", "u4 u4", lambda a: a << 16 | a >> 16),
    ("mov.b64 %d, {%a, %b};", "u4 u4 u8",
     lambda a, b: a.astype("u8") | b.astype("u8") << np.uint64(32)),
]  # fmt: skip


def operands(kind: str, place: int) -> np.ndarray[Any, Any]:
    """Return numbers with random bits and special ones; s: small."""
    random = np.random.default_rng(place)
    size = int(kind[1])
    if kind[0] == "s":
        return random.integers(0, 40, COUNT).astype(f"u{size}")
    found = np.frombuffer(random.bytes(COUNT * size), f"u{size}").copy()
    if kind[0] == "f":
        found = found.view(kind)
        normal = (random.standard_normal(COUNT // 2) * 8).astype(kind)
        found[: COUNT // 2] = normal
        tiny = np.finfo(kind)
        special = [0.0, 1.0, 0.5, 1.5, 2.5, 2.0**31, 2.0**63, np.inf, tiny.max, tiny.tiny]
        special += [tiny.smallest_subnormal]
        special = [sign * one for one in special for sign in (1, -1)] + [np.nan]
    else:
        special = [0, 1, 2, 3, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1]
    # All pairs of special numbers, in the order of a different digit for each operand.
    n = len(special)
    order = [i // n**place % n for i in range(n * n)]
    found[: n * n] = np.array(special, found.dtype)[order]
    return found if kind[0] == "f" else found.view(kind)


def entry(name: str, code: str, types: Sequence[str]) -> str:
    """Return a kernel that computes %d from %a, %b and %c for each thread."""
    *sources, result = types
    letters = "abc"[: len(sources)]
    parameters = ", ".join(f".param .u64 p_{letter}" for letter in f"{letters}d")
    lines = [f".reg .b{8 * int(kind[1])} %{x};" for x, kind in zip(letters, sources, strict=True)]
    lines.append(f".reg .b{8 * int(result[1])} %d;")
    lines.append(".reg .b64 %w<8>; .reg .b32 %t<4>; .reg .b16 %h<4>; .reg .pred %p, %q;")
    lines.append("mov.u32 %t0, %ctaid.x; mov.u32 %t1, %ntid.x; mov.u32 %t2, %tid.x;")
    lines.append("mad.lo.u32 %t3, %t0, %t1, %t2;")
    for letter, kind in zip(letters, sources, strict=True):
        size = int(kind[1])
        lines.append(f"ld.param.u64 %w1, [p_{letter}]; mad.wide.u32 %w2, %t3, {size}, %w1;")
        lines.append(f"ld.global.b{8 * size} %{letter}, [%w2];")
    size = int(result[1])
    lines.append(f"{code}\nld.param.u64 %w1, [p_d]; mad.wide.u32 %w2, %t3, {size}, %w1;")
    lines.append(f"st.global.b{8 * size} [%w2], %d; ret;")
    return f".visible .entry {name}({parameters})\n{{\n" + "\n".join(lines) + "\n}\n"


@pytest.fixture(scope="module")
def instructions(driver: Driver) -> ctypes.c_void_p:
    """The module with the kernels of all cases."""
    kernels = [entry(f"case_{i}", code, types.split()) for i, (code, types, _) in enumerate(CASES)]
    return driver.load("".join(kernels))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0] for case in CASES])
def test_instruction_matches_oracle(driver, instructions, case):
    code, types, oracle = CASES[case]
    *sources, result = types.split()
    arrays = [operands(kind, place) for place, kind in enumerate(sources)]
    output = driver.put(np.zeros(COUNT, result))
    addresses = [*map(driver.put, arrays), output]
    function = driver.function(instructions, f"case_{case}")
    assert driver.launch(function, addresses, (COUNT // THREADS, 1, 1)) == 0
    got = driver.get(output, COUNT, result)
    with np.errstate(all="ignore"):
        expected = np.asarray(oracle(*arrays)).astype(result)
    if result[0] == "f":
        is_sign_operation = code.startswith(("neg", "abs", "copysign"))
        nan = np.isnan(expected)
        assert (np.isnan(got) == nan).all()
        if result == "f4" and not is_sign_operation:
            assert (bits(got)[nan] == 0x7FFFFFFF).all(), "not NVIDIA's NaN"
        got, expected = got[~nan], expected[~nan]
        arrays = [array[~nan] for array in arrays]
    wrong = np.flatnonzero(bits(got) != bits(expected))
    assert not wrong.size, [
        (*(array[i] for array in arrays), got[i], expected[i]) for i in wrong[:5]
    ]


# ---- Memory, threads and control -----------------------------------------------------------------

#: Registers, the number of the thread in its block in %t0, and the address of its word of the
#: output in %w2.
BEGIN = """.visible .entry kernel(.param .u64 out)
{
.reg .b64 %w<16>; .reg .b32 %t<32>; .reg .pred %p<8>; .reg .b16 %h<4>; .reg .f32 %f<8>;
mov.u32 %t0, %tid.x; mov.u32 %t1, %ctaid.x; mov.u32 %t2, %ntid.x; mad.lo.u32 %t3, %t1, %t2, %t0;
ld.param.u64 %w1, [out]; mad.wide.u32 %w2, %t3, 4, %w1;
"""
END = "st.global.u32 [%w2], %t9; ret; }"


def run_threads(
    driver: Driver, code: str, count: int = THREADS, before: str = "", initial: Any = None,
    **options: Any,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Run code that sets %t9 in each thread. Return the results of all threads."""
    function = driver.function(driver.load(before + BEGIN + code + END))
    output = driver.put(np.zeros(count, "u4") if initial is None else initial)
    assert driver.launch(function, [output], **options) == 0
    assert driver.synchronize() == 0
    return driver.get(output, count, "u4")


THREAD = np.arange(THREADS, dtype=np.uint32)
LANE = THREAD % 32


#: Code that sets %t9 in each thread, the expected results, declarations before the kernel, and the
#: number of bytes of dynamic shared memory.
PROGRAMS = {
    "shared memory and barrier": ("""
        .shared .align 4 .b8 words[512];
        mov.u32 %t4, words; shl.b32 %t5, %t0, 2; add.u32 %t6, %t4, %t5; st.shared.u32 [%t6], %t0;
        bar.sync 0; sub.u32 %t7, 508, %t5; add.u32 %t7, %t4, %t7; ld.shared.u32 %t9, [%t7];
        """, THREAD[::-1], "", 0),
    "dynamic shared memory follows static variables": ("""
        .shared .align 4 .b8 words[512];
        mov.u32 %t4, dynamic; shl.b32 %t5, %t0, 2; add.u32 %t6, %t4, %t5; cvt.u64.u32 %w3, %t6;
        cvta.shared.u64 %w4, %w3; st.u32 [%w4], %t0; bar.sync 0;
        sub.u32 %t7, 508, %t5; add.u32 %t7, %t4, %t7; ld.shared.u32 %t9, [%t7];
        add.u32 %t9, %t9, %t4;
        """, THREAD[::-1] + 512, ".extern .shared .align 16 .b8 dynamic[];", 512),
    "barrier reduction": ("""
        setp.eq.u32 %p1, %t0, 5; bar.red.or.pred %p2, 0, %p1;
        setp.gt.u32 %p1, %t0, 999; bar.red.or.pred %p3, 0, %p1;
        selp.b32 %t5, 100, 0, %p2; selp.b32 %t6, 1000, 0, %p3; add.u32 %t9, %t5, %t6;
        """, THREAD * 0 + 100, "", 0),
    "exited threads count as arrived": (
        "setp.lt.u32 %p1, %t0, 40; @%p1 ret; bar.sync 0; mov.u32 %t9, 1;", THREAD >= 40, "", 0),
    "barrier of a warp": ("""
        .shared .align 4 .b8 words[512];
        mov.u32 %t4, words; shl.b32 %t5, %t0, 2; add.u32 %t6, %t4, %t5; st.shared.u32 [%t6], %t0;
        and.b32 %t7, %t0, 31; setp.ge.u32 %p1, %t7, 30; @%p1 ret; bar.warp.sync 0xffffffff;
        xor.b32 %t7, %t5, 4; add.u32 %t7, %t4, %t7; ld.shared.u32 %t9, [%t7];
        """, np.where(THREAD % 32 < 30, THREAD ^ 1, 0), "", 0),
    **{f"shuffle {mode}": (f"""
        mul.lo.u32 %t4, %t0, 3; shfl.sync.{mode}.b32 %t5|%p1, %t4, {lane}, 0xffffffff;
        selp.b32 %t6, 1, 0, %p1; mad.lo.u32 %t9, %t5, 2, %t6;
        """, (THREAD - LANE + source) * 6 + ok, "", 0) for mode, lane, source, ok in (
            ("up", "3, 0", np.where(LANE < 3, LANE, LANE - 3), LANE >= 3),
            ("down", "3, 31", np.where(LANE > 28, LANE, LANE + 3), LANE <= 28),
            ("bfly", "5, 31", LANE ^ 5, LANE >= 0),
            ("idx", "2, 0x181f", LANE & 24 | 2, LANE >= 0),
        )},
    "vectors and parts of words": ("""
        .local .align 16 .b8 frame[16]; .reg .b16 %k<4>;
        mov.u64 %w3, frame; add.u32 %t4, %t0, 1; cvta.local.u64 %w4, %w3;
        st.local.v4.u32 [%w3], {%t0, %t4, %t0, %t4}; ld.v2.u64 {%w5, %w6}, [%w4];
        ld.local.u8 %k0, [%w3+4]; cvt.u32.u16 %t5, %k0; cvt.u32.u64 %t6, %w6;
        add.u32 %t9, %t5, %t6;
        st.local.s8 [%w3], -2; ld.local.s8 %t7, [%w3]; sub.u32 %t9, %t9, %t7;
        """, 2 * THREAD + 3, "", 0),
    "function calls and module variables": ("""
        { .param .b32 param0; .param .b32 retval0; st.param.b32 [param0+0], %t0;
        call.uni (retval0), twice, (param0); ld.param.b32 %t9, [retval0+0]; }
        ld.global.u32 %t4, [table+8]; mov.u64 %w3, table; ld.global.u32 %t5, [%w3];
        ld.const.u32 %t6, [factor+4]; add.u32 %t9, %t9, %t4; add.u32 %t9, %t9, %t5;
        add.u32 %t9, %t9, %t6;
        """, 2 * THREAD + 21 + 0x40000000, """
        .global .align 4 .u32 table[3] = {5, 6, 0x10};
        .const .align 8 .f64 factor = 0d4000000000000000;
        .func (.param .b32 result) twice(.param .b32 given)
        { .reg .b32 %r<3>; ld.param.u32 %r1, [given]; setp_free: add.u32 %r2, %r1, %r1;
          st.param.b32 [result], %r2; ret; }
        """, 0),
    "names in nested blocks": ("""
        mov.u32 %t4, 1; { .reg .b32 %t4; mov.u32 %t4, 5; LOOP: sub.u32 %t4, %t4, 1;
        setp.ne.u32 %p1, %t4, 0; @%p1 bra LOOP; }
        { .reg .b32 x; LOOP: mov.u32 x, 3; add.u32 %t4, %t4, x; } mov.u32 %t9, %t4;
        """, THREAD * 0 + 4, "", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(driver, name):
    code, expected, before, shared = PROGRAMS[name]
    assert (run_threads(driver, code, before=before, shared=shared) == expected).all()


def test_blocks_wait_for_each_other(driver):
    """Each block waits for the flag of the next one, and the last block sets the first flag."""
    code = """add.u32 %t4, %t1, 1; mad.wide.u32 %w3, %t4, 4, %w1; mov.u32 %t5, %nctaid.x;
    setp.eq.u32 %p1, %t4, %t5; @%p1 bra SET;
    WAIT: ld.acquire.gpu.global.u32 %t6, [%w3+64]; setp.eq.u32 %p2, %t6, 0; @%p2 bra WAIT;
    SET: add.u64 %w4, %w2, 64; st.release.gpu.global.u32 [%w4], 1; mov.u32 %t9, 8;"""
    got = run_threads(driver, code, 32, grid=(8, 1, 1), block=(1, 1, 1))
    assert (got[:8] == 8).all() and (got[16:24] == 1).all()


# ---- Errors --------------------------------------------------------------------------------------


def error_of(code: str, before: str = "") -> str:
    """Return the output of a kernel with an error, from a process of its own: errors are sticky."""
    text = before + BEGIN + code + END
    program = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import numpy as np, test_ptx
driver = test_ptx.Driver()
function = driver.function(driver.load({text!r}))
output = driver.put(np.zeros(4096, "u4"))
print("error", driver.launch(function, [output]) or driver.synchronize())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ld.global.u32 %t9, [%w2+2];", f"error {MISALIGNED}\n"),
        ("ld.global.v4.u32 {%t4, %t5, %t6, %t9}, [%w2];", f"error {MISALIGNED}\n"),
        ("st.global.u64 [%w2+4], %w1;", f"error {MISALIGNED}\n"),
        ("atom.global.add.u32 %t9, [%w2+1], 1;", f"error {MISALIGNED}\n"),
        ("mov.u64 %w3, 64; ld.global.u32 %t9, [%w3];", f"error {ILLEGAL_ADDRESS}\n"),
        ("mov.u32 %t4, 4096; ld.shared.u32 %t9, [%t4];", f"error {ILLEGAL_ADDRESS}\n"),
        ("trap;", f"error {LAUNCH_FAILURE}\n"),
        ("setp.eq.u32 %p1, %t0, 0; @%p1 bra ONE; bar.sync 0; ONE: bar.warp.sync -1;",
         f"error {LAUNCH_TIMEOUT}\n"),
        ("{ .param .b64 message; call.uni __assertfail, (message); }", f"error {ASSERTION}\n"),
        *((f"{code};", f"unsupported instruction: {code}") for code in (
            "tanh.approx.f16 %h1, %h2", "add.rn.f32x2 %w3, %w4, %w5", "wgmma.fence.sync.aligned",
        )),
    ],
)  # fmt: skip
def test_errors(code, error):
    found = error_of(code, ".extern .func __assertfail(.param .b64 message);\n")
    assert error in found
    assert (f"CUDA error {INVALID_PTX}" in found) == error.startswith("unsupported")


def test_other_images_are_refused(driver):
    module = ctypes.c_void_p()
    image = ctypes.create_string_buffer(b"\x7fELF and more")
    assert driver.library.cuModuleLoadData(ctypes.byref(module), image) == NO_BINARY


def test_launch_limits(driver):
    text = BEGIN.replace("\n{", "\n.maxntid 256, 1, 1\n{") + "mov.u32 %t9, 1;" + END
    module = driver.load(".extern .shared .align 16 .b8 dynamic[];\n" + text)
    function, out = driver.function(module), driver.put(np.zeros(4096, "u4"))
    launch = driver.launch
    assert launch(function, [out], block=(256, 1, 1)) == 0
    for block in ((257, 1, 1), (1025, 1, 1), (0, 1, 1), (1, 1, 65)):
        assert launch(function, [out], block=block) == INVALID_VALUE
    for grid in ((0, 1, 1), (1, 65536, 1), (1, 1, 65536)):
        assert launch(function, [out], grid) == INVALID_VALUE
    assert launch(function, [out], shared=(48 << 10) + 1) == INVALID_VALUE
    missing = ctypes.c_void_p()
    find = driver.library.cuModuleGetFunction
    assert find(ctypes.byref(missing), module, b"other") == NOT_FOUND
    assert driver.synchronize() == 0
