"""Views of GPU arrays of CuPy, torch, Numba and JAX, and of their DLPack capsules."""

from __future__ import annotations

import cupy
import pytest

from mpicoll.arrays.adapters import build_view
from mpicoll.errors import ArgumentError


class Exporter:
    """An array with DLPack only."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def of_cupy():
    """Yield arrays of float32 with the address and strides that the library reports."""
    managed = cupy.ndarray((4, 6), "f4", cupy.cuda.malloc_managed(96))
    for array in (managed, cupy.zeros((4, 6), "f4"), cupy.zeros((4, 6), "f4", "F")):
        yield array, array.data.ptr, array.strides


def of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    for array in (torch.zeros(4, 6, device="cuda"), torch.zeros(6, 4, device="cuda").T):
        yield array, array.data_ptr(), tuple(4 * step for step in array.stride())


def of_numba():
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    for stream in (0, cuda.stream()):
        array = cuda.device_array((4, 6), "f4", stream=stream)
        yield array, array.device_ctypes_pointer.value, array.strides
    assert build_view(array, True, "x").stream == int(stream)
    empty = build_view(cuda.device_array((0, 6), "f4"), True, "x")
    assert (empty.device, empty.count) == (0, 0)


@pytest.mark.parametrize("arrays", [of_cupy, of_torch, of_numba])
def test_views(arrays):
    for array, address, strides in arrays():
        exporters = [Exporter(array)] if hasattr(array, "__dlpack__") else []
        for each in (array, *exporters):
            found = build_view(each, True, "x")
            assert (found.device, found.address, found.shape) == (0, address, (4, 6))
            assert found.strides == strides and found.dtype.name == "float32"


def test_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU")
    array = jax.numpy.zeros((4, 6), "float32")
    found = build_view(array, False, "x")
    assert (found.device, found.address) == (0, array.unsafe_buffer_pointer())
    with pytest.raises(ArgumentError, match="read-only"):
        build_view(array, True, "x")
