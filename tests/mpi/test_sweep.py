"""Every primitive x dtype x operation x count x way of calling x group, against the oracle."""

from __future__ import annotations

import pytest
from driver import DTYPES, MOVES, NAMES, REDUCTIONS, Call, legal, meet, same_on_all

import mpicoll as dist
from mpicoll.dtypes import OPERATIONS, ReduceOp
from mpicoll.primitives import PRIMITIVES, Layout

SMALL = [0, 1, 7, 1000]
LARGE = 70001

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


def counts(name, team):
    """Elements of a block; under one name and in one group also so many that blocks are cut."""
    row = NAMES[name]
    if team.name != "world" or name in row.aliases:
        return SMALL
    blocks = 1 if row.layout in (Layout.IN_PLACE, Layout.GATHERED) else team.size
    return [*SMALL, LARGE // blocks]


def roots(name, team, count):
    """All roots for one of the counts, else one of them."""
    if not NAMES[name].root:
        return [0]
    return range(team.size) if count == 7 else [(count + 1) % team.size]


def sweep(name, dtype, op, teams, mpi):
    """All counts, groups and roots, each synchronous and asynchronous; yields the calls."""
    for team in teams:
        meet(mpi)
        if team.me is None:
            continue
        pending = []
        for count in counts(name, team):
            for root in roots(name, team, count):
                # The large ones are called in one way, and with the next operation in the other.
                ways = {False, True} if count in SMALL else {bool(op and op.code % 2)}
                if False in ways:
                    call = Call(name, team, dtype, count, op, root)
                    call.run(by_group_rank=root % 2 == 1)
                    yield call
                if True in ways:
                    call = Call(name, team, dtype, count, op, root)
                    pending.append((call, call.start(True, by_group_rank=root % 2 == 0)))
        for call, work in reversed(pending):
            assert work.wait() is True
            assert work.is_completed() and work.exception() is None
            call.check()
            yield call


def test_the_sweep_is_complete():
    """Every row has public functions, and is swept unless it has no arrays."""
    assert all(callable(getattr(dist, name)) for row in PRIMITIVES for name in row.aliases)
    empty = [row.name for row in PRIMITIVES if row.layout is Layout.EMPTY]
    assert {*MOVES, *REDUCTIONS, *empty} == set(NAMES)
    assert empty == ["barrier"]
    for dtype in DTYPES:
        assert len(legal(dtype)) >= 4


@pytest.mark.parametrize("name", MOVES)
@by_dtype
def test_moves(teams, mpi, name, dtype):
    assert sum(1 for _ in sweep(name, dtype, None, teams, mpi)) >= 8


@pytest.mark.parametrize("name", REDUCTIONS)
@by_dtype
def test_reduces(teams, mpi, name, dtype):
    calls = [call for op in legal(dtype) for call in sweep(name, dtype, op, teams, mpi)]
    assert len(calls) >= 8 * len(legal(dtype))
    if name == "all_reduce":
        same_on_all(mpi, [call for call in calls if call.count <= 1000])
        same_on_all(mpi, [call for call in calls if call.count > 1000])


@pytest.mark.parametrize("name", REDUCTIONS)
@by_dtype
def test_refuses_operations_without_a_meaning(teams, name, dtype):
    refused = [op for op in OPERATIONS if op not in legal(dtype)]
    for team in teams:
        if team.me is None:
            continue
        for op in refused:
            call = Call(name, team, dtype, 7, legal(dtype)[0])
            call.op = op
            if op is ReduceOp.PREMUL_SUM:
                call.dtype = DTYPES[0]
            for async_op in (False, True):
                with pytest.raises(ValueError, match=rf"{NAMES[name]}: op: {op.name} .*{dtype}"):
                    call.start(async_op)
        if ReduceOp.PREMUL_SUM in legal(dtype):
            call = Call(name, team, dtype, 7, legal(dtype)[0])
            arguments = {**call.arguments, "op": ReduceOp.PREMUL_SUM, "group": team.group}
            if NAMES[name].root:
                arguments[f"group_{NAMES[name].root}"] = 0
            with pytest.raises(ValueError, match="factor"):
                getattr(dist, name)(**arguments)
        Call(name, team, dtype, 7, legal(dtype)[0]).run()
