"""Hierarchical collectives on device memory: inside each node, then between nodes.

Steps and rails are as in `routes/host/hierarchical.py`, except that the ranks of each node are a
subgroup with its own route, `peer` or `ipc`, and the ranks of each rail a subgroup that uses
`direct` or `staged`. The rails use the network cards of all GPUs. (Cho et al., BlueConnect, IBM J.
Research and Development 63(6), 2019; Singh et al., The big send-off, 2025.)

All steps run in one stream. The host waits as each step's route requires. Before each chunk, and
again before its step along the rails, all ranks *synchronize* with an MPI reduction of 40 bytes on
the host: it compares their calls and reports a rank that failed. A rank that fails along its rail
notifies its node and fails the group on all ranks (``fail_all_ranks``).

Sums and products of narrow floats are computed and sent as float32 and rounded once. Sums are in
rank order in each node, then over the nodes: the same bits on all ranks, but they may differ
from the bits of other routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView, address
from mpicoll.core.plan import Blocks, CallKind, Extent, Run
from mpicoll.core.signature import describe
from mpicoll.cuda.capabilities import Capabilities, find_nodes
from mpicoll.cuda.runtime import StridedMemory
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import DistBackendError, UnsupportedError
from mpicoll.failures import lost_ranks
from mpicoll.failures.group_failure import fail_all_ranks
from mpicoll.primitives import by_name
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.device.state import (
    RELEASE_TIMEOUT_S,
    RouteState,
    Unavailable,
    exception_of,
    on_all_ranks,
    signature_of,
)
from mpicoll.routes.host.hierarchy import level_arithmetic, make_part, places_of
from mpicoll.routes.route import Needs, Policy, Route, Serves, has_loop

if TYPE_CHECKING:
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Minimum size of a call in bytes for this route: a bound, not measured. A smaller call takes less
#: time than the waits for all ranks before each step. Timing both routes at run time is no
#: alternative: sums would differ in the last bits from run to run.
MIN_BYTES = 256 * 1024
#: Maximum size of a chunk in bytes; a call uses up to twice as much scratch memory.
CHUNK = 64 * 1024 * 1024
#: Alignment of stripes in bytes.
LINE = 256


class Step:
    """Calls of one kind in a subgroup, as a step of the whole group's calls."""

    def __init__(self, part: Agreement, name: str, op: ReduceOp | None, dtype: DType) -> None:
        self._part, self._context = part.group, part.context
        self._inner = part.build_in_part(CallKind(by_name[name], part.group, op, dtype))

    def __call__(
        self,
        send: DeviceView | None,
        recv: DeviceView | None,
        extent: Extent,
        root: int = 0,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Run one call. All ranks of the subgroup call.

        before: runs first; if it fails, the other ranks are notified.
        """
        self._part.sequence += 1
        try:
            if before is not None:
                before()
            self._inner.run(send, recv, extent, root)
        except Exception as error:
            self._inner.notify_failure(error, self._context, extent)
            raise

    def skip(self, error: Exception, extent: Extent) -> None:
        """Notify the other ranks that this rank failed and skips the call."""
        self._part.sequence += 1
        self._inner.notify_failure(error, self._context, extent)


class Levels(RouteState):
    """The nodes and rails of a group.

    nodes:   ranks of each node.
    places, place: node, and index on that node, of each rank, and of this one.
    here:    ranks on this rank's node.
    rails:   number of rails: the size of the smallest node.
    on_rail: whether this rank is on a rail, whose number is its index on the node.
    even:    whether all ranks are on rails.
    inside:  Agreement of this rank's node; None if the node has one rank.
    along:   Agreement of this rank's rail; None if it is not on a rail.
    """

    can_fail_on_device = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.nodes = find_nodes(agreement.capabilities)
        self.places = places_of(self.nodes)
        self.place = self.places[self.me]
        self.here = self.nodes[self.place.node]
        self.rails = min(map(len, self.nodes))
        self.on_rail = self.place.place < self.rails
        self.even = self.rails == max(map(len, self.nodes))
        self.inside: Agreement | None = None
        self.along: Agreement | None = None
        try:
            on_all_ranks(self.group, "", lambda: self._map_inside(agreement))
            on_all_ranks(self.group, "", lambda: self._join_rail(agreement))
        except Unavailable:
            self._close_incomplete()
            raise

    def _map_inside(self, agreement: Agreement) -> None:
        """Make the node's Agreement. Raises UnsupportedError if its ranks cannot map memory."""
        if len(self.here) == 1:
            return
        self.inside = self._part_of(agreement, self.here)
        if not self.inside.states:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.inside.missing.items())
            ranks = ", ".join(map(str, self.here))
            raise UnsupportedError(f"ranks {ranks} cannot map each other's memory ({reasons})")

    def _join_rail(self, agreement: Agreement) -> None:
        if self.on_rail:
            self.along = self._part_of(agreement, [ranks[self.place.place] for ranks in self.nodes])

    def _part_of(self, agreement: Agreement, ranks: Sequence[int]) -> Agreement:
        part = make_part(self.group, ranks)
        if ranks is not self.here:
            part.inner = part.tested  # so that a rank can leave its rail after a failure
        try:
            return agreement.agree_in(part, [agreement.capabilities[rank] for rank in ranks])
        except BaseException:
            part.free()
            raise

    def _close_incomplete(self) -> None:
        """Close the parts after a failure. All ranks call. A rank that has failed to make the part
        of its node does not close it, so the others do not wait for it.
        """
        have_part = control_messages.allgather(self.group.inner, self.inside is not None, bool)
        is_complete = all(have_part[rank] for rank in self.here)
        self.close(RELEASE_TIMEOUT_S if is_complete else 0.0)

    @property
    def parts(self) -> Sequence[Agreement]:
        return [part for part in (self.inside, self.along) if part is not None]

    def shares(self, count: int, itemsize: int) -> tuple[int, int, list[int]]:
        """Return first element and count of this rank's stripe of ``count`` elements, and the
        counts of all ranks of the node: 0 for ranks that are not on a rail.
        """
        each = -(-count * itemsize // (self.rails * LINE)) * LINE // itemsize
        starts = [min(count, place * each) for place in range(self.rails)]
        counts = [min(each, count - start) for start in starts]
        counts += [0] * (len(self.here) - self.rails)
        place = self.place.place
        return starts[place] if self.on_rail else 0, counts[place], counts

    def serves(self, kind: CallKind) -> bool:
        return self.even or not (kind.primitive.many_in or kind.primitive.many_out)

    def bind(self, kind: CallKind, space: DeviceSpace) -> Run:
        step, work = _BUILDERS[kind.primitive.name](self, kind, space)

        def run(send: DeviceView | None, recv: DeviceView, extent: Extent, root: int) -> None:
            _run_chunks(self, kind, extent, root, step, partial(work, send, recv, root))

        return run

    def compare(self, signature: int, number: int, failure: Exception | None) -> None:
        """Synchronize all ranks; see RouteState."""
        self.met = self.group.sequence
        mine = np.array([failure is None, signature, -signature, number, -number], np.int64)
        least = np.empty_like(mine)
        self.group.tested.Allreduce(mine, least, MPI.MIN)
        if not least[0]:
            raise failure or self.failed_elsewhere(signature)
        if least[1] != -least[2] or least[3] != -least[4]:
            words = control_messages.allgather(self.group.tested, describe(signature, number), str)
            raise self.mismatch(signature, words)

    def run_rail(
        self,
        step: Step,
        send: DeviceView | None,
        recv: DeviceView,
        root: int = 0,
        then: tuple[Step, Extent] | None = None,
    ) -> None:
        """Run a step along this rank's rail. If it fails, notify the ranks that wait for this one.

        then: the next step in the node and its extent.
        """
        block = recv if send is None or recv.count < send.count else send
        try:
            step(send, recv, block.count, root)
        except Exception as error:
            if then is not None:
                then[0].skip(error, then[1])
            if self.group.error is None:
                fail_all_ranks(self.group, error)
            raise

    def abort(self, error: DistBackendError, alone: bool) -> None:
        for part in self.parts:
            part.group.fail(error)
            part.group.resources.leave(alone)
            lost_ranks.revoke(part.group)

    def close(self, limit: float) -> None:
        for part in reversed(self.parts):
            part.group.resources.close(limit)
            part.group.free()
        self.along = self.inside = None


# --- calls --------------------------------------------------------------------------------------


class _Arithmetic:
    """The arithmetic of a dtype on both levels; see ``level_arithmetic``."""

    def __init__(self, kind: CallKind, space: DeviceSpace) -> None:
        op, dtype = kind.op, kind.dtype
        assert op is not None
        self._n, self._space = kind.group.size(), space
        self._averages = op is ReduceOp.AVG
        self.wide, self.op = level_arithmetic(dtype, op)
        self.widens = self.wide is not dtype

    def fill(self, source: DeviceView, into: DeviceView) -> None:
        if self.widens:
            self._space.scale(source, 1, into)
        else:
            self._space.copy(source, into)

    def finish(self, total: DeviceView, out: DeviceView) -> None:
        """Enqueue the conversion of a combination of all ranks to results, maybe in place."""
        if not total.count:
            return
        if self._averages:
            self._space.combine(ReduceOp.AVG, [total], total, self._n)
        if self.widens:
            self._space.narrow(total, out)
        elif total.address != out.address:
            self._space.copy(total, out)


#: Elements of a chunk, and the function that runs one, given the call's input and output, root, and
#: the chunk's first element and count: it allocates and fills its memory, yields, runs the first
#: step in the nodes, yields, runs the step along the rails, yields, and runs the last step in the
#: nodes.
_Chunks = tuple[int, Callable[..., Iterator[None]]]


def _run_chunks(
    levels: Levels,
    kind: CallKind,
    extent: Extent,
    root: int,
    step: int,
    work: Callable[[int, int], Iterator[None]],
) -> None:
    """Run one call, chunk by chunk.

    Raises on all ranks if their calls differ or one lacks memory. A failure after the rails is
    reported before the next chunk. In the last chunk only the node sees it.
    """
    if not isinstance(extent, int):
        raise UnsupportedError(
            f"{kind.primitive.name}: the device route hierarchical takes blocks of one size; use "
            "another route"
        )
    has_first_step = not kind.primitive.name.startswith("all_gather")
    signature = signature_of(kind, extent, root)
    context, count = levels.context, extent
    failed: Exception | None = None

    def begin(chunk: Iterator[None]) -> None:
        failure = failed or levels.find_failure()
        if failure is not None:
            raise failure
        next(chunk)

    mark = context.mark()
    for start in range(0, max(count, 1), step):
        context.release(mark)
        chunk = work(start, min(step, count - start))
        levels.compare(*signature, exception_of(partial(begin, chunk)))
        if not count:
            break
        if has_first_step:
            levels.compare(*signature, exception_of(partial(next, chunk)))
        next(chunk)
        failed = exception_of(partial(next, chunk, None))
    if failed is not None:
        raise failed


def _like(space: DeviceSpace, view: DeviceView, dtype: DType) -> DeviceView:
    """Return scratch for the elements of a view, with its alignment (modulo PIECE)."""
    (made,) = space.places(space.empty(dtype, space.room(1, view.count)), 1, view.count, view)
    assert isinstance(made, DeviceView)
    return made


def _step(part: Agreement | None, name: str, op: ReduceOp | None, dtype: DType) -> Step | None:
    return None if part is None else Step(part, name, op, dtype)


def _reduction(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    primitive, group, _, dtype = kind
    by, everywhere = _Arithmetic(kind, space), not primitive.root
    wide, n = by.wide, len(levels.here)
    down = _step(levels.inside, "reduce_scatter", by.op, wide)
    along = _step(levels.along, primitive.name, by.op, wide)
    up = _step(levels.inside, "all_gather", None, dtype)
    step = max(1, CHUNK // wide.itemsize // LINE * LINE)

    def work(send: None, recv: DeviceView, root: int, start: int, count: int) -> Iterator[None]:
        home = levels.places[root].node
        may_write = everywhere or group.rank() == root
        gathers = everywhere or levels.place.node == home
        chunk = source = recv.part(start, count)
        begin, own, counts = levels.shares(count, wide.itemsize)
        gathered = Blocks([own] * n, counts)
        if by.widens or (down is None and not may_write):
            source = _like(space, chunk, wide)
            by.fill(chunk, source)
        # This rank's stripe of the sum, and of the result in the dtype of the array.
        stripe = result = source if down is None else _like(space, source.part(begin, own), wide)
        if by.widens:
            result = _like(space, chunk.part(begin, own), dtype)
        out = chunk if may_write else _like(space, chunk, dtype) if gathers else None
        yield
        if down is not None:
            down(source, stripe, Blocks(counts, [own] * n))
        yield
        if along is not None and own:
            levels.run_rail(
                along, None, stripe, home, None if up is None or not gathers else (up, gathered)
            )
        yield
        if out is not None and up is None:
            by.finish(stripe, out)
        elif out is not None and up is not None:
            up(result, out, gathered, 0, partial(by.finish, stripe, result))

    return step, work


def _broadcast(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    """Broadcast in the root's node, then stripes along the rails; gather in the other nodes."""
    dtype = kind.dtype
    n = len(levels.here)
    spread = _step(levels.inside, "broadcast", None, dtype)
    along = _step(levels.along, "broadcast", None, dtype)
    up = _step(levels.inside, "all_gather", None, dtype)
    step = max(1, CHUNK // dtype.itemsize // LINE * LINE)

    def work(send: None, recv: DeviceView, root: int, start: int, count: int) -> Iterator[None]:
        home, place = levels.places[root]
        chunk = recv.part(start, count)
        begin, own, counts = levels.shares(count, dtype.itemsize)
        stripe, gathered = chunk.part(begin, own), Blocks([own] * n, counts)
        gathers = up is not None and levels.place.node != home
        if gathers:
            stripe = _like(space, stripe, dtype)
        yield
        if spread is not None and levels.place.node == home:
            spread(None, chunk, count, place)
        yield
        if along is not None and own:
            then = (up, gathered) if up is not None and gathers else None
            levels.run_rail(along, None, stripe, home, then)
        yield
        if up is not None and gathers:
            up(stripe, chunk, gathered)

    return step, work


def _blocks(
    levels: Levels, view: DeviceView, count: int, start: int, packed: DeviceView, inward: bool
) -> None:
    """Enqueue copies of a part of all ranks' blocks of ``count`` elements, from element ``start``
    on: from rank order to the order by place and node, or back (``inward``).
    """
    context, nodes, size = levels.context, levels.nodes, view.dtype.itemsize
    many, each = len(nodes), packed.count // levels.group.size()
    first, after, beside = nodes[0][0], nodes[1][0] - nodes[0][0], nodes[0][1] - nodes[0][0]
    lie_regularly = all(
        rank == first + node * after + place * beside
        for node, ranks in enumerate(nodes)
        for place, rank in enumerate(ranks)
    )
    if lie_regularly:
        block = count * size
        theirs = StridedMemory(
            address(view) + first * block + start * size, (beside * block, after * block, size)
        )
        mine = StridedMemory(address(packed), (many * each * size, each * size, size))
        context.runtime.copy_strided(
            context.index, *((theirs, mine) if inward else (mine, theirs)),
            (levels.rails, many, each), size, context.work,
        )  # fmt: skip
        return
    for rank, (node, place) in enumerate(levels.places):
        theirs_at = address(view) + (rank * count + start) * size
        mine_at = address(packed) + (place * many + node) * each * size
        into, source = (theirs_at, mine_at) if inward else (mine_at, theirs_at)
        context.copy(into, source, each * size)


def _reduce_scatter(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    """Reduce and scatter in each node, then along the rails."""
    dtype = kind.dtype
    assert levels.inside is not None and levels.along is not None
    by, many, n = _Arithmetic(kind, space), len(levels.nodes), kind.group.size()
    wide, single = by.wide, "reduce_scatter_single"
    down = Step(levels.inside, single, by.op, wide)
    along = Step(levels.along, single, by.op, wide)
    step = max(1, CHUNK // (n * wide.itemsize))

    def work(
        send: DeviceView, recv: DeviceView, root: int, start: int, count: int
    ) -> Iterator[None]:
        out = total = recv.part(start, count)
        rows, packed = space.empty(wide, many * count), space.empty(dtype, n * count)
        _blocks(levels, send, recv.count, start, packed, False)
        source = packed
        if by.widens:
            source, total = space.empty(wide, n * count), space.empty(wide, count)
            by.fill(packed, source)
        yield
        down(source, rows, rows.count)
        yield
        levels.run_rail(along, rows, total)
        yield
        by.finish(total, out)

    return step, work


def _all_gather(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    """Gather along the rails, then in each node."""
    dtype = kind.dtype
    assert levels.inside is not None and levels.along is not None
    many, n, single = len(levels.nodes), kind.group.size(), "all_gather_single"
    along = Step(levels.along, single, None, dtype)
    up = Step(levels.inside, single, None, dtype)
    step = max(1, CHUNK // (n * dtype.itemsize))

    def work(
        send: DeviceView, recv: DeviceView, root: int, start: int, count: int
    ) -> Iterator[None]:
        mine = send.part(start, count)
        column, packed = space.empty(dtype, many * count), space.empty(dtype, n * count)
        yield
        levels.run_rail(along, mine, column, then=(up, column.count))
        yield
        up(column, packed, column.count)
        _blocks(levels, recv, send.count, start, packed, True)

    return step, work


_BUILDERS: dict[str, Callable[[Levels, CallKind, DeviceSpace], _Chunks]] = {
    "all_reduce": _reduction,
    "reduce": _reduction,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
}

ROUTE = Route(
    __name__,
    "node by node, then between them",
    Serves(tuple(_BUILDERS), combines=has_loop, premultiplies=True),
    Levels.build,
    Needs(
        "nodes",
        "several nodes, at least one with several ranks, and CUDA IPC in each",
        Capabilities.lacks_gpu,
    ),
    Policy(
        min_bytes=dict.fromkeys(_BUILDERS, MIN_BYTES),
        host_waits_for=(
            "for the other ranks' hosts, twice for each 64 MiB of the message, and as the routes "
            "of its steps do: `peer` or `ipc` in each node, `direct` or `staged` between nodes"
        ),
    ),
    negotiate=Levels,
)
