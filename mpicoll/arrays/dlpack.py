"""The adapter of arrays with DLPack, and a reader of its capsules.

NumPy's own reader refuses bfloat16 and the 8-bit floats; this one serves every row of the dtype
table. Structures as in DLPack 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from mpicoll.arrays import cuda_arrays, numpy_arrays
from mpicoll.arrays.protocols import SupportsDlpack
from mpicoll.arrays.views import Adapter, Alias, Array, View
from mpicoll.cuda.runtime import LEGACY, UNKNOWN
from mpicoll.dtypes import DType, by_dlpack
from mpicoll.errors import UnsupportedError

__all__ = ["build_view", "find_adapter"]

#: kDLCPU and kDLCUDAHost: memory that the host can read and write.
CPU_DEVICES = frozenset({1, 3})
#: kDLCUDA and kDLCUDAManaged.
CUDA_DEVICES = frozenset({2, 13})
_DEVICE_NAMES = {
    1: "cpu", 2: "cuda", 3: "cuda_host", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm",
    13: "cuda_managed", 14: "oneapi",
}  # fmt: skip
_READ_ONLY = 1


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if the array has DLPack."""
    return Adapter(build_view) if hasattr(array, "__dlpack__") else None


def build_view(array: SupportsDlpack, writable: bool, where: str) -> View:
    """Return the view of an array; `adapters.build_view` says more."""
    kind, index = (int(word) for word in array.__dlpack_device__())
    if kind not in CPU_DEVICES | CUDA_DEVICES:
        raise UnsupportedError(
            f"{where}: arrays on {device_name(array)} are not supported; copy to the host "
            "or to a CUDA device first"
        )
    on_device = kind in CUDA_DEVICES
    if on_device:
        cuda_arrays.get_runtime(where)  # raises where there is no CUDA
    try:
        if on_device:
            # The producer makes its work visible to this stream.
            found = open_capsule(array, stream=LEGACY)
        else:
            alias = to_numpy(array)
    except Exception as error:  # whatever the producer raises when it refuses
        raise UnsupportedError(f"{where}: {type(array).__name__}: {error}") from error
    if on_device:
        return cuda_arrays.build_device_view(
            (array, found), found.dtype, index, found.address, found.shape, found.strides, UNKNOWN,
            writable, found.read_only, where,
        )  # fmt: skip
    inner = numpy_arrays.build_view(alias, writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: alias)


# --- capsules -----------------------------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype = ctypes.c_char_p
_capsule_name.argtypes = (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def device_name(array: SupportsDlpack) -> str:
    """Return the device of a DLPack array, as ``cpu`` or ``cuda:1``."""
    kind, index = array.__dlpack_device__()
    name = _DEVICE_NAMES.get(int(kind), f"device type {int(kind)}")
    return name if int(kind) in CPU_DEVICES else f"{name}:{index}"


class _Memory:
    """Offers the host memory of a capsule to NumPy, and keeps it."""

    def __init__(self, capsule: object, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


class DlpackArray(NamedTuple):
    """An array as its capsule describes it; strides in bytes, None in C order."""

    capsule: object
    dtype: DType
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    read_only: bool


def open_capsule(array: SupportsDlpack, **stream: int) -> DlpackArray:
    """Return the array behind a DLPack object; its memory lives as long as the capsule.

    stream: for arrays on a device, the stream that the producer's work has to be visible to.

    Raises UnsupportedError for a dtype that is not in the table, and whatever the producer raises
    if it refuses to export.
    """
    try:
        capsule = array.__dlpack__(max_version=(1, 1), **stream)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(**stream)
    name = _capsule_name(capsule)
    pointer = _capsule_pointer(capsule, name)
    read_only = False
    if name == b"dltensor_versioned":
        versioned = _VersionedTensor.from_address(pointer)
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    else:
        tensor = _ManagedTensor.from_address(pointer).tensor
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    row = by_dlpack.get((code, bits))
    if row is None or lanes != 1:
        raise UnsupportedError(
            f"DLPack type code {code} with {bits} bits and {lanes} lanes is not supported"
        )
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[i] * row.itemsize for i in range(tensor.ndim))
    address = (tensor.data or 0) + tensor.byte_offset
    return DlpackArray(capsule, row, address, shape, strides, read_only)


def to_numpy(array: SupportsDlpack) -> Array:
    """Return a NumPy array on the memory of ``array``, a DLPack object on the host.

    It is read-only if the producer says so. The producer's memory lives as long as the result.
    Raises as `open_capsule` does.
    """
    found = open_capsule(array)
    row = found.dtype
    if 0 in found.shape:
        return np.empty(found.shape, row.numpy)
    # NumPy's array interface cannot express bfloat16: the bytes travel as unsigned integers.
    carrier = f"<u{row.itemsize}" if not row.buffers else row.numpy.str
    interface = {
        "data": (found.address, found.read_only),
        "shape": found.shape,
        "strides": found.strides,
        "typestr": carrier,
        "version": 3,
    }
    return np.asarray(_Memory(found.capsule, interface)).view(row.numpy)
