"""Hierarchical collectives on device memory: inside clusters of ranks, then between clusters.

The clusters of a group are its nodes or, on one node, the GPUs that several ranks share. Each
cluster is a subgroup with its own route: `shared_gpu` on one GPU, `peer` with a GPU per rank, or
`hierarchical` again. In each cluster one rank per GPU is on a *rail*; all clusters use the same
number of rails. A rail is a subgroup of one rank per cluster, which uses `direct` or `staged`
between nodes and `peer` between GPUs of one node. An all_reduce

1. reduces and scatters in each cluster: each rail's rank gets a stripe of the sum;
2. reduces each stripe along its rail, on all rails at once;
3. gathers in each cluster.

With a single rail, steps 1 and 3 are a reduce and a broadcast. A node sends only as much data as
one rank, spread over the network cards of all its GPUs. (Host: `routes/host/hierarchical.py`. Cho,
Finkler, Serrano, Kung, Hunter, BlueConnect: decomposing all-reduce for deep learning on
heterogeneous network hierarchy, IBM J. Research and Development 63(6), 2019. Singh, Singh, Bhatele,
PCCL, The big send-off: high performance collectives on GPU-based supercomputers, 2025.)

All steps run in one stream. The host waits as each step's route requires. Before each chunk, and
again before its step along the rails, all ranks *synchronize* with an MPI reduction of 40 bytes on
the host: it compares their calls and reports a rank that failed. A rank that fails along its rail
notifies its cluster and fails the group on all ranks (``fail_all_ranks``).

Sums and products of narrow floats are computed and sent as float32 and rounded once. Sums are in
rank order in each cluster, then over the clusters: the same bits on all ranks, but they may differ
from the bits of other routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView, address
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation, Run
from mpicoll.core.signature import describe
from mpicoll.cuda.capabilities import Capabilities, find_clusters
from mpicoll.cuda.runtime import StridedMemory
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.errors import DistBackendError, UnsupportedError
from mpicoll.failures import lost_ranks
from mpicoll.failures.group_failure import fail_all_ranks
from mpicoll.primitives import by_name
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.device.state import (
    RouteState,
    build_on_home_device,
    exception_of,
    signature_of,
)
from mpicoll.routes.host.hierarchy import level_arithmetic, make_part, places_of
from mpicoll.routes.route import Needs, Policy, Route, Serves, has_loop

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup
    from mpicoll.routes.device.select import Agreement

__all__ = ["ROUTE"]

#: Minimum size of a call in bytes for this route. Not measured.
MIN_BYTES = 256 * 1024
#: Maximum size of a chunk in bytes; a call uses up to twice as much scratch memory.
CHUNK = 64 * 1024 * 1024
#: Alignment of stripes in bytes.
LINE = 256

#: Seconds to wait for the other ranks to free their state when negotiation fails.
_CLOSE_TIMEOUT_S = 5.0


class Part:
    """A subgroup with its own routes."""

    def __init__(self, group: ProcessGroup, agreement: Agreement, context: DeviceContext) -> None:
        self.group = group
        self.agreement = agreement
        self._context = context

    def describe_lost(self) -> list[tuple[str, str]]:
        """Return name and reason of each route that the subgroup should have and lacks."""
        agreement = self.agreement
        ranks = ", ".join(map(str, self.group.ranks))
        own = [
            (name, f"ranks {ranks} use {agreement.names[0]}, because {name} is off: {why}")
            for name, why in agreement.missing.items()
        ]
        return [*own, *agreement.missing_in_parts]

    def build(self, name: str, op: ReduceOp | None, dtype: DType) -> Step:
        kind = CallKind(by_name[name], self.group, op, dtype)
        return Step(self.group, self.agreement.build_in_part(kind), self._context)

    def abort(self, error: DistBackendError, alone: bool) -> None:
        """End waiting calls, this rank's (``alone``) or all ranks': the whole group failed."""
        self.group.fail(error)
        self.group.resources.leave(alone)
        lost_ranks.revoke(self.group)

    def close(self, limit: float) -> None:
        self.group.resources.close(limit)
        self.group.free()


class Step:
    """Calls of one kind in a subgroup, as a step of the whole group's calls."""

    def __init__(self, part: ProcessGroup, inner: Implementation, context: DeviceContext) -> None:
        self._part, self._inner, self._context = part, inner, context

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
    """The clusters and rails of a group.

    clusters: ranks of each cluster.
    places, place: position of each rank, and of this one.
    rails:    number of rails.
    lanes:    for each cluster, the index in it of each rail's rank.
    lane:     this rank's rail; None if it is not on a rail.
    inside:   subgroup of this rank's cluster; None if it has one rank.
    along:    subgroup of this rank's rail; None if it is not on a rail.
    """

    can_fail_on_device = True

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        all_ranks = agreement.capabilities
        self.clusters = find_clusters(all_ranks)
        self.places = places_of(self.clusters)
        self.place = self.places[self.me]
        used = [[all_ranks[rank].used for rank in ranks] for ranks in self.clusters]
        lanes = [  # the first rank on each GPU
            [place for place, gpu in enumerate(gpus) if gpu not in gpus[:place]] for gpus in used
        ]
        self.rails = min(map(len, lanes))
        self.lanes = [places[: self.rails] for places in lanes]
        here = self.lanes[self.place.node]
        self.lane = here.index(self.place.place) if self.place.place in here else None
        self.inside: Part | None = None
        self.along: Part | None = None
        self._met = -1  # call number of the latest comparison

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.inside, self.along) if part is not None]

    @property
    def here(self) -> Sequence[int]:
        return self.clusters[self.place.node]

    @property
    def first(self) -> int:
        """Return the index in the cluster of the rank on the first rail."""
        return self.lanes[self.place.node][0]

    @property
    def even(self) -> bool:
        """Return whether all ranks are on rails."""
        return all(len(ranks) == self.rails for ranks in self.clusters)

    def shares(self, count: int, itemsize: int) -> tuple[int, int, list[int]]:
        """Return first element and count of this rank's stripe of ``count`` elements, and the
        counts of all ranks of the cluster: 0 for ranks that are not on a rail.
        """
        each = -(-count * itemsize // (self.rails * LINE)) * LINE // itemsize
        counts, begin, own = [0] * len(self.here), 0, 0
        for rail, place in enumerate(self.lanes[self.place.node]):
            start = min(count, rail * each)
            counts[place] = min(each, count - start)
            if rail == self.lane:
                begin, own = start, counts[place]
        return begin, own, counts

    def compare(self, signature: int, number: int, failure: Exception | None) -> None:
        """Synchronize all ranks. Raises on all of them if their calls differ or one failed."""
        self._met = self.group.sequence
        mine = np.array([failure is None, signature, -signature, number, -number], np.int64)
        least = np.empty_like(mine)
        self.group.tested.Allreduce(mine, least, MPI.MIN)
        if not least[0]:
            raise failure or self.failed_elsewhere(signature)
        if least[1] != -least[2] or least[3] != -least[4]:
            words = control_messages.allgather(self.group.tested, describe(signature, number), str)
            raise self.mismatch(signature, words)

    def notify_failure(self, kind: CallKind, error: Exception) -> None:
        if self._met != self.group.sequence:
            with suppress(type(error)):
                self.compare(signature_of(kind, 0, 0)[0], 0, error)

    def run_rail(
        self,
        step: Step,
        send: DeviceView | None,
        recv: DeviceView,
        root: int = 0,
        then: tuple[Step, Extent] | None = None,
    ) -> None:
        """Run a step along this rank's rail. If it fails, notify the ranks that wait for this one.

        then: the next step in the cluster and its extent.
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

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        failures = (part.agreement.find_failure(wait) for part in self.parts)
        return next(filter(None, failures), None)

    def abort(self, error: DistBackendError, alone: bool) -> None:
        for part in self.parts:
            part.abort(error, alone)

    def close(self, limit: float) -> None:
        for part in reversed(self.parts):
            part.close(limit)
        self.along = self.inside = None


def _negotiate(agreement: Agreement) -> Levels | str:
    group, all_ranks, made, problem = agreement.group, agreement.capabilities, Levels(agreement), ""

    def part_of(ranks: Sequence[int]) -> Part:
        part = make_part(group, ranks)
        if ranks != made.here:
            part.inner = part.tested  # so that a rank can leave its rail after a failure
        return Part(
            part, agreement.agree_in(part, [all_ranks[rank] for rank in ranks]), agreement.context
        )

    if len(made.here) > 1:
        made.inside = part_of(made.here)
        if not made.inside.agreement.maps_memory:
            reasons = "; ".join(
                f"{name}: {why}" for name, why in made.inside.agreement.missing.items()
            )
            ranks = ", ".join(map(str, made.here))
            problem = f"ranks {ranks} map no memory of each other ({reasons})"
    why = next(filter(None, control_messages.allgather(group.inner, problem, str)), "")
    if why:
        made.close(_CLOSE_TIMEOUT_S)
        return why
    if made.lane is not None:
        rail = made.lane
        made.along = part_of(
            [ranks[places[rail]] for ranks, places in zip(made.clusters, made.lanes, strict=True)]
        )
    own = [lost for part in made.parts for lost in part.describe_lost()]
    lists = control_messages.allgather(group.inner, own, list[tuple[str, str]])
    made.missing_in_parts = list(dict.fromkeys(lost for each in lists for lost in each))
    return made


# --- calls --------------------------------------------------------------------------------------


def _build(kind: CallKind, agreement: Agreement) -> Implementation | None:
    """Return the implementation for calls of this kind. All ranks call.

    None if the operation needs all ranks on rails and they are not.
    """
    levels = agreement.state(Levels)
    if kind.primitive.name in _NEED_RAILS and not levels.even:
        return None

    def make(levels: Levels, kind: CallKind) -> Run:
        step, work = _BUILDERS[kind.primitive.name](levels, kind, agreement.space)

        def run(send: DeviceView | None, recv: DeviceView, extent: Extent, root: int) -> None:
            _run_chunks(levels, kind, extent, root, step, partial(work, send, recv, root))

        return run

    return build_on_home_device(kind, agreement, levels, make)


class _Arithmetic:
    """The arithmetic of a dtype on both levels; see ``level_arithmetic``."""

    def __init__(self, kind: CallKind, space: DeviceSpace) -> None:
        op, dtype = kind.op, kind.dtype
        assert op is not None and dtype is not None
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
#: step in the clusters, yields, runs the step along the rails, yields, and runs the last step in
#: the clusters.
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
    reported before the next chunk. In the last chunk only the cluster sees it.
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
    stack = space.empty(dtype, space.room(1, view.count))
    (made,) = space.places(stack, 1, view.count, view)
    assert isinstance(made, DeviceView)
    return made


def _reduction(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    primitive, group, _, dtype = kind
    assert dtype is not None
    by, everywhere, one_rail = _Arithmetic(kind, space), not primitive.root, levels.rails == 1
    wide, inside, n = by.wide, levels.inside, len(levels.here)
    down = up = along = None
    if inside is not None:
        down = inside.build("reduce" if one_rail else "reduce_scatter", by.op, wide)
        up = inside.build("broadcast" if one_rail else "all_gather", None, dtype)
    if levels.along is not None:
        along = levels.along.build(primitive.name, by.op, wide)
    step = max(1, CHUNK // wide.itemsize // LINE * LINE)

    def work(send: None, recv: DeviceView, root: int, start: int, count: int) -> Iterator[None]:
        home = levels.places[root].node
        may_write = everywhere or group.rank() == root
        gathers = everywhere or levels.place.node == home
        chunk = source = recv.part(start, count)
        begin, own, counts = levels.shares(count, wide.itemsize)
        overwrites = one_rail and levels.lane is not None
        if by.widens or (overwrites and not may_write):
            source = _like(space, chunk, wide)
            by.fill(chunk, source)
        # This rank's stripe of the sum; with a single rail, the sum overwrites the source.
        stripe = source if one_rail else _like(space, source.part(begin, own), wide)
        out = None
        if gathers:
            out = chunk if may_write else _like(space, chunk, dtype)
        result = stripe  # in the dtype of the array
        if one_rail:
            result = stripe if out is None else out
        elif by.widens:
            result = _like(space, chunk.part(begin, own), dtype)
        yield
        own = stripe.count if levels.lane is not None else 0
        if down is not None and one_rail:
            down(None, source, source.count, levels.first)
        elif down is not None:
            down(source, stripe, Blocks(counts, [own] * n))
        yield
        gathered: Extent = source.count if one_rail else Blocks([own] * n, counts)
        if along is not None and own:
            then = None if up is None or not gathers else (up, gathered)
            levels.run_rail(along, None, stripe, home, then)
        yield

        def finish() -> None:
            if own:
                by.finish(stripe, result)

        if out is not None and up is None:
            finish()
        elif out is not None and up is not None and one_rail:
            up(None, out, gathered, levels.first, finish)
        elif out is not None and up is not None:
            up(result, out, gathered, 0, finish)

    return step, work


def _broadcast(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    """Broadcast in the root's cluster, then stripes along the rails; gather in other clusters."""
    dtype = kind.dtype
    assert dtype is not None
    inside, one_rail, n = levels.inside, levels.rails == 1, len(levels.here)
    spread = last = along = None
    if inside is not None:
        spread = inside.build("broadcast", None, dtype)
        last = spread if one_rail else inside.build("all_gather", None, dtype)
    if levels.along is not None:
        along = levels.along.build("broadcast", None, dtype)
    step = max(1, CHUNK // dtype.itemsize // LINE * LINE)

    def work(send: None, recv: DeviceView, root: int, start: int, count: int) -> Iterator[None]:
        home, place = levels.places[root]
        at_home = levels.place.node == home
        chunk = recv.part(start, count)
        begin, own, counts = levels.shares(count, dtype.itemsize)
        stripe = chunk.part(begin, own)
        if not (at_home or one_rail):
            stripe = _like(space, stripe, dtype)
        yield
        if at_home and spread is not None:
            spread(None, chunk, chunk.count, place)
        yield
        own = stripe.count if levels.lane is not None else 0
        gathered: Extent = chunk.count if one_rail else Blocks([own] * n, counts)
        if along is not None and own:
            then = None if last is None or at_home else (last, gathered)
            levels.run_rail(along, None, stripe, home, then)
        yield
        if last is not None and not at_home:
            last(None if one_rail else stripe, chunk, gathered, levels.first if one_rail else 0)

    return step, work


def _blocks(
    levels: Levels, view: DeviceView, count: int, start: int, packed: DeviceView, inward: bool
) -> None:
    """Enqueue copies of a part of all ranks' blocks of ``count`` elements, from element ``start``
    on: from rank order to the order by place and cluster, or back (``inward``).
    """
    context, clusters, size = levels.context, levels.clusters, view.dtype.itemsize
    many, each = len(clusters), packed.count // levels.group.size()
    first, after, beside = clusters[0][0], clusters[1][0] - clusters[0][0], 0
    beside = clusters[0][1] - first
    lie_regularly = all(
        rank == first + cluster * after + place * beside
        for cluster, ranks in enumerate(clusters)
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
    for rank, (cluster, place) in enumerate(levels.places):
        theirs_at = address(view) + (rank * count + start) * size
        mine_at = address(packed) + (place * many + cluster) * each * size
        into, source = (theirs_at, mine_at) if inward else (mine_at, theirs_at)
        context.copy(into, source, each * size)


def _reduce_scatter(levels: Levels, kind: CallKind, space: DeviceSpace) -> _Chunks:
    """Reduce and scatter in each cluster, then along the rails."""
    dtype = kind.dtype
    assert dtype is not None and levels.inside is not None and levels.along is not None
    by, many, n = _Arithmetic(kind, space), len(levels.clusters), kind.group.size()
    wide, single = by.wide, "reduce_scatter_single"
    down = levels.inside.build(single, by.op, wide)
    along = levels.along.build(single, by.op, wide)
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
    """Gather along the rails, then in each cluster."""
    dtype = kind.dtype
    assert dtype is not None and levels.inside is not None and levels.along is not None
    many, n, single = len(levels.clusters), kind.group.size(), "all_gather_single"
    along = levels.along.build(single, None, dtype)
    up = levels.inside.build(single, None, dtype)
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
#: Operations that need all ranks on rails.
_NEED_RAILS = ("reduce_scatter", "reduce_scatter_single", "all_gather", "all_gather_single")

ROUTE = Route(
    __name__,
    "GPU by GPU or node by node, then between them",
    Serves(tuple(_BUILDERS), combines=has_loop, premultiplies=True),
    _build,
    Needs(
        "levels",
        "several nodes, or several GPUs on one, at least one of them with several ranks, which map "
        "memory of each other by CUDA IPC",
        Capabilities.lacks_gpu,
    ),
    Policy(
        min_bytes=dict.fromkeys(_BUILDERS, MIN_BYTES),
        host_waits_for=(
            "for the other ranks' hosts, twice for each 64 MiB of the message, and as the routes "
            "of its steps do: `shared_gpu`, `peer` or `copy_engine` in each node or GPU, and "
            "`direct` or `staged` between nodes, `peer` between GPUs"
        ),
    ),
    negotiate=_negotiate,
)
