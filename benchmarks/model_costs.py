"""What calls cost in theory: the messages, bytes and additions of each way to carry one out, and
the time that they take at given rates.

A message of m bytes takes alpha + beta m (Hockney, The communication challenge for MPP, Parallel
Computing 20(3), 1994), combining m bytes gamma m. Three things are beside the papers. Between nodes
a node's ranks share its link: in a step in which k of them send, each has the k-th part of it. On a
node messages are copied by the processors, so that a rank that sends and receives at once takes as
long as for both. And calls from Python cost.

It needs no MPI. model_steps.py has the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from measure import KIB, MIB
from model_steps import (
    Ends,
    Place,
    Step,
    Steps,
    around,
    doubling,
    gather_doubling,
    gather_ring,
    gathered,
    pairwise,
    rabenseifner,
    ring,
    scatter_halving,
    scattered_doubling,
    scattered_ring,
    tree,
)

#: As in mpicoll/routes: composed.SMALL, BLOCK, STACK; shared.SLOT, TOGETHER, MOST, WHOLE;
#: levels.PIECE, TOGETHER, SHARE; native.PIECE.
EXCHANGE_SMALL, EXCHANGE_BLOCK, EXCHANGE_STACK = 8 * KIB, MIB, 32 * MIB
SLOT, SLOTS_TOGETHER, SLOTS, MOST_SHARING, WHOLE = 256 * KIB, 48 * MIB, 4, 128, 16 * KIB
RAIL_PIECE, LEVELS_TOGETHER, RAIL_SHARE = MIB, 8 * MIB, 4 * KIB
MPI_PIECE = 2 * MIB


# --- time ---------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a call does on one rank.

    reach:    bytes of the arrays in use: of what reaches farther, less is in the caches.
    held:     bytes that messages have in use, if not all those.
    own:      calls of mpicoll.
    calls:    of MPI, from Python.
    messages: sent from Python; their bytes are in steps.
    exchanges, entries: of ``levels`` with the ranks of its node, and blocks given and taken there.
    waits:    for the others, in memory that they share; looks: how far each of them has come.
    copied:   bytes, in its own memory.
    shared:   bytes, into shared memory and out of it.
    reduced, narrowed: bytes combined by mpicoll; of narrow floats.
    steps:    by messages.
    """

    reach: float
    held: float = 0
    own: float = 0
    calls: float = 0
    messages: float = 0
    exchanges: float = 0
    entries: float = 0
    waits: float = 0
    looks: float = 0
    copied: float = 0
    shared: float = 0
    reduced: float = 0
    narrowed: float = 0
    steps: tuple[Step, ...] = ()

    def times(self, factor: float) -> Cost:
        """That many times all of it, in the same memory."""
        steps = tuple(step._replace(times=factor * step.times) for step in self.steps)
        return Cost._make([*self[:2], *(factor * each for each in self[2:-1]), steps])

    def then(self, other: Cost) -> Cost:
        """This, and the other after it, in this one's memory."""
        sums = (a + b for a, b in zip(self[2:-1], other[2:-1], strict=True))
        return Cost._make([*self[:2], *sums, self.steps + other.steps])


class Rates(NamedTuple):
    """Seconds for one of everything; see Cost. Numbers, or arrays of as many elements.

    message: between ranks of a node, however short.
    sent:    a byte of such a message, at either end; combined: a byte combined by MPI.

    Those of bytes are there twice, for bytes in caches and in memory.
    """

    own: Any
    call: Any
    message: Any
    python: Any
    exchange: Any
    entry: Any
    wait: Any
    look: Any
    copied: Any
    copied_far: Any
    shared: Any
    shared_far: Any
    sent: Any
    sent_far: Any
    combined: Any
    combined_far: Any
    reduced: Any
    reduced_far: Any
    narrowed: Any
    narrowed_far: Any


class Machine(NamedTuple):
    """What is not fitted but stated.

    cache:     bytes that a rank reaches of which half are found in its caches.
    memory:    bytes a second that a node's memory reads and writes, for all its ranks.
    latency:   seconds of a message between nodes.
    bandwidth: bytes a second out of a node, and as many into it at once.
    """

    cache: float
    memory: float = inf
    latency: float = 0.0
    bandwidth: float = inf


#: Bytes that memory reads and writes for a byte that is copied; copied into shared memory or out of
#: it, which is in the caches; combined with another; and combined with those in shared memory.
COPYING, SHARING, COMBINING, REDUCING = 2, 1, 3, 1


def far_share(reach: float, cache: float) -> float:
    """The part of so many bytes that is not found in caches."""
    return 1 / (1 + (cache / reach) ** 2) if reach else 0.0


def seconds(cost: Cost, rates: Rates, place: Place, machine: Machine) -> Any:
    """The time of a call by all ranks; an array where the rates are arrays."""
    larger: Any = np.maximum if isinstance(rates.message, np.ndarray) else max
    far = far_share(cost.reach, machine.cache)

    def moved(nbytes: float, near: Any, slow: Any, traffic: float, ranks: int) -> Any:
        if not nbytes:
            return 0.0
        least = traffic * ranks / machine.memory
        return nbytes * ((1 - far) * near + far * larger(slow, least))

    time = (
        cost.own * rates.own
        + cost.calls * rates.call
        + cost.messages * rates.python
        + cost.exchanges * rates.exchange
        + cost.entries * rates.entry
        + cost.waits * rates.wait
        + cost.looks * rates.look
        + moved(cost.copied, rates.copied, rates.copied_far, COPYING, place.each)
        + moved(cost.shared, rates.shared, rates.shared_far, SHARING, place.each)
        + moved(cost.reduced, rates.reduced, rates.reduced_far, REDUCING, place.each)
        + moved(cost.narrowed, rates.narrowed, rates.narrowed_far, REDUCING, place.each)
    )
    far = far_share(cost.held or cost.reach, machine.cache)
    for step in cost.steps:
        stay, leave = step.ends
        slowest: Any = 0.0
        if stay:
            copying = moved(step.out + step.into, rates.sent, rates.sent_far, COPYING, stay)
            slowest = rates.message + copying
        if leave:
            sending = leave * max(step.out, step.into) / machine.bandwidth
            slowest = larger(slowest, machine.latency + sending)
        combining = moved(
            step.combined, rates.combined, rates.combined_far, COMBINING, stay + leave
        )
        time = time + step.times * (slowest + combining)
    return time


# --- mpicoll's routes ---------------------------------------------------------------------------

#: The steps of an algorithm for so many bytes of a rank's larger array.
Algorithm = Callable[[Place, float], Steps]
#: A call on so many bytes of a rank's larger array; None where that cannot be.
Calls = Callable[[Place, float], "Cost | None"]


def _combining(nbytes: float, narrow: bool) -> Cost:
    return Cost(0, narrowed=nbytes) if narrow else Cost(0, reduced=nbytes)


def by_mpi(algorithm: Algorithm, copies: bool = False) -> Calls:
    """MPI's own call, were that its algorithm; copies: of a rank's own block."""

    def cost(place: Place, m: float) -> Cost:
        own = m / place.ranks if copies else 0
        return Cost(m, calls=1, copied=own, steps=tuple(algorithm(place, m)))

    return cost


def in_pieces(algorithm: Algorithm) -> Calls:
    """MPI's own call again and again (native.py); a piece comes into the caches, and goes, once."""

    def cost(place: Place, m: float) -> Cost:
        pieces = ceil(m / MPI_PIECE)
        piece = m / pieces
        steps = tuple(algorithm(place, piece))
        return Cost(m, held=piece, calls=1, copied=piece, steps=steps).times(pieces)

    return cost


def widened(algorithm: Algorithm, factor: float) -> Calls:
    """Narrow floats made float32, MPI's own all_reduce, and rounded; no route of mpicoll."""

    def cost(place: Place, m: float) -> Cost:
        wide = factor * m
        return Cost(wide, calls=1, copied=2 * wide, steps=tuple(algorithm(place, wide)))

    return cost


def exchanged_all_reduce(itemsize: int, narrow: bool) -> Calls:
    """composed.py: all ranks' shares by messages from Python, combined, and sent to all."""

    def cost(place: Place, m: float) -> Cost:
        n = place.ranks
        whole = n * m
        if whole <= EXCHANGE_SMALL or (m < n * itemsize and whole <= EXCHANGE_STACK):
            # Everybody gets everything.
            steps = tuple(gathered(place, whole))
            moved = Cost(whole, calls=1, copied=m, steps=steps)
            return moved.then(_combining((n - 1) * m, narrow))
        pieces = ceil(m / (n * _block(n)))
        share = m / pieces / n
        steps = tuple(2 * pairwise(place, share, False))
        once = Cost(m, held=n * share, messages=2 * (n - 1), steps=steps)
        return once.then(_combining((n - 1) * share, narrow)).times(pieces)

    return cost


def _block(n: int) -> int:
    return min(EXCHANGE_BLOCK, EXCHANGE_STACK // n)


def exchanged_reduce_scatter(narrow: bool) -> Calls:
    """composed.py: each rank's blocks by messages from Python, combined."""

    def cost(place: Place, size: float) -> Cost:
        n = place.ranks
        pieces = ceil(size / n / _block(n))
        block = size / n / pieces
        steps = tuple(pairwise(place, block, False))
        once = Cost(size, held=n * block, messages=n - 1, steps=steps)
        return once.then(_combining((n - 1) * block, narrow)).times(pieces)

    return cost


def exchanged_all_to_all(place: Place, size: float) -> Cost:
    """direct.py: each block by a message from Python."""
    block = size / place.ranks
    steps = tuple(pairwise(place, block, False))
    return Cost(size, messages=place.ranks - 1, copied=block, steps=steps)


# --- shared memory, after shared.c ---


def _slot(n: int) -> int:
    return min(SLOT, SLOTS_TOGETHER // (SLOTS * n)) // 64 * 64


def _rounds(most: float, places: int, n: int) -> int:
    """Rounds of ``exchange`` in shared.c for a largest block of so many bytes."""
    return max(1, ceil(most / (_slot(n) // places)))


def _sharing(place: Place) -> bool:
    return place.nodes == 1 and 1 < place.each <= MOST_SHARING


def _waiting(rounds: int, n: int) -> Cost:
    """For all others, in each round."""
    return Cost(0, waits=rounds, looks=rounds * (n - 1))


def shared_all_reduce(narrow: bool) -> Calls:
    """Each combines everything, or its share and takes the others'."""

    def cost(place: Place, m: float) -> Cost | None:
        n = place.each
        if not _sharing(place):
            return None
        if m <= WHOLE // max(1, n - 1):
            return Cost(m, shared=m).then(_combining((n - 1) * m, narrow)).then(_waiting(1, n))
        share = Cost(m, shared=m * (2 - 1 / n)).then(_combining((n - 1) * m / n, narrow))
        return share.then(_waiting(2 * ceil(m / _slot(n)), n))

    return cost


def shared_reduce_scatter(narrow: bool) -> Calls:
    """Each combines its block of all ranks."""

    def cost(place: Place, size: float) -> Cost | None:
        n = place.each
        if not _sharing(place):
            return None
        rest = (n - 1) * size / n
        work = Cost(size, shared=rest).then(_combining(rest, narrow))
        return work.then(_waiting(_rounds(size / n, n, n), n))

    return cost


def shared_all_gather(place: Place, size: float) -> Cost | None:
    """Each puts its block up and takes all others."""
    n = place.each
    if not _sharing(place):
        return None
    return Cost(size, shared=size, copied=size / n).then(_waiting(_rounds(size / n, 1, n), n))


def shared_broadcast(place: Place, m: float) -> Cost | None:
    """The root puts up what the others take; they do so at the same time, a round apart."""
    n = place.each
    if not _sharing(place):
        return None
    return Cost(m, shared=m).then(_waiting(_rounds(m, 1, n), n))


# --- levels.py ---


def _leveled(place: Place) -> bool:
    return place.nodes > 1 and 1 < place.each <= MOST_SHARING


def _railed(steps: Iterable[Step], rails: int) -> tuple[Step, ...]:
    """Steps between nodes with one rank each, by so many ranks of each at once."""
    return tuple(step._replace(ends=Ends(0, rails * step.ends.leave)) for step in steps)


def _along(place: Place) -> Place:
    """A rail: a rank of each node."""
    return Place(place.nodes, 1)


def _agreed(place: Place) -> Cost:
    """That all make the same call: a reduction of two numbers on each rail."""
    return Cost(0, calls=1, steps=_railed(doubling(_along(place), 16), place.each))


def _on_node(
    place: Place, places: int, most: float, entries: int, shared: float = 0, reduced: float = 0
) -> Cost:
    """An exchange with the ranks of the node; see ``_rounds``."""
    work = Cost(0, exchanges=1, entries=entries, shared=shared, reduced=reduced)
    return work.then(_waiting(_rounds(most, places, place.each), place.each))


def _pieces_of(place: Place, m: float) -> tuple[int, float, float, int]:
    """The pieces of an array; bytes of one and of the share of a rail; rails that have a share."""
    q = place.each
    pieces = ceil(m / min(q * RAIL_PIECE, LEVELS_TOGETHER))
    piece = m / pieces
    share = min(piece, max(piece / q, RAIL_SHARE))
    return pieces, piece, share, ceil(piece / share)


def leveled_all_reduce(algorithm: Algorithm | None, factor: float = 1.0) -> Calls:
    """Shares combined on the node, all_reduced along the rails, gathered on the node.

    algorithm: of MPI, along the rails; None: exchange.
    factor:    bytes of what travels a byte of the array: above 1 where narrow floats are widened.
    """
    exchange = exchanged_all_reduce(4, False)

    def cost(place: Place, m: float) -> Cost | None:
        if not _leveled(place):
            return None
        q = place.each
        pieces, piece, share, rails = _pieces_of(place, factor * m)
        if algorithm is None:
            rail = exchange(_along(place), share)
            assert rail is not None
        else:
            rail = Cost(0, calls=1, steps=tuple(algorithm(_along(place), share)))
        rail = rail._replace(steps=_railed(rail.steps, rails))
        down = _on_node(place, q, share, 2 * q, shared=piece - share, reduced=(q - 1) * share)
        up = _on_node(place, 1, share / factor, q, shared=piece / factor)
        widening = Cost(0, copied=piece + share if factor > 1 else 0)
        each = widening.then(down).then(rail).then(up)
        return Cost(m).then(each.times(pieces)).then(_agreed(place))

    return cost


def _blocks_of(place: Place, size: float) -> tuple[int, float]:
    """The pieces of each rank's block, and bytes of one."""
    block = size / place.ranks
    pieces = ceil(block / min(RAIL_PIECE, LEVELS_TOGETHER // max(place.nodes, place.each)))
    return pieces, block / pieces


def leveled_reduce_scatter(algorithm: Algorithm | None, factor: float = 1.0) -> Calls:
    """Each combines, on its node, the blocks of its rail, which then has a reduce_scatter.

    algorithm: of MPI, along the rails; None: exchange, as levels.py has it.
    """
    exchange = exchanged_reduce_scatter(False)

    def cost(place: Place, size: float) -> Cost | None:
        if not _leveled(place):
            return None
        q, nodes = place.each, place.nodes
        pieces, block = _blocks_of(place, factor * size)
        if algorithm is None:
            rail = exchange(_along(place), nodes * block)
            assert rail is not None
        else:
            rail = Cost(0, calls=1, steps=tuple(algorithm(_along(place), nodes * block)))
        rail = rail._replace(steps=_railed(rail.steps, q))
        rest = (q - 1) * block
        down = _on_node(place, q, block, 2 * q, shared=rest, reduced=rest).times(nodes)
        widening = Cost(0, copied=(nodes * q + 1) * block if factor > 1 else 0)
        each = widening.then(down).then(rail)
        return Cost(size).then(each.times(pieces)).then(_agreed(place))

    return cost


def leveled_all_gather(algorithm: Algorithm) -> Calls:
    """Blocks gathered along the rails, then each node's on the node."""

    def cost(place: Place, size: float) -> Cost | None:
        if not _leveled(place):
            return None
        q, nodes = place.each, place.nodes
        pieces, block = _blocks_of(place, size)
        steps = _railed(algorithm(_along(place), nodes * block), q)
        before = _on_node(place, 1, 0, 0)
        rail = Cost(0, calls=1, copied=block, steps=steps)
        up = _on_node(place, 1, block, q, shared=q * block).times(nodes)
        each = before.then(rail).then(up)
        return Cost(size).then(each.times(pieces)).then(_agreed(place))

    return cost


def leveled_broadcast(algorithm: Algorithm) -> Calls:
    """Shares scattered on the root's node, broadcast along the rails, gathered on all nodes."""

    def cost(place: Place, m: float) -> Cost | None:
        if not _leveled(place):
            return None
        q = place.each
        pieces, piece, share, rails = _pieces_of(place, m)
        steps = _railed(algorithm(_along(place), share), rails)
        down = _on_node(place, q, share, q, shared=piece)  # the root's, then a share by all
        up = _on_node(place, 1, share, q, shared=piece)
        each = down.then(Cost(0, calls=1, steps=steps)).then(up)
        return Cost(m).then(each.times(pieces)).then(_agreed(place))

    return cost


# --- the table ----------------------------------------------------------------------------------


class Way(NamedTuple):
    """A way to carry a call out.

    name:  of its algorithm.
    route: of mpicoll that may go this way, as mpicoll/core/tables.py names it; "" for none.
    """

    name: str
    route: str
    cost: Calls


def _floats(itemsize: int, narrow: bool) -> dict[str, tuple[Way, ...]]:
    """The reductions; narrow: of floats that MPI does not combine."""
    factor = 4 / itemsize if narrow else 1.0
    reduce_all = {"recursive doubling": doubling, "Rabenseifner": rabenseifner, "ring": ring}
    scatter = {
        "recursive halving": scatter_halving,
        "ring": lambda place, size: around(place, size / place.ranks, True),
        "pairwise": lambda place, size: pairwise(place, size / place.ranks, True),
    }
    alone: tuple[Way, ...]
    if narrow:
        alone = tuple(
            Way(f"widened, {name}", "widened", widened(one, factor))
            for name, one in reduce_all.items()
        )
        alone_scattered: tuple[Way, ...] = ()
    else:
        alone = tuple(Way(name, "mpi", by_mpi(one)) for name, one in reduce_all.items())
        alone += (
            Way("pieces, Rabenseifner", "pieces", in_pieces(rabenseifner)),
            Way("pieces, ring", "pieces", in_pieces(ring)),
        )
        alone_scattered = tuple(Way(name, "mpi", by_mpi(one)) for name, one in scatter.items())
    return {
        "all_reduce": (
            *alone,
            Way("exchange", "exchange", exchanged_all_reduce(itemsize, narrow)),
            *(
                Way(f"levels, {name}", "levels", leveled_all_reduce(one, factor))
                for name, one in reduce_all.items()
            ),
            Way("levels, exchange", "", leveled_all_reduce(None, factor)),
            Way("shared memory", "shared", shared_all_reduce(narrow)),
        ),
        "reduce_scatter": (
            *alone_scattered,
            Way("exchange", "exchange", exchanged_reduce_scatter(narrow)),
            Way("levels, exchange", "levels", leveled_reduce_scatter(None, factor)),
            Way("levels, recursive halving", "", leveled_reduce_scatter(scatter_halving, factor)),
            Way("shared memory", "shared", shared_reduce_scatter(narrow)),
        ),
    }


_PLAIN, _NARROW = _floats(4, False), _floats(2, True)

#: By the kinds of call of mpicoll/core/tables.py; "of others" is of bfloat16.
WAYS: dict[str, tuple[Way, ...]] = {
    "all_reduce": _PLAIN["all_reduce"],
    "all_reduce of others": _NARROW["all_reduce"],
    "reduce_scatter": _PLAIN["reduce_scatter"],
    "reduce_scatter of others": _NARROW["reduce_scatter"],
    "all_gather": (
        Way("recursive doubling", "mpi", by_mpi(gather_doubling, copies=True)),
        Way("ring", "mpi", by_mpi(gather_ring, copies=True)),
        Way("levels, recursive doubling", "levels", leveled_all_gather(gather_doubling)),
        Way("levels, ring", "levels", leveled_all_gather(gather_ring)),
        Way("shared memory", "shared", shared_all_gather),
    ),
    "broadcast": (
        Way("binomial tree", "mpi", by_mpi(tree)),
        Way("scatter and doubling", "mpi", by_mpi(scattered_doubling)),
        Way("scatter and ring", "mpi", by_mpi(scattered_ring)),
        Way("levels, binomial tree", "levels", leveled_broadcast(tree)),
        Way("levels, scatter and ring", "levels", leveled_broadcast(scattered_ring)),
        Way("shared memory", "shared", shared_broadcast),
    ),
}
#: Bytes of an element, and whether each rank has a block of the array.
ITEMSIZE = {kind: 2 if kind.endswith("of others") else 4 for kind in WAYS}
BLOCKS = {"reduce_scatter", "reduce_scatter of others", "all_gather"}


def least(kind: str, ranks: int) -> int:
    """Bytes of the smallest call: an element, or one for each rank."""
    return ITEMSIZE[kind] * (ranks if kind in BLOCKS else 1)
