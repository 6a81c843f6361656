"""The kinds of memory that the algorithms over messages work in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpicoll.arrays.views import Buffer, View, ViewList, empty, from_numpy
from mpicoll.core.pickles import Bytes
from mpicoll.core.plan import Contiguous
from mpicoll.dtypes import DType, Factor, ReduceOp
from mpicoll.kernels import reduction

__all__ = ["Host", "PooledHost", "Space"]

#: For the host, see Space. (For memory of a device, routes/device has them.)
SMALL, CHUNK, STACK = 8 * 1024, 1024 * 1024, 32 * 1024 * 1024


class Space(Protocol):
    """One kind of memory and the operations in it, for one call at a time.

    Everything but ``synchronize`` may only be enqueued; what is enqueued is done in that order.
    Views are contiguous and of equal counts, unless said otherwise; they may be empty.

    small: bytes of all ranks' arrays together up to which each rank that needs the result of a
           reduction gets everything: one exchange and one wait for the memory instead of two.
    chunk: bytes that one rank gets from one other at a time: enough to hide what combining them
           costs, few enough for the caches.
    stack: bytes of all those chunks together, of which there are two at a time.
    mpi:   MPI's own collectives may be used on this memory.
    """

    small: int
    chunk: int
    stack: int
    mpi: bool

    def view(self, buffer: Contiguous, dtype: DType, counts: Sequence[int]) -> View:
        """Return the view of a buffer as implementations get it, or of a list of them."""

    def buffer(self, view: View) -> Contiguous:
        """Return the buffer that implementations get of a contiguous view."""

    def empty(self, dtype: DType, count: int) -> View:
        """Return ``count`` elements of any values, to be used until the call ends."""

    def mark(self) -> int:
        """Return a mark for ``release``, to take back all that ``empty`` has given since then."""
        return 0

    def release(self, mark: int) -> None:
        """Let the memory be used again. What is left out, after an error, stays taken."""
        return

    def room(self, n: int, count: int) -> int:
        """Return how many elements of scratch ``places`` needs for n arrays of so many."""
        return n * count

    def places(self, stack: View, n: int, count: int, beside: View) -> list[View]:
        """Return n arrays of ``count`` elements in scratch, to be combined with ``beside``."""
        return [stack.part(place * count, count) for place in range(n)]

    def copy(self, source: View, into: View) -> None:
        """Copy elements; those of one of the views may lie apart, in C order."""
        if into.buffer is None:
            into.copy_from(source)
        else:
            source.copy_to(into)

    def combine(
        self, op: ReduceOp, sources: Sequence[View], out: View, divisor: int, exact: bool = False
    ) -> None:
        """Apply ``reduction.combine`` to views of one dtype."""

    def scale(self, source: View, factor: Factor, out: View) -> None:
        """Apply ``reduction.scale``; ``out`` is float32 if ``source`` is of narrow floats."""

    def narrow(self, source: View, out: View) -> None:
        """Apply ``reduction.narrow``."""

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done, so that MPI may read it or write over it."""


class Host(Space):
    """The memory of NumPy arrays; nothing is enqueued."""

    small = SMALL
    chunk = CHUNK
    stack = STACK
    mpi = True

    def view(self, buffer: Buffer | list[Buffer], dtype: DType, counts: Sequence[int]) -> View:
        """Return the view of what mpi4py takes as a buffer."""
        if isinstance(buffer, list):
            parts = [self.view(one, dtype, [n]) for one, n in zip(buffer, counts, strict=True)]
            return ViewList(parts, dtype)
        count = sum(counts)
        if not count:
            return empty(dtype, 0)
        return from_numpy(np.frombuffer(buffer, dtype.numpy, count), dtype)

    def buffer(self, view: View) -> Buffer:
        """Return the view's own."""
        return view.buffer

    def empty(self, dtype: DType, count: int) -> View:
        """Return new memory."""
        return empty(dtype, count)

    def combine(
        self, op: ReduceOp, sources: Sequence[View], out: View, divisor: int, exact: bool = False
    ) -> None:
        """Combine by the C library, or NumPy."""
        flat = [source.flat for source in sources]
        reduction.combine(op, out.dtype, flat, out.flat, divisor, exact)

    def scale(self, source: View, factor: Factor, out: View) -> None:
        """Scale by NumPy."""
        reduction.scale(source.dtype, source.flat, factor, out.flat)

    def narrow(self, source: View, out: View) -> None:
        """Narrow by the C library, or NumPy."""
        reduction.narrow(source.flat, out.flat)

    def synchronize(self) -> None:
        """Return at once: nothing is enqueued."""


class PooledHost(Host):
    """Host memory for one group, with scratch kept: fresh memory takes longer to get than to fill.

    Calls take the same blocks in the same order, so each keeps to its place.
    """

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []
        self._taken = 0

    def empty(self, dtype: DType, count: int) -> View:
        """Return memory that is kept, unless it is much."""
        nbytes, place = count * dtype.itemsize, self._taken
        if nbytes > self.stack:
            return empty(dtype, count)
        self._taken += 1
        if place == len(self._blocks):
            self._blocks.append(np.empty(nbytes, np.uint8))
        elif self._blocks[place].nbytes < nbytes:
            self._blocks[place] = np.empty(nbytes, np.uint8)
        return from_numpy(self._blocks[place][:nbytes].view(dtype.numpy), dtype)

    def mark(self) -> int:
        """Return the number of blocks that are taken."""
        return self._taken

    def release(self, mark: int) -> None:
        """Take back the blocks given since then."""
        self._taken = mark
