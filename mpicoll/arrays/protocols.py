"""Protocols of arrays, and the type of arrays that mpicoll's functions accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class SupportsBuffer(Protocol):
    """An object with the buffer protocol. The method exists from Python 3.12 on."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return the memory."""


class SupportsDlpack(Protocol):
    """An array of any library that has DLPack."""

    def __dlpack__(self, *args: Any, **options: Any) -> object:
        """Return a capsule."""

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the type (a number or an enum) and the number of the device."""


class SupportsCudaArrayInterface(Protocol):
    """An array of any library that has the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides, dtype and stream."""


#: A user's array: NumPy, CuPy or JAX array, torch tensor, or another object with one of these
#: protocols. Its dtype, device and layout, and whether it is writable, are checked at run time.
AnyArray = SupportsBuffer | SupportsDlpack | SupportsCudaArrayInterface

#: An argument of a collective: an array, a list of arrays, or None on a rank without one.
Arrays = AnyArray | Sequence[AnyArray] | None
