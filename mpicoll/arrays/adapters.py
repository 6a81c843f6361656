"""Views of arrays of any library, built by one adapter for each kind of array.

The adapter is looked up by the type of the array, once per type, except for protocols that only
some arrays of a type have. No array library is imported: if an array exists, its library is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpicoll.arrays import cuda_arrays, dlpack, numpy_arrays, torch_tensors
from mpicoll.arrays.views import Adapter, BuildView, FastView, View, ViewList
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpicoll.output import format_count


def build_view(array: object, writable: bool, where: str) -> View:
    """Return the view of any array, on the host or on a CUDA device.

    array:    a NumPy or CuPy array, a torch tensor, or an object with the buffer protocol, the CUDA
        array interface or DLPack.
    writable: the array is an output.
    where:    operation and argument, for error messages ("broadcast: tensor").

    Raises ArgumentTypeError if it is not an array, ArgumentError for a read-only output, and
    UnsupportedError for a dtype, device or layout that is not supported.
    """
    return _builders.get(array.__class__, _find_and_build)(array, writable, where)


def build_view_list(arrays: object, writable: bool, where: str, length: int) -> ViewList:
    """Return the view of a list of ``length`` arrays of one dtype.

    Raises ArgumentTypeError if ``arrays`` is not a list or tuple, ArgumentError for another length,
    and UnsupportedError if dtypes or devices differ.
    """
    if not isinstance(arrays, (list, tuple)):
        raise ArgumentTypeError(f"{where}: expected a list of arrays, got {type(arrays).__name__}")
    if len(arrays) != length:
        raise ArgumentError(
            f"{where}: expected one array for each of the group's "
            f"{format_count(length, 'rank')}, got {len(arrays)}"
        )
    found = [build_view(a, writable, f"{where}[{i}]") for i, a in enumerate(arrays)]
    dtype = found[0].dtype
    for i, one in enumerate(found):
        if one.dtype is not dtype:
            raise UnsupportedError(
                f"{where}: invalid tensor type: different dtypes in one list: [0] is {dtype}, "
                f"[{i}] is {one.dtype}; convert the arrays to one dtype"
            )
        check_same_device(where, f"[{i}]", one, "[0]", found[0])
    return ViewList(found, dtype)


def check_same_device(where: str, name: str, one: View, other_name: str, other: View) -> None:
    """Raise UnsupportedError if two arrays of a call are on different devices."""
    if one.device != other.device:
        raise UnsupportedError(
            f"{where}: different devices in one call: {other_name} is on {_device_name(other)}, "
            f"{name} on {_device_name(one)}; move them to one device"
        )


def _device_name(view: View) -> str:
    return "the host" if view.device is None else f"cuda:{view.device}"


# --- finding the adapter ------------------------------------------------------------------------

#: One function per kind of array. It returns the adapter for an array of that kind, else None. The
#: first adapter is used.
ADAPTERS: tuple[Callable[[object], Adapter | None], ...] = (
    torch_tensors.find_adapter,
    numpy_arrays.find_adapter,
    dlpack.find_jax_adapter,
    cuda_arrays.find_adapter,
    dlpack.find_adapter,
    numpy_arrays.find_buffer_adapter,
)


#: ``build_view`` of the adapters by type of array, filled on first use of a type.
_builders: dict[type, BuildView] = {np.ndarray: numpy_arrays.build_view}
#: ``fast_view`` of the adapters by type of array.
fast_views: dict[type, FastView] = {np.ndarray: numpy_arrays.fast_view}


def _find_and_build(array: object, writable: bool, where: str) -> View:
    kind = type(array)
    adapter = next(filter(None, (find(array) for find in ADAPTERS)), None)
    if adapter is None:
        raise ArgumentTypeError(
            f"{where}: expected an array (NumPy, CuPy, torch, or anything with the buffer "
            f"protocol, the CUDA array interface or DLPack), got {kind.__name__}"
        )
    if adapter.of_type:
        _builders[kind] = adapter.build_view
    if adapter.fast_view is not None:
        fast_views[kind] = adapter.fast_view
    return adapter.build_view(array, writable, where)
