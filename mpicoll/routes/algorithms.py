"""Collectives over point-to-point messages, written once for any kind of memory.

They use MPI only to send and receive; a `Space` copies and combines. ``n`` is the number of ranks;
a *latency* is the fixed cost of a message.

The algorithm depends on count, dtype, operation and n, which are the same on all ranks. Every
reduction combines the original elements of all ranks in one place, once, in rank order. So all
ranks get the same bits, on hosts and devices, for any count and algorithm. Narrow floats are sent
as they are and rounded once. Algorithms that send partial sums (recursive halving, rings) would
send narrow floats as float32 and combine at each step, which on a device costs more than several
messages.

Views passed to a function are ready to be read and written. Results are valid after the caller has
synchronized. `build` makes implementations: the routes `exchange` on the host and `direct` on a
device.
"""

from __future__ import annotations

from collections.abc import Callable

from mpicoll.arrays.views import View
from mpicoll.core.checks import writes
from mpicoll.core.plan import Blocks, CallKind, Contiguous, Extent, Run
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes import moves, reductions
from mpicoll.routes.messages import Scope
from mpicoll.routes.space import Space

#: By the name of the primitive: the function of this name, without "_single", in ``reductions`` or
#: ``moves``. All take the same arguments. ``exchange`` and ``direct`` declare these primitives.
ALGORITHMS: dict[str, Callable[..., None]] = {
    row.name: algorithm
    for row in PRIMITIVES
    if (algorithm := getattr(
        reductions if row.reduces else moves, row.name.removesuffix("_single"), None
    ))
}  # fmt: skip

#: Converts the elements of a view, to another view.
Convert = Callable[[View, View], None]


def build(kind: CallKind, space: Space) -> Run:
    """Return the function that runs a kind of call in ``space``. Its caller synchronizes."""
    primitive, group, op, dtype = kind
    if op is not None and op.factor is not None:
        return premultiplied(kind, space, lambda wide: _synchronized(build(wide, space), space))
    algorithm, n, me = ALGORITHMS[primitive.name], group.size(), group.rank()
    combined = [primitive.combined(rank, n) for rank in range(n)]
    scope = Scope(group, space, op, kind.exact, n, me, combined, primitive.code)
    sent, received = (n if many else 1 for many in (primitive.many_in, primitive.many_out))

    def run(send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int) -> None:
        if isinstance(extent, int):
            blocks = Blocks([extent] * sent, [extent] * received)
        else:
            sends, receives = extent
            blocks = Blocks(
                sends if sent == n else [sends[me]], receives if received == n else [receives[me]]
            )
        out = None if send is None else space.view(send, dtype, blocks.sends)
        into = None if recv is None else space.view(recv, dtype, blocks.receives)
        mark = space.mark()
        algorithm(scope, out, into, blocks, root)
        space.release(mark)

    return run


def _synchronized(inner: Run, space: Space) -> Run:
    """Return a function that synchronizes ``space`` before it calls ``inner``."""

    def run(send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int) -> None:
        space.synchronize()
        inner(send, recv, extent, root)

    return run


def premultiplied(kind: CallKind, space: Space, build_sum: Callable[[CallKind], Run]) -> Run:
    """Build PREMUL_SUM: each rank's elements times its factor, then a sum.

    build_sum: builds the sum. Narrow floats are scaled to float32, summed in rank order by a sum of
               float32, and rounded once at the end.
    """
    primitive, group, op, dtype = kind
    assert op is not None and op.factor is not None
    factor, wide = op.factor, by_name["float32"] if dtype.kind is Kind.NARROW_FLOAT else dtype
    add = build_sum(CallKind(primitive, group, ReduceOp.SUM, wide))
    back = space.copy if wide is dtype else space.narrow
    return converted(kind, space, wide, lambda view, to: space.scale(view, factor, to), add, back)


def converted(
    kind: CallKind, space: Space, other: DType, convert: Convert, add: Run, back: Convert
) -> Run:
    """Build a reduction: convert the elements to the dtype ``other``, ``add``, convert back."""
    primitive, group, _, dtype = kind
    me, n = group.rank(), group.size() if primitive.many_in else 1

    def to_other(view: View) -> View:
        made = space.empty(other, view.count)
        convert(view, made)
        return made

    def run(send: Contiguous | None, recv: Contiguous, extent: Extent, root: int) -> None:
        if isinstance(extent, int):
            sends, mine = [extent] * n, extent
        else:
            sends, mine = list(extent.sends), extent.receives[me]
        into, mark = space.view(recv, dtype, [mine]), space.mark()
        if send is None:
            out = to_other(into)
            add(None, space.buffer(out), extent, root)
        else:
            out = into if other is dtype else space.empty(other, mine)
            made = to_other(space.view(send, dtype, sends))
            add(space.buffer(made), space.buffer(out), extent, root)
        if out is not into and writes(primitive, group, root):
            back(out, into)
        space.release(mark)

    return run
