"""Levels of device memory: among ranks that are near each other, then between these clusters.

The clusters of a group on several nodes are its nodes; those of a group on one node are its GPUs,
if ranks share some of them. Each cluster is a group of its own that takes the best route there is:
`shared_gpu` on one GPU, `peer` where each rank has one, this one again where ranks share several.
Of each GPU in a cluster one rank is on a *rail*, as many in every cluster. A rail joins the ranks
at the same place of all clusters and is a group of its own, too, which goes by `direct` or `staged`
between nodes, and by `peer` between the GPUs of one. An all_reduce

1. is reduced and scattered in each cluster: each rail's rank gets a stripe of the sum;
2. is reduced along the rails, each stripe along its own, all at once;
3. is gathered in each cluster.

With a single rail it is reduced to that rank, and broadcast. So a node sends no more than one rank
alone would, by the network cards near all its GPUs, and a rank on another node does not keep the
others from reaching each other's memory. (On the host: `routes/host/hierarchical.py`. The scheme is
that of Cho, Finkler, Serrano, Kung, Hunter, BlueConnect: decomposing all-reduce for deep learning
on heterogeneous network hierarchy, IBM J. Research and Development 63(6), 2019, and of PCCL: Singh,
Singh, Bhatele, The big send-off: high performance collectives on GPU-based supercomputers, 2025.)

All steps work in one stream, one after the other. On the host a step waits for what its route waits
for. Before each chunk of a message all ranks meet: their calls are compared, and a rank says if it
lacks memory; they meet again before the chunk goes along the rails, for a rank that has failed in
its cluster. (These are reductions of 40 bytes of the host's.) A rank that fails along its rail has
those of its cluster leave the call, and closes the group for all (``fail_all_ranks``): ranks that
wait for it in MPI test their requests, and leave, those that wait on their GPUs are ended there.

Sums and products of narrow floats are float32 from their elements to the result, which is rounded
once; they travel as float32. Sums are of each cluster in rank order, then of the clusters: the same
bits on all ranks, but not those of other routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from mpicoll import control_messages
from mpicoll.arrays.views import DeviceView, address
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation, take_leave
from mpicoll.core.signature import decode_primitive, describe
from mpicoll.cuda.capabilities import Capabilities, find_clusters
from mpicoll.cuda.runtime import StridedMemory
from mpicoll.cuda.streams import DeviceContext
from mpicoll.dtypes import DType, Kind, ReduceOp
from mpicoll.dtypes import by_name as dtypes
from mpicoll.errors import DistBackendError, MismatchError, UnsupportedError
from mpicoll.failures import lost_ranks
from mpicoll.failures.consistency import describe_by_rank
from mpicoll.failures.group_failure import fail_all_ranks
from mpicoll.kernels.reduction import find_loop
from mpicoll.primitives import by_name as primitives
from mpicoll.routes.device.space import DeviceSpace
from mpicoll.routes.device.state import Agreed, RouteState, build_at_home, failure_of
from mpicoll.routes.device.user_buffers import signature_of
from mpicoll.routes.host.hierarchy import make_part
from mpicoll.routes.route import MemoryKind, Route

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = ["ROUTE", "Levels"]

#: Bytes of a call from which on it is worth its steps. Not measured: what `peer` and `ipc` take for
#: a large message.
LEAST = 256 * 1024
#: Bytes of a message that are carried at a time: as much scratch is there, up to twice.
CHUNK = 64 * 1024 * 1024
#: Bytes at multiples of which stripes begin.
LINE = 256

#: Seconds to wait for others that give back what they have: all have just met.
_TOGETHER = 5.0

_FLOAT32 = dtypes["float32"]
_T = TypeVar("_T")


class Place(NamedTuple):
    """The position of a rank: the number of its cluster, and its place among the cluster's."""

    cluster: int
    place: int


class Part:
    """Some ranks of a group, as a group of their own with routes of its own."""

    def __init__(self, group: ProcessGroup, agreed: Agreed, context: DeviceContext) -> None:
        self.group = group
        self.agreed = agreed
        self._context = context

    def describe_lost(self) -> list[tuple[str, str]]:
        """Return the routes that the part should have, and why it has not: names and words."""
        agreed = self.agreed
        who = ", ".join(map(str, self.group.ranks))
        own = [
            (name, f"ranks {who} go by {agreed.names[0]}, because {name} is off: {why}")
            for name, why in agreed.lost.items()
        ]
        return [*own, *agreed.lost_in_parts]

    def build(self, name: str, op: ReduceOp | None, dtype: DType) -> Step:
        """Return what makes calls of a kind. All ranks of the part call."""
        kind = CallKind(primitives[name], self.group, op, dtype)
        return Step(self.group, self.agreed.on_device(kind), self._context)

    def break_with(self, error: DistBackendError, alone: bool) -> None:
        """Make calls that wait end, this rank's alone or all: the whole group is broken."""
        self.group.fail(error)
        self.group.resources.leave(alone)
        lost_ranks.revoke(self.group)

    def close(self, limit: float) -> None:
        """Give back all that the part has. All its ranks call."""
        self.group.resources.close(limit)
        self.group.free()


class Step:
    """The calls of one kind in a part, which are steps of calls of the whole group."""

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
        """Make one. All ranks of the part call.

        before: what this rank does first. If that fails, the others leave the call with it, where
                the route can tell them.
        """
        self._part.sequence += 1
        try:
            if before is not None:
                before()
            self._inner(send, recv, extent, root)
        except Exception as error:
            take_leave(self._inner, error, self._context, extent)
            raise

    def leave(self, error: Exception, extent: Extent) -> None:
        """Let the others leave a call that this rank does not come to."""
        self._part.sequence += 1
        take_leave(self._inner, error, self._context, extent)


class Levels(RouteState):
    """The clusters of a group and what joins its ranks.

    clusters: the ranks of each, in order.
    places:   where each rank is.
    place:    where this one is.
    rails:    number of rails.
    lanes:    of each cluster the places of the ranks that are on rails, by rail.
    lane:     the rail that this rank is on, None for none.
    inside:   this rank's cluster, None for a rank alone.
    along:    this rank's rail, in the order of the clusters, None for none.
    """

    ends_on_devices = True

    def __init__(self, agreed: Agreed) -> None:
        super().__init__(agreed.group, agreed.context)
        group, all_ranks = self.group, agreed.known
        self.clusters = find_clusters(all_ranks)
        self.places = [Place(0, 0)] * group.size()
        for cluster, ranks in enumerate(self.clusters):
            for place, rank in enumerate(ranks):
                self.places[rank] = Place(cluster, place)
        self.place = self.places[self.me]
        lanes = [_first_of_each_gpu(all_ranks, ranks) for ranks in self.clusters]
        self.rails = min(map(len, lanes))
        self.lanes = [places[: self.rails] for places in lanes]
        here = self.lanes[self.place.cluster]
        self.lane = here.index(self.place.place) if self.place.place in here else None
        self.inside: Part | None = None
        self.along: Part | None = None
        self._met = -1  # the number of the call that the latest comparison was of

    @property
    def here(self) -> Sequence[int]:
        """Return the ranks of this cluster."""
        return self.clusters[self.place.cluster]

    @property
    def first(self) -> int:
        """Return the place of the cluster's rank on the first rail."""
        return self.lanes[self.place.cluster][0]

    @property
    def even(self) -> bool:
        """Return whether all ranks are on rails."""
        return all(len(ranks) == self.rails for ranks in self.clusters)

    def shares(self, count: int, itemsize: int) -> tuple[int, int, list[int]]:
        """Return first element and count of this rank's stripe of ``count`` elements, and the
        counts of the cluster's ranks. Those that are on no rail have none.
        """
        each = -(-count * itemsize // (self.rails * LINE)) * LINE // itemsize
        counts, begin, own = [0] * len(self.here), 0, 0
        for rail, place in enumerate(self.lanes[self.place.cluster]):
            start = min(count, rail * each)
            counts[place] = min(each, count - start)
            if rail == self.lane:
                begin, own = start, counts[place]
        return begin, own, counts

    def compare(self, signature: int, number: int, failure: Exception | None) -> None:
        """Meet all ranks. Raise on all of them if their calls differ, or one has failed."""
        self._met = self.group.sequence
        mine = np.array([failure is None, signature, -signature, number, -number], np.int64)
        least = np.empty_like(mine)
        self.group.tested.Allreduce(mine, least, MPI.MIN)
        name = (
            f"{decode_primitive(signature)} on rank {self.group.rank()} of group "
            f"{self.group.group_name}"
        )
        if not least[0]:
            raise failure or DistBackendError(
                f"{name}: another rank failed in this call, and says why; its result is "
                "incomplete on all ranks"
            )
        if least[1] != -least[2] or least[3] != -least[4]:
            words = control_messages.allgather(self.group.tested, describe(signature, number), str)
            raise MismatchError(
                f"{name}: collective mismatch: the ranks made different calls: "
                f"{describe_by_rank(words)}"
            )

    def take_leave(self, kind: CallKind, error: Exception) -> None:
        """Tell the others, unless they know, that this rank has failed on its way to a call."""
        if self._met != self.group.sequence:
            try:
                self.compare(signature_of(kind, 0, 0)[0], 0, error)
            except type(error):
                return

    def go_along(
        self,
        step: Step,
        send: DeviceView | None,
        recv: DeviceView,
        root: int = 0,
        then: tuple[Step, Extent] | None = None,
    ) -> None:
        """Make a step along this rank's rail. If it fails, those that wait for this rank leave.

        then: the step that follows in the cluster, and its extent; None for none.
        """
        block = recv if send is None or recv.count < send.count else send
        try:
            step(send, recv, block.count, root)
        except Exception as error:
            if then is not None:
                then[0].leave(error, then[1])
            if self.group.error is None:
                fail_all_ranks(self.group, error)
            raise

    def find_failure(self, wait: bool = False) -> DistBackendError | None:
        """Return why devices have ended calls of the parts without their results; None if they have
        not, as far as is known.

        wait: until they are done.
        """
        for part in (self.inside, self.along):
            failure = None if part is None else part.agreed.find_failure(wait)
            if failure is not None:
                return failure
        return None

    def break_with(self, error: DistBackendError, alone: bool) -> None:
        """Make calls that wait end, this rank's alone or all: the group is broken."""
        for part in (self.inside, self.along):
            if part is not None:
                part.break_with(error, alone)

    def close(self, limit: float) -> None:
        """Give back all that the parts have. All ranks call."""
        for part in (self.along, self.inside):
            if part is not None:
                part.close(limit)
        self.along = self.inside = None


def _first_of_each_gpu(all_ranks: Sequence[Capabilities], ranks: Sequence[int]) -> list[int]:
    """Return the places of the ranks that are the first ones on their GPUs."""
    used = [all_ranks[rank].used for rank in ranks]
    return [place for place, gpu in enumerate(used) if gpu not in used[:place]]


def _meet(agreed: Agreed) -> Levels | str:
    """Return the levels of a group, or, on all ranks, why there are none."""
    group, all_ranks, made, problem = agreed.group, agreed.known, Levels(agreed), ""

    def part_of(ranks: Sequence[int]) -> Part:
        part = make_part(group, ranks)
        if ranks != made.here:
            part.inner = part.tested  # a rank can leave its rail, when another has failed
        return Part(
            part, agreed.agree_in(part, [all_ranks[rank] for rank in ranks]), agreed.context
        )

    if len(made.here) > 1:
        made.inside = part_of(made.here)
        if not made.inside.agreed.maps:
            said = "; ".join(f"{name}: {why}" for name, why in made.inside.agreed.lost.items())
            problem = f"ranks {', '.join(map(str, made.here))} map no memory of each other ({said})"
    why = next(filter(None, control_messages.allgather(group.inner, problem, str)), "")
    if why:
        made.close(_TOGETHER)
        return why
    if made.lane is not None:
        rail = made.lane
        made.along = part_of(
            [ranks[places[rail]] for ranks, places in zip(made.clusters, made.lanes, strict=True)]
        )
    parts = [part for part in (made.inside, made.along) if part is not None]
    told = control_messages.allgather(
        group.inner,
        [lost for part in parts for lost in part.describe_lost()],
        list[tuple[str, str]],
    )
    made.lost_in_parts = list(dict.fromkeys(lost for some in told for lost in some))
    return made


# --- calls --------------------------------------------------------------------------------------


def _build(kind: CallKind, agreed: Agreed) -> Implementation | None:
    """Return the implementation for calls of this kind. All ranks call.

    None for primitives that need all ranks on rails where some are not.
    """
    levels = agreed.state(Levels)
    if kind.primitive.name in _NEED_RAILS and not levels.even:
        return None

    def make(levels: Levels, kind: CallKind) -> Implementation:
        return _BUILDERS[kind.primitive.name](levels, kind, agreed.space)

    return build_at_home(kind, agreed, levels, make)


class _Arithmetic:
    """The arithmetic of a dtype on both levels.

    wide: the dtype of what travels.
    op:   the operation that combines it.
    """

    def __init__(self, kind: CallKind, space: DeviceSpace) -> None:
        op, dtype = kind.op, kind.dtype
        assert op is not None and dtype is not None
        self._n, self._space = kind.group.size(), space
        self._averages = op is ReduceOp.AVG
        exact = op in (ReduceOp.MIN, ReduceOp.MAX)
        self.wide = _FLOAT32 if dtype.kind is Kind.NARROW_FLOAT and not exact else dtype
        self.op = ReduceOp.SUM if op is ReduceOp.AVG else op
        self.widens = self.wide is not dtype

    def fill(self, source: DeviceView, into: DeviceView) -> None:
        """Enqueue a copy of elements, as wide ones."""
        if self.widens:
            self._space.scale(source, 1, into)
        else:
            self._space.copy(source, into)

    def finish(self, total: DeviceView, out: DeviceView) -> None:
        """Enqueue what turns a combination of all ranks into results, maybe in place."""
        if not total.count:
            return
        if self._averages:
            self._space.combine(ReduceOp.AVG, [total], total, self._n)
        if self.widens:
            self._space.narrow(total, out)
        elif total.address != out.address:
            self._space.copy(total, out)


#: Carries out what comes before the rails; raises on all ranks if it has failed on one.
_Check = Callable[[Callable[[], None]], None]


def _carry_out(
    levels: Levels,
    kind: CallKind,
    extent: Extent,
    root: int,
    counts: tuple[int, int],
    prepare: Callable[[int, int], _T],
    carry: Callable[[_T, _Check], Callable[[], None]],
) -> None:
    """Carry out one call, chunk by chunk.

    counts:  of elements, and of those of a chunk.
    prepare: takes the memory of a chunk, given its first element and count, and fills it: all that
             may fail before other ranks depend on it.
    carry:   carries it out in that memory, along the rails and before; returns what follows in the
             clusters.

    Raises on all ranks if their calls differ, or one lacks the memory. What fails behind the rails
    is told at the next meeting, with the next chunk, as nobody outside of the cluster waits for it.
    Of the last chunk it is an affair of the cluster's.
    """
    if not isinstance(extent, int):
        raise UnsupportedError(
            f"{kind.primitive.name}: the device route hierarchical takes blocks of one size; use "
            "another route"
        )
    signature, number = signature_of(kind, extent, root)
    context, (count, step) = levels.context, counts
    memory: list[_T] = []
    failed: Exception | None = None

    def take(start: int) -> None:
        failure = failed or levels.find_failure()
        if failure is not None:
            raise failure
        memory[:] = [prepare(start, min(step, count - start))]

    def check(task: Callable[[], None]) -> None:
        levels.compare(signature, number, failure_of(task))

    mark = context.mark()
    for start in range(0, max(count, 1), step):
        context.release(mark)
        check(partial(take, start))
        if count:
            failed = failure_of(carry(memory[0], check))
    if failed is not None:
        raise failed


def _like(space: DeviceSpace, view: DeviceView, dtype: DType) -> DeviceView:
    """Return scratch for as many elements, at the same address modulo a piece."""
    stack = space.empty(dtype, space.room(1, view.count))
    (made,) = space.places(stack, 1, view.count, view)
    assert isinstance(made, DeviceView)
    return made


class _Reduced(NamedTuple):
    """The memory of a chunk of a reduction.

    source: elements of the array, as wide ones.
    stripe: this rank's stripe of the sum; with a single rail the sum takes the place of the source.
    result: the same as elements of the array.
    out:    where the cluster gathers results; None where it does not.
    counts: of the stripes of the cluster's ranks.
    """

    source: DeviceView
    stripe: DeviceView
    result: DeviceView
    out: DeviceView | None
    counts: list[int]


def _reduction(levels: Levels, kind: CallKind, space: DeviceSpace) -> Implementation:
    """Build all_reduce, and reduce, which writes the array of the root alone."""
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

    def carry_out(send: None, recv: DeviceView, extent: Extent, root: int) -> None:
        home = levels.places[root].cluster
        may_write = everywhere or group.rank() == root
        gathers = everywhere or levels.place.cluster == home

        def prepare(start: int, count: int) -> _Reduced:
            chunk = source = recv.part(start, count)
            begin, own, counts = levels.shares(count, wide.itemsize)
            overwrites = one_rail and levels.lane is not None
            if by.widens or (overwrites and not may_write):
                source = _like(space, chunk, wide)
                by.fill(chunk, source)
            stripe = source if one_rail else _like(space, source.part(begin, own), wide)
            out = None
            if gathers:
                out = chunk if may_write else _like(space, chunk, dtype)
            result = stripe
            if one_rail:
                result = stripe if out is None else out
            elif by.widens:
                result = _like(space, chunk.part(begin, own), dtype)
            return _Reduced(source, stripe, result, out, counts)

        def carry(memory: _Reduced, check: _Check) -> Callable[[], None]:
            source, stripe, result, out, counts = memory
            own = stripe.count if levels.lane is not None else 0

            def first_step() -> None:
                if down is not None and one_rail:
                    down(None, source, source.count, levels.first)
                elif down is not None:
                    down(source, stripe, Blocks(counts, [own] * n))

            def finish() -> None:
                if own:
                    by.finish(stripe, result)

            check(first_step)
            gathered: Extent = source.count if one_rail else Blocks([own] * n, counts)
            if along is not None and own:
                then = None if up is None or not gathers else (up, gathered)
                levels.go_along(along, None, stripe, home, then)

            def last_step() -> None:
                if out is None:
                    return
                if up is None:
                    finish()
                elif one_rail:
                    up(None, out, gathered, levels.first, finish)
                else:
                    up(result, out, gathered, 0, finish)

            return last_step

        _carry_out(levels, kind, extent, root, (recv.count, step), prepare, carry)

    return carry_out


def _broadcast(levels: Levels, kind: CallKind, space: DeviceSpace) -> Implementation:
    """Broadcast in the root's cluster, then stripes along the rails; gather them in the others."""
    dtype = kind.dtype
    assert dtype is not None
    inside, one_rail, n = levels.inside, levels.rails == 1, len(levels.here)
    spread = gather = along = None
    if inside is not None:
        spread = inside.build("broadcast", None, dtype)
        gather = None if one_rail else inside.build("all_gather", None, dtype)
    if levels.along is not None:
        along = levels.along.build("broadcast", None, dtype)
    step = max(1, CHUNK // dtype.itemsize // LINE * LINE)

    def carry_out(send: None, recv: DeviceView, extent: Extent, root: int) -> None:
        home, place = levels.places[root]
        at_home = levels.place.cluster == home

        def prepare(start: int, count: int) -> tuple[DeviceView, DeviceView, list[int]]:
            chunk = recv.part(start, count)
            begin, own, counts = levels.shares(count, dtype.itemsize)
            stripe = chunk.part(begin, own)
            return chunk, stripe if at_home or one_rail else _like(space, stripe, dtype), counts

        def carry(
            memory: tuple[DeviceView, DeviceView, list[int]], check: _Check
        ) -> Callable[[], None]:
            chunk, stripe, counts = memory

            def first_step() -> None:
                if at_home and spread is not None:
                    spread(None, chunk, chunk.count, place)

            check(first_step)
            own = stripe.count if levels.lane is not None else 0
            last = spread if one_rail else gather
            gathered: Extent = chunk.count if one_rail else Blocks([own] * n, counts)
            if along is not None and own:
                then = None if last is None or at_home else (last, gathered)
                levels.go_along(along, None, stripe, home, then)

            def last_step() -> None:
                if last is None or at_home:
                    return
                if one_rail:
                    last(None, chunk, gathered, levels.first)
                else:
                    last(stripe, chunk, gathered)

            return last_step

        _carry_out(levels, kind, extent, root, (recv.count, step), prepare, carry)

    return carry_out


def _blocks(
    levels: Levels, view: DeviceView, count: int, start: int, packed: DeviceView, inward: bool
) -> None:
    """Enqueue copies of elements of the blocks of all ranks, ``count`` each, from ``start`` on,
    from where they lie in rank order to where they lie by place and cluster; inward: back.
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
        context.runtime.copy(
            context.index, *((theirs_at, mine_at) if inward else (mine_at, theirs_at)),
            each * size, context.work,
        )  # fmt: skip


def _reduce_scatter(levels: Levels, kind: CallKind, space: DeviceSpace) -> Implementation:
    """Reduce and scatter in each cluster the blocks of all ranks at one place of their clusters;
    then along the rails.
    """
    dtype = kind.dtype
    assert dtype is not None and levels.inside is not None and levels.along is not None
    by, many, n = _Arithmetic(kind, space), len(levels.clusters), kind.group.size()
    wide, single = by.wide, "reduce_scatter_single"
    down = levels.inside.build(single, by.op, wide)
    along = levels.along.build(single, by.op, wide)
    step = max(1, CHUNK // (n * wide.itemsize))

    def carry_out(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        def prepare(start: int, count: int) -> tuple[DeviceView, ...]:
            out = recv.part(start, count)
            rows, packed = space.empty(wide, many * count), space.empty(dtype, n * count)
            _blocks(levels, send, recv.count, start, packed, False)
            if not by.widens:
                return out, packed, rows, out
            source = space.empty(wide, n * count)
            by.fill(packed, source)
            return out, source, rows, space.empty(wide, count)

        def carry(memory: tuple[DeviceView, ...], check: _Check) -> Callable[[], None]:
            out, source, rows, total = memory
            check(partial(down, source, rows, rows.count))
            levels.go_along(along, rows, total)
            return partial(by.finish, total, out)

        _carry_out(levels, kind, extent, root, (recv.count, step), prepare, carry)

    return carry_out


def _all_gather(levels: Levels, kind: CallKind, space: DeviceSpace) -> Implementation:
    """Gather along the rails, then in each cluster."""
    dtype = kind.dtype
    assert dtype is not None and levels.inside is not None and levels.along is not None
    many, n, single = len(levels.clusters), kind.group.size(), "all_gather_single"
    along = levels.along.build(single, None, dtype)
    up = levels.inside.build(single, None, dtype)
    step = max(1, CHUNK // (n * dtype.itemsize))

    def carry_out(send: DeviceView, recv: DeviceView, extent: Extent, root: int) -> None:
        def prepare(start: int, count: int) -> tuple[DeviceView, DeviceView, DeviceView]:
            mine = send.part(start, count)
            return mine, space.empty(dtype, many * count), space.empty(dtype, n * count)

        def carry(
            memory: tuple[DeviceView, DeviceView, DeviceView], check: _Check
        ) -> Callable[[], None]:
            mine, column, packed = memory
            levels.go_along(along, mine, column, then=(up, column.count))

            def last_step() -> None:
                up(column, packed, column.count)
                start = (mine.address - send.address) // dtype.itemsize
                _blocks(levels, recv, send.count, start, packed, True)

            return last_step

        _carry_out(levels, kind, extent, root, (send.count, step), prepare, carry)

    return carry_out


#: By the name of the primitive.
_BUILDERS: dict[str, Callable[[Levels, CallKind, DeviceSpace], Implementation]] = {
    "all_reduce": _reduction,
    "reduce": _reduction,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather,
}
#: Those that need all ranks on rails.
_NEED_RAILS = ("reduce_scatter", "reduce_scatter_single", "all_gather", "all_gather_single")

ROUTE = Route(
    "hierarchical",
    "GPU by GPU or node by node, then between them",
    MemoryKind.DEVICE,
    tuple(_BUILDERS),
    _build,
    _meet,
    combines=lambda op, dtype: find_loop(op, dtype) is not None,
    scales=True,
    place="levels",
    needs=(
        "several nodes, or several GPUs on one, at least one of them with several ranks, which map "
        "memory of each other by CUDA IPC"
    ),
    lacks=Capabilities.lacks_gpu,
    blocks=(
        "for the other ranks' hosts, twice for each 64 MiB of the message, and for what its parts "
        "wait: `shared_gpu`, `peer` or `copy_engine` in each node or GPU, and `direct` or `staged` "
        "between nodes, `peer` between GPUs"
    ),
    least=dict.fromkeys(_BUILDERS, LEAST),
)
