"""Adapters of JAX arrays and of other arrays with DLPack, and a reader of DLPack capsules.

NumPy's own reader rejects bfloat16 and the 8-bit floats; this reader supports all rows of the dtype
table. Structures follow DLPack 1.1 (https://dmlc.github.io/dlpack/latest/c_api.html), arguments
follow the array API standard, 2024.12
(https://data-apis.org/array-api/2024.12/API_specification/generated/array_api.array.__dlpack__.html).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, NamedTuple

import numpy as np

from mpicoll.arrays import cuda_arrays, numpy_arrays
from mpicoll.arrays.protocols import SupportsDlpack
from mpicoll.arrays.views import Adapter, Alias, Array, View
from mpicoll.cuda.runtime import CUDA, ROCM, UNKNOWN
from mpicoll.dtypes import DType, by_dlpack
from mpicoll.errors import ArgumentError, UnsupportedError

__all__ = ["build_view", "find_adapter", "find_jax_adapter"]

#: kDLCPU, kDLCUDAHost and kDLROCMHost: memory that the host can read and write.
HOST_DEVICES = frozenset({1, 3, 11})
#: kDLCUDAManaged: memory of any device.
_MANAGED = 13


class _Kind(NamedTuple):
    """Constants of DLPack for one kind of runtime.

    devices: device types.
    stream:  legacy default stream.
    """

    devices: frozenset[int]
    stream: int


_KINDS = {CUDA: _Kind(frozenset({2, _MANAGED}), 1), ROCM: _Kind(frozenset({10}), 0)}
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
    if kind in HOST_DEVICES:
        try:
            alias = to_numpy(array, writable)
        except Exception as error:  # any exception of the producer
            raise UnsupportedError(f"{prefix}: {error}") from error
        inner = numpy_arrays.build_view(alias, writable, where)
        return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: alias)
    name = device_name(kind, index)
    if not any(kind in each.devices for each in _KINDS.values()):
        raise UnsupportedError(
            f"{where}: arrays on {name} are not supported; copy to the host or to a GPU first"
        )
    runtime = cuda_arrays.get_runtime(where)  # raises if there is no GPU
    own = _KINDS[runtime.kind()]
    if kind not in own.devices:
        raise UnsupportedError(
            f"{where}: arrays on {name} are not supported by a CuPy that is built for "
            f"{runtime.kind()}; copy to the host first, or install another CuPy"
        )
    try:
        with runtime.on(index):  # producers may require it to be the current device
            # The producer makes its work visible to this stream.
            found = open_capsule(array, writable, stream=own.stream)
        if found.device[0] not in own.devices:
            raise UnsupportedError(
                f"__dlpack_device__() returned {name}, but the capsule is on "
                f"{device_name(*found.device)}"
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


def device_name(kind: int, index: int) -> str:
    """Return the name of a device, such as ``cpu`` or ``cuda:1``.

    kind, index: DLPack type and number.
    """
    name = _DEVICE_NAMES.get(kind, f"device type {kind}")
    return name if kind in HOST_DEVICES else f"{name}:{index}"


class _Memory:
    """Exports the host memory of a capsule to NumPy, and keeps the capsule alive."""

    def __init__(self, capsule: object, interface: dict[str, Any]) -> None:
        self.capsule = capsule
        self.__array_interface__ = interface


class DlpackArray(NamedTuple):
    """Contents of a capsule. Strides are in bytes; None means C order.

    device: DLPack type and number.
    """

    capsule: object
    dtype: DType
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    read_only: bool
    device: tuple[int, int]


def open_capsule(array: SupportsDlpack, writable: bool, **stream: int) -> DlpackArray:
    """Return the array behind a DLPack object. Its memory lives as long as the capsule.

    writable: the array is an output, so a copy is rejected.
    stream:   for arrays on a device, the stream on which the producer's work must be visible.

    Raises UnsupportedError for an unsupported dtype or version of DLPack, and for a copy of an
    output. Raises any exception of the producer.
    """
    copy = {"copy": False} if writable else {}
    try:
        capsule = array.__dlpack__(max_version=_VERSION, **copy, **stream)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(**stream)
    name, flags = _capsule_name(capsule), 0
    if name == b"dltensor_versioned":
        versioned = _VersionedTensor.from_address(_capsule_pointer(capsule, name))
        if versioned.major != _VERSION[0]:  # the layout of the structure may differ
            raise UnsupportedError(
                f"DLPack {versioned.major}.{versioned.minor} is not supported; expected "
                f"{_VERSION[0]}.x"
            )
        tensor, flags = versioned.tensor, versioned.flags
    elif name == b"dltensor":
        tensor = _ManagedTensor.from_address(_capsule_pointer(capsule, name)).tensor
    else:  # used_dltensor: the capsule is already consumed
        raise UnsupportedError(f"expected a capsule named dltensor, got {name!r}")
    if writable and flags & _COPIED:
        raise UnsupportedError(
            "DLPack returned a copy of the array, so the output would be lost; pass an array that "
            "can be shared"
        )
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
    device = tensor.device.type, tensor.device.id
    return DlpackArray(capsule, row, address, shape, strides, bool(flags & _READ_ONLY), device)


def to_numpy(array: SupportsDlpack, writable: bool) -> Array:
    """Return a NumPy array on the memory of ``array``, a DLPack object on the host.

    It is read-only if the producer reports that. The memory lives as long as the result. Raises the
    errors of `open_capsule`.
    """
    found = open_capsule(array, writable)
    if found.device[0] not in HOST_DEVICES:
        raise UnsupportedError(f"the capsule is on {device_name(*found.device)}")
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
