"""How a job ends of which calls on devices end without results, and nobody looks for them.

The devices are simulated, one for each rank, and calls go by the route ``peer``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_scripts import Ended, job, needs_mpiexec, run

pytest_plugins = ["whole_jobs"]

pytestmark = needs_mpiexec

__all__ = ["run"]  # for whole_jobs

#: What a script begins with: it has made a call.
BEGIN = f"""
    sys.path.insert(0, {str(Path(__file__).parent / "mpi")!r})
    import simulated
    from mpicoll.cuda import runtime
    from mpicoll.failures import consistency
    consistency.FIRST = 1  # from then on the hosts do not meet in each call
    arrays = simulated.Arrays(4)
    runtime._runtime = arrays.cuda
    os.environ["MPICOLL_CUDA_AWARE"] = "none"
    block = dist.init_process_group(timeout=$timeout)
    me = dist.get_rank()
    x = arrays.make(np.ones(10, np.float32), me)
    x.upload()
    dist.all_reduce(x)
    assert dist.group.WORLD.resources.find("devices").names[0] == "peer"
"""

WAITED = "rank 0's GPU has waited 4.0 s for rank 1's"


@pytest.mark.parametrize("timeout", [4])
@job(
    f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
    time.sleep(1000)
""",
    environment={"MPICOLL_TIMEOUT_GRACE": "1"},
)
def test_a_program_that_looks_for_nothing(timeout: int, ended: Ended) -> None:
    """The watchdog says what has happened, and ends it."""
    ended.badly(
        "all_reduce of 10 elements of float32, SUM", WAITED, "no call of this program has raised"
    )


@pytest.mark.parametrize("timeout", [4])
@job(
    f"""{BEGIN}
    if me == 0:
        work = dist.all_reduce(x, async_op=True)
        while work.exception() is None:
            time.sleep(0.1)
        say("heard:", work.exception())
    time.sleep(1000)
""",
    environment={"MPICOLL_TIMEOUT_GRACE": "1"},
)
def test_a_program_that_looks(timeout: int, ended: Ended) -> None:
    """It goes on as it likes; the rank that has not called, and looks for nothing, is ended."""
    ended.badly("no call of this program has raised")
    assert "heard: all_reduce of 10 elements" in ended.out and WAITED in ended.out


@pytest.mark.parametrize("timeout", [4])
@job(f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
    else:
        time.sleep(12)
""")
def test_a_program_that_ends(timeout: int, ended: Ended) -> None:
    """Without a look, and without an end of its groups: it waits for its device, and ends badly."""
    ended.badly(WAITED, "ending the job")


@pytest.mark.parametrize("timeout", [1000])
@job(f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
""")
def test_ranks_that_end_after_different_calls(timeout: int, ended: Ended) -> None:
    """Nobody waits for a kernel that waits for a rank that has ended."""
    ended.badly("rank 1 ended without making the last calls of this rank")


@pytest.mark.parametrize("timeout", [1000])
@job(f"""{BEGIN}
    if me == 0:
        dist.all_reduce(x)
        time.sleep(4)
        try:
            dist.barrier()
        except dist.DistBackendError as error:
            say("heard:", error)
    else:
        time.sleep(1)
        try:
            with block:
                raise KeyError
        except KeyError:
            time.sleep(6)
""")
def test_a_rank_that_leaves_its_block_by_an_exception(timeout: int, ended: Ended) -> None:
    """The others are told by their devices, and have the time to handle that."""
    assert "heard: group" in ended.out and "was aborted" in ended.out
    assert "ended without making" not in ended.out
