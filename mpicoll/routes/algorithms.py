"""Collectives over point-to-point messages, written once for any kind of memory.

Of MPI only sends and receives are asked; what is copied and combined on the way, a `Space` does.
``n`` is the number of ranks, a *latency* what a message costs however short it is.

Which algorithm serves a call is a function of count, dtype, operation and n, as every rank knows
them. All reductions combine the original elements of all ranks in one place, once, in the order of
the ranks. So all ranks get the same bits, which depend neither on the number of elements nor on the
algorithm and are those of `composed`, and narrow floats travel as they are and are rounded once.
Partial sums that travel, as in recursive halving or in a ring of sums, would cost narrow floats
twice the bytes, and a combination with a wait for it at each step, which on a device is dearer than
several messages; they win only where many ranks reduce little.

Views that are given to a function are ready to be read and written. Its results are there once the
caller has settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mpi4py import MPI

from mpicoll.arrays.views import View, ViewList, empty, find_overlapping
from mpicoll.core.calls import Blocks
from mpicoll.dtypes import DType, Kind, ReduceOp, by_name
from mpicoll.errors import MismatchError
from mpicoll.kernels import reduction
from mpicoll.routes.wire import Message, exchange, message

if TYPE_CHECKING:
    from mpicoll.core.groups import ProcessGroup

__all__ = [
    "HOST",
    "Host",
    "Space",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]  # fmt: skip

#: Bytes of all ranks' arrays together up to which each rank that needs the result of a reduction
#: gets everything: one exchange and one wait for the memory instead of two.
WHOLE = 128 * 1024
#: Ranks up to which everybody sends that to everybody, without a copy first.
DIRECT = 8
#: Bytes that one rank gets from one other at a time: enough to hide what combining them costs.
BLOCK = 4 * 1024 * 1024
#: Bytes of all those blocks together, of which there are two at a time.
STACK = 64 * 1024 * 1024
#: Bytes of all ranks' blocks up to which they are gathered in few steps instead of short ones.
GATHERED = 512 * 1024
#: Bytes of the pieces of a broadcast along a chain, at least and at most; and how many times fewer
#: than the pieces the ranks shall be, for the chain takes n - 2 pieces longer than the message.
LEAST, MOST, LINKS = 128 * 1024, 4 * 1024 * 1024, 8


# --- memory -------------------------------------------------------------------------------------


class Space(Protocol):
    """One kind of memory and what can be done in it, for one call at a time.

    Everything but ``settle`` may only be enqueued; what is enqueued is done in that order. Views
    are contiguous and of equal counts, unless said otherwise; they may be empty.
    """

    def serves(self, op: ReduceOp, dtype: DType) -> bool:
        """Elements of ``dtype`` can be combined by ``op``; the same answer on every rank."""

    def blank(self, dtype: DType, count: int) -> View:
        """``count`` elements of whatever values, to be used until the call ends."""

    def copy(self, source: View, into: View) -> None:
        """Copies; the elements of one of the views may lie apart, in C order."""
        if into.buffer is None:
            into.copy_from(source)
        else:
            source.copy_to(into)

    def combine(self, op: ReduceOp, sources: Sequence[View], out: View, divisor: int) -> None:
        """``reduction.combine`` of views of one dtype."""

    def scale(self, source: View, factor: Any, out: View) -> None:
        """``reduction.scale``; ``out`` is float32 where ``source`` is of narrow floats."""

    def narrow(self, source: View, out: View) -> None:
        """``reduction.narrow``."""

    def settle(self) -> None:
        """Returns when all that was enqueued is done, so that MPI may read it or write over it."""


class Host(Space):
    """The memory of NumPy arrays; nothing is enqueued."""

    def serves(self, op: ReduceOp, dtype: DType) -> bool:
        """True: NumPy combines what the C library does not."""
        return True

    def blank(self, dtype: DType, count: int) -> View:
        """New memory."""
        return empty(dtype, count)

    def combine(self, op: ReduceOp, sources: Sequence[View], out: View, divisor: int) -> None:
        """By the C library, or NumPy."""
        reduction.combine(op, out.dtype, [source.flat for source in sources], out.flat, divisor)

    def scale(self, source: View, factor: Any, out: View) -> None:
        """By NumPy."""
        reduction.scale(source.dtype, source.flat, factor, out.flat)

    def narrow(self, source: View, out: View) -> None:
        """By the C library, or NumPy."""
        reduction.narrow(source.flat, out.flat)

    def settle(self) -> None:
        """There is nothing to wait for."""


HOST = Host()


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


# --- moves --------------------------------------------------------------------------------------


def broadcast(group: ProcessGroup, recv: View, root: int) -> None:
    """The root's elements, on every rank.

    Short messages go down a binomial tree: log2 n latencies, and as many times the bytes (Thakur,
    Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005, section 4.3).
    Long ones go in pieces along a chain of the ranks, each of which receives a piece while it sends
    the one before: n - 2 pieces longer than the message takes alone (Patarasuk, Faraj, Yuan,
    Techniques for pipelined broadcast on Ethernet switched clusters, J. Parallel and Distributed
    Computing 68(6), 2008), where a tree takes log2 n times as long, and a scatter followed by an
    all-gather twice.
    """
    n = group.size()
    place = (group.rank() - root) % n
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
    pieces = [recv.part(s, min(size, recv.count - s)) for s in range(0, recv.count, size)]
    coming = [_Messages(group) for _ in pieces]
    if place > 0:
        for messages, piece in zip(coming, pieces, strict=True):
            messages.receive(piece, (me - 1) % n)
    sent = _Messages(group)
    for messages, piece in zip(coming, pieces, strict=True):
        messages.finish()
        if place < n - 1:
            sent.send(piece, (me + 1) % n)
    sent.finish()


def all_gather(
    group: ProcessGroup, space: Space, send: View | None, recv: View, counts: Sequence[int]
) -> None:
    """The blocks of all ranks, ``counts`` elements each, on every rank; no send: it is in place.

    Few bytes: the exchange of Bruck and others, in which the blocks that a rank has double with
    each step, whatever n is: log2 n latencies (Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE Trans.
    Parallel and Distributed Systems 8(11), 1997). Blocks go where they belong at once instead of
    being rotated in the end; a run of blocks that wraps around is two messages. Many: the ring of
    Thakur and others (as above, section 4.1), n - 1 latencies, only neighbours talk. Either way a
    rank receives each foreign byte once.
    """
    n, me = group.size(), group.rank()
    spans = _spans(counts)
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
            space.settle()  # this rank's copy goes on from its place
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


def gather(group: ProcessGroup, space: Space, send: View, recv: View | None, root: int) -> None:
    """The blocks of all ranks, on the root, each sent there directly (MPI-4.1 section 6.5).

    The root's link carries each byte once, whatever the way; a tree would spare it latencies, and
    copy on the way.
    """
    messages = _Messages(group)
    if recv is None:
        messages.send(send, root)
    else:
        for r in _others(group):
            messages.receive(recv.part(r * send.count, send.count), r)
        space.copy(send, recv.part(root * send.count, send.count))
    messages.finish()


def scatter(group: ProcessGroup, space: Space, send: View | None, recv: View, root: int) -> None:
    """One block of the root's to each rank, sent there directly (MPI-4.1 section 6.6)."""
    messages = _Messages(group)
    if send is None:
        messages.receive(recv, root)
    else:
        for r in _others(group):
            messages.send(send.part(r * recv.count, recv.count), r)
        space.copy(send.part(root * recv.count, recv.count), recv)
    messages.finish()


def all_to_all(group: ProcessGroup, space: Space, send: View, recv: View, blocks: Blocks) -> None:
    """One block from each rank to each other, in n - 1 steps of pairs; see ``wire.exchange``.

    No rank knows the others' sizes; each message is known to its sender and its receiver. The
    arrays of lists are sent and received where they are, but for those whose elements lie apart,
    and those to send that are received into before they may be sent.
    """
    me = group.rank()
    outgoing, incoming = _arrays(send, blocks.sends), _arrays(recv, blocks.receives)
    into = [_contiguous(space, one) for one in incoming]
    out = [_contiguous(space, one) for one in outgoing]
    if isinstance(send, ViewList):
        twice = find_overlapping(out, into)
        out = [_blank(space, v) if both else v for v, both in zip(out, twice, strict=True)]
    if _copy_what_differs(space, outgoing, out):
        space.settle()
    space.copy(out[me], into[me])
    exchange(group.inner, _to_others(out, me), _to_others(into, me))
    _copy_what_differs(space, into, incoming)


def _arrays(view: View, counts: Sequence[int]) -> Sequence[View]:
    if isinstance(view, ViewList):
        return view.parts
    return [view.part(*span) for span in _spans(counts)]


def _contiguous(space: Space, view: View) -> View:
    return _blank(space, view) if view.buffer is None else view


def _blank(space: Space, like: View) -> View:
    return space.blank(like.dtype, like.count)


def _copy_what_differs(space: Space, sources: Sequence[View], into: Sequence[View]) -> bool:
    pairs = [pair for pair in zip(sources, into, strict=True) if pair[0] is not pair[1]]
    for pair in pairs:
        space.copy(*pair)
    return bool(pairs)


def _to_others(views: Sequence[View], me: int) -> list[Message | None]:
    return [_whole(v) if v.count and r != me else None for r, v in enumerate(views)]


def _others(group: ProcessGroup) -> Iterator[int]:
    """All other ranks, from the next one on, so that no rank is everybody's first."""
    n, me = group.size(), group.rank()
    return ((me + step) % n for step in range(1, n))


# --- reductions ---------------------------------------------------------------------------------


def all_reduce(group: ProcessGroup, space: Space, op: ReduceOp, recv: View) -> None:
    """The elements of all ranks combined, on every rank, in place.

    Few bytes: everybody gets everything and combines it, in one latency among few ranks, by the
    all-gather in log2 n of them among many. Many bytes: each rank gets one n-th of everybody,
    combines it and hands the result to all: Rabenseifner's decomposition (Thakur and others, as
    above, section 4.5) with a reduce-scatter by pairwise exchange and an all-gather by the ring.
    A rank sends and receives 2 (n - 1) / n times the bytes, as few as there can be (Patarasuk,
    Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel and
    Distributed Computing 69(2), 2009).
    """
    n, me, count = group.size(), group.rank(), recv.count
    if recv.nbytes * n > WHOLE:
        pieces = [
            _Piece(cut, recv.part(*cut[me])) for cut in _cuts(count, n, _travelling(op, recv.dtype))
        ]

        def then(piece: _Piece) -> None:
            begin = piece.cut[0][0]
            counts = [size for _, size in piece.cut]
            all_gather(group, space, None, recv.part(begin, sum(counts)), counts)

        _Reduction(group, space, op, recv, pieces).carry_out(then)
    elif n <= DIRECT:
        _Reduction(group, space, op, recv, [_Piece([(0, count)] * n, recv)]).carry_out()
    elif count:
        terms = _Terms(space, op, n, recv.dtype)
        stack = space.blank(terms.dtype, n * count)
        parts = [stack.part(r * count, count) for r in range(n)]
        terms.take(recv, parts[me])
        space.settle()
        all_gather(group, space, None, stack, [count] * n)
        terms.combine(parts, parts[me], recv)


def reduce(group: ProcessGroup, space: Space, op: ReduceOp, recv: View, root: int) -> None:
    """The elements of all ranks combined, in place on the root; the others' stay as they are.

    Few bytes: the root gets everything and combines it: one latency. Many: as in all_reduce, but
    that the results go to the root alone; it receives 2 (n - 1) / n times the bytes, and sends and
    combines no more than the others.
    """
    n, me, count = group.size(), group.rank(), recv.count
    if recv.nbytes * n <= WHOLE:
        cut = [(0, count if r == root else 0) for r in range(n)]
        _Reduction(group, space, op, recv, [_Piece(cut, recv.part(*cut[me]))]).carry_out()
        return
    cuts = _cuts(count, n, _travelling(op, recv.dtype))
    if me == root:
        pieces = [_Piece(cut, recv.part(*cut[me])) for cut in cuts]
    else:
        # The result of one piece is on its way while the next one is combined.
        rooms = [space.blank(recv.dtype, cut[me][1]) for cut in cuts[:2]]
        pieces = [_Piece(cut, rooms[i % 2].part(0, cut[me][1])) for i, cut in enumerate(cuts)]

    def then(piece: _Piece) -> None:
        messages = _Messages(group)
        if me == root:
            for r in _others(group):
                messages.receive(recv.part(*piece.cut[r]), r)
        else:
            messages.send(piece.out, root)
        messages.finish()

    _Reduction(group, space, op, recv, pieces).carry_out(then)


def reduce_scatter(
    group: ProcessGroup, space: Space, op: ReduceOp, send: View, recv: View, counts: Sequence[int]
) -> None:
    """One block of the elements of all ranks combined on each rank, ``counts`` elements each: a
    pairwise exchange.

    The originals travel: (n - 1) / n times the bytes, as few as there can be, and one latency for a
    piece (Thakur and others, as above, section 4.4, for long messages).
    """
    me, step = group.rank(), _step(group.size(), _travelling(op, recv.dtype))
    pieces = []
    for done in range(0, max(counts), step):
        cut = [
            (start + min(done, count), min(step, max(0, count - done)))
            for start, count in _spans(counts)
        ]
        pieces.append(_Piece(cut, recv.part(min(done, recv.count), cut[me][1])))
    _Reduction(group, space, op, send, pieces).carry_out()


#: Of some elements, those that each rank combines.
Cut = Sequence[Span]


class _Piece(NamedTuple):
    """Elements that are combined at once; the result of this rank's goes to ``out``."""

    cut: Cut
    out: View


def _step(n: int, dtype: DType) -> int:
    """Elements that one rank combines of a piece."""
    return max(1, min(BLOCK, STACK // n) // dtype.itemsize)


def _cuts(count: int, n: int, dtype: DType) -> list[Cut]:
    """``count`` elements in pieces, each shared out to all ranks."""
    step = n * _step(n, dtype)
    found: list[Cut] = []
    for begin in range(0, count, step):
        size = min(step, count - begin)
        share = -(-size // n)
        edges = [begin + min(size, r * share) for r in range(n + 1)]
        found.append([(start, end - start) for start, end in pairwise(edges)])
    return found


def _travelling(op: ReduceOp, dtype: DType) -> DType:
    """The dtype of what is sent to be combined; products of narrow floats are not rounded yet."""
    widened = op.factor is not None and dtype.kind is Kind.NARROW_FLOAT
    return by_name["float32"] if widened else dtype


class _Terms:
    """What is combined: the elements, or for PREMUL_SUM their products.

    factor: of the products; None where there are none.
    dtype:  of the terms.
    """

    def __init__(self, space: Space, op: ReduceOp, n: int, dtype: DType) -> None:
        self._space = space
        self.factor = op.factor
        self.dtype = _travelling(op, dtype)
        self._op = op if op.factor is None else ReduceOp.SUM
        self._divisor = n if op is ReduceOp.AVG else 1

    def take(self, source: View, into: View) -> None:
        """The terms of this rank's elements."""
        if self.factor is None:
            self._space.copy(source, into)
        else:
            self._space.scale(source, self.factor, into)

    def combine(self, terms: Sequence[View], own: View, out: View) -> None:
        """Combines terms of all ranks; where they are widened, ``own`` is overwritten."""
        target = out if out.dtype is self.dtype else own
        self._space.combine(self._op, terms, target, self._divisor)
        if target is not out:
            self._space.narrow(target, out)


class _Reduction:
    """One call: each rank gets its part of every piece of all ranks, and combines it.

    While a piece is combined the next one travels, and the result of the one before.
    """

    def __init__(
        self,
        group: ProcessGroup,
        space: Space,
        op: ReduceOp,
        source: View,
        pieces: Sequence[_Piece],
    ) -> None:
        n = group.size()
        self._group, self._space, self._source, self._pieces = group, space, source, pieces
        self._terms = _Terms(space, op, n, source.dtype)
        dtype, both = self._terms.dtype, range(min(2, len(pieces)))
        most = max((piece.out.count for piece in pieces), default=0)
        self._stacks = [space.blank(dtype, (n - 1) * most) for _ in both]
        if self._terms.factor is not None:
            products = max((sum(c for _, c in set(piece.cut)) for piece in pieces), default=0)
            self._products = [space.blank(dtype, products) for _ in both]

    def carry_out(self, then: Callable[[_Piece], None] | None = None) -> None:
        """``then`` is called for each piece, in order, once its result may be sent."""
        pieces, space = self._pieces, self._space
        if not pieces:
            return
        parts = self._prepared(0)
        if self._terms.factor is not None:
            space.settle()
        begun = self._begin(0, parts)
        for i, piece in enumerate(pieces):
            messages, sources = begun
            own = parts[self._group.rank()]
            messages.finish()
            more = i + 1 < len(pieces)
            if more:
                parts = self._prepared(i + 1)
            if more or (i and then is not None):
                # The piece before is combined: its stack is free, and its result may be sent.
                space.settle()
            if more:
                begun = self._begin(i + 1, parts)
            self._terms.combine(sources, own, piece.out)
            if i and then is not None:
                then(pieces[i - 1])
        if then is not None:
            space.settle()
            then(pieces[-1])

    def _prepared(self, i: int) -> list[View]:
        """This rank's terms for each rank."""
        cut = self._pieces[i].cut
        found = {span: self._source.part(*span) for span in cut}
        if self._terms.factor is not None:
            room, start = self._products[i % 2], 0
            for span, elements in found.items():
                found[span] = product = room.part(start, elements.count)
                self._terms.take(elements, product)
                start += elements.count
        return [found[span] for span in cut]

    def _begin(self, i: int, parts: Sequence[View]) -> tuple[_Messages, list[View]]:
        """Messages with the terms of a piece; where this rank's of all ranks will be."""
        me = self._group.rank()
        messages, size = _Messages(self._group), parts[me].count
        sources = list(parts)
        for place, r in enumerate(_others(self._group)):
            sources[r] = self._stacks[i % 2].part(place * size, size)
            messages.receive(sources[r], r)
        for r in _others(self._group):
            messages.send(parts[r], r)
        return messages, sources
