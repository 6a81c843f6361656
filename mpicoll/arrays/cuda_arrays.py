"""The adapter of arrays with the CUDA array interface: CuPy's, Numba's and others.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html (version 2 or 3)
"""

from __future__ import annotations

import numpy as np

from mpicoll.arrays.checks import check_distinct_elements, dtype_error, read_only_error
from mpicoll.arrays.protocols import SupportsCudaArrayInterface
from mpicoll.arrays.views import Adapter, DeviceView, View
from mpicoll.cuda import runtime
from mpicoll.cuda.runtime import UNKNOWN
from mpicoll.dtypes import DType, Kind, by_numpy
from mpicoll.errors import UnsupportedError

__all__ = ["build_device_view", "find_adapter", "get_runtime"]


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if the array's type has the interface."""
    return Adapter(_build_view) if hasattr(type(array), "__cuda_array_interface__") else None


def _build_view(array: SupportsCudaArrayInterface, writable: bool, where: str) -> View:
    interface = array.__cuda_array_interface__
    address, read_only = interface["data"]
    # The interface cannot express bfloat16 and the 8-bit floats, the array's own dtype can.
    kind = getattr(array, "dtype", None)
    kind = kind if isinstance(kind, np.dtype) else np.dtype(interface["typestr"])
    dtype = by_numpy.get(kind)
    if dtype is None:
        raise dtype_error(kind, where)
    if interface.get("mask") is not None:
        raise UnsupportedError(f"{where}: a masked array would lose its mask")
    index = getattr(getattr(array, "device", None), "id", None)
    if index is None:
        index = get_runtime(where).device_of(address)
    if type(array).__module__.partition(".")[0] == "cupy":
        stream = get_runtime(where).current_stream(
            index
        )  # the interface has that of the current device
    else:
        stream = interface.get("stream") or UNKNOWN
    return build_device_view(
        array, dtype, index, address, tuple(interface["shape"]), interface.get("strides"),
        stream, writable, read_only, where,
    )  # fmt: skip


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
) -> View:
    """Return the view of an array on a device, given what its library says of it.

    address, strides: of the first element, and the bytes between neighbours (None: C order).
    stream:    in which the caller works, or UNKNOWN.
    read_only: the library forbids to write to it.

    Raises UnsupportedError if there is no CuPy; else as `adapters.build_view`.
    """
    get_runtime(where).check_stream(index, stream, where)
    number = dtype.itemsize // (2 if dtype.kind is Kind.COMPLEX else 1)
    found = DeviceView(owner, dtype, index, address, shape, strides, stream)
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
            check_distinct_elements(shape, found.strides, where)
    return found
