"""Adapters of JAX arrays and of other arrays with DLPack, and a reader of DLPack capsules.

NumPy's own reader rejects bfloat16 and the 8-bit floats; this reader supports all rows of the dtype
table. Structures follow DLPack 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html), arguments
follow the array API standard, 2024.12
(https://data-apis.org/array-api/2024.12/API_specification/generated/array_api.array.__dlpack__.html).
"""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any, NamedTuple

import numpy as np

from mpicoll.arrays import cuda_arrays, numpy_arrays
from mpicoll.arrays.protocols import SupportsDlpack
from mpicoll.arrays.views import Adapter, Array, View
from mpicoll.cuda.runtime import LEGACY, UNKNOWN
from mpicoll.dtypes import DType, by_dlpack
from mpicoll.errors import ArgumentError, UnsupportedError

#: kDLCPU, kDLCUDAHost and kDLROCMHost: memory that the host can read and write.
_HOST_DEVICES = frozenset({1, 3, 11})
#: kDLCUDA, and kDLCUDAManaged: memory of any device.
_CUDA, _MANAGED = 2, 13
_DEVICE_NAMES = {
    1: "cpu", 2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm",
    11: "rocm_host", 13: "cuda_managed", 14: "oneapi",
}  # fmt: skip
#: Newest supported version. Producers export this version or an older one.
_VERSION = (1, 1)
#: Flags of a capsule.
_READ_ONLY, _COPIED = 1, 2


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if the array has DLPack."""
    if not hasattr(array, "__dlpack__"):
        return None
    return Adapter(build_view, of_type=not hasattr(type(array), "__cuda_array_interface__"))


def find_jax_adapter(array: object) -> Adapter | None:
    """Return the adapter if this is a JAX array."""
    jax = sys.modules.get("jax")
    return Adapter(_build_jax_view) if jax is not None and isinstance(array, jax.Array) else None


def _build_jax_view(array: SupportsDlpack, writable: bool, where: str) -> View:
    # JAX arrays are immutable, but their capsules are not marked as read-only.
    if writable:
        raise ArgumentError(
            f"{where}: a JAX array is read-only and cannot be an output; pass a NumPy array"
        )
    return build_view(array, writable, where)


def build_view(array: SupportsDlpack, writable: bool, where: str) -> View:
    """Return the view of an array. See `adapters.build_view`."""
    prefix = f"{where}: {type(array).__name__}"
    try:
        kind, index = (int(word) for word in array.__dlpack_device__())
    except Exception as error:  # such as an array on several devices
        raise UnsupportedError(f"{prefix}: {error}") from error
    if kind in _HOST_DEVICES:
        try:
            alias = _to_numpy(array, writable)
        except Exception as error:  # any exception of the producer
            raise UnsupportedError(f"{prefix}: {error}") from error
        inner = numpy_arrays.build_view(alias, writable, where)
        return View(array, inner.dtype, inner.count, inner.buffer, lambda _: alias)
    name = _device_name(kind, index)
    if kind not in (_CUDA, _MANAGED):
        raise UnsupportedError(
            f"{where}: arrays on {name} are not supported; copy to the host or to a GPU first"
        )
    runtime = cuda_arrays.get_runtime(where)  # raises if there is no GPU
    try:
        with runtime.on(index):  # producers may require it to be the current device
            # The producer makes its work visible to this stream.
            found = _open_capsule(array, writable, stream=LEGACY)
        if found.device[0] not in (_CUDA, _MANAGED):
            raise UnsupportedError(
                f"__dlpack_device__() returned {name}, but the capsule is on "
                f"{_device_name(*found.device)}"
            )
    except Exception as error:  # any exception of the producer
        raise UnsupportedError(f"{prefix}: {error}") from error
    if kind == _MANAGED and 0 not in found.shape:
        index = runtime.device_of(found.address)
    return cuda_arrays.build_device_view(
        (array, found), found.dtype, index, found.address, found.shape, found.strides, UNKNOWN,
        writable, found.read_only, where,
    )  # fmt: skip


# --- capsules -----------------------------------------------------------------------------------


#: DLTensor: data, device (type, number), ndim, dtype (code, bits, lanes), shape, strides, offset.
_TENSOR = struct.Struct("=QiiiBBHQQQ")
#: The fields before the DLTensor in a versioned capsule: version, context, deleter, flags.
_VERSIONED = struct.Struct("=IIQQQ")

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _device_name(kind: int, index: int) -> str:
    """Return the name of a device from its DLPack type and number, such as ``cuda:1``."""
    name = _DEVICE_NAMES.get(kind, f"device type {kind}")
    return name if kind in _HOST_DEVICES else f"{name}:{index}"


class _Memory:
    """Exports the host memory of a capsule to NumPy, and keeps the capsule alive."""

    def __init__(self, capsule: object, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


class _DlpackArray(NamedTuple):
    """Contents of a capsule. Strides are in bytes, or None for C order; device: type, number."""

    capsule: object
    dtype: DType
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    read_only: bool
    device: tuple[int, int]


def _open_capsule(array: SupportsDlpack, writable: bool, **stream: int) -> _DlpackArray:
    """Return the array behind a DLPack object. Its memory lives as long as the capsule.

    Raises UnsupportedError for an unsupported dtype or version of DLPack, and for a copy of an
    output (``writable``); and any exception of the producer. stream: for arrays on a device.
    """
    copy = {"copy": False} if writable else {}
    try:
        capsule = array.__dlpack__(max_version=_VERSION, **copy, **stream)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(**stream)
    name, flags, start = _capsule_name(capsule), 0, 0
    if name not in (b"dltensor", b"dltensor_versioned"):  # used_dltensor: already consumed
        raise UnsupportedError(f"expected a capsule named dltensor, got {name!r}")
    memory = _capsule_pointer(capsule, name)
    if name == b"dltensor_versioned":
        major, minor, *_, flags = _VERSIONED.unpack(ctypes.string_at(memory, _VERSIONED.size))
        if major != _VERSION[0]:  # the layout of the structure may differ
            raise UnsupportedError(
                f"DLPack {major}.{minor} is not supported; expected {_VERSION[0]}.x"
            )
        start = _VERSIONED.size
    data, kind, index, ndim, code, bits, lanes, extents, steps, offset = _TENSOR.unpack(
        ctypes.string_at(memory + start, _TENSOR.size)
    )
    if writable and flags & _COPIED:
        raise UnsupportedError(
            "DLPack returned a copy of the array, so the output would be lost; pass an array that "
            "can be shared"
        )
    row = by_dlpack.get((code, bits))
    if row is None or lanes != 1:
        raise UnsupportedError(
            f"DLPack type code {code} with {bits} bits and {lanes} lanes is not supported"
        )
    numbers = ctypes.c_int64 * ndim
    shape = tuple(numbers.from_address(extents)) if ndim else ()
    strides = None
    if steps:
        strides = tuple(step * row.itemsize for step in numbers.from_address(steps))
    return _DlpackArray(
        capsule, row, data + offset, shape, strides, bool(flags & _READ_ONLY), (kind, index)
    )


def _to_numpy(array: SupportsDlpack, writable: bool) -> Array:
    """Return a NumPy array on the memory of a DLPack object on the host, which it keeps alive."""
    found = _open_capsule(array, writable)
    if found.device[0] not in _HOST_DEVICES:
        raise UnsupportedError(f"the capsule is on {_device_name(*found.device)}")
    row = found.dtype
    if 0 in found.shape:
        return np.empty(found.shape, row.numpy)
    # NumPy's array interface cannot express bfloat16: export the bytes as unsigned integers.
    carrier = f"<u{row.itemsize}" if not row.buffers else row.numpy.str
    interface = {
        "data": (found.address, found.read_only),
        "shape": found.shape,
        "strides": found.strides,
        "typestr": carrier,
        "version": 3,
    }
    return np.asarray(_Memory(found.capsule, interface)).view(row.numpy)
