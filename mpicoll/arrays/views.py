"""Views: the library's representation of arrays (address, count, dtype, device)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpicoll.cuda.runtime import StridedMemory
from mpicoll.cuda.streams import CurrentStreams, DeviceContext
from mpicoll.dtypes import DType
from mpicoll.errors import UnsupportedError

Array = np.ndarray[Any, Any]

#: One-dimensional bytes.
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

#: One block of host memory for mpi4py: a NumPy array or an MPI.buffer. The buffer protocol has a
#: type only from Python 3.12 on, hence Any.
Buffer: TypeAlias = Any

#: NumPy dtypes, by size, for elements whose own dtype NumPy's buffers cannot express.
CARRIERS: dict[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


class View:
    """The elements of an array.

    owner:  the caller's object, kept alive by the view.
    dtype:  a row of the dtype table.
    count:  number of elements.
    buffer: buffer for mpi4py; None if the elements are not contiguous in C order and must be packed
            first.
    make:   returns a NumPy array on the memory of an owner that is not one; called on first use.
    device: number of the CUDA device; None on the host.
    """

    __slots__ = ("_array", "_make", "buffer", "count", "dtype", "owner")
    device: int | None = None

    def __init__(
        self, owner: object, dtype: DType, count: int, buffer: Buffer | None,
        make: Callable[[Any], Array] | None = None,
    ) -> None:  # fmt: skip
        self.owner, self.dtype, self.count, self.buffer = owner, dtype, count, buffer
        self._array: Any = owner if make is None else None
        self._make = make

    @property
    def array(self) -> Array:
        """NumPy array of the owner's shape on the owner's memory."""
        if self._array is None and self._make is not None:
            self._array = self._make(self.owner)
        array: Array = self._array
        return array

    @property
    def flat(self) -> Array:
        """The elements as a one-dimensional NumPy array. Contiguous views only."""
        return self.array.reshape(-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.array.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def parts(self) -> Sequence[View]:
        """Views of the arrays that hold the elements, in order."""
        return (self,)

    def part(self, start: int, count: int) -> View:
        """Return the view of ``count`` elements starting at ``start``. Contiguous views only."""
        return from_numpy(self.flat[start : start + count], self.dtype)

    def empty_like(self) -> View:
        """Return uninitialized memory of the same size and device, valid until the call ends."""
        return empty(self.dtype, self.count)

    def contiguous(self) -> View:
        """Return a contiguous copy of the elements, each array in C order."""
        into = self.empty_like()
        self.copy_to(into)
        return into

    def copy_to(self, packed: View) -> None:
        """Copy the elements to a contiguous view of the same size."""
        self._copy(packed, False)

    def copy_from(self, packed: View) -> None:
        """Copy the elements from a contiguous view of the same size."""
        self._copy(packed, True)

    def _copy(self, packed: View, inward: bool) -> None:
        array = self.array
        other = packed.flat.reshape(array.shape)
        if inward:
            array[...] = other
        else:
            other[...] = array


class DeviceView(View):
    """The elements of an array on a CUDA device.

    address, strides: of the first element, and the bytes between neighbors.
    stream:  the caller's stream, as a number.
    library: current streams of the array's library; None if it has none.
    context: the group's resources on the device, set when the call starts.
    """

    __slots__ = ("_shape", "address", "context", "device", "library", "stream", "strides")
    device: int

    def __init__(
        self, owner: object, dtype: DType, device: int, address: int, shape: tuple[int, ...],
        strides: tuple[int, ...] | None, stream: int, library: CurrentStreams | None = None,
    ) -> None:  # fmt: skip
        plain, count = contiguous_strides(shape, dtype.itemsize), math.prod(shape)
        super().__init__(owner, dtype, count, None)
        self.device, self.address, self._shape = device, address, shape
        self.strides = plain if strides is None else strides
        self.stream, self.library = stream, library
        self.context: DeviceContext = None  # type: ignore[assignment]  # not before the call
        if not count or all(
            own == step or extent == 1
            for own, step, extent in zip(self.strides, plain, shape, strict=True)
        ):
            self.buffer = memory_at(address, count * dtype.itemsize)

    @property
    def array(self) -> Array:
        """Raises UnsupportedError: NumPy has no arrays on a device."""
        raise UnsupportedError(f"an array on cuda:{self.device} has no NumPy array")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._shape

    def part(self, start: int, count: int) -> DeviceView:
        """Return the view of ``count`` elements starting at ``start``. Contiguous views only."""
        return self._same_device(self.address + start * self.dtype.itemsize, count)

    def empty_like(self) -> DeviceView:
        """Return uninitialized memory of the same size and device, valid until the call ends."""
        return self.new_empty(self.count)

    def new_empty(self, count: int) -> DeviceView:
        """Return ``count`` uninitialized elements on the same device, valid until the call ends."""
        return self._same_device(self.context.scratch(count * self.dtype.itemsize).address, count)

    def _same_device(self, address: int, count: int) -> DeviceView:
        shape, stream = (count,), self.stream
        found = DeviceView(self.owner, self.dtype, self.device, address, shape, None, stream)
        found.context = self.context
        return found

    def _copy(self, packed: View, inward: bool) -> None:
        assert isinstance(packed, DeviceView)
        context, size = self.context, self.dtype.itemsize
        own = StridedMemory(self.address, self.strides)
        other = StridedMemory(packed.address, contiguous_strides(self._shape, size))
        into, source = (own, other) if inward else (other, own)
        if self.buffer is not None:
            context.runtime.copy(
                context.index, into.address, source.address, self.nbytes, context.work
            )
        else:
            context.runtime.copy_strided(
                context.index, into, source, self._shape, size, context.work
            )


class ViewList(View):
    """The elements of a list of arrays of one dtype on one device, one array after another."""

    __slots__ = ("_parts", "device")

    def __init__(self, parts: Sequence[View], dtype: DType) -> None:
        super().__init__(parts, dtype, sum(part.count for part in parts), None)
        self._parts = parts
        self.device = parts[0].device if parts else None

    @property
    def parts(self) -> Sequence[View]:
        """The views of the list."""
        return self._parts

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of elements of each array."""
        return tuple(part.count for part in self._parts)

    def empty_like(self) -> View:
        """Return uninitialized memory of the same size and device, valid until the call ends."""
        first = self._parts[0]
        return (
            first.new_empty(self.count) if isinstance(first, DeviceView) else super().empty_like()
        )

    def _copy(self, packed: View, inward: bool) -> None:
        for part, start in zip(self._parts, self.starts, strict=True):
            part._copy(packed.part(start, part.count), inward)

    @property
    def starts(self) -> list[int]:
        """Index of the first element of each array among all elements."""
        return [0, *accumulate(self.counts[:-1])]


def memory_at(address: int, nbytes: int) -> Buffer:
    """Return memory as a buffer of mpi4py."""
    from mpi4py import MPI

    return MPI.buffer.fromaddress(address, nbytes)


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of contiguous elements in C order."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=itemsize))[::-1][: len(shape)]


def from_numpy(array: Array, dtype: DType) -> View:
    """Return the view of a C-contiguous NumPy array with a known dtype row."""
    buffer = array if dtype.buffers else array.view(CARRIERS[dtype.itemsize])
    return View(array, dtype, array.size, buffer)


def empty(dtype: DType, count: int) -> View:
    """Return the view of ``count`` new, uninitialized elements on the host."""
    return from_numpy(np.empty(count, dtype.numpy), dtype)


def overlaps(one: View, other: View) -> bool:
    """Return whether the memory of two views overlaps. False if one of them is not contiguous."""
    if one.buffer is None or other.buffer is None:
        return False
    start, begin = address(one), address(other)
    return start < begin + other.nbytes and begin < start + one.nbytes


def find_overlapping(views: Sequence[View], others: Sequence[View]) -> list[bool]:
    """Return for each of ``views`` whether it overlaps any of ``others``. All are contiguous."""
    begins, ends = np.array([_span(one) for one in others], np.uint64).reshape(-1, 2).T
    spans = ((address(one), address(one) + one.nbytes) for one in views)
    return [bool(((begins < end) & (begin < ends)).any()) for begin, end in spans]


def find_conflict(
    written: Sequence[tuple[int, View]], read: Sequence[tuple[int, View]]
) -> tuple[int, int] | None:
    """Return the numbers of two calls, one of which writes memory that both access; twice the same
    number if two outputs of a call share memory; None if there are none.

    written, read: the number of a call, and a view that it writes or reads. The input of a call may
        overlap its own output.
    """
    if not read and _are_columns([view for _, view in written]):
        return None
    accesses = [*((*one, True) for one in written), *((*one, False) for one in read)]
    spans = sorted((*_span(one[1]), i) for i, one in enumerate(accesses) if one[1].count)
    active: list[tuple[int, int]] = []  # spans that may reach into the next one: end and access
    for begin, end, i in spans:
        call, view, writes = accesses[i]
        active = [one for one in active if one[0] > begin]
        for _, before in active:
            other, other_view, other_writes = accesses[before]
            contiguous = view.buffer is not None and other_view.buffer is not None
            conflicts = (writes and other_writes) or (call != other and (writes or other_writes))
            if conflicts and (contiguous or np.shares_memory(_strided(other_view), _strided(view))):
                return min(other, call), max(other, call)
        active.append((end, i))
    return None


def _are_columns(views: Sequence[View]) -> bool:
    """Return whether arrays are disjoint columns of one table. Costs n log n instead of n**2."""
    arrays = [view.array for view in views if view.count and not isinstance(view, DeviceView)]
    if len(arrays) < len(views) or len({array.strides for array in arrays}) > 1:
        return False
    strides = arrays[0].strides if arrays else ()
    if min(strides, default=0) <= 0:
        return False
    pitch = max(strides)
    row = strides.index(pitch)
    first = min(array.__array_interface__["data"][0] for array in arrays)
    columns = []
    for array in arrays:
        begin = (array.__array_interface__["data"][0] - first) % pitch
        steps = [
            (extent - 1) * step
            for axis, (extent, step) in enumerate(zip(array.shape, strides, strict=True))
            if axis != row
        ]
        columns.append((begin, begin + array.itemsize + sum(steps)))
    columns.sort()
    columns.append((columns[0][0] + pitch, 0))
    return all(end <= begin for (_, end), (begin, _) in pairwise(columns))


def _span(view: View) -> tuple[int, int]:
    """Return begin and end of the memory of a view that has elements."""
    if view.buffer is not None:
        begin = address(view)
        return begin, begin + view.nbytes
    if isinstance(view, DeviceView):
        return _strided_span(view.address, view.shape, view.strides, view.dtype.itemsize)
    array = view.array
    start = array.__array_interface__["data"][0]
    return _strided_span(start, array.shape, array.strides, array.itemsize)


def _strided_span(
    start: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> tuple[int, int]:
    steps = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    before, behind = (sum(f(step, 0) for step in steps) for f in (min, max))
    return start + before, start + behind + itemsize


def array_at(start: int, shape: Sequence[int], strides: Sequence[int], dtype: DType) -> Array:
    """Return a NumPy array on memory that the caller keeps alive. On a device, it must not be read.

    start, strides: address of the first element, and the bytes between neighbors.
    """
    if 0 in shape:
        return np.empty(shape, dtype.numpy)
    begin, end = _strided_span(start, shape, strides, dtype.itemsize)
    memory = memory_at(begin, end - begin)
    found: Array = np.ndarray(shape, dtype.numpy, memory, start - begin, strides)
    return found


def _strided(view: View) -> Array:
    """Return a NumPy array of a view's elements. On a device, they must not be read."""
    if not isinstance(view, DeviceView):
        return view.array
    return array_at(view.address, view.shape, view.strides, view.dtype)


def address(view: View) -> int:
    """Return the address of the first element of a contiguous view."""
    buffer = view.buffer
    if isinstance(buffer, np.ndarray):
        return buffer.__array_interface__["data"][0]  # type: ignore[no-any-return]
    return buffer.address  # type: ignore[no-any-return, union-attr]  # contiguous


#: Builds the view of an array: the array, whether it is an output, and its name in messages.
BuildView = Callable[[Any, bool, str], View]
#: Returns dtype, buffer and count of a plain, writable, contiguous array, else None. Never raises.
FastView = Callable[[Any], "tuple[DType, Buffer, int] | None"]


class Adapter(NamedTuple):
    """Builds views of arrays of one type."""

    build_view: BuildView  # supports every array of the type, or raises
    #: Returns dtype, buffer and count of a plain array, without a View; optional.
    fast_view: FastView | None = None
    #: If True, used for all arrays of the type. If False, looked up for each array.
    of_type: bool = True
