"""The choice of a route for host memory, the same on every rank.

A route is a function of primitive, dtype, operation and group, and inside a plan of the count:
of what all ranks share. Never of contiguity, alignment or anything that one rank alone knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.calls import Blocks, Direct, Prompt, Way
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Layout, Primitive
from mpicoll.routes import composed, direct, native, shared
from mpicoll.routes.algorithms import HOST
from mpicoll.views import View

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["choose", "in_place"]


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Way:
    """What carries out calls of this kind in this group."""
    if op is None:
        return _move(primitive, group, dtype)
    assert dtype is not None
    if op.op is ReduceOp.PREMUL_SUM:
        everywhere = not primitive.root
        return Way(
            composed.premultiplied(
                group,
                HOST,
                dtype,
                op.factor,
                everywhere,
                lambda wide: _reduction(primitive, group, ReduceOp.SUM, wide).route,
            )
        )
    return _reduction(primitive, group, op, dtype)


def _move(primitive: Primitive, group: ProcessGroup, dtype: DType | None) -> Way:
    if primitive.layout is Layout.EXCHANGED:
        # No rank knows the others' sizes, and MPI_Alltoall and MPI_Alltoallv must not meet.
        return Way(direct.all_to_all(group, HOST, None))
    if primitive.name != "broadcast":
        return Way(native.MOVES[primitive.name](group, dtype))
    assert dtype is not None
    return in_place(shared.broadcast(group, dtype, native.broadcast(group, dtype)))


def _reduction(primitive: Primitive, group: ProcessGroup, op: ReduceOp, dtype: DType) -> Way:
    whole = native.reducible(op, dtype)
    if primitive.name == "all_reduce":
        over_mpi = (native if whole else composed).all_reduce(group, dtype, op)
        least = shared.LEAST if whole else 0
        return in_place(*shared.all_reduce(group, dtype, op, over_mpi, least))
    if primitive.name == "reduce":
        if whole:
            return in_place(native.reduce(group, dtype, op))
        return Way(composed.reduce(group, dtype, op))
    over_mpi = composed.reduce_scatter(group, dtype, op)
    if whole:
        over_mpi = native.reduce_scatter(group, dtype, op, otherwise=over_mpi)
    return Way(shared.exchange(primitive, group, dtype, op, over_mpi))


def in_place(direct: Direct, prompt: Prompt | None = None) -> Way:
    """The way of a primitive that works in place, from what it does with a buffer."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        direct(recv.buffer, recv.count, root)

    return Way(route, direct, prompt)
