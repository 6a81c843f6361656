"""The adapter of objects with the buffer protocol."""

from __future__ import annotations

import numpy as np

from mpicoll.arrays import numpy_arrays
from mpicoll.arrays.protocols import SupportsBuffer
from mpicoll.arrays.views import Adapter, Alias, View

__all__ = ["find_adapter"]


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if the object has the buffer protocol."""
    try:
        memoryview(array)  # type: ignore[arg-type]  # which is the question
    except (TypeError, BufferError, ValueError):
        return None
    return Adapter(_build_view)


def _build_view(array: SupportsBuffer, writable: bool, where: str) -> View:
    inner = numpy_arrays.build_view(np.asarray(memoryview(array)), writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: inner.array)
