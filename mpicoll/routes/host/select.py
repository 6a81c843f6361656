"""The choice of a route for host memory, the same on every rank.

It depends on operation, dtype, op, group and count, which all ranks share, and never on contiguity,
alignment or anything else that only one rank knows. The job's table names the route for each size
(`mpicoll.routes.tuning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.plan import (
    CallKind,
    Contiguous,
    Extent,
    Implementation,
    NativeCall,
    Run,
    Wrapper,
    agreed_sizes,
)  # fmt: skip
from mpicoll.core.signature import encode_kind, encode_sizes, with_root
from mpicoll.dtypes import ReduceOp
from mpicoll.output import format_bytes
from mpicoll.primitives import Layout
from mpicoll.routes.algorithms import premultiplied
from mpicoll.routes.host import exchange, hierarchical, hierarchy, lists, mpi, registry, shared
from mpicoll.routes.tuning import Steps, eligible_routes, job, name_kind


def choose(kind: CallKind, listed: bool = False) -> Implementation:
    """Return the implementation for calls of this kind.

    listed: a side with one array per rank may be a list of buffers instead of one buffer.
    """
    primitive, _, op, _ = kind
    if op is not None and op.op is ReduceOp.PREMUL_SUM:
        # Widened sums use the routes of the narrow dtype: MPI's sums of float32 are not in rank
        # order.
        row = _row(kind._replace(op=ReduceOp.SUM))
        space = exchange.get_space(kind.group)
        summed = premultiplied(kind, space, lambda wide: _implementation(wide, row).run)
        run = _compared(kind, Implementation(summed)).run  # not as a plain sum
        return Implementation(lists.packed(kind, run, lambda count: False) if listed else run)
    if primitive.layout is Layout.EMPTY:
        return _Barrier(kind)
    return _implementation(kind, _row(kind), listed, exchange.narrows(kind))


def _implementation(
    kind: CallKind, row: dict[str, Steps], listed: bool = False, narrows: bool = False
) -> Implementation:
    """Return the implementation by a row of the table; see ``choose`` and ``exchange.narrows``."""
    if not kind.primitive.even:
        return _ByPlace(kind, row)
    by_size = _BySize(kind, row, narrows)
    if not listed:
        return by_size
    return Wrapper(by_size, lists.packed(kind, by_size.run, by_size.takes_lists))


class _Barrier(Wrapper):
    """A barrier; natively, the comparison of the ranks' calls, which waits for all ranks."""

    def __init__(self, kind: CallKind) -> None:
        inner = mpi.Collective(kind)
        super().__init__(inner, inner.run)
        self._group = kind.group

    def native_calls(self) -> Sequence[NativeCall] | None:
        """Return the comparison if the ranks share memory, else MPI's barrier."""
        found: shared.Shared | None = self._group.resources.find("shared")
        return [found.native_comparison] if found else super().native_calls()


class _ByPlace(Implementation):
    """Implementation of all_to_all. No rank knows all sizes, so every call uses the route of large
    calls. If the route of small calls is shared memory, the sizes and small calls go through it.
    """

    def __init__(self, kind: CallKind, row: dict[str, Steps]) -> None:
        self._kind, self._row = kind, row
        self._chosen: Implementation | None = None

    def run(self, send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        """Run one call."""
        if self._chosen is None:  # inside a call, in order of the group's calls
            self._chosen = self._choose()
        self._chosen.run(send, recv, extent, root)

    def _choose(self) -> Implementation:
        served = _served(self._kind, self._row, place(self._kind.group))
        (_, first, _), (_, last, chosen) = served[0], served[-1]
        memory: shared.Shared | None = self._kind.group.resources.find("shared")
        if memory and first == shared.ROUTE.name != last:
            return shared.Exchange(memory, self._kind, chosen)
        return chosen

    def native_calls(self) -> Sequence[NativeCall] | None:
        """Return the native calls of the chosen route; None before the first call."""
        return None if self._chosen is None else self._chosen.native_calls()


def _compared(kind: CallKind, inner: Implementation) -> Implementation:
    """Return ``inner`` preceded by the comparison of calls, in a group that compares every call."""
    primitive, group, op, dtype = kind
    if group.size() == 1:
        return inner
    signature, run = encode_kind(primitive, dtype, op), inner.run

    def compared(send: Contiguous, recv: Contiguous, extent: Extent, root: int) -> None:
        if group.agree is not None:
            sizes = encode_sizes(agreed_sizes(primitive, extent))
            group.agree(with_root(signature, root), sizes)
        run(send, recv, extent, root)

    return Wrapper(inner, compared)


class _Step(NamedTuple):
    """The implementation of calls with blocks of at least ``min_count`` elements."""

    min_count: int
    implementation: Implementation
    takes_lists: bool


class _BySize(Implementation):
    """Selects the route by block size; if block sizes differ, the first one that supports them."""

    def __init__(self, kind: CallKind, row: dict[str, Steps], narrows: bool) -> None:
        self._kind, self._row, self._narrows = kind, row, narrows
        primitive, group, _, dtype = kind
        blocks = group.size() if primitive.many_in or primitive.many_out else 1
        self._block_bytes = dtype.itemsize * blocks
        #: Minimum count for which the placement of the ranks matters, and the steps below it.
        self._split_count = 0 if narrows else -(-_split_bytes(row) // self._block_bytes)
        self._before = self._steps_at("apart")
        self._known: list[_Step] | None = None  # the steps, once the placement is known
        self._small_end, self._run_small = _smallest(self._before, self._split_count)
        self._uneven = _find_uneven(kind)

    def _steps_at(self, placement: str) -> list[_Step]:
        """Return the steps for a placement of the ranks, the last one first."""
        served = _served(self._kind, self._row, placement, self._narrows)
        return [
            _Step(
                -(-nbytes // self._block_bytes), implementation,
                registry.HOST[name].serves.buffer_lists,
            )
            for nbytes, name, implementation in reversed(served)
        ]  # fmt: skip

    def _step(self, count: int) -> _Step:
        """Return the step for a count; inside a call, in the order of the group's calls."""
        steps = self._known
        if steps is None and count >= self._split_count:
            steps = self._known = self._steps_at(place(self._kind.group))
            self._small_end, self._run_small = _smallest(steps, _NEVER)
        return next(step for step in steps or self._before if count >= step.min_count)

    # A method, not a closure: without a reference cycle, a destroyed group frees memory at once.
    def run(
        self, send: Contiguous | None, recv: Contiguous | None, extent: Extent, root: int
    ) -> None:
        """Run one call, with the fewest steps for the smallest calls."""
        if not isinstance(extent, int):
            uneven = self._uneven
            if self._narrows and place(self._kind.group) != "node":
                uneven = self._before[-1].implementation.run  # of ``exchange.build_narrowed``
            assert uneven is not None
            uneven(send, recv, extent, root)
        elif extent < self._small_end:
            self._run_small(send, recv, extent, root)
        else:
            self._step(extent).implementation.run(send, recv, extent, root)

    def native_calls(self) -> Sequence[NativeCall] | None:
        """Return the native calls of all steps. Until the ranks' placement is known, those of sizes
        that do not depend on it, in a group that does not compare every call; else None.
        """
        steps, last = self._known or self._before, _NEVER
        if self._known is None:
            if self._kind.group.compared or not self._split_count:
                return None
            last = self._split_count
        ends = [last, *(step.min_count for step in steps)]
        return [
            call._replace(
                min_count=max(step.min_count, call.min_count),
                end_count=min(end, last, call.end_count),
            )
            for step, end in zip(steps, ends, strict=False)
            for call in step.implementation.native_calls() or ()
        ]

    def fused(self, count: int) -> Run | None:
        """Return ``fused`` of the route for this count."""
        return self._step(count).implementation.fused(count)

    def takes_lists(self, count: int) -> bool:
        """Return whether the route for this count takes lists of buffers."""
        return self._step(count).takes_lists


def _find_uneven(kind: CallKind) -> Run | None:
    """Return the function that runs calls with different blocks, or None."""
    routes = (r for r in registry.HOST.values() if kind.primitive.name in r.serves.uneven)
    route = next((route for route in routes if route.can_run_kind(kind)), None)
    if route is None:
        return None
    built = route.build(kind)
    assert built is not None
    return (built if route.policy.compares_calls else _compared(kind, built)).run


def _smallest(steps: list[_Step], end: int) -> tuple[int, Run]:
    """Return the count where the step of the smallest calls ends, at most ``end``, and its run."""
    counts = (step.min_count for step in steps[:-1])
    return min([end, *counts]), steps[-1].implementation.run


def _named(kind: CallKind) -> str:
    """Return the name in tables for calls of this kind."""
    primitive, _, op, dtype = kind
    by_mpi = op is None or (mpi.reducible(op, dtype) and kind.level is None)
    return name_kind(primitive, not by_mpi)


def _row(kind: CallKind) -> dict[str, Steps]:
    return job.table.row(_named(kind), kind.group.size())


def _served(
    kind: CallKind, row: dict[str, Steps], placement: str, narrows: bool = False
) -> list[tuple[int, str, Implementation]]:
    """Return the available steps, from 0 bytes, each with its implementation. All ranks call.

    A route that does not serve this kind of call is replaced by ``exchange``.
    """
    found: list[tuple[int, str, Implementation]] = []
    for nbytes, name in row[placement]:
        route = registry.HOST[name]
        if not route.can_run_kind(kind):
            if route.needs.placement:
                continue
            route = registry.HOST["exchange"]  # which serves every reduction, in rank order
        if not narrows or placement == "node":
            built = route.build(kind)
        elif route is hierarchical.ROUTE:
            built = hierarchical.build(kind, exchange.build_narrowed)
        else:
            built = exchange.build_narrowed(kind)
        if built is not None:
            compared = built if route.policy.compares_calls else _compared(kind, built)
            found.append((nbytes if found else 0, route.name, compared))
    return found or _served(kind, row, "apart", narrows)


def _split_bytes(row: dict[str, Steps]) -> int:
    """Return the minimum bytes for which the steps of the placements differ."""
    apart = set(row["apart"])
    return min((n for steps in row.values() for n, _ in set(steps) ^ apart), default=_NEVER)


_NEVER = 1 << 62


def place(group: ProcessGroup) -> str:
    """Return the placement of the group's ranks; see routes/tuning.py. All ranks call."""
    if group.resources.find("shared"):
        return "node"
    if hierarchy.get_or_create(group):
        return "nodes"
    return "node" if shared.get_or_create(group) else "apart"


# --- for tune, and for messages -----------------------------------------------------------------


def candidates(kind: CallKind) -> dict[str, Implementation]:
    """Return the implementations of a kind of call in its group, by route. All ranks call."""
    here = place(kind.group)
    return {
        name: _implementation(kind, {**_row(kind), here: ((0, name),)})
        for name in eligible_routes(_named(kind), here)
        if registry.HOST[name].can_run_kind(kind) and registry.HOST[name].build(kind) is not None
    }


def describe(kind: CallKind) -> str:
    """Describe the routes of a kind of call. All ranks call."""
    if kind.primitive.layout is Layout.EMPTY:
        return registry.HOST["mpi"].description
    (_, first, _), *others = _served(kind, _row(kind), place(kind.group))
    words = [registry.HOST[first].description]
    words += [
        f"from {format_bytes(nbytes)} on {registry.HOST[name].description}"
        for nbytes, name, _ in others
    ]
    return "; ".join(words)
