"""Programs with Horovod's functions that end, fork, or fail on one rank, in no good order."""

from __future__ import annotations

import pytest
from rank_scripts import Ended, job, needs_mpiexec, run

pytest_plugins = ["whole_jobs"]
pytest.importorskip("torch")

pytestmark = [needs_mpiexec, pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow]

__all__ = ["run"]  # for whole_jobs

BEGIN = """
    signal.alarm(90)  # torch takes its time to be imported, in several jobs at once
    import torch
    import mpicoll.horovod.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(2))
"""


@pytest.mark.parametrize("alone", ["0, 1", "0,"])
@job(
    BEGIN
    + """
    if hvd.rank() in ($alone):
        hvd.allreduce_async(torch.ones(2), name=f"of rank {hvd.rank()} alone")
    time.sleep(2.5 * hvd.rank())
    say("end")
"""
)
def test_what_no_other_rank_begins(alone: str, ended: Ended) -> None:
    """Horovod's scripts do not call shutdown, and the last backward may have no step."""
    ended.in_good_order()
    assert ended.lines == ["end", "end"]


@job(
    BEGIN
    + """
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        assert (hvd.size(), hvd.local_size()) == (2, 2) and hvd.rank() == hvd.local_rank()
        for call in hvd.allreduce, hvd.allgather_async, lambda x: hvd.join():
            try:
                call(torch.ones(1))
            except dist.ForkedError as error:
                assert "forked from a rank" in str(error)
            else:
                os._exit(6)
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    say(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""
)
def test_a_forked_child(ended: Ended) -> None:
    """As a DataLoader's workers, which ask for the rank."""
    assert ended.code == 0, ended
    assert ended.lines == ["2.0", "2.0"]


@job(
    BEGIN
    + """
    from mpicoll.horovod.torch import implementations
    def fail(*arguments):
        raise MemoryError("no room on rank 0")
    if hvd.rank() == 0:
        implementations._reduce = fail
    @hvd.elastic.run
    def train(state):
        hvd.allreduce(torch.ones(2))
    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
"""
)
def test_one_rank_that_fails_by_itself_does_not_begin_anew(ended: Ended) -> None:
    """For the other waits in the operation that it has left."""
    ended.badly("MemoryError: no room on rank 0")
