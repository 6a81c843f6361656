"""A cost model of calls by many ranks, and what it says of the default tables of routes.

    python benchmarks/model.py            # print the table of docs/model.md
    python benchmarks/model.py --write    # and put it into the page

A message of m bytes takes alpha + beta m, combining m bytes gamma m (Hockney 1994). Three things
are added. The ranks of a node share its link: if k of them send in a step, each has a k-th of it.
On a node processors copy messages, so that sending and receiving at once takes as long as both.
Calls from Python cost. A step lasts as long as its busiest rank. Ranks are numbered node by node;
nodes, and ranks per node, are powers of two. docs/model.md has the formulas and their sources.
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
from mpicoll.routes.host import hierarchical, hierarchy, mpi, shared
from mpicoll.routes.tuning import Steps, Table, eligible_routes, route_at

# --- rates ----------------------------------------------------------------------------------------

#: Seconds, see docs/model.md: what mpicoll does before its route begins; a call of MPI from Python;
#: a message between ranks of a node; a message sent from Python; an exchange of levels on a node,
#: in Python, and each block in it; a wait in shared memory, and a look how far one rank is.
OWN, CALL, MESSAGE, PYTHON = 0.545e-6, 0.283e-6, 1.8e-6, 5.19e-6
EXCHANGE, ENTRY, WAIT, LOOK = 9e-6, 1.2e-6, 2.58e-6, 0.104e-6


class Byte(NamedTuple):
    """Seconds for a byte in caches and in memory; bytes that memory reads and writes for it."""

    near: float
    far: float
    traffic: int


COPIED, SHARED = Byte(0.0295e-9, 0.102e-9, 2), Byte(0.0596e-9, 0.0685e-9, 1)
SENT, COMBINED = Byte(0.0677e-9, 0.0801e-9, 2), Byte(0.25e-9, 0.328e-9, 3)
REDUCED, NARROWED = Byte(0.0856e-9, 0.102e-9, 1), Byte(0.18e-9, 0.125e-9, 1)
#: Bytes in use of which half are found in caches, as fitted.
CACHE = 8 * MIB
#: Stated, not measured: bytes a second of a node's memory, and of its link in each direction;
#: seconds of a message between nodes.
MEMORY, BANDWIDTH, LATENCY = 200e9, 25e9, 1.5e-6


class Place(NamedTuple):
    """So many nodes with so many ranks each."""

    nodes: int
    each: int

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.each

    @property
    def name(self) -> str:
        """As tables name it."""
        return "node" if self.nodes == 1 else "nodes" if self.each > 1 else "apart"


def moved(nbytes: float, byte: Byte, reach: float, ranks: int) -> float:
    """Return the time for bytes, of as many ranks of a node at once, that use ``reach`` bytes."""
    if not nbytes:
        return 0.0
    far = 1 / (1 + (CACHE / reach) ** 2)
    return nbytes * ((1 - far) * byte.near + far * max(byte.far, byte.traffic * ranks / MEMORY))


# --- algorithms over messages ---------------------------------------------------------------------


class Step(NamedTuple):
    """Equal steps: bytes that the busiest rank sends, sends and receives, and combines; ranks of a
    node that send to others of it, and to other nodes.
    """

    times: float
    nbytes: float
    both: float
    combined: float
    stay: int
    leave: int


#: Of a place and the bytes of a rank's larger array.
Algorithm = Callable[[Place, float], list[Step]]


def crossing(place: Place, distance: int, nbytes: float, combined: float = 0) -> Step:
    """Return the step in which each rank exchanges with the one whose number differs in a bit."""
    inside = distance < place.each
    ends = (place.each, 0) if inside else (0, place.each)
    return Step(1, nbytes, 2 * nbytes, combined, *ends)


def powers(n: int) -> list[int]:
    """Return 1, 2, 4 and so on, below n."""
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
    """Reduce_scatter by recursive halving, farthest ranks first, for the blocks to be in order."""
    n = place.ranks
    return [crossing(place, d, m * d / n, m * d / n) for d in powers(n)]


def pairwise(place: Place, m: float, combines: bool = True) -> list[Step]:
    """Reduce_scatter by a block from each rank to each other, in n - 1 steps."""
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


#: MPI's own call takes as long as the best of these: kind to MPI, which has thresholds for few
#: machines.
ALGORITHMS: dict[str, list[Algorithm]] = {
    "all_reduce": [doubling, rabenseifner],
    "reduce_scatter": [halving, pairwise, lambda place, m: ring(place, m, True)],
    "all_gather": [gather_doubling, ring],
}


def messages(place: Place, steps: Iterable[Step], reach: float) -> float:
    """Return the time of steps on arrays that use ``reach`` bytes."""
    total = 0.0
    for step in steps:
        inside = MESSAGE + moved(step.both, SENT, reach, step.stay) if step.stay else 0
        across = LATENCY + step.leave * step.nbytes / BANDWIDTH if step.leave else 0
        combining = moved(step.combined, COMBINED, reach, step.stay + step.leave)
        total += step.times * (max(inside, across) + combining)
    return total


def best(kind: str, place: Place, m: float, reach: float) -> float:
    """Return the time of MPI's own call."""
    return CALL + min(messages(place, each(place, m), reach) for each in ALGORITHMS[kind])


# --- routes ---------------------------------------------------------------------------------------


def by_exchange(
    kind: str, place: Place, m: float, byte: Byte = REDUCED, itemsize: int = 4
) -> float:
    """Return the time of messages from Python, combined by mpicoll."""
    n, q = place.ranks, place.each
    whole = n * m
    if kind == "all_reduce" and (
        whole <= space.SMALL or (m < n * itemsize and whole <= space.STACK)
    ):  # each rank gets all arrays, and combines them
        gathering = best("all_gather", place, whole, whole)
        return gathering + moved(m, COPIED, whole, q) + moved((n - 1) * m, byte, whole, q)
    pieces = ceil(m / n / min(space.CHUNK, space.STACK // n))
    block = m / n / pieces
    rounds = 2 if kind == "all_reduce" else 1
    steps = rounds * pairwise(place, n * block, False)
    sending = rounds * (n - 1) * PYTHON + messages(place, steps, n * block)
    return pieces * (sending + moved((n - 1) * block, byte, m, q))


def waiting(n: int, rounds: float) -> float:
    """Return the time for all others of a node to come, so many times."""
    return rounds * (WAIT + min((n - 1) * LOOK, meeting(n, True)))


def rounds_of(n: int, block: float, places: int) -> int:
    """Return the rounds in which blocks go through slots of shared memory, so many in a slot."""
    slot = min(shared.SLOT, shared.MAX_SEGMENT_BYTES // (shared._SLOTS * n)) // 64 * 64
    return max(1, ceil(block / (slot // places)))


def by_sharing(kind: str, place: Place, m: float, byte: Byte = REDUCED) -> float:
    """Return the time by memory that the ranks of a node share."""
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
    """Return the time of steps between nodes by so many ranks of each node at once."""
    several = (step._replace(leave=rails * step.leave) for step in steps)
    return messages(Place(2, 1), several, reach)


def by_levels(kind: str, place: Place, m: float, factor: int = 1) -> float:
    """Return the time by the ranks of each node first, then by rails between the nodes.

    factor: bytes that travel for a byte of the array: 2 where bfloat16 is widened.
    """
    nodes, q = place

    def node(places: int, block: float, entries: int, nbytes: float, reduced: float = 0) -> float:
        moving = moved(nbytes, SHARED, m, q) + moved(reduced, REDUCED, m, q)
        waits = waiting(q, rounds_of(q, block, places))
        return EXCHANGE + entries * ENTRY + moving + waits

    def rail(nbytes: float, rails: int) -> float:
        steps = (each(Place(nodes, 1), nbytes) for each in ALGORITHMS["all_reduce"])
        return CALL + min(_railed(each, rails, m) for each in steps)

    def widening(nbytes: float) -> float:
        return moved(nbytes, COPIED, m, q) if factor > 1 else 0.0

    agreement = rail(16, q)
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
    """Return the time of a call on m bytes by each route that a table may name at the place."""
    plain = kind.removesuffix(" of others")
    narrow = plain != kind  # of bfloat16
    byte, itemsize, factor = (NARROWED, 2, 2) if narrow else (REDUCED, 4, 1)
    q = place.each
    pieces = ceil(m / mpi.CHUNK_BYTES)
    piece = m / pieces
    ways: dict[str, Callable[[], float]] = {
        "mpi": lambda: best(plain, place, m, m),
        "mpi_chunked": lambda: (
            pieces * (best(plain, place, piece, piece) + moved(piece, COPIED, m, q))
        ),
        "exchange": lambda: by_exchange(plain, place, m, byte, itemsize),
        "widened": lambda: best(plain, place, 2 * m, 2 * m) + moved(4 * m, COPIED, 2 * m, q),
        "shared": lambda: by_sharing(plain, place, m, byte),
        # At most: it takes to shared memory where that is faster.
        "single_copy": lambda: by_sharing(plain, place, m, byte),
        "hierarchical": lambda: by_levels(plain, place, m, factor),
    }
    return {route: OWN + ways[route]() for route in eligible_routes(kind, place.name)}


# --- many ranks on a node of two sockets ----------------------------------------------------------

#: Measured on two ranks (docs/model.md): seconds of a signal between near and between far ranks,
#: and of a byte that a rank reads of another.
NEAR_SIGNAL, FAR_SIGNAL, NEAR_BYTE, FAR_BYTE = 45e-9, 165e-9, 1 / 24e9, 1 / 9e9
#: Stated: passing a signal on; bytes a second between the sockets, in each direction.
PASSING, LINK = 50e-9, 100e9
SOCKETS = 2


def meeting(n: int, passed: bool) -> float:
    """Return the time until all have heard of all: each from each, or by signals passed on."""
    if not passed:
        return FAR_SIGNAL + (n - 1) * LOOK
    inside = [distance < n // SOCKETS for distance in powers(n)]
    return sum(PASSING + (NEAR_SIGNAL if each else FAR_SIGNAL) for each in inside)


def on_sockets(n: int, m: float, clusters: bool) -> float:
    """Return the time of an all_reduce of float32 by the ranks of two sockets, numbered one socket
    after the other, each rank with each or by a cluster for each socket.
    """
    q = n // SOCKETS
    rounds = rounds_of(n, m, 1)
    own = m / q if clusters else m / n
    # What a rank reads: to combine it, and of the result.
    combined = m * (1 if clusters else 1 - 1 / n)
    far = 2 * m / q if clusters else 2 * m * (1 - 1 / SOCKETS)
    near = combined + m - own - far / 2
    crossing = max(far * FAR_BYTE, far * q / LINK)
    waits = rounds * (
        meeting(n, n > shared.FLAT_MAX_RANKS) + (SOCKETS + 1 if clusters else 1) * FAR_SIGNAL
    )
    copying = moved(m - own, SHARED, m, n) + near * NEAR_BYTE + crossing
    return OWN + copying + moved(combined, REDUCED, m, n) + waits


def lines_of_sockets() -> list[str]:
    """Return the table of many ranks."""
    heads = ["ranks", "all meet: each by each", "passed on"]
    sizes = [64 * 1024, MIB, 16 * MIB, 256 * MIB]
    heads += [f"{format_bytes(m)}: flat, clusters, MPI" for m in sizes]
    rows = []
    for n in (8, 16, 32, 64, 128, 192):
        row = [str(n), f"{1e6 * meeting(n, False):.1f} us", f"{1e6 * meeting(n, True):.1f} us"]
        for m in sizes:
            usual = best("all_reduce", Place(1, n), m, m)
            times = (on_sockets(n, m, False), on_sockets(n, m, True), usual)
            row.append(" / ".join(f"{1e6 * t:.3g}" for t in times) + " us")
        rows.append(row)
    return table(heads, rows)


# --- the default tables ---------------------------------------------------------------------------

#: The kinds of call for which the default tables leave MPI between nodes.
KINDS = ["all_reduce", "all_reduce of others", "reduce_scatter", "reduce_scatter of others"]
#: What the rows of the default tables for 2 and for 32 ranks stand for, where nothing is measured.
PLACES = [Place(2, 4), Place(8, 1), Place(16, 64), Place(64, 1), Place(1, 64)]
LARGEST = 1 << 30
#: A route is left for another that gains a tenth. A default is named where another is 1.5 times as
#: fast.
WORTHWHILE, WORSE = 1.1, 1.5


class Finding(NamedTuple):
    """The model's steps for a row, and where the default is slowest beside the best route."""

    kind: str
    place: Place
    default: Steps
    model: Steps
    worst: float
    at: int
    better: str


def find(defaults: Table, kind: str, place: Place) -> Finding:
    """Return what the model says of a kind of call at a place."""
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
    """Return the table of the page."""

    def words(steps: Steps) -> str:
        return "; ".join(
            f"from {format_bytes(least)} {route}" if least else route for least, route in steps
        )

    heads = ["kind of call", "nodes x ranks", "default", "by the model", "default / best"]
    rows = []
    for each in (find(Table(openmpi=False), kind, place) for kind in KINDS for place in PLACES):
        worst = f"{each.worst:.1f} at {format_bytes(each.at)} ({each.better})"
        rows.append([
            each.kind, f"{each.place.nodes} x {each.place.each}", words(each.default),
            words(each.model), worst if each.worst >= WORSE else "",
        ])  # fmt: skip
    return table(heads, rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/model.md")
    tables = {"defaults": lines(), "sockets": lines_of_sockets()}
    print("\n\n".join("\n".join(each) for each in tables.values()))
    if parser.parse_args().write:
        page = DOCS / "model.md"
        page.write_text(fill_page(page.read_text(), "model", tables))


if __name__ == "__main__":
    main()
