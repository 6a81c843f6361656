"""Functions of CUDA's math library and of CuPy on the emulated device, compared with NumPy.

Run it with `make test-gpu-emulated`, or after build.py with the variables of its env.sh.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

if not os.environ.get("EMULATED_GPU_CACHE"):
    pytest.skip("run it with make test-gpu-emulated", allow_module_level=True)
cupy = pytest.importorskip("cupy")

FLOATS = {"f4": 1e-5, "f8": 1e-12}
#: Names in CUDA C, and the names in NumPy that differ.
UNARY = (
    "sin cos tan asin atan sinh tanh exp exp2 expm1 log log2 log10 log1p sqrt cbrt floor ceil rint"
)
BINARY = "pow fmod fmax fmin atan2 hypot copysign nextafter"
NUMPY_NAMES = {"asin": "arcsin", "atan": "arctan", "pow": "power", "atan2": "arctan2"}
KERNEL = """
extern "C" __global__ void {name}_{dtype}(const {type}* a, const {type}* b, {type}* found) {{
    found[threadIdx.x] = {name}({arguments});
}}
"""
COUNT = 300


def check(function: Callable[..., Any], *arrays: Any, rtol: float = 1e-6) -> None:
    """Compare a function of (module, arrays) between CuPy and NumPy."""
    with np.errstate(all="ignore"):
        expected = np.asarray(function(np, *arrays))
    got = cupy.asnumpy(function(cupy, *map(cupy.asarray, arrays)))
    kind = "c16" if expected.dtype.kind == "c" else "f8"
    np.testing.assert_allclose(got.astype(kind), expected.astype(kind), rtol, rtol)


def numbers(dtype: str, place: int = 0) -> Any:
    random = np.random.default_rng(place)
    if dtype[0] == "f":
        return (random.random(COUNT) * 3 + 0.1 - place).astype(dtype)
    if dtype[0] == "c":
        return (random.random(COUNT) + 1j * random.random(COUNT)).astype(dtype)
    return random.integers(1, 20, COUNT).astype(dtype)


@pytest.fixture(scope="module")
def math_library() -> Any:
    """One module with a kernel for each function and dtype, because compilation takes the time."""
    text = "".join(
        KERNEL.format(name=name, dtype=dtype, type=type, arguments=arguments)
        for names, arguments in (
            (UNARY, "a[threadIdx.x]"), (BINARY, "a[threadIdx.x], b[threadIdx.x]")
        )
        for name in names.split()
        for dtype, type in (("f4", "float"), ("f8", "double"))
    )  # fmt: skip
    return cupy.RawModule(code=text)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [*UNARY.split(), *BINARY.split()])
def test_math_library(math_library, name, dtype):
    a, b = numbers(dtype), numbers(dtype, 1)
    found = cupy.empty(COUNT, dtype)
    kernel = math_library.get_function(f"{name}_{dtype}")
    kernel((1,), (COUNT,), (cupy.asarray(a), cupy.asarray(b), found))
    operands = (a, b) if name in BINARY.split() else (a,)
    with np.errstate(all="ignore"):
        expected = getattr(np, NUMPY_NAMES.get(name, name))(*operands)
    rtol = 10 * FLOATS[dtype]
    np.testing.assert_allclose(cupy.asnumpy(found), expected, rtol, rtol)


@pytest.mark.parametrize(
    ("names", "dtypes"),
    [
        ("add divide power less", "f2"),
        ("subtract floor_divide remainder left_shift bitwise_xor", "i1 u4 i8"),
    ],
)
def test_functions_of_two_arrays(names, dtypes):
    for name in names.split():
        for dtype in dtypes.split():
            arrays = numbers(dtype, 0), numbers(dtype, 0)[::-1].copy()
            rtol = 1e-2 if dtype == "f2" else 1e-6
            check(lambda module, a, b, name=name: getattr(module, name)(a, b), *arrays, rtol=rtol)


@pytest.mark.parametrize("dtype", ["f2", "f4", "i8", "u1"])
@pytest.mark.parametrize("name", ["sum", "max", "mean", "argmin", "any", "cumsum"])
def test_reductions(name, dtype):
    rtol = {"f2": 0.3, "f4": 3e-4}.get(dtype, 1e-9)
    check(lambda module, a: getattr(module, name)(a), numbers(dtype), rtol=rtol)


@pytest.mark.parametrize("name", ["exp", "sqrt", "absolute", "conj"])
def test_functions_of_complex_numbers(name):
    check(lambda module, a: getattr(module, name)(a), numbers("c8"), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u8"])
def test_atomic_additions(dtype):
    def add(module: Any, a: Any) -> Any:
        found = module.zeros(10, a.dtype)
        module.add.at(found, module.arange(a.size) % 10, a)
        return found

    check(add, numbers(dtype), rtol=1e-2 if dtype == "f2" else 1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda module, a: module.ascontiguousarray(a.T),
        lambda module, a: a.sum(axis=0),
        lambda module, a: module.tile(a, 500).sum(),
        lambda module, a: module.take(a, module.array([3, 1, 2]), axis=0),
        lambda module, a: a[module.array([1, 2]), module.array([3, 4])],
        lambda module, a: a[a > 0.5],
        lambda module, a: module.concatenate([a, a], axis=1),
        lambda module, a: module.bincount((a.ravel() * 10).astype("i4")),
        lambda module, a: module.searchsorted(module.arange(10) / 10, a.ravel()),
        lambda module, a: module.nonzero(a > 0.9)[0],
    ],
)
def test_functions_of_arrays(function):
    check(function, np.random.default_rng(0).random((20, 30), "f4"), rtol=1e-4)
