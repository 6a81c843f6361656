"""Ends of jobs without an MPI launcher: exits, exceptions, lost ranks, and a stopped server."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from launch_jobs import LIMIT, PROCESSES, Ended, job
from whole_jobs import assert_processes_end

pytestmark = pytest.mark.waits


@job("""
    dist.init_process_group()
    say(total(1))
    $end
""", ranks=(0, 1, 2))  # fmt: skip
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "time.sleep(dist.get_rank())",
        "dist.destroy_process_group(); os._exit(0)",
        "rank = dist.get_rank(); dist.destroy_process_group(); time.sleep(2 - rank)",
        "os.fork() or os._exit(0)",
    ],
)
def test_ranks_exit_successfully(end: str, ended: Ended) -> None:
    ended.in_good_order(*["3.0"] * 3)


@job("""
    from mpicoll.launch import world
    start = world.initialize
    def initialize(mpi):
        if os.environ["RANK"] == "1":
            time.sleep(1)
            os._exit(3)
        start(mpi)
    world.initialize = initialize
    dist.init_process_group()
    say("not reached")
""", ranks=(0, 1, 2))  # fmt: skip
def test_lost_rank_ends_ranks_inside_mpi_init(ended: Ended) -> None:
    ended.with_codes(-signal.SIGIO, 3, -signal.SIGIO)
    assert ended.seconds < LIMIT / 2


@job("""
    import threading
    from mpicoll.launch import joining
    os.environ["MASTER_PORT"] = "$PORT"
    def die(*args):  # after the server has started
        os._exit(0)
    joining._connect = die
    dist.init_process_group()
""", ranks=(0,), size=2)  # fmt: skip
def test_server_ends_if_rank_0_dies_before_it_connects(ended: Ended) -> None:
    assert_processes_end(f"TEST_MPICOLL_FOLDER={ended.folder}\0")


#: How a rank fails, its exit code, the exit code of the other ranks, and their message.
FAILURES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", -9, 1, "rank 1 of 3 was lost"),
    "_exit": ("os._exit(0)", 0, 1, "rank 1 of 3 was lost"),
    "exception": ("1 / 0", 1, 1, "rank 1 of 3 ended the job with exit code 1"),
    "exit": ("sys.exit(73)", 73, 73, "rank 1 of 3 ended the job with exit code 73"),
    "abort": (
        "from mpi4py import MPI; MPI.COMM_WORLD.Abort(9); time.sleep(100)", 9, 9,
        "rank 1 of 3 ended the job with exit code 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("end", "own", "others", "words"), FAILURES.values(), ids=list(FAILURES))
@job("""
    before = sys.excepthook
    dist.init_process_group()
    dist.destroy_process_group()
    assert sys.excepthook == before
    dist.init_process_group()
    total(1)
    if dist.get_rank() == 1:
        child = os.fork()  # must not keep the connections open
        if child == 0:
            time.sleep(100)
        with open("$FOLDER/child", "w") as file:
            file.write(str(child))
        say(time.time())
        $end
    if dist.get_rank() == 2:
        time.sleep(100)  # in Python
    dist.barrier()  # in MPI
    say("not reached")
""", ranks=(0, 1, 2))  # fmt: skip
def test_failed_rank_ends_the_job(
    end: str, own: int, others: int, words: str, ended: Ended
) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int((ended.folder / "child").read_text()), signal.SIGKILL)
    ended.with_codes(others, own, others)
    for rank in 0, 2:
        assert f"rank {rank}: {words}" in ended.err, ended
    assert ended.err.count("Traceback") == ("1 / 0" in end), ended
    last_output = max((ended.folder / name).stat().st_mtime for name in ("err-0", "err-2"))
    assert last_output - float(ended.lines[0]) < 5 and len(ended.lines) == 1, ended


@job("""
    dist.init_process_group()
    dist.destroy_process_group()
    if os.environ["RANK"] == "1":
        os._exit(0)
    time.sleep(1)
    dist.init_process_group()
    say("not reached")
""")
def test_second_init_without_an_ended_rank_raises(ended: Ended) -> None:
    ended.with_codes(1, 0)
    assert "rank 0: rank 1 of 2 was lost" in ended.err or "rank 0 of 2: rank 1" in ended.err
    assert ended.out == ""


@job(PROCESSES + """
    signal.signal(signal.SIGTERM, lambda *args: say("saves"))
    dist.init_process_group()
    total(1)
    if dist.get_rank() == 0:
        before = processes()
        say(*sorted(before.values()))
        for number in signal.SIGUSR1, signal.SIGTERM:
            for pid in before:
                os.kill(pid, number)
        time.sleep(1)
        say(processes() == before)
    dist.barrier()
    dist.destroy_process_group()
""")  # fmt: skip
def test_server_and_node_monitor_ignore_scheduler_signals(ended: Ended) -> None:
    """Slurm signals every process of a job. The ranks handle the signal and continue."""
    ended.printed("True", "node_monitor.py script.py script.py server.py", "saves", "saves")
