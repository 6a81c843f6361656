"""The adapter of objects with the buffer protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.arrays import numpy_arrays
from mpicoll.arrays.views import Adapter, Alias, View

__all__ = ["find_adapter"]


def find_adapter(array: Any) -> Adapter | None:
    """Return the adapter if the object has the buffer protocol."""
    try:
        memoryview(array)
    except (TypeError, BufferError, ValueError):
        return None
    return Adapter(_build_view)


def _build_view(array: Any, writable: bool, where: str) -> View:
    inner = numpy_arrays.build_view(np.asarray(memoryview(array)), writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: inner.array)
