"""Any memory that MPI can send and receive: every collective over point-to-point messages.

MPI is asked for sends and receives alone; the rest is done by `algorithms` in a `Space`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.arrays.views import View
from mpicoll.core.calls import Blocks, Direct, Route
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Primitive
from mpicoll.routes import algorithms
from mpicoll.routes.algorithms import Space
from mpicoll.routes.wire import exchange, message

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["all_to_all", "all_to_all_even", "choose"]


def choose(
    primitive: Primitive,
    group: ProcessGroup,
    op: ReduceOp | None,
    dtype: DType | None,
    space: Space,
) -> Route | None:
    """What carries out calls of this kind on arrays in ``space``; its caller settles.

    None where the space does not combine ``dtype`` by ``op``, and for what has no arrays.
    """
    if op is not None and dtype is not None and not space.serves(op.op, dtype):
        return None
    make = _ROUTES.get(primitive.name)
    return None if make is None else make(group, space, op)


Maker = Callable[["ProcessGroup", Space, "ReduceOp | None"], Route]


def _broadcast(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        algorithms.broadcast(group, recv, root)

    return route


def _all_gather(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    n = group.size()

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None
        counts = [send.count] * n if blocks is None else blocks.receives
        algorithms.all_gather(group, space, send, recv, counts)

    return route


def _gather(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None
        algorithms.gather(group, space, send, recv, root)

    return route


def _scatter(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None
        algorithms.scatter(group, space, send, recv, root)

    return route


def all_to_all(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    """See ``algorithms.all_to_all``."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None and blocks is not None
        algorithms.all_to_all(group, space, send, recv, blocks)

    return route


def all_to_all_even(group: ProcessGroup, dtype: DType) -> Direct:
    """The same on the host where this rank's blocks are all alike, to and from every rank.

    The messages are those of ``all_to_all``, which other ranks may call.
    """
    comm, n, me = group.inner, group.size(), group.rank()

    def direct(send: Any, recv: Any, count: int, root: int) -> None:
        out, into = (np.frombuffer(buffer, dtype.numpy, n * count) for buffer in (send, recv))
        into[me * count : (me + 1) * count] = out[me * count : (me + 1) * count]
        starts = [None if r == me or not count else r * count for r in range(n)]
        exchange(
            comm,
            [None if start is None else message(send, count, dtype, start) for start in starts],
            [None if start is None else message(recv, count, dtype, start) for start in starts],
        )

    return direct


def _all_reduce(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None and op is not None
        algorithms.all_reduce(group, space, op, recv)

    return route


def _reduce(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert recv is not None and op is not None
        algorithms.reduce(group, space, op, recv, root)

    return route


def _reduce_scatter(group: ProcessGroup, space: Space, op: ReduceOp | None) -> Route:
    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        assert send is not None and recv is not None and op is not None
        counts = [recv.count] * group.size() if blocks is None else blocks.sends
        algorithms.reduce_scatter(group, space, op, send, recv, counts)

    return route


_ROUTES: dict[str, Maker] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all,
}
