"""Checks that the adapters of several array libraries share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mpicoll.dtypes import by_name, by_numpy
from mpicoll.errors import ArgumentError, UnsupportedError


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
    """Raise ArgumentError if elements of an output may share memory, as in an expanded array.

    They do not if each dimension steps over the whole dimension with the next smaller stride, as in
    all slices and transpositions of contiguous arrays.

    strides: distance between neighbors, in the unit of ``itemsize``, the size of an element.
    """
    dimensions = zip(map(abs, strides), shape, strict=True)
    span = itemsize  # up to the end of the last element
    for step, extent in sorted(one for one in dimensions if one[1] > 1 and 0 not in shape):
        if step < span:
            raise ArgumentError(
                f"{where}: elements of the output share memory (an expanded, broadcast or "
                "overlapping view); pass a copy"
            )
        span += (extent - 1) * step
