"""Checks that the adapters of several array libraries share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.dtypes import by_name, by_numpy
from mpicoll.errors import ArgumentError, UnsupportedError

__all__ = ["check_distinct_elements", "dtype_error", "read_only_error"]


def dtype_error(dtype: np.dtype[Any], where: str) -> UnsupportedError:
    """Return the error for a NumPy dtype that is not in the dtype table."""
    if dtype.newbyteorder("=") in by_numpy:
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
        f"{where}: the array is read-only and would be written to; pass a writable copy"
    )


def check_distinct_elements(shape: Sequence[int], strides: Sequence[int], where: str) -> None:
    """Raise ArgumentError if elements of an output share memory, as in an expanded array."""
    if any(step == 0 and extent > 1 for extent, step in zip(shape, strides, strict=True)):
        raise ArgumentError(
            f"{where}: several elements of the output share one place in memory (an expanded or "
            "broadcast array); pass a copy"
        )
