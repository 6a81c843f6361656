"""Reconfigure: successive groups with changing members, created by the members only.

Every rank runs every test. Ranks that are not members wait at a barrier.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from itertools import count

import numpy as np
import pytest
from conftest import needs_2_ranks
from mpi4py import MPI

import mpicoll as dist
from mpicoll.api import lifecycle
from mpicoll.api.reconfigure import Reconfigurable
from mpicoll.core.groups import state

_uuids = count(1000, 100)


@pytest.fixture
def uuid():
    """The first of 100 identifiers used by this test only, equal on all ranks."""
    return next(_uuids)


@pytest.fixture(scope="module")
def made(world):
    """The Reconfigurable of this rank, and the handles of all ranks."""
    found = Reconfigurable(world.group)
    return found, MPI.COMM_WORLD.allgather(found.handle())


def together():
    MPI.COMM_WORLD.Barrier()


def check(group, members):
    """Check that the group has these global ranks in this order, and that it works."""
    me = MPI.COMM_WORLD.rank
    assert (group.rank(), group.size()) == (members.index(me), len(members))
    x = np.array([2.0**me])
    dist.all_reduce(x, group=group)
    assert x[0] == sum(2.0**r for r in members)
    names = [None] * len(members)
    dist.all_gather_object(names, me, group=group)
    assert names == members


def test_reconfigure_without_one_rank_and_with_all_again(made, uuid):
    """Only members call."""
    one, handles = made
    me, n = MPI.COMM_WORLD.rank, len(handles)
    everybody = list(range(n))
    for out in everybody if n > 1 else []:
        rest = [r for r in everybody if r != out]
        if me != out:
            check(one.reconfigure(uuid + 2 * out, [handles[r] for r in rest]), rest)
        check(one.reconfigure(uuid + 2 * out + 1, handles), everybody)


def test_reconfigure_with_concurrent_halves_then_all(made, uuid):
    one, handles = made
    me, n = MPI.COMM_WORLD.rank, len(handles)
    assert len(set(handles)) == n
    everybody = list(range(n))
    orders = (handles, everybody), (handles[::-1], everybody[::-1]), (set(handles), everybody)
    for turn, (listed, ranks) in enumerate(orders):
        half = [r for r in everybody if r % 2 == me % 2]
        # both halves may use the same identifier
        check(one.reconfigure(uuid + 2 * turn, [handles[r] for r in half]), half)
        check(one.reconfigure(uuid + 2 * turn + 1, listed, timedelta(seconds=30)), ranks)


@pytest.mark.parametrize("aborted", [False, True])
def test_reconfigure_fails_pending_calls_of_the_old_group(made, uuid, aborted):
    one, handles = made
    everybody = list(range(len(handles)))
    group = one.reconfigure(uuid, handles)
    check(group, everybody)
    pending = dist.irecv(np.zeros(1), group_src=0, group=group, tag=7)
    if aborted:
        lifecycle.abort(group)
    check(one.reconfigure(uuid + 1, handles), everybody)
    with pytest.raises(dist.DistBackendError, match="aborted"):
        pending.wait()
    with pytest.raises(dist.ArgumentError, match="destroyed"):
        dist.barrier(group)


@needs_2_ranks
def test_missing_member_times_out_and_is_named(made, uuid):
    """The other ranks can continue without it. Its late messages are ignored."""
    one, handles = made
    me, n = MPI.COMM_WORLD.rank, len(handles)
    everybody = list(range(n))
    group = one.reconfigure(uuid, handles)
    for turn, absent in enumerate((n - 1, 0)):
        if me != absent:
            words = rf"rank.*\b{absent}\b" if me == 0 or absent == 0 else "not all"
            with pytest.raises(dist.CollectiveTimeoutError, match=words):
                one.reconfigure(uuid + 1 + 10 * turn, handles, 0.5)
            assert one.group is group
        together()
        if me == absent:  # after the timeout
            with pytest.raises(dist.CollectiveTimeoutError):
                one.reconfigure(uuid + 1 + 10 * turn, handles, 0.2)
        together()
        check(group, everybody)  # the old group is still usable
        group = one.reconfigure(uuid + 5 + 10 * turn, handles)
        check(group, everybody)


def test_timeouts_are_consistent_across_members(made, uuid):
    """Ranks arrive while others time out: either all ranks succeed or none does."""
    one, handles = made
    me, n = MPI.COMM_WORLD.rank, len(handles)
    for turn in range(12):
        together()
        time.sleep(me * (0.04 + 0.01 * turn) if turn % 2 else (n - me) * (0.04 + 0.01 * turn))
        try:
            one.reconfigure(uuid + 2 * turn, handles, 0.1)
            went = True
        except dist.CollectiveTimeoutError:
            went = False
        assert len(set(MPI.COMM_WORLD.allgather(went))) == 1
        check(one.reconfigure(uuid + 2 * turn + 1, handles), list(range(n)))


def test_different_handles_are_a_mismatch(made, uuid):
    """The last rank passes another order. The first members, which coordinate, are the same."""
    one, handles = made
    n = len(handles)
    if n < 3:
        pytest.skip("needs 3 ranks")
    mine = handles if MPI.COMM_WORLD.rank != n - 1 else [handles[0], *handles[:0:-1]]
    with pytest.raises(dist.MismatchError, match="different handles"):
        one.reconfigure(uuid, mine, 10)
    check(one.reconfigure(uuid + 1, handles), list(range(n)))


def test_invalid_arguments_leave_the_identifier_unused(made, uuid):
    one, handles = made
    own = one.handle()
    one.reconfigure(uuid + MPI.COMM_WORLD.rank, [own])
    before = one.group
    for arguments, error, words in (
        ((uuid + MPI.COMM_WORLD.rank, [own]), dist.ArgumentError, "already used"),
        ((uuid + 50, []), dist.ArgumentError, "not among them"),
        ((uuid + 50, [own, own]), dist.ArgumentError, "each process once"),
        ((uuid + 50, [own, "mpicoll:0:0"]), dist.ArgumentError, "not a process of this job"),
        ((uuid + 50, own), dist.ArgumentTypeError, "list or a set"),
        (("a", [own]), dist.ArgumentTypeError, "uuid.*int"),
    ):
        with pytest.raises(error, match=words):
            one.reconfigure(*arguments)
    if len(handles) > 1:
        others = [h for h in handles if h != own]
        with pytest.raises(dist.ArgumentError, match="not among them"):
            one.reconfigure(uuid + 50, others)
    assert one.group is before
    one.reconfigure(uuid + 50 + MPI.COMM_WORLD.rank, [own])  # the identifier is still unused


def test_successive_groups_release_communicators(made):
    """MPICH supports 2048 communicators at a time, and a group uses two."""
    one, handles = made
    groups, threads = len(state.groups), threading.active_count()
    for i in range(1100):
        one.reconfigure(-1 - i, handles)
    check(one.group, list(range(len(handles))))
    assert len(state.groups) <= groups + 1 and threading.active_count() <= threads
