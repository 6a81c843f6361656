"""A cost model of calls by many ranks, compared with the default tables of routes.

    python benchmarks/model.py            # print the tables of docs/model.md
    python benchmarks/model.py --write    # write them to the page

A message of m bytes takes alpha + beta m; a reduction of m bytes takes gamma m (Hockney 1994). The
model adds three effects. The ranks of a node share its link: if k ranks send in a step, each gets
1/k of the bandwidth. Inside a node, processors copy messages, so the times of sending and receiving
add up. Calls from Python have a cost. A step takes as long as its busiest rank. Ranks are numbered
node by node. Nodes and ranks per node are powers of two. docs/model.md has formulas and sources.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from math import ceil
from typing import NamedTuple

from aims import MIB
from report import DOCS, fill_page, table

from mpicoll.output import format_bytes
from mpicoll.routes import space
from mpicoll.routes.host import hierarchical, hierarchy, shared
from mpicoll.routes.tuning import Steps, Table, eligible_routes, route_at

# --- rates ----------------------------------------------------------------------------------------

#: Seconds, see docs/model.md: mpicoll's work before the route; an MPI call from Python; a message
#: inside a node; a message sent from Python; a level of the hierarchical route in Python, and each
#: of its blocks; a wait in shared memory, and a poll of one rank.
OWN, CALL, MESSAGE, PYTHON = 0.545e-6, 0.283e-6, 1.8e-6, 5.19e-6
EXCHANGE, ENTRY, WAIT, POLL = 9e-6, 1.2e-6, 2.58e-6, 0.104e-6
#: Seconds of a signal: near and far ranks, measured; to forward it, assumed.
NEAR, FAR, FORWARD = 45e-9, 165e-9, 50e-9


class Byte(NamedTuple):
    """Seconds per byte in caches and in DRAM, and DRAM traffic in bytes per byte."""

    near: float
    far: float
    traffic: int


COPIED, SHARED = Byte(0.0295e-9, 0.102e-9, 2), Byte(0.0596e-9, 0.0685e-9, 1)
SENT, COMBINED = Byte(0.0677e-9, 0.0801e-9, 2), Byte(0.25e-9, 0.328e-9, 3)
REDUCED, NARROWED = Byte(0.0856e-9, 0.102e-9, 1), Byte(0.18e-9, 0.125e-9, 1)
#: Fitted number of bytes in use of which half are in caches.
CACHE = 8 * MIB
#: Assumed: bytes per second of a node's memory, and of its link in each direction; latency in
#: seconds between nodes.
MEMORY, BANDWIDTH, LATENCY = 200e9, 25e9, 1.5e-6


class Place(NamedTuple):
    """A number of nodes, and of ranks per node."""

    nodes: int
    each: int

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.nodes * self.each

    @property
    def name(self) -> str:
        """The place in tuning tables."""
        return "node" if self.nodes == 1 else "nodes" if self.each > 1 else "apart"


def moved(nbytes: float, byte: Byte, reach: float, ranks: int) -> float:
    """Return the time to move bytes on ``ranks`` ranks of a node, with ``reach`` bytes in use."""
    if not nbytes:
        return 0.0
    far = 1 / (1 + (CACHE / reach) ** 2)
    return nbytes * ((1 - far) * byte.near + far * max(byte.far, byte.traffic * ranks / MEMORY))


# --- algorithms over messages ---------------------------------------------------------------------


class Step(NamedTuple):
    """A number of equal steps.

    nbytes, both, combined: bytes that the busiest rank sends; sends and receives; and reduces.
    stay, leave: ranks of a node that send inside the node; and to other nodes.
    """

    times: float
    nbytes: float
    both: float
    combined: float
    stay: int
    leave: int


#: Returns the steps for a place and the size in bytes of a rank's larger array.
Algorithm = Callable[[Place, float], list[Step]]


def crossing(place: Place, distance: int, nbytes: float, combined: float = 0) -> Step:
    """Return the step in which each rank exchanges data with the rank at this power of two."""
    inside = distance < place.each
    ends = (place.each, 0) if inside else (0, place.each)
    return Step(1, nbytes, 2 * nbytes, combined, *ends)


def powers(n: int) -> list[int]:
    """Return the powers of two below n."""
    return [1 << i for i in range((n - 1).bit_length())]


def doubling(place: Place, m: float) -> list[Step]:
    """All_reduce by recursive doubling."""
    return [crossing(place, d, m, m) for d in powers(place.ranks)]


def rabenseifner(place: Place, m: float) -> list[Step]:
    """All_reduce by recursive halving, nearest ranks first, and doubling."""
    halves = [(d, m / (2 * d)) for d in powers(place.ranks)]
    down = [crossing(place, d, part, part) for d, part in halves]
    return down + [crossing(place, d, part) for d, part in halves]


def halving(place: Place, m: float) -> list[Step]:
    """Reduce_scatter by recursive halving, farthest ranks first, which keeps blocks in order."""
    n = place.ranks
    return [crossing(place, d, m * d / n, m * d / n) for d in powers(n)]


def pairwise(place: Place, m: float, combines: bool = True) -> list[Step]:
    """Reduce_scatter by pairwise exchange, in n - 1 steps."""
    n, q, block = place.ranks, place.each, m / place.ranks
    stays = Counter(
        q if place.nodes == 1 else max(0, q - by) + max(0, q - (n - by)) for by in range(1, n)
    )
    return [
        Step(times, block, 2 * block, combines * block, stay, q - stay)
        for stay, times in stays.items()
    ]


def gather_doubling(place: Place, m: float) -> list[Step]:
    """All_gather in log2 n steps."""
    return [crossing(place, d, m * d / place.ranks) for d in powers(place.ranks)]


def ring(place: Place, m: float, combines: bool = False) -> list[Step]:
    """All_gather, or reduce_scatter, by a ring."""
    n, q, block = place.ranks, place.each, m / place.ranks
    ends = (q, 0) if place.nodes == 1 else (q - 1, 1)
    return [Step(n - 1, block, 2 * block, combines * block, *ends)] if n > 1 else []


def bruck(place: Place, m: float) -> list[Step]:
    """All_to_all in log2 n steps, each of half the blocks."""
    return [crossing(place, d, m / 2) for d in powers(place.ranks)]


#: MPI takes as long as the best of these. Real thresholds of MPI are rarely optimal.
ALGORITHMS: dict[str, list[Algorithm]] = {
    "all_reduce": [doubling, rabenseifner],
    "reduce_scatter": [halving, pairwise, lambda place, m: ring(place, m, True)],
    "all_gather": [gather_doubling, ring],
    "all_to_all": [bruck, lambda place, m: pairwise(place, m, False)],
}


def messages(place: Place, steps: Iterable[Step], reach: float) -> float:
    """Return the time of steps with ``reach`` bytes in use."""
    total = 0.0
    for step in steps:
        inside = MESSAGE + moved(step.both, SENT, reach, step.stay) if step.stay else 0
        across = LATENCY + step.leave * step.nbytes / BANDWIDTH if step.leave else 0
        combining = moved(step.combined, COMBINED, reach, step.stay + step.leave)
        total += step.times * (max(inside, across) + combining)
    return total


def best(kind: str, place: Place, m: float, reach: float) -> float:
    """Return the time of MPI's collective."""
    return CALL + min(messages(place, each(place, m), reach) for each in ALGORITHMS[kind])


# --- routes ---------------------------------------------------------------------------------------


def by_exchange(kind: str, place: Place, m: float, byte: Byte = REDUCED) -> float:
    """Return the time of the route exchange."""
    n, q = place.ranks, place.each
    whole = n * m
    if kind == "all_reduce" and whole <= space.SMALL:  # each rank gets and reduces all arrays
        gathering = best("all_gather", place, whole, whole)
        return gathering + moved(m, COPIED, whole, q) + moved((n - 1) * m, byte, whole, q)
    pieces = ceil(m / n / min(space.CHUNK, space.STACK // n))
    block = m / n / pieces
    if pieces == 1:
        sending = PYTHON + best("all_to_all", place, m, m)
    else:
        sending = (n - 1) * PYTHON + messages(place, pairwise(place, n * block, False), n * block)
    if kind == "all_reduce":
        sending += PYTHON + best("all_gather", place, n * block, n * block)
    return pieces * (sending + moved((n - 1) * block, byte, m, q))


def dissemination(n: int) -> float:
    """Return the time of a barrier by dissemination among the ranks of a node of two sockets."""
    return sum(FORWARD + (NEAR if distance < n // 2 else FAR) for distance in powers(n))


def waiting(n: int, rounds: float) -> float:
    """Return the time of ``rounds`` barriers of the ranks of a node."""
    return rounds * (WAIT + min((n - 1) * POLL, dissemination(n)))


def rounds_of(n: int, block: float, places: int) -> int:
    """Return the number of rounds for blocks in shared memory, with ``places`` blocks per slot."""
    slot = min(shared.SLOT, shared.MAX_SEGMENT_BYTES // (shared._SLOTS * n)) // 64 * 64
    return max(1, ceil(block / (slot // places)))


def by_sharing(kind: str, place: Place, m: float, byte: Byte = REDUCED) -> float:
    """Return the time of the route shared."""
    n, rest = place.each, m * (1 - 1 / place.each)

    def time(put_and_got: float, reduced: float, rounds: float) -> float:
        moving = moved(put_and_got, SHARED, m, n) + moved(reduced, byte, m, n)
        return moving + waiting(n, rounds)

    if kind == "all_reduce":
        if m <= shared.ONE_SHOT_MAX_BYTES // max(1, n - 1):
            return time(m, (n - 1) * m, 1)
        return time(m + rest, rest, 2 * rounds_of(n, m, 1))
    return time(rest, rest, rounds_of(n, m / n, n))


def _railed(steps: Iterable[Step], rails: int, reach: float) -> float:
    """Return the time of steps between nodes by ``rails`` ranks of each node at once."""
    several = (step._replace(leave=rails * step.leave) for step in steps)
    return messages(Place(2, 1), several, reach)


def by_levels(kind: str, place: Place, m: float, factor: int = 1) -> float:
    """Return the time of the route hierarchical.

    factor: bytes sent per byte of the array: 2 if bfloat16 is widened.
    """
    nodes, q = place

    def node(places: int, block: float, entries: int, nbytes: float, reduced: float = 0) -> float:
        moving = moved(nbytes, SHARED, m, q) + moved(reduced, REDUCED, m, q)
        waits = waiting(q, rounds_of(q, block, places))
        return EXCHANGE + entries * ENTRY + moving + waits

    def rail(nbytes: float, rails: int) -> float:
        def call(kind: str, nbytes: float) -> float:
            steps = (each(Place(nodes, 1), nbytes) for each in ALGORITHMS[kind])
            return CALL + min(_railed(each, rails, m) for each in steps)

        if factor == 1:
            return call("all_reduce", nbytes)
        combining = moved(nbytes * (nodes - 1) / nodes, REDUCED, m, q)
        sending = call("all_to_all", nbytes) + call("all_gather", nbytes / factor)
        return 2 * PYTHON + sending + combining

    def widening(nbytes: float) -> float:
        return moved(nbytes, COPIED, m, q) if factor > 1 else 0.0

    agreement = rail(32, q)
    if kind == "all_reduce":
        pieces = ceil(factor * m / min(q * hierarchical.CHUNK, hierarchical.TOGETHER))
        piece = factor * m / pieces
        share = min(piece, max(piece / q, hierarchy.SHARE))
        down = node(q, share, 2 * q, piece - share, (q - 1) * share)
        up = node(1, share / factor, q, piece / factor)
        along = rail(share, ceil(piece / share))
        return pieces * (widening(piece + share) + down + along + up) + agreement
    block = factor * m / place.ranks
    pieces = ceil(block / min(hierarchical.CHUNK, hierarchical.TOGETHER // max(nodes, q)))
    block /= pieces
    rest = (q - 1) * block
    down = nodes * node(q, block, 2 * q, rest, rest)
    # Along the rails by exchange.
    steps = pairwise(Place(nodes, 1), nodes * block, False)
    along = (nodes - 1) * PYTHON + _railed(steps, q, m)
    combining = moved((nodes - 1) * block, REDUCED, m, q)
    return pieces * (widening((nodes * q + 1) * block) + down + along + combining) + agreement


def route_times(kind: str, place: Place, m: float) -> dict[str, float]:
    """Return the time of a call on m bytes by each eligible route."""
    plain = kind.removesuffix(" of others")
    narrow = plain != kind  # of bfloat16
    byte, factor = (NARROWED, 2) if narrow else (REDUCED, 1)
    q = place.each
    ways: dict[str, Callable[[], float]] = {
        "mpi": lambda: best(plain, place, m, m),
        "exchange": lambda: by_exchange(plain, place, m, byte),
        "widened": lambda: (
            PYTHON + best(plain, place, 2 * m, 2 * m) + moved(4 * m, COPIED, 2 * m, q)
        ),
        "shared": lambda: by_sharing(plain, place, m, byte),
        "hierarchical": lambda: by_levels(plain, place, m, factor),
    }
    return {route: OWN + ways[route]() for route in eligible_routes(kind, place.name)}


# --- the default tables ---------------------------------------------------------------------------

#: Kinds of calls for which the default tables have other routes than mpi between nodes.
KINDS = ["all_reduce", "all_reduce of others", "reduce_scatter", "reduce_scatter of others"]
#: Places without measurements, for which the default rows of 2 and 32 ranks are used.
PLACES = [Place(2, 4), Place(8, 1), Place(16, 64), Place(64, 1), Place(1, 64)]
LARGEST = 1 << 30
#: Minimum gain for a step to another route. Minimum gain over a default that the table reports.
WORTHWHILE, WORSE = 1.1, 1.5


class Finding(NamedTuple):
    """The steps of the model for a row, and the size at which the default is slowest."""

    kind: str
    place: Place
    default: Steps
    model: Steps
    worst: float
    at: int
    better: str


def find(defaults: Table, kind: str, place: Place) -> Finding:
    """Return the finding for a kind of call at a place."""
    row = defaults.row(kind, place.ranks)[place.name]
    itemsize = 2 if kind.endswith(" of others") else 4
    blocks = kind.startswith("reduce_scatter")
    size = itemsize * (place.ranks if blocks else 1)
    steps: list[tuple[int, str]] = []
    worst, at, better = 1.0, size, ""
    while size <= LARGEST:
        times = route_times(kind, place, size)
        fastest = min(times, key=times.__getitem__)
        if not steps or times[steps[-1][1]] > WORTHWHILE * times[fastest]:
            steps.append((size if steps else 0, fastest))
        longer = times[route_at(row, size)] / times[fastest]
        if longer > worst:
            worst, at, better = longer, size, fastest
        size *= 2
    return Finding(kind, place, row, tuple(steps), worst, at, better)


def lines() -> list[str]:
    """Return the table of the default routes that differ from the model."""

    def words(steps: Steps) -> str:
        return "; ".join(
            f"from {format_bytes(least)} {route}" if least else route for least, route in steps
        )

    heads = ["kind of call", "nodes x ranks", "default", "by the model", "default / best"]
    rows = [
        [
            each.kind, f"{each.place.nodes} x {each.place.each}", words(each.default),
            words(each.model), f"{each.worst:.1f} at {format_bytes(each.at)} ({each.better})"
            if each.worst >= WORSE else "",
        ]
        for each in (find(Table(), kind, place) for kind in KINDS for place in PLACES)
        if words(each.default) != words(each.model)
    ]  # fmt: skip
    return table(heads, rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables to docs/model.md")
    tables = {"defaults": lines()}
    print("\n\n".join("\n".join(each) for each in tables.values()))
    if parser.parse_args().write:
        page = DOCS / "model.md"
        page.write_text(fill_page(page.read_text(), "model", tables))


if __name__ == "__main__":
    main()
