"""The adapter of JAX arrays, which are read through DLPack."""

from __future__ import annotations

import sys

from mpicoll.arrays import dlpack
from mpicoll.arrays.protocols import SupportsDlpack
from mpicoll.arrays.views import Adapter, View
from mpicoll.errors import ArgumentError

__all__ = ["find_adapter"]


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if this is a JAX array."""
    jax = sys.modules.get("jax")
    return Adapter(_build_view) if jax is not None and isinstance(array, jax.Array) else None


def _build_view(array: SupportsDlpack, writable: bool, where: str) -> View:
    # JAX promises that an array never changes, which its capsules cannot say.
    if writable:
        raise ArgumentError(
            f"{where}: a JAX array is read-only and would be written to; pass a NumPy array"
        )
    return dlpack.build_view(array, writable, where)
