"""Adapters of CuPy arrays, and of other arrays with the CUDA array interface, such as Numba's.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html (version 3 and older)
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpicoll.arrays.checks import check_distinct_elements, dtype_error, read_only_error
from mpicoll.arrays.protocols import SupportsCudaArrayInterface
from mpicoll.arrays.views import Adapter, DeviceView, View
from mpicoll.cuda import runtime
from mpicoll.cuda.runtime import UNKNOWN
from mpicoll.cuda.streams import CurrentStreams
from mpicoll.dtypes import DType, Kind, by_numpy
from mpicoll.errors import UnsupportedError

#: Newest version of the interface.
_VERSION = 3


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter of a CuPy array or of an object with the CUDA array interface, else None.
    The interface is checked for each object, because objects of one type may lack it.
    """
    if isinstance(array, getattr(sys.modules.get("cupy"), "ndarray", ())):
        return Adapter(_build_cupy_view)
    if hasattr(array, "__cuda_array_interface__"):
        return Adapter(_build_view, of_type=False)
    return None


def _build_cupy_view(array: Any, writable: bool, where: str) -> View:
    # The interface lacks bfloat16, and its stream is the one of the current device.
    index = array.device.id
    stream = get_runtime(where).current_stream(index)
    return build_device_view(
        array, _find_dtype(array.dtype, where), index, array.data.ptr, array.shape, array.strides,
        stream, writable, False, where, _CUPY,
    )  # fmt: skip


#: Current streams of CuPy.
_CUPY = CurrentStreams(
    lambda index: runtime.get_runtime().current_stream(index),
    lambda index, stream: runtime.get_runtime().using(index, stream),
)


def _build_view(array: SupportsCudaArrayInterface, writable: bool, where: str) -> View:
    interface = array.__cuda_array_interface__
    try:
        address, read_only = interface["data"]
        shape, typestr, version = interface["shape"], interface["typestr"], interface["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{where}: the CUDA array interface of {type(array).__name__} must have shape, "
            f"typestr, data (address and read-only flag) and version, got {interface!r}"
        ) from error
    if version > _VERSION:
        raise UnsupportedError(
            f"{where}: version {version} of the CUDA array interface is not supported; expected "
            f"{_VERSION} or older"
        )
    if interface.get("mask") is not None:
        raise UnsupportedError(f"{where}: masked arrays are not supported")
    stream, strides = interface.get("stream"), interface.get("strides")
    if stream == 0:
        raise UnsupportedError(
            f"{where}: the CUDA array interface of {type(array).__name__} has stream 0, which is "
            "ambiguous; expected 1 (legacy default stream), 2 (per-thread default stream), the "
            "address of a stream, or None"
        )
    # The interface cannot express bfloat16 and the 8-bit floats, but the dtype of the array can.
    kind = getattr(array, "dtype", None)
    dtype = _find_dtype(kind if isinstance(kind, np.dtype) else np.dtype(typestr), where)
    cuda, shape = get_runtime(where), tuple(shape)
    index = getattr(getattr(array, "device", None), "id", None)
    if not isinstance(index, int):
        # An array without elements has no address and may be on any device.
        index = cuda.current_device() if 0 in shape else cuda.device_of(address)
    return build_device_view(
        array, dtype, index, address, shape, None if strides is None else tuple(strides),
        UNKNOWN if stream is None else stream, writable, read_only, where,
    )  # fmt: skip


def _find_dtype(kind: np.dtype[Any], where: str) -> DType:
    found = by_numpy.get(kind)
    if found is None:
        raise dtype_error(kind, where)
    return found


def get_runtime(where: str) -> runtime.Runtime:
    """Return the Runtime (CUDA through CuPy). Raises UnsupportedError that names ``where``."""
    try:
        return runtime.get_runtime()
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error


def build_device_view(
    owner: object,
    dtype: DType,
    index: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    stream: int,
    writable: bool,
    read_only: bool,
    where: str,
    library: CurrentStreams | None = None,
) -> View:
    """Return the view of an array on a device, from the attributes that its library reports.

    address, strides: of the first element, and the bytes between neighbors (None: C order).
    stream:    the caller's stream, or UNKNOWN.
    read_only: the library forbids writing.
    library:   current streams of the array's library; None if it has none.

    Raises UnsupportedError without CuPy, and the errors of `adapters.build_view`.
    """
    get_runtime(where)
    number = dtype.itemsize // (2 if dtype.kind is Kind.COMPLEX else 1)
    found = DeviceView(owner, dtype, index, address, shape, strides, stream, library)
    # Kernels read numbers of contiguous arrays, and elements of other arrays.
    offsets = [address % number]
    if found.buffer is None:
        offsets = [offset % dtype.itemsize for offset in (address, *found.strides)]
    if any(offsets):
        raise UnsupportedError(
            f"{where}: elements of an array on a GPU must be aligned to their size; pass a copy"
        )
    if writable:
        if read_only:
            raise read_only_error(where)
        if found.buffer is None:
            check_distinct_elements(shape, found.strides, dtype.itemsize, where)
    return found
