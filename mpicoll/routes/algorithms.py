"""Collectives over point-to-point messages, written once for any kind of memory.

Of MPI only sends and receives are asked; what is copied and combined on the way, a `Space` does.
``n`` is the number of ranks, a *latency* what a message costs however short it is.

Which algorithm serves a call is a function of count, dtype, operation and n, as every rank knows
them. All reductions combine the original elements of all ranks in one place, once, in the order of
the ranks. So all ranks get the same bits, on hosts and devices. They depend neither on the number
of elements nor on the algorithm, and narrow floats travel as they are and are rounded once.
Partial sums that travel, as in recursive halving or in a ring of sums, would cost narrow floats
twice the bytes, and a combination with a wait for it at each step, which on a device is dearer than
several messages; they win only where many ranks reduce little.

Views that are given to a function are ready to be read and written. Its results are there once the
caller has synchronized. `build` makes implementations of them; the routes `exchange` on the host
and `direct` on a device are these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from mpicoll.arrays.views import View, ViewList
from mpicoll.core.checks import writes
from mpicoll.core.plan import Blocks, CallKind, Extent, Implementation
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.errors import MismatchError
from mpicoll.routes.space import Space
from mpicoll.routes.wire import Message, exchange, message

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "ALGORITHMS",
    "Scope",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "build",
    "gather",
    "prefix",
    "premultiplied",
    "reduce",
    "reduce_scatter",
    "scatter",
]

#: Ranks up to which everybody sends what is small to everybody, without a copy first.
DIRECT = 8
#: Bytes of all ranks' blocks up to which they are gathered in few steps instead of short ones.
GATHERED = 512 * 1024
#: Bytes of the chunks of a broadcast along a chain, at least and at most; and how many times fewer
#: than the chunks the ranks shall be, for the chain takes n - 2 chunks longer than the message.
LEAST, MOST, LINKS = 128 * 1024, 4 * 1024 * 1024, 8


# --- messages -----------------------------------------------------------------------------------

#: Messages that are not through: their memory is held, for ever where an error came between.
_under_way: set[_Messages] = set()


class _Messages:
    """Messages on their way; an empty view is none."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sends: list[tuple[View, MPI.Request]] = []
        self._receives: list[tuple[View, MPI.Request, Message, int]] = []
        _under_way.add(self)

    def receive(self, into: View, source: int) -> None:
        if into.count:
            what = _whole(into)
            request = self._group.inner.Irecv(what, source, 0)
            self._receives.append((into, request, what, source))

    def send(self, out: View, target: int) -> None:
        if out.count:
            self._sends.append((out, self._group.inner.Isend(_whole(out), target, 0)))

    def finish(self) -> None:
        """Waits for all; raises MismatchError where a rank has sent less than was expected."""
        status, short = MPI.Status(), None
        for _, request, what, source in self._receives:
            request.Wait(status)
            got = status.Get_count(what[-1])
            if got != what[1] and short is None:
                short = source, what[1], got
        for _, request in self._sends:
            request.Wait()
        _under_way.discard(self)
        if short is not None:
            raise MismatchError(
                f"rank {self._group.rank()} of group {self._group.group_name} expected {short[1]} "
                f"elements from rank {short[0]}, which sent {short[2]}: the ranks' calls do not "
                "belong together"
            )


def _whole(view: View) -> Message:
    return message(view.buffer, view.count, view.dtype)


#: First element and number of elements.
Span = tuple[int, int]


def _spans(counts: Sequence[int]) -> list[Span]:
    """Where blocks lie that follow each other."""
    return list(zip(accumulate(counts, initial=0), counts, strict=False))


class Scope(NamedTuple):
    """What the algorithms of one kind of call work on: the group, its memory, the operation.

    op: None where nothing is combined.
    combined: the ranks whose elements make the result of each rank.
    """

    group: ProcessGroup
    space: Space
    op: ReduceOp | None
    n: int
    me: int
    combined: Sequence[range]

    def others(self) -> Iterator[int]:
        """All other ranks, from the next one on, so that no rank is everybody's first."""
        return ((self.me + step) % self.n for step in range(1, self.n))


# --- moves --------------------------------------------------------------------------------------


def broadcast(scope: Scope, send: None, recv: View, blocks: Blocks, root: int) -> None:
    """The root's elements, on every rank.

    Short messages go down a binomial tree: log2 n latencies, and as many times the bytes (Thakur,
    Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005, section 4.3).
    Long ones go in chunks along a chain of the ranks, each of which receives a chunk while it sends
    the one before: n - 2 chunks longer than the message takes alone (Patarasuk, Faraj, Yuan,
    Techniques for pipelined broadcast on Ethernet switched clusters, J. Parallel and Distributed
    Computing 68(6), 2008), where a tree takes log2 n times as long, and a scatter followed by an
    all-gather twice.
    """
    group, n = scope.group, scope.n
    place = (scope.me - root) % n
    if n > 2 and recv.nbytes > n * LEAST:
        _chain(group, recv, root, place)
        return
    bit = 1
    while bit < n and not place & bit:
        bit *= 2
    if place:
        above = _Messages(group)
        above.receive(recv, (place - bit + root) % n)
        above.finish()
    below = _Messages(group)
    while bit > 1:
        bit //= 2
        if place + bit < n:
            below.send(recv, (place + bit + root) % n)
    below.finish()


def _chain(group: ProcessGroup, recv: View, root: int, place: int) -> None:
    n, me = group.size(), group.rank()
    size = min(MOST, max(LEAST, recv.nbytes // (LINKS * (n - 2)))) // recv.dtype.itemsize
    chunks = [recv.part(s, min(size, recv.count - s)) for s in range(0, recv.count, size)]
    coming = [_Messages(group) for _ in chunks]
    if place > 0:
        for messages, chunk in zip(coming, chunks, strict=True):
            messages.receive(chunk, (me - 1) % n)
    sent = _Messages(group)
    for messages, chunk in zip(coming, chunks, strict=True):
        messages.finish()
        if place < n - 1:
            sent.send(chunk, (me + 1) % n)
    sent.finish()


def all_gather(scope: Scope, send: View | None, recv: View, blocks: Blocks, root: int) -> None:
    """The blocks of all ranks on every rank; no send: this rank's is in its place.

    Few bytes: the exchange of Bruck and others, in which the blocks that a rank has double with
    each step, whatever n is: log2 n latencies (Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE Trans.
    Parallel and Distributed Systems 8(11), 1997). Blocks go where they belong at once instead of
    being rotated in the end; a run of blocks that wraps around is two messages. Many: the ring of
    Thakur and others (as above, section 4.1), n - 1 latencies, only neighbours talk. Either way a
    rank receives each foreign byte once.
    """
    group, space, n, me = scope.group, scope.space, scope.n, scope.me
    spans = _spans(blocks.receives)
    own = recv.part(*spans[me])
    if send is not None:
        space.copy(send, own)
        own = send  # can be sent at once
    if recv.nbytes > GATHERED:
        _ring(group, own, recv, spans)
        return
    here = 1
    while here < n:
        more = min(here, n - here)
        source, target = (me + here) % n, (me - here) % n
        step = _Messages(group)
        for run in _runs(spans, source, more):
            step.receive(recv.part(*run), source)
        if here == 1:
            step.send(own, target)
        else:
            for run in _runs(spans, me, more):
                step.send(recv.part(*run), target)
        step.finish()
        if here == 1 and n > 2 and send is not None:
            space.synchronize()  # this rank's copy goes on from its place
        here *= 2


def _runs(spans: Sequence[Span], first: int, many: int) -> Iterator[Span]:
    """Where ``many`` ranks' blocks are, from rank ``first`` on, around the end."""
    n = len(spans)
    for some in (spans[first : first + many], spans[: max(0, first + many - n)]):
        if some:
            yield some[0][0], sum(count for _, count in some)


def _ring(group: ProcessGroup, own: View, recv: View, spans: Sequence[Span]) -> None:
    n, me = group.size(), group.rank()
    out = own
    for step in range(1, n):
        into = recv.part(*spans[(me - step) % n])
        both = _Messages(group)
        both.receive(into, (me - 1) % n)
        both.send(out, (me + 1) % n)
        both.finish()
        out = into


def gather(scope: Scope, send: View, recv: View | None, blocks: Blocks, root: int) -> None:
    """The blocks of all ranks, on the root, each sent there directly (MPI-4.1 section 6.5).

    The root's link carries each byte once, whatever the way; a tree would spare it latencies, and
    copy on the way.
    """
    messages = _Messages(scope.group)
    if recv is None:
        messages.send(send, root)
    else:
        for r in scope.others():
            messages.receive(recv.part(r * send.count, send.count), r)
        scope.space.copy(send, recv.part(root * send.count, send.count))
    messages.finish()


def scatter(scope: Scope, send: View | None, recv: View, blocks: Blocks, root: int) -> None:
    """One block of the root's to each rank, sent there directly (MPI-4.1 section 6.6)."""
    messages = _Messages(scope.group)
    if send is None:
        messages.receive(recv, root)
    else:
        for r in scope.others():
            messages.send(send.part(r * recv.count, recv.count), r)
        scope.space.copy(send.part(root * recv.count, recv.count), recv)
    messages.finish()


def all_to_all(scope: Scope, send: View, recv: View, blocks: Blocks, root: int) -> None:
    """One block from each rank to each other, in n - 1 steps of pairs; see ``wire.exchange``.

    No rank knows the others' sizes; each message is known to its sender and its receiver. Both
    sides may be lists of arrays.
    """
    me = scope.me
    out, into = _arrays(send, blocks.sends), _arrays(recv, blocks.receives)
    scope.space.copy(out[me], into[me])
    exchange(scope.group.inner, _to_others(out, me), _to_others(into, me))


def _arrays(view: View, counts: Sequence[int]) -> Sequence[View]:
    if isinstance(view, ViewList):
        return view.parts
    return [view.part(*span) for span in _spans(counts)]


def _to_others(views: Sequence[View], me: int) -> list[Message | None]:
    return [_whole(v) if v.count and r != me else None for r, v in enumerate(views)]


# --- reductions ---------------------------------------------------------------------------------


def all_reduce(scope: Scope, send: None, recv: View, blocks: Blocks, root: int) -> None:
    """The elements of all ranks combined, on every rank, in place.

    Few bytes: everybody gets everything and combines it, in one latency among few ranks, by the
    all-gather in log2 n of them among many. Many bytes: each rank gets one n-th of everybody,
    combines it and hands the result to all: Rabenseifner's decomposition (Thakur and others, as
    above, section 4.5) with a reduce-scatter by pairwise exchange and an all-gather by the ring.
    A rank sends and receives 2 (n - 1) / n times the bytes, as few as there can be (Patarasuk,
    Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel and
    Distributed Computing 69(2), 2009).
    """
    n, me, count, space = scope.n, scope.me, recv.count, scope.space
    whole = recv.nbytes * n
    if whole > space.small and (count >= n or whole > space.stack):
        chunks = [_Chunk(cut, recv.part(*cut[me])) for cut in _cuts(scope, recv)]

        def then(chunk: _Chunk) -> None:
            begin = chunk.cut[0][0]
            counts = [size for _, size in chunk.cut]
            all_gather(scope, None, recv.part(begin, sum(counts)), Blocks((), counts), 0)

        _Reduction(scope, recv, chunks).carry_out(then)
    elif n <= DIRECT and not space.mpi:
        _Reduction(scope, recv, [_Chunk([(0, count)] * n, recv)]).carry_out()
    elif count:
        terms = _Terms(scope, recv.dtype)
        everything = _terms_of_all(scope, terms, recv)
        terms.combine(everything, everything[me], recv, n)


def _terms_of_all(scope: Scope, terms: _Terms, source: View) -> list[View]:
    """The terms of all ranks, on every rank."""
    stack = scope.space.empty(terms.dtype, scope.n * source.count)
    parts = [stack.part(r * source.count, source.count) for r in range(scope.n)]
    terms.take(source, parts[scope.me])
    scope.space.synchronize()
    if scope.space.mpi:
        # mpi4py wants a block's count.
        scope.group.inner.Allgather(MPI.IN_PLACE, message(stack.buffer, source.count, stack.dtype))
    else:
        all_gather(scope, None, stack, Blocks((), [source.count] * scope.n), 0)
    return parts


def reduce(scope: Scope, send: None, recv: View, blocks: Blocks, root: int) -> None:
    """The elements of all ranks combined, in place on the root; the others' stay as they are.

    Few bytes: the root gets everything and combines it: one latency. Many: as in all_reduce, but
    that the results go to the root alone; it receives 2 (n - 1) / n times the bytes, and sends and
    combines no more than the others.
    """
    group, space, n, me, count = scope.group, scope.space, scope.n, scope.me, recv.count
    if recv.nbytes * n <= space.small:
        cut = [(0, count if r == root else 0) for r in range(n)]
        _Reduction(scope, recv, [_Chunk(cut, recv.part(*cut[me]))]).carry_out()
        return
    cuts = _cuts(scope, recv)
    if me == root:
        chunks = [_Chunk(cut, recv.part(*cut[me])) for cut in cuts]
    else:
        # The result of one chunk is on its way while the next one is combined.
        rooms = [space.empty(recv.dtype, cut[me][1]) for cut in cuts[:2]]
        chunks = [_Chunk(cut, rooms[i % 2].part(0, cut[me][1])) for i, cut in enumerate(cuts)]

    def then(chunk: _Chunk) -> None:
        messages = _Messages(group)
        if me == root:
            for r in scope.others():
                messages.receive(recv.part(*chunk.cut[r]), r)
        else:
            messages.send(chunk.out, root)
        messages.finish()

    _Reduction(scope, recv, chunks).carry_out(then)


def reduce_scatter(scope: Scope, send: View, recv: View, blocks: Blocks, root: int) -> None:
    """One block of the elements of all ranks combined on each rank: a pairwise exchange.

    The originals travel: (n - 1) / n times the bytes, as few as there can be, and one latency for a
    chunk (Thakur and others, as above, section 4.4, for long messages).
    """
    counts, me, step = blocks.sends, scope.me, _step(scope, recv.dtype)
    chunks = []
    for done in range(0, max(counts), step):
        cut = [
            (start + min(done, count), min(step, max(0, count - done)))
            for start, count in _spans(counts)
        ]
        chunks.append(_Chunk(cut, recv.part(min(done, recv.count), cut[me][1])))
    _Reduction(scope, send, chunks).carry_out()


def prefix(scope: Scope, send: View, recv: View, blocks: Blocks, root: int) -> None:
    """The elements of some ranks combined, of others on each rank: of those up to it, or before it.

    Few bytes: everybody gets everything and combines what is for it. Many: as in all_reduce, each
    rank gets one n-th of everybody, but combines it once for each rank and sends each its result:
    as many bytes, and n / 2 times the arithmetic, for the sake of the same bits whatever the count.
    (Hillis, Steele, Data parallel algorithms, Comm. ACM 29(12), 1986, add partial sums in log2 n
    steps; those round narrow floats at each step, and combine in another order.)
    """
    n, me, space = scope.n, scope.me, scope.space
    terms = _Terms(scope, send.dtype)
    if send.nbytes * n <= space.small:
        everything = _terms_of_all(scope, terms, send)
        mine = [everything[r] for r in scope.combined[me]]
        if mine:
            terms.combine(mine, everything[me], recv, len(mine))
        return
    for cut in _cuts(scope, send):
        size = cut[me][1]
        stack, results = space.empty(terms.dtype, n * size), space.empty(send.dtype, n * size)
        products = {span: send.part(*span) for span in cut}
        if terms.factor is not None:
            for span, source in products.items():
                products[span] = space.empty(terms.dtype, source.count)
                terms.take(source, products[span])
            space.synchronize()
        sources = [stack.part(r * size, size) for r in range(n)]
        sources[me] = products[cut[me]]
        messages = _Messages(scope.group)
        for r in scope.others():
            messages.receive(sources[r], r)
        for r in scope.others():
            messages.send(products[cut[r]], r)
        messages.finish()
        own, out = stack.part(me * size, size), [results.part(r * size, size) for r in range(n)]
        out[me] = recv.part(*cut[me])
        for r, ranks in enumerate(scope.combined):
            if ranks:
                terms.combine([sources[s] for s in ranks], own, out[r], len(ranks))
        space.synchronize()
        messages = _Messages(scope.group)
        for r in scope.others():
            if scope.combined[me]:
                messages.receive(recv.part(*cut[r]), r)
        for r in scope.others():
            if scope.combined[r]:
                messages.send(out[r], r)
        messages.finish()


#: Of some elements, those that each rank combines.
Cut = Sequence[Span]


class _Chunk(NamedTuple):
    """Elements that are combined at once; the result of this rank's goes to ``out``."""

    cut: Cut
    out: View


def _step(scope: Scope, dtype: DType) -> int:
    """Elements that one rank combines of a chunk."""
    travels = _travelling(scope.op, dtype)
    return max(1, min(scope.space.chunk, scope.space.stack // scope.n) // travels.itemsize)


def _cuts(scope: Scope, view: View) -> list[Cut]:
    """The elements in chunks, each shared out to all ranks."""
    n, step = scope.n, scope.n * _step(scope, view.dtype)
    found: list[Cut] = []
    for begin in range(0, view.count, step):
        size = min(step, view.count - begin)
        share = -(-size // n)
        edges = [begin + min(size, r * share) for r in range(n + 1)]
        found.append([(start, end - start) for start, end in pairwise(edges)])
    return found


def _travelling(op: ReduceOp | None, dtype: DType) -> DType:
    """The dtype of what is sent to be combined; products of narrow floats are not rounded yet."""
    assert op is not None
    widened = op.factor is not None and dtype.kind is Kind.NARROW_FLOAT
    return by_name["float32"] if widened else dtype


class _Terms:
    """What is combined: the elements, or for PREMUL_SUM their products.

    factor: of the products; None where there are none.
    dtype:  of the terms.
    """

    def __init__(self, scope: Scope, dtype: DType) -> None:
        op = scope.op
        assert op is not None
        self._space = scope.space
        self.factor = op.factor
        self.dtype = _travelling(op, dtype)
        self._op = op if op.factor is None else ReduceOp.SUM
        self._averages = op is ReduceOp.AVG

    def take(self, source: View, into: View) -> None:
        """The terms of this rank's elements."""
        if self.factor is None:
            self._space.copy(source, into)
        else:
            self._space.scale(source, self.factor, into)

    def combine(self, terms: Sequence[View], own: View, out: View, n: int) -> None:
        """Combines the terms of n ranks; where they are widened, ``own`` is overwritten."""
        target = out if out.dtype is self.dtype else own
        self._space.combine(self._op, terms, target, n if self._averages else 1)
        if target is not out:
            self._space.narrow(target, out)


class _Reduction:
    """One call: each rank gets its part of every chunk of all ranks, and combines it.

    While a chunk is combined the next one travels, and the result of the one before.
    """

    def __init__(self, scope: Scope, source: View, chunks: Sequence[_Chunk]) -> None:
        n, space = scope.n, scope.space
        self._scope, self._space, self._source, self._chunks = scope, space, source, chunks
        self._terms = _Terms(scope, source.dtype)
        dtype, both = self._terms.dtype, range(min(2, len(chunks)))
        most = max((chunk.out.count for chunk in chunks), default=0)
        self._stacks = [space.empty(dtype, (n - 1) * most) for _ in both]
        if self._terms.factor is not None:
            products = max((sum(c for _, c in set(chunk.cut)) for chunk in chunks), default=0)
            self._products = [space.empty(dtype, products) for _ in both]

    def carry_out(self, then: Callable[[_Chunk], None] | None = None) -> None:
        """``then`` is called for each chunk, in order, once its result may be sent."""
        chunks, space = self._chunks, self._space
        if not chunks:
            return
        parts = self._prepared(0)
        if self._terms.factor is not None:
            space.synchronize()
        begun = self._begin(0, parts)
        for i, chunk in enumerate(chunks):
            messages, sources = begun
            own = parts[self._scope.me]
            messages.finish()
            more = i + 1 < len(chunks)
            if more:
                parts = self._prepared(i + 1)
            if more or (i and then is not None):
                # The chunk before is combined: its stack is free, and its result may be sent.
                space.synchronize()
            if more:
                begun = self._begin(i + 1, parts)
            self._terms.combine(sources, own, chunk.out, self._scope.n)
            if i and then is not None:
                then(chunks[i - 1])
        if then is not None:
            space.synchronize()
            then(chunks[-1])

    def _prepared(self, i: int) -> list[View]:
        """This rank's terms for each rank."""
        cut = self._chunks[i].cut
        found = {span: self._source.part(*span) for span in cut}
        if self._terms.factor is not None:
            room, start = self._products[i % 2], 0
            for span, elements in found.items():
                found[span] = product = room.part(start, elements.count)
                self._terms.take(elements, product)
                start += elements.count
        return [found[span] for span in cut]

    def _begin(self, i: int, parts: Sequence[View]) -> tuple[_Messages, list[View]]:
        """Messages with the terms of a chunk; where this rank's of all ranks will be."""
        me = self._scope.me
        messages, size = _Messages(self._scope.group), parts[me].count
        sources = list(parts)
        for place, r in enumerate(self._scope.others()):
            sources[r] = self._stacks[i % 2].part(place * size, size)
            messages.receive(sources[r], r)
        for r in self._scope.others():
            messages.send(parts[r], r)
        return messages, sources


# --- implementations ----------------------------------------------------------------------------

#: By the name of the primitive. All take the same arguments.
ALGORITHMS: dict[str, Callable[..., None]] = {
    "broadcast": broadcast,
    "all_reduce": all_reduce,
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_single": all_gather,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter,
    "scan": prefix,
    "exscan": prefix,
    "all_to_all": all_to_all,
    "all_to_all_single": all_to_all,
}


def build(kind: CallKind, space: Space) -> Implementation:
    """Return what carries calls of a kind out on buffers in ``space``; its caller synchronizes."""
    primitive, group, op, dtype = kind
    assert dtype is not None
    algorithm, n, me = ALGORITHMS[primitive.name], group.size(), group.rank()
    scope = Scope(group, space, op, n, me, [primitive.combined(rank, n) for rank in range(n)])
    sent, received = (n if many else 1 for many in (primitive.many_in, primitive.many_out))

    def carry_out(send: Any, recv: Any, extent: Extent, root: int) -> None:
        if isinstance(extent, int):
            blocks = Blocks([extent] * sent, [extent] * received)
        else:
            sends, receives = extent
            blocks = Blocks(
                sends if sent == n else [sends[me]], receives if received == n else [receives[me]]
            )
        out = None if send is None else space.view(send, dtype, blocks.sends)
        into = None if recv is None else space.view(recv, dtype, blocks.receives)
        algorithm(scope, out, into, blocks, root)

    return carry_out


def premultiplied(
    kind: CallKind, space: Space, build_sum: Callable[[CallKind], Implementation]
) -> Implementation:
    """PREMUL_SUM: each rank's elements times its factor, then a sum.

    build_sum: makes the sum; of float32 for narrow floats, which are scaled and summed in it, in
               rank order, and rounded once at the end.
    """
    primitive, group, op, dtype = kind
    assert op is not None and dtype is not None
    me, factor = group.rank(), op.factor
    n = group.size() if primitive.many_in else 1
    wide = by_name["float32"] if dtype.kind is Kind.NARROW_FLOAT else dtype
    add = build_sum(CallKind(primitive, group, ReduceOp.SUM, wide))

    def scaled(view: View) -> View:
        product = space.empty(wide, view.count)
        space.scale(view, factor, product)
        return product

    def carry_out(send: Any, recv: Any, extent: Extent, root: int) -> None:
        if isinstance(extent, int):
            sends, mine = [extent] * n, extent
        else:
            sends, mine = list(extent.sends), extent.receives[me]
        into = space.view(recv, dtype, [mine])
        if send is None:
            out = scaled(into)
            add(None, space.buffer(out), extent, root)
        else:
            out = into if wide is dtype else space.empty(wide, mine)
            product = scaled(space.view(send, dtype, sends))
            add(space.buffer(product), space.buffer(out), extent, root)
        if out is into or not writes(primitive, group, root):
            return
        if wide is dtype:
            space.copy(out, into)
        else:
            space.narrow(out, into)

    return carry_out
