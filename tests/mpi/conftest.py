"""The groups that the tests on ranks call in.

Every rank runs every test, in the same order. The default group is made for each module that asks
for it, so that other modules may make and end their own.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest
from mpi4py import MPI

import mpicoll as dist

# Hundreds of tests make a mismatch, and each writes a flight record.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")
os.environ.setdefault(
    "TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/mpicoll-tests-{os.getuid()}/rank_"
)

#: Seconds after which a rank that waits for the others ends the launch.
TIMEOUT = 60


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


@pytest.fixture(scope="module")
def world():
    """The group of all ranks."""
    dist.init_process_group(timeout=TIMEOUT)
    yield team("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def teams(world):
    """All ranks; some of them; all of them in another order."""
    n = world.size
    subset = {1: [0], 2: [1], 3: [0, 2]}.get(n, list(range(1, n)))
    reordered = {3: [1, 2, 0], 4: [2, 0, 3, 1]}.get(n, list(range(n))[::-1])
    return [world, team("subset", subset), team("reordered", reordered)]


def team(name: str, ranks: Any) -> Team:
    """Makes a group of those ranks; every rank calls."""
    ranks = tuple(ranks)
    group = dist.group.WORLD if name == "world" else dist.new_group(list(ranks), sort_ranks=False)
    me = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else None
    return Team(name, group, ranks, me)


@pytest.fixture
def mpi():
    """MPI's own communicator of all ranks, which mpicoll does not use."""
    return MPI.COMM_WORLD
