"""The algorithms of collectives over messages, in theory: who sends how many bytes to whom.

Ranks take part in steps; a step lasts as long as its busiest rank. Sources, by short names:

    TRG   Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH,
          Int. J. High Performance Computing Applications 19(1), 2005
    R     Rabenseifner, Optimization of collective reduction operations, ICCS 2004
    CHPV  Chan, Heimlich, Purkayastha, van de Geijn, Collective communication: theory, practice, and
          experience, Concurrency and Computation 19(13), 2007
    B     Bruck, Ho, Kipnis, Upfal, Weathersby, IEEE Trans. Parallel and Distributed Systems 8(11),
          1997

Bytes are float: shares of a message are not rounded to elements. model_costs.py makes times of it.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from measure import KIB

#: Bytes of all blocks up to which MPI is taken to gather them in few steps (MPICH's threshold).
GATHERED = 512 * KIB


class Place(NamedTuple):
    """Where ranks are.

    nodes:     so many,
    each:      with so many ranks each.
    scattered: rank r is on node r mod nodes, instead of r div each.
    """

    nodes: int
    each: int
    scattered: bool = False

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.each

    def node(self, ranks: Any) -> Any:
        """The node of each rank."""
        return ranks % self.nodes if self.scattered else ranks // self.each


class Ends(NamedTuple):
    """How many ranks of a node send at once to others of the node, and to other nodes, on the node
    where it is most.
    """

    stay: int
    leave: int


class Step(NamedTuple):
    """So many equal steps, one after the other.

    out, into, combined: bytes that the rank that has most of each sends, receives and combines.
    """

    times: float
    out: float
    into: float
    combined: float
    ends: Ends


# --- who sends to whom --------------------------------------------------------------------------


def _ends(place: Place, sources: Any, targets: Any) -> Ends:
    here, there = place.node(sources), place.node(targets)
    off = here != there

    def most(nodes: Any) -> int:
        return int(np.bincount(nodes).max()) if len(nodes) else 0

    return Ends(most(here[~off]), max(most(here[off]), most(there[off])))


@cache
def shifted(place: Place, by: int) -> Ends:
    """Rank r sends to r + by, around the end."""
    n, q = place.ranks, place.each
    if place.scattered:
        return Ends(q, 0) if by % place.nodes == 0 else Ends(0, q)
    if place.nodes == 1:
        return Ends(q, 0)
    stay = max(0, q - by) + max(0, q - (n - by))
    return Ends(stay, q - stay)


@cache
def all_shifts(place: Place) -> tuple[tuple[Ends, int], ...]:
    """The steps of a pairwise exchange: what they have in common, and how many have it."""
    return tuple(Counter(shifted(place, by) for by in range(1, place.ranks)).items())


def _power(n: int) -> int:
    """The greatest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def _members(n: int) -> Any:
    """Who is left of n ranks where a power of two is wanted: of the first, the odd ones (TRG)."""
    more = n - _power(n)
    return np.r_[1 : 2 * more : 2, 2 * more : n]


@cache
def crossed(place: Place, distance: int) -> Ends:
    """Of a power of two of ranks each sends to the one whose number differs in one bit."""
    members = _members(place.ranks)
    return _ends(place, members, members[np.arange(len(members)) ^ distance])


@cache
def folded(place: Place) -> Ends:
    """The ranks that are not left send to their neighbours."""
    members = _members(place.ranks)[: place.ranks - _power(place.ranks)]
    return _ends(place, members - 1, members)


@cache
def branched(place: Place, distance: int) -> Ends:
    """A step of a binomial tree from rank 0."""
    sources = np.arange(0, place.ranks - distance, 2 * distance)
    return _ends(place, sources, sources + distance)


def _distances(n: int) -> list[int]:
    """1, 2, 4 and so on, below n."""
    return [1 << i for i in range((n - 1).bit_length())]


# --- algorithms over messages -------------------------------------------------------------------

Steps = list[Step]


def _fold(place: Place, nbytes: float) -> Steps:
    more = place.ranks > _power(place.ranks)
    return [Step(1, 0, nbytes, nbytes, folded(place))] if more else []


def _unfold(place: Place, nbytes: float) -> Steps:
    more = place.ranks > _power(place.ranks)
    return [Step(1, nbytes, 0, 0, folded(place))] if more else []


def doubling(place: Place, m: float) -> Steps:
    """all_reduce by recursive doubling: log2 n (alpha + beta m + gamma m) (TRG 4.5)."""
    steps = [Step(1, m, m, m, crossed(place, d)) for d in _distances(_power(place.ranks))]
    return [*_fold(place, m), *steps, *_unfold(place, m)]


def rabenseifner(place: Place, m: float) -> Steps:
    """all_reduce by recursive halving, nearest ranks first, and doubling (R; TRG 4.5)."""
    distances = _distances(_power(place.ranks))
    halves = [(m / (2 * d), crossed(place, d)) for d in distances]
    down = [Step(1, size, size, size, ends) for size, ends in halves]
    up = [Step(1, size, size, 0, ends) for size, ends in reversed(halves)]
    return [*_fold(place, m), *down, *up, *_unfold(place, m)]


def around(place: Place, block: float, combines: bool) -> Steps:
    """A block to the next rank, n - 1 times: a ring."""
    n = place.ranks
    return [Step(n - 1, block, block, combines * block, shifted(place, 1))] if n > 1 else []


def ring(place: Place, m: float) -> Steps:
    """all_reduce by a ring of sums and a ring of results (CHPV, bucket algorithms)."""
    block = m / place.ranks
    return [*around(place, block, True), *around(place, block, False)]


def pairwise(place: Place, block: float, combines: bool) -> Steps:
    """A block from each rank to each other, in n - 1 steps (TRG 4.2, 4.4)."""
    return [Step(times, block, block, combines * block, ends) for ends, times in all_shifts(place)]


def scatter_halving(place: Place, size: float) -> Steps:
    """reduce_scatter by recursive halving, farthest ranks first (TRG 4.4).

    Farthest first, for the blocks have to end in the order of the ranks. Where n is no power of
    two, those who stand for another have two blocks.
    """
    n, block = place.ranks, size / place.ranks
    power = _power(n)
    blocks = np.where(np.arange(power) < n - power, 2, 1)
    steps = []
    for d in reversed(_distances(power)):
        kept, sent = (float(some) * block for some in blocks.reshape(-1, d)[:2].sum(1))
        steps.append(Step(1, sent, kept, kept, crossed(place, d)))
    return [*_fold(place, size), *steps, *_unfold(place, block)]


def gather_doubling(place: Place, size: float) -> Steps:
    """all_gather in log2 n steps: recursive doubling, or where n is no power of two B (TRG 4.1)."""
    n, block = place.ranks, size / place.ranks
    ends = crossed if n == _power(n) else shifted
    steps = []
    for d in _distances(n):
        some = min(d, n - d) * block
        steps.append(Step(1, some, some, 0, ends(place, d)))
    return steps


def gather_ring(place: Place, size: float) -> Steps:
    """all_gather by a ring (TRG 4.1)."""
    return around(place, size / place.ranks, False)


def tree(place: Place, m: float) -> Steps:
    """broadcast down a binomial tree (TRG 4.2)."""
    return [Step(1, m, 0, 0, branched(place, d)) for d in reversed(_distances(place.ranks))]


def _scatter(place: Place, m: float) -> Steps:
    n = place.ranks
    return [
        Step(1, min(d, n - d) * m / n, 0, 0, branched(place, d)) for d in reversed(_distances(n))
    ]


def scattered_doubling(place: Place, m: float) -> Steps:
    """broadcast as scatter and all_gather (TRG 4.2, after van de Geijn; CHPV)."""
    return [*_scatter(place, m), *gather_doubling(place, m)]


def scattered_ring(place: Place, m: float) -> Steps:
    """The same with a ring."""
    return [*_scatter(place, m), *gather_ring(place, m)]


def gathered(place: Place, size: float) -> Steps:
    """all_gather as MPI is taken to choose."""
    return (gather_doubling if size <= GATHERED else gather_ring)(place, size)
