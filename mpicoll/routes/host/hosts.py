"""The choice of a route for host memory, the same on every rank.

A route is a function of primitive, dtype, operation and group, and inside a plan of the count:
of what all ranks share. Never of contiguity, alignment or anything that one rank alone knows. For
each size the job's table says which (`mpicoll.core.tables`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll.arrays.views import View
from mpicoll.core.calls import Blocks, Direct, Route, Way
from mpicoll.core.groups import state
from mpicoll.core.signature import kind_of
from mpicoll.core.tables import Steps, able, shown
from mpicoll.core.tables import kind_of as kind_of_table
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.primitives import Layout, Primitive
from mpicoll.routes.algorithms import HOST
from mpicoll.routes.device import direct
from mpicoll.routes.host import composed, levels, native, shared, widened

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["candidates", "choose", "on_views", "place", "told", "uneven"]


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Way:
    """What carries out calls of this kind in this group."""

    def prompt(root: int, alike: int) -> bool:  # who shares memory tells each other who is there
        if not group.shared:
            return False
        assert dtype is not None
        return bool(group.shared.prompt(kind_of(primitive, dtype, op, root), alike))

    if op is not None and op.op is ReduceOp.PREMUL_SUM:
        assert dtype is not None

        def summed(wide: DType) -> Route:
            # What is widened goes by the routes of what it is widened from: MPI's own sums of
            # float32 are not in rank order.
            row = _row((primitive, group, ReduceOp.SUM, dtype))
            kind = primitive, group, ReduceOp.SUM, wide
            return on_views(_BySize(kind, row).directed(), uneven(*kind))

        everywhere = not primitive.root
        route = composed.premultiplied(group, HOST, dtype, op.factor, everywhere, summed)
        return Way(route, None, prompt)
    if primitive.layout is Layout.EXCHANGED:
        # No rank knows the others' sizes, and MPI_Alltoall and MPI_Alltoallv must not meet.
        assert dtype is not None
        even = None if primitive.listed else direct.all_to_all_even(group, dtype)
        return Way(direct.all_to_all(group, HOST, None), even, prompt)
    if primitive.layout is Layout.EMPTY:
        return Way(native.barrier(group))
    assert dtype is not None
    kind = primitive, group, op, dtype
    by_size = _BySize(kind, _row(kind)).directed()
    return Way(on_views(by_size, uneven(*kind)), by_size, prompt)


def uneven(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Route | None:
    """What carries out calls whose blocks differ; None for primitives that have no such calls."""
    if primitive.name == "all_gather":
        return native.all_gather_uneven(group, dtype)
    if primitive.name == "reduce_scatter":
        assert op is not None
        return composed.reduce_scatter_uneven(group, dtype, op)
    return None


def on_views(direct: Direct, uneven: Route | None = None) -> Route:
    """The route of what takes buffers; ``uneven`` where the ranks' blocks differ."""

    def route(send: View | None, recv: View | None, root: int, blocks: Blocks | None) -> None:
        if blocks is not None:
            assert uneven is not None
            uneven(send, recv, root, blocks)
            return
        views = [view for view in (send, recv) if view is not None]
        direct(
            None if send is None else send.buffer,
            None if recv is None else recv.buffer,
            min(view.count for view in views),
            root,
        )

    return route


class _Step(NamedTuple):
    """What carries calls out from ``fewest`` elements a block on."""

    fewest: int
    direct: Direct


class _BySize:
    """The calls of one kind in one group, each by the route for its size."""

    def __init__(self, kind: _Kind, row: dict[str, Steps]) -> None:
        self._kind = kind
        primitive, group, _, dtype = kind
        blocks = group.size() if primitive.many_in or primitive.many_out else 1
        self._block = dtype.itemsize * blocks
        self._row = row
        #: Elements from which on it matters where the ranks are.
        self._split = -(-_split(self._row) // self._block)
        self._steps: list[_Step] | None = None  # until that is known
        self._before = self._made("apart")

    def directed(self) -> Direct:
        """What carries calls out, in few steps for the smallest.

        It is not kept here: a plan that is dropped lets go at once of the memory that it shares.
        """
        few, first = _smallest(self._before, self._split)

        def direct(send: Any, recv: Any, count: int, root: int) -> None:
            nonlocal few, first
            if count < few:
                first(send, recv, count, root)
                return
            known = self._steps is not None
            step = self._step(count)
            if not known and self._steps is not None:
                few, first = _smallest(self._steps, _NEVER)
            step.direct(send, recv, count, root)

        return direct

    def _step(self, count: int) -> _Step:
        """The step for so many elements; inside a call, in the order of the group's calls."""
        steps = self._steps
        if steps is None:
            if count < self._split:
                steps = self._before
            else:
                steps = self._steps = self._made(place(self._kind[1]))
        for step in steps:
            if count >= step.fewest:
                return step
        raise AssertionError(count)

    def _made(self, place: str) -> list[_Step]:
        """The steps where the ranks are at ``place``, the last one first."""
        served = _served(self._kind, self._row, place)
        return [_Step(-(-least // self._block), made) for least, _, made in reversed(served)]


def _smallest(steps: list[_Step], end: int) -> tuple[int, Direct]:
    """The step for the smallest, and the elements up to which it is the one, ``end`` at most."""
    return min([end, *(step.fewest for step in steps[:-1])]), steps[-1].direct


#: Primitive, group, operation and dtype of calls.
_Kind = tuple[Primitive, "ProcessGroup", "ReduceOp | None", DType]


def _named(kind: _Kind) -> str:
    """What tables call such calls."""
    primitive, _, op, dtype = kind
    return kind_of_table(primitive, op is not None and not native.reducible(op, dtype))


def _row(kind: _Kind) -> dict[str, Steps]:
    return state.table.row(_named(kind), kind[1].size())


def _served(kind: _Kind, row: dict[str, Steps], place: str) -> list[tuple[int, str, Direct]]:
    """The steps that can be had, from 0 on, each with what carries calls out. All ranks call."""
    found: list[tuple[int, str, Direct]] = []
    for least, name in row[place]:
        made = _CANDIDATES[name](*kind)
        if made is not None:
            found.append((least if found else 0, name, made))
    return found or _served(kind, row, "apart")


def _split(row: dict[str, Steps]) -> int:
    """Bytes from which on the places differ."""
    differ = [
        min((least for least, _ in set(steps) ^ set(row["apart"])), default=_NEVER)
        for steps in row.values()
    ]
    return min(differ)


_NEVER = 1 << 62


def place(group: ProcessGroup) -> str:
    """Where the ranks of the group are, as far as it matters. All ranks call."""
    if levels.of(group):
        return "nodes"
    return "node" if shared.of(group) else "apart"


# --- what carries calls out ---------------------------------------------------------------------


def _mpi(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Direct | None:
    if op is None:
        return native.MOVES[primitive.name](group, dtype)
    if not native.reducible(op, dtype):
        return None
    return native.REDUCTIONS[primitive.name](group, dtype, op)


def _pieces(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Direct | None:
    makers = {"all_reduce": native.all_reduce, "reduce": native.reduce}
    if op is None or primitive.name not in makers or not native.reducible(op, dtype):
        return None
    return makers[primitive.name](group, dtype, op, native.PIECE)


def _exchange(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Direct | None:
    return None if op is None else composed.REDUCTIONS[primitive.name](group, dtype, op)


def _widened(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Direct | None:
    if op is None or primitive.name != "all_reduce":
        return None
    return widened.all_reduce(group, dtype, op)


_CANDIDATES: dict[str, Callable[..., Direct | None]] = {
    "mpi": _mpi,
    "pieces": _pieces,
    "exchange": _exchange,
    "widened": _widened,
    "shared": shared.made,
    "levels": levels.made,
}


def candidates(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> dict[str, Direct]:
    """What can carry such calls out in this group, as ``choose`` has it, by the names that tables
    have for it. All ranks call.
    """
    kind, here = (primitive, group, op, dtype), place(group)
    return {
        name: _BySize(kind, {**_row(kind), here: ((0, name),)}).directed()
        for name in able(_named(kind), here)
        if _CANDIDATES[name](*kind) is not None
    }


# --- for people ---------------------------------------------------------------------------------

_WORDS = {
    "mpi": "MPI",
    "pieces": "MPI in pieces",
    "exchange": "exchange over MPI, combined here",
    "widened": "MPI in float32",
    "shared": "shared memory",
    "levels": "node by node, then between them",
}


def told(primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType) -> str:
    """How such calls are carried out, in words. All ranks call."""
    if primitive.layout is Layout.EXCHANGED:
        return "messages over MPI"
    if primitive.layout is Layout.EMPTY:
        return _WORDS["mpi"]
    kind = primitive, group, op, dtype
    (_, first, _), *others = _served(kind, _row(kind), place(group))
    words = [_WORDS[first]]
    words += [f"from {shown(least)} on {_WORDS[name]}" for least, name, _ in others]
    return "; ".join(words)
