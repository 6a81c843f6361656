"""What stands on the backend: PyTorch's own front ends, on 2 and 4 ranks.

Every rank runs every test, in the same order. The numbers to compare with come from another way of
computing: every rank can make the inputs of all ranks (``inputs.py``) and work out what they come
to, or run the model alone on the whole batch. The same tests run with Gloo, which shows that they
ask for PyTorch's behaviour and not for ours::

    TEST_MPICOLL_BACKEND=gloo mpiexec -n 2 python -m mpi4py tests/rank.py LOGS tests/pytorch
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

BACKEND = os.environ.get("TEST_MPICOLL_BACKEND", "mpicoll")

#: After which a rank that waits for the others ends the launch.
TIMEOUT = timedelta(seconds=120)

#: Whether new_group can number ranks as they are listed: from torch 2.13 on.
NUMBERS_AS_LISTED = "sort_ranks" in inspect.signature(dist.new_group).parameters

torch.set_num_threads(1)
if not hasattr(dist, "all_gather_single"):  # before torch 2.13, under these names alone
    dist.all_gather_single = dist.all_gather_into_tensor
    dist.reduce_scatter_single = dist.reduce_scatter_tensor


def pytest_configure(config):
    """What torch says of its own parts is nobody's concern here."""
    for category in "DeprecationWarning", "FutureWarning", "UserWarning":
        config.addinivalue_line("filterwarnings", f"ignore::{category}")


@dataclass(frozen=True)
class Team:
    """A group, and who is in it.

    group: the process group, or what new_group returned on a rank that is not a member.
    ranks: the global ranks, in the order of the group.
    me:    this rank's place among them; None outside.
    """

    name: str
    group: Any
    ranks: tuple[int, ...]
    me: int | None

    @property
    def size(self) -> int:
        return len(self.ranks)


def start() -> None:
    """Make the default group of all ranks."""
    if BACKEND == "mpicoll":
        dist.init_process_group("mpicoll", timeout=TIMEOUT)
        return
    world = MPI.COMM_WORLD
    folder = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{folder}/store",
        rank=world.rank,
        world_size=world.size,
        timeout=TIMEOUT,
    )


def team(name: str, ranks: Any) -> Team:
    """Make a group of those ranks; every rank calls."""
    ranks = tuple(ranks)
    as_listed = {"sort_ranks": False} if NUMBERS_AS_LISTED else {}
    group = dist.group.WORLD if name == "world" else dist.new_group(list(ranks), **as_listed)
    me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
    return Team(name, group, ranks, me)


@pytest.fixture(scope="module")
def world():
    """The group of all ranks; each module begins and ends one."""
    start()
    yield team("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def teams(world):
    """All ranks; some of them; all of them in another order."""
    n = world.size
    reordered = {4: [2, 0, 3, 1]}.get(n, list(range(n))[::-1])
    if not NUMBERS_AS_LISTED:
        reordered.sort()
    return [world, team("subset", range(1, n)), team("reordered", reordered)]


@pytest.fixture
def mpi():
    """MPI's own communicator of all ranks, which the backend does not use."""
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
    """The same random numbers on all ranks, whatever ran before."""
    torch.manual_seed(20)


def not_gloo(reason: str) -> None:
    """Leave out what Gloo cannot do."""
    if BACKEND == "gloo":
        pytest.skip(f"Gloo: {reason}")
