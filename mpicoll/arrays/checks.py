"""Checks that the adapters of several array libraries share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mpicoll.dtypes import by_name, by_numpy
from mpicoll.errors import ArgumentError, UnsupportedError

__all__ = ["check_distinct_elements", "dtype_error", "read_only_error"]


def dtype_error(dtype: np.dtype[Any], where: str) -> UnsupportedError:
    """Return the error for a NumPy dtype that is not in the dtype table."""
    native = None
    with suppress(TypeError):  # dtypes such as StringDType have no byte order
        native = dtype.newbyteorder("=")
    if native in by_numpy:
        return UnsupportedError(
            f"{where}: {dtype.str} is not in this machine's byte order; "
            "convert with array.astype(array.dtype.newbyteorder('='))"
        )
    return UnsupportedError(
        f"{where}: dtype {dtype} is not supported; expected one of {', '.join(by_name)}"
    )


def read_only_error(where: str) -> ArgumentError:
    """Return the error for an output that is read-only."""
    return ArgumentError(
        f"{where}: the array is read-only and cannot be an output; pass a writable copy"
    )


def check_distinct_elements(
    shape: Sequence[int], strides: Sequence[int], itemsize: int, where: str
) -> None:
    """Raise ArgumentError if elements of an output share memory, as in an expanded array.

    strides: distance between neighbors, in the unit of ``itemsize``, the size of an element.
    """
    if _has_overlap(shape, strides, itemsize):
        raise ArgumentError(
            f"{where}: elements of the output share memory (an expanded, broadcast or overlapping "
            "view); pass a copy"
        )


def _has_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    if 0 in shape:
        return False
    dimensions = sorted(
        (abs(step), extent) for extent, step in zip(shape, strides, strict=True) if extent > 1
    )
    span, is_nested = itemsize, True  # span: up to the end of the last element
    for step, extent in dimensions:
        is_nested = is_nested and step >= span  # the parts do not overlap, as in most arrays
        span += (extent - 1) * step
    if is_nested:
        return False
    if math.prod(shape) * itemsize > span:  # more elements than the memory can hold
        return True
    starts = np.zeros(1, np.int64)
    for step, extent in dimensions:
        starts = np.add.outer(starts, np.arange(extent, dtype=np.int64) * step).ravel()
    starts.sort()
    return bool((np.diff(starts) < itemsize).any())
