"""Lists of arrays, one for each rank, for routes that take one buffer for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.arrays.views import Bytes, memory_at
from mpicoll.core.checks import writes
from mpicoll.core.plan import CallKind, Extent, Run

#: Size in bytes of a chunk of all arrays of a list, in total.
LISTED = 4 * 1024 * 1024


def count_per_chunk(kind: CallKind) -> int:
    """Return how many elements of each block are in a chunk."""
    return max(1, LISTED // (kind.group.size() * kind.dtype.itemsize))


def packed(kind: CallKind, inner: Run, takes_lists: Callable[[int], bool]) -> Run:
    """Return a function that packs lists of buffers, chunk by chunk, and then calls ``inner``.

    takes_lists: returns whether ``inner`` itself takes lists for a count of elements of a block;
                 the same on all ranks.
    """
    primitive, group, _, dtype = kind
    n, me, itemsize = group.size(), group.rank(), dtype.itemsize
    step = count_per_chunk(kind)

    def run(send: Any, recv: Any, extent: Extent, root: int) -> None:
        if isinstance(extent, int):
            if takes_lists(extent):
                inner(send, recv, extent, root)
                return
            sends = receives = [extent] * n
        else:
            sends = [*(extent.sends if primitive.many_in else extent.receives)]
            receives = [*(extent.receives if primitive.many_out else extent.sends)]
        out, into = _bytes(send, sends, me, itemsize), _bytes(recv, receives, me, itemsize)
        for size, cut in _chunks(extent, step, itemsize):
            parts = [part[cut] for part in into]
            whole = _whole(parts, lambda parts: np.empty(sum(map(len, parts)), np.uint8))
            inner(_whole([part[cut] for part in out], np.concatenate), whole, size, root)
            if len(parts) > 1 and writes(primitive, group, root):
                start = 0
                for part in parts:
                    part[:] = whole[start : start + len(part)]
                    start += len(part)

    return run


def _chunks(extent: Extent, step: int, itemsize: int) -> Iterator[tuple[Extent, slice]]:
    # Blocks of different sizes are one chunk.
    if not isinstance(extent, int):
        yield extent, slice(None)
        return
    for start in range(0, max(extent, 1), step):
        size = min(step, extent - start)
        yield size, slice(start * itemsize, (start + size) * itemsize)


def _bytes(buffers: Any, counts: Sequence[int], me: int, itemsize: int) -> list[Bytes]:
    """Return the bytes of each buffer of a list, or of this rank's single buffer."""
    if buffers is None:
        return []
    listed = isinstance(buffers, list)
    pairs = zip(buffers, counts, strict=True) if listed else [(buffers, counts[me])]
    return [
        np.frombuffer(memory_at(MPI.Get_address(buffer), count * itemsize), np.uint8)
        for buffer, count in pairs
    ]


def _whole(parts: list[Bytes], join: Callable[[list[Bytes]], Bytes]) -> Any:
    """Return one buffer for the parts, which are joined if there are several; None without any."""
    return None if not parts else parts[0] if len(parts) == 1 else join(parts)
