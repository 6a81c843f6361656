"""Any array becomes a View: where its elements are, how many, of what dtype, on which device.

An array library is recognised by the type of the array, once for each type, and never imported:
an array of a library can only exist once the library is loaded.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpicoll import dlpack
from mpicoll.dtypes import DType, Kind, by_name, by_numpy
from mpicoll.errors import ArgumentError, ArgumentTypeError, UnsupportedError

__all__ = [
    "Parts",
    "View",
    "glances",
    "of_numpy",
    "overlap",
    "overlapping",
    "parts",
    "scratch",
    "view",
]

Array = np.ndarray[Any, Any]


class View:
    """The elements of an array, as the routes see them.

    owner:  the user's object, held as long as the view lives.
    dtype:  the row of the dtype table.
    count:  number of elements.
    buffer: what mpi4py takes as a buffer; None where the elements are not contiguous in C
            order, and have to be packed first.
    device: where the elements are; today always "cpu".
    """

    __slots__ = ("buffer", "count", "dtype", "owner")
    device = "cpu"

    def __init__(self, owner: Any, dtype: DType, count: int, buffer: Any) -> None:
        self.owner = owner
        self.dtype = dtype
        self.count = count
        self.buffer = buffer

    @property
    def array(self) -> Array:
        """A NumPy array of the owner's shape on the owner's memory."""
        return self.owner  # type: ignore[no-any-return]

    @property
    def flat(self) -> Array:
        """The elements as a one-dimensional NumPy array; for contiguous views only."""
        return self.array.reshape(-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.count * self.dtype.itemsize

    @property
    def parts(self) -> Sequence[View]:
        """The arrays that hold the elements, in their order."""
        return (self,)

    def part(self, start: int, count: int) -> View:
        """The view of ``count`` elements from element ``start`` on; for contiguous views only."""
        return of_numpy(self.flat[start : start + count], self.dtype)

    def packed(self) -> View:
        """A contiguous copy of the elements, each array's in C order."""
        into = scratch(self.dtype, self.count)
        flat, start = into.owner, 0
        for part in self.parts:
            array = part.array
            flat[start : start + part.count].reshape(array.shape)[...] = array
            start += part.count
        return into

    def fill(self, packed: View) -> None:
        """Takes the elements over from a contiguous view of as many."""
        flat, start = packed.flat, 0
        for part in self.parts:
            array = part.array
            array[...] = flat[start : start + part.count].reshape(array.shape)
            start += part.count


class Alias(View):
    """The elements of an array that is not NumPy's, which a NumPy array is made for when needed."""

    __slots__ = ("_array", "_make")

    def __init__(
        self, owner: Any, dtype: DType, count: int, buffer: Any, make: Callable[[Any], Array]
    ) -> None:
        self.owner = owner
        self.dtype = dtype
        self.count = count
        self.buffer = buffer
        self._make = make

    @property
    def array(self) -> Array:
        """A NumPy array of the owner's shape on the owner's memory."""
        try:
            return self._array
        except AttributeError:
            self._array: Array = self._make(self.owner)
            return self._array


class Parts(View):
    """The elements of a list of arrays of one dtype, one after another."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[View], dtype: DType) -> None:
        super().__init__(parts, dtype, sum(part.count for part in parts), None)
        self._parts = parts

    @property
    def parts(self) -> Sequence[View]:
        """The views of the list."""
        return self._parts

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of elements of each array."""
        return tuple(part.count for part in self._parts)


def of_numpy(array: Array, dtype: DType) -> View:
    """The view of a C-contiguous NumPy array whose row is known."""
    buffer: Array = array if dtype.buffers else array.view(_CARRIERS[dtype.itemsize])
    return View(array, dtype, array.size, buffer)


def scratch(dtype: DType, count: int) -> View:
    """The view of ``count`` new elements, uninitialised."""
    return of_numpy(np.empty(count, dtype.numpy), dtype)


def view(array: Any, writable: bool, where: str) -> View:
    """The View of any array on the host.

    array:    a NumPy array, a torch CPU tensor, or an object with the buffer protocol or DLPack.
    writable: the array will be written to.
    where:    operation and argument, for the message ("broadcast: tensor").

    Raises ArgumentTypeError for what is not an array, ArgumentError for a read-only output and
    UnsupportedError for a dtype, device or layout that cannot be served.
    """
    return _adapters[array.__class__](array, writable, where)


def parts(arrays: Any, writable: bool, where: str, length: int) -> Parts:
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
    found = [view(a, writable, f"{where}[{i}]") for i, a in enumerate(arrays)]
    dtype = found[0].dtype
    for i, one in enumerate(found):
        if one.dtype is not dtype:
            raise UnsupportedError(
                f"{where}: different dtypes in one list: [0] is {dtype}, [{i}] is {one.dtype}; "
                "convert the arrays to one dtype"
            )
    return Parts(found, dtype)


def overlap(one: View, other: View) -> bool:
    """True where the memory of two views overlaps; False where one of them must be packed."""
    if one.buffer is None or other.buffer is None:
        return False
    start, begin = _address(one), _address(other)
    return start < begin + other.nbytes and begin < start + one.nbytes


def overlapping(views: Sequence[View], others: Sequence[View]) -> list[bool]:
    """For each of some contiguous views whether its memory overlaps that of any of the others."""
    spans = sorted((_address(one), _address(one) + one.nbytes) for one in others)
    begins = [begin for begin, _ in spans]
    ends = list(accumulate((end for _, end in spans), max))
    found = []
    for one in views:
        begin = _address(one)
        before = bisect_left(begins, begin + one.nbytes)
        found.append(before > 0 and ends[before - 1] > begin)
    return found


def _address(view: View) -> int:
    buffer = view.buffer
    if isinstance(buffer, np.ndarray):
        return buffer.__array_interface__["data"][0]  # type: ignore[no-any-return]
    return buffer.address  # type: ignore[no-any-return]


# --- the array libraries -----------------------------------------------------------------------

Adapter = Callable[[Any, bool, str], View]
#: The quick look at an array that may be written to: dtype, buffer and count where it is one
#: contiguous block with nothing unusual about it, else None; never raises.
Glance = Callable[[Any], "tuple[DType, Any, int] | None"]
_CARRIERS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


def _glance_numpy(array: Array) -> tuple[DType, Any, int] | None:
    dtype = by_numpy.get(array.dtype)
    # carray: C-contiguous, aligned and writeable, in one look.
    if dtype is None or not array.flags.carray:
        return None
    return dtype, array if dtype.buffers else array.view(_CARRIERS[dtype.itemsize]), array.size


def _numpy(array: Array, writable: bool, where: str) -> View:
    dtype = by_numpy.get(array.dtype)
    if dtype is None:
        raise UnsupportedError(_dtype_message(array.dtype, where))
    flags = array.flags
    if flags.carray or (not writable and flags.c_contiguous and flags.aligned):
        return of_numpy(array, dtype)
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


def _masked(array: Any, writable: bool, where: str) -> View:
    raise UnsupportedError(
        f"{where}: a numpy.ma.MaskedArray would lose its mask; pass .filled() or .data"
    )


def _buffer(array: Any, writable: bool, where: str) -> View:
    inner = _numpy(np.asarray(memoryview(array)), writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: inner.array)


def _dlpack(array: Any, writable: bool, where: str) -> View:
    if int(array.__dlpack_device__()[0]) not in dlpack.CPU_DEVICES:
        raise UnsupportedError(
            f"{where}: arrays on {dlpack.device_name(array)} are not supported yet; copy to the "
            "host first"
        )
    try:
        alias = dlpack.to_numpy(array)
    except Exception as error:  # whatever the producer raises when it refuses
        raise UnsupportedError(f"{where}: {type(array).__name__}: {error}") from error
    inner = _numpy(alias, writable, where)
    return Alias(array, inner.dtype, inner.count, inner.buffer, lambda _: alias)


def _jax(array: Any, writable: bool, where: str) -> View:
    # JAX's capsules have no word for what JAX promises: that an array never changes.
    if writable:
        raise ArgumentError(
            f"{where}: a JAX array is read-only and would be written to; pass a NumPy array"
        )
    return _dlpack(array, writable, where)


def _torch(torch: Any) -> tuple[Glance, Adapter]:
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
        if not tensor.is_cpu:
            raise UnsupportedError(
                f"{where}: tensors on {tensor.device} are not supported yet; copy to the host first"
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

    def glance(tensor: Any) -> tuple[DType, Any, int] | None:
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
        seen = glance(tensor) if type(tensor) in direct else None
        if seen is None:
            refuse(tensor, where, writable)
            tensor = tensor.resolve_conj().resolve_neg()
            row, count, buffer = rows[tensor.dtype], tensor.numel(), None
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

    return glance, adapter


class _Adapters(dict[type, Adapter]):
    """The adapter of each type of array; that of a new type is found with its first array."""

    def __missing__(self, kind: type) -> Adapter:
        return _find


_adapters = _Adapters({np.ndarray: _numpy})
glances: dict[type, Glance] = {np.ndarray: _glance_numpy}


def _find(array: Any, writable: bool, where: str) -> View:
    kind = type(array)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(array, torch.Tensor):
        if torch.Tensor not in _adapters:
            glance, _adapters[torch.Tensor] = _torch(torch)
            glances[torch.Tensor] = glances[torch.nn.Parameter] = glance
        found = _adapters[torch.Tensor]
    elif isinstance(array, np.ma.MaskedArray):
        found = _masked
    elif isinstance(array, np.ndarray):
        found = _subclass
    elif jax is not None and isinstance(array, jax.Array):
        found = _jax
    elif hasattr(array, "__dlpack__"):
        found = _dlpack
    elif _has_buffer(array):
        found = _buffer
    else:
        raise ArgumentTypeError(
            f"{where}: expected an array (NumPy, torch, or anything with the buffer protocol or "
            f"DLPack), got {kind.__name__}"
        )
    _adapters[kind] = found
    return found(array, writable, where)


def _has_buffer(array: Any) -> bool:
    try:
        memoryview(array)
    except (TypeError, BufferError, ValueError):
        return False
    return True
