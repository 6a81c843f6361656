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


_MPI, _MESSAGES, _COMBINED = "MPI", "messages over MPI", "exchange over MPI, combined here"


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Way:
    """What carries out calls of this kind in this group."""
    if op is None:
        return _move(primitive, group, dtype)
    assert dtype is not None
    if op.op is ReduceOp.PREMUL_SUM:
        everywhere = not primitive.root
        route = composed.premultiplied(
            group,
            HOST,
            dtype,
            op.factor,
            everywhere,
            lambda wide: _reduction(primitive, group, ReduceOp.SUM, wide).route,
        )
        return Way(route, how=_COMBINED)
    return _reduction(primitive, group, op, dtype)


def _move(primitive: Primitive, group: ProcessGroup, dtype: DType | None) -> Way:
    if primitive.layout is Layout.EXCHANGED:
        # No rank knows the others' sizes, and MPI_Alltoall and MPI_Alltoallv must not meet.
        return Way(direct.all_to_all(group, HOST, None), how=_MESSAGES)
    if primitive.name != "broadcast":
        return Way(native.MOVES[primitive.name](group, dtype), how=_MPI)
    assert dtype is not None
    broadcast = shared.broadcast(group, dtype, native.broadcast(group, dtype))
    return in_place(broadcast, how=_MPI, shared=shared.LEASTS["broadcast"])


def _reduction(primitive: Primitive, group: ProcessGroup, op: ReduceOp, dtype: DType) -> Way:
    whole = native.reducible(op, dtype)
    how = _MPI if whole else _COMBINED
    if primitive.name == "all_reduce":
        over_mpi = (native if whole else composed).all_reduce(group, dtype, op)
        least = shared.LEAST if whole else 0
        all_reduce, prompt = shared.all_reduce(group, dtype, op, over_mpi, least)
        return in_place(all_reduce, prompt, how, least)
    if primitive.name == "reduce":
        if whole:
            return in_place(native.reduce(group, dtype, op), how=how)
        return Way(composed.reduce(group, dtype, op), how=how)
    scattered = composed.reduce_scatter(group, dtype, op)
    if whole:
        scattered = native.reduce_scatter(group, dtype, op, otherwise=scattered)
    scattered = shared.exchange(primitive, group, dtype, op, scattered)
    return Way(scattered, how=how, shared=shared.LEASTS[primitive.name])


def in_place(
    direct: Direct, prompt: Prompt | None = None, how: str = "", shared: int | None = None
) -> Way:
    """The way of a primitive that works in place, from what it does with a buffer."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        direct(recv.buffer, recv.count, root)

    return Way(route, direct, prompt, how, shared)
