"""The memory space of a device, and wrappers for implementations on it."""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll.arrays.views import DeviceView, View, address
from mpicoll.core.checks import reads, writes
from mpicoll.core.plan import CallKind, Contiguous, Extent, Run
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import DType, Factor, ReduceOp
from mpicoll.kernels.device_kernels import PIECE
from mpicoll.kernels.reduction import find_loop
from mpicoll.primitives import Layout
from mpicoll.routes.space import Space

#: See Space. A wait for the device is slow, and copies are fast: more at a time than on hosts.
SMALL, CHUNK, STACK = 128 * 1024, 4 * 1024 * 1024, 64 * 1024 * 1024


def _aligned(count: int) -> int:
    """Round a number of elements up, so that they are whole pieces for any dtype."""
    return -(-count // PIECE) * PIECE


class DeviceSpace(Space):
    """A device's memory.

    context: the device context of the current call.
    alone:   the group has one rank.
    """

    alone = mpi = False
    small, chunk, stack = SMALL, CHUNK, STACK

    def __init__(self, context: DeviceContext) -> None:
        self.context = context

    def view(self, buffer: Contiguous, dtype: DType, counts: Sequence[int]) -> View:
        """Return the buffer, which is a view."""
        assert isinstance(buffer, DeviceView)
        return buffer

    def buffer(self, view: View) -> Contiguous:
        """Return the view itself."""
        return view

    def empty(self, dtype: DType, count: int) -> DeviceView:
        """Return scratch of the context."""
        memory = self.context.scratch(count * dtype.itemsize)
        blank = DeviceView(memory, dtype, self.context.index, memory.address, (count,), None, 0)
        blank.context = self.context
        return blank

    def room(self, n: int, count: int) -> int:
        """Return the number of elements that ``places`` needs, with alignment."""
        return n * (_aligned(count) + PIECE)

    def places(self, stack: View, n: int, count: int, beside: View) -> list[View]:
        """Return arrays with the alignment of ``beside`` (modulo PIECE), for vectorized kernels."""
        shift = (address(beside) - address(stack)) % PIECE // stack.dtype.itemsize
        return [stack.part(shift + place * _aligned(count), count) for place in range(n)]

    def combine(
        self, op: ReduceOp, sources: Sequence[View], out: View, divisor: int, exact: bool = False
    ) -> None:
        """Enqueue a kernel."""
        by = find_loop(op, out.dtype, exact)
        assert by is not None
        context = self.context
        addresses = [address(source) for source in sources]
        context.runtime.combine(
            context.index, by, addresses, [address(out)], out.count, divisor, context.work
        )

    def scale(self, source: View, factor: Factor, out: View) -> None:
        """Enqueue a kernel."""
        context, places = self.context, (address(source), factor, address(out))
        context.runtime.scale(context.index, source.dtype, *places, out.count, context.work)

    def narrow(self, source: View, out: View) -> None:
        """Enqueue a kernel."""
        context = self.context
        context.runtime.narrow(
            context.index, out.dtype, address(source), address(out), out.count, context.work
        )

    def synchronize(self) -> None:
        """Wait for the context's stream."""
        self.context.synchronize(self.context.work)


class Alone(DeviceSpace):
    """A device's memory in a group of one rank. No messages are sent, so arrays are not split into
    chunks and the host does not wait for the device.
    """

    alone = True
    small = chunk = stack = 1 << 62

    def synchronize(self) -> None:
        """Do nothing: MPI does not access the memory."""


def on_home_device(home: DeviceContext, inner: Run) -> Run:
    """Return a function that calls ``inner``; it copies arrays of other devices to ``home``."""

    def moved(view: View) -> DeviceView:
        copy = DeviceSpace(home).empty(view.dtype, view.count)
        home.copy(copy.address, address(view), view.nbytes)
        return copy

    def run(send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int) -> None:
        first = send if recv is None else recv
        assert isinstance(first, DeviceView)
        context = first.context
        if context is home:
            inner(send, recv, extent, root)
            return
        if context.captured:
            context.scratch(0)  # raises: the copies would need memory
        home.begin()
        home.follow(context)
        out, into = (None if one is None else moved(one) for one in (send, recv))
        try:
            inner(out, into, extent, root)
            if recv is not None and into is not None:
                home.copy(address(recv), into.address, recv.nbytes)
        finally:
            context.follow(home)

    return run


def for_mpi(space: DeviceSpace, kind: CallKind, inner: Run) -> Run:
    """Return a function that waits for the stream, and calls ``inner`` on memory for any MPI.

    Managed memory and memory of a pool (cudaMallocAsync) are copied: not all MPIs accept them.
    """
    primitive, group = kind.primitive, kind.group
    in_place = primitive.layout is Layout.IN_PLACE

    def run(send: DeviceView | None, recv: DeviceView | None, extent: Extent, root: int) -> None:
        runtime = space.context.runtime
        out: View | None = send
        into: View | None = recv
        if send is not None and not runtime.is_plain(address(send)):
            out = send.contiguous()
        if recv is not None and not runtime.is_plain(address(recv)):
            filled = in_place and reads(primitive, group, root)
            into = recv.contiguous() if filled else recv.empty_like()
        space.synchronize()
        inner(out, into, extent, root)
        if recv is None or into is None or into is recv:
            return
        if writes(primitive, group, root):
            recv.copy_from(into)

    return run
