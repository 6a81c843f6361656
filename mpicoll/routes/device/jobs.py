"""The copies and reductions of a call, as jobs on the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import numpy as np

from mpicoll.core.plan import CallKind, Extent

#: The sides of a call: the input and the output array of a rank. Calls in place have only RECV.
SEND, RECV = 0, 1


class Part(NamedTuple):
    """A part of a rank's input or output array, from element ``start`` on."""

    rank: int
    side: int
    start: int


class Job(NamedTuple):
    """Combines the sources into each output, or copies the only source."""

    sources: Sequence[Part]
    outs: Sequence[Part]
    elements: int


def jobs_of(
    kind: CallKind, extent: Extent, root: int, sent: Any = None, outs: Iterable[int] | None = None
) -> Iterator[Job]:
    """Yield the jobs of a call.

    sent: for all_to_all, the matrix of element counts, by sender and receiver.
    outs: the ranks whose outputs are written; None: all.
    """
    primitive, n = kind.primitive, kind.group.size()
    ranks = range(n)
    made = ranks if outs is None else list(outs)
    if not primitive.even:
        from_start, to_start = ((np.cumsum(sent, axis) - sent).tolist() for axis in (1, 0))
        for out, source in product(made, ranks):
            block, place = from_start[source][out], to_start[source][out]
            count = int(sent[source, out])
            yield Job([Part(source, SEND, block)], [Part(out, RECV, place)], count)
        return
    if isinstance(extent, int):
        counts = [extent] * n
    else:
        counts = list(extent.sends if primitive.many_in else extent.receives)
    starts = [0, *accumulate(counts)]
    if primitive.many_out:  # gather and all_gather
        into = [rank for rank in made if not primitive.root or rank == root]
        for source in ranks if into else ():
            parts = [Part(out, RECV, starts[source]) for out in into]
            yield Job([Part(source, SEND, 0)], parts, counts[source])
    elif primitive.many_in:  # scatter and reduce_scatter
        sources: Sequence[int] = [root] if primitive.root else ranks
        for out in made:
            parts = [Part(source, SEND, starts[out]) for source in sources]
            yield Job(parts, [Part(out, RECV, 0)], counts[out])
    elif primitive.input:  # scan and exscan
        for out in made:
            parts = [Part(source, SEND, 0) for source in primitive.combined(out, n)]
            if parts:
                yield Job(parts, [Part(out, RECV, 0)], counts[0])
    elif primitive.reduces:  # in place
        into = [rank for rank in made if not primitive.root or rank == root]
        if into:
            parts = [Part(source, RECV, 0) for source in ranks]
            yield Job(parts, [Part(out, RECV, 0) for out in into], counts[0])
    else:  # broadcast
        into = [rank for rank in made if rank != root]
        if into:
            yield Job([Part(root, RECV, 0)], [Part(out, RECV, 0) for out in into], counts[0])
