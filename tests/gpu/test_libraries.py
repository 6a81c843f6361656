"""GPU arrays of CuPy, torch, Numba and JAX."""

from __future__ import annotations

from typing import Any

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from mpicoll.arrays.adapters import build_view  # noqa: E402
from mpicoll.errors import ArgumentError  # noqa: E402


class Exporter:
    """An array with DLPack only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def check(array: Any, address: int, strides: tuple[int, ...] | None, writable: bool = True) -> None:
    """Compare the view with the address and strides that the library reports."""
    found = build_view(array, writable, "x")
    assert (found.device, found.address, found.shape) == (0, address, (4, 6))
    if strides is not None:
        assert found.strides == strides
    assert found.dtype.name == "float32"


@pytest.mark.parametrize("order", ["C", "F"])
def test_cupy(order):
    array = cupy.zeros((4, 6), "f4", order)
    check(array, array.data.ptr, array.strides)
    check(Exporter(array), array.data.ptr, array.strides)


@pytest.mark.parametrize("turned", [False, True])
def test_torch(turned):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    array = torch.zeros(6, 4, device="cuda").T if turned else torch.zeros(4, 6, device="cuda")
    strides = tuple(4 * step for step in array.stride())
    check(array, array.data_ptr(), strides)
    check(Exporter(array), array.data_ptr(), strides)


def test_numba():
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    array = cuda.device_array((4, 6), "f4")
    check(array, array.device_ctypes_pointer.value, array.strides)
    stream = cuda.stream()
    array = cuda.device_array((4, 6), "f4", stream=stream)
    assert build_view(array, True, "x").stream == int(stream)
    empty = build_view(cuda.device_array((0, 6), "f4"), True, "x")
    assert (empty.device, empty.count) == (0, 0)


def test_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU")
    array = jax.numpy.zeros((4, 6), "float32")
    check(array, array.unsafe_buffer_pointer(), None, writable=False)
    with pytest.raises(ArgumentError, match="read-only"):
        build_view(array, True, "x")


def test_managed_memory():
    memory = cupy.cuda.malloc_managed(96)
    array = cupy.ndarray((4, 6), "f4", memory)
    check(Exporter(array), memory.ptr, None)
