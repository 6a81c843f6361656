"""Every primitive, dtype, operation, count, call mode and group, compared with the oracle."""

from __future__ import annotations

import time

import numpy as np
import oracle
import pytest
from conftest import members
from driver import (
    DTYPES,
    MOVES,
    NAMES,
    REDUCTIONS,
    Call,
    Exact,
    Uneven,
    by_dtype,
    check_same_bits,
    legal_operations,
    use_route,
    wait_for_all,
)

import mpicoll as dist
from mpicoll.dtypes import OPERATIONS, Kind, ReduceOp, by_name
from mpicoll.routes import wire
from mpicoll.routes.host import mpi as native
from mpicoll.routes.host import widened
from mpicoll.routes.space import Host

SMALL = [0, 1, 7, 1000]
LARGE = 30011


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
        Call(name, team, dtype, 7, legal_operations(dtype)[0]).run()


@pytest.fixture
def apart(monkeypatch):
    """Create groups without shared memory."""
    monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")


@pytest.fixture
def cut(apart, new_team, monkeypatch):
    """A group with small chunk sizes, so that short messages are split."""
    monkeypatch.setattr(Host, "small", 0)
    monkeypatch.setattr(Host, "chunk", 64)  # bytes
    monkeypatch.setattr(native, "MAX_COUNT", 50)
    for module in (native, wire):
        monkeypatch.setattr(module, "INT_MAX", 60)  # longer messages use a derived datatype
    return new_team("cut")


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


class Cancelling(Call):
    """A PREMUL_SUM of large terms, which cancel, and small ones: another order changes the sum."""

    factors = ()

    def given(self, rank):
        rng = np.random.default_rng([self.input_count, rank])
        return rng.choice([1.0, 2.0, 4.0], self.input_count).astype(self.dtype.numpy)

    def result(self):
        expected = np.float32(0)
        for rank in self.terms:
            expected = expected + self.given(rank).astype(np.float32) * self.factors[rank]
        return oracle.Between(oracle.rounded(expected, self.dtype))

    def operation(self):
        return self.op(float(self.factors[self.me]))


@pytest.mark.parametrize("place", ["node", "apart", "widened"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_premul_sum_of_narrow_floats_adds_in_rank_order(new_team, monkeypatch, name, place):
    if place != "node":
        monkeypatch.setenv("MPICOLL_SHARED_MEMORY", "0")
    if place == "widened":
        use_route(monkeypatch, "widened", "apart", ["all_reduce of others"])
    team = new_team(f"{place} {name}")
    for dtype in (one for one in DTYPES if one.kind is Kind.NARROW_FLOAT):
        for factors in ((1, 2.0**30, -(2.0**30), 3), (2.0**30, 1, 2.5, -(2.0**30))):
            monkeypatch.setattr(Cancelling, "factors", np.float32(factors))
            for count in (1, 7, 6000):
                call = Cancelling(name, team, dtype, count, ReduceOp.PREMUL_SUM, count % team.size)
                call.run(by_group_rank=True)


@by_dtype
def test_narrow_floats_are_widened_to_float32_for_mpi(apart, new_team, mpi, monkeypatch, dtype):
    """Other dtypes use exchange. Chunks have a few elements."""
    monkeypatch.setattr(widened, "CHUNK_BYTES", 52)
    use_route(monkeypatch, "widened", "apart", ["all_reduce of others"])
    team = new_team("widened")
    calls = [
        Exact("all_reduce", team, dtype, count, op)
        for count in (0, 1, 12, 13, 14, 400)
        for op in legal_operations(dtype)
        if op is not ReduceOp.PREMUL_SUM
    ]
    for call in calls:
        call.run()
    check_same_bits(mpi, calls)


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
