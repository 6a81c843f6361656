"""Any array becomes a View: where its elements are, how many, of what dtype, on which device.

An array library is recognised by the type of the array, once for each type, and never imported:
an array of a library can only exist once the library is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.arrays import dlpack
from mpicoll.arrays.views import CARRIERS, Alias, DeviceView, View, ViewList, from_numpy
from mpicoll.cuda import runtime
from mpicoll.cuda.runtime import LEGACY, UNKNOWN
from mpicoll.dtypes import DType, Kind, by_name, by_numpy
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError

__all__ = ["build_view", "build_view_list", "check_same_device", "fast_views"]

Array = np.ndarray[Any, Any]


def build_view(array: Any, writable: bool, where: str) -> View:
    """The View of any array, on the host or on a CUDA device.

    array:    a NumPy or CuPy array, a torch tensor, or an object with the buffer protocol, the
              CUDA array interface or DLPack.
    writable: the array will be written to.
    where:    operation and argument, for the message ("broadcast: tensor").

    Raises ArgumentTypeError for what is not an array, ArgumentError for a read-only output and
    UnsupportedError for a dtype, device or layout that cannot be served.
    """
    return _adapters[array.__class__](array, writable, where)


def build_view_list(arrays: Any, writable: bool, where: str, length: int) -> ViewList:
    """The view of a list of ``length`` arrays of one dtype.

    Raises ArgumentTypeError where ``arrays`` is no list or tuple, ArgumentError for another
    length and UnsupportedError where the dtypes differ.
    """
    if not isinstance(arrays, (list, tuple)):
        raise ArgumentTypeError(f"{where}: expected a list of arrays, got {type(arrays).__name__}")
    if len(arrays) != length:
        raise ArgumentError(
            f"{where}: expected one array for each of the group's {length} ranks, got {len(arrays)}"
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
    """Raises UnsupportedError where two arrays of a call are not on one device."""
    if one.device != other.device:
        raise UnsupportedError(
            f"{where}: different devices in one call: {other_name} is on {_place(other)}, {name} "
            f"on {_place(one)}; move them to one"
        )


def _place(view: View) -> str:
    return "the host" if view.device is None else f"cuda:{view.device}"


# --- the array libraries -----------------------------------------------------------------------

Adapter = Callable[[Any, bool, str], View]
#: The quick look at an array that may be written to: dtype, buffer and count where it is one
#: contiguous block with nothing unusual about it, else None; never raises.
FastView = Callable[[Any], "tuple[DType, Any, int] | None"]


def _fast_view_numpy(array: Array) -> tuple[DType, Any, int] | None:
    dtype = by_numpy.get(array.dtype)
    # carray: C-contiguous, aligned and writeable, in one look.
    if dtype is None or not array.flags.carray:
        return None
    return dtype, array if dtype.buffers else array.view(CARRIERS[dtype.itemsize]), array.size


def _numpy(array: Array, writable: bool, where: str) -> View:
    dtype = by_numpy.get(array.dtype)
    if dtype is None:
        raise UnsupportedError(_dtype_message(array.dtype, where))
    flags = array.flags
    if flags.carray or (not writable and flags.c_contiguous and flags.aligned):
        return from_numpy(array, dtype)
    if writable:
        if not flags.writeable:
            raise ArgumentError(
                f"{where}: the array is read-only and would be written to; pass a writable copy"
            )
        _refuse_overlap(array.shape, array.strides, where)
    return View(array, dtype, array.size, None)


def _dtype_message(dtype: np.dtype[Any], where: str) -> str:
    if dtype.newbyteorder("=") in by_numpy:
        return (
            f"{where}: {dtype.str} is not in this machine's byte order; "
            "convert with array.astype(array.dtype.newbyteorder('='))"
        )
    return f"{where}: dtype {dtype} is not supported; expected one of {', '.join(by_name)}"


def _refuse_overlap(shape: Sequence[int], strides: Sequence[int], where: str) -> None:
    """Refuses an output whose elements share memory, as a broadcast or expanded array's do."""
    if any(step == 0 and extent > 1 for extent, step in zip(shape, strides, strict=True)):
        raise ArgumentError(
            f"{where}: several elements of the output share one place in memory (an expanded or "
            "broadcast array); pass a copy"
        )


def _subclass(array: Any, writable: bool, where: str) -> View:
    """numpy.memmap, numpy.matrix and others, whose own rules for shapes do not matter here."""
    return _numpy(array.view(np.ndarray), writable, where)


def _scalar(array: Any, writable: bool, where: str) -> View:
    result = ", and read the result from that" if writable else ""
    raise ArgumentTypeError(
        f"{where}: expected an array, got a NumPy scalar, {type(array).__name__}, a value without "
        f"memory to send from or receive into; pass np.array(x), or x.reshape(1){result}"
    )


def _masked(array: Any, writable: bool, where: str) -> View:
    raise UnsupportedError(
        f"{where}: a numpy.ma.MaskedArray would lose its mask; pass .filled() or .data"
    )


def _buffer(array: Any, writable: bool, where: str) -> View:
    inner = _numpy(np.asarray(memoryview(array)), writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: inner.array)


def _dlpack(array: Any, writable: bool, where: str) -> View:
    kind, index = (int(word) for word in array.__dlpack_device__())
    if kind not in dlpack.CPU_DEVICES | dlpack.CUDA_DEVICES:
        raise UnsupportedError(
            f"{where}: arrays on {dlpack.device_name(array)} are not supported; copy to the host "
            "or to a CUDA device first"
        )
    on_device = kind in dlpack.CUDA_DEVICES
    if on_device:
        _runtime(where)  # or there is no use in asking
    try:
        if on_device:
            # The producer makes its work visible to the stream that it is told.
            found = dlpack.open_capsule(array, stream=LEGACY)
        else:
            alias = dlpack.to_numpy(array)
    except Exception as error:  # whatever the producer raises when it refuses
        raise UnsupportedError(f"{where}: {type(array).__name__}: {error}") from error
    if on_device:
        return _on_device(
            (array, found), found.dtype, index, found.address, found.shape, found.strides, UNKNOWN,
            writable, found.read_only, where,
        )  # fmt: skip
    inner = _numpy(alias, writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: alias)


def _cuda(array: Any, writable: bool, where: str) -> View:
    """CuPy's arrays, Numba's, and whatever else has the CUDA array interface (version 2 or 3).

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """
    interface = array.__cuda_array_interface__
    address, read_only = interface["data"]
    # The interface has no word for bfloat16 and the 8-bit floats, the array's own dtype has.
    kind = getattr(array, "dtype", None)
    kind = kind if isinstance(kind, np.dtype) else np.dtype(interface["typestr"])
    dtype = by_numpy.get(kind)
    if dtype is None:
        raise UnsupportedError(_dtype_message(kind, where))
    if interface.get("mask") is not None:
        raise UnsupportedError(f"{where}: a masked array would lose its mask")
    index = getattr(getattr(array, "device", None), "id", None)
    if index is None:
        index = _runtime(where).device_of(address)
    if type(array).__module__.partition(".")[0] == "cupy":
        stream = _runtime(where).current_stream(index)  # the interface tells another device's
    else:
        stream = interface.get("stream") or UNKNOWN
    return _on_device(
        array, dtype, index, address, tuple(interface["shape"]), interface.get("strides"),
        stream, writable, read_only, where,
    )  # fmt: skip


def _runtime(where: str) -> runtime.Runtime:
    try:
        return runtime.get_runtime()
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error


def _on_device(
    owner: Any,
    dtype: DType,
    index: int,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    stream: int,
    writable: bool,
    read_only: bool,
    where: str,
) -> View:
    """The view of an array on a device; raises UnsupportedError where there is no CuPy."""
    _runtime(where).check_stream(index, stream, where)
    number = dtype.itemsize // (2 if dtype.kind is Kind.COMPLEX else 1)
    found = DeviceView(owner, dtype, index, address, shape, strides, stream)
    # Kernels go over numbers where all lie side by side, over elements where they do not.
    places = [address % number]
    if found.buffer is None:
        places = [place % dtype.itemsize for place in (address, *found.strides)]
    if any(places):
        raise UnsupportedError(
            f"{where}: the elements of an array on a GPU have to begin at multiples of their size; "
            "pass a copy"
        )
    if writable:
        if read_only:
            raise ArgumentError(
                f"{where}: the array is read-only and would be written to; pass a writable copy"
            )
        if found.buffer is None:
            _refuse_overlap(shape, found.strides, where)
    return found


def _jax(array: Any, writable: bool, where: str) -> View:
    # JAX's capsules have no word for what JAX promises: that an array never changes.
    if writable:
        raise ArgumentError(
            f"{where}: a JAX array is read-only and would be written to; pass a NumPy array"
        )
    return _dlpack(array, writable, where)


def _torch(torch: Any) -> tuple[FastView, Adapter]:
    """For torch tensors: address and count straight from the tensor."""
    from mpi4py import MPI

    from_address = MPI.buffer.fromaddress
    strided = torch.strided
    rows = {getattr(torch, name): row for name, row in by_name.items() if hasattr(torch, name)}
    direct = {torch.Tensor, torch.nn.Parameter}

    def alias(tensor: Any) -> Array:
        """Not Tensor.numpy(), which forbids for ever that the storage is resized, as FSDP does."""
        row, shape = rows[tensor.dtype], tuple(tensor.shape)
        if not tensor.numel():
            return np.empty(shape, row.numpy)
        steps = tensor.stride()
        last = sum((extent - 1) * step for extent, step in zip(shape, steps, strict=True))
        memory: Any = from_address(tensor.data_ptr(), (last + 1) * row.itemsize)
        strides = [step * row.itemsize for step in steps]
        found: Array = np.ndarray(shape, row.numpy, memory, strides=strides)
        return found

    def refuse(tensor: Any, where: str, writable: bool) -> None:
        kind = type(tensor)
        if kind not in direct and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise UnsupportedError(
                f"{where}: a {kind.__name__} is not one block of memory; pass the local tensor"
            )
        if tensor.layout is not strided:
            raise UnsupportedError(
                f"{where}: a tensor of layout {tensor.layout} is not supported; expected a dense "
                "tensor (to_dense())"
            )
        if not tensor.is_cpu and (not tensor.is_cuda or torch.version.cuda is None):
            raise UnsupportedError(
                f"{where}: tensors on {tensor.device} are not supported; copy to the host or to a "
                "CUDA device first"
            )
        if tensor.dtype not in rows:
            raise UnsupportedError(
                f"{where}: {tensor.dtype} is not supported; expected one of {', '.join(by_name)}"
            )
        if writable and (tensor.is_neg() or tensor.is_conj()):
            raise UnsupportedError(
                f"{where}: the tensor is a lazy conjugate or negative view and would be written "
                "to; pass resolve_conj().resolve_neg()"
            )

    # Complex tensors may be lazy conjugates, which takes one more look.
    plain = {kind: row for kind, row in rows.items() if row.kind is not Kind.COMPLEX}

    def fast_view(tensor: Any) -> tuple[DType, Any, int] | None:
        row = plain.get(tensor.dtype)
        if row is None or not tensor.is_cpu or tensor.is_neg():
            return None
        try:
            if not tensor.is_contiguous():
                return None
            count = tensor.numel()
            return row, from_address(tensor.data_ptr(), count * row.itemsize), count
        except (RuntimeError, ValueError):  # not one block of memory, or none at all
            return None

    def adapter(tensor: Any, writable: bool, where: str) -> View:
        if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor: a result on its way
            tensor = tensor.trigger_wait()
        seen = fast_view(tensor) if type(tensor) in direct else None
        if seen is None:
            refuse(tensor, where, writable)
            tensor = tensor.resolve_conj().resolve_neg()
            row, count, buffer = rows[tensor.dtype], tensor.numel(), None
            if tensor.is_cuda:
                index, size = tensor.get_device(), row.itemsize
                stream = torch.cuda.current_stream(index).cuda_stream or LEGACY
                strides = tuple(step * size for step in tensor.stride())
                return _on_device(
                    tensor.detach(), row, index, tensor.data_ptr(), tuple(tensor.shape), strides,
                    stream, writable, False, where,
                )  # fmt: skip
            if count and not tensor.data_ptr():
                raise UnsupportedError(f"{where}: the tensor has no memory")
            if tensor.is_contiguous():
                buffer = from_address(tensor.data_ptr(), count * row.itemsize)
            elif writable:
                _refuse_overlap(tensor.shape, tensor.stride(), where)
        else:
            row, buffer, count = seen
        held = tensor.detach()  # keeps the memory, whatever is assigned to tensor.data meanwhile
        return Alias(tensor, row, count, buffer, lambda _: alias(held))

    return fast_view, adapter


class _Adapters(dict[type, Adapter]):
    """The adapter of each type of array; that of a new type is found with its first array."""

    def __missing__(self, kind: type) -> Adapter:
        return _find


_adapters = _Adapters({np.ndarray: _numpy})
fast_views: dict[type, FastView] = {np.ndarray: _fast_view_numpy}


def _find(array: Any, writable: bool, where: str) -> View:
    kind = type(array)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        if torch.Tensor not in _adapters:
            fast_view, _adapters[torch.Tensor] = _torch(torch)
            fast_views[torch.Tensor] = fast_views[torch.nn.Parameter] = fast_view
        found = _adapters[torch.Tensor]
    elif isinstance(array, np.ma.MaskedArray):
        found = _masked
    elif isinstance(array, np.ndarray):
        found = _subclass
    elif isinstance(array, np.generic):
        found = _scalar
    elif jax is not None and isinstance(array, jax.Array):
        found = _jax
    elif hasattr(kind, "__cuda_array_interface__"):
        found = _cuda
    elif hasattr(array, "__dlpack__"):
        found = _dlpack
    elif _has_buffer(array):
        found = _buffer
    else:
        raise ArgumentTypeError(
            f"{where}: expected an array (NumPy, CuPy, torch, or anything with the buffer "
            f"protocol, the CUDA array interface or DLPack), got {kind.__name__}"
        )
    _adapters[kind] = found
    return found(array, writable, where)


def _has_buffer(array: Any) -> bool:
    try:
        memoryview(array)
    except (TypeError, BufferError, ValueError):
        return False
    return True
