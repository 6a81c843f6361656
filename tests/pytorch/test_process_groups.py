"""Process groups: meshes, destruction, re-initialization."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from conftest import start
from inputs import equal

from mpicoll.torch.backend import HAS_PYTHON_BACKENDS


def sum_of_ranks(group):
    """Sum the members' global ranks over the group."""
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return int(value)


def test_mesh_of_two_dimensions(world, grid):
    row, column = divmod(world.me, 2)
    assert tuple(grid.get_coordinate()) == (row, column)
    assert sum_of_ranks(grid.get_group("columns")) == 4 * row + 1
    assert sum_of_ranks(grid.get_group("rows")) == sum(range(column, world.size, 2))
    assert sum_of_ranks(grid["columns"].get_group()) == 4 * row + 1
    assert sum_of_ranks(grid._flatten("flat").get_group()) == sum(range(world.size))


# From here on each test creates its own default group; the module's group is destroyed first.


@pytest.fixture
def nothing(world):
    """Destroy the module's default group, and create it again after the test."""
    dist.destroy_process_group()
    yield
    start()


def test_repeated_initialization(nothing, mpi):
    for _ in range(5):
        assert not dist.is_initialized()
        start()
        assert dist.get_rank() == mpi.rank
        group = dist.new_group([0])
        assert sum_of_ranks(None) == sum(range(mpi.size))
        if mpi.rank == 0:
            assert sum_of_ranks(group) == 0
        dist.destroy_process_group()
    with pytest.raises(ValueError):
        dist.all_reduce(torch.ones(1))


def test_only_members_call_new_group_with_local_synchronization(nothing, mpi):
    """torch derives the name from the number of groups that the members belong to."""
    start()
    for _ in range(3):
        for half in (range(mpi.size // 2), range(mpi.size // 2, mpi.size)):
            ranks = list(half)
            if mpi.rank in ranks:
                group = dist.new_group(ranks, use_local_synchronization=True)
                assert sum_of_ranks(group) == sum(ranks)
    dist.barrier()
    dist.destroy_process_group()


def test_destroy_waits_for_pending_calls(nothing, mpi):
    start()
    values = [torch.full((5000,), float(i)) for i in range(20)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    dist.destroy_process_group()
    for i, (work, value) in enumerate(zip(works, values, strict=True)):
        work.wait()
        equal(value, torch.full((5000,), float(i * mpi.size)))


def test_shutdown_and_abort_of_groups(nothing, mpi):
    start()
    assert sum_of_ranks(None) == sum(range(mpi.size))
    other = dist.new_group()
    assert sum_of_ranks(other) == sum(range(mpi.size))
    other.shutdown()
    assert sum_of_ranks(None) == sum(range(mpi.size))
    mpi.Barrier()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    start()
    assert sum_of_ranks(None) == sum(range(mpi.size))
    dist.destroy_process_group()


def test_rank_and_world_size_must_agree_with_mpi(nothing, mpi):
    wrong = {"world_size": mpi.size + 1, "rank": mpi.rank}
    with pytest.raises((ValueError, RuntimeError)):
        dist.init_process_group("mpicoll", store=dist.HashStore(), **wrong)
    assert not dist.is_initialized()
    # Groups of one rank are valid, as are values that agree with MPI.
    dist.init_process_group("mpicoll", store=dist.HashStore(), world_size=1, rank=0)
    assert sum_of_ranks(None) == 0
    dist.destroy_process_group()
    dist.init_process_group("mpicoll", timeout=timedelta(seconds=60))
    assert (dist.get_rank(), dist.get_world_size()) == (mpi.rank, mpi.size)
    dist.destroy_process_group()


@pytest.mark.skipif(HAS_PYTHON_BACKENDS, reason="torch 2.15 supports most of these features")
def test_unsupported_features_of_older_torch_are_rejected(world):
    """torch checks the supports_ properties before it uses a feature."""
    group = dist.distributed_c10d._get_default_group()
    asked = {name for name in dir(group) if name.lstrip("_").startswith("supports_")}
    offered = {"supports_window", "supports_splitting"}
    assert not any(getattr(group, name) for name in asked - offered)
    for kind in "pre", "post", "abort":
        name = f"register_{kind}_hook"
        with pytest.raises(
            RuntimeError, match=f"{name}: not supported by torch .* for Python backends"
        ):
            getattr(group, name)(1, print)
