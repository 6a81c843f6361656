"""Lists of arrays that run as one collective.

A route that takes segment tables reads and writes the arrays in place. For other routes, small
arrays are packed into one buffer, run as one call, and unpacked: that saves the latency of the
calls and costs two copies in the cache. Which calls run together depends on the sizes alone, which
all ranks share; the memory layout of the arrays may differ from rank to rank.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from ctypes import memmove
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.arrays import views
from mpicoll.arrays.adapters import check_same_device, fast_views
from mpicoll.arrays.views import CARRIERS, Array, Buffer, DeviceView, View, ViewList
from mpicoll.core import checks
from mpicoll.core.checks import Views
from mpicoll.core.plan import Plan, Run, SegmentTable, agreed_sizes
from mpicoll.dtypes import DType, by_numpy
from mpicoll.errors import ArgumentError, MpicollError, UnsupportedError
from mpicoll.kernels.library import kernels
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["CHUNK", "SMALL", "Entries", "batches"]

#: Bytes of the larger side of a call up to which it is packed with others.
SMALL = 16 * 1024
#: The most bytes of the larger side of a packed call.
CHUNK = 512 * 1024


def batches(sizes: Sequence[int]) -> list[Sequence[int]]:
    """Return which calls of a list run as one, from the bytes of each call: indices by batch.

    Every index is in one batch; a large call is a batch by itself.
    """
    large = [place for place, size in enumerate(sizes) if size > SMALL]
    made: list[Sequence[int]] = [[place] for place in large]
    small: Sequence[int] = range(len(sizes))
    if large:
        small = [place for place in small if sizes[place] <= SMALL]
        sizes = [sizes[place] for place in small]
    ends = [0, *accumulate(sizes)]
    start = 0
    while start < len(small):
        end = bisect_right(ends, ends[start] + CHUNK) - 1
        made.append(small[start:end])
        start = end
    return sorted(made, key=itemgetter(0))


class Entries:
    """Calls without a root on each output and its input, checked.

    inputs: one per output; None for calls in place.
    held:   the caller leaves the arrays where they are until all calls are over.
    dtype, on_device: of all elements.
    counts: numbers that must be the same on all ranks: the element count of each entry or, if its
            blocks differ in size, of each block.
    Raises the errors of the calls, UnsupportedError if dtypes or devices differ in the list, and
    ArgumentError if one call writes memory that another call reads or writes.
    """

    def __init__(
        self,
        name: str,
        primitive: Primitive,
        group: ProcessGroup,
        outputs: Sequence[Any],
        inputs: Sequence[Any] | None,
        held: bool,
    ) -> None:
        self._layout = primitive.layout
        in_place = self._layout is Layout.IN_PLACE
        #: The number of blocks in the larger side of a call.
        self._ranks = 1 if in_place else group.size()
        #: Views of the entries without a fast view. The output of other entries is a buffer.
        self._views: dict[int, Views] = {}
        self._outputs = outputs
        if in_place and _all_plain(self._outputs):
            self.dtype = by_numpy[self._outputs[0].dtype]
            self.counts: Sequence[Any] = list(map(_size, self._outputs))
            self.on_device = False
            self._check_apart(name)
            return
        looks = {} if not in_place else fast_views if held else _HOLDING
        seen: list[Any] = [looks.get(one.__class__, _nothing)(one) for one in outputs]
        for place, output in enumerate(outputs):
            if seen[place] is None:
                input = None if inputs is None else inputs[place]
                try:
                    found = checks.build_views(primitive, group, output, input, 0, None)
                except MpicollError as error:
                    raise type(error)(f"{name}: [{place}]: {error}") from error
                _, recv, extent = self._views[place] = found
                assert recv is not None
                seen[place] = recv.dtype, recv, agreed_sizes(primitive, extent)
        dtypes, self._outputs, self.counts = zip(*seen, strict=True)
        self.dtype = dtypes[0]
        for place, dtype in enumerate(dtypes):
            if dtype is not self.dtype:
                raise UnsupportedError(
                    f"{name}: tensors must all have the same type: different dtypes in one list: "
                    f"[0] is {self.dtype}, [{place}] is {dtype}"
                )
        devices = {recv.device for _, recv, _ in self._views.values() if recv is not None}
        if len(self._views) < len(outputs):
            devices.add(None)
        if len(devices) > 1:
            first, *others = (self._output(place) for place in range(len(outputs)))
            for place, other in enumerate(others, 1):
                check_same_device(name, f"[{place}]", other, "[0]", first)
        self.on_device = None not in devices
        self._check_apart(name)

    def _check_apart(self, name: str) -> None:
        """Raise ArgumentError if one call writes memory that another one reads or writes."""
        if self._views:
            calls = range(len(self._outputs))
            written = [(call, part) for call in calls for part in self._output(call).parts]
            sends = ((call, send) for call, (send, _, _) in self._views.items() if send is not None)
            read = [(call, part) for call, send in sends for part in send.parts]
            found: tuple[int, ...] | None = views.find_conflict(written, read)
        else:
            found = _find_overlap(self._outputs, self.counts, self.dtype.itemsize)
        if found is not None:
            raise ArgumentError(
                f"{name}: the arrays at [{found[0]}] and [{found[1]}] share memory, and at least "
                "one of them is written to; pass arrays that do not overlap"
            )

    def packed(self) -> list[Views]:
        """Return the views of each call to be made, in order, where small ones are packed."""
        return [self._views_of(batch) for batch in batches(self._sizes())]

    def run(self, plan: Plan) -> None:
        """Run all calls on the host, inside a call of the group: all as one if the route of the
        largest takes segment tables.
        """
        even = all(count.__class__ is int for count in self.counts)
        if fused := plan.implementation.fused(max(self.counts)) if even else None:
            made: list[Sequence[int]] = [range(len(self.counts))]
        else:
            made = batches(self._sizes())
        for batch in made:
            plan.group.sequence += 1
            send, recv, extent = self._views_of(batch)
            if fused and isinstance(recv, _OnHost):
                assert isinstance(extent, int)
                _run_on_tables(fused, send, recv, extent)
            else:
                plan.run(send, recv, extent, 0)

    def _sizes(self) -> list[int]:
        """Return the bytes of the larger side of each call; too many to pack if blocks differ."""
        unit = self._ranks * self.dtype.itemsize
        if not self._views:
            return [unit * count for count in self.counts]
        return [unit * n if n.__class__ is int else SMALL + 1 for n in self.counts]

    def _views_of(self, batch: Sequence[int]) -> Views:
        """Return the views of the calls at these places, made as one."""
        first = batch[0]
        if len(batch) == 1:
            return self._views.get(first) or (None, self._output(first), self.counts[first])
        widths, outputs = _at(batch, self.counts), _at(batch, self._outputs)
        extent = sum(widths)
        if self._layout is Layout.IN_PLACE:
            return None, _side(outputs, widths, 1, self.dtype), extent
        inputs = [self._views[place][0] for place in batch]
        outward, inward = 1, self._ranks
        if self._layout is Layout.SCATTERED:
            outward, inward = inward, outward
        send = _side(inputs, widths, outward, self.dtype)
        return send, _side(outputs, widths, inward, self.dtype), extent

    def _output(self, place: int) -> View:
        output, dtype = self._outputs[place], self.dtype
        if isinstance(output, View):
            return output
        count: int = self.counts[place]
        return View(output, dtype, count, output, lambda it: _carried(it, dtype).view(dtype.numpy))


def _at(places: Sequence[int], items: Sequence[Any]) -> Sequence[Any]:
    if isinstance(places, range):
        return items[places.start : places.stop]
    return [items[place] for place in places]


def _all_plain(arrays: Sequence[Any]) -> bool:
    """Return whether all are contiguous, writable NumPy arrays of one dtype that buffers know."""
    if set(map(type, arrays)) != {np.ndarray}:
        return False
    known = by_numpy.get(arrays[0].dtype)
    if known is None or not known.buffers:
        return False
    return len(set(map(_dtype, arrays))) == 1 and all(map(_plain, arrays))


#: C-contiguous, aligned and writeable, in one look.
_dtype, _plain, _size = attrgetter("dtype"), attrgetter("flags.carray"), attrgetter("size")


def _find_overlap(
    buffers: Sequence[Buffer], counts: Sequence[int], itemsize: int
) -> tuple[int, ...] | None:
    """Return the places of two buffers that share memory; None if there are none.

    counts: elements of each buffer.
    """
    begins = np.fromiter(map(sys.modules["mpi4py.MPI"].Get_address, buffers), np.int64)
    ends = begins + np.asarray(counts, np.int64) * itemsize
    order = np.argsort(begins, kind="stable")
    order = order[begins[order] < ends[order]]  # without empty ones
    found = np.flatnonzero(begins[order[1:]] < ends[order[:-1]])
    return tuple(sorted(order[found[0] : found[0] + 2].tolist())) if len(found) else None


#: Fast views whose buffers keep the memory alive, even if the caller resizes the array.
_HOLDING = {np.ndarray: fast_views[np.ndarray]}


def _nothing(array: object) -> None:
    """Return None: an array of this kind has no fast view."""


def _carried(buffer: Buffer, dtype: DType) -> Array:
    """Return the elements in a buffer, as NumPy's buffers have them."""
    if isinstance(buffer, np.ndarray):
        return buffer
    return np.frombuffer(buffer, dtype.numpy if dtype.buffers else CARRIERS[dtype.itemsize])


# --- packing ------------------------------------------------------------------------------------


def _side(items: Sequence[Any], widths: Sequence[int], rows: int, dtype: DType) -> View:
    """Return one side of several calls as one side of a single call.

    items:  of each call the view, or a buffer, of ``rows`` blocks, or the view of a list of blocks.
    widths: of each call the count of a block.
    """
    lines: Sequence[Sequence[Any]] = [items]
    if isinstance(items[0], ViewList):
        lines, rows = list(zip(*(item.parts for item in items), strict=True)), 1
    first = lines[0][0]
    if isinstance(first, DeviceView):
        return _OnDevice(lines, widths, rows, dtype, first.device)
    return _OnHost(lines, widths, rows, dtype)


class _Side(View):
    """A table of blocks: a column for each call and, where ranks have blocks, a row for each rank.

    lines:  views, or buffers, of one block each, row by row; or one line of some with a block in
            each of ``rows`` rows.
    widths: elements of a block, column by column.
    """

    __slots__ = ("_lines", "_rows", "_widths", "device")

    def __init__(
        self,
        lines: Sequence[Sequence[Any]],
        widths: Sequence[int],
        rows: int,
        dtype: DType,
        device: int | None = None,
    ) -> None:
        self._lines = lines
        self._widths = widths
        self._rows = rows
        super().__init__(lines, dtype, len(lines) * rows * sum(widths), None)
        self.device = device


class _OnHost(_Side):
    """A side on the host. A view that is not contiguous has a contiguous copy beside it."""

    __slots__ = ("_addresses", "_counts", "_scattered")

    def __init__(self, *table: Any) -> None:
        super().__init__(*table)
        self._scattered: list[tuple[View, View]] = []
        buffers = [
            self._buffer(one) if isinstance(one, View) else one
            for line in self._lines
            for one in line
        ]
        # MPI is loaded, because there is a group.
        self._addresses = array("L", map(sys.modules["mpi4py.MPI"].Get_address, buffers))
        self._counts = array("L", self._widths)

    def _buffer(self, one: View) -> Buffer:
        if one.buffer is None:
            beside = views.empty(self.dtype, one.count)
            self._scattered.append((one, beside))
            one = beside
        return one.buffer

    def empty_like(self) -> View:
        """Return an uninitialised view of the same size, valid until this thread's next call."""
        return _room(1, self.dtype, self.count)

    def contiguous(self) -> View:
        """Return a copy of the elements; valid until the next call of this thread."""
        into = _room(0, self.dtype, self.count)
        self.copy_to(into)
        return into

    def copy_to(self, packed: View) -> None:
        """Copy the elements into a contiguous view of the same size."""
        for one, beside in self._scattered:
            one.copy_to(beside)
        self._move(packed, inward=False)

    def copy_from(self, packed: View) -> None:
        """Copy the elements from a contiguous view of the same size."""
        self._move(packed, inward=True)
        for one, beside in self._scattered:
            one.copy_from(beside)

    def _move(self, packed: View, inward: bool) -> None:
        at = sys.modules["mpi4py.MPI"].Get_address(packed.buffer)
        addresses, counts, n = self._addresses, self._counts, len(self._counts)
        rows, size = self._rows, self.dtype.itemsize
        if kernels is not None:
            move = kernels.unpack if inward else kernels.pack
            starts = addresses.buffer_info()[0], counts.buffer_info()[0]
            move(*starts, n, len(self._lines), rows, size, at)
            return
        for start in range(0, len(addresses), n):
            for row in range(rows):
                for begin, count in zip(addresses[start : start + n], counts, strict=True):
                    place = begin + row * count * size
                    memmove(*((place, at) if inward else (at, place)), count * size)
                    at += count * size

    def read(self) -> SegmentTable:
        """Return the table of the blocks, after updating the contiguous copies."""
        for one, beside in self._scattered:
            one.copy_to(beside)
        return self.table()

    def table(self) -> SegmentTable:
        """Return the table of the blocks, or of their contiguous copies."""
        counts = np.frombuffer(self._counts, np.uintp)
        starts = np.frombuffer(self._addresses, np.uintp).reshape(len(self._lines), 1, -1)
        rows = np.arange(self._rows, dtype=np.uintp).reshape(1, -1, 1)
        return SegmentTable(
            (starts + rows * (counts * self.dtype.itemsize)).ravel(), np.cumsum(counts)
        )

    def apart(self) -> _OnHost:
        """Return a copy of all blocks."""
        beside, width = views.empty(self.dtype, self.count), sum(self._widths)
        self.copy_to(beside)
        starts = [0, *accumulate(self._widths)]
        parts = [
            beside.part(row + start, count)
            for row in range(0, self.count, max(width, 1))
            for start, count in zip(starts, self._widths, strict=False)
        ]
        n = len(self._widths)
        lines = [parts[at : at + n] for at in range(0, len(parts), n)]
        return _OnHost(lines, self._widths, 1, self.dtype)

    def write_back(self) -> None:
        """Write the contiguous copies back."""
        for one, beside in self._scattered:
            one.copy_from(beside)


def _run_on_tables(fused: Run, send: View | None, recv: _OnHost, extent: int) -> None:
    """Run calls on segment tables. Inputs that overlap outputs are copied first."""
    if send is None:
        fused(None, recv.read(), extent, 0)
    else:
        assert isinstance(send, _OnHost)
        given, taken = send.read(), recv.table()
        beside = None  # kept until the end
        if _overlap(given, taken, send.dtype.itemsize):
            beside = send.apart()
            given = beside.table()
        fused(given, taken, extent, 0)
    recv.write_back()


def _overlap(one: SegmentTable, other: SegmentTable, itemsize: int) -> bool:
    """Return whether any segment of one table overlaps a segment of the second table."""
    sizes = np.diff(one.ends, prepend=np.uintp(0)) * itemsize
    begins = np.concatenate([one.addresses, other.addresses])
    ends = begins + np.tile(sizes, len(begins) // len(sizes))
    order = np.argsort(begins, kind="stable")
    begins, ends, first = begins[order], ends[order], order < len(one.addresses)
    latest, latest_other = (
        np.maximum.accumulate(np.where(those, ends, 0)) for those in (first, ~first)
    )
    before = np.where(first[1:], latest_other[:-1], latest[:-1])
    return bool((begins[1:] < before).any())


class _OnDevice(_Side):
    """A side on a device: each block is copied by itself."""

    __slots__ = ()

    @property
    def parts(self) -> Sequence[View]:
        """Return the views of the arrays."""
        return [one for line in self._lines for one in line]

    def empty_like(self) -> View:
        """Return an uninitialised view of the same size and device, valid until the call ends."""
        room: View = self._lines[0][0].new_empty(self.count)
        return room

    def copy_to(self, packed: View) -> None:
        """Copy the elements into a contiguous view of the same size."""
        wholes = [one if self._has_blocks(one) else one.contiguous() for one in self.parts]
        for block, place in self._blocks(wholes, packed):
            block.copy_to(place)

    def copy_from(self, packed: View) -> None:
        """Copy the elements from a contiguous view of the same size."""
        wholes = [one if self._has_blocks(one) else one.empty_like() for one in self.parts]
        for block, place in self._blocks(wholes, packed):
            block.copy_from(place)
        for one, whole in zip(self.parts, wholes, strict=True):
            if whole is not one:
                one.copy_from(whole)

    def _has_blocks(self, one: View) -> bool:
        """Return whether its blocks are available as views."""
        return self._rows == 1 or one.buffer is not None

    def _blocks(self, wholes: Sequence[View], packed: View) -> Iterator[tuple[View, View]]:
        """Yield each block, and its place among the packed ones."""
        starts, rows, width = [0, *accumulate(self._widths)], self._rows, sum(self._widths)
        for i, whole in enumerate(wholes):
            line, column = divmod(i, len(self._widths))
            size = self._widths[column]
            for row in range(rows):
                block = whole if rows == 1 else whole.part(row * size, size)
                yield block, packed.part((line * rows + row) * width + starts[column], size)


class _Rooms(threading.local):
    """Kept memory for packing and unpacking: fresh memory takes longer to get than to fill."""

    def __init__(self) -> None:
        self.memory = np.empty((2, CHUNK), np.uint8)


_rooms = _Rooms()


def _room(which: int, dtype: DType, count: int) -> View:
    flat = _rooms.memory[which, : count * dtype.itemsize].view(dtype.numpy)
    return views.from_numpy(flat, dtype)
