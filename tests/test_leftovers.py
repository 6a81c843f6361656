"""What is pending or left when a program destroys its groups, finalises MPI or just ends."""

from __future__ import annotations

import pytest
from rank_scripts import HUNG, Ended, job, needs_mpiexec, run

import mpicoll as dist
from mpicoll.core.work import Work

pytest_plugins = ["whole_jobs"]

pytestmark = needs_mpiexec

__all__ = ["run"]  # for whole_jobs


# --- work left over -----------------------------------------------------------------------------


@job("""
    dist.init_process_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(np.ones(4), async_op=True)
        sys.exit()
    time.sleep(1000)
""")
def test_pending_work_that_nobody_joins(ended: Ended) -> None:
    ended.badly()
    assert "ends with work pending that other ranks have not joined" in ended.out + ended.err


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
def test_pending_work_that_others_join_ends_in_good_order(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done"]


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
def test_destroy_with_pending_work_that_nobody_joins(ended: Ended) -> None:
    ended.badly("CollectiveTimeoutError", "another rank did not make the call")
    assert ended.lines == ["pending: True"]


@job("""
    dist.init_process_group()
    x = np.ones(4 if dist.get_rank() == 0 else 5)
    work = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.01)
    del work
    say("done")
    dist.destroy_process_group()
""")
def test_a_dropped_work_that_failed_is_printed(ended: Ended) -> None:
    assert ended.code == 0, ended
    assert ended.lines == ["done", "done"]
    # Launchers may put what two ranks write on one line.
    _, *said = ended.err.split("wait() was not called for")
    assert len(said) == 2, ended
    for rank in range(2):
        assert sum(f"all_reduce on rank {rank}" in one for one in said) == 1
    assert all("4 elements" in one and "5 elements" in one for one in said)


@job("""
    dist.init_process_group()
    x = np.ones(4 if dist.get_rank() == 0 else 5)
    work = dist.all_reduce(x, async_op=True)
    try:
        work.wait()
    except dist.MismatchError:
        say("caught")
    del work
    dist.destroy_process_group()
""", options=("-W", "error"))  # fmt: skip
def test_a_failed_work_that_was_waited_for_is_not_printed(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["caught", "caught"]


# --- nothing is left ----------------------------------------------------------------------------


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
        dist.irecv(np.zeros(4), tag=3)  # nobody sends it
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
def test_destroy_leaves_no_thread_and_no_descriptor(ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done", "done"]


@job("""
    def told(call):
        try:
            call()
        except dist.MpicollError as error:
            say(type(error).__name__, str(error))
    dist.init_process_group()
    told(dist.init_process_group)
    g, w = dist.new_group([0, 1]), dist.group.WORLD
    dist.destroy_process_group()
    told(dist.destroy_process_group)
    told(dist.barrier)
    told(lambda: dist.barrier(w))
    told(lambda: dist.all_reduce(np.ones(3), group=g))
    dist.init_process_group()
    told(lambda: dist.barrier(w))
    told(lambda: dist.send(np.ones(3), 1 - dist.get_rank(), group=g))
    dist.barrier()
    dist.destroy_process_group()
""")
def test_init_and_destroy_twice(ended: Ended) -> None:
    ended.in_good_order()
    expected = [
        *["ArgumentError init_process_group: the default process group exists already"] * 2,
        *["NotInitializedError there is no default process group; call init_process_group"] * 4,
        *["ArgumentError process group '0' was destroyed"] * 4,
        *["ArgumentError process group '1' was destroyed"] * 4,
    ]
    assert len(ended.lines) == len(expected), ended
    for line, word in zip(ended.lines, sorted(expected), strict=True):
        assert line.startswith(word)


# --- the program finalises MPI itself -----------------------------------------------------------


@pytest.mark.parametrize("begin", ["from mpi4py import MPI", "pass"])
@job(
    """
    $begin
    def told(call):
        try:
            call()
        except dist.NotInitializedError as error:
            assert "finalized MPI" in str(error), error
        else:
            say("no error")
    before = threading.enumerate()
    dist.init_process_group()
    from mpi4py import MPI
    rank = dist.get_rank()
    group, world = dist.new_group([0, 1]), dist.group.WORLD
    x = np.ones(1000)
    for one in (world, group):
        dist.all_reduce(x, group=one)
        work = dist.all_reduce(x, group=one, async_op=True)
        dist.irecv(np.zeros(4), tag=3, group=one)  # nobody sends it
    work.wait()
    MPI.Finalize()
    assert threading.enumerate() == before, threading.enumerate()
    assert not dist.is_initialized()
    told(dist.barrier)
    told(dist.get_rank)
    told(lambda: dist.all_reduce(x, group=group))
    told(lambda: dist.all_reduce(x, group=world, async_op=True))
    told(lambda: dist.barrier(group))
    told(lambda: dist.isend(x, group_dst=1 - rank, group=group))
    told(lambda: dist.recv(x, group_src=1 - rank, group=world))
    told(lambda: dist.all_gather_object([None, None], 1, group=group))
    told(lambda: dist.monitored_barrier(group))
    told(dist.new_group)
    told(dist.destroy_process_group)
    try:
        dist.init_process_group()
    except dist.LaunchError as error:
        say("done", "MPI was finalized" in str(error))
""",
    options=("-W", "error"),
)
def test_a_finalize_of_the_program(begin: str, ended: Ended) -> None:
    ended.in_good_order()
    assert ended.lines == ["done True"] * 2


@job("""
    dist.init_process_group()
    dist.barrier()
    from mpi4py import MPI
    MPI.Finalize()
    if dist.__name__ and sys.argv:
        raise ValueError("own words")
""")
def test_an_exception_after_the_program_has_finalized_mpi(ended: Ended) -> None:
    assert ended.code == 1, ended
    assert "ValueError: own words" in ended.err and "MPI_Abort" not in ended.err, ended


@job("""
    dist.init_process_group()
    dist.barrier()
    from mpi4py import MPI
    if dist.get_rank() == 0:
        MPI.Finalize()
    else:
        dist.all_reduce(np.ones(4))
""")
def test_a_finalize_while_another_rank_waits(ended: Ended) -> None:
    ended.badly("rank 0 ended without making this call")


# --- windows --------------------------------------------------------------------------------------

#: How a rank leaves a window in which memory is registered.
LEAVING = {
    "destroy": "dist.destroy_process_group()",
    "nothing": "",
    "abort": "waiting = window.wait_signal(1 - me, True); lifecycle.abort(dist.group.WORLD)",
}


@pytest.mark.parametrize("leaving", LEAVING.values(), ids=list(LEAVING))
@job("""
    from mpicoll.api import lifecycle
    from mpicoll.api.windows import Window
    dist.init_process_group()
    me = dist.get_rank()
    window, memory = Window(dist.group.WORLD), np.zeros(4)
    window.register(memory)
    window.put(np.full(4, 5.0), 1 - me, 0, False)
    window.signal(1 - me, False)
    window.wait_signal(1 - me, False)
    assert memory[3] == 5
    window.signal(1 - me, False) if "abandon" not in '''$leaving''' else None
    $leaving
    say("end")
""")
def test_windows_at_the_end(leaving: str, ended: Ended) -> None:
    """The MPI library may say that memory is in use; nobody hangs or fails."""
    assert ended.code == 0 and ended.out.count("end\n") == 2, ended
    assert HUNG not in ended.err and "Traceback" not in ended.err, ended


@pytest.mark.any_mpi
def test_works_that_fail_alike_are_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    errors = "it is closed", "it is closed", "it is closed", "another", "it is closed"
    for each in errors:
        Work("all_reduce", (), None).finish(dist.DistBackendError(each))
    for _ in range(2):
        Work("all_reduce", (), None).finish(ValueError("it is closed"))
    found = capfd.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in found] == [
        "it is closed", "another", "it is closed", "it is closed", "it is closed",
    ]  # fmt: skip
