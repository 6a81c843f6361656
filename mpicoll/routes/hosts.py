"""The choice of a route for host memory, the same on every rank.

A route is a function of primitive, dtype, operation and group, and inside a plan of the count:
of what all ranks share. Never of contiguity, alignment or anything that one rank alone knows. For
each size the job's table says which (`mpicoll.tables`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll.calls import Blocks, Direct, Route, Way
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.groups import state
from mpicoll.primitives import Layout, Primitive
from mpicoll.routes import composed, direct, native, shared
from mpicoll.routes.algorithms import HOST
from mpicoll.tables import Steps
from mpicoll.views import View

if TYPE_CHECKING:
    from mpicoll.groups import ProcessGroup

__all__ = ["choose", "on_views", "told"]


def choose(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType | None
) -> Way:
    """What carries out calls of this kind in this group."""
    if op is not None and op.op is ReduceOp.PREMUL_SUM:
        assert dtype is not None
        everywhere = not primitive.root
        return Way(
            composed.premultiplied(
                group,
                HOST,
                dtype,
                op.factor,
                everywhere,
                lambda wide: choose(primitive, group, ReduceOp.SUM, wide).route,
            )
        )
    if primitive.layout is Layout.EXCHANGED:
        # No rank knows the others' sizes, and MPI_Alltoall and MPI_Alltoallv must not meet.
        assert dtype is not None
        even = None if primitive.listed else direct.all_to_all_even(group, dtype)
        return Way(direct.all_to_all(group, HOST, None), even)
    if primitive.layout is Layout.EMPTY:
        return Way(native.barrier(group))
    assert dtype is not None
    by_size = _BySize(primitive, group, op, dtype)
    uneven = native.all_gather_uneven(group, dtype) if primitive.name == "all_gather" else None
    by_the_buffer = by_size.directed()
    return Way(on_views(by_the_buffer, uneven), by_the_buffer, by_size.prompt)


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
    prompt: Callable[[], bool] | None


class _BySize:
    """The calls of one kind in one group, each by the route for its size."""

    def __init__(
        self, primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
    ) -> None:
        self._kind = primitive, group, op, dtype
        blocks = group.size() if primitive.many_in or primitive.many_out else 1
        self._block = dtype.itemsize * blocks
        self._row = _row(primitive, group, op, dtype)
        #: Elements from which on it matters where the ranks are.
        self._split = -(-_split(self._row) // self._block)
        self._steps: list[_Step] | None = None  # until that is known
        self._before = self._made("apart")

    def directed(self) -> Direct:
        """What carries calls out, in few steps for the smallest.

        It is not kept here: a plan that is dropped lets go at once of the memory that it shares.
        """
        last = self._before[-1]
        seconds = [step.fewest for step in self._before[:-1]]
        few, first = min([self._split, *seconds]), last.direct

        def direct(send: Any, recv: Any, count: int, root: int) -> None:
            if count < few:
                first(send, recv, count, root)
            else:
                self._step(count).direct(send, recv, count, root)

        return direct

    def _step(self, count: int) -> _Step:
        """The step for so many elements; inside a call, in the order of the group's calls."""
        steps = self._steps
        if steps is None:
            if count < self._split:
                steps = self._before
            else:
                steps = self._steps = self._made(_place(self._kind[1]))
        for step in steps:
            if count >= step.fewest:
                return step
        raise AssertionError(count)

    def prompt(self, count: int) -> bool:
        """See Way."""
        if self._steps is None:
            return False
        prompt = self._step(count).prompt
        return prompt is not None and prompt()

    def _made(self, place: str) -> list[_Step]:
        """The steps where the ranks are at ``place``, the last one first."""
        found: list[_Step] = []
        for least, name in self._row[place]:
            made = _CANDIDATES[name](*self._kind)
            if made is not None:
                found.insert(0, _Step(-(-least // self._block) if found else 0, *made))
        return found or self._made("apart")


def _row(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> dict[str, Steps]:
    ours = op is not None and not native.reducible(op, dtype)
    kind = f"{primitive.name} of others" if ours else primitive.name
    return state.table.row(kind, group.size())


def _split(row: dict[str, Steps]) -> int:
    """Bytes from which on the places differ."""
    differ = [
        min((least for least, _ in set(steps) ^ set(row["apart"])), default=_NEVER)
        for steps in row.values()
    ]
    return min(differ)


_NEVER = 1 << 62


def _place(group: ProcessGroup) -> str:
    """Where the ranks of the group are, as far as it matters. All ranks call."""
    if shared.of(group):
        return "node"
    return "apart"


# --- what carries calls out ---------------------------------------------------------------------

#: What carries calls out, and tells of an asynchronous one whether to do so at once.
Candidate = tuple[Direct, "Callable[[], bool] | None"]


def _mpi(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Candidate | None:
    if op is None:
        return native.MOVES[primitive.name](group, dtype), None
    if not native.reducible(op, dtype):
        return None
    return native.REDUCTIONS[primitive.name](group, dtype, op), None


def _pieces(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Candidate | None:
    if op is None or primitive.name != "all_reduce" or not native.reducible(op, dtype):
        return None
    return native.all_reduce(group, dtype, op, native.PIECE), None


def _exchange(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Candidate | None:
    return None if op is None else (composed.REDUCTIONS[primitive.name](group, dtype, op), None)


def _shared(
    primitive: Primitive, group: ProcessGroup, op: ReduceOp | None, dtype: DType
) -> Candidate | None:
    return shared.made(primitive, group, op, dtype)


_CANDIDATES: dict[str, Callable[..., Candidate | None]] = {
    "mpi": _mpi,
    "pieces": _pieces,
    "exchange": _exchange,
    "shared": _shared,
}


# --- for people ---------------------------------------------------------------------------------

_WORDS = {
    "mpi": "MPI",
    "pieces": "MPI in pieces",
    "exchange": "exchange over MPI, combined here",
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
    steps = _row(*kind)[_place(group)]
    able = [(least, name) for least, name in steps if _CANDIDATES[name](*kind) is not None]
    words = [_WORDS[able[0][1]]]
    words += [f"from {_size(least)} on {_WORDS[name]}" for least, name in able[1:]]
    return "; ".join(words)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"
