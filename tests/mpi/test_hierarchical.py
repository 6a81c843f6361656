"""Hierarchical collectives over several nodes.

The tests set the nodes by patching `hierarchy.node_of`.
"""

from __future__ import annotations

import gc
import itertools
import time

import driver
import numpy as np
import pytest
from conftest import (
    check_mismatches,
    check_size_mismatch,
    check_usable,
    mapped_segments,
    needs_shared_memory,
    pass_first_calls,
)
from conftest import team as group_of
from driver import (
    NAMES,
    Call,
    Exact,
    by_dtype,
    check_same_bits,
    legal_operations,
    use_route,
)
from mpi4py import MPI
from oracle import Between
from test_arrays import maker, strided
from test_mpi_calls import ensure_uncompared
from test_short_calls import record_python_calls

import mpicoll as dist
from mpicoll.core.plan import CallKind
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import MismatchError
from mpicoll.kernels import calls
from mpicoll.kernels.reduction import find_loop
from mpicoll.routes import tuning
from mpicoll.routes.host import exchange, hierarchical, hierarchy, measured, select, shared
from mpicoll.routes.route import REDUCTIONS
from mpicoll.serialized_mpi import serialize

pytestmark = pytest.mark.on_4

#: Minimum number of ranks: two nodes, of which one has two ranks.
LEAST = 3

#: Node of each of n ranks.
PLACES = {
    "block": lambda n: [2 * rank // n for rank in range(n)],
    "round robin": lambda n: [rank % 2 for rank in range(n)],
    "first rank alone": lambda n: [min(rank, 1) for rank in range(n)],
    "three nodes": lambda n: [(rank * 2) % 3 if n > LEAST else rank // 2 for rank in range(n)],
}

ROUTED = {
    name: ReduceOp.SUM if row.reduces else None
    for name, row in NAMES.items()
    if name in hierarchical.ROUTE.serves.primitives
}
MOVES = [name for name, op in ROUTED.items() if op is None]


@pytest.fixture(scope="module")
def patch(world):
    """Route every operation with a hierarchical implementation through it."""
    if world.size < LEAST:
        pytest.skip(f"needs {LEAST} ranks")
    with pytest.MonkeyPatch.context() as patch:
        use_route(patch, "hierarchical", "nodes", (*tuning.KINDS, "all_to_all"))
        yield patch


node_of = hierarchy.node_of


def put(patch, name):
    """Assign ranks to the nodes of PLACES[name]."""
    nodes = PLACES[name](dist.get_world_size())
    patch.setattr(hierarchy, "node_of", lambda: f"node {nodes[dist.get_rank()]}")


@pytest.fixture(scope="module", params=list(PLACES))
def kept(patch, world, request):
    """A group used by several tests."""
    return group_of(request.param, range(world.size))


@pytest.fixture
def cut(kept, patch, monkeypatch):
    """``kept`` with small slots and chunks, so that short messages need several."""
    put(patch, kept.name)
    monkeypatch.setattr(shared, "SLOT", 512)
    monkeypatch.setattr(hierarchical, "CHUNK", 1024)
    monkeypatch.setattr(hierarchical, "TOGETHER", 1536)
    monkeypatch.setattr(hierarchy, "SHARE", 64)
    return kept


@pytest.fixture(params=list(PLACES))
def placed(patch, new_team, request):
    """A group of all ranks for one test."""
    put(patch, request.param)
    return new_team(request.param)


def served(dtype):
    """Operations of a dtype that the hierarchical route implements."""
    return [
        op
        for op in legal_operations(dtype)
        if op is not ReduceOp.PREMUL_SUM and find_loop(op, dtype)
    ]


def has_levels(team):
    return select.place(team.group) == "nodes"


@needs_shared_memory
@by_dtype
def test_all_reduce_around_chunk_sizes(cut, mpi, dtype):
    """Sizes around the sizes of cache lines, slots, shares and chunks, up to many chunks."""
    line, slot, piece = (size // dtype.itemsize for size in (64, 512, 1024))
    calls = []
    for turn, count in enumerate((0, 1, line + 1, slot - 1, piece, piece + 1, 5 * piece + 7)):
        for op in served(dtype)[turn % 2 :: 2]:
            calls.append(Exact("all_reduce", cut, dtype, count, op))
            calls[-1].run()
    check_same_bits(mpi, calls)
    assert has_levels(cut)


@needs_shared_memory
@pytest.mark.any_mpi
@pytest.mark.parametrize("name", [name for name in ROUTED if name != "all_reduce"])
@by_dtype
def test_other_operations_around_chunk_sizes(cut, name, dtype):
    line, slot, piece = (size // dtype.itemsize for size in (64, 512, 1024))
    for turn, count in enumerate((0, line + 1, slot - 1, slot + 1, 2 * piece + 7)):
        for op in [None] if name in MOVES else served(dtype)[turn % 3 :: 3]:
            Exact(name, cut, dtype, count, op, (turn + dtype.code) % cut.size).run()
    assert has_levels(cut)


@needs_shared_memory
@pytest.mark.parametrize("route", ["hierarchical", "measured"])
def test_all_to_all_of_some_equal_blocks(placed, monkeypatch, route):
    """A rank whose own blocks are equal does not know that the blocks of others differ."""
    use_route(monkeypatch, route, "nodes", ["all_to_all"])
    me, n = placed.me, placed.size
    for odd in (*range(n), None) * 3:
        sent = 20 * me + np.arange(n).repeat([2 + 3 * (r == odd == me) for r in range(n)])
        received = np.zeros_like(sent)
        splits = [2 + 3 * (r == odd) for r in range(n)] if me == odd else None
        dist.all_to_all_single(received, sent, splits, splits, placed.group)
        sources = np.arange(n).repeat([2 + 3 * (r == odd == me) for r in range(n)])
        assert (received == 20 * sources + me).all()


@pytest.fixture
def measured_team(placed, monkeypatch):
    """A group with the default table, after the calls that are always compared."""
    monkeypatch.setattr(tuning.job, "table", tuning.Table())
    pass_first_calls(placed.group)
    return placed


@needs_shared_memory
@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("slowest_s", [3, 7])
def test_slowest_rank_decides_the_route(measured_team, monkeypatch, name, slowest_s):
    """All ranks choose the same route, although MPI is always faster on rank 0. Then calls of MPI
    are native, unless an array is not contiguous.
    """
    team, usual = measured_team, "exchange" if name.startswith("all_to_all") else "mpi"
    times = itertools.cycle([0, 1, 0, 2] if team.me == 0 else [0, 5, 0, slowest_s])
    monkeypatch.setattr(measured, "perf_counter", lambda: next(times))
    serves = name == "broadcast" or hierarchy.get_or_create(team.group).even
    for dtype in ("float32", "int64"):
        for turn in range(2 * measured.TRIAL_COUNT + 6):
            ensure_uncompared(team.group)
            root = turn % team.size
            make = {"make": maker(strided)} if team.me == root else {}
            call = Call(name, team, by_name[dtype], 40000, root=root, **make)
            with record_python_calls() as seen:
                call.start()
            call.check()
            if serves and turn < 2 * measured.TRIAL_COUNT:
                assert seen  # a rank counts the calls
        in_python = bool(make) or usual != "mpi" or (serves and slowest_s < 5)
        assert bool(seen) == in_python or calls.describe() != "compiled"
    chosen = team.group.resources.find("measured") or {}
    first = "hierarchical" if slowest_s < 5 else usual
    assert [text.split()[0] for text in chosen.values()] == [first] * (2 * serves)


@needs_shared_memory
@pytest.mark.parametrize("choose", ["0", "random"])
def test_routes_that_are_not_measured(measured_team, monkeypatch, choose):
    """By MPICOLL_CHOOSE. ``random`` uses both routes."""
    monkeypatch.setattr(tuning.job, "choose", choose)
    made, init = [], hierarchical.HierarchyCall.__init__
    monkeypatch.setattr(
        hierarchical.HierarchyCall, "__init__", lambda *all: (made.append(all), init(*all))[1]
    )
    for turn in range(40):
        Exact("broadcast", measured_team, by_name["int8"], 20000, root=turn % LEAST).run()
    assert len(made) < 40 and bool(made) == (choose == "random")
    assert measured_team.group.resources.find("measured") is None


@needs_shared_memory
def test_mismatch_while_routes_are_measured(measured_team):
    """The group stays usable: no rank counts the call."""
    team, counts = measured_team, (40000, 80000)
    for turn in range(2 * measured.TRIAL_COUNT + 2):
        for count in counts:
            Exact("broadcast", team, by_name["float32"], count, root=turn % team.size).run()
        if turn % 2 == 0 and turn < 2 * measured.TRIAL_COUNT:  # `hierarchical` is next
            ensure_uncompared(team.group)
            with pytest.raises(MismatchError, match=r"different calls: .*80000 elem"):
                dist.broadcast(np.ones(counts[team.me == 0], np.float32), 0, team.group)
    assert len(team.group.resources.find("measured")) == len(counts)


class Counted:
    """A communicator that counts the bytes that its collectives send to other ranks."""

    def __init__(self, inner):
        self.inner, self.sent = inner, 0

    def __getattr__(self, name):
        method = getattr(self.inner, name)
        if name not in ("Allgather", "Alltoall", "Allreduce"):
            return method

        def counted(send, recv, *others):
            _, count, *_, element = recv
            self.sent += (self.inner.Get_size() - 1) * count * element.Get_size()
            return method(send, recv, *others)

        return counted


class Wired(Call):
    """A call of float32 with wire="bfloat16", with the bound of performance.md."""

    def given(self, rank):
        count = sum(getattr(self, "sizes", ())) or self.input_count
        rng = np.random.default_rng([count, self.team.ranks[rank]])
        made = rng.normal(size=count) * 2.0 ** rng.integers(-20, 20, count)
        # Overflow, the greatest bfloat16, infinity, NaN, and a subnormal number.
        ends = [3.4e38, 3.389e38, np.inf, np.inf, 1e-39], [0, 0, 1, -np.inf, 1e-39], [0] * 5
        made[:5] = ends[min(rank, 2)][:count]
        return made.astype(np.float32)

    def result(self):
        terms = np.array([self.given(rank) for rank in self.terms], np.float64)
        n, size = len(terms), abs(terms).sum(0)
        with np.errstate(all="ignore"):
            error = (2**-7 + 2**-16 + n * 2**-23) * size + (n + 1) * 2.0**-134
            error[np.isinf(size)] = 0
            ends = (terms.sum(0) + np.array([-error, error])) / (
                n if self.op is ReduceOp.AVG else 1
            )
            low, high = ends.astype(np.float32)
        low[:1] = high[:1] = np.inf
        high[1:2] = np.minimum(high[1:2], 3.4e38)
        return Between(low, high)


class WiredParts(driver.Uneven):
    given, result = Wired.given, Wired.result


@pytest.mark.parametrize("route", ["exchange", "hierarchical"])
@pytest.mark.parametrize("place", ["apart", *PLACES])
def test_wire_bfloat16_keeps_its_bound(world, new_team, monkeypatch, mpi, place, route):
    """Sums and averages of float32 in several chunks; other calls stay as they are."""
    if world.size < (2 if place == "apart" else LEAST):
        pytest.skip("needs more ranks")
    if place == "apart":
        monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    else:
        put(monkeypatch, place)
    use_route(monkeypatch, route, "nodes")
    monkeypatch.setattr(exchange.Host, "chunk", 512)
    monkeypatch.setattr(hierarchical, "CHUNK", 1024)
    team, f32, calls = new_team("wire", wire="bfloat16"), by_name["float32"], []
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        for root, count in (0, 0), (1, 7), (team.size - 1, 3001):
            calls += [Wired(name, team, f32, count, op, root) for name in REDUCTIONS]
        calls.append(WiredParts(team, f32, [700, 0, 1300, 5], op))
    calls += [Call("all_reduce", team, f32, 3001, ReduceOp.MAX)]
    calls += [Call("all_reduce", team, by_name["float64"], 3001, ReduceOp.SUM)]
    for call in calls:
        call.run()
    check_same_bits(mpi, [call for call in calls if call.name == "all_reduce"])


@needs_shared_memory
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"]
)
@pytest.mark.parametrize("route", ["exchange", "hierarchical"])
def test_narrow_floats_between_nodes(patch, new_team, monkeypatch, route, dtype):
    """Elements and results are sent as they are, and only sums of a node's ranks as float32;
    float32 with wire="bfloat16" is sent as bfloat16.
    """
    put(patch, "block")
    use_route(monkeypatch, route, "nodes")
    rails, part = [], hierarchy.make_part

    def counted_part(*arguments):
        made = part(*arguments)
        made.inner = Counted(made.inner)
        rails.append(made.inner)
        return made

    monkeypatch.setattr(hierarchy, "make_part", counted_part)
    team = new_team(f"narrow {route} {dtype}", wire="bfloat16")
    levels = hierarchy.get_or_create(team.group)
    team.group.inner = whole = Counted(team.group.inner)
    n, narrow, count = team.size, by_name[dtype], 6000
    kind, size, wide = (Wired, 2, 2) if dtype == "float32" else (Exact, narrow.itemsize, 4)
    expected = 2 * (n - 1) * count * size
    if route == "hierarchical":
        share = n * count // levels.rails
        expected = share // 2 * (wide + size) if levels.rail else 0
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)[: 2 if kind is Wired else 3]:
        for comm in (whole, *rails):
            comm.sent = 0
        kind("all_reduce", team, narrow, n * count, op).run()
        assert sum(comm.sent for comm in (whole, *rails)) == expected
    if route == "exchange":
        whole.sent = 0
        kind("reduce_scatter_single", team, narrow, count, ReduceOp.SUM).run()
        assert whole.sent == (n - 1) * count * size


@needs_shared_memory
def test_groups_of_some_ranks(patch, world, new_team):
    """Groups in any order, on one node, or with each rank on a different node."""
    put(patch, "round robin")
    n = world.size
    for ranks in itertools.permutations(range(n), LEAST):
        team = new_team(f"some, {ranks}", ranks)
        for name in ROUTED if team.me is not None else ():
            Exact(name, team, by_name["bfloat16"], 3000, ROUTED[name], LEAST - 1).run()
    for ranks in ([0, 2], [0, 1], [0, 2, 4][: 1 + (n + 1) // 2 - 1]):
        team = new_team(f"without, {ranks}", ranks)
        if team.me is not None:
            Call("all_reduce", team, by_name["float32"], 3000, ReduceOp.SUM).run()
            assert not has_levels(team)


@needs_shared_memory
def test_ranks_with_random_delays_keep_the_order_of_calls(patch, world, new_team):
    """Different operations in quick succession in two groups."""
    teams = []
    for name in ("block", "first rank alone"):
        put(patch, name)
        teams.append(new_team(f"racing {name}"))
        assert has_levels(teams[-1])
    rng = np.random.default_rng(7)  # the same calls on every rank
    mine = np.random.default_rng(world.me)
    pending = []
    for number in range(300):
        name = str(rng.choice([*ROUTED]))
        count = int(rng.choice([1, 7, 500, 5000, 70000]))
        dtype = by_name[str(rng.choice(["float32", "bfloat16", "int16"]))]
        team = teams[int(rng.integers(2))]
        call = Exact(name, team, dtype, count, ROUTED[name], number % team.size)
        if mine.random() < 0.05:
            time.sleep(mine.random() / 500)
        pending.append((call, call.start(async_op=number % 3 == 0)))
    for call, work in pending:
        assert work is None or work.wait()
        call.check()


@needs_shared_memory
def test_collective_mismatch_raises_on_all_ranks(placed):
    """Within and between nodes: the error lists the calls, and the group stays usable."""
    team, f32 = placed, np.float32
    assert has_levels(team)
    pass_first_calls(team.group)
    nodes = hierarchy.get_or_create(team.group).nodes
    for odd in ({0}, {team.size - 1}, set(nodes[-1]), set(nodes[0])):
        mine = team.me in odd
        check_mismatches(team, mine)
        even = hierarchy.get_or_create(team.group).even
        for name in MOVES if even else ["broadcast"]:
            made = [("int8", 900, 0)]
            made += [("int32", 901, 0)] * (not name.startswith("all_to_all"))
            made += [("int32", 900, 1)] * (name == "broadcast")
            for odd_call in made:
                dtype, count, root = odd_call if mine else ("int32", 900, 0)
                with pytest.raises(MismatchError, match=f"rank {team.me} .*mismatch: .*{name} of"):
                    Exact(name, team, by_name[dtype], count, None, root).start()
        if not even:
            continue
        check_size_mismatch(team, mine, 900)
        with pytest.raises(MismatchError, match=f"ranks? .*{team.me}.*: all_reduce of 900 ele"):
            if mine:
                dist.reduce_scatter_single(
                    np.empty(900, f32), np.ones(900 * team.size, f32), group=team.group
                )
            dist.all_reduce(np.ones(900, f32), group=team.group)
    for name in ROUTED:
        Exact(name, team, by_name["float32"], 3000, ROUTED[name]).run()


@needs_shared_memory
def test_one_rank_without_shared_memory_disables_the_route(patch, world, mpi):
    """All ranks then use messages."""
    for unable in range(world.size):
        with pytest.MonkeyPatch.context() as failure:
            put(patch, "block")
            if unable == world.me:
                failure.setenv("MPICOLL_SHARED_MEMORY", "0")
            team = group_of(f"without {unable}", range(world.size))
            calls = [
                Exact(name, team, by_name["float32"], 20000, ReduceOp.SUM)
                for name in ("all_reduce", "reduce_scatter_single")
            ]
            for call in calls:
                call.run()
            check_same_bits(mpi, calls[:1])
            nodes = PLACES["block"](world.size)
            assert has_levels(team) == (nodes.count(nodes[unable]) == 1)
        dist.destroy_process_group(team.group)


@needs_shared_memory
def test_destroyed_groups_release_communicators_and_memory(patch, world, monkeypatch):
    made, part = [], hierarchy.make_part

    def noted(*arguments):
        made.append(part(*arguments))
        return made[-1]

    monkeypatch.setattr(hierarchy, "make_part", noted)
    gc.collect()  # references held by errors of other tests
    before = mapped_segments()
    put(patch, "block")
    for number in range(40):
        group = dist.new_group(list(range(world.size)), group_desc=f"one of many, {number}")
        check_usable(group)
        assert group.resources.find("hierarchical")
        dist.destroy_process_group(group)
        del group
        assert all(one.inner == MPI.COMM_NULL for one in made), number
        assert mapped_segments() == before
    assert 40 <= len(made) <= 80


@needs_shared_memory
def test_interruption_between_two_steps_fails_the_group(patch, new_team, monkeypatch):
    put(patch, "block")
    use_route(monkeypatch, "hierarchical", "nodes")
    team = new_team("interrupted")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(hierarchical, "_gather", interrupt)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(np.ones(3000, np.float32), group=team.group)
    with pytest.raises(dist.DistBackendError, match="signal handler raised KeyboardInterrupt"):
        dist.barrier(team.group)


@needs_shared_memory
def test_serialized_mpi(patch, new_team):
    """Communicators derived from a serialized communicator are also serialized."""
    put(patch, "round robin")
    team = new_team("serialized")
    team.group.inner = serialize(team.group.inner)
    for name in ROUTED:
        Exact(name, team, by_name["float32"], 3000, ROUTED[name]).run()
    rail = hierarchy.get_or_create(team.group).rail
    assert rail is None or type(rail.inner) is type(team.group.inner)


def test_single_node_does_not_use_the_route(new_team, monkeypatch):
    """All ranks of the test run are on one node."""
    monkeypatch.setattr(hierarchy, "node_of", node_of)
    team = new_team("on one node", wire="bfloat16")
    said = MPI.COMM_WORLD.allgather(hierarchy.node_of())
    assert len(set(said)) == 1 and said[0]
    assert hierarchy.get_or_create(team.group) is None
    for name in ROUTED:
        kind = CallKind(NAMES[name], team.group, ROUTED[name], by_name["int8"])
        assert hierarchical.build(kind) is None
        if ROUTED[name] is not None:
            Call(name, team, by_name["float32"], 3000, ReduceOp.SUM).run()
