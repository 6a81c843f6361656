"""The shared-memory route: slot boundaries, races, and ranks that cannot share memory."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from pathlib import Path

import numpy as np
import oracle
import pytest
from conftest import (
    check_mismatches,
    check_size_mismatch,
    check_usable,
    mapped_segments,
    needs_2_ranks,
    needs_shared_memory,
    pass_first_calls,
)
from conftest import team as group_of
from driver import NAMES, Call, InPlace, by_dtype, check_same_bits, legal_operations, use_route
from mpi4py import MPI

import mpicoll as dist
from mpicoll import machine
from mpicoll.core import debug_level
from mpicoll.core.signature import encode_kind
from mpicoll.dispatch import execute
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.errors import MismatchError, MPIError
from mpicoll.kernels.library import kernels
from mpicoll.primitives import PRIMITIVES
from mpicoll.routes import tuning
from mpicoll.routes.host import mpi as mpi_route
from mpicoll.routes.host import shared, shared_segment, ways

#: Operations other than all_reduce that can use shared memory.
OTHERS = [
    row.name for row in PRIMITIVES if row.name in tuning.KINDS or row.name.endswith("_single")
]
OTHERS = [name for name in OTHERS if name not in ("all_reduce", "all_to_all_single")]


def sharing_team(name, world):
    """A new group with shared memory, past its first calls. All its calls are compared."""
    made = group_of(name, range(world.size))
    for _ in range(3):
        dist.all_reduce(np.ones(1), group=made.group)
    if not made.group.compared:
        pytest.skip("the ranks do not share memory")
    return made


def force_dissemination_barrier(patch, world):
    """Force the dissemination barrier, even with two ranks, and a processor per rank."""
    patch.setattr(shared, "FLAT_MAX_RANKS", 1)
    patch.setattr(shared_segment, "_processors", lambda: set(range(world.size)))


@pytest.fixture(params=["flat", "dissemination"])
def barrier_kind(world, request, monkeypatch):
    """The barrier algorithm: flat or dissemination."""
    if request.param == "dissemination":
        force_dissemination_barrier(monkeypatch, world)
    return request.param


@pytest.fixture(scope="module", params=["two shots", "one shot", "dissemination"])
def cut(world, request):
    """A group with small slots for each reduction algorithm and for the dissemination barrier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "SLOT", 512)
        use_route(patch, "shared")
        patch.setattr(shared, "ONE_SHOT_MAX_BYTES", 1 << 40 if request.param == "one shot" else 0)
        if request.param == "dissemination":
            force_dissemination_barrier(patch, world)
        yield group_of("cut", range(world.size))


def shares(team):
    return bool(team.group.resources.find("shared"))


@needs_shared_memory
@by_dtype
def test_all_reduce_around_slot_sizes(cut, mpi, dtype):
    """Sizes around the sizes of cache lines, slots and shares, and more rounds than slots."""
    in_slot = 512 // dtype.itemsize
    counts = (0, 1, 3, 63, 64, 65, in_slot - 1, in_slot, in_slot + 1, 5 * in_slot + 7)
    for op in legal_operations(dtype):
        calls = [Call("all_reduce", cut, dtype, count, op) for count in counts]
        for call in calls:
            call.run()
        check_same_bits(mpi, calls)
    assert cut.size == 1 or shares(cut) or dtype.name == "float8_e8m0fnu"


@pytest.mark.any_mpi
@needs_shared_memory
@pytest.mark.parametrize("name", OTHERS)
@by_dtype
def test_other_operations_around_slot_sizes(cut, name, dtype):
    in_slot = 512 // dtype.itemsize
    for turn, count in enumerate((0, 1, 63, 64, 65, in_slot - 1, in_slot + 1, 3 * in_slot + 7)):
        ops = legal_operations(dtype)[turn % 2 :: 2] if NAMES[name].reduces else [None]
        for op in ops:
            Call(name, cut, dtype, count, op, count % cut.size).run()
            Call("all_reduce", cut, dtype, count, legal_operations(dtype)[0]).run()
    assert cut.size == 1 or shares(cut) or dtype.name == "float8_e8m0fnu"


@needs_shared_memory
def test_ranks_with_random_delays_keep_the_order_of_calls(cut):
    """Calls of many sizes in quick succession."""
    rng = np.random.default_rng(7)  # the same sizes on every rank
    mine = np.random.default_rng(cut.me)
    pending = []
    for number in range(600):
        count = int(rng.choice([1, 5, 100, 128, 129, 400, 2000]))
        array = np.arange(count, dtype=np.float64) * (cut.me + 1) + number
        total = sum(range(1, cut.size + 1))
        expected = np.arange(count) * total + number * cut.size
        if mine.random() < 0.05:
            time.sleep(mine.random() / 500)
        work = dist.all_reduce(array, group=cut.group, async_op=number % 3 == 0)
        pending.append((work, array, expected))
    for work, array, expected in pending:
        assert work is None or work.wait()
        np.testing.assert_array_equal(array, expected)


@needs_2_ranks
@needs_shared_memory
def test_failed_async_call_withdraws_its_announcement(new_team):
    """A rank announces an async call in shared memory.

    After a failure it must not count as present.
    """
    team = new_team("asking")
    Call("all_reduce", team, by_name["float32"], 5000, ReduceOp.SUM).run()
    for _ in range(3):
        count = 5000 if team.me == 0 else 10
        with pytest.raises(MismatchError):
            dist.all_reduce(np.ones(count, np.float32), group=team.group, async_op=True).wait()
    for first in (0, team.size - 1):
        starts_the_others(team, first)


def starts_the_others(team, first):
    """Rank ``first`` makes an async call, then sends the message for which the other ranks wait."""
    array, token = np.ones(5000, np.float32), np.zeros(1)
    if team.me != first:
        dist.recv(token, first, group=team.group)
    work = dist.all_reduce(array, group=team.group, async_op=True)
    if team.me == first:
        for rank in set(range(team.size)) - {first}:
            dist.send(token, rank, group=team.group)
    assert work.wait() and (array == team.size).all()


@needs_shared_memory
def test_ranks_may_mix_synchronous_and_asynchronous_calls(world):
    """The same calls, synchronous on some ranks; then async calls that must return early."""
    mine = np.random.default_rng(world.me)
    array = np.ones(5000, np.float32)
    for _ in range(200):
        array[:] = 1
        work = dist.all_reduce(array, async_op=bool(mine.integers(0, 2)))
        assert work is None or work.wait()
        assert (array == world.size).all()
    for number in range(20):
        starts_the_others(world, number % world.size)


@needs_2_ranks
@needs_shared_memory
@pytest.mark.parametrize("per_rank", [0.5, 1, 2])
def test_async_call_runs_inline_without_spare_processors(world, new_team, monkeypatch, per_rank):
    """Provided that all ranks call in time. With spare processors the progress thread runs it."""
    monkeypatch.setattr(shared_segment, "_processors", lambda: {*range(int(per_rank * world.size))})
    monkeypatch.setattr(shared, "INLINE_WAIT_S", 20.0)
    team = new_team(f"{per_rank} processors a rank")
    Call("all_reduce", team, by_name["float32"], 5000, ReduceOp.SUM).run()
    kind = encode_kind(NAMES["all_reduce"], by_name["float32"], ReduceOp.SUM)
    asks = team.group.resources.find("shared").should_run_inline
    assert asks(kind, 5000) == (per_rank < 2)
    array = np.ones(5000, np.float32)
    work = dist.all_reduce(array, group=team.group, async_op=True)
    assert (team.group.worker is None) == (per_rank < 2)
    work.wait()
    own = dist.new_group([world.me], use_local_synchronization=True)
    assert dist.all_reduce(array, group=own, async_op=True).wait() and own.worker is None
    if per_rank < 2:
        pass_first_calls(team.group)  # MPI compares them before they begin
        work = dist.all_reduce(array, group=team.group, async_op=team.me == 0)  # else unannounced
        assert team.group.worker is None and (work is None or work.wait())
        dist.barrier(team.group)
        assert not asks(kind, 5000 + team.me)  # a different call
        monkeypatch.setattr(shared, "INLINE_WAIT_S", 0.05)
        dist.barrier(team.group)
        assert team.me != 0 or not asks(kind, 5000)  # the other ranks do not announce a call
        dist.barrier(team.group)


def test_keyboard_interrupt_of_an_inline_call_is_raised(world):
    """It is not stored in the Work."""

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute.submit(world.group, interrupted, "all_reduce", (), inline=True)
    work = execute.submit(world.group, lambda: 1 / 0, "all_reduce", (), inline=True)
    with pytest.raises(ZeroDivisionError):
        work.wait()


@needs_shared_memory
@pytest.mark.parametrize("processors", [1, 2, 64])
def test_async_calls_keep_their_order(world, new_team, monkeypatch, processors):
    """Calls run after pending ones, both inline and on the progress thread."""
    monkeypatch.setattr(shared_segment, "_processors", lambda: set(range(processors)))
    team = new_team(f"on {processors}")
    late = np.random.default_rng(world.me)
    for _ in range(20):
        arrays = [np.full(3000 + 5000 * (i % 2), 1.0) for i in range(8)]
        works = []
        for i, array in enumerate(arrays):
            if late.random() < 0.2:
                time.sleep(0.002)
            same = dist.all_reduce(array, group=team.group, async_op=True)
            again = dist.broadcast(array, group=team.group, async_op=True, group_src=0)
            works += [same, again]
            if i % 3 == 0:
                dist.all_reduce(array, group=team.group)
        for work in works:
            assert work.wait()
        for i, array in enumerate(arrays):
            assert (array == world.size ** (2 if i % 3 == 0 else 1)).all()


@needs_shared_memory
def test_round_counters_wrap_around(new_team, barrier_kind, monkeypatch):
    """After 2**32 rounds."""
    monkeypatch.setattr(shared, "SLOT", 512)
    use_route(monkeypatch, "shared")
    monkeypatch.setattr(shared, "ONE_SHOT_MAX_BYTES", 256)
    team = new_team(f"late, {barrier_kind}")
    Call("all_reduce", team, by_name["int64"], 40, ReduceOp.SUM).run()
    if team.size == 1:
        return
    hold = team.group.resources.find("shared")._segment
    close = 2**32 - 6
    team.group.inner.Barrier()  # MPI's barrier, because mpicoll's barrier would use these counters
    # Counters of the dissemination barrier and of reductions, after 8 rings of 32 call records.
    for line in range(256, 265):
        ctypes.c_uint32.from_address(hold.base + hold.me * hold.stride + 64 * line).value = close
    hold.round = hold.returned = close
    team.group.inner.Barrier()
    for count in (40, 20, 300, 40, 1000):
        Call("all_reduce", team, by_name["int64"], count, ReduceOp.SUM).run()
    assert hold.round < 100


@needs_2_ranks
@needs_shared_memory
def test_collective_mismatch_raises_on_all_ranks(new_team, barrier_kind):
    """The error lists the ranks' calls, and the group stays usable, if all ranks wait for all."""
    team = new_team(f"at odds, {barrier_kind}")
    pass_first_calls(team.group)
    odd = team.me == team.size - 1
    Call("all_reduce", team, by_name["float32"], 5000, ReduceOp.SUM).run()
    check_mismatches(team, odd)
    check_size_mismatch(team, odd, 50000)
    Call("all_reduce", team, by_name["float32"], 300000, ReduceOp.SUM).run()


SUM, MAX = ReduceOp.SUM, ReduceOp.MAX
#: The call (name, count, op, root) of each earlier rank, of the last rank, and the description
#: of the last rank's call.
LAZY = [
    (("broadcast", 7), ("all_reduce", 7, SUM), "all_reduce of 7 elements of float32, SUM"),
    (("broadcast", 7), ("broadcast", 7, None, 1), "broadcast of 7 elements of float32, src 1"),
    (("broadcast", 40000), ("broadcast", 40001), "broadcast of 40001 elements of float32, src 0"),
    (("broadcast", 1), ("broadcast", 1 << 18), "broadcast of 262144 elements of float32, src 0"),
    (("reduce", 7, SUM), ("reduce", 7, MAX), "reduce of 7 elements of float32, MAX, dst 0"),
    (("scan", 7, SUM), ("exscan", 7, SUM), "exscan of 7 elements of float32"),
]
by_case = pytest.mark.parametrize(
    ("usual", "other", "words"), LAZY, ids=[words for *_, words in LAZY]
)


def start_lazy(team, usual, other):
    name, *rest = other if team.me == team.size - 1 else usual
    Call(name, team, by_name["float32"], *rest).start()


@needs_2_ranks
@needs_shared_memory
@by_case
def test_mismatch_of_a_lazy_call_is_raised_within_16_calls(world, usual, other, words):
    """On every rank, whatever it calls, with the calls at fault. The group then takes no calls."""
    team = sharing_team(f"lazy, {words}", world)
    with pytest.raises(MismatchError, match=f"rank {team.me} of .*{words}") as error:
        start_lazy(team, usual, other)
        for _ in range(16):
            dist.broadcast(np.ones(1), group=team.group, group_src=0)
    for again in (lambda: start_lazy(team, usual, other), lambda: dist.barrier(team.group)):
        with pytest.raises(MismatchError, match="cannot be used any more") as later:
            again()
        assert str(later.value) == str(error.value)


@needs_2_ranks
@needs_shared_memory
@pytest.mark.parametrize("threads", [2, pytest.param(3, marks=pytest.mark.up_to_2)])
def test_large_calls_on_several_threads(world, threads, monkeypatch):
    """With processors for them."""
    monkeypatch.setattr(shared_segment, "_processors", lambda: set(range(threads * world.size + 1)))
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads + world.me))
    monkeypatch.setattr(tuning.job, "choose", "threads")
    team = group_of(f"{threads} threads", range(world.size))
    for count in (70_000, 70_001, 1_000_003):
        for name in ("all_reduce", *OTHERS):
            op = ReduceOp.SUM if NAMES[name].reduces else None
            Call(name, team, by_name["float32"], count, op, count % team.size).run()
    channels = team.group.resources.find("shared")._channels
    assert len(channels) == threads and all(channel.calls > 10 for channel in channels)


#: By bit, as in choice.h.
BY_MPI = 32
WAYS = [0, 1, 2, 4, 2 | 4, 8, BY_MPI]


def force_way(patch, way):
    """Use one way in the first 40 calls of each kind and size class, where it is a candidate."""
    if way == BY_MPI:  # not used if ranks share processors
        patch.setattr(shared_segment, "_processors", lambda: set(range(64)))
    make = ways.Ways.make

    def make_forced(self, kind):
        choices = make(self, kind)
        for exponent in range(40):
            kernels.choice_set(choices, 1 << exponent, way, 1)
        return choices

    patch.setattr(ways.Ways, "make", make_forced)


@needs_2_ranks
@needs_shared_memory
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["int32", pytest.param("complex128", marks=pytest.mark.up_to_2)])
def test_each_way_gives_the_right_results(world, mpi, monkeypatch, way, dtype):
    """Of all collectives, also with lists, and with outputs that are inputs."""
    force_way(monkeypatch, way)
    team = sharing_team(f"way {way}, {dtype}", world)
    for name in ("all_reduce", *OTHERS, "scan", "exscan"):
        row = NAMES[name]
        for op in legal_operations(by_name[dtype])[:2] if row.reduces else [None]:
            calls = [
                make(name, team, by_name[dtype], count, op, count % team.size)
                for count in (1000, 4097, 40_003, *[600_000] * (team.size == 2))
                for make in ((Call, InPlace) if row.many_in != row.many_out else (Call,))
            ]
            for call in calls:
                call.run()
            if name == "all_reduce":
                check_same_bits(mpi, calls)


@needs_2_ranks
@needs_shared_memory
def test_ranks_with_different_caches_use_slots_of_the_same_size(world, monkeypatch):
    use_route(monkeypatch, "shared")
    monkeypatch.setattr(shared, "SLOT", 1 << 18)
    monkeypatch.setattr(machine, "l2_cache_bytes", lambda: 1 << (19 - world.me))
    team = sharing_team("other caches", world)
    assert team.group.resources.find("shared")._channels[0].slot == 1 << 17
    Call("all_reduce", team, by_name["int32"], 100_000, ReduceOp.SUM).run()


@needs_2_ranks
@needs_shared_memory
def test_mpi_does_not_add_floats(world, monkeypatch):
    """Of two NaNs, the processor returns the first, and MPI's order differs between ranks."""
    force_way(monkeypatch, BY_MPI)
    team = sharing_team("not by MPI", world)
    array = np.full(40_000, np.nan, np.float32)
    array.view(np.uint32)[:] += 1 + team.me
    dist.all_reduce(array, group=team.group)
    assert {*array.view(np.uint32).tolist()} == {0x7FC00001}


@needs_2_ranks
@needs_shared_memory
def test_error_of_mpi_in_a_group_that_shares_memory(world, monkeypatch):
    """An invalid operation, in Python and then natively."""
    force_way(monkeypatch, BY_MPI)
    monkeypatch.setattr(mpi_route, "_mpi_operation", lambda op, dtype: MPI.OP_NULL)
    for calls in (0, 3):
        team = sharing_team(f"failing after {calls}", world)
        for _ in range(calls):  # too small for MPI
            dist.all_reduce(np.ones(10, np.int32), group=team.group)
        with pytest.raises(MPIError, match=r"all_reduce on rank \d"):
            dist.all_reduce(np.ones(40_000, np.int32), group=team.group)
        dist.destroy_process_group(team.group)


@needs_2_ranks
@needs_shared_memory
def test_mpi_is_not_called_if_one_rank_must_not_block_in_it(world, monkeypatch):
    """All ranks choose other ways."""
    force_way(monkeypatch, BY_MPI)
    monkeypatch.setenv("MPICOLL_TESTED_CALLS", str(int(world.me == world.size - 1)))
    team = sharing_team("one is tested", world)
    for _ in range(5):
        Call("all_gather", team, by_name["float32"], 20_000, None).run()
    assert not team.group.resources.find("shared")._mpi_plans


@needs_2_ranks
@needs_shared_memory
@by_case
def test_detail_compares_lazy_calls_before_they_run(world, usual, other, words, monkeypatch):
    """All ranks raise the error in the same call, and the group stays usable."""
    monkeypatch.setattr(debug_level, "_level", dist.DebugLevel.DETAIL)
    team = sharing_team(f"in detail, {words}", world)
    with pytest.raises(MismatchError, match=f"rank {team.me} of .*{words}"):
        start_lazy(team, usual, other)
    Call("broadcast", team, by_name["float32"], 300, None, team.size - 1).run()


@needs_2_ranks
@needs_shared_memory
def test_source_of_a_rooted_call_does_not_wait_for_its_receivers(world):
    """Up to 14 small calls; the data of each is kept until the receivers call."""
    team = sharing_team("ahead", world)
    token = np.zeros(1)
    arrays = [np.full(5, float(k)) if team.me == 0 else np.zeros(5) for k in range(14)]
    dist.barrier(team.group)
    if team.me:
        dist.recv(token, 0, group=team.group)
    for array in arrays:
        dist.broadcast(array, group=team.group, group_src=0)
    for rank in range(1, team.size if team.me == 0 else 0):
        dist.send(token, rank, group=team.group)
    assert [array.tolist() for array in arrays] == [[float(k)] * 5 for k in range(14)]


def no_memory(*_):
    raise OSError(28, "No space left on device")


FAILURES = {
    "cannot_make": lambda patch: patch.setattr(shared_segment, "_made", lambda name: None),
    "cannot_open": lambda patch: patch.setattr(shared_segment, "_opened", lambda name, at: None),
    "no_memory": lambda patch: patch.setattr(os, "posix_fallocate", no_memory),
    "no_library": lambda patch: patch.setattr(shared, "kernels", None),
    "switched_off": lambda patch: patch.setenv("MPICOLL_SHARED_MEMORY", "0"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_rank_without_shared_memory_disables_the_route(world, mpi, failure):
    """All ranks then use messages, with equal results."""

    def open_segments():
        names = [str(each.resolve()) for each in Path("/proc/self/fd").iterdir()]
        return sum(name.startswith("/memfd:mpicoll") for name in names)

    before = open_segments()
    for unable in {0, world.size - 1}:
        with pytest.MonkeyPatch.context() as patch:
            if unable == world.me:
                FAILURES[failure](patch)
            team = group_of(f"without {unable}", range(world.size))
            calls = [
                Call("all_reduce", team, by_name[name], 20000, ReduceOp.SUM)
                for name in ("float32", "bfloat16")
            ]
            for call in calls:
                call.run()
            check_same_bits(mpi, calls)
        if {"cannot_make": unable == 0, "cannot_open": unable != 0}.get(failure, True):
            assert not shares(team)
        dist.destroy_process_group(team.group)
        del team, calls
    assert open_segments() == before


def test_segment_of_another_machine_is_not_opened(tmp_path):
    """On another machine the path of rank 0's segment may be an unrelated file."""
    with (tmp_path / "other").open("w") as other:
        assert (
            shared_segment._opened("mpicoll-1", f"/proc/{os.getpid()}/fd/{other.fileno()}") is None
        )
    assert shared_segment._opened("mpicoll-1", "/proc/0/fd/0") is None


@needs_shared_memory
def test_destroyed_groups_unmap_their_segments(world):
    before = mapped_segments()
    for number in range(20):
        group = dist.new_group(list(range(world.size)), group_desc=f"one of many, {number}")
        check_usable(group)
        assert mapped_segments() == before + (world.size > 1)
        dist.destroy_process_group(group)
        del group
    assert mapped_segments() == before


@needs_shared_memory
def test_unaligned_arrays(world):
    """Memory next to the array is not modified."""
    for name, start in itertools.product(("float32", "bfloat16", "complex128"), (1, 3)):
        dtype = by_name[name]
        values = [oracle.operands(ReduceOp.SUM, dtype, 9001, r) for r in range(world.size)]
        memory = np.full(9001 * dtype.itemsize + 8, 0xA5, np.uint8)
        array = memory[start : start + 9001 * dtype.itemsize].view(dtype.numpy)
        array[:] = values[world.me]
        dist.all_reduce(array)
        between = oracle.reduced(ReduceOp.SUM, dtype, values, None)
        between.check(array.copy(), name)
        assert (memory[:start] == 0xA5).all() and (memory[start + array.nbytes :] == 0xA5).all()
