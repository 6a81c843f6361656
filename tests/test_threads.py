"""Threads of mpicoll and of the program in MPI, with and without MPI_THREAD_MULTIPLE."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rank_scripts import Ended, job

import mpicoll
from mpicoll import serialized_mpi

SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}


@pytest.mark.parametrize("level", ["serialized", "multiple"])
@job("""
    import mpi4py
    mpi4py.rc.thread_level = "$level"
    dist.init_process_group(timeout=60)
    from mpi4py import MPI
    rank = dist.get_rank()
    peer = 1 - rank
    one, two = dist.new_group([0, 1]), dist.new_group([1, 0], sort_ranks=False)
    for i in range(30):
        x, y, z = np.full(1000, rank + 1.0), np.full(1000, rank + 1.0), np.zeros(1000)
        first, second = (one, two) if rank == 0 else (two, one)
        works = [
            dist.all_reduce(x if group is one else y, group=group, async_op=True)
            for group in (first, second)
        ]
        works += [dist.irecv(z, peer, tag=i), dist.isend(np.full(1000, i + 0.0), peer, tag=i)]
        objects = [None, None]
        dist.all_gather_object(objects, (rank, i))
        for work in works:
            work.wait()
        assert (x == 3).all() and (y == 3).all() and (z == i).all()
        assert objects == [(0, i), (1, i)]
        dist.send(z, peer) if rank == 0 else dist.recv(z, peer)
        dist.monitored_barrier(timeout=30)
    say("done", MPI.Query_thread() in (MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE))
    dist.destroy_process_group()
""")
def test_concurrent_work_of_several_groups(level: str, ended: Ended) -> None:
    ended.printed(*["done True"] * 2)
    warned = ended.err.count("before the program calls MPI itself")
    assert warned == (level == "serialized"), ended


@job(
    """
    from mpi4py import MPI
    from mpicoll.failures import rank_status, watchdog
    watchdog._CHECK_INTERVAL_S = watchdog._RECEIVE_INTERVAL_S = 0.01
    receive, calls = rank_status.receive, []
    def counted(group):
        calls.append(threading.current_thread().name)
        receive(group)
    rank_status.receive = counted
    dist.init_process_group(timeout=60)
    rank, x = dist.get_rank(), np.full(1000, 1.0)
    for _ in range(100):  # calls of MPI by the program, after mpicoll's synchronous calls
        dist.all_reduce(x)
        dist.reduce_scatter_single(np.zeros(500), x)
        calls.clear()
        time.sleep(0.002)
        if rank == 0:
            MPI.COMM_WORLD.Send(x, 1)
        else:
            MPI.COMM_WORLD.Recv(x, 0)
        x[:] = 1
    calls.clear()
    time.sleep(0.3)
    say("done", bool(calls))
    dist.destroy_process_group()
""",
    environment=SERIALIZED | {"MPICOLL_SHARED_MEMORY": "0"},
)
def test_watchdog_does_not_call_serialized_mpi_for_idle_groups(ended: Ended) -> None:
    ended.in_good_order(*["done False"] * 2)


@job("""
    from mpi4py import MPI
    say("level", MPI.Query_thread() == MPI.THREAD_SERIALIZED)
    dist.init_process_group(timeout=60)
    rank = dist.get_rank()
    g = dist.new_group([0, 1])
    x, y = np.ones(1 << 18), np.ones(1 << 18)
    # Rank 0 waits for a message while its collectives are pending. If it waited under the lock, the
    # collectives, and so the message, could not complete.
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=g, async_op=True)]
    if rank == 0:
        dist.recv(np.zeros(3), 1)
    for work in works:
        work.wait()
    if rank == 1:
        dist.send(np.ones(3), 0)
    dist.all_reduce(x)
    say("done", x[0], y[0])
    dist.destroy_process_group()
""", environment=SERIALIZED)  # fmt: skip
def test_waiting_receive_does_not_hold_the_lock(ended: Ended) -> None:
    assert ended.code == 0, ended
    done = [line for line in ended.lines if line.startswith("done")]
    assert done == ["done 4.0 2.0"] * 2, ended


@job("""
    dist.init_process_group(timeout=20)
    rank = dist.get_rank()
    x, y = np.ones(2000, np.float32), np.zeros(1000, np.float32)
    for _ in range(70):  # the first 64 calls are compared by a call that does not hold the lock
        dist.reduce_scatter_single(y, x)
    if rank == 0:
        work = dist.reduce_scatter_single(y, x, async_op=True)
        time.sleep(0.2)
        dist.send(x, 1)
        work.wait()
    else:
        dist.recv(x, 0)
        dist.reduce_scatter_single(y, x)
    say("done", y[0])
    dist.destroy_process_group()
""", environment=SERIALIZED)  # fmt: skip
def test_waiting_collective_does_not_hold_the_lock(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert [line for line in ended.lines if line.startswith("done")] == ["done 2.0"] * 2, ended


@pytest.mark.parametrize("level", ["serialized", "multiple"])
@job("""
    import mpi4py
    mpi4py.rc.thread_level = "$level"
    from mpicoll.api.windows import Window
    dist.init_process_group(timeout=15)
    rank, world = dist.get_rank(), dist.group.WORLD
    busy, x = dist.new_group(), np.empty(1 << 18, np.float32)
    window = Window(world)
    made = [dist.new_group() for _ in range(2)]
    steps = [
        lambda: Window(world),
        lambda: dist.new_group(),
        lambda: dist.new_group([1, 0], use_local_synchronization=True),
        lambda: dist.split_group(world, [[0, 1]]),
        lambda: world.comm,
        lambda: window.register(np.zeros(100)),
        lambda: window.deregister(),
        lambda: dist.destroy_process_group(made.pop()),
    ]
    for first in range(2):
        for step in steps:
            x[:] = 1
            work = dist.all_reduce(x, group=busy, async_op=True)
            if rank == first:  # the other rank has to progress the work during its step
                work.wait()
            step()
            work.wait()
            assert (x == 2).all()
    say("done")
    dist.destroy_process_group()
""", environment={"MPICOLL_SHARED_MEMORY": "0", "MPICOLL_TESTED_CALLS": "1"})  # fmt: skip
def test_group_and_window_creation_do_not_hold_the_lock(level: str, ended: Ended) -> None:
    ended.printed(*["done"] * 2)


@job("""
    dist.init_process_group(timeout=15)
    parents = [dist.new_group() for _ in range(3)]
    def split(parent):
        for i in range(10):
            made = dist.split_group(parent, [[0, 1]])
            dist.barrier(made)
            dist.destroy_process_group(made)
    threads = [threading.Thread(target=split, args=(one,)) for one in parents]
    for thread in threads if dist.get_rank() == 0 else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    say("done")
    dist.destroy_process_group()
""", environment=SERIALIZED)  # fmt: skip
def test_threads_create_groups_in_different_orders(ended: Ended) -> None:
    ended.printed(*["done"] * 2)


def test_serialized_communicator_has_every_method_in_use() -> None:
    called = {
        name
        for path in Path(mpicoll.__file__).parent.rglob("*.py")
        for name in re.findall(
            r"\b(?:inner|tested|messages|comm|_comm|world)\.([A-Z]\w+)\(", path.read_text("utf-8")
        )
    }
    # Constructors, and methods of other communicators.
    unwrapped = {"Abort", "Get_parent", "Is_inter", "Merge", "Create_group", "Get_remote_size"}
    known = serialized_mpi._Communicator.local | set(dir(serialized_mpi._Communicator))
    assert called - unwrapped <= known
