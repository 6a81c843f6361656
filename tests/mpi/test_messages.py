"""Point-to-point: send, recv, isend, irecv and batch_isend_irecv."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import check_usable, members, needs_2_ranks
from driver import by_dtype, wait_for_all

import mpicoll as dist

LARGE = 8 * 2**20


def ring(team):
    """Global ranks of the next and the previous rank in the group."""
    return team.ranks[(team.me + 1) % team.size], team.ranks[team.me - 1]


def sent(dtype, count, rank):
    return oracle.any_bits(dtype, count, rank)


@by_dtype
def test_messages_in_a_ring(teams, dtype):
    """Every dtype and count, with global and group ranks, blocking and nonblocking."""
    for team in members(teams, 2):
        after, before = ring(team)
        for count in (0, 1, 7, 1000, 70001):
            mine, expected = sent(dtype, count, dist.get_rank()), sent(dtype, count, before)
            got = np.zeros(count, dtype.numpy)
            send = dist.send if team.me % 2 else dist.isend
            sending = send(mine, after, team.group, tag=count)
            assert dist.recv(got, before, team.group, tag=count) == before
            assert sending is None if team.me % 2 else sending.wait() is True
            oracle.same_bits(got, expected, f"{count} of {dtype} in {team.name}")
            got[...] = np.zeros((), dtype.numpy)
            by_place = {"group": team.group, "tag": 3}
            receiving = dist.irecv(got, group_src=(team.me - 1) % team.size, **by_place)
            dist.send(mine, group_dst=(team.me + 1) % team.size, **by_place)
            assert receiving.wait() is True
            assert receiving.source_rank() == before and receiving._source_rank() == before
            (result,) = receiving.result()
            assert result is got and receiving.is_completed() and receiving.is_success()
            oracle.same_bits(got, expected, f"{count} of {dtype} in {team.name}")


@needs_2_ranks
def test_messages_are_matched_by_tag(world):
    """The receiver may use another order of tags. Messages with equal tags keep their order."""
    after, before = ring(world)
    tags = [5, 0, 1022, 5, 5]
    works = [dist.isend(np.array([i, world.me]), after, tag=tag) for i, tag in enumerate(tags)]
    for tag, place in ((1022, 2), (5, 0), (0, 1), (5, 3), (5, 4)):
        got = np.zeros(2, np.int64)
        assert dist.recv(got, before, tag=tag) == before
        assert got.tolist() == [place, before]
    assert all(work.wait() for work in works)


@needs_2_ranks
def test_tags_are_separate_between_groups(teams):
    """The same tag between the same ranks in two groups, received in the opposite order."""
    world, *_, reordered = teams
    one, other = world.ranks[0], world.ranks[1]
    if world.me == 0:
        works = [
            dist.isend(np.full(3, i), other, t.group) for i, t in enumerate((world, reordered))
        ]
        assert all(work.wait() for work in works)
    elif world.me == 1:
        got = np.zeros(3, int)
        for i, team in ((1, reordered), (0, world)):
            assert dist.recv(got, one, team.group) == one
            assert (got == i).all()


def test_receive_from_any_source_returns_the_global_rank(teams):
    for team in members(teams):
        root = team.size - 1
        if team.me != root:
            dist.send(np.array([team.ranks[team.me]] * 4), group_dst=root, group=team.group)
            continue
        seen = set()
        for i in range(team.size - 1):
            got = np.zeros(4, int)
            if i % 2:
                work = dist.irecv(got, group=team.group)
                work.wait()
                source = work.source_rank()
            else:
                source = dist.recv(got, group=team.group)
            assert (got == source).all()
            seen.add(source)
        assert seen == set(team.ranks[:root])


def test_messages_to_the_own_rank(teams):
    """isend and irecv are supported; a blocking send would deadlock and is rejected."""
    for team in members(teams):
        me = dist.get_rank()
        for count in (0, 3, LARGE):
            out, got = np.arange(count) + me, np.zeros(count, np.int64)
            if count == 3:
                works = [dist.isend(out, me, team.group), dist.irecv(got, me, team.group)]
            else:
                works = [dist.irecv(got, me, team.group), dist.isend(out, me, team.group)]
            assert all(work.wait() for work in works)
            assert (got == out).all()
            assert works[1 if count == 3 else 0].source_rank() == me
        with pytest.raises(ValueError, match=r"send: dst: .*this rank"):
            dist.send(np.zeros(3), me, team.group)


@needs_2_ranks
def test_messages_of_noncontiguous_arrays(world):
    """Strided, transposed and 0-d arrays, with different layouts on sender and receiver."""
    after, before = ring(world)
    values = np.arange(24.0).reshape(4, 6)
    mine, whole = values + world.me, np.zeros((4, 12))
    for out, got in (
        (mine, whole[:, 1::2]),
        (mine.copy("F"), np.zeros((6, 4)).T),
        (np.repeat(mine, 2, 1)[:, ::2], np.zeros((4, 6))[::-1, ::-1]),
        (np.array(float(world.me)), np.array(-1.0)),
    ):
        for receive in (dist.recv, lambda *given: dist.irecv(*given).wait()):
            got[...] = -1
            sending = dist.isend(out, after)
            receive(got, before)
            assert (got == (values + before if got.ndim else before)).all()
            sending.wait()
    assert (whole[:, ::2] == 0).all()


@needs_2_ranks
@pytest.mark.parametrize("count", [10, 300000])
@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("blocking", [False, True])
def test_message_of_another_size_raises(world, mpi, count, change, blocking):
    """The error names both sizes."""
    if world.me == 0:
        work = dist.isend(np.ones(count + change), 1)
        work.wait()
    elif world.me == 1:
        got = np.zeros(count)
        words = (
            "longer than" if change > 0 else rf"has {8 * (count - 1)} bytes, the array {8 * count}"
        )
        with pytest.raises(dist.MPIError, match=rf"recv .*{words}"):
            if blocking:
                dist.recv(got, 0)
            else:
                work = dist.irecv(got, 0)
                try:
                    work.wait()
                finally:
                    assert work.is_completed() and not work.is_success()
                    assert isinstance(work.exception(), dist.MPIError)
    wait_for_all(mpi)
    check_usable()


def batch(team, count, order):
    """Every rank sends to and receives from every rank, including itself, with two tags."""
    kinds = [dist.isend, dist.irecv]
    entries = [(kind, peer, tag) for kind in kinds for peer in range(team.size) for tag in (1, 2)]
    entries = order(entries)
    ops, checks = [], []
    for kind, peer, tag in entries:
        if kind is dist.isend:
            array = np.full(count, 100 * team.me + 10 * peer + tag, np.int32)
        else:
            array = np.zeros(count, np.int32)
            checks.append((array, 100 * peer + 10 * team.me + tag))
        where = {"group_peer": peer} if tag == 1 else {"peer": team.ranks[peer]}
        op = dist.P2POp(kind, array, group=team.group, tag=tag, **where)
        assert (op.peer, op.group_peer, op.tag) == (team.ranks[peer], peer, tag)
        ops.append(op)
    works = dist.batch_isend_irecv(ops)
    assert len(works) == len(ops)
    return works, checks


ORDERS = [
    lambda entries: entries,  # sends first
    lambda entries: entries[::-1],
    lambda entries: entries[::2] + entries[1::2],  # mixed
]


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize("count", [0, 5, 300000])
def test_batches_of_messages(teams, first, differ, count):
    """Two batches are pending. The ranks may order them differently."""
    for team in members(teams):
        order = ORDERS[(first + differ * team.me) % 3]
        pending = [batch(team, count, order) for _ in range(2)]
        for works, checks in reversed(pending):
            for work in works if team.me % 2 else reversed(works):
                assert work.wait() is True
            for array, expected in checks:
                assert (array == expected).all()


def test_invalid_batches_are_rejected(teams):
    world, *_, reordered = teams
    x = np.zeros(3)
    good = dist.P2POp(dist.isend, x, world.me)
    with pytest.raises(IndexError, match="batch_isend_irecv"):
        dist.batch_isend_irecv([])
    with pytest.raises(ValueError, match="the group of p2p_op_list"):
        dist.batch_isend_irecv([good, dist.P2POp(dist.irecv, x, world.me, reordered.group)])


def test_messages_complete_after_their_works_are_dropped(world):
    """Hundreds of messages whose arrays are also dropped."""
    after, before = ring(world)
    got = np.zeros((300, 500), np.float32)
    receiving = [dist.irecv(row, before, tag=i % 7) for i, row in enumerate(got)]
    for i in range(len(got)):
        dist.isend(np.full(500, i * 2 + world.me, np.float32), after, tag=i % 7)
    assert all(work.wait() for work in receiving)
    assert (got == np.arange(len(got))[:, None] * 2 + before).all()


def test_pending_receive_does_not_block_collectives(world):
    after, before = ring(world)
    got = np.zeros(1000)
    receiving = dist.irecv(got, before, tag=4)
    x = np.full(5, float(world.me))
    dist.all_reduce(x)
    work = dist.all_reduce(x, async_op=True)
    assert not receiving.is_completed()
    work.wait()
    assert (x == sum(range(world.size)) * world.size).all()
    dist.barrier()
    dist.isend(np.full(1000, 7.0 + world.me), after, tag=4).wait()
    receiving.wait()
    assert (got == 7 + before).all()


def test_wait_on_a_receive_times_out_and_can_be_repeated(world, mpi):
    """The receive stays pending."""
    after, before = ring(world)
    got = np.zeros(3, ml_dtypes.bfloat16)
    work = dist.irecv(got, before, tag=8)
    for timeout in (0.05, 0.02):
        with pytest.raises(dist.CollectiveTimeoutError, match=r"irecv .*not complete within"):
            work.wait(timeout)
        assert not work.is_completed() and work.exception() is None
    wait_for_all(mpi)
    sending = dist.isend(np.full(3, world.me + 1, ml_dtypes.bfloat16), after, tag=8)
    assert work.wait(30) is True and sending.wait() is True
    assert (got.astype(float) == before + 1).all()


@needs_2_ranks
@pytest.mark.parametrize("count", [4, 300000])
@pytest.mark.parametrize("how", ["recv", "irecv", "batch", "any", "polled"])
def test_message_of_another_dtype_raises(world, count, how):
    """The error names both dtypes. The message can then be received with the right dtype."""
    after, before = ring(world)
    out = np.arange(count, dtype=np.float32) + world.me
    sending = dist.isend(out, after, tag=9)
    wrong, got = np.zeros(count, np.int32), np.zeros(count, np.float32)
    with pytest.raises(
        dist.MismatchError, match=f"expected .* int32 with tag 9, got .* float32 from rank {before}"
    ):
        if how == "recv":
            dist.recv(wrong, before, tag=9)
        elif how == "batch":
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, wrong, before, tag=9)])[0].wait()
        else:
            work = dist.irecv(wrong, None if how == "any" else before, tag=9)
            while how == "polled" and not work.is_completed():
                time.sleep(0.01)
            work.wait()
    assert not wrong.any()
    dist.recv(got, before, tag=9)
    sending.wait()
    assert (got == np.arange(count) + before).all()
