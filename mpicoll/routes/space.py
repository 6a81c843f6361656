"""Memory and arithmetic for the algorithms over messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpicoll.arrays.views import Buffer, Bytes, View, ViewList, empty, from_numpy
from mpicoll.core.plan import Contiguous
from mpicoll.dtypes import DType, Factor, ReduceOp
from mpicoll.kernels import reduction

#: Host values of Space.small, chunk and stack.
SMALL, CHUNK, STACK = 8 * 1024, 1024 * 1024, 32 * 1024 * 1024


class Space(Protocol):
    """One kind of memory and its operations, for one call at a time.

    Operations except ``synchronize`` may be enqueued and run in order. Views are contiguous and
    have equal counts unless noted; they may be empty.

    small: maximum size in bytes of all ranks' arrays, in total, for which each rank that needs the
           result of a reduction receives everything: one exchange instead of two.
    chunk: size in bytes of a chunk from one rank: large enough to overlap combining with messages,
           small enough for the caches.
    stack: maximum size in bytes of the chunks from all ranks; two such stacks are in use.
    mpi:   MPI's own collectives may be used on this memory.
    """

    small: int
    chunk: int
    stack: int
    mpi: bool

    def view(self, buffer: Contiguous, dtype: DType, counts: Sequence[int]) -> View:
        """Return the view of a buffer of an implementation, or of a list of buffers."""

    def buffer(self, view: View) -> Contiguous:
        """Return the buffer of a contiguous view for an implementation."""

    def empty(self, dtype: DType, count: int) -> View:
        """Return ``count`` uninitialized elements, valid until the call ends."""

    def mark(self) -> int:
        """Return a mark for ``release``."""
        return 0

    def release(self, mark: int) -> None:
        """Free the memory that ``empty`` returned since the mark."""
        return

    def room(self, n: int, count: int) -> int:
        """Return the number of scratch elements that ``places`` needs for n arrays."""
        return n * count

    def places(self, stack: View, n: int, count: int, beside: View) -> list[View]:
        """Return n arrays of ``count`` elements in scratch, to be combined with ``beside``."""
        return [stack.part(place * count, count) for place in range(n)]

    def copy(self, source: View, into: View) -> None:
        """Copy elements in C order; one of the views may be non-contiguous."""
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
    """Host memory of one group: NumPy arrays. Nothing is enqueued.

    Scratch memory is reused, because fresh memory takes longer to get than to fill. Calls take the
    same blocks in the same order, so the k-th block of a call is the k-th block of the last call.
    """

    small = SMALL
    chunk = CHUNK
    stack = STACK
    mpi = True

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []
        self._taken = 0

    def view(self, buffer: Buffer | list[Buffer], dtype: DType, counts: Sequence[int]) -> View:
        """Return the view of a buffer of mpi4py, or of a list of buffers."""
        if isinstance(buffer, list):
            parts = [self.view(one, dtype, [n]) for one, n in zip(buffer, counts, strict=True)]
            return ViewList(parts, dtype)
        count = sum(counts)
        if not count:
            return empty(dtype, 0)
        return from_numpy(np.frombuffer(buffer, dtype.numpy, count), dtype)

    def buffer(self, view: View) -> Buffer:
        """Return the buffer of a contiguous view."""
        return view.buffer

    def empty(self, dtype: DType, count: int) -> View:
        """Return memory that is kept for the next call, unless it is large."""
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
        """Return the number of blocks in use."""
        return self._taken

    def release(self, mark: int) -> None:
        """Reuse the blocks that ``empty`` returned since the mark."""
        self._taken = mark

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
