"""The cost model of the benchmarks: its algorithms are played through here, rank by rank, and
mpicoll's own code is counted; what it fits is known.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpicoll.core.tables import KINDS, Table, able
from mpicoll.dtypes import ReduceOp
from mpicoll.dtypes import by_name as dtypes
from mpicoll.primitives import by_name as primitives
from mpicoll.routes.host import composed, levels, native, shared

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import model  # noqa: E402
import model_costs as costs  # noqa: E402
import model_fit  # noqa: E402
import model_predictions as predictions  # noqa: E402
import model_steps as steps  # noqa: E402
from aims import Results  # noqa: E402
from model_costs import WAYS, Cost, Machine, Rates, seconds  # noqa: E402
from model_steps import Place, Step  # noqa: E402
from pages import filled  # noqa: E402

pytestmark = pytest.mark.any_mpi

KIB, MIB = 1 << 10, 1 << 20

# --- the algorithms, played through -------------------------------------------------------------

#: From a rank, to a rank, these elements; and whether they are combined with what is there.
Sending = tuple[int, int, Iterable[int], bool]


class Play:
    """Ranks with arrays of which each element is the set of ranks that it comes from.

    rounds: what each round took: what the rank that sent and received most sent and received, the
            most sent or received, the most combined; how many ranks of a node sent to others of it
            and to other nodes, and got from other nodes.
    """

    def __init__(self, place: Place, elements: int, has: Callable[[int, int], bool]) -> None:
        self.place, self.n = place, place.ranks
        self.arrays = [
            [frozenset({rank} if has(rank, e) else ()) for e in range(elements)]
            for rank in range(self.n)
        ]
        self.rounds: list[tuple[int, int, int, int, int]] = []

    def node(self, rank: int) -> int:
        return rank % self.place.nodes if self.place.scattered else rank // self.place.each

    def round(self, sendings: Sequence[Sending]) -> None:
        """All at once; every rank sends to one other at most, and gets from one at most."""
        taken = [
            (source, target, [(e, self.arrays[source][e]) for e in elements], combines)
            for source, target, elements, combines in sendings
        ]
        assert max(Counter(source for source, *_ in taken).values()) == 1
        assert max(Counter(target for _, target, *_ in taken).values()) == 1
        out, into, combined = Counter[int](), Counter[int](), Counter[int]()
        stay, leave, enter = Counter[int](), Counter[int](), Counter[int]()
        for source, target, values, combines in taken:
            here, there = self.node(source), self.node(target)
            if here == there:
                stay[here] += 1
            else:
                leave[here] += 1
                enter[there] += 1
            out[source] += len(values)
            into[target] += len(values)
            combined[target] += combines * len(values)
            for e, value in values:
                mine = self.arrays[target][e]
                assert not combines or not mine & value, "combined twice"
                self.arrays[target][e] = mine | value if combines else value
        both = max(out[rank] + into[rank] for rank in range(self.n))
        most = max(*out.values(), *into.values())
        off = max([*leave.values(), *enter.values(), 0])
        self.rounds.append((both, most, max(combined.values()), max([*stay.values(), 0]), off))

    def whole(self, rank: int, elements: Iterable[int]) -> bool:
        """The rank has the sum of all ranks in these places."""
        return all(self.arrays[rank][e] == set(range(self.n)) for e in elements)


def taken(made: Iterable[Step]) -> Counter[tuple[float, ...]]:
    """What the model says of each round, as Play has it."""
    found = Counter[tuple[float, ...]]()
    for step in made:
        most = max(step.out, step.into)
        key = (step.out + step.into, most, step.combined, *step.ends)
        found[tuple(round(each, 6) for each in key)] += int(step.times)
    return found


def power(n: int) -> int:
    found = 1
    while 2 * found <= n:
        found *= 2
    return found


def folded(play: Play, everything: Iterable[int]) -> list[int]:
    """A power of two of ranks is left, in their order."""
    more = play.n - power(play.n)
    if more:
        play.round([(2 * i, 2 * i + 1, everything, True) for i in range(more)])
    return [rank for rank in range(play.n) if rank >= 2 * more or rank % 2]


def unfolded(play: Play, elements: Callable[[int], Iterable[int]]) -> None:
    more = play.n - power(play.n)
    if more:
        play.round([(2 * i + 1, 2 * i, elements(2 * i), False) for i in range(more)])


def blocks(n: int, elements: int) -> list[range]:
    size = elements // n
    return [range(i * size, (i + 1) * size) for i in range(n)]


def play_doubling(play: Play, elements: int) -> None:
    left = folded(play, range(elements))
    bit = 1
    while bit < len(left):
        play.round([(left[i], left[i ^ bit], range(elements), True) for i in range(len(left))])
        bit *= 2
    unfolded(play, lambda rank: range(elements))
    assert all(play.whole(rank, range(elements)) for rank in range(play.n))


def play_rabenseifner(play: Play, elements: int) -> None:
    left = folded(play, range(elements))
    spans = {rank: range(elements) for rank in left}
    halvings = []
    bit = 1
    while bit < len(left):
        kept, sendings = {}, []
        for i, rank in enumerate(left):
            span = spans[rank]
            middle = len(span) // 2
            low, high = span[:middle], span[middle:]
            kept[rank], sent = (high, low) if i & bit else (low, high)
            sendings.append((rank, left[i ^ bit], sent, True))
        play.round(sendings)
        halvings.append((bit, spans))
        spans = kept
        bit *= 2
    for rank in left:
        assert play.whole(rank, spans[rank])
    for bit, before in reversed(halvings):
        play.round([(rank, left[i ^ bit], spans[rank], False) for i, rank in enumerate(left)])
        spans = before
    unfolded(play, lambda rank: range(elements))
    assert all(play.whole(rank, range(elements)) for rank in range(play.n))


def play_ring_sums(play: Play, elements: int) -> None:
    """Rank r ends with block r of the sum."""
    n, block = play.n, blocks(play.n, elements)
    for step in range(1, n):
        play.round([(r, (r + 1) % n, block[(r - step) % n], True) for r in range(n)])
    assert all(play.whole(r, block[r]) for r in range(n))


def play_ring_results(play: Play, elements: int) -> None:
    n, block = play.n, blocks(play.n, elements)
    for step in range(n - 1):
        play.round([(r, (r + 1) % n, block[(r - step) % n], False) for r in range(n)])


def play_ring(play: Play, elements: int) -> None:
    play_ring_sums(play, elements)
    play_ring_results(play, elements)
    assert all(play.whole(rank, range(elements)) for rank in range(play.n))


def play_halving(play: Play, elements: int) -> None:
    """Rank r ends with block r of the sum."""
    n, block = play.n, blocks(play.n, elements)
    left = folded(play, range(elements))
    owned = [[r for r in (rank - 1, rank) if r == rank or r not in left] for rank in left]
    owned[0] = [r for r in owned[0] if r >= 0]
    low, high = dict.fromkeys(range(len(left)), 0), {i: len(left) for i in range(len(left))}
    width = len(left) // 2
    while width:
        sendings = []
        for i, rank in enumerate(left):
            other = i + width if i - low[i] < width else i - width
            middle = low[i] + width
            theirs = range(middle, high[i]) if i < middle else range(low[i], middle)
            sent = [e for j in theirs for b in owned[j] for e in block[b]]
            sendings.append((rank, left[other], sent, True))
        play.round(sendings)
        for i in range(len(left)):
            middle = low[i] + width
            low[i], high[i] = (low[i], middle) if i < middle else (middle, high[i])
        width //= 2
    unfolded(play, lambda rank: block[rank])
    assert all(play.whole(r, block[r]) for r in range(n))


def play_pairwise(play: Play, elements: int) -> None:
    """Rank r ends with block r of the sum; each of its parts comes from where it was."""
    n, block = play.n, blocks(play.n, elements)
    for step in range(1, n):
        play.round([(r, (r + step) % n, block[(r + step) % n], True) for r in range(n)])
    # What r sends is its own: it is about to be somebody else's block.
    assert all(play.whole(r, block[r]) for r in range(n))


def play_gather_doubling(play: Play, elements: int) -> None:
    n, block = play.n, blocks(play.n, elements)
    here = 1
    while here < n:
        if n == power(n):
            first = [r // here * here for r in range(n)]
            play.round(
                [
                    (r, r ^ here, [e for b in range(first[r], first[r] + here) for e in block[b]],
                     False)
                    for r in range(n)
                ]
            )  # fmt: skip
        else:
            more = min(here, n - here)
            play.round(
                [
                    (r, (r - here) % n, [e for b in range(more) for e in block[(r + b) % n]], False)
                    for r in range(n)
                ]
            )
        here *= 2


def play_tree(play: Play, elements: int) -> None:
    far = 1
    while far < play.n:
        far *= 2
    have = [0]
    while far > 1:
        far //= 2
        play.round([(r, r + far, range(elements), False) for r in have if r + far < play.n])
        have += [r + far for r in have if r + far < play.n]
    assert sorted(have) == list(range(play.n))


def play_scatter(play: Play, elements: int) -> None:
    n, block = play.n, blocks(play.n, elements)
    far = 1
    while far < n:
        far *= 2
    ends = {0: n}
    while far > 1:
        far //= 2
        sendings = []
        for r, end in list(ends.items()):
            if r + far < end:
                sent = [e for b in range(r + far, end) for e in block[b]]
                sendings.append((r, r + far, sent, False))
                ends[r], ends[r + far] = r + far, end
        play.round(sendings)
    assert len(ends) == n


Player = Callable[[Play, int], None]
#: What is played: the algorithm, who plays it, who has which elements of the blocks at first.
EVERYBODY, OWN, ROOT_ONLY = "everybody", "own", "root"
PLAYED: dict[str, tuple[Callable[[Place, float], list[Step]], list[Player], str]] = {
    "doubling": (steps.doubling, [play_doubling], EVERYBODY),
    "rabenseifner": (steps.rabenseifner, [play_rabenseifner], EVERYBODY),
    "ring": (steps.ring, [play_ring], EVERYBODY),
    "halving": (steps.scatter_halving, [play_halving], EVERYBODY),
    "ring of sums": (
        lambda place, size: steps.around(place, size / place.ranks, True),
        [play_ring_sums], EVERYBODY,
    ),
    "pairwise": (
        lambda place, size: steps.pairwise(place, size / place.ranks, True),
        [play_pairwise], EVERYBODY,
    ),
    "gather by doubling": (steps.gather_doubling, [play_gather_doubling], OWN),
    "gather by a ring": (steps.gather_ring, [play_ring_results], OWN),
    "tree": (steps.tree, [play_tree], ROOT_ONLY),
    "scatter and doubling": (
        steps.scattered_doubling, [play_scatter, play_gather_doubling], ROOT_ONLY,
    ),
    "scatter and ring": (steps.scattered_ring, [play_scatter, play_ring_results], ROOT_ONLY),
}  # fmt: skip


def places(n: int) -> list[Place]:
    found = [Place(n, 1), Place(1, n)]
    for each in range(2, n):
        if n % each == 0:
            found += [Place(n // each, each), Place(n // each, each, scattered=True)]
    return found


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("n", range(2, 18))
def test_algorithms(name: str, n: int) -> None:
    algorithm, players, start = PLAYED[name]
    elements = math.lcm(n, power(n))
    owner = {e: rank for rank, block in enumerate(blocks(n, elements)) for e in block}
    at_first = {
        EVERYBODY: lambda rank, e: True,
        OWN: lambda rank, e: rank == owner[e],
        ROOT_ONLY: lambda rank, e: rank == 0,
    }[start]
    for place in places(n):
        play = Play(place, elements, at_first)
        for player in players:
            player(play, elements)
        if start != EVERYBODY:
            expected = [{owner[e] if start == OWN else 0} for e in range(elements)]
            assert all(array == expected for array in play.arrays)
        assert taken(algorithm(place, elements)) == Counter(
            tuple(map(float, each)) for each in play.rounds
        )


def test_times_of_the_papers() -> None:
    """Thakur, Rabenseifner, Gropp: one rank a node, powers of two."""
    n, m, alpha, beta, gamma = 16, 48000.0, 1e-6, 1e-9, 0.25e-9
    rates = rates_of(combined=gamma, combined_far=gamma)
    machine, place = Machine(1.0, latency=alpha, bandwidth=1 / beta), Place(n, 1)
    rest, logn = (n - 1) / n, math.log2(n)

    def time(algorithm: Any) -> float:
        return float(seconds(Cost(m, steps=tuple(algorithm(place, m))), rates, place, machine))

    assert time(steps.doubling) == pytest.approx(logn * (alpha + beta * m + gamma * m))
    assert time(steps.rabenseifner) == pytest.approx(
        2 * logn * alpha + 2 * rest * m * beta + rest * m * gamma
    )
    assert time(steps.ring) == pytest.approx(
        2 * (n - 1) * alpha + 2 * rest * m * beta + rest * m * gamma
    )
    assert time(steps.scatter_halving) == pytest.approx(
        logn * alpha + rest * m * beta + rest * m * gamma
    )
    assert time(steps.gather_ring) == pytest.approx((n - 1) * alpha + rest * m * beta)
    assert time(steps.gather_doubling) == pytest.approx(logn * alpha + rest * m * beta)
    assert time(steps.tree) == pytest.approx(logn * (alpha + beta * m))
    assert time(steps.scattered_ring) == pytest.approx((logn + n - 1) * alpha + 2 * rest * m * beta)


def rates_of(**known: float) -> Rates:
    return Rates(**{**dict.fromkeys(Rates._fields, 0.0), **known})


def test_ranks_of_a_node_share_its_link_and_its_memory() -> None:
    machine = Machine(1.0, memory=10.0, latency=3.0, bandwidth=100.0)
    rates = rates_of(sent_far=0.01, message=0.5)
    nodes, node = Place(2, 4), Place(1, 8)
    across = Cost(1e9, steps=(Step(1, 50, 50, 0, steps.crossed(nodes, 4)),))
    assert seconds(across, rates, nodes, machine) == pytest.approx(3 + 4 * 50 / 100)
    within = Cost(1e9, steps=(Step(1, 50, 50, 0, steps.crossed(node, 4)),))
    assert seconds(within, rates, node, machine) == pytest.approx(0.5 + 100 * 2 * 8 / 10)
    quick = machine._replace(memory=1e9)
    assert seconds(within, rates, node, quick) == pytest.approx(0.5 + 100 * 0.01)
    cached = quick._replace(cache=1e15)
    assert seconds(within, rates, node, cached) == pytest.approx(0.5)
    # Some stay and some leave: the slower ones count.
    around = Cost(1e9, steps=(Step(2, 50, 50, 0, steps.shifted(nodes, 1)),))
    assert steps.shifted(nodes, 1) == (3, 1)
    slow = quick._replace(bandwidth=1.0)
    assert seconds(around, rates, nodes, slow) == pytest.approx(2 * (3 + 50))
    assert seconds(around, rates, nodes, machine) == pytest.approx(2 * (0.5 + 100 * 2 * 3 / 10))


def test_between_nodes_halving_the_nearest_first_sends_as_little_as_levels() -> None:
    """And ranks that are put on the nodes in turn send much more."""
    machine, rates = Machine(1.0, bandwidth=1.0), rates_of()
    m = 2.0**20

    def time(algorithm: Any, place: Place) -> float:
        return float(seconds(Cost(m, steps=tuple(algorithm(place, m))), rates, place, machine))

    best = 2 * m * 7 / 8
    assert time(steps.rabenseifner, Place(8, 4)) == pytest.approx(best)
    assert time(steps.rabenseifner, Place(8, 4, scattered=True)) > 3 * best
    leveled = costs.leveled_all_reduce(steps.rabenseifner)(Place(8, 4), m)
    assert leveled is not None
    agreement = 3 * 4 * 16
    assert seconds(leveled, rates, Place(8, 4), machine) == pytest.approx(best + agreement)


# --- mpicoll's own code, counted ----------------------------------------------------------------


def test_the_thresholds_are_mpicolls() -> None:
    ours = costs.EXCHANGE_SMALL, costs.EXCHANGE_BLOCK, costs.EXCHANGE_STACK
    assert ours == (composed.SMALL, composed.BLOCK, composed.STACK)
    ours = costs.SLOT, costs.SLOTS_TOGETHER, costs.SLOTS, costs.MOST_SHARING, costs.WHOLE
    theirs = shared.SLOT, shared.TOGETHER, shared._SLOTS, shared.MOST, shared.WHOLE
    assert ours == theirs
    ours = costs.RAIL_PIECE, costs.LEVELS_TOGETHER, costs.RAIL_SHARE
    assert ours == (levels.PIECE, levels.TOGETHER, levels.SHARE)
    assert costs.MPI_PIECE == native.PIECE


def test_the_kinds_and_routes_are_those_of_the_tables() -> None:
    assert set(WAYS) < set(KINDS)
    for kind, ways in WAYS.items():
        routes = {way.route for way in ways} - {""}
        assert routes == {r for where in ("node", "nodes", "apart") for r in able(kind, where)}
        assert len({way.name for way in ways}) == len(ways)


FLOAT32 = dtypes["float32"]


class Wire:
    """A communicator that counts what is asked of it, and moves nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*given: Any) -> None:
            self.calls += 1

        return call


def group_of(n: int, rank: int = 0) -> Any:
    return SimpleNamespace(
        inner=Wire(), size=lambda: n, rank=lambda: rank, scratch=np.empty(0, np.uint8),
        group_name="g", sequence=1, worker=None, ranks=list(range(n)),
    )  # fmt: skip


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("size", [96, 24 * KIB, 12 * MIB])
def test_exchange(n: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def exchange(comm: Any, out: Sequence[Any], into: Sequence[Any]) -> None:
        sent.extend(message[1] * 4 for message in out if message is not None)

    added: list[int] = []

    def combine(op: Any, dtype: Any, sources: Sequence[Any], out: Any, divisor: int) -> None:
        added.append((len(sources) - 1) * out.nbytes)

    monkeypatch.setattr(composed, "exchange", exchange)
    monkeypatch.setattr(composed, "combine", combine)
    group, count = group_of(n), size // 4
    for kind, cost in (
        ("all_reduce", costs.exchanged_all_reduce(4, False)(Place(n, 1), size)),
        ("reduce_scatter", costs.exchanged_reduce_scatter(False)(Place(n, 1), size)),
    ):
        sent.clear()
        added.clear()
        arrays = np.empty(count, np.float32), np.empty(count, np.float32)
        own = count if kind == "all_reduce" else count // n
        composed.REDUCTIONS[kind](group, FLOAT32, ReduceOp.SUM)(*arrays, own, 0)
        assert cost is not None
        assert sum(added) == pytest.approx(cost.reduced, rel=1e-3)
        if group.inner.calls:  # of MPI: everybody gets everything
            assert (cost.calls, cost.messages) == (1, 0) and not sent
            group.inner.calls = 0
        else:
            assert cost.messages == len(sent)
            assert sum(step.times * step.out for step in cost.steps) == pytest.approx(
                sum(sent), rel=1e-3
            )


@pytest.mark.parametrize(
    ("n", "count"), [(600, 3), (600, 4), (600, 599), (600, 600), (3000, 2795), (3000, 2797)]
)
def test_when_everybody_gets_everything(
    n: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composed, "exchange", lambda *_: None)
    monkeypatch.setattr(composed, "combine", lambda *_: None)
    group = group_of(n)
    composed.all_reduce(group, FLOAT32, ReduceOp.SUM)(None, np.empty(count, np.float32), count, 0)
    cost = costs.exchanged_all_reduce(4, False)(Place(n, 1), 4 * count)
    assert cost is not None and cost.calls == group.inner.calls


class Memory:
    """What a node's ranks share, which counts what is given and taken, and moves nothing.

    copied: bytes of each exchange.
    """

    def __init__(self, ranks: int, me: int) -> None:
        self._ranks, self._me = ranks, me
        self.entries = self.combined = 0
        self.copied: list[int] = []

    def exchange(self, primitive: Any, parcel: Any, dtype: Any, op: Any, root: int) -> None:
        assert all(one.elements <= parcel.most for one in (*parcel.gives, *parcel.takes))
        self.entries += len(parcel.gives) + len(parcel.takes)
        given = [
            one.elements
            for place, one in enumerate(parcel.gives)
            if parcel.places != self._ranks or place != self._me  # which nobody else takes
        ]
        taken = [one.elements for one in parcel.takes if op is None or one.rank != self._me]
        self.copied.append((sum(given) + (sum(taken) if op is None else 0)) * dtype.itemsize)
        self.combined += (sum(taken) if op is not None else 0) * dtype.itemsize


def levels_of(nodes: int, each: int, rank: int) -> tuple[Any, Memory, Wire]:
    """The levels of a rank of so many nodes with so many ranks each."""
    made = object.__new__(levels.Levels)
    made.group = group_of(nodes * each, rank)
    made.nodes = [list(range(node * each, (node + 1) * each)) for node in range(nodes)]
    made.places = levels._places(made.nodes)
    made.me, made.rails, made.even = made.places[rank], each, True
    made.rail = group_of(nodes)
    made._node, made._memory = group_of(each), Memory(each, made.me.place)
    return made, made._memory, made.rail.inner


LEVELED = {
    "all_reduce": costs.leveled_all_reduce(steps.rabenseifner),
    "reduce_scatter": costs.leveled_reduce_scatter(None),
    "all_gather": costs.leveled_all_gather(steps.gather_ring),
    "broadcast": costs.leveled_broadcast(steps.tree),
}


@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (3, 4), (16, 8)])
@pytest.mark.parametrize("name", LEVELED)
def test_levels(name: str, nodes: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def exchange(comm: Any, out: Sequence[Any], into: Sequence[Any]) -> None:
        sent.extend(message for message in out if message is not None)

    def combine(op: Any, dtype: Any, sources: Sequence[Any], out: Any, divisor: int) -> None:
        memory.combined += (len(sources) - 1) * out.nbytes

    monkeypatch.setattr(composed, "exchange", exchange)
    monkeypatch.setattr(composed, "combine", combine)
    n, row = nodes * each, primitives[name]
    count = 5 * MIB // 4 // n * n
    op = ReduceOp.SUM if row.reduces else None
    copied = []
    for rank in 0, 1:
        made, memory, wire = levels_of(nodes, each, rank)
        direct = levels._MAKERS[name](made, row, FLOAT32, op)
        assert direct is not None
        block = count // n if row.name in ("reduce_scatter", "all_gather") else count
        sent.clear()
        direct(np.empty(count, np.float32), np.empty(count, np.float32), block, 0)
        cost = LEVELED[name](Place(nodes, each), 4.0 * count)
        assert cost is not None
        assert len(memory.copied) == cost.exchanges
        assert (wire.calls, len(sent)) == (cost.calls, cost.messages)
        assert memory.combined == pytest.approx(cost.reduced)
        copied.append(memory.copied)
    if name == "broadcast":  # all wait for the root to put its array up
        copied[1][::2] = [sum(both) for both in zip(copied[0][::2], copied[1][::2], strict=True)]
    else:
        assert memory.entries == pytest.approx(cost.entries, rel=1 / each)
    assert sum(copied[1]) == pytest.approx(cost.shared)


# --- the fit ------------------------------------------------------------------------------------

#: What made the times that are made up.
TRUE = Rates(
    own=1.7e-6, call=0.3e-6, message=0.8e-6, python=1.6e-6, exchange=9e-6, entry=1.2e-6,
    wait=0.7e-6, look=0.15e-6, copied=0.04e-9, copied_far=0.2e-9, shared=0.07e-9,
    shared_far=0.16e-9, sent=0.12e-9, sent_far=0.3e-9, combined=0.2e-9, combined_far=0.5e-9,
    reduced=0.05e-9, reduced_far=0.2e-9, narrowed=0.15e-9, narrowed_far=0.25e-9,
)  # fmt: skip
CACHE = 2.0**21
UNTOLD = {"exchange", "entry"}


def measured(
    ranks: Sequence[int],
    processors: int,
    noise: float,
    far_off: Callable[[Any], float] | None = None,
) -> Results:
    """A report of times of the model itself, each off by some noise."""
    random = np.random.default_rng(1)
    shape = {"section": "growth", "dtype": "float32", "median": 1.0, "spread": 0.0}
    found = []
    for n in ranks:
        for size in [4 * 8**i for i in range(10)]:
            for case in ("mpi4py", "mpicoll", "copy"):
                for name in ("all_reduce", "broadcast", "all_gather_single",
                             "reduce_scatter_single", "all_to_all_single"):  # fmt: skip
                    one = {**shape, "case": case, "primitive": name, "ranks": n}
                    found.append({**one, "bytes": max(size, 4 * n)})
            one = {**shape, "case": "mpicoll", "primitive": "all_reduce", "ranks": n}
            found.append({**one, "bytes": size, "dtype": "bfloat16"})
    table = Table(openmpi=False)
    for one in found:
        point = model_fit._point(one, table)
        if point is not None:
            times = model_fit.predicted(TRUE, [point], Machine(CACHE))
            one["median"] = float(times[0] * math.exp(random.normal(0, noise)))
            one["median"] *= far_off(one) if far_off else 1
            one["spread"] = noise * one["median"]
            one["seconds"] = [one["median"]] * 5
    machine = {"processor": "P", "processors": processors, "load before": 0}
    record = {"mpi": "MPICH 5.0.2", "machine": machine, "versions": {}, "date": "today"}
    record |= {"ranks": ranks[0], "measurements": found}
    return Results([record])


@pytest.fixture(scope="module")
def many_ranks() -> model.Library:
    return model.look(measured([2, 4, 8, 16], 16, 0.05))


@pytest.fixture(scope="module")
def two_ranks() -> model.Library:
    return model.look(measured([2], 2, 0.05))


@pytest.fixture(scope="module")
def spoilt() -> model.Library:
    """One collective of MPI takes five times as long as it might."""

    def slow(one: Any) -> float:
        return 5.0 if (one["case"], one["primitive"]) == ("mpi4py", "reduce_scatter_single") else 1

    return model.look(measured([2], 2, 0.05, slow))


def off(fit: model_fit.Fit) -> dict[str, float]:
    """How many standard errors each rate is off."""
    sigma = np.log(np.array(fit.factors))
    errors = np.log(np.array(fit.rates) / np.array(TRUE)) / sigma
    return dict(zip(Rates._fields, errors.tolist(), strict=True))


def test_what_was_put_in_comes_out(many_ranks: model.Library) -> None:
    fit = many_ranks.fit
    assert fit.cache == CACHE
    for name, error in off(fit).items():
        told, factor = getattr(fit.told, name), getattr(fit.factors, name)
        if name in UNTOLD:
            assert told == pytest.approx(0, abs=1e-6) and factor == pytest.approx(2)
            continue
        assert abs(error) < 3.5, (name, error)
        assert getattr(fit.rates, name) == pytest.approx(getattr(TRUE, name), rel=0.5), name
        assert told > 0.5, name
    assert np.median(fit.errors) < 0.06


def test_two_ranks_do_not_tell_everything(two_ranks: model.Library) -> None:
    """But say what they do not tell."""
    fit = two_ranks.fit
    assert np.median(fit.errors) < 0.06
    assert model.knowledge(fit.told.look) == "guessed"
    assert fit.told.call < 0.5 and fit.factors.call > 1.5
    assert max(abs(error) for error in off(fit).values()) < 3.5
    both = fit.rates.call + fit.rates.message
    assert both == pytest.approx(TRUE.call + TRUE.message, rel=0.05)
    (line,) = model.caveats([two_ranks])
    assert "exchange, entry" in line and "up to 2 ranks on 2 processors" in line
    assert "too much" not in line


def test_a_collective_that_is_not_what_is_taken_spoils_little(spoilt: model.Library) -> None:
    fit = spoilt.fit
    assert np.median(fit.errors) < 0.1
    for name in ("own", "shared_far", "copied", "sent"):
        assert getattr(fit.rates, name) == pytest.approx(getattr(TRUE, name), rel=0.4), name


@pytest.mark.parametrize("times", ["two_ranks", "spoilt"])
def test_no_rates_near_by_are_better(times: str, request: pytest.FixtureRequest) -> None:
    """Than the ones found, by what is to be least, which is written out again here."""
    fit = request.getfixturevalue(times).fit

    def bad(rates: Rates) -> float:
        times = model_fit.predicted(rates, fit.points, fit.machine)
        total = 0.0
        for point, time in zip(fit.points, times, strict=True):
            known = (point.spread / point.seconds) ** 2 + model_fit.INEXACT**2
            far = math.log(time / point.seconds) ** 2 / known
            total += 5.0 * math.log(1 + far / 4.0)
        for rate, guess in zip(rates, model_fit.GUESSES, strict=True):
            total += (math.log(rate / guess.seconds) / math.log(guess.factor)) ** 2
        return total

    least = bad(fit.rates)
    for name in Rates._fields:
        for factor in (0.98, 1.02):
            near = fit.rates._replace(**{name: factor * getattr(fit.rates, name)})
            assert bad(near) > least, (name, factor)


def test_ranks_that_take_turns_are_not_fitted() -> None:
    found = model.look(measured([2, 4], 2, 0.02, lambda one: one["ranks"] / 2))
    assert {point.place.ranks for point in found.fit.points} == {2}
    assert {point.place.ranks for point, _ in found.crowd} == {4}
    assert {point.bytes >= MIB for point, _ in found.crowd} == {True}
    assert np.median([ratio for _, ratio in found.crowd]) == pytest.approx(1, rel=0.15)


def test_a_fit_that_is_bad_says_so() -> None:
    found = model.look(measured([2], 2, 1.5))
    (line,) = model.caveats([found])
    assert np.median(found.fit.errors) > 0.5 and "too much" in line


def test_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        model_fit.fit([])


# --- what follows -------------------------------------------------------------------------------

NETWORK = Machine(CACHE, memory=200e9, latency=1.5e-6, bandwidth=25e9)
PLACES = [Place(1, 64), Place(16, 64), Place(256, 64), Place(16, 8, True), Place(12, 1)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", WAYS)
def test_changes(kind: str, place: Place) -> None:
    def best(size: float) -> str:
        times = predictions.times_of(kind, place, size, TRUE, NETWORK)
        return min(times, key=lambda name: float(times[name]))

    found = predictions.changes(kind, place, TRUE, NETWORK)
    for change, after in zip(found, [*found[1:], None], strict=True):
        if change.before:
            assert best(change.size / 1.002) == change.before
            assert best(change.size * 1.000001) == change.name
        last = after.size / 1.002 if after else predictions.LARGEST
        for size in np.geomspace(change.size * 1.000001, last, 7):
            assert best(float(size)) == change.name
    assert [change.name for change in found[:-1]] == [change.before for change in found[1:]]


def test_a_change_that_is_known() -> None:
    """Recursive doubling and Rabenseifner, one rank a node, nothing else but the network: they are
    equal where log2 n latencies are as long as the bytes that are sent too often.
    """
    place, machine = Place(64, 1), Machine(1.0, latency=2e-6, bandwidth=1e9)
    rates = rates_of(python=1.0)  # no exchange
    _, change, *_ = predictions.changes("all_reduce", place, rates, machine)
    equal = 6 * 2e-6 / ((6 - 2 * 63 / 64) / 1e9)
    assert (change.before, change.name) == ("recursive doubling", "Rabenseifner")
    assert change.size == pytest.approx(equal, rel=2e-3)
    low = rates._replace(combined=0.0)
    draws = Rates(*(np.full(7, each) for each in low))
    spread = predictions.spread_of(change, "all_reduce", place, draws, machine)
    assert spread == pytest.approx((equal, equal), rel=0.05)


def test_where_tables_have_another_route() -> None:
    place = Place(256, 64)
    rows = {"all_reduce": {"nodes": ((0, "mpi"), (1, "exchange"))}}
    table = Table(openmpi=False, measured={2: rows})
    found = predictions.worse(table, "all_reduce", place, TRUE, NETWORK)
    assert {one.today for one in found} == {"exchange"}
    assert (found[0].first, found[-1].last) == (4, predictions.LARGEST)
    for one in found:
        times = predictions.times_of("all_reduce", place, one.at, TRUE, NETWORK)
        routes = predictions.routed("all_reduce", place, one.at, TRUE, NETWORK)
        better = routes.get(one.better, times.get(one.better))
        assert times["exchange"] / better == pytest.approx(one.most)
        assert better == pytest.approx(min(times.values()))
    chosen = predictions.steps("all_reduce", place, TRUE, NETWORK)
    agreeing = Table(False, {2: {"all_reduce": {"nodes": tuple(chosen)}}})
    left = predictions.worse(agreeing, "all_reduce", place, TRUE, NETWORK)
    assert all(one.most < 1.5 for one in left)


def test_nodes_have_to_be_full() -> None:
    cluster = predictions.Cluster(64, False, NETWORK)
    assert cluster.place(64) == Place(1, 64) and cluster.place(128) == Place(2, 64)
    with pytest.raises(ValueError, match="multiple of 64"):
        cluster.place(100)


# --- the command --------------------------------------------------------------------------------


def test_the_page_has_the_marks(two_ranks: model.Library) -> None:
    cluster = predictions.Cluster(4, False, NETWORK)
    text = model.PAGE.read_text()
    made = model.parts([two_ranks], cluster, [4, 16])
    page = filled(text, "model", made)
    assert filled(page, "model", made) == page
    for lines in made.values():
        assert "\n".join(lines) in page
    outside = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in page.splitlines() if line.startswith("#")] == outside
    with pytest.raises(ValueError, match="model: fitted"):
        filled("nothing", "model", made)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    report = tmp_path / "sizes-2.json"
    report.write_text(json.dumps(measured([2], 2, 0.05).records[0]))
    page, figure = tmp_path / "model.md", tmp_path / "figures" / "model.svg"
    page.write_text(model.PAGE.read_text())
    words = [str(tmp_path), "--ranks", "4", "16", "--each", "4", "--markdown", str(page)]
    monkeypatch.setattr(sys, "argv", ["model.py", *words, "--figure", str(figure)])
    assert model.main() == 0
    said = capsys.readouterr().out
    assert "MPICH 5.0.2" in said and "4 ranks a node" in said and "Rabenseifner" in said
    assert "4 ranks a node" in page.read_text()
    with suppress(ImportError):
        import matplotlib  # noqa: F401

        text = figure.read_text()
        assert "16 ranks" in text and "levels, ring" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--ranks", "70"], "full nodes of 64"), (["--bandwidth", "0"], "above 0")],
)
def test_bad_flags(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["model.py", "x.json", *words])
    with pytest.raises(SystemExit):
        model.main()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"measurements": [1]}'])
def test_files_that_are_no_reports(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["model.py", str(file)])
    assert model.main() == 2
    assert f"{file} is no report" in capsys.readouterr().err
