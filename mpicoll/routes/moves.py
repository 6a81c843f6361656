"""Collectives over messages that move data: broadcast, gather, scatter, all-gather, all-to-all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpicoll.arrays.views import View, ViewList
from mpicoll.core.plan import Blocks
from mpicoll.routes.messages import Messages, Scope, Span, spans_of, whole_message
from mpicoll.routes.wire import Message, exchange

#: Maximum size in bytes of all ranks' blocks for which all_gather uses log2(n) steps.
GATHERED = 512 * 1024
#: Minimum and maximum size in bytes of a chunk of a broadcast along a chain; and the preferred
#: number of chunks per rank.
LEAST, MOST, LINKS = 128 * 1024, 4 * 1024 * 1024, 8


def broadcast(scope: Scope, send: None, recv: View, blocks: Blocks, root: int) -> None:
    """Send the root's elements to every rank.

    Short messages use a binomial tree: log2 n latencies and log2 n times the bytes (Thakur,
    Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005, section 4.3).
    Long messages use a pipelined chain of the ranks, which takes n - 2 chunks longer than sending
    the message once (Patarasuk, Faraj, Yuan, Techniques for pipelined broadcast on Ethernet
    switched clusters, J. Parallel and Distributed Computing 68(6), 2008). A tree would take log2 n
    times as long, and a scatter followed by an all_gather twice.
    """
    n = scope.n
    place = (scope.me - root) % n
    if n > 2 and recv.nbytes > n * LEAST:
        _chain(scope, recv, root, place)
        return
    bit = 1
    while bit < n and not place & bit:
        bit *= 2
    if place:
        above = Messages(scope)
        above.receive(recv, (place - bit + root) % n)
        above.finish()
    below = Messages(scope)
    while bit > 1:
        bit //= 2
        if place + bit < n:
            below.send(recv, (place + bit + root) % n)
    below.finish()


def _chain(scope: Scope, recv: View, root: int, place: int) -> None:
    n, me = scope.n, scope.me
    size = min(MOST, max(LEAST, recv.nbytes // (LINKS * (n - 2)))) // recv.dtype.itemsize
    chunks = [recv.part(s, min(size, recv.count - s)) for s in range(0, recv.count, size)]
    coming = [Messages(scope) for _ in chunks]
    if place > 0:
        for messages, chunk in zip(coming, chunks, strict=True):
            messages.receive(chunk, (me - 1) % n)
    sent = Messages(scope)
    for messages, chunk in zip(coming, chunks, strict=True):
        messages.finish()
        if place < n - 1:
            sent.send(chunk, (me + 1) % n)
    sent.finish()


def all_gather(scope: Scope, send: View | None, recv: View, blocks: Blocks, root: int) -> None:
    """Gather the blocks of all ranks on every rank. Without ``send``, this rank's block is in
    ``recv``.

    Few bytes: Bruck's algorithm with log2 n latencies, for any n (Bruck, Ho, Kipnis, Upfal,
    Weathersby, IEEE Trans. Parallel and Distributed Systems 8(11), 1997). Blocks are received in
    their final places, so a run of blocks that wraps around takes two messages. Many bytes: a ring
    (Thakur and others, as above, section 4.1) with n - 1 latencies. In both, a rank receives each
    byte of the other ranks once.
    """
    space, n, me = scope.space, scope.n, scope.me
    spans = spans_of(blocks.receives)
    own = recv.part(*spans[me])
    if send is not None:
        space.copy(send, own)
        own = send  # can be sent at once
    if recv.nbytes > GATHERED:
        _ring(scope, own, recv, spans)
        return
    here = 1
    while here < n:
        more = min(here, n - here)
        source, target = (me + here) % n, (me - here) % n
        step = Messages(scope)
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
    """Yield the span of ``many`` ranks' blocks from rank ``first`` on; two if it wraps around."""
    n = len(spans)
    for some in (spans[first : first + many], spans[: max(0, first + many - n)]):
        if some:
            yield some[0][0], sum(count for _, count in some)


def _ring(scope: Scope, own: View, recv: View, spans: Sequence[Span]) -> None:
    n, me = scope.n, scope.me
    out = own
    for step in range(1, n):
        into = recv.part(*spans[(me - step) % n])
        both = Messages(scope)
        both.receive(into, (me - 1) % n)
        both.send(out, (me + 1) % n)
        both.finish()
        out = into


def gather(scope: Scope, send: View, recv: View | None, blocks: Blocks, root: int) -> None:
    """Gather the blocks of all ranks on the root, each sent there directly (MPI-4.1 section 6.5).

    The root's link carries each byte once in any case; a tree would save it latencies, and copy on
    the way.
    """
    messages = Messages(scope)
    if recv is None:
        messages.send(send, root)
    else:
        for r in scope.others():
            messages.receive(recv.part(r * send.count, send.count), r)
        scope.space.copy(send, recv.part(root * send.count, send.count))
    messages.finish()


def scatter(scope: Scope, send: View | None, recv: View, blocks: Blocks, root: int) -> None:
    """Send one block of the root's to each rank directly (MPI-4.1 section 6.6)."""
    messages = Messages(scope)
    if send is None:
        messages.receive(recv, root)
    else:
        for r in scope.others():
            messages.send(send.part(r * recv.count, recv.count), r)
        scope.space.copy(send.part(root * recv.count, recv.count), recv)
    messages.finish()


def all_to_all(scope: Scope, send: View, recv: View, blocks: Blocks, root: int) -> None:
    """Send one block from each rank to each other, in n - 1 steps of pairs; see ``wire.exchange``.

    A rank knows only the sizes of the blocks that it sends and receives. Both sides may be lists of
    arrays.
    """
    me = scope.me
    out, into = _arrays(send, blocks.sends), _arrays(recv, blocks.receives)
    scope.space.copy(out[me], into[me])
    exchange(scope.group.inner, _to_others(out, me), _to_others(into, me), scope.tag)


def _arrays(view: View, counts: Sequence[int]) -> Sequence[View]:
    if isinstance(view, ViewList):
        return view.parts
    return [view.part(*span) for span in spans_of(counts)]


def _to_others(views: Sequence[View], me: int) -> list[Message | None]:
    return [whole_message(v) if v.count and r != me else None for r, v in enumerate(views)]
