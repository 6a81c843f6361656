"""Reproducible groups: equal bits for every route, size and placement.

With the level "exact", also for any number and order of ranks.
"""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
from conftest import check_usable, needs_2_ranks, watch_routes
from driver import Call
from oracle import Between

import mpicoll as dist
from mpicoll.core.reproducible import LEVELS
from mpicoll.dtypes import Kind, ReduceOp, by_name
from mpicoll.errors import ArgumentError, MismatchError, UnsupportedError
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes import registry, tuning
from mpicoll.routes.host import hierarchy, select

KINDS = [
    ("float32", ReduceOp.SUM), ("float32", ReduceOp.AVG), ("float32", ReduceOp.PREMUL_SUM),
    ("float32", ReduceOp.MIN), ("float64", ReduceOp.SUM), ("float64", ReduceOp.AVG),
    ("complex64", ReduceOp.SUM), ("complex128", ReduceOp.AVG), ("bfloat16", ReduceOp.SUM),
    ("float16", ReduceOp.AVG), ("bfloat16", ReduceOp.PREMUL_SUM), ("float8_e5m2", ReduceOp.SUM),
]  # fmt: skip
IN_ORDER = [*KINDS, ("float64", ReduceOp.PRODUCT), ("float16", ReduceOp.PRODUCT)]
ROWS = [row.name for row in PRIMITIVES if row.reduces]
#: Counts for which every rank combines everything, or a share; MANY needs several rounds.
COUNTS, MANY = (5, 1000), 70000


def mixed(dtype, op, count, rank):
    """Numbers of different magnitudes and some zeros, so that sums depend on the order.

    Except for float64, their exact sums are representable as doubles.
    """
    rng = np.random.default_rng([dtype.code, op.code, count, rank])

    def part():
        if op is ReduceOp.PRODUCT:
            return rng.normal(1, 0.2, count)
        wide = dtype.accumulate.itemsize // (2 if dtype.kind is Kind.COMPLEX else 1) == 8
        digits, range_ = (52, 60) if wide else (20, 12)
        return rng.integers(-(2**digits), 2**digits, count) * 2.0 ** rng.integers(
            -digits - range_, -digits + range_ // 2, count
        )

    made = part() + 1j * part() if dtype.kind is Kind.COMPLEX else part()
    made[np.arange(count) % 29 == 27] = -0.0 if rank % 2 else 0.0
    narrow = dtype.kind is Kind.NARROW_FLOAT
    return oracle.rounded(made.astype(np.float32), dtype) if narrow else made.astype(dtype.numpy)


def parts(array):
    """View complex numbers as real and imaginary parts."""
    return array.view(array.real.dtype)


def folded(op, terms):
    """Reduce in rank order."""
    if op.name in ("MIN", "MAX"):
        return oracle._extreme(op.name, terms)
    total = terms[0]
    for term in terms[1:]:
        total = total * term if op is ReduceOp.PRODUCT else total + term
    return total


def summed(terms):
    """Sum exactly with math.fsum."""
    kind = terms[0].dtype
    found = np.array([math.fsum(column) for column in zip(*map(parts, terms), strict=True)])
    return (found + 0.0).astype(parts(terms[0]).dtype).view(kind)


class Reproduced(Call):
    """A call in a reproducible group. Its result is unique to the last bit."""

    def given(self, rank):
        return mixed(self.dtype, self.op, self.input_count, self.team.ranks[rank])

    def result(self):
        dtype, op, wide = self.dtype, self.op, self.dtype.accumulate
        terms = [self.given(rank).astype(wide) for rank in self.terms]
        if op is ReduceOp.PREMUL_SUM:
            by = [wide.type(oracle.number(f)) for f in oracle.factors(dtype, self.team.size)]
            terms = [term * by[rank] for term, rank in zip(terms, self.terms, strict=True)]
        exact = self.team.group.reproducible == "exact" and op is not ReduceOp.MIN
        total = summed(terms) if exact else folded(op, terms)
        if op is ReduceOp.AVG:
            total = (parts(total) / parts(total).dtype.type(len(terms))).view(wide)
        return Between(oracle.rounded(total, dtype) if total.dtype != dtype.numpy else total)


@pytest.fixture(params=LEVELS)
def team(new_team, request):
    """A reproducible group of all ranks."""
    return new_team(request.param, reproducible=request.param)


@pytest.mark.parametrize(
    "apart",
    [
        pytest.param(False, id="one node"),
        pytest.param(True, id="several nodes", marks=pytest.mark.on_4),
    ],
)
@pytest.mark.parametrize("name", registry.HOST)
def test_host_routes_are_reproducible(world, team, monkeypatch, name, apart):
    """For every route in the table: routes that do not support the level are not used."""
    if apart:
        if world.size < 3:
            pytest.skip("needs 3 ranks")
        monkeypatch.setattr(hierarchy, "node_of", lambda: f"node {dist.get_rank() % 2}")
    table = {
        kind: {
            place: ((0, name),)
            for place in tuning.PLACES
            if name in tuning.eligible_routes(kind, place)
        }
        for kind in tuning.KINDS
    }
    monkeypatch.setattr(tuning.job, "table", tuning.Table({1: table}))
    level, route_named = team.group.reproducible, registry.HOST[name]
    built = watch_routes(
        monkeypatch, lambda route, kind: kind.level in (None, *route.serves.reproducible)
    )
    for row in ROWS:
        long = "bfloat16" if row == "all_reduce" else "float32"
        for dtype, op in IN_ORDER if level == "order" else KINDS:
            many = (dtype, op) == (long, ReduceOp.SUM)
            for count in (*COUNTS, MANY) if many else COUNTS:
                Reproduced(row, team, by_name[dtype], count, op, count % team.size).run()
    here = select.place(team.group)
    if level in route_named.serves.reproducible and route_named.needs.placement in ("", here):
        assert name in built


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "bfloat16"])
def test_exact_sums_do_not_depend_on_the_ranks(world, new_team, mpi, dtype):
    """The same summands are distributed over one, several or all ranks, in any order."""
    row, count, n = by_name[dtype], 3000, world.size
    groups = {}
    for size in range(1, n + 1):
        for ranks in (range(size), range(n - 1, n - 1 - size, -1)):
            made = new_team(f"exact {size}", ranks, reproducible="exact")
            if made.me is not None:
                groups[made.ranks] = made.group
    for summands in (1, 2, 3):
        if summands > n:
            break
        results = set()
        for ranks, group in groups.items():
            if len(ranks) < summands:
                continue
            for shift in range(len(ranks)):
                which = (ranks.index(dist.get_rank()) + shift) % len(ranks)
                zero = np.full(count, -0.0 if which % 2 else 0.0, np.float32).astype(row.numpy)
                mine = mixed(row, ReduceOp.SUM, count, which) if which < summands else zero
                array = mine.copy()
                dist.all_reduce(array, group=group)
                results.add(array.tobytes())
        assert len(set().union(*mpi.allgather(results))) == 1


def test_exact_sums_with_infinities_overflow_and_nan(world, new_team):
    """Intermediate overflow does not affect the result."""
    team = new_team("ends", reproducible="exact")
    if world.size >= 3:
        greatest = np.finfo(np.float64).max
        terms = [[greatest, 1e300, np.inf, -0.0], [greatest, np.inf, -np.inf, -0.0]]
        terms += [[-greatest, 1, 1, -0.0], *[[0.0] * 4] * (world.size - 3)]
        array = np.array(terms[team.me])
        dist.all_reduce(array, group=team.group)
        assert array[:2].tolist() == [greatest, np.inf] and np.isnan(array[2])
        assert array[3] == 0 and not np.signbit(array[3])


def test_exact_level_rejects_products_of_floats(new_team):
    team = new_team("refusing", reproducible="exact")
    for dtype in ("float32", "complex128", "bfloat16"):
        array = np.ones(5, by_name[dtype].numpy)
        with pytest.raises(UnsupportedError, match=r"PRODUCT of .*reproducible='exact'.*'order'"):
            dist.all_reduce(array, dist.ReduceOp.PRODUCT, team.group)
    for dtype, op in (("int32", "PRODUCT"), ("float32", "MAX"), ("bool", "PRODUCT")):
        array = np.ones(5, by_name[dtype].numpy)
        dist.all_reduce(array, getattr(dist.ReduceOp, op), team.group)
        assert array.tolist() == [1] * 5


def test_subgroups_inherit_the_options(world):
    everybody = list(range(world.size))
    assert dist.group.WORLD.reproducible is None
    made = dist.new_group(reproducible="EXACT")
    split = dist.split_group(made, [everybody])
    assert made.reproducible == split.reproducible == "exact"
    assert dist.new_group().reproducible is None
    narrow = dist.new_group(wire="BFloat16")
    split = dist.split_group(narrow, [everybody])
    assert narrow.wire == split.wire == "bfloat16" and dist.group.WORLD.wire == "float32"
    if world.size > 1 and world.me:
        assert dist.shrink_group([0], made).reproducible == "exact"
        assert dist.shrink_group([0], narrow).wire == "bfloat16"
    for level in LEVELS:
        text = f"wire: expected 'float32' together with reproducible='{level}', got 'bf.*; pass"
        with pytest.raises(ArgumentError, match=text):
            dist.new_group(reproducible=level, wire="bfloat16")


@needs_2_ranks
@pytest.mark.parametrize(
    ("name", "values"), [("reproducible", ("order", "exact")), ("wire", ("float32", "bfloat16"))]
)
def test_different_options_on_ranks_are_a_mismatch(world, name, values):
    others = "rank 1" if world.size == 2 else f"ranks {', '.join(map(str, range(1, world.size)))}"
    text = f": {name} .*, got '{values[0]}' on rank 0, '{values[1]}' on {others}; pass"
    with pytest.raises(MismatchError, match=text):
        dist.new_group(**{name: values[world.me > 0]})
    check_usable()
