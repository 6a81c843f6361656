"""Calls of MPI's collectives by the native fast path, in a group without shared memory."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from time import monotonic, sleep

import numpy as np
import pytest
from conftest import needs_2_ranks
from conftest import team as group_of
from driver import DTYPES, NAMES, Call, guarded, legal_operations
from mpi4py import MPI
from test_arrays import maker, strided
from test_short_calls import compiled, record_python_calls

import mpicoll as dist
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import MismatchError, MPIError
from mpicoll.failures import consistency
from mpicoll.routes import tuning
from mpicoll.routes.host import hierarchy, mpi, select

pytestmark = compiled

NATIVE = [name for name in NAMES if name in mpi.ROUTE.serves.primitives and name != "barrier"]
F32, SUM, MAX = by_name["float32"], ReduceOp.SUM, ReduceOp.MAX


def apart_team(name, world):
    """Return a group that does not share memory, past its first calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPICOLL_SHARED_MEMORY", "0")
        made = group_of(name, range(world.size))
        pass_first_calls(made.group)
    assert not made.group.compared
    return made


def pass_first_calls(group):
    """Make calls until the next comparison of call records is a stride of calls away."""
    while group.sequence < consistency.FIRST or left(group) < consistency.STRIDE - 1:
        dist.barrier(group)


def left(group):
    """Return the number of calls before the next comparison."""
    return group.next_check - group.sequence - 1


def check_all_reduce(team, count):
    """Check the result of a call; return the Python calls that it made."""
    call = Call("all_reduce", team, F32, count, SUM)
    with record_python_calls() as seen:
        call.start()
    call.check()
    return seen


def ensure_uncompared(group):
    """Make calls until the next call does not compare the call records."""
    if left(group) < 1:
        pass_first_calls(group)


@pytest.fixture(scope="module")
def team(world):
    made = apart_team("apart", world)
    yield made
    dist.destroy_process_group(made.group)


@contextmanager
def without_python(team):
    """Assert that the block's call runs natively."""
    ensure_uncompared(team.group)
    with record_python_calls() as seen:
        yield
    assert not seen


def operations_of(name, dtype):
    if not NAMES[name].reduces:
        return [None]
    return [op for op in legal_operations(dtype) if mpi.reducible(op, dtype)]


@pytest.mark.parametrize("name", NATIVE)
def test_calls_run_natively_with_the_right_results(team, name):
    """The first call registers the function, which then runs all sizes but 0, and all roots."""
    for dtype in DTYPES:
        for op in operations_of(name, dtype):
            ensure_uncompared(team.group)  # such a call registers the function
            Call(name, team, dtype, 2, op).run()  # chooses the route
            ensure_uncompared(team.group)
            for count in (0, 1, 5, 1000, 30000):  # the first one registers the function
                for root in range(team.size if NAMES[name].root else 1):
                    call = Call(name, team, dtype, count, op, root)
                    with without_python(team) if count else nullcontext():
                        call.start()
                    call.check()


def test_barrier_runs_natively_and_waits_for_all_ranks(team):
    dist.barrier(team.group)
    for late in range(team.size):
        ensure_uncompared(team.group)
        if team.me == late:
            sleep(0.2)
        entered = monotonic()  # the clock of the node
        with without_python(team):
            dist.barrier(team.group)
        left = monotonic()
        assert left >= max(team.group.inner.allgather(entered))


def test_lists_of_adjacent_arrays_are_not_copied(team):
    """The arrays of one list are parts of one buffer, in order, and then in reverse."""
    n, me = team.size, team.me
    for step in (1, -1) * 2:
        whole, one = np.zeros((n, 5), np.float32), np.full(5, me, np.float32)
        dist.all_gather(list(whole[::step]), one, team.group)
        assert np.array_equal(whole[::step, 0], np.arange(n))
        given = np.arange(n, dtype=np.float32).repeat(5).reshape(n, 5)
        dist.reduce_scatter(one, list(given[::step]), group=team.group)
        assert (one == n * (me if step > 0 else n - 1 - me)).all()


def test_calls_that_python_runs(team):
    """What MPI does not reduce, what is not contiguous, and calls behind an async one."""
    array = np.ones(6, np.float32)
    for count, op in ((6, MAX), (3, SUM)):
        for _ in range(3):
            dist.all_reduce(array[:: 6 // count], op, team.group)
        ensure_uncompared(team.group)
        with record_python_calls() as seen:
            dist.all_reduce(array[:: 6 // count], op, team.group)
        assert seen == ["all_reduce"]
    work = dist.all_reduce(np.ones(2, np.int32), group=team.group, async_op=True)
    last = np.ones(2, np.int32)
    dist.all_reduce(last, group=team.group)
    assert work.wait() and (last == team.size).all()


@pytest.mark.parametrize("name", [name for name in NATIVE if not NAMES[name].listed])
def test_native_calls_and_python_calls_match(team, name):
    """The arrays of one rank are not contiguous."""
    for op in operations_of(name, F32):
        for odd in range(team.size):
            make = maker(strided) if team.me == odd else guarded
            for count in (2, 2, 2, 1000):
                ensure_uncompared(team.group)
                call = Call(name, team, F32, count, op, make=make)
                with record_python_calls() as seen:
                    call.start()
                call.check()
            assert bool(seen) == (team.me == odd)


def test_call_records_equal_those_of_python(world):
    """The same calls in two groups, of which one forgets its native functions."""
    recorded = []
    for native in (True, False):
        made = apart_team(f"recorded {native}", world)
        for turn in range(3):  # the first turn chooses the routes, the next one registers
            if turn == 2 and not native:
                made.group.forget_fast_paths()
            pass_first_calls(made.group)
            start = made.group.sequence
            with record_python_calls() as seen:
                for dtype in (np.float32, np.int64):
                    dist.all_reduce(np.ones(3, dtype), group=made.group)
                    dist.broadcast(np.ones(5, dtype), group=made.group, group_src=world.size - 1)
                    dist.all_gather_single(np.ones(2 * world.size), np.ones(2), made.group)
                dist.barrier(made.group)
        assert (len(seen) == 0) == native
        recorded.append([(number - start, *rest) for number, *rest in made.group.recent[1:]])
        history = made.group.history()[-7:]
        assert [entry[2] - start for entry in history] == list(range(1, 8))
        assert all(entry[7] <= entry[8] for entry in history)  # started, completed
        recorded.append([entry[3:6] for entry in history])
        dist.destroy_process_group(made.group)
    assert len(recorded[0]) == 7 and recorded[:2] == recorded[2:]


def test_python_compares_the_records_after_each_stride(team):
    array = np.ones(3, np.float32)
    for _ in range(2):
        dist.all_reduce(array, group=team.group)
    pass_first_calls(team.group)
    with record_python_calls() as seen:
        for number in range(3 * consistency.STRIDE):
            due = left(team.group) == 0
            dist.all_reduce(array, group=team.group)
            assert len(seen) == due, number
            assert not due or team.group.recent[1:] == []
            seen.clear()


@needs_2_ranks
def test_mismatch_that_mpi_does_not_detect_is_found_by_the_records(world):
    made = apart_team("of different calls", world)
    array = np.ones(3, np.int32)
    for op in (SUM, MAX):
        for _ in range(2):
            dist.all_reduce(array, op, made.group)
    with without_python(made):
        dist.all_reduce(array, SUM if made.me else MAX, made.group)
    with pytest.raises(MismatchError, match=r"all_reduce of 3 .*MAX.*found \d+ calls later"):
        for _ in range(consistency.STRIDE):
            dist.all_reduce(array, SUM, made.group)
    with pytest.raises(MismatchError, match="calls later"):  # the group has failed
        dist.all_reduce(array, SUM, made.group)


def test_errors_of_mpi_are_those_of_python(world, monkeypatch):
    """An invalid operation, in Python and natively."""
    texts, array = [], np.ones(3, np.int32)
    for natively in (False, True):
        made = apart_team(f"failing, {natively}", world)
        if natively:
            dist.all_reduce(array, SUM, made.group)  # makes the Python call
        with monkeypatch.context() as patch:
            patch.setattr(mpi, "_mpi_operation", lambda op, dtype: MPI.OP_NULL)
            pass_first_calls(made.group)
            if natively:
                dist.all_reduce(array, SUM, made.group)  # makes the native call
            with (
                record_python_calls() as seen,
                pytest.raises(MPIError, match=r"all_reduce on rank \d") as caught,
            ):
                dist.all_reduce(array, SUM, made.group)
        assert (not seen) == natively
        # MPICH's next lines name the function: mpi4py calls MPI_Allreduce_c.
        text = str(caught.value).replace(f"group {made.group.group_name}", "")
        first, *_ = text.split("\n")
        texts.append((first, caught.value.__cause__.Get_error_class()))
        assert isinstance(caught.value.__cause__, MPI.Exception)
        assert not made.group.inside and not made.group.lock.locked()
        assert (made.group.error is None) == (world.size == 1)
        dist.destroy_process_group(made.group)
    assert len({*texts}) == 1


@pytest.mark.parametrize("why", ["tested calls", "devices"])
def test_groups_that_need_python(world, monkeypatch, why):
    """Python tests the calls instead of blocking in MPI, or checks the group's devices."""
    monkeypatch.setenv("MPICOLL_TESTED_CALLS", str(int(why == "tested calls")))
    made = apart_team(why, world)
    if why == "devices":
        made.group.device_error = lambda wait: None
    array = np.ones(3, np.float32)
    for _ in range(3):
        dist.all_reduce(array, group=made.group)
    pass_first_calls(made.group)
    with record_python_calls() as seen:
        dist.all_reduce(array, group=made.group)
    assert seen == ["all_reduce"]
    dist.destroy_process_group(made.group)


def test_short_calls_run_natively_before_the_placement_is_known(world, monkeypatch):
    """With the table of many ranks, only long calls need the placement; they run in Python."""
    monkeypatch.setattr(tuning, "_DEFAULTS", {2: tuning._DEFAULTS[32]})
    made = apart_team("with the table of many ranks", world)
    for count, runs in ((3, []), (1 << 21, ["all_reduce"]), (3, [])):
        Call("all_reduce", made, F32, count, SUM).run()
        ensure_uncompared(made.group)
        assert check_all_reduce(made, count) == runs
    dist.destroy_process_group(made.group)


@pytest.mark.skipif(MPI.COMM_WORLD.size < 3, reason="needs 3 ranks")
def test_short_calls_between_nodes_run_natively(world, monkeypatch):
    monkeypatch.setattr(hierarchy, "node_of", lambda: f"node {min(world.me, 1)}")
    made = group_of("on nodes", range(world.size))
    pass_first_calls(made.group)
    assert select.place(made.group) == "nodes"
    for count, runs in ((3, []), (1 << 19, ["all_reduce"])):  # the larger by the route hierarchical
        for _ in range(2):
            Call("all_reduce", made, F32, count, SUM).run()
        assert check_all_reduce(made, count) == runs
    dist.destroy_process_group(made.group)
