"""Collectives over messages that combine: each element in one place, once, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpi4py import MPI

from mpicoll.arrays.views import View
from mpicoll.core.plan import Blocks
from mpicoll.dtypes import DType, ReduceOp
from mpicoll.routes.messages import Messages, Scope, Span, shares_of, spans_of
from mpicoll.routes.moves import all_gather
from mpicoll.routes.space import Space
from mpicoll.routes.wire import message

#: Ranks up to which small data goes from each to each, without a copy first.
DIRECT = 8


def all_reduce(scope: Scope, send: None, recv: View, blocks: Blocks, root: int) -> None:
    """Combine the elements of all ranks, on every rank, in place.

    Few bytes: every rank receives all elements and combines them, with one latency for few ranks,
    and by an all-gather with log2 n latencies for many. Many bytes: each rank receives one n-th of
    every rank's elements, combines it and sends the result to all: Rabenseifner's decomposition
    (Thakur and others, as above, section 4.5) with a reduce-scatter by pairwise exchange and an
    all-gather by the ring. A rank sends and receives 2 (n - 1) / n times the bytes, the minimum
    (Patarasuk, Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J.
    Parallel and Distributed Computing 69(2), 2009).
    """
    n, me, count, space = scope.n, scope.me, recv.count, scope.space
    whole = recv.nbytes * n
    if whole > space.small and (count >= n or whole > space.stack):
        chunks = [_Chunk(cut, recv.part(*cut[me])) for cut in _cuts(scope, recv)]

        def then(chunk: _Chunk) -> None:
            counts = [size for _, size in chunk.cut]
            _gather(scope, recv.part(chunk.cut[0][0], sum(counts)), counts)

        _Reduction(scope, recv, chunks).carry_out(then)
    elif n <= DIRECT and not space.mpi:
        _Reduction(scope, recv, [_Chunk([(0, count)] * n, recv)]).carry_out()
    elif count:
        _combine(scope, _everything(scope, recv), recv, n)


def _everything(scope: Scope, source: View) -> list[View]:
    """Return the elements of all ranks, on every rank."""
    stack = scope.space.empty(source.dtype, scope.n * source.count)
    parts = [stack.part(r * source.count, source.count) for r in range(scope.n)]
    scope.space.copy(source, parts[scope.me])
    scope.space.synchronize()
    _gather(scope, stack, [source.count] * scope.n)
    return parts


def _gather(scope: Scope, view: View, counts: Sequence[int]) -> None:
    """Send this rank's block of a view to every rank."""
    if scope.space.mpi and counts[0] == counts[-1]:
        # mpi4py wants a block's count.
        scope.group.inner.Allgather(MPI.IN_PLACE, message(view.buffer, counts[0], view.dtype))
    else:
        all_gather(scope, None, view, Blocks((), counts), 0)


def _combine(scope: Scope, sources: Sequence[View], out: View, n: int) -> None:
    assert scope.op is not None
    scope.space.combine(scope.op, sources, out, n if scope.op is ReduceOp.AVG else 1, scope.exact)


def reduce(scope: Scope, send: None, recv: View, blocks: Blocks, root: int) -> None:
    """Combine the elements of all ranks, in place on the root; other ranks' arrays do not change.

    Few bytes: the root receives and combines everything, with one latency. Many: as all_reduce, but
    only the root receives results. The root receives 2 (n - 1) / n times the bytes, and sends and
    combines as much as each other rank.
    """
    space, n, me, count = scope.space, scope.n, scope.me, recv.count
    if recv.nbytes * n <= space.small:
        cut = [(0, count if r == root else 0) for r in range(n)]
        _Reduction(scope, recv, [_Chunk(cut, recv.part(*cut[me]))]).carry_out()
        return
    cuts = _cuts(scope, recv)
    if me == root:
        chunks = [_Chunk(cut, recv.part(*cut[me])) for cut in cuts]
    else:
        # The result of one chunk is on its way while the next one is combined.
        rooms = [space.empty(recv.dtype, space.room(1, cut[me][1])) for cut in cuts[:2]]
        chunks = []
        for i, shares in enumerate(cuts):
            own = recv.part(*shares[me])
            chunks.append(_Chunk(shares, *space.places(rooms[i % 2], 1, own.count, own)))

    def then(chunk: _Chunk) -> None:
        messages = Messages(scope)
        if me == root:
            for r in scope.others():
                messages.receive(recv.part(*chunk.cut[r]), r)
        else:
            messages.send(chunk.out, root)
        messages.finish()

    _Reduction(scope, recv, chunks).carry_out(then)


def reduce_scatter(scope: Scope, send: View, recv: View, blocks: Blocks, root: int) -> None:
    """Combine on each rank its block of the elements of all ranks, by a pairwise exchange.

    A rank sends original elements: (n - 1) / n times the bytes, the minimum, and one latency for
    each chunk (Thakur and others, as above, section 4.4, for long messages).
    """
    counts, me, step = blocks.sends, scope.me, chunk_of(scope.space, scope.n, recv.dtype)
    chunks = []
    for done in range(0, max(counts), step):
        cut = [
            (start + min(done, count), min(step, max(0, count - done)))
            for start, count in spans_of(counts)
        ]
        chunks.append(_Chunk(cut, recv.part(min(done, recv.count), cut[me][1])))
    _Reduction(scope, send, chunks).carry_out()


def scan(scope: Scope, send: View, recv: View, blocks: Blocks, root: int) -> None:
    """Combine on each rank the elements of all ranks before it, with its own for scan.

    Few bytes: every rank receives everything and combines its result. Many: as in all_reduce, each
    rank receives one n-th of every rank's elements, but it computes a result for each rank: the
    same number of bytes and n / 2 times the arithmetic. The bits do not depend on the count.
    (Adding partial sums in log2 n steps, as in Hillis, Steele, Data parallel algorithms, Comm. ACM
    29(12), 1986, would round narrow floats at each step.)
    """
    n, me, space = scope.n, scope.me, scope.space
    if send.nbytes * n <= space.small:
        everything = _everything(scope, send)
        mine = [everything[r] for r in scope.combined[me]]
        if mine:
            _combine(scope, mine, recv, len(mine))
        return
    cuts = _cuts(scope, send)
    most = max(size for _, size in cuts[0])  # no chunk is larger than the first
    stack, results = (space.empty(send.dtype, space.room(n, most)) for _ in range(2))
    for cut in cuts:
        own = send.part(*cut[me])
        sources = space.places(stack, n, own.count, own)
        sources[me] = own
        messages = Messages(scope)
        for r in scope.others():
            messages.receive(sources[r], r)
        for r in scope.others():
            messages.send(send.part(*cut[r]), r)
        messages.finish()
        out = space.places(results, n, own.count, own)
        out[me] = recv.part(*cut[me])
        for r, ranks in enumerate(scope.combined):
            if ranks:
                _combine(scope, [sources[s] for s in ranks], out[r], len(ranks))
        space.synchronize()
        messages = Messages(scope)
        for r in scope.others():
            if scope.combined[me]:
                messages.receive(recv.part(*cut[r]), r)
        for r in scope.others():
            if scope.combined[r]:
                messages.send(out[r], r)
        messages.finish()


exscan = scan


#: The part of some elements that each rank combines.
Cut = Sequence[Span]


class _Chunk(NamedTuple):
    """Elements that are combined at once. ``out`` receives the result of this rank's part."""

    cut: Cut
    out: View


def chunk_of(space: Space, n: int, dtype: DType) -> int:
    """Return how many elements a rank receives from each of n ranks at a time."""
    return max(1, min(space.chunk, space.stack // n) // dtype.itemsize)


def _cuts(scope: Scope, view: View) -> list[Cut]:
    """Split a view into chunks, and each chunk into one span for each rank."""
    n, step = scope.n, scope.n * chunk_of(scope.space, scope.n, view.dtype)
    begins = range(0, view.count, step)
    return [shares_of(min(step, view.count - begin), n, begin) for begin in begins]


class _Reduction:
    """One reduction: each rank receives its part of every chunk from all ranks, and combines it.

    Meanwhile, the next chunk and the result of the previous chunk are sent.
    """

    def __init__(self, scope: Scope, source: View, chunks: Sequence[_Chunk]) -> None:
        self._scope, self._space, self._source, self._chunks = scope, scope.space, source, chunks
        most = max((chunk.out.count for chunk in chunks), default=0)
        room = scope.space.room(scope.n - 1, most)
        self._stacks = [scope.space.empty(source.dtype, room) for _ in chunks[:2]]

    def carry_out(self, then: Callable[[_Chunk], None] | None = None) -> None:
        """Run the call; call ``then`` for each chunk, in order, once its result may be sent."""
        chunks, space = self._chunks, self._space
        if not chunks:
            return
        begun = self._begin(0)
        for i, chunk in enumerate(chunks):
            messages, sources = begun
            messages.finish()
            more = i + 1 < len(chunks)
            if more or (i and then is not None):
                # The chunk before is combined: its stack is free, and its result may be sent.
                space.synchronize()
            if more:
                begun = self._begin(i + 1)
            _combine(self._scope, sources, chunk.out, self._scope.n)
            if i and then is not None:
                then(chunks[i - 1])
        if then is not None:
            space.synchronize()
            then(chunks[-1])

    def _begin(self, i: int) -> tuple[Messages, list[View]]:
        """Start the messages of a chunk. Return them, and the views of this rank's part by rank."""
        cut, out = self._chunks[i]
        parts = [self._source.part(*span) for span in cut]
        messages, sources = Messages(self._scope), list(parts)
        places = self._space.places(self._stacks[i % 2], self._scope.n - 1, out.count, out)
        for place, r in zip(places, self._scope.others(), strict=True):
            sources[r] = place
            messages.receive(place, r)
        for r in self._scope.others():
            messages.send(parts[r], r)
        return messages, sources
