"""The protocols of arrays, and the type of what mpicoll's functions take as an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = [
    "AnyArray", "Arrays", "SupportsBuffer", "SupportsCudaArrayInterface", "SupportsDlpack",
]  # fmt: skip


class SupportsBuffer(Protocol):
    """An object with the buffer protocol, which type checkers know by the method of Python 3.12."""

    def __buffer__(self, flags: int, /) -> memoryview:
        """Return the memory."""


class SupportsDlpack(Protocol):
    """An array of any library that has DLPack."""

    def __dlpack__(self, *args: Any, **options: Any) -> object:
        """Return a capsule."""

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the type and the number of the device; the type is a number, or an enum's."""


class SupportsCudaArrayInterface(Protocol):
    """An array of any library that has the CUDA array interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Address, shape, strides, dtype and stream."""


#: A user's array: NumPy's, CuPy's or JAX's, a torch tensor, or another object with one of these
#: protocols. What a type cannot say is checked: that it is writable, its dtype, device and layout.
AnyArray = SupportsBuffer | SupportsDlpack | SupportsCudaArrayInterface

#: An argument of a collective: an array, a list of arrays, or None on a rank that gives none.
Arrays = AnyArray | Sequence[AnyArray] | None
