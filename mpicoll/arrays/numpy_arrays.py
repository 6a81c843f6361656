"""Adapters of NumPy arrays, and of other objects with the buffer protocol."""

from __future__ import annotations

import numpy as np

from mpicoll.arrays.checks import check_distinct_elements, dtype_error, read_only_error
from mpicoll.arrays.protocols import SupportsBuffer
from mpicoll.arrays.views import CARRIERS, Adapter, Array, Buffer, View, from_numpy
from mpicoll.dtypes import DType, by_numpy
from mpicoll.errors import ArgumentTypeError, UnsupportedError


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if this is a NumPy array or scalar. Unsupported kinds raise later."""
    if isinstance(array, np.ma.MaskedArray):
        return Adapter(_refuse_masked)
    if isinstance(array, np.ndarray):
        if type(array) is np.ndarray:
            return Adapter(build_view, fast_view)
        # A subclass, such as numpy.memmap or numpy.matrix.
        return Adapter(lambda one, *others: build_view(one.view(np.ndarray), *others))
    return Adapter(_refuse_scalar) if isinstance(array, np.generic) else None


def fast_view(array: Array) -> tuple[DType, Buffer, int] | None:
    """Return dtype, buffer and count of a plain writable array, else None."""
    dtype = by_numpy.get(array.dtype)
    # carray: C-contiguous, aligned and writeable.
    if dtype is None or not array.flags.carray:
        return None
    return dtype, array if dtype.buffers else array.view(CARRIERS[dtype.itemsize]), array.size


def build_view(array: Array, writable: bool, where: str) -> View:
    """Return the view of an array. See `adapters.build_view`."""
    dtype = by_numpy.get(array.dtype)
    if dtype is None:
        raise dtype_error(array.dtype, where)
    flags = array.flags
    if flags.carray or (not writable and flags.c_contiguous and flags.aligned):
        return from_numpy(array, dtype)
    if writable:
        if not flags.writeable:
            raise read_only_error(where)
        check_distinct_elements(array.shape, array.strides, dtype.itemsize, where)
    return View(array, dtype, array.size, None)


def _refuse_scalar(array: object, writable: bool, where: str) -> View:
    result = ", and read the result from it" if writable else ""
    raise ArgumentTypeError(
        f"{where}: expected an array, got a NumPy scalar, {type(array).__name__}, which has no "
        f"memory to send from or receive into; pass np.array(x), or x.reshape(1){result}"
    )


def _refuse_masked(array: object, writable: bool, where: str) -> View:
    raise UnsupportedError(
        f"{where}: numpy.ma.MaskedArray is not supported; pass .filled() or .data"
    )


def find_buffer_adapter(array: object) -> Adapter | None:
    """Return the adapter if the object has the buffer protocol."""
    try:
        memoryview(array)  # type: ignore[arg-type]
    except (TypeError, BufferError, ValueError):
        return None
    return Adapter(_build_buffer_view)


def _build_buffer_view(array: SupportsBuffer, writable: bool, where: str) -> View:
    inner = build_view(np.asarray(memoryview(array)), writable, where)
    return View(array, inner.dtype, inner.count, inner.buffer, lambda _: inner.array)
