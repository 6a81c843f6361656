"""CuPy's functions on the emulated device, compared with NumPy: real PTX of many kinds.

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

FLOATS = {"f2": 1e-2, "f4": 1e-5, "f8": 1e-12}
INTEGERS = ("i1", "i2", "i4", "i8", "u1", "u4", "u8")
UNARY = (
    "sin cos tan arcsin arctan sinh tanh exp exp2 expm1 log log2 log10 log1p sqrt cbrt floor ceil "
    "rint trunc absolute negative sign square reciprocal isnan isinf signbit"
)
BINARY = (
    "add subtract multiply divide power floor_divide remainder fmod maximum minimum fmax fmin "
    "arctan2 hypot copysign logaddexp nextafter less greater_equal equal not_equal"
)
INTEGER_BINARY = (
    "add subtract multiply floor_divide remainder bitwise_and bitwise_xor left_shift right_shift "
    "maximum gcd less divide"
)
REDUCTIONS = "sum max min mean std var argmax argmin any all cumsum nansum ptp"
COMPLEX = "exp log sin sqrt absolute angle conj tanh"


def check(function: Callable[..., Any], *arrays: Any, rtol: float = 1e-6) -> None:
    """Compare a function of (module, arrays) between CuPy and NumPy."""
    with np.errstate(all="ignore"):
        expected = np.asarray(function(np, *arrays))
    got = cupy.asnumpy(function(cupy, *map(cupy.asarray, arrays)))
    kind = "c16" if expected.dtype.kind == "c" else "f8"
    np.testing.assert_allclose(got.astype(kind), expected.astype(kind), rtol, rtol)


def numbers(dtype: str, place: int) -> Any:
    random = np.random.default_rng(place)
    if dtype in FLOATS:
        return (random.random(300) * 3 + 0.1 - place).astype(dtype)
    if dtype[0] == "c":
        return (random.random(100) + 1j * random.random(100)).astype(dtype)
    return random.integers(1, 20, 300).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY.split())
def test_functions_of_floats(name, dtype):
    check(lambda module, a: getattr(module, name)(a), numbers(dtype, 0), rtol=FLOATS[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BINARY.split())
def test_functions_of_two_floats(name, dtype):
    arrays = numbers(dtype, 0), numbers(dtype, 1)
    check(lambda module, a, b: getattr(module, name)(a, b), *arrays, rtol=10 * FLOATS[dtype])


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", INTEGER_BINARY.split())
def test_functions_of_two_integers(name, dtype):
    arrays = numbers(dtype, 0), numbers(dtype, 1)
    check(lambda module, a, b: getattr(module, name)(a, b), *arrays)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("name", REDUCTIONS.split())
def test_reductions(name, dtype):
    rtol = 30 * FLOATS.get(dtype, 1e-9)
    check(lambda module, a: getattr(module, name)(a), numbers(dtype, 0), rtol=rtol)


@pytest.mark.parametrize("dtype", ["c8", "c16"])
@pytest.mark.parametrize("name", COMPLEX.split())
def test_functions_of_complex_numbers(name, dtype):
    check(lambda module, a: getattr(module, name)(a), numbers(dtype, 0), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "u8"])
def test_atomic_additions(dtype):
    def add(module: Any, a: Any) -> Any:
        found = module.zeros(10, a.dtype)
        module.add.at(found, module.arange(a.size) % 10, a)
        return found

    check(add, numbers(dtype, 0), rtol=1e-2 if dtype == "f2" else 1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda module, a: module.ascontiguousarray(a.T),
        lambda module, a: a.sum(axis=0),
        lambda module, a: a.sum(axis=1),
        lambda module, a: module.tile(a, 500).sum(),
        lambda module, a: module.take(a, module.array([3, 1, 2]), axis=0),
        lambda module, a: module.where(a > 0.5, a, 0),
        lambda module, a: a[module.array([1, 2]), module.array([3, 4])],
        lambda module, a: a[a > 0.5],
        lambda module, a: module.concatenate([a, a], axis=1),
        lambda module, a: module.roll(a, 3),
        lambda module, a: module.pad(a, 2),
        lambda module, a: module.bincount((a.ravel() * 10).astype("i4")),
        lambda module, a: module.searchsorted(module.arange(10) / 10, a.ravel()),
        lambda module, a: module.interp(a.ravel(), module.arange(3.0), module.arange(3.0) * 2),
        lambda module, a: module.nonzero(a > 0.9)[0],
    ],
)
def test_functions_of_arrays(function):
    check(function, np.random.default_rng(0).random((20, 30), "f4"), rtol=1e-4)
