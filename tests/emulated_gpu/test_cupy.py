"""Functions of CuPy on the emulated device, compared with NumPy.

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

COUNT = 300


def check(function: Callable[..., Any], *arrays: Any, rtol: float = 1e-6) -> None:
    """Compare a function of (module, arrays) between CuPy and NumPy."""
    with np.errstate(all="ignore"):
        expected = np.asarray(function(np, *arrays))
    got = cupy.asnumpy(function(cupy, *map(cupy.asarray, arrays)))
    np.testing.assert_allclose(got.astype("f8"), expected.astype("f8"), rtol, rtol)


def numbers(dtype: str) -> Any:
    random = np.random.default_rng(0)
    if dtype[0] == "f":
        return (random.random(COUNT) * 3 + 0.1).astype(dtype)
    return random.integers(1, 20, COUNT).astype(dtype)


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
            arrays = numbers(dtype), numbers(dtype)[::-1].copy()
            rtol = 1e-2 if dtype == "f2" else 1e-6
            check(lambda module, a, b, name=name: getattr(module, name)(a, b), *arrays, rtol=rtol)


@pytest.mark.parametrize("dtype", ["f2", "f4", "i8", "u1"])
@pytest.mark.parametrize("name", ["sum", "max", "mean", "argmin", "any", "cumsum"])
def test_reductions(name, dtype):
    rtol = {"f2": 0.3, "f4": 3e-4}.get(dtype, 1e-9)
    check(lambda module, a: getattr(module, name)(a), numbers(dtype), rtol=rtol)


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
