"""Sums of float32 that cross the network as bfloat16, in groups with wire="bfloat16": half the
bytes.

Each rank's elements are rounded to bfloat16, added in float32 and rounded once more where a share
of the result is computed (route `exchange`), so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.arrays.views import Buffer
from mpicoll.core.checks import writes
from mpicoll.core.plan import CallKind, Extent, Implementation
from mpicoll.core.reproducible import BFLOAT16, FLOAT32
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.kernels.reduction import narrow, scale
from mpicoll.routes.host import exchange
from mpicoll.routes.reductions import chunk_of
from mpicoll.routes.route import REDUCTIONS

_FLOAT32, _BFLOAT16 = by_name[FLOAT32], by_name[BFLOAT16]


def applies(kind: CallKind) -> bool:
    """Return whether calls of this kind cross the network as bfloat16."""
    primitive, group, op, dtype = kind
    sums = dtype is _FLOAT32 and op in (ReduceOp.SUM, ReduceOp.AVG)
    is_wanted = group.wire == BFLOAT16 and group.size() > 1
    return is_wanted and sums and primitive.name in REDUCTIONS


def build(kind: CallKind) -> Implementation:
    """Return the implementation for calls of this kind, between ranks on different nodes."""
    primitive, group, n, me = kind.primitive, kind.group, kind.group.size(), kind.group.rank()
    add, space = exchange.build(kind._replace(dtype=_BFLOAT16)).run, exchange.get_space(group)
    blocks = n if primitive.many_in else 1
    step = chunk_of(space, n, _BFLOAT16) * n // blocks

    def run(send: Buffer | None, recv: Buffer, extent: Extent, root: int) -> None:
        source = recv if send is None else send
        if not isinstance(extent, int):
            spans = [(0, sum(extent.sends))]
            add_rounded(source, recv, spans, (0, extent.receives[me]), extent, root)
            return
        for start in range(0, extent, step):
            size = min(step, extent - start)
            spans = [(block * extent + start, size) for block in range(blocks)]
            add_rounded(source, recv, spans, (start, size), size, root)

    def add_rounded(
        source: Buffer, recv: Buffer, spans: Sequence[tuple[int, int]], own: tuple[int, int],
        extent: Extent, root: int,
    ) -> None:  # fmt: skip
        """Run a chunk: the elements of some spans of ``source``, and a span of results."""
        mark, at = space.mark(), 0
        given = space.empty(_BFLOAT16, sum(count for _, count in spans)).flat
        for start, count in spans:
            if count:
                part = np.frombuffer(source, np.float32, count, 4 * start)
                narrow(part, given[at : at + count])
                at += count
        out = space.empty(_BFLOAT16, own[1]).flat if primitive.many_in else given
        add(given if primitive.many_in else None, out, extent, root)
        if own[1] and writes(primitive, group, root):
            scale(_BFLOAT16, out, 1, np.frombuffer(recv, np.float32, own[1], 4 * own[0]))
        space.release(mark)

    return Implementation(run)
