"""The adapters of CuPy's arrays, and of others with the CUDA array interface, such as Numba's.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html (version 3, and those before)
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

__all__ = ["build_device_view", "find_adapter", "get_runtime"]

#: The newest version of the interface.
_VERSION = 3


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if this is CuPy's, or has the interface: arrays on the host may lack it
    though others of their type have it.
    """
    if isinstance(array, getattr(sys.modules.get("cupy"), "ndarray", ())):
        return Adapter(_build_cupy_view)
    if hasattr(array, "__cuda_array_interface__"):
        return Adapter(_build_view, of_type=False)
    return None


def _build_cupy_view(array: Any, writable: bool, where: str) -> View:
    """By CuPy's own attributes: the interface has no bfloat16, and its stream is that of the
    current device.
    """
    index = array.device.id
    stream = get_runtime(where).current_stream(index)
    return build_device_view(
        array, _find_dtype(array.dtype, where), index, array.data.ptr, array.shape, array.strides,
        stream, writable, False, where, _CUPY,
    )  # fmt: skip


#: CuPy's.
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
            f"{where}: the CUDA array interface of {type(array).__name__} has to have shape, "
            f"typestr, data (address and whether it is read-only) and version, got {interface!r}"
        ) from error
    if version > _VERSION:
        raise UnsupportedError(
            f"{where}: version {version} of the CUDA array interface is not known here; expected "
            f"{_VERSION} at most"
        )
    if interface.get("mask") is not None:
        raise UnsupportedError(f"{where}: a masked array would lose its mask")
    stream, strides = interface.get("stream"), interface.get("strides")
    if stream == 0:
        raise UnsupportedError(
            f"{where}: the CUDA array interface of {type(array).__name__} says stream 0, which may "
            "mean several; expected 1 (the legacy default stream), 2 (that of the thread), the "
            "address of a stream, or None"
        )
    # The interface cannot express bfloat16 and the 8-bit floats, the array's own dtype can.
    kind = getattr(array, "dtype", None)
    dtype = _find_dtype(kind if isinstance(kind, np.dtype) else np.dtype(typestr), where)
    cuda, shape = get_runtime(where), tuple(shape)
    index = getattr(getattr(array, "device", None), "id", None)
    if not isinstance(index, int):
        # An array without elements has no address, and is on any device.
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
    """Return the CUDA runtime; if there is none, the error says for which argument."""
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
    """Return the view of an array on a device, given what its library says of it.

    address, strides: of the first element, and the bytes between neighbours (None: C order).
    stream:    in which the caller works, or UNKNOWN.
    read_only: the library forbids to write to it.
    library:   tells the caller's current streams later, if it has such.

    Raises UnsupportedError if there is no CuPy; else as `adapters.build_view`.
    """
    get_runtime(where)
    number = dtype.itemsize // (2 if dtype.kind is Kind.COMPLEX else 1)
    found = DeviceView(owner, dtype, index, address, shape, strides, stream, library)
    # Kernels go over numbers in contiguous arrays, over elements in others.
    places = [address % number]
    if found.buffer is None:
        places = [place % dtype.itemsize for place in (address, *found.strides)]
    if any(places):
        raise UnsupportedError(
            f"{where}: the elements of an array on a GPU have to begin at multiples of their size; "
            "pass a copy"
        )
    if writable:
        if read_only:
            raise read_only_error(where)
        if found.buffer is None:
            check_distinct_elements(shape, found.strides, dtype.itemsize, where)
    return found
