"""Messages between the ranks of a group, and the scope of the algorithms over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from mpi4py import MPI

from mpicoll.arrays.views import View
from mpicoll.core.groups import ProcessGroup
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import MismatchError
from mpicoll.routes.space import Space
from mpicoll.routes.wire import Message, message

#: Unfinished messages: their memory is held, for ever if an error came between.
in_flight: set[Messages] = set()


class Messages:
    """Pending sends and receives of this rank. Empty views are not sent."""

    def __init__(self, scope: Scope) -> None:
        self._group, self._tag = scope.group, scope.tag
        self._sends: list[tuple[View, MPI.Request]] = []
        self._receives: list[tuple[View, MPI.Request, Message, int]] = []
        in_flight.add(self)

    def receive(self, into: View, source: int) -> None:
        """Start to receive a view from a rank."""
        if into.count:
            what = whole_message(into)
            request = self._group.inner.Irecv(what, source, self._tag)
            self._receives.append((into, request, what, source))

    def send(self, out: View, target: int) -> None:
        """Start to send a view to a rank."""
        if out.count:
            self._sends.append(
                (out, self._group.inner.Isend(whole_message(out), target, self._tag))
            )

    def finish(self) -> None:
        """Wait for all messages; raise MismatchError if one was shorter than expected."""
        status, short = MPI.Status(), None
        for _, request, what, source in self._receives:
            self._group.wait_for(request, status)
            got = status.Get_count(what[-1])
            if got != what[1] and short is None:
                short = source, what[1], got
        for _, request in self._sends:
            self._group.wait_for(request)
        in_flight.discard(self)
        if short is not None:
            raise MismatchError(
                f"rank {self._group.rank()} of group {self._group.group_name} expected {short[1]} "
                f"elements from rank {short[0]}, which sent {short[2]}: collective mismatch: the "
                "ranks made different calls"
            )


def whole_message(view: View) -> Message:
    """Return a contiguous view as one message."""
    return message(view.buffer, view.count, view.dtype)


#: First element and number of elements.
Span = tuple[int, int]


def spans_of(counts: Sequence[int]) -> list[Span]:
    """Return the spans of consecutive blocks."""
    return list(zip(accumulate(counts, initial=0), counts, strict=False))


def shares_of(count: int, n: int, begin: int = 0) -> list[Span]:
    """Split ``count`` elements from index ``begin`` into n spans; some may be empty."""
    share = -(-count // n)
    edges = [begin + min(count, r * share) for r in range(n + 1)]
    return [(start, end - start) for start, end in pairwise(edges)]


class Scope(NamedTuple):
    """The scope of the algorithms of one kind of call: the group, its memory, the operation."""

    group: ProcessGroup
    space: Space
    op: ReduceOp | None  # None if nothing is combined
    exact: bool  # sums are correctly rounded
    n: int
    me: int
    combined: Sequence[range]  # the ranks whose elements make the result of each rank
    tag: int  # of the messages, so that calls of different primitives do not match

    def others(self) -> Iterator[int]:
        """Yield the other ranks, from the next one on, so that ranks start with different ones."""
        return ((self.me + step) % self.n for step in range(1, self.n))
