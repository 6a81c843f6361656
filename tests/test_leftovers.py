"""Pending work and resources when a program destroys its groups, finalizes MPI or ends."""

from __future__ import annotations

import pytest
from rank_scripts import HUNG, Ended, job

import mpicoll as dist
from mpicoll.core.work import Work

# --- pending work -------------------------------------------------------------------------------


@job("""
    dist.init_process_group()
    dist.all_reduce(np.ones(4), async_op=True)
    dist.isend(np.ones(3), 1 - dist.get_rank())
    dist.recv(np.ones(3))
    w = dist.all_reduce(np.ones(1 << 20), async_op=True)
    if dist.get_rank() == 0:
        time.sleep(1)
    say("done")
""", options=("-W", "error"))  # fmt: skip
def test_exit_completes_pending_work_of_all_ranks(ended: Ended) -> None:
    ended.in_good_order("done", "done")


@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        dist.all_reduce(np.ones(4), async_op=True)
        try:
            dist.destroy_process_group()
        except dist.CollectiveTimeoutError as error:
            say("pending:", "async work is still pending" in str(error))
            raise
    time.sleep(1000)
""")
def test_destroy_with_pending_work_times_out(ended: Ended) -> None:
    ended.badly("CollectiveTimeoutError", "another rank did not make the call")
    assert ended.lines == ["pending: True"]


@pytest.mark.parametrize("waits", [False, True])
@job("""
    dist.init_process_group()
    x = np.ones(4 if dist.get_rank() == 0 else 5)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    try:
        work.wait() if $waits else None
    except dist.MismatchError:
        say("caught")
    del work
    dist.destroy_process_group()
""", options=("-W", "error"))  # fmt: skip
def test_failed_work_is_printed_unless_the_program_waits(waits: bool, ended: Ended) -> None:
    assert ended.code == 0 and ended.lines == ["caught"] * 2 * waits, ended
    # Launchers may merge lines of two ranks.
    first, *messages = ended.err.split("wait() was not called for")
    assert len(messages) == (0 if waits else 2) and not (waits and first), ended
    assert all("4 elements" in one and "5 elements" in one for one in messages)
    for rank in range(0 if waits else 2):
        assert sum(f"all_reduce on rank {rank}" in one for one in messages) == 1


# --- destroy_process_group ----------------------------------------------------------------------


@job("""
    before = threading.enumerate()
    descriptors = None
    for i in range(3):
        dist.init_process_group(timeout=60)
        x = np.ones(4)
        g = dist.new_group([0, 1])
        for group in None, g:
            dist.all_reduce(x, group=group, async_op=True).wait()
        w = dist.isend(x, 1 - dist.get_rank())
        dist.irecv(np.zeros(4)).wait()
        w.wait()
        dist.irecv(np.zeros(4), tag=3)  # never matched
        assert len(threading.enumerate()) > len(before)
        dist.destroy_process_group()
        assert threading.enumerate() == before, threading.enumerate()
        assert dist.get_pg_count() == 0 and not dist.is_initialized()
        opened = sorted(os.listdir("/proc/self/fd"))
        if i:
            assert len(opened) == len(descriptors), (opened, descriptors)
        descriptors = opened
    assert signal.set_wakeup_fd(-1) == -1
    say("done")
""", options=("-W", "error"))  # fmt: skip
def test_destroy_stops_threads_and_closes_descriptors(ended: Ended) -> None:
    ended.in_good_order("done", "done")


# --- the program finalizes MPI itself -----------------------------------------------------------


@pytest.mark.parametrize("begin", ["from mpi4py import MPI", "pass"])
@job(
    """
    $begin
    def raises(call):
        error = error_of(dist.NotInitializedError, call)
        assert "finalized MPI" in str(error), error
    before = threading.enumerate()
    dist.init_process_group()
    from mpi4py import MPI
    rank = dist.get_rank()
    group, world = dist.new_group([0, 1]), dist.group.WORLD
    x = np.ones(1000)
    for one in (world, group):
        dist.all_reduce(x, group=one)
        work = dist.all_reduce(x, group=one, async_op=True)
        dist.irecv(np.zeros(4), tag=3, group=one)  # never matched
    work.wait()
    MPI.Finalize()
    assert threading.enumerate() == before, threading.enumerate()
    assert not dist.is_initialized()
    raises(dist.barrier)
    raises(dist.get_rank)
    raises(lambda: dist.all_reduce(x, group=group))
    raises(lambda: dist.all_reduce(x, group=world, async_op=True))
    raises(lambda: dist.barrier(group))
    raises(lambda: dist.isend(x, group_dst=1 - rank, group=group))
    raises(lambda: dist.recv(x, group_src=1 - rank, group=world))
    raises(lambda: dist.all_gather_object([None, None], 1, group=group))
    raises(lambda: dist.monitored_barrier(group))
    raises(dist.new_group)
    raises(dist.destroy_process_group)
    error = str(error_of(dist.LaunchError, dist.init_process_group))
    say("done", "MPI was finalized" in error)
""",
    options=("-W", "error"),
)
def test_calls_after_mpi_finalize_raise(begin: str, ended: Ended) -> None:
    ended.in_good_order(*["done True"] * 2)


@job("""
    dist.init_process_group()
    dist.barrier()
    from mpi4py import MPI
    MPI.Finalize()
    if dist.__name__ and sys.argv:
        raise ValueError("after MPI_Finalize")
""")
def test_exception_after_mpi_finalize(ended: Ended) -> None:
    assert ended.code == 1, ended
    assert "ValueError: after MPI_Finalize" in ended.err, ended
    assert "MPI_Abort" not in ended.err, ended


@job("""
    dist.init_process_group()
    dist.barrier()
    from mpi4py import MPI
    if dist.get_rank() == 0:
        MPI.Finalize()
    else:
        dist.all_reduce(np.ones(4))
""")
def test_mpi_finalize_while_another_rank_waits(ended: Ended) -> None:
    ended.badly("rank 0 ended without making this call")


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""], ids=["destroy", "nothing"])
@job("""
    from mpicoll.api.windows import Window
    dist.init_process_group()
    me = dist.get_rank()
    window, memory = Window(dist.group.WORLD), np.zeros(4)
    window.register(memory)
    window.put(np.full(4, 5.0), 1 - me, 0, False)
    window.signal(1 - me, False)
    window.wait_signal(1 - me, False)
    assert memory[3] == 5
    window.signal(1 - me, False)
    $end
    say("end")
""")
def test_program_ends_with_a_window(end: str, ended: Ended) -> None:
    """The MPI library may print that memory is in use, but no rank hangs or fails."""
    assert ended.code == 0 and ended.out.count("end\n") == 2, ended
    assert HUNG not in ended.err and "Traceback" not in ended.err, ended


@pytest.mark.any_mpi
def test_repeated_errors_of_works_are_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    for text in "it is closed", "it is closed", "another", "it is closed":
        Work("all_reduce", (), None).finish(dist.DistBackendError(text))
    found = [line.rpartition(": ")[2] for line in capfd.readouterr().err.splitlines()]
    assert found == ["it is closed", "another", "it is closed"]
