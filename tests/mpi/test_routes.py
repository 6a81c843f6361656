"""Every primitive and route in host and device memory.

A route is only asked for calls it declares.
"""

from __future__ import annotations

import pytest
from conftest import watch_routes
from driver import Call, Exact

from mpicoll.core.plan import CallKind
from mpicoll.dtypes import DTYPES, OPERATIONS, ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES, Layout
from mpicoll.routes import registry, tuning, tuning_files
from mpicoll.routes.host import select

#: Reductions that MPI supports, that only the C library supports, and that neither supports.
KINDS = [
    ("float32", ReduceOp.SUM), ("int64", ReduceOp.BXOR), ("bool", ReduceOp.MAX),
    ("complex64", ReduceOp.AVG), ("bfloat16", ReduceOp.SUM), ("float64", ReduceOp.MIN),
    ("int8", ReduceOp.SUM), ("float8_e8m0fnu", ReduceOp.PRODUCT),
    ("complex128", ReduceOp.PREMUL_SUM), ("float16", ReduceOp.PREMUL_SUM),
]  # fmt: skip
ROWS = [row for row in PRIMITIVES if row.layout is not Layout.EMPTY]


def kinds_of(row):
    """Dtypes and operations for calls of a primitive."""
    return KINDS if row.reduces else [("float32", None), ("bool", None)]


@pytest.mark.parametrize("row", ROWS, ids=repr)
@pytest.mark.parametrize("name", registry.HOST)
def test_host_routes_implement_their_declarations(new_team, monkeypatch, name, row):
    """Calls outside the declaration use another route."""
    built = watch_routes(
        monkeypatch, lambda route, kind: route.can_run(kind.primitive, kind.op, kind.dtype)
    )
    route = registry.HOST[name]
    team = new_team(f"{name} {row}")
    here = select.place(team.group)
    for dtype, op in kinds_of(row):
        summed = ReduceOp.SUM if op is ReduceOp.PREMUL_SUM else op
        kind = CallKind(row, team.group, summed, by_name[dtype])
        table = select._named(kind)
        can = route.can_run(row, summed, by_name[dtype]) and route.needs.placement in ("", here)
        assert not can or name in tuning.eligible_routes(table, here)
        if name in tuning.eligible_routes(table, here):
            steps = {1: {table: {here: ((0, name),)}}}
            monkeypatch.setattr(tuning.job, "table", tuning.Table(steps))
        else:
            with pytest.raises(ValueError, match="expected one of"):
                tuning_files.parse(
                    f'{{"ranks": {{"1": {{"{table}": {{"{here}": [[0, "{name}"]]}}}}}}}}'
                )
        for count in (0, 5, 3000):
            built.clear()
            checked = Call if op is ReduceOp.PREMUL_SUM else Exact
            checked(row.name, team, by_name[dtype], count, op, count % team.size).run()
        if can and table in tuning.KINDS and op is not ReduceOp.PREMUL_SUM:
            assert name in built or not built  # a plan selects its route once


@pytest.mark.parametrize(
    "route", registry.ROUTES, ids=lambda route: route.module.removeprefix("mpicoll.routes.")
)
def test_route_declarations_are_complete(route):
    """A declaration names existing primitives, and each has at least one supported dtype."""
    serves = route.serves
    assert set(serves.primitives) <= {row.name for row in PRIMITIVES}
    assert set(serves.uneven) <= set(serves.primitives)
    assert route.name and route.description
    assert route.needs.placement in ("", "gpu", "gpus", "levels", *tuning.PLACES)
    for row in PRIMITIVES:
        served = [
            (op, dtype)
            for op in (OPERATIONS if row.reduces else [None])
            for dtype in DTYPES
            if (op is None or dtype.kind in op.kinds) and route.can_run(row, op, dtype)
        ]
        assert bool(served) == (row.name in serves.primitives)
        if not serves.premultiplies:
            assert all(op is not ReduceOp.PREMUL_SUM for op, _ in served)
