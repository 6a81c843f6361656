"""Tests of the PyTorch backend, through torch.distributed and libraries, on 2 and 4 ranks.

Every rank runs every test, in the same order. Expected values are computed without communication:
every rank can create the inputs of all ranks (``inputs.py``), or train the model alone on the whole
batch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh

import mpicoll.horovod.torch as hvd

sys.path.append(str(Path(__file__).parents[1] / "mpi"))
from driver import Team

#: Timeout of the default group. It ends a run in which a rank is missing.
TIMEOUT = timedelta(seconds=120)

#: True if new_group can keep the order of its list: torch 2.13 or newer.
NUMBERS_AS_LISTED = "sort_ranks" in inspect.signature(dist.new_group).parameters

needs_2_ranks = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks")

torch.set_num_threads(1)
if os.environ.get("TEST_MPICOLL_TENSORS") == "cuda":  # set by tests/gpu/run.py
    if "EMULATED_GPU_CACHE" in os.environ:
        sys.path.append(str(Path(__file__).parents[1] / "emulated_gpu"))
        importlib.import_module("torch_kernels")
    torch.set_default_device(f"cuda:{MPI.COMM_WORLD.rank % torch.cuda.device_count()}")
if not hasattr(dist, "all_gather_single"):  # before torch 2.13, which has only the older names
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor


def pytest_configure(config):
    """Ignore warnings that torch raises about its own code."""
    for category in "DeprecationWarning", "FutureWarning", "UserWarning":
        config.addinivalue_line("filterwarnings", f"ignore::{category}")


def start() -> None:
    """Create the default group of all ranks."""
    dist.init_process_group("mpicoll", timeout=TIMEOUT)


def team(name: str, ranks: Any) -> Team:
    """Create a group of these ranks. All ranks must call this."""
    ranks = tuple(ranks)
    as_listed = {"sort_ranks": False} if NUMBERS_AS_LISTED else {}
    group = dist.group.WORLD if name == "world" else dist.new_group(list(ranks), **as_listed)
    me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
    return Team(name, group, ranks, me)


@pytest.fixture(scope="module")
def world():
    """The default group, created once per module."""
    start()
    yield team("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def teams(world):
    """Three groups: all ranks, a subset, and all ranks in another order."""
    n = world.size
    reordered = {4: [2, 0, 3, 1]}.get(n, list(range(n))[::-1])
    if not NUMBERS_AS_LISTED:
        reordered.sort()
    return [world, team("subset", range(1, n)), team("reordered", reordered)]


@pytest.fixture(scope="module")
def mesh(world):
    """A one-dimensional mesh of all ranks."""
    return init_device_mesh("cpu", (world.size,))


@pytest.fixture(scope="module")
def grid(world):
    """A two-dimensional mesh of all ranks, with two columns."""
    return init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("rows", "columns"))


@pytest.fixture(scope="module")
def horovod():
    """Horovod on all ranks, initialized once per module."""
    hvd.init()
    yield
    hvd.shutdown()


def members(teams: list[Team], least: int = 1) -> list[Team]:
    """Return the groups of at least ``least`` ranks that this rank is a member of."""
    return [team for team in teams if team.me is not None and team.size >= least]


@pytest.fixture
def mpi():
    """MPI_COMM_WORLD, which the backend does not use."""
    return MPI.COMM_WORLD


@pytest.fixture
def folder(mpi):
    """An empty folder, the same on all ranks."""
    path = Path(mpi.bcast(tempfile.mkdtemp() if mpi.rank == 0 else None))
    yield path
    mpi.Barrier()
    if mpi.rank == 0:
        shutil.rmtree(path)


@pytest.fixture(autouse=True)
def seed():
    """Seed torch equally on all ranks before each test."""
    torch.manual_seed(20)
