"""Groups that the tests call in.

Every rank runs every test, in the same order. The default group is created once per module, so that
modules can also create and destroy their own.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Team, team
from mpi4py import MPI

import mpicoll as dist
from mpicoll.failures import consistency
from mpicoll.kernels import library
from mpicoll.routes import registry

# Hundreds of tests cause a mismatch, and each mismatch writes a flight record.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "100")
os.environ.setdefault(
    "TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.gettempdir()}/mpicoll-tests-{os.getuid()}/rank_"
)

#: Timeout of the default group, in seconds. It ends a run in which a rank is missing.
TIMEOUT = 60

needs_2_ranks = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="needs 2 ranks")
needs_shared_memory = pytest.mark.skipif(
    library.kernels is None or not hasattr(os, "memfd_create"), reason="needs the C library, Linux"
)
on_2_ranks = pytest.mark.skipif(MPI.COMM_WORLD.size != 2, reason="runs on 2 ranks only")


@pytest.fixture(scope="module")
def world():
    dist.init_process_group(timeout=TIMEOUT)
    yield team("world", range(dist.get_world_size()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def teams(world):
    """Three groups: all ranks, a subset, and all ranks in another order."""
    n = world.size
    subset = {1: [0], 2: [1], 3: [0, 2]}.get(n, list(range(1, n)))
    reordered = {3: [1, 2, 0], 4: [2, 0, 3, 1]}.get(n, list(range(n))[::-1])
    return [world, team("subset", subset), team("reordered", reordered)]


def members(teams: list[Team], least: int = 1) -> list[Team]:
    """Return the groups of at least ``least`` ranks that this rank is a member of."""
    return [team for team in teams if team.me is not None and team.size >= least]


@pytest.fixture
def new_team(world):
    """Create groups that are destroyed after the test: ``new_team(name, ranks=all ranks)``."""
    made = []

    def create(name: str, ranks: Iterable[int] = range(world.size), **options: Any) -> Team:
        made.append(team(name, ranks, **options))
        return made[-1]

    yield create
    for one in reversed(made):
        if one.me is not None and not one.group.closed:
            dist.destroy_process_group(one.group)


def check_usable(group: Any = None) -> None:
    """Check that the ranks of a group make the same calls and get the right sum."""
    x = np.ones(3)
    dist.all_reduce(x, group=group)
    assert (x == dist.get_world_size(group)).all()


def pass_first_calls(group: Any) -> None:
    """Make a group's first calls, which the ranks compare by messages, and one stride more."""
    for _ in range(2 * consistency.FIRST + 2):
        dist.barrier(group)


def mapped_segments() -> int:
    """Return the number of mpicoll's shared segments in the memory of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:mpicoll")


def watch_routes(patch: pytest.MonkeyPatch, may_build: Callable[[Any, Any], bool]) -> list[str]:
    """Record the names of host routes that are built, and check ``may_build(route, kind)``."""
    built: list[str] = []
    for name, route in registry.HOST.items():

        def build(kind: Any, route: Any = route) -> Any:
            assert may_build(route, kind), (route.name, kind)
            built.append(route.name)
            return route.build(kind)

        patch.setitem(registry.HOST, name, route._replace(build=build))
    return built


def run_threads(*functions: Callable[[], object]) -> None:
    """Run each function in its own thread, and wait for all of them."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def mpi():
    """MPI_COMM_WORLD, which mpicoll does not use."""
    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")
