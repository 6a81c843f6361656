"""How the bytes move: the choice of a route, the same on every rank.

A route is a function of primitive, dtype, operation and group, and inside a plan of the count:
of what all ranks share. Never of contiguity, alignment or anything that one rank alone knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpicoll.calls import Route
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Primitive
from mpicoll.routes import composed, native
from mpicoll.routes.wire import explained

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["choose", "explained"]


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Route:
    """The function that carries out calls of this kind in this group."""
    if op is None:
        return native.MOVES[primitive.name](group, dtype)
    assert dtype is not None
    if op.op is ReduceOp.PREMUL_SUM:
        everywhere = not primitive.root
        return composed.premultiplied(
            group,
            dtype,
            op.factor,
            everywhere,
            lambda wide: _reduction(primitive, group, ReduceOp.SUM, wide),
        )
    return _reduction(primitive, group, op, dtype)


def _reduction(primitive: Primitive, group: ProcessGroup, op: ReduceOp, dtype: DType) -> Route:
    whole = native.reducible(op, dtype)
    if primitive.name == "all_reduce":
        return (
            native.all_reduce(group, dtype, op) if whole else composed.all_reduce(group, dtype, op)
        )
    if primitive.name == "reduce":
        return native.reduce(group, dtype, op) if whole else composed.reduce(group, dtype, op)
    return composed.reduce_scatter(group, dtype, op)
