"""A default group with changing members: ``enable_reconfigure`` of torch 2.15."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import distributed_c10d as c10d

from mpicoll.errors import DistBackendError
from mpicoll.torch.backend import HAS_PYTHON_BACKENDS

pytestmark = pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="needs torch 2.15")


@pytest.fixture
def handles(mpi):
    """A default group without members yet. Yields the handles of all processes of the job."""
    dist.init_process_group(
        "mpicoll", init_method="mpi://", enable_reconfigure=True, timeout=timedelta(seconds=60)
    )
    yield mpi.allgather(dist._get_reconfigure_handle())
    mpi.Barrier()
    dist.destroy_process_group()


def meet(uuid, handles, **more):
    dist._reconfigure(uuid, handles, **more).wait()


def check(ranks):
    """Check that the group has these global ranks in this order, and that it works."""
    me = ranks.index(MPI.COMM_WORLD.rank)
    assert (dist.get_rank(), dist.get_world_size()) == (me, len(ranks))
    x = torch.tensor([2.0**me])
    dist.all_reduce(x)
    assert x.item() == 2.0 ** len(ranks) - 1
    y = torch.tensor([float(ranks[me])])
    dist.broadcast(y, group_src=len(ranks) - 1)
    assert y.item() == ranks[-1]


def test_calls_before_the_first_reconfigure_raise(handles):
    assert dist._supports_reconfigure()
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.barrier(async_op=True),
        lambda: dist.send(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size()),
    ):
        with pytest.raises(DistBackendError, match=r"no members; .*_reconfigure"):
            call()


def test_reconfigure_with_changing_members(handles, mpi):
    n, me = mpi.size, mpi.rank
    meet(1, handles)
    check(list(range(n)))
    if me != 1:  # all ranks except rank 1
        rest = [rank for rank in range(n) if rank != 1]
        meet(2, [handles[rank] for rank in rest])
        check(rest)
    meet(3 + me, [handles[me]])
    check([me])
    meet(100, handles[::-1])
    check(list(range(n))[::-1])
    meet(101, set(handles))
    check(list(range(n)))


def test_reconfigure_after_abort(handles, mpi):
    meet(1, handles)
    called = []
    group = c10d._get_default_group()
    group.register_abort_hook(0, lambda: called.append("aborted"))
    group.abort()
    assert called == ["aborted"]
    assert (
        group._get_backend(torch.device("cpu")).get_error()
        == torch._C._distributed_c10d.ErrorType.SUCCESS
    )
    with pytest.raises(DistBackendError, match="no members"):
        dist.all_reduce(torch.ones(1))
    meet(2, handles)
    check(list(range(mpi.size)))


def test_set_timeout_applies_to_later_groups(handles):
    meet(1, handles)
    c10d._get_default_group().set_timeout(timedelta(seconds=33))
    meet(2, handles)
    assert c10d._get_default_group().core.timeout == 33
