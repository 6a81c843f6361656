"""Tuning tables: all ranks use the table of rank 0, and any table gives correct results."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from conftest import TIMEOUT
from driver import NAMES, Exact, check_same_bits

import mpicoll as dist
from mpicoll.cli import tune
from mpicoll.cli.timing import Effort
from mpicoll.core.groups import default_group
from mpicoll.core.plan import CallKind, Implementation
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import ArgumentError
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes import registry, tuning, tuning_files
from mpicoll.routes.host import select
from mpicoll.routes.host.mpi import reducible


# The tests of files run before the default group is created.
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a tuning table"),
        ('{"ranks": {"2": {"gather": {"node": [[0, "exchange"]]}}}}', "got 'exchange'"),
        (None, "cannot be read"),
    ],
)
def test_invalid_table_on_rank_0_raises_on_all_ranks(mpi, monkeypatch, tmp_path, text, words):
    path = tmp_path / "table.json"
    if mpi.rank == 0:
        monkeypatch.setenv("MPICOLL_TABLE", str(path))
        if text is not None:
            path.write_text(text)
    with pytest.raises(ArgumentError, match=words) as caught:
        dist.init_process_group(timeout=TIMEOUT)
    assert mpi.bcast(str(path), 0) in str(caught.value)
    assert not dist.is_initialized()


def test_all_ranks_use_the_table_of_rank_0(mpi, monkeypatch, tmp_path):
    """Tables on other ranks are ignored. Missing rows use the defaults of rank 0."""
    path = tmp_path / "table.json"
    rows = {"gather": {"node": [[0, "mpi"], [77, "shared"], [1000, "default"]]}}
    path.write_text(json.dumps({"ranks": {"2": rows}}) if mpi.rank == 0 else "{")
    monkeypatch.setenv("MPICOLL_TABLE", str(path))
    for own in (path, tmp_path / "nowhere" / "table.json"):
        if mpi.rank:
            monkeypatch.setenv("MPICOLL_TABLE", str(own))
        dist.init_process_group(timeout=TIMEOUT)
        steps = tuning.job.table.row("gather", mpi.size)["node"]
        usual = tuning.Table().row("gather", mpi.size)["node"]
        assert steps[:2] == ((0, "mpi"), (77, "shared")) and mpi.bcast(steps, 0) == steps
        for size in (1000, 1 << 15, 1 << 20, 1 << 30):
            assert tuning.route_at(steps, size) == tuning.route_at(usual, size)
        assert tuning.job.table.path == mpi.bcast(str(path), 0)
        dist.destroy_process_group()
    if mpi.rank == 0:
        monkeypatch.setenv("MPICOLL_TABLE", "0")
    dist.init_process_group(timeout=TIMEOUT)
    assert tuning.job.table.path == ""
    dist.destroy_process_group()


def calls_of(kind):
    """A call signature that tables list under this name."""
    primitive, others = tuning.parse_kind(kind)
    op = ReduceOp.SUM if primitive.reduces else None
    return CallKind(primitive, default_group(), op, by_name["bfloat16" if others else "float32"])


def any_row(kind, chance):
    """A random valid row for every placement."""
    return {
        place: tuple(
            (size, chance.choice(tuning.eligible_routes(kind, place)))
            for size in (0, *sorted(chance.sample(range(1, 3000), chance.randrange(4))))
        )
        for place in tuning.PLACES
    }


@pytest.fixture
def seen(monkeypatch):
    """Replace all host routes by stubs that record their name."""
    taken = []

    def route(name):
        return lambda *kind: Implementation(lambda send, recv, count, root: taken.append(name))

    for name, declared in registry.HOST.items():
        monkeypatch.setitem(registry.HOST, name, declared._replace(build=route(name)))
    return taken


def expected(row, place, unable, nbytes):
    """Expected route: the last step of an available route with a size of at most nbytes."""
    had = [step for step in row[place] if step[1] not in unable]
    if not had:
        return expected(row, "apart", unable, nbytes)
    return [route for least, route in had if least <= nbytes or (least, route) == had[0]][-1]


@pytest.mark.parametrize("unable", [(), ("shared", "hierarchical")], ids=["all", "some"])
@pytest.mark.parametrize("place", tuning.PLACES)
def test_table_selects_the_route(world, monkeypatch, seen, place, unable):
    """At all sizes around the steps, in random order."""
    monkeypatch.setattr(select, "place", lambda group: place)
    for name in unable:
        none = registry.HOST[name]._replace(build=lambda kind: None)
        monkeypatch.setitem(registry.HOST, name, none)
    chance = random.Random(place)
    for kind in tuning.KINDS * 4:
        primitive, *_, dtype = calls_of(kind)
        row = any_row(kind, chance)
        monkeypatch.setattr(tuning.job, "table", tuning.Table({2: {kind: row}}))
        route = select.choose(calls_of(kind))
        block = dtype.itemsize * (world.size if primitive.many_in or primitive.many_out else 1)
        steps = [least for steps in row.values() for least, _ in steps]
        counts = {max(0, least // block + more) for least in steps for more in (-1, 0, 1, 2)}
        counts = [*counts, 10**9]
        chance.shuffle(counts)
        for count in counts:
            route.run(None, None, count, 0)
            assert seen.pop() == expected(row, place, unable, count * block), (kind, row, count)
        assert not seen


def test_candidates_use_their_own_route(world, seen):
    for kind in tuning.KINDS:
        found = select.candidates(calls_of(kind))
        assert tuple(found) == tuning.eligible_routes(kind, select.place(default_group()))
        for name, route in found.items():
            for count in (0, 1, 3000, 10**9):
                route.run(None, None, count, 0)
                assert seen.pop() == name


#: Calls that tables list, with dtypes that every route supports and dtypes that only some support.
CALLS = [
    (row.name, by_name[dtype], op)
    for row in PRIMITIVES
    if tuning.name_kind(row, False) in tuning.KINDS
    for dtype, op in (
        [("float32", ReduceOp.SUM), ("int64", ReduceOp.MAX), ("bfloat16", ReduceOp.AVG),
         ("float64", ReduceOp.MIN), ("float8_e8m0fnu", ReduceOp.PRODUCT)]
        if row.reduces
        else [("float32", None), ("bool", None)]
    )
]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_random_tables_give_correct_results(new_team, mpi, monkeypatch, seed):
    """Sizes on both sides of each step, in a new group. Tables omit some placements."""
    chance = random.Random(seed)  # the same on every rank
    rows = {
        kind: {
            place: steps for place, steps in any_row(kind, chance).items() if chance.random() < 0.8
        }
        for kind in tuning.KINDS
    }
    assert tuning_files.parse(tuning_files.join("", "An MPI", 3, rows, {})) == {3: rows}
    monkeypatch.setattr(tuning.job, "table", tuning.Table({3: rows}))
    team = new_team(f"table {seed}")
    calls = []
    for name, dtype, op in CALLS:
        row = NAMES[name]
        kind = tuning.name_kind(row, op is not None and not reducible(op, dtype))
        block = dtype.itemsize * (team.size if row.many_in or row.many_out else 1)
        steps = [least for steps in rows[kind].values() for least, _ in steps]
        at = chance.choice(steps or [0]) // block
        for count in {0, 1, at, at + 1, 4000}:
            root = chance.randrange(team.size)
            calls.append(Exact(name, team, dtype, count, op, root))
    chance.shuffle(calls)
    for call in calls:
        call.run()
    check_same_bits(mpi, [call for call in calls if call.name == "all_reduce"])


SIZES = [8 << i for i in range(8)]


def measured(points, seconds, spent):
    """Measure with few calls at a time."""
    return tune.measure(default_group().inner, points, Effort(seconds, 1e-5, 3, 5), spent)


def test_tune_measures_every_kind_and_size(world, mpi):
    """All ranks have the same figures."""
    points = tune.find_points(tuning.KINDS, SIZES, default_group())
    outcome = measured(points, 60.0, lambda: 0.0)
    assert all(one == outcome for one in mpi.allgather(outcome))
    place = select.place(default_group())
    for kind in tuning.KINDS:
        routes = tuning.eligible_routes(kind, place)
        own = [point for point in points if point.kind == kind]
        assert len(own) > 1 or len(routes) < 2 or world.size == 1
        assert list(outcome.figures.get(kind, {})) == [point.least for point in own]
        for point, after in itertools.pairwise(own):
            assert point.last < after.least == after.last and point.case.count < after.case.count
        if own:
            assert own[0].least == 0 and own[-1].last == outcome.last[kind] >= SIZES[-1]
            rounding = own[-1].case.dtype.itemsize * world.size
            assert 0 <= SIZES[-1] - own[-1].case.size < rounding
        for by_route in outcome.figures.get(kind, {}).values():
            assert set(by_route) <= set(routes) and len(by_route) > 1
            assert all(0 < one.low <= one.median <= one.high for one in by_route.values())


def test_tune_stops_at_the_time_limit(world, mpi):
    """Large sizes are left out. Only the clock of rank 0 counts."""
    now = 0.0

    def spent():
        nonlocal now
        now += 1.0
        return now if world.me == 0 else 1e9

    points = tune.find_points(tuning.KINDS, SIZES, default_group())
    outcome = measured(points, 20.0, spent)
    assert all(one == outcome for one in mpi.allgather(outcome))
    found = sum(len(figures) for figures in outcome.figures.values())
    assert now < 21 and found == min(len(points), 17)
    assert all(max(figures) < SIZES[-1] for figures in outcome.figures.values())
