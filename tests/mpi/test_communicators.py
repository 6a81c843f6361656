"""Interoperability with mpi4py: communicators, operations and scalars of MPI programs."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
from conftest import needs_2_ranks
from mpi4py import MPI

import mpicoll as dist
from mpicoll.launch import world as launch_world

TIMEOUT = 60


@pytest.fixture
def ended():
    """Destroy all groups after each test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


pytestmark = pytest.mark.usefixtures("ended")


@pytest.fixture
def world():
    dist.init_process_group(timeout=TIMEOUT)


@pytest.fixture(params=["many threads", "one lock"])
def threads(request, monkeypatch):
    if request.param == "one lock":
        monkeypatch.setattr(launch_world, "_is_thread_multiple", lambda *_: False)


def halves(mpi):
    """Even and odd ranks, in descending order."""
    return mpi.Split(mpi.rank % 2, -mpi.rank)


COMMUNICATORS = {
    "world": lambda mpi: mpi,
    "duplicate": lambda mpi: mpi.Dup(),
    "reversed": lambda mpi: mpi.Split(0, -mpi.rank),
    "halves": halves,
    "self": lambda mpi: MPI.COMM_SELF,
    "grid": lambda mpi: mpi.Create_cart([mpi.size], periods=[True]),
    "plain class": lambda mpi: MPI.Comm(mpi.Dup()),
}


def free(comm):
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Free()


def total(group=None, times=1):
    """The sum of 2**(rank in MPI_COMM_WORLD) over a group, computed by mpicoll."""
    for _ in range(times):
        x = np.array([2.0**MPI.COMM_WORLD.rank])
        dist.all_reduce(x, group=group)
    return x[0]


def expected(comm):
    """The same sum computed by mpi4py."""
    return comm.allreduce(2.0**MPI.COMM_WORLD.rank)


@pytest.mark.parametrize("kind", COMMUNICATORS)
def test_init_uses_the_ranks_of_the_communicator(kind, mpi, threads):
    comm = COMMUNICATORS[kind](mpi)
    dist.init_process_group(comm=comm, timeout=TIMEOUT)
    assert (dist.get_rank(), dist.get_world_size()) == (comm.Get_rank(), comm.Get_size())
    assert dist.get_process_group_ranks(None) == list(range(comm.Get_size()))
    assert dist.group.WORLD.comm == comm
    # Subsets of the job may make different numbers of calls.
    assert total(times=1 + (kind == "halves") * 3 * (mpi.rank % 2)) == MPI.Intracomm(
        comm
    ).allreduce(2.0**mpi.rank)
    everybody = [None] * comm.Get_size()
    dist.all_gather_object(everybody, comm.Get_rank())
    assert everybody == list(range(comm.Get_size()))
    group = dist.new_group(list(range(comm.Get_size()))[::-1], sort_ranks=False)
    assert isinstance(group.comm, MPI.Intracomm)  # also without MPI_THREAD_MULTIPLE
    assert dist.get_rank(group) == comm.Get_size() - 1 - comm.Get_rank()
    dist.barrier(group)
    dist.destroy_process_group()
    # the communicator still belongs to the program
    assert MPI.Intracomm(comm).allreduce(1) == comm.Get_size()
    free(comm)


def test_rank_and_world_size_must_agree_with_comm(mpi):
    comm = halves(mpi)
    given = {"comm": comm, "timeout": TIMEOUT}
    for wrong in ({"rank": comm.size}, {"world_size": comm.size + 1}):
        with pytest.raises(dist.LaunchError, match=r"disagrees with comm's own"):
            dist.init_process_group(**given, **wrong)
    for method in ("env://", "tcp://localhost:1234", "file:///tmp/x"):
        with pytest.raises(ValueError, match=r"init_method: expected None or"):
            dist.init_process_group(init_method=method, **given)
    dist.init_process_group("gloo", "mpi://", rank=comm.rank, world_size=comm.size, **given)
    assert total() == expected(comm)
    comm.Free()  # freed early by the program; mpicoll keeps a duplicate
    assert total() > 0
    dist.destroy_process_group()


def test_rank_variables_are_set_only_for_the_whole_job(mpi, monkeypatch):
    import os

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    comm = mpi.Split(0, -mpi.rank)
    dist.init_process_group(comm=comm, timeout=TIMEOUT)
    assert ("RANK" in os.environ) is (mpi.size == 1)
    dist.destroy_process_group()
    comm.Free()
    comm = mpi.Dup()
    dist.init_process_group(comm=comm, timeout=TIMEOUT)
    assert os.environ["RANK"] == str(mpi.rank)
    dist.destroy_process_group()
    comm.Free()


@contextmanager
def undisturbed(comm):
    """Receive any message. The receive stays pending in the block; then a neighbor sends."""
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    box, mine = np.zeros(1, np.int64), MPI.COMM_WORLD.rank
    receive = comm.Irecv(box, MPI.ANY_SOURCE, MPI.ANY_TAG)
    yield
    assert not receive.Test()
    MPI.COMM_WORLD.Barrier()
    comm.Send(np.array([mine]), ahead, 7)
    receive.Wait()
    assert box[0] == comm.sendrecv(mine, ahead, 1, None, behind, 1)


def use_all(group=None):
    """Call several operations, with sizes that select different routes."""
    n, me = dist.get_world_size(group), dist.get_rank(group)
    for count in (1, 1 << 10, 1 << 18):
        x = np.full(count, me, np.float32)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
        dist.broadcast(x, group_src=n - 1, group=group)
    dist.all_gather_object([None] * n, "words", group)
    dist.barrier(group)
    if n > 1:
        send = dist.isend(x, group=group, group_dst=(me + 1) % n, tag=3)
        dist.recv(x, group=group, group_src=(me - 1) % n, tag=3)
        send.wait()


def test_messages_of_the_program_and_mpicoll_are_separate(mpi):
    comm = halves(mpi)
    with undisturbed(comm):
        dist.init_process_group(comm=comm, timeout=TIMEOUT)
        use_all()
        group = dist.new_group(comm)
        use_all(group)
        dist.destroy_process_group()
    comm.Free()


def test_hints_and_attributes_are_not_copied(mpi):
    """Copied hints would bind mpicoll; copied attributes would run callbacks of the program."""
    copied = []
    key = MPI.Comm.Create_keyval(copy_fn=lambda comm, key, value: copied.append(value))
    comm = mpi.Dup()
    comm.Set_attr(key, "mine")
    comm.Set_info(MPI.Info.Create({"mpi_assert_no_any_source": "true"}))
    dist.init_process_group(comm=comm, timeout=TIMEOUT)
    group = dist.new_group(comm)
    assert total(group) == 2**mpi.size - 1
    hints = dist.group.WORLD.messages.Get_info()
    assert hints.Get("mpi_assert_no_any_source") != "true"
    assert copied == []
    dist.destroy_process_group()
    comm.Free()
    MPI.Comm.Free_keyval(key)


def freed(mpi):
    comm = mpi.Dup()
    comm.Free()
    return comm


@pytest.mark.parametrize(
    ("made", "words"),
    [(lambda mpi: mpi.Split(MPI.UNDEFINED), r"MPI\.COMM_NULL"), (freed, "was freed")],
)
def test_freed_and_null_communicators_are_rejected(made, words, mpi):
    comm = made(mpi)
    if mpi.rank == 0:  # no data is sent
        with pytest.raises(ValueError, match=f"^init_process_group: comm: .*{words}"):
            dist.init_process_group(comm=comm, timeout=TIMEOUT)
    dist.init_process_group(timeout=TIMEOUT)
    if mpi.rank == 0:
        with pytest.raises(ValueError, match=f"^new_group: ranks: .*{words}"):
            dist.new_group(comm)
    assert total() == 2**mpi.size - 1


@pytest.mark.parametrize("wrong", [3, "world", [0], MPI.GROUP_EMPTY, MPI, MPI.Comm])
def test_init_rejects_objects_that_are_not_communicators(wrong):
    with pytest.raises(
        TypeError, match=r"^init_process_group: comm: expected an intra-communicator"
    ):
        dist.init_process_group(comm=wrong)
    assert not dist.is_initialized()


@needs_2_ranks
def test_inter_communicators_are_rejected(mpi):
    own = mpi.Split(mpi.rank % 2)
    between = own.Create_intercomm(0, mpi, 1 - mpi.rank % 2)
    if mpi.rank == 0:
        with pytest.raises(ValueError, match=r"comm: expected an intra-communicator.*Merge"):
            dist.init_process_group(comm=between)
    merged = between.Merge()
    with dist.init_process_group(comm=merged, timeout=TIMEOUT):
        assert total() == expected(mpi)
        if mpi.rank == 0:
            with pytest.raises(ValueError, match=r"ranks: expected an intra-communicator"):
                dist.new_group(between)
    for comm in (between, own, merged):
        comm.Free()


@needs_2_ranks
def test_new_group_rejects_communicators_with_ranks_outside_the_job(mpi):
    comm = halves(mpi)
    outside = [rank for rank in range(mpi.size) if rank % 2 != mpi.rank % 2]
    some = ", ".join(map(str, outside))
    with dist.init_process_group(comm=comm, timeout=TIMEOUT):
        with pytest.raises(ValueError, match=f"ranks? {some} of the communicator are not in"):
            dist.new_group(mpi)
        assert total() == expected(comm)
    comm.Free()


@pytest.mark.parametrize("kind", COMMUNICATORS)
def test_new_group_accepts_a_communicator(kind, mpi, world, threads):
    comm = COMMUNICATORS[kind](mpi)
    for _ in range(2):
        group = dist.new_group(comm, timeout=33, backend="gloo", group_desc="mine")
        assert (group.rank(), group.size()) == (comm.Get_rank(), comm.Get_size())
        ranks = MPI.Intracomm(comm).allgather(mpi.rank)
        assert dist.get_process_group_ranks(group) == ranks
        assert (group.timeout, dist.get_backend(group), group.group_desc) == (33, "gloo", "mine")
        assert total(group) == sum(2.0**rank for rank in ranks)
        assert group.comm == comm
        assert group.comm is comm or kind == "plain class"
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="was destroyed"):
            group.comm  # noqa: B018
    assert MPI.Intracomm(comm).allreduce(1) == comm.Get_size()
    free(comm)


def test_new_group_with_a_communicator_is_called_by_members_only(mpi, world):
    """Other ranks create no group meanwhile."""
    if mpi.rank < max(1, mpi.size - 1):
        comm = mpi.Create_group(mpi.group.Incl(range(max(1, mpi.size - 1))))
        first, second = dist.new_group(comm), dist.new_group(comm)
        assert first.group_name != second.group_name
        assert total(first) == total(second) == 2.0**comm.size - 1
        comm.Free()
    group = dist.new_group()
    assert total(group) == 2.0**mpi.size - 1


def test_group_comm_is_a_communicator_of_the_group(mpi, world):
    assert dist.group.WORLD.comm == MPI.COMM_WORLD
    ranks = list(range(mpi.size))[::-1]
    group = dist.new_group(ranks, sort_ranks=False)
    work = dist.all_reduce(np.ones(1 << 16), group=group, async_op=True)
    comm = group.comm  # waits for the pending call
    work.wait()
    assert group.comm == comm
    assert comm.allgather(mpi.rank) == ranks
    with undisturbed(comm):
        use_all(group)
    again = dist.new_group(comm)
    assert again.comm == comm and total(again) == 2.0**mpi.size - 1
    dist.destroy_process_group(group)
    assert comm == MPI.COMM_NULL  # freed with the group


def test_communicators_are_freed_with_their_groups(mpi, world):
    """MPICH supports 2048 communicators at a time, and a group uses two more than its own."""
    destroyed = []
    for number in range(1100):
        group = dist.new_group()
        assert group.comm.Get_size() == mpi.size
        if number % 7 == 0:
            group.comm.Free()  # the program is allowed to free it
        if number % 20 == 0:  # may start the progress thread
            dist.all_reduce(np.ones(4), group=group, async_op=True).wait()
        destroyed.append(weakref.ref(group))
        dist.destroy_process_group(group)
    del group
    gc.collect()
    # mpicoll's own threads may still refer to a group.
    assert sum(ref() is not None for ref in destroyed) < 5
    assert total() == 2.0**mpi.size - 1


OPERATIONS = {
    "SUM": np.sum, "PROD": np.prod, "MAX": np.max, "MIN": np.min, "BAND": np.bitwise_and.reduce,
    "BOR": np.bitwise_or.reduce, "BXOR": np.bitwise_xor.reduce,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_mpi_operations_are_accepted(name, mpi, world):
    op, n = getattr(MPI, name), mpi.size
    every = np.array([[rank + 1, 6 - rank, 12] for rank in range(n)])
    total = OPERATIONS[name](every, axis=0).tolist()
    x, y, *several = (every[mpi.rank].copy() for _ in range(4))
    dist.all_reduce(x, op)
    dist.all_reduce(y, op, async_op=True).wait()
    dist.all_reduce_coalesced(several, op)
    assert [one.tolist() for one in (x, y, *several)] == [total] * 4


def test_other_operations_are_rejected(world, mpi):
    own = MPI.Op.Create(lambda a, b, kind: None)
    names = "LAND", "LOR", "LXOR", "MAXLOC", "MINLOC", "REPLACE", "NO_OP", "OP_NULL"
    others = [own, *(getattr(MPI, name) for name in names)]
    if mpi.rank == 0:  # no data is sent
        for wrong in (*others, [dist.ReduceOp.SUM], "sum", np.ones(1)):
            words = f"all_reduce: op: expected a .*ReduceOp.SUM, .*got {type(wrong).__name__}"
            with pytest.raises(TypeError, match=words):
                dist.all_reduce(np.ones(2), wrong)
        with pytest.raises(TypeError, match=r"all_reduce: op: .*such as MPI\.SUM, got Op"):
            dist.all_reduce_coalesced([np.ones(2)], own)
        with pytest.raises(ValueError, match="BAND is not supported for float64"):
            dist.all_reduce(np.ones(2), MPI.BAND)
    own.Free()
    assert total() == 2.0**mpi.size - 1


@pytest.mark.parametrize("early", [False, True])
def test_with_block_destroys_all_groups(mpi, early):
    """The next default group may have the same name."""
    for _ in range(2):
        with dist.init_process_group(group_name="1", timeout=TIMEOUT) as group:
            assert group is dist.group.WORLD
            assert total(dist.new_group()) == total() == expected(mpi)
            assert dist.get_pg_count() == 2
            if early:
                dist.destroy_process_group()
        assert not dist.is_initialized() and dist.get_pg_count() == 0


def test_exception_in_a_with_block_propagates_unchanged(mpi):
    """All groups are destroyed, with or without pending calls."""
    mine = KeyError("mine")
    for pending in (False, True):
        with pytest.raises(KeyError) as caught, dist.init_process_group(timeout=TIMEOUT) as group:
            if pending:
                work = dist.all_reduce(np.ones(4), async_op=True)
            raise mine
        assert caught.value is mine and mine.__context__ is None
        assert not dist.is_initialized() and group.closed
        assert not pending or work.wait()
        mpi.Barrier()
    with dist.init_process_group(timeout=TIMEOUT):
        assert total() == expected(mpi)


@pytest.mark.parametrize("name", ["mpicoll", "MPICOLL", "cpu:mpicoll,cuda:mpicoll", "cpu:mpicoll"])
def test_mpicoll_is_a_backend_name(name, mpi):
    assert dist.is_backend_available("mpicoll") and dist.is_backend_available("MPIcoll")
    with dist.init_process_group(name, timeout=TIMEOUT):
        assert dist.get_backend() == name.lower()
        assert isinstance(dist.get_backend(), dist.Backend)
        config = name if ":" in name else "cpu:mpicoll,cuda:mpicoll"
        assert dist.get_backend_config() == config
        assert dist.get_backend(dist.new_group(backend="mpicoll")) == dist.Backend.MPICOLL
        assert total() == expected(mpi)
    with pytest.raises(ValueError, match="'cpu:mpicol' is not available; expected mpi or mpicoll"):
        dist.init_process_group("cpu:mpicol")
