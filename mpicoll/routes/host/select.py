"""The choice of a route for host memory, the same on every rank.

A route is a function of primitive, dtype, operation and group, and inside a plan of the count: of
what all ranks share. Never of contiguity, alignment or anything that one rank alone knows. For each
size the job's table names it (`mpicoll.routes.tuning`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mpicoll.core.plan import (
    CallKind,
    Contiguous,
    Extent,
    Implementation,
    Short,
    add_fused,
    add_short,
    agreed_sizes,
    find_fused,
    find_short,
)
from mpicoll.core.signature import encode_kind, encode_sizes, with_root
from mpicoll.dtypes import ReduceOp
from mpicoll.output import format_bytes
from mpicoll.primitives import Layout
from mpicoll.routes import registry
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.host import exchange, hierarchy, lists, mpi, shared, single_copy
from mpicoll.routes.tuning import Steps, eligible_routes, job, name_kind

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["candidates", "choose", "describe", "place"]


def choose(kind: CallKind, listed: bool = False) -> Implementation:
    """Return the implementation for calls of this kind in this group; ``listed``: where one array
    for each rank may come as a list of buffers, instead of as one.
    """
    primitive, _, op, dtype = kind
    if op is not None and op.op is ReduceOp.PREMUL_SUM:
        # A widened sum goes by the routes of the narrow dtype: MPI's own sums of float32 are not in
        # rank order.
        row = _row(kind._replace(op=ReduceOp.SUM))
        space = exchange.get_space(kind.group)
        summed = premultiplied(kind, space, lambda wide: _implementation(wide, row))
        summed = _compared(kind, summed)  # what it sums is compared as a sum
        return lists.packed(kind, summed, lambda count: False) if listed else summed
    if primitive.layout is Layout.EMPTY:
        return add_short(mpi.build(kind), partial(_short_agreement, kind.group))
    assert dtype is not None
    return _implementation(kind, _row(kind), listed)


def _implementation(kind: CallKind, row: dict[str, Steps], listed: bool = False) -> Implementation:
    """Return the implementation of a kind of call by a row of the tuning table, for any extent.

    listed: see ``choose``.
    """
    if not kind.primitive.even:
        return _by_place(kind, row)
    sizes = _BySize(kind, row)
    route = _of_any_extent(kind, sizes.build())
    if not listed:
        return route
    packed = lists.packed(kind, route, sizes.takes_lists)
    return _with_ways_of(route, packed)


def _of_any_extent(kind: CallKind, even: Implementation) -> Implementation:
    """Return an implementation for blocks of different sizes, too, where a route serves such."""
    routes = (r for r in registry.HOST.values() if kind.primitive.name in r.uneven)
    by = next((route for route in routes if route.serves_kind(kind)), None)
    if by is None:
        return even
    built = by.build(kind)
    assert built is not None
    uneven = built if by.compares else _compared(kind, built)

    def any_extent(
        send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int
    ) -> None:
        (even if isinstance(extent, int) else uneven)(send, recv, extent, root)

    return _with_ways_of(even, any_extent)


def _with_ways_of(route: Implementation, wrapper: Implementation) -> Implementation:
    """Return a wrapper of a route whose short ways, and those of tables, are the route's."""
    add_fused(wrapper, lambda count: find_fused(route, count))
    return add_short(wrapper, lambda: find_short(route))


def _by_place(kind: CallKind, row: dict[str, Steps]) -> Implementation:
    """Return the implementation of calls whose size no rank knows: by the route of large ones, but
    if that of small ones is shared memory, in which the ranks first tell each other the sizes,
    small ones are carried out by the way.
    """
    route: Implementation | None = None

    def by_place(send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        nonlocal route
        if route is None:  # inside a call, in order of the group's calls
            served = _served(kind, row, place(kind.group))
            (_, first, _), (_, last, route) = served[0], served[-1]
            memory: shared.Shared | None = kind.group.resources.find("shared")
            # One copy has such a round of its own in front.
            if (
                memory
                and first == shared.ROUTE.name
                and last not in (first, single_copy.ROUTE.name)
            ):
                route = memory.build_exchange(kind, route)
        route(send, recv, extent, root)

    return add_short(by_place, lambda: None if route is None else find_short(route))


def _short_agreement(group: ProcessGroup) -> list[Short]:
    """Return what compares a group's calls, which waits for all ranks: a barrier."""
    found: shared.Shared | None = group.resources.find("shared")
    return [found.short_agreement] if found else []


def _compared(kind: CallKind, route: Implementation) -> Implementation:
    """Return an implementation whose calls are compared before they begin, where each call of the
    group is.
    """
    primitive, group, op, dtype = kind
    if group.size() == 1:
        return route
    signature = encode_kind(primitive, dtype, op, 0)

    def compared(send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        if group.agree is not None:
            sizes = encode_sizes(agreed_sizes(primitive, extent))
            group.agree(with_root(signature, root), sizes)
        route(send, recv, extent, root)

    return compared


class _Step(NamedTuple):
    """The implementation of calls from ``fewest`` elements a block on; ``lists``: it takes such."""

    fewest: int
    route: Implementation
    lists: bool


class _BySize:
    """The calls of one kind in one group, each by the route for its size."""

    def __init__(self, kind: CallKind, row: dict[str, Steps]) -> None:
        self._kind = kind
        primitive, group, _, dtype = kind
        assert dtype is not None
        blocks = group.size() if primitive.many_in or primitive.many_out else 1
        self._block = dtype.itemsize * blocks
        self._row = row
        #: Elements from which on it matters where the ranks are.
        self._split = -(-_split(self._row) // self._block)
        self._steps: list[_Step] | None = None  # until that is known
        self._before = self._steps_at("apart")

    def build(self) -> Implementation:
        """Return the implementation, in few steps for the smallest.

        It is not kept here: a plan that is dropped lets go at once of the memory that it shares.
        """
        few, first = _smallest(self._before, self._split)
        known = False

        def by_size(
            send: Contiguous | None, recv: Contiguous | None, count: int, root: int
        ) -> None:
            nonlocal few, first, known
            if count < few:
                first(send, recv, count, root)
                return
            step = self._step(count)
            if not known and self._steps is not None:
                known, (few, first) = True, _smallest(self._steps, _NEVER)
            step.route(send, recv, count, root)

        add_fused(by_size, lambda count: find_fused(self._step(count).route, count))
        return add_short(by_size, self._find_short)

    def _find_short(self) -> list[Short] | None:
        steps = self._steps
        if steps is None:
            return None
        ends = [_NEVER, *(step.fewest for step in steps)]
        return [
            short._replace(fewest=step.fewest, end=end)
            for step, end in zip(steps, ends, strict=False)
            for short in find_short(step.route) or ()
        ]

    def takes_lists(self, count: int) -> bool:
        """Return whether the route of ``count`` elements takes lists; inside a call, as above."""
        return self._step(count).lists

    def _step(self, count: int) -> _Step:
        """Return the step for ``count`` elements; inside a call, in order of the group's calls."""
        steps = self._steps
        if steps is None:
            if count < self._split:
                steps = self._before
            else:
                steps = self._steps = self._steps_at(place(self._kind.group))
        for step in steps:
            if count >= step.fewest:
                return step
        raise AssertionError(count)

    def _steps_at(self, place: str) -> list[_Step]:
        """Return the steps where the ranks are at ``place``, the last one first."""
        served = _served(self._kind, self._row, place)
        return [
            _Step(-(-least // self._block), route, registry.HOST[name].lists)
            for least, name, route in reversed(served)
        ]


def _smallest(steps: list[_Step], end: int) -> tuple[int, Implementation]:
    """Return the count up to which the step for the smallest serves, at most ``end``, and it."""
    return min([end, *(step.fewest for step in steps[:-1])]), steps[-1].route


def _named(kind: CallKind) -> str:
    """Return the name of such calls in tables."""
    primitive, _, op, dtype = kind
    assert dtype is not None
    by_mpi = op is None or (mpi.reducible(op, dtype) and kind.level is None)
    return name_kind(primitive, not by_mpi)


def _row(kind: CallKind) -> dict[str, Steps]:
    return job.table.row(_named(kind), kind.group.size())


def _served(
    kind: CallKind, row: dict[str, Steps], place: str
) -> list[tuple[int, str, Implementation]]:
    """Return the available steps, from 0 on, each with its implementation. All ranks call.

    A route that does not serve such calls is replaced by ``exchange``, and one that the group
    cannot have by what it declares.
    """
    found: list[tuple[int, str, Implementation]] = []
    for least, name in row[place]:
        if not registry.HOST[name].serves_kind(kind):
            if registry.HOST[name].place:
                continue
            name = "exchange"  # which serves every reduction, in rank order
        route = registry.HOST[name].build(kind)
        if route is None and registry.HOST[name].instead:
            name = registry.HOST[name].instead
            route = registry.HOST[name].build(kind)
        if route is not None:
            compared = route if registry.HOST[name].compares else _compared(kind, route)
            found.append((least if found else 0, name, compared))
    return found or _served(kind, row, "apart")


def _split(row: dict[str, Steps]) -> int:
    """Return the bytes from which on the places differ."""
    differ = [
        min((least for least, _ in set(steps) ^ set(row["apart"])), default=_NEVER)
        for steps in row.values()
    ]
    return min(differ)


_NEVER = 1 << 62


def place(group: ProcessGroup) -> str:
    """Return where the ranks of the group are, as far as it matters. All ranks call."""
    if group.resources.find("shared"):  # a rank may find out in a call that others do not make
        return "node"
    if hierarchy.get_or_create(group):
        return "nodes"
    if not shared.get_or_create(group):
        return "apart"
    # While all ranks are here: later they may come in different calls, which memory compares.
    single_copy.get_or_create(group)
    return "node"


# --- for tune, and for people -------------------------------------------------------------------


def candidates(kind: CallKind) -> dict[str, Implementation]:
    """Return the implementations of such calls in this group, as ``choose`` has them, by the names
    of the routes. All ranks call.
    """
    here = place(kind.group)
    return {
        name: _implementation(kind, {**_row(kind), here: ((0, name),)})
        for name in eligible_routes(_named(kind), here)
        if registry.HOST[name].serves_kind(kind) and registry.HOST[name].build(kind) is not None
    }


def describe(kind: CallKind) -> str:
    """Return how such calls are carried out, in words. All ranks call."""
    if kind.primitive.layout is Layout.EMPTY:
        return registry.HOST["mpi"].words
    (_, first, _), *others = _served(kind, _row(kind), place(kind.group))
    words = [registry.HOST[first].words]
    words += [
        f"from {format_bytes(least)} on {registry.HOST[name].words}" for least, name, _ in others
    ]
    return "; ".join(words)
