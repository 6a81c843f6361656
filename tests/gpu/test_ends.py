"""End of jobs whose device calls time out or lose a rank, if the program does not wait for results.

Each rank has its own GPU and uses route ``peer``.
"""

from __future__ import annotations

import pytest
from machine import find_gpus
from rank_scripts import Ended, job

pytestmark = pytest.mark.skipif(find_gpus()[0] < 2, reason="needs two GPUs")

#: Start of each script, with one successful call.
BEGIN = """
    import cupy
    from mpicoll.cuda import binding
    from mpicoll.failures import consistency
    consistency.FIRST = 1  # later calls are not compared
    block = dist.init_process_group(timeout=$timeout)
    me = dist.get_rank()
    binding.bind()
    x = cupy.ones(10, cupy.float32)
    dist.all_reduce(x)
    assert dist.group.WORLD.resources.find("devices").names[0] == "peer"
"""

WAITED = "rank 0's GPU has waited 4.0 s for rank 1's"


@job(
    f"""{BEGIN}
    if me == 0:
        work = dist.all_reduce(x, async_op=True)
        while work.exception() is None:
            time.sleep(0.1)
        say("error:", work.exception())
    time.sleep(1000)
""",
    {"timeout": 4},
    environment={"MPICOLL_TIMEOUT_GRACE": "1"},
)
def test_watchdog_aborts_a_rank_that_does_not_observe_the_timeout(ended: Ended) -> None:
    """Rank 0 gets the error from its Work and continues. Rank 1 does not and is aborted."""
    ended.badly("no call of this program has raised")
    assert "error: all_reduce of 10 elements" in ended.out and WAITED in ended.out


@job(f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
    else:
        time.sleep(12)
""", {"timeout": 4})  # fmt: skip
def test_exit_waits_for_the_device_and_reports_the_timeout(ended: Ended) -> None:
    ended.badly(WAITED, "ending the job")


@job(f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
""", {"timeout": 1000})  # fmt: skip
def test_exit_after_different_calls_fails_at_once(ended: Ended) -> None:
    """Exit does not wait for a kernel that waits for an exited rank."""
    ended.badly("rank 1 ended without making the last calls of this rank")


@job(f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
        time.sleep(4)
        try:
            dist.barrier()
        except dist.DistBackendError as error:
            say("error:", error)
    else:
        time.sleep(1)
        try:
            with block:
                raise KeyError
        except KeyError:
            time.sleep(6)
""", {"timeout": 1000})  # fmt: skip
def test_exception_in_the_with_block_aborts_the_group(ended: Ended) -> None:
    """The other ranks get the error from their devices and can handle it."""
    assert "error: group" in ended.out and "was aborted" in ended.out
    assert "ended without making" not in ended.out
