"""Every primitive, dtype, operation, count, call mode and group, compared with the oracle."""

from __future__ import annotations

import time

import numpy as np
import oracle
import pytest
from conftest import members
from conftest import team as group_of
from driver import (
    DTYPES,
    MOVES,
    NAMES,
    REDUCTIONS,
    Call,
    Exact,
    Uneven,
    check_same_bits,
    legal_operations,
    use_route,
    wait_for_all,
)

import mpicoll as dist
from mpicoll.dtypes import OPERATIONS, Kind, ReduceOp, by_name
from mpicoll.primitives import Layout
from mpicoll.routes import wire
from mpicoll.routes.host import mpi as native
from mpicoll.routes.space import Host

SMALL = [0, 1, 7, 1000]
LARGE = 30011

#: Host memory, as passed to algorithms.
HOST = Host()

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=repr)


def counts(name, team):
    """Elements per block. The default group also uses a count that is split into chunks."""
    row = NAMES[name]
    if team.name != "world" or name in row.aliases:
        return SMALL
    blocks = team.size if row.many_in else 1
    return [*SMALL, LARGE // blocks]


def roots(name, team, count):
    """All roots for one of the counts, otherwise one root."""
    if not NAMES[name].root:
        return [0]
    return range(team.size) if count == 7 else [(count + 1) % team.size]


def ways(name, dtype, op, team, count):
    """Both synchronous and asynchronous, or one of them for large counts and subgroups."""
    if team.name == "world" and count in SMALL and name not in NAMES[name].aliases:
        return (False, True)
    turn = dtype.code + count + (op.code if op else 0) + len(team.name)
    return (turn % 2 == 1,)


def sweep(name, dtype, op, teams, mpi):
    """Run and yield calls over all counts, groups, roots and modes."""
    for team in teams:
        wait_for_all(mpi)
        if team.me is None:
            continue
        pending = []
        for count in counts(name, team):
            for root in roots(name, team, count):
                for async_op in ways(name, dtype, op, team, count):
                    call = Call(name, team, dtype, count, op, root)
                    if async_op:
                        pending.append((call, call.start(True, by_group_rank=root % 2 == 0)))
                    else:
                        call.run(by_group_rank=root % 2 == 1)
                        yield call
        for call, work in reversed(pending):
            assert work.wait() is True
            assert work.is_completed() and work.exception() is None
            call.check()
            yield call


@pytest.mark.parametrize("name", MOVES)
@by_dtype
def test_data_movement_gives_the_right_elements(teams, mpi, name, dtype):
    assert sum(1 for _ in sweep(name, dtype, None, teams, mpi)) >= 4


@pytest.mark.parametrize("name", REDUCTIONS)
@by_dtype
def test_reductions_give_the_right_results(teams, mpi, name, dtype):
    calls = [call for op in legal_operations(dtype) for call in sweep(name, dtype, op, teams, mpi)]
    assert len(calls) >= 4 * len(legal_operations(dtype))
    if name == "all_reduce":
        check_same_bits(mpi, [call for call in calls if call.count <= 1000])
        check_same_bits(mpi, [call for call in calls if call.count > 1000])


@pytest.mark.parametrize("name", REDUCTIONS)
@by_dtype
def test_undefined_operations_are_rejected(teams, name, dtype):
    refused = [op for op in OPERATIONS if op not in legal_operations(dtype)]
    for team in members(teams):
        for op in refused:
            call = Call(name, team, dtype, 7, legal_operations(dtype)[0])
            call.op = op
            if op is ReduceOp.PREMUL_SUM:
                call.dtype = DTYPES[0]
            for async_op in (False, True):
                with pytest.raises(ValueError, match=rf"{NAMES[name]}: op: {op.name} .*{dtype}"):
                    call.start(async_op)
        if ReduceOp.PREMUL_SUM in legal_operations(dtype):
            call = Call(name, team, dtype, 7, legal_operations(dtype)[0])
            arguments = {**call.arguments, "op": ReduceOp.PREMUL_SUM, "group": team.group}
            if NAMES[name].root:
                arguments[f"group_{NAMES[name].root}"] = 0
            with pytest.raises(ValueError, match="factor"):
                getattr(dist, name)(**arguments)
        Call(name, team, dtype, 7, legal_operations(dtype)[0]).run()


@pytest.fixture
def cut(world):
    """A group with small chunk sizes, so that short messages are split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOLL_SHARED_MEMORY", "0")
        patch.setattr(Host, "small", 0)
        patch.setattr(Host, "chunk", 64)  # bytes
        patch.setattr(native, "CHUNK_BYTES", 50)
        for module in (native, wire):
            patch.setattr(module, "INT_MAX", 60)  # longer messages use a derived datatype
        team = group_of("cut", range(world.size))
        yield team
        dist.destroy_process_group(team.group)


@by_dtype
def test_calls_around_chunk_sizes(cut, dtype):
    """Sizes around the sizes of chunks, blocks and derived datatypes."""
    for count in (1, 8, 60, 61, 150, 1003):
        root = count % cut.size
        for name in MOVES:
            Call(name, cut, dtype, count, None, root).run()
        for name in REDUCTIONS:
            for op in legal_operations(dtype):
                Call(name, cut, dtype, count, op, root).run()


@by_dtype
def test_uneven_blocks_around_chunk_sizes(cut, dtype):
    """Displacements exceed MPI's range, so blocks are exchanged one rank at a time."""
    for counts in ([5, 70, 3, 40], [61, 0, 1, 130], [0, 200, 0, 0]):
        mine = oracle.any_bits(dtype, counts[cut.me], cut.me)
        outputs = [np.zeros(count, dtype.numpy) for count in counts[: cut.size]]
        dist.all_gather(outputs, mine, cut.group)
        for r, output in enumerate(outputs):
            oracle.same_bits(output, oracle.any_bits(dtype, counts[r], r), f"{counts} from {r}")
        for op in legal_operations(dtype):
            Uneven(cut, dtype, counts, op).run()


def test_all_reduce_in_several_default_chunks(world, mpi, monkeypatch):
    """With a remainder, and without shared memory."""
    monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    world = group_of("apart", range(world.size))
    for dtype, op in ((by_name["bfloat16"], ReduceOp.SUM), (by_name["float32"], ReduceOp.MAX)):
        count = (2 * HOST.chunk // dtype.itemsize) * world.size + 4099
        call = Call("all_reduce", world, dtype, count, op)
        call.run()
        check_same_bits(mpi, [call])
        Call("reduce", world, dtype, count, op, world.size - 1).run()
        Call("reduce_scatter_single", world, dtype, count // world.size, op).run()


@pytest.mark.parametrize("place", ["node", "apart", "widened"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_premul_sum_of_narrow_floats_adds_in_rank_order(world, monkeypatch, name, place):
    """Large terms cancel, so another order would change the contribution of the small ones."""
    if place != "node":
        monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    if place == "widened":
        use_route(monkeypatch, "widened", "apart", ["all_reduce of others"])
    team, n = group_of(f"{place} {name}", range(world.size)), world.size
    row = NAMES[name]
    for dtype in (one for one in DTYPES if one.kind is Kind.NARROW_FLOAT):
        for factors in ((1, 2.0**30, -(2.0**30), 3), (2.0**30, 1, 2.5, -(2.0**30))):
            for count in (1, 7, 6000):
                blocks = n if row.layout is Layout.SCATTERED else 1
                rng = np.random.default_rng(count)
                small = rng.choice([1.0, 2.0, 4.0], (n, blocks * count)).astype(dtype.numpy)
                terms = [
                    one.astype(np.float32) * np.float32(factor)
                    for one, factor in zip(small, factors, strict=False)
                ]
                mine = {"scan": terms[: world.me + 1], "exscan": terms[: world.me]}.get(name, terms)
                expected = np.zeros(blocks * count, np.float32)
                for term in mine:
                    expected = expected + term
                expected = oracle.rounded(expected, dtype)
                if not mine:  # the output is unchanged
                    expected = np.zeros(count, dtype.numpy)
                op, root = ReduceOp.PREMUL_SUM(factors[world.me]), count % n
                what = f"{name} of {dtype} {factors} {count} {place}"
                if row.layout is Layout.IN_PLACE:
                    array = small[world.me].copy()
                    to = {"group_dst": root} if row.root else {}
                    getattr(dist, name)(array, op=op, group=team.group, **to)
                    if row.root and root != world.me:
                        expected = small[world.me]
                    oracle.same_bits(array, expected, what)
                else:
                    array, given = np.zeros(count, dtype.numpy), small[world.me]
                    given = list(given.reshape(n, count)) if row.listed else given
                    getattr(dist, name)(array, given, op, team.group)
                    own = expected.reshape(-1, count)[world.me if row.many_in else 0]
                    oracle.same_bits(array, own, what)
    dist.destroy_process_group(team.group)


@by_dtype
def test_narrow_floats_are_widened_to_float32_for_mpi(world, mpi, monkeypatch, dtype):
    """Other dtypes use exchange. Chunks have a few elements."""
    monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    monkeypatch.setattr(native, "CHUNK_BYTES", 52)
    use_route(monkeypatch, "widened", "apart", ["all_reduce of others"])
    team = group_of("widened", range(world.size))
    calls = [
        Exact("all_reduce", team, dtype, count, op)
        for count in (0, 1, 12, 13, 14, 400)
        for op in legal_operations(dtype)
        if op is not ReduceOp.PREMUL_SUM
    ]
    for call in calls:
        call.run()
    check_same_bits(mpi, calls)
    dist.destroy_process_group(team.group)


def test_results_with_nan_and_signed_zeros_have_equal_bits(world, mpi):
    """Every rank contributes NaNs with various signs and payloads, and zeros of both signs.

    MPI's sums may keep the payload of a different NaN on each rank, so only the positions of NaNs
    are compared there.
    """
    for name in ("float32", "float64", "float16", "bfloat16", "complex64"):
        dtype = by_name[name]
        for count in (1, 40, 4099):
            calls = []
            for op in legal_operations(dtype):
                call = Call("all_reduce", world, dtype, count, op)
                (_, array, _) = call.watched[0]
                parts = array.view(array.real.dtype)
                word = np.dtype(f"u{parts.itemsize}")
                bits = parts.view(word)
                bits[::5] = np.array(np.nan, parts.dtype).view(word) + word.type(world.me + 1)
                if world.me % 2:
                    bits[::10] |= word.type(1 << (8 * word.itemsize - 1))
                parts[1::5] = -0.0 if world.me % 2 else 0.0
                call.start()
                nan = np.isnan(parts)
                assert nan[::5].all()
                assert dtype.kind is Kind.COMPLEX or not nan[1::5].any()
                if native.reducible(op, dtype):
                    parts[nan] = np.nan
                calls.append(call)
            check_same_bits(mpi, calls)


def test_no_rank_leaves_a_barrier_before_all_have_entered(teams, tmp_path_factory, mpi):
    name = mpi.bcast(str(tmp_path_factory.mktemp("barrier") / "here") if mpi.rank == 0 else None)
    if mpi.rank == 0:
        np.zeros(1 + 9 * len(teams) * mpi.size, np.uint8).tofile(name)
    wait_for_all(mpi)
    here = np.memmap(name, np.uint8, "r+").reshape(-1)[1:].reshape(len(teams), 9, mpi.size)
    for team, mine in zip(teams, here, strict=True):
        if team.me is None:
            continue
        for i, come in enumerate(mine):
            if i % team.size == team.me:
                time.sleep(0.01)
            come[mpi.rank] = 1
            if i % 3 == 0:
                assert dist.barrier(team.group) is None
            elif i % 3 == 1:
                assert dist.barrier(group=team.group, timeout=30) is None
            else:
                work = dist.barrier(group=team.group, async_op=True)
                assert work.wait() and work.result() == []
            assert come[list(team.ranks)].all()


def test_calls_of_outsiders_return_none_and_warn(teams):
    """Their arguments are not inspected."""
    for team in (team for team in teams if team.me is None):
        for name, row in NAMES.items():
            arguments = {argument: object() for argument in (row.output, row.input) if argument}
            if row.root:
                arguments[f"group_{row.root}"] = 0
            with pytest.warns(UserWarning, match=row.name):
                assert getattr(dist, name)(**arguments, group=team.group) is None
