"""Copies by the kernel: sizes, layouts, all ways, and missing permissions."""

from __future__ import annotations

import errno
import itertools

import numpy as np
import pytest
from conftest import needs_2_ranks, pass_first_calls
from conftest import team as group_of
from driver import NAMES, Call, InPlace

import mpicoll as dist
from mpicoll.dtypes import by_name
from mpicoll.errors import MismatchError
from mpicoll.routes import tuning
from mpicoll.routes.host import single_copy
from mpicoll.routes.route import EXCHANGES, MOVES

NAMES_OF_MOVES = [name for name, row in NAMES.items() if row.name in (*MOVES, *EXCHANGES)]
WAYS = "0", "1", "random", "copy-by-the-kernel"


@pytest.fixture(scope="module", params=WAYS, ids="MPICOLL_CHOOSE={}".format)
def team(world, request):
    """A group that copies large messages by the kernel by default, if faster, at random, always."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning.job, "choose", request.param)
        found = group_of(request.param, range(world.size))
        dist.all_to_all_single(np.zeros(found.size), np.zeros(found.size), group=found.group)
        if found.size > 1 and not copies(found):
            pytest.skip("the ranks do not share memory, or cannot copy by the kernel")
        yield found


def copies(team):
    memory = team.group.resources.find("shared")
    return memory is not None and memory.peers is not None


#: Element counts around page sizes, the threshold of the choice, and chunks.
COUNTS = (0, 1, 5, 1023, 1025, 32768, 32769, 70001)


@pytest.mark.parametrize("name", NAMES_OF_MOVES)
@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128"])
def test_data_movement_of_every_size(team, name, dtype):
    for count, root in itertools.product(COUNTS, {0, team.size - 1}):
        Call(name, team, by_name[dtype], count, None, root).run()
        if NAMES[name].many_in != NAMES[name].many_out:
            InPlace(name, team, by_name[dtype], count, None, root).run()


def test_messages_larger_than_one_copy_call(team):
    for name in NAMES_OF_MOVES:
        Call(name, team, by_name["uint8"], (9 << 20) + 77, None, team.size - 1).run()


def test_lists_of_noncontiguous_arrays(team):
    """Outputs in separate memory, transposed outputs, and outputs that are also inputs."""
    n, me = team.size, team.me
    for count in (10, 100000):
        parts = [np.zeros((2, count)).T if r % 2 else np.zeros((count, 2)) for r in range(n)]
        mine = np.arange(2.0 * count).reshape(count, 2) + 1000 * me
        dist.all_gather(parts, mine, group=team.group)
        for rank, part in enumerate(parts):
            np.testing.assert_array_equal(part - 1000 * rank, mine - 1000 * me)
        memory = np.arange(float(count + n)) + 1000 * me
        outputs = [np.zeros(count) for _ in range(n)]
        outputs[me] = memory[n : count + n]
        dist.all_gather(outputs, memory[:count], group=team.group)
        for rank, part in enumerate(outputs):
            np.testing.assert_array_equal(part, np.arange(float(count)) + 1000 * rank)


def uneven(n, number):
    """Element counts between all pairs of ranks, with zeros and with ranks that send nothing."""
    sizes = np.random.default_rng([n, number]).choice([0, 0, 1, 7, 1000, 40000, 600000], (n, n))
    sizes[number % n] *= number % 3 > 0
    sizes[:, number % n] *= number % 3 > 1
    return sizes


@pytest.mark.parametrize("listed", [False, True])
def test_all_to_all_with_uneven_splits(team, listed):
    n, me = team.size, team.me
    for number in range(12):
        sizes = uneven(n, number)
        made = [np.arange(sizes[me, r]) * (me + 1) + 10**7 * r for r in range(n)]
        wanted = [np.arange(sizes[r, me]) * (r + 1) + 10**7 * me for r in range(n)]
        if listed:
            got = [np.zeros_like(each) for each in wanted]
            dist.all_to_all(got, made, group=team.group)
        else:
            whole = np.zeros(sizes[:, me].sum(), np.int64)
            splits = [list(map(int, each)) for each in (sizes[:, me], sizes[me])]
            dist.all_to_all_single(whole, np.concatenate(made), *splits, group=team.group)
            got = np.split(whole, np.cumsum(sizes[:, me])[:-1])
        for mine, expected in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_mismatched_splits_raise_on_all_ranks(team):
    """The error names both sizes on the receiving rank."""
    n, me = team.size, team.me
    if n == 1:
        return
    for count in (3, 60000):
        sends, receives = [count] * n, [count] * n
        if me == n - 1:
            sends[0] += 1
        words = (
            f"expected {count} elements from rank {n - 1}, which sends {count + 1}"
            if me == 0
            else "other ranks' block sizes differ from the sizes sent"
        )
        with pytest.raises(MismatchError, match=words):
            dist.all_to_all_single(
                np.zeros(sum(receives)), np.zeros(sum(sends)), receives, sends, group=team.group
            )
        Call("all_to_all_single", team, by_name["float64"], count).run()


@needs_2_ranks
def test_collective_mismatch_raises_on_all_ranks(team):
    """Different size, dtype or operation, after the calls that are always compared."""
    pass_first_calls(team.group)
    group, count = team.group, 50000
    a = np.zeros(count)

    def gather(sent):
        dist.all_gather_single(np.zeros(sent.size * team.size, sent.dtype), sent, group)

    for odd, words in (
        (lambda: gather(a[1:]), "49999 elem"),
        (lambda: gather(a.view("i8")), "int64"),
        (lambda: dist.all_reduce(a, group=group), "all_reduce of 50000"),
    ):
        with pytest.raises(MismatchError, match=words):
            if team.me == team.size - 1:
                odd()
            else:
                gather(a)
        Call("broadcast", team, by_name["float32"], count, None, 0).run()


copy = single_copy._copy
FAILURES = {
    "may not read": lambda *_: errno.EPERM,
    "may not write": lambda pid, writes, *at: errno.EPERM if writes else copy(pid, 0, *at),
    "is another process": lambda *_: 0,  # as if the copy had read zeros
    "switched off": None,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_one_rank_without_permission_disables_single_copy(world, new_team, mpi, failure):
    """All ranks then use slots, and the rank reports the reason."""
    for unable in {0, world.size - 1}:
        with pytest.MonkeyPatch.context() as patch:
            if unable == world.me and FAILURES[failure]:
                patch.setattr(single_copy, "_copy", FAILURES[failure])
            elif unable == world.me:
                patch.setenv("MPICOLL_SINGLE_COPY", "0")
            team = new_team(f"without {unable}")
            for name, count in itertools.product(NAMES_OF_MOVES, (5, 50000)):
                Call(name, team, by_name["float32"], count, None, 0).run()
        assert not copies(team)
        memory = team.group.resources.find("shared")
        if memory:
            reasons = mpi.allgather(memory.no_single_copy)
            assert [bool(each) for each in reasons] == [r == unable for r in range(world.size)]


def test_groups_copy_by_the_kernel_if_permitted(new_team, mpi):
    team = new_team("default")
    Call("broadcast", team, by_name["float32"], 300000, None, 0).run()
    memory = team.group.resources.find("shared")
    assert copies(team) is (memory is not None and not any(mpi.allgather(memory.no_single_copy)))
