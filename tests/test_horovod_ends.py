"""Programs with the Horovod API that end with pending operations, fork, or fail on one rank."""

from __future__ import annotations

import pytest
from rank_scripts import job

pytest.importorskip("torch")

pytestmark = [pytest.mark.any_mpi, pytest.mark.waits, pytest.mark.slow]

INIT = """
    signal.alarm(90)  # several jobs import torch at the same time
    import torch
    import mpicoll.horovod.torch as hvd
    hvd.init()
    hvd.allreduce(torch.ones(2))
"""


@pytest.mark.parametrize("alone", [pytest.param("0, 1", marks=pytest.mark.nightly), "0,"])
@job(
    INIT
    + """
    if hvd.rank() in ($alone):
        hvd.allreduce_async(torch.ones(2), name=f"of rank {hvd.rank()} alone")
    time.sleep(2.5 * hvd.rank())
    say("end")
"""
)
def test_program_may_end_with_operations_that_other_ranks_do_not_submit(alone, ended):
    """Horovod's scripts do not call shutdown, and their last backward may have no step."""
    ended.in_good_order("end", "end")


@job(
    INIT
    + """
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        assert (hvd.size(), hvd.local_size()) == (2, 2) and hvd.rank() == hvd.local_rank()
        for call in hvd.allreduce, hvd.allgather_async, lambda x: hvd.join():
            assert "forked from a rank" in str(error_of(dist.ForkedError, call, torch.ones(1)))
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    say(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
"""
)
def test_operations_raise_in_a_forked_child(ended):
    """Rank and size work there, because workers of a DataLoader read them."""
    ended.printed("2.0", "2.0")


@job(
    INIT
    + """
    from mpicoll.horovod.torch import implementations
    def fail(*arguments):
        raise MemoryError("no room on rank 0")
    if hvd.rank() == 0:
        implementations._scale = fail
    @hvd.elastic.run
    def train(state):
        hvd.allreduce(torch.ones(2))
    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
"""
)
def test_elastic_run_does_not_restart_after_an_error_of_one_rank(ended):
    """The other rank waits in the failed operation."""
    ended.badly("MemoryError: no room on rank 0")
