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
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.arrays import views
from mpicoll.arrays.adapters import check_same_device, fast_views
from mpicoll.arrays.views import Array, Buffer, DeviceView, FastView, View, ViewList
from mpicoll.core import checks
from mpicoll.core.checks import Views
from mpicoll.core.plan import Plan, SegmentTable, agreed_sizes
from mpicoll.dtypes import DType
from mpicoll.errors import ArgumentError, MpicollError, UnsupportedError
from mpicoll.kernels.library import kernels
from mpicoll.primitives import Layout, Primitive

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

#: Bytes of the larger side of a call up to which it is packed with others.
SMALL = 16 * 1024
#: The most bytes of the larger side of a packed call.
CHUNK = 512 * 1024


def batches(sizes: Sequence[int]) -> list[Sequence[int]]:
    """Group the calls of a list into batches that run as one call; return the indices by batch.

    sizes: bytes of each call. A call of more than SMALL bytes is a batch by itself.
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
    """Calls without a root, one for each output and its input, with checked arguments.

    inputs: one per output; None for calls in place.
    held:   the calls end before the caller can resize or free an array.
    dtype, on_device: of all arrays.
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
        looks: dict[type, FastView] = {}
        if in_place:  # the buffers of NumPy keep the memory alive, even if the caller resizes it
            looks = fast_views if held else {np.ndarray: fast_views[np.ndarray]}
        seen: list[Any] = []
        for place, output in enumerate(outputs):
            look = looks.get(output.__class__)
            entry: Any = None if look is None else look(output)
            if entry is None:
                input = None if inputs is None else inputs[place]
                try:
                    found = checks.build_views(primitive, group, output, input, 0, None)
                except MpicollError as error:
                    raise type(error)(f"{name}: [{place}]: {error}") from error
                _, recv, extent = self._views[place] = found
                assert recv is not None
                entry = recv.dtype, recv, agreed_sizes(primitive, extent)
            seen.append(entry)
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
        """Return the views of each call to run, in order. Small calls are packed into one."""
        return [self._views_of(batch) for batch in batches(self._sizes())]

    def run(self, plan: Plan) -> None:
        """Run all calls on the host: as one if the route of the largest takes segment tables."""
        even = all(count.__class__ is int for count in self.counts)
        fused = plan.implementation.fused(max(self.counts)) if even else None
        for batch in [range(len(self.counts))] if fused else batches(self._sizes()):
            plan.group.sequence += 1
            send, recv, extent = self._views_of(batch, fused is not None)
            if fused and isinstance(recv, _OnHost):
                assert send is None or isinstance(send, _OnHost)
                fused(None if send is None else send.table(), recv.table(), extent, 0)
                recv.write_back()
            else:
                plan.run(send, recv, extent, 0)

    def _sizes(self) -> list[int]:
        """Return the bytes of the larger side of each call; SMALL + 1 if its blocks differ."""
        unit = self._ranks * self.dtype.itemsize
        if not self._views:
            return [unit * count for count in self.counts]
        return [unit * n if n.__class__ is int else SMALL + 1 for n in self.counts]

    def _views_of(self, batch: Sequence[int], apart: bool = False) -> Views:
        """Return the views with which the calls of a batch run as one.

        apart: copy inputs that overlap outputs.
        """
        first = batch[0]
        if len(batch) == 1:
            return self._views.get(first) or (None, self._output(first), self.counts[first])
        widths, outputs = _at(batch, self.counts), _at(batch, self._outputs)
        if kernels is None:
            outputs = [self._output(place) for place in batch]
        rows_in = rows_out = 1
        if self._layout is Layout.SCATTERED:
            rows_in = self._ranks
        else:
            rows_out = self._ranks
        send = None
        if self._layout is not Layout.IN_PLACE:
            inputs = [self._views[place][0] for place in batch]
            send = _side(inputs, widths, rows_in, self.dtype, outputs if apart else ())
        return send, _side(outputs, widths, rows_out, self.dtype), sum(widths)

    def _output(self, place: int) -> View:
        output, dtype = self._outputs[place], self.dtype
        if isinstance(output, View):
            return output
        count: int = self.counts[place]
        return View(output, dtype, count, output, lambda it: _as_array(it, dtype).view(dtype.numpy))


def _at(places: Sequence[int], items: Sequence[Any]) -> Sequence[Any]:
    if isinstance(places, range):
        return items[places.start : places.stop]
    return [items[place] for place in places]


def _find_overlap(
    buffers: Sequence[Buffer], counts: Sequence[int], itemsize: int
) -> tuple[int, ...] | None:
    """Return the indices of two buffers that share memory; None if there are none.

    counts: elements of each buffer.
    """
    begins = np.fromiter(map(sys.modules["mpi4py.MPI"].Get_address, buffers), np.int64)
    ends = begins + np.asarray(counts, np.int64) * itemsize
    order = np.argsort(begins, kind="stable")
    order = order[begins[order] < ends[order]]  # without empty ones
    found = np.flatnonzero(begins[order[1:]] < ends[order[:-1]])
    return tuple(sorted(order[found[0] : found[0] + 2].tolist())) if len(found) else None


def _as_array(buffer: Buffer, dtype: DType) -> Array:
    """Return a buffer as a NumPy array, of unsigned integers if buffers cannot have the dtype."""
    if isinstance(buffer, np.ndarray):
        return buffer
    return np.frombuffer(buffer, dtype.numpy if dtype.buffers else views.CARRIERS[dtype.itemsize])


def _side(
    items: Sequence[Any],
    widths: Sequence[int],
    rows: int,
    dtype: DType,
    outputs: Sequence[View] = (),
) -> View:
    """Combine the inputs, or the outputs, of several calls into the view of a single call.

    items:  of each call the view, or a buffer, of ``rows`` blocks, or the view of a list of blocks.
    widths: of each call the count of a block.
    outputs: views that the items must not overlap.
    """
    lines: Sequence[Sequence[Any]] = [items]
    if isinstance(items[0], ViewList):
        lines, rows = list(zip(*(item.parts for item in items), strict=True)), 1
    parts = [part for line in lines for part in line]
    if kernels is None or isinstance(parts[0], DeviceView):
        return _Side(parts, widths, len(lines), rows, dtype)
    return _OnHost(parts, widths, len(lines), rows, dtype, outputs)


class _Side(View):
    """A table of blocks: a column for each call and, where ranks have blocks, a row for each rank.

    parts:  views of one block each, ``lines`` rows of them; or one line of views with a block in
            each of ``rows`` rows.
    widths: elements of a block, column by column.
    """

    __slots__ = ("_lines", "_parts", "_rows", "_widths", "device")

    def __init__(
        self, parts: Sequence[Any], widths: Sequence[int], lines: int, rows: int, dtype: DType
    ) -> None:
        self._parts, self._widths, self._lines, self._rows = parts, widths, lines, rows
        super().__init__(parts, dtype, lines * rows * sum(widths), None)
        self.device = parts[0].device if isinstance(parts[0], View) else None

    @property
    def parts(self) -> Sequence[View]:
        """The views of the arrays on a device, because each has a stream; this view on the host."""
        return (self,) if self.device is None else self._parts

    def empty_like(self) -> View:
        """Return an uninitialised view of the same size and device, valid until the call ends."""
        first = self._parts[0]
        if isinstance(first, DeviceView):
            return first.new_empty(self.count)
        return views.empty(self.dtype, self.count)

    def _copy(self, packed: View, inward: bool) -> None:
        starts, rows, width = [0, *accumulate(self._widths)], self._rows, sum(self._widths)
        for i, one in enumerate(self._parts):
            line, column = divmod(i, len(self._widths))
            size = self._widths[column]
            has_blocks = rows == 1 or one.buffer is not None
            whole = one if has_blocks else one.empty_like() if inward else one.contiguous()
            for row in range(rows):
                block = whole if rows == 1 else whole.part(row * size, size)
                place = packed.part((line * rows + row) * width + starts[column], size)
                (block.copy_from if inward else block.copy_to)(place)
            if inward and whole is not one:
                one.copy_from(whole)


class _OnHost(_Side):
    """A table of blocks on the host, packed and unpacked in C. Parts may also be buffers.

    A view that is not contiguous, or overlaps an output, has a contiguous copy beside it.
    """

    __slots__ = ("_addresses", "_copies", "_counts")

    def __init__(
        self,
        parts: Sequence[Any],
        widths: Sequence[int],
        lines: int,
        rows: int,
        dtype: DType,
        outputs: Sequence[View],
    ) -> None:
        super().__init__(parts, widths, lines, rows, dtype)
        self._copies: list[tuple[View, View]] = []
        into = [part for one in outputs for part in one.parts if part.buffer is not None]
        plain = [one for one in parts if one.buffer is not None] if into else []
        overlaps = zip(plain, views.find_overlapping(plain, into), strict=True)
        apart = {id(one) for one, overlapping in overlaps if overlapping}
        buffers = [
            self._buffer(one, id(one) in apart) if isinstance(one, View) else one for one in parts
        ]
        # MPI is loaded, because there is a group.
        self._addresses = array("L", map(sys.modules["mpi4py.MPI"].Get_address, buffers))
        self._counts = array("L", widths)

    def _buffer(self, one: View, apart: bool) -> Buffer:
        if one.buffer is None or apart:
            beside = views.empty(self.dtype, one.count)
            self._copies.append((one, beside))
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

    def _copy(self, packed: View, inward: bool) -> None:
        assert kernels is not None
        if not inward:
            self._read_copies()
        move = kernels.unpack if inward else kernels.pack
        move(
            self._addresses.buffer_info()[0], self._counts.buffer_info()[0], len(self._counts),
            self._lines, self._rows, self.dtype.itemsize, views.address(packed),
        )  # fmt: skip
        if inward:
            self.write_back()

    def _read_copies(self) -> None:
        for one, beside in self._copies:
            one.copy_to(beside)

    def write_back(self) -> None:
        for one, beside in self._copies:
            one.copy_from(beside)

    def table(self) -> SegmentTable:
        """Update the contiguous copies. Return the table of these copies and the other blocks."""
        self._read_copies()
        counts = np.frombuffer(self._counts, np.uintp)
        starts = np.frombuffer(self._addresses, np.uintp).reshape(self._lines, 1, -1)
        rows = np.arange(self._rows, dtype=np.uintp).reshape(1, -1, 1)
        return SegmentTable(
            (starts + rows * (counts * self.dtype.itemsize)).ravel(), np.cumsum(counts)
        )


#: Kept memory for packing and unpacking: fresh memory takes longer to get than to fill.
_rooms = threading.local()


def _room(which: int, dtype: DType, count: int) -> View:
    if not hasattr(_rooms, "memory"):
        _rooms.memory = np.empty((2, CHUNK), np.uint8)
    flat = _rooms.memory[which, : count * dtype.itemsize].view(dtype.numpy)
    return views.from_numpy(flat, dtype)
